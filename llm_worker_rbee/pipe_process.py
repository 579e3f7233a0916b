"""Child programs: the command of one that is a part of this package, requests over pipes with a deadline, and how it
ended. Imports nothing of the package: a child is started before what both processes import."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import IO, TypeVar

T = TypeVar("T")
ROOT = str(Path(__file__).parents[1])
PIPE_BYTES = 1 << 20  # of the system's buffer: a large request passes in few pieces
READ_BYTES = 1 << 20
STOP_TIMEOUT_S = 0.2  # for a process to end by itself once its pipes are closed


def package_command(program: str, *arguments: object, ends_with_parent: bool = True) -> list[str]:
    """Return a command that runs a program which imports this package, and not the current folder. With
    `ends_with_parent` it ends with this process, also while it imports."""
    watch = f"from {__package__}.machine import exit_with_parent; exit_with_parent({os.getpid()})\n"
    run = f"import sys; sys.path.insert(0, {ROOT!r})\n{watch if ends_with_parent else ''}{program}"
    return [sys.executable, "-P", "-c", run, *map(str, arguments)]


def describe_exit(status: int) -> str:
    """Return how a process ended, from its return code: `was killed by SIGSEGV`, `ended with status 70`."""
    names = {-number.value: number.name for number in signal.Signals}
    return f"ended with status {status}" if status >= 0 else f"was killed by {names.get(status, f'signal {-status}')}"


class ProgramError(OSError):
    """A child program could not be started, or has not answered and ended; `status` is None where it was killed."""

    def __init__(self, how: str, status: int | None = None) -> None:
        super().__init__(how)
        self.status = status


class PipeProcess:
    """A child program that answers requests over its standard input and output, one at a time. No other child inherits
    the pipes, so the program reads an end of file when its parent ends. Its own session keeps Ctrl-C away."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        errors: IO[bytes] | None = None,
        *,
        inherits: bool = True,
    ) -> None:
        """`environment` are variables beside this process's own, if it inherits; `errors` gets its standard error."""
        env = {**(os.environ if inherits else {}), **(environment or {})}
        try:
            self._process = Popen(
                command, bufsize=0, stdin=PIPE, stdout=PIPE, stderr=errors or DEVNULL, env=env, start_new_session=True
            )
        except OSError as error:
            raise ProgramError(f"could not be started ({error.strerror})") from error
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None  # noqa: PT018
        self._stdin, self._stdout = stdin, stdout
        for end in (self._stdin, self._stdout):
            os.set_blocking(end.fileno(), False)
            with contextlib.suppress(OSError, AttributeError):  # Linux only, and limited for a user
                fcntl.fcntl(end.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._unread = bytearray()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status of a process that has ended, else None."""
        return self._process.poll()

    def ask(self, request: Sequence[bytes], read: Callable[[float], T], timeout_s: float) -> T:
        """Send a request and return what `read` takes of the reply; it gets the deadline. A process that does not
        answer is stopped."""
        deadline = time.monotonic() + timeout_s
        try:
            for part in request:
                self.write(part, deadline)
            return read(deadline)
        except OSError as error:
            status = self.stop()
            raise ProgramError("did not answer in time" if status is None else describe_exit(status), status) from error
        except BaseException:  # Ctrl-C: this reply must not be taken for the reply to the next request
            self.stop()
            raise

    def write(self, data: bytes, deadline: float) -> None:
        """Send bytes; raise `OSError` (`TimeoutError` past the deadline, on the monotonic clock) if it cannot."""
        view = memoryview(data)
        while view:
            _wait(self._stdin.fileno(), select.POLLOUT, deadline)
            view = view[os.write(self._stdin.fileno(), view[:PIPE_BYTES]) :]

    def read_line(self, deadline: float, max_bytes: int) -> bytes:
        """Return the next line; raise as `write` does, and for a line that is too long."""
        start = 0
        while (end := self._unread.find(b"\n", start)) < 0:
            if (start := len(self._unread)) > max_bytes:
                raise OSError(f"a reply of more than {max_bytes} bytes")
            self._receive(deadline)
        return bytes(self.read(end + 1, deadline))

    def read(self, size: int, deadline: float) -> bytearray:
        """Return so many bytes; raise as `write` does."""
        while len(self._unread) < size:
            self._receive(deadline)
        data, self._unread = self._unread[:size], self._unread[size:]
        return data

    def _receive(self, deadline: float) -> None:
        _wait(self._stdout.fileno(), select.POLLIN, deadline)
        if not (data := os.read(self._stdout.fileno(), READ_BYTES)):
            raise BrokenPipeError("the process closed its output")
        self._unread += data

    def kill(self) -> None:
        """End it with all that it has started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def stop(self) -> int | None:
        """Close the pipes and return the exit status; None of a process that had to be killed for it."""
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except TimeoutExpired:
            self.kill()
            self._process.wait()
            return None


def _wait(descriptor: int, events: int, deadline: float) -> None:
    """Wait until a pipe is ready or its other end is closed; unlike `select` for any file descriptor."""
    poll = select.poll()
    poll.register(descriptor, events)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError("no answer in time")
