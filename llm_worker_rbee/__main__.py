"""`python -m llm_worker_rbee`, and the `llm-worker-rbee` command: both end up in cli."""

import sys

try:
    from .cli import main
except KeyboardInterrupt:  # pressed while Python was still importing
    sys.exit(130)

__all__ = ["main"]

if __name__ == "__main__":
    main()
