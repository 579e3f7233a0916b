"""Entry point of `python -m llm_worker_rbee` and of the `llm-worker-rbee` command."""

import sys

try:
    from .cli import main
except KeyboardInterrupt:  # Ctrl-C during the imports
    sys.exit(130)

__all__ = ["main"]

if __name__ == "__main__":
    main()
