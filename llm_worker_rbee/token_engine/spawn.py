"""Starting the engine's process, also ahead of its load options: `serve` starts it first, so that both processes import
what they need at the same time."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from ..pipe_process import package_command

PROGRAM = f"from {__package__}.child import main; main()"


class SpawnedProcess(NamedTuple):
    """A process that waits for its `Load` message, and the front's end of its socket."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    environment: dict[str, str]

    def kill(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()


_ahead: list[SpawnedProcess] = []


def spawn() -> SpawnedProcess:
    """Start a process."""
    own, other = socket.socketpair()
    with other:
        try:
            os.set_inheritable(other.fileno(), True)
            environment = _environment()
            process = subprocess.Popen(
                package_command(PROGRAM, other.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env=environment,
                start_new_session=True,
            )
        except BaseException:
            own.close()
            raise
    return SpawnedProcess(process, own, environment)


def spawn_ahead(arguments: Sequence[str]) -> None:
    """Start a process if these arguments of the command look like a `serve` that needs one."""
    command = next((word for word in arguments if not word.startswith("-")), None)
    if command != "serve" or {"--help", "-h", "off", "--engine-process=off"} & set(arguments):
        return
    if None in (sys.stdin, sys.stdout, sys.stderr):  # closed, as in `>&-`: the socket would take its place
        return
    refill()
    atexit.register(_discard)


def refill() -> None:
    """Start a process for the next load, unless there is one: it imports what it needs meanwhile."""
    try:
        if not _ahead:
            _ahead.append(spawn())
    except OSError:
        return  # what is wrong is reported when it is needed


def take() -> SpawnedProcess:
    """Return the process that was started ahead, if there is one with the present environment, or a new one."""
    if _ahead and _ahead[0].environment == _environment() and _ahead[0].process.poll() is None:
        return _ahead.pop()
    _discard()
    return spawn()


def _discard() -> None:
    while _ahead:
        _ahead.pop().kill()


def _environment() -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if not name.startswith("_TYPER_")}  # of help texts
    return {"OPENBLAS_NUM_THREADS": "1", **others}  # see `cli.main`
