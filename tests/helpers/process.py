"""Child processes of tests. A child inherits ignored signals: under `nohup` or in a background shell it would never see
SIGINT or SIGHUP, so `spawn` gives it the default handlers."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def restore_signals() -> None:
    """Install the default handlers; pass it as `preexec_fn` where `spawn` does not fit."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def spawn(command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
    """Start a child process with default signal handlers; `options` are those of `subprocess.Popen`."""
    return subprocess.Popen(command, preexec_fn=restore_signals, **options)


def is_alive(pid: int) -> bool:
    """Return whether there is such a process, other than one that waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
