"""Child processes of benchmarks: one protocol of JSON lines, every wait bounded, every failure one line.

A child prints one JSON object a line: first a greeting (its version), then one reply for each line that it is sent.
`{"error": ...}` reports a failure. Standard error goes to a file, whose last line explains an early end. The programs
on the other side are library_child.py, peers/worker_child.py, load_child.py and e2e.py.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import WorkerError

PACKAGE_ROOT = Path(__file__).parents[2]
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


class ChildFailedError(WorkerError):
    """A child process that crashed, hung or did not follow the protocol."""

    code = "PEER_FAILED"


class ChildProcess:
    """A child that stays alive between requests, so that its model is loaded once."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        cwd: str | None = None,
    ) -> None:
        self.name, self.timeout_s = name, timeout_s
        self._command, self._env, self._cwd = list(command), None if env is None else dict(env), cwd
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def start(self, key: str = "version") -> dict[str, Any]:
        """Start the process and return its greeting, which must have `key`."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=self._env,
                cwd=self._cwd, start_new_session=True,  # Ctrl-C is for the benchmark, which ends its children
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            raise ChildFailedError(f"{self.name} cannot be started: {error.strerror}: {self._command[0]}") from error
        return self._receive(key)

    def request(self, message: Mapping[str, Any], key: str) -> dict[str, Any]:
        """Send a line and return the reply, which must have `key`."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # the reply, or its absence, says why
        return self._receive(key)

    def close(self) -> None:
        """Kill the process; it has nothing to save."""
        if self._process is None:
            return
        self._process.kill()
        self._process.communicate()
        self._errors.close()
        self._process = None

    def _receive(self, key: str) -> dict[str, Any]:
        line = self._read_line()
        try:
            reply: dict[str, Any] = json.loads(line)
            error = reply.get("error")
            if error is None:
                reply[key]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ChildFailedError(f"{self.name} answered {line[:200]!r}, which has no {key}") from None
        if error is not None:
            raise ChildFailedError(f"{self.name}: {error}")
        return reply

    def _read_line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        deadline, source = time.monotonic() + self.timeout_s, self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([source], [], [], remaining)[0]:
                raise ChildFailedError(f"{self.name} did not answer within {self.timeout_s:g} s")
            part = os.read(source, 1 << 16)
            if not part:
                raise ChildFailedError(self._describe_end())
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _describe_end(self) -> str:
        assert self._process is not None
        status = self._process.wait(self.timeout_s)
        self._errors.seek(0)
        return describe_exit(self.name, status, self._errors.read())


def describe_exit(name: str, status: int, stderr: bytes) -> str:
    """Return how a process ended, with the last line of its standard error."""
    if status < 0:
        known = {s.value: s.name for s in signal.Signals}
        how = f"was ended by {known.get(-status, f'signal {-status}')}"
        if status == -signal.SIGILL:
            how += " (an instruction that this CPU lacks: build it for this machine)"
    else:
        how = f"ended with exit status {status}"
    lines = stderr.decode(errors="replace").strip().splitlines()
    return f"{name} {how}" + (f": {lines[-1][:300]}" if lines else "")


def package_environment(threads: int | None = None) -> dict[str, str]:
    """Return this process's environment with this package importable and, if given, the thread count of libraries."""
    paths = (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH"))
    counts = {} if threads is None else dict.fromkeys(THREAD_VARIABLES, str(threads))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **counts}


def library_environment(threads: int) -> dict[str, str]:
    """Return the environment of another interpreter: without our import path, with the thread count of libraries."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | dict.fromkeys(THREAD_VARIABLES, str(threads))
