"""Entry point of `python -m llm_worker_rbee` and of the `llm-worker-rbee` command.

Signals are handled before anything else is imported: importing the commands takes a second. SIGTERM or Ctrl-C ends a
`serve` that does not listen yet with status 0, as it does later (`server.serve.Signals`). Its engine is started
first, to import what it needs at the same time. SIGTERM ends `bench` as Ctrl-C does.
"""

import gc
import os
import signal
import sys
from typing import Any

RETRY_S = 0.01
COMMAND = next((arg for arg in sys.argv[1:] if not arg.startswith("-")), None)


def _retry_interrupt(unraisable: Any) -> None:
    """Raise a `KeyboardInterrupt` again, a little later, that Python dropped because it came inside a destructor."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, RETRY_S)
    else:
        sys.__unraisablehook__(unraisable)


def _handle_signals() -> None:
    if COMMAND == "serve":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os._exit(0))
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # nothing can be restarted yet
    elif COMMAND == "bench":
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # servers that it started end, too
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # of the timer above
    sys.unraisablehook = _retry_interrupt


gc.disable()  # until the command is imported: no module is garbage
_handle_signals()
try:
    if COMMAND == "serve":
        from .token_engine.spawn import spawn_ahead

        spawn_ahead(sys.argv[1:])
    from .cli import main
except KeyboardInterrupt:  # Ctrl-C during the imports
    sys.exit(130)

__all__ = ["main"]

if __name__ == "__main__":
    main()
