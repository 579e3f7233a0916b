"""A child process that answers requests over its standard input and output, one at a time, within a time limit."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import time
from collections.abc import Sequence

PIPE_BYTES = 1 << 20  # of the system's buffer: a large request passes in few pieces
READ_BYTES = 1 << 20
STOP_TIMEOUT_S = 0.2  # for a process to end by itself once its pipes are closed


class PipeProcess:
    """The parent's end of it. No other child inherits the pipes, so the process reads an end of file when its parent
    ends. Its own session keeps Ctrl-C away."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)
            with contextlib.suppress(OSError, AttributeError):  # Linux only, and limited for a user
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._unread = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status of a process that has ended, else None."""
        return self._process.poll()

    def write(self, data: bytes, deadline: float) -> None:
        """Send bytes; raise `OSError` (`TimeoutError` past the deadline, on the monotonic clock) if it cannot."""
        view = memoryview(data)
        while view:
            _wait(self._stdin.fileno(), select.POLLOUT, deadline)
            view = view[os.write(self._stdin.fileno(), view[:PIPE_BYTES]) :]

    def read_line(self, deadline: float, max_bytes: int) -> bytes:
        """Return the next line; raise as `write` does, and for a line that is too long."""
        parts = [self._unread]
        total = len(self._unread)
        while b"\n" not in parts[-1]:
            if total > max_bytes:
                raise OSError(f"a reply of more than {max_bytes} bytes")
            parts.append(self._read(deadline))
            total += len(parts[-1])
        last, newline, self._unread = parts[-1].partition(b"\n")
        return b"".join([*parts[:-1], last, newline])

    def read(self, size: int, deadline: float) -> bytearray:
        """Return so many bytes; raise as `write` does."""
        data = bytearray(size)
        done = min(size, len(self._unread))
        data[:done], self._unread = self._unread[:done], self._unread[done:]
        with memoryview(data) as view:
            while done < size:
                _wait(self._stdout.fileno(), select.POLLIN, deadline)
                if not (count := os.readv(self._stdout.fileno(), [view[done:]])):
                    raise BrokenPipeError("the process closed its output")
                done += count
        return data

    def _read(self, deadline: float) -> bytes:
        _wait(self._stdout.fileno(), select.POLLIN, deadline)
        if not (data := os.read(self._stdout.fileno(), READ_BYTES)):
            raise BrokenPipeError("the process closed its output")
        return data

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> int | None:
        """Close the pipes and return the exit status; None of a process that had to be killed for it."""
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return None


def _wait(descriptor: int, events: int, deadline: float) -> None:
    """Wait until a pipe is ready or its other end is closed; unlike `select` for any file descriptor."""
    poll = select.poll()
    poll.register(descriptor, events)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError("no answer in time")
