"""Child processes of benchmarks, and the memory, CPU time and cached files of processes.

A child prints one JSON object a line: first a greeting (its version), then one reply for each line that it is sent.
`{"error": ...}` reports a failure. Standard error goes to a file, whose last line explains an early end. Every wait is
bounded, every failure one line. The programs on the other side are peers/library_child.py, load_child.py, and modules
run as programs: e2e, peers.programs, server_process. Linux has all of it in /proc; elsewhere only the own peak memory
is known.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llm_worker_rbee.errors import WorkerError

PACKAGE_ROOT = Path(__file__).parents[1]
BUSY_WINDOW_S = 0.5
THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


class ChildFailedError(WorkerError):
    """A child process that crashed, hung or did not follow the protocol."""

    code = "PEER_FAILED"


@dataclass(eq=False)
class ChildProcess:
    """A child that stays alive between requests, so that its model is loaded once."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str] | None = None
    timeout_s: float = 600.0
    cwd: str | None = None
    _process: subprocess.Popen[bytes] | None = None
    _buffer: bytes = b""

    def start(self, key: str = "version") -> dict[str, Any]:
        """Start the process and return its greeting, which must have `key`."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=self.env,
                cwd=self.cwd,
                start_new_session=True,  # Ctrl-C is for the benchmark, which ends its children
            )
        except OSError as error:
            self._errors.close()
            raise ChildFailedError(f"{self.name} cannot be started: {error.strerror}: {self.command[0]}") from error
        return self._receive(key)

    def request(self, message: Mapping[str, Any], key: str) -> dict[str, Any]:
        """Send a line and return the reply, which must have `key`."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the reply, or its absence, says why
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
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
                status = self._process.wait(self.timeout_s)
                self._errors.seek(0)
                raise ChildFailedError(describe_exit(self.name, status, self._errors.read()))
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def describe_exit(name: str, status: int, stderr: bytes, max_lines: int = 1) -> str:
    """Return how a process ended, with the last lines of its standard error."""
    by_signal = {-s: s.name for s in signal.Signals}.get(status, f"signal {-status}")
    how = f"ended with exit status {status}" if status >= 0 else f"was ended by {by_signal}"
    if status == -signal.SIGILL:
        how += " (an instruction that this CPU lacks: build it for this machine)"
    return f"{name} {how}{last_lines(stderr, max_lines)}"


def last_lines(stderr: bytes, max_lines: int) -> str:
    """Return `: LINE | LINE` of the last lines; empty if there are none."""
    lines = stderr.decode(errors="replace").strip().splitlines()[-max_lines:]
    return f": {' | '.join(line.strip()[:300] for line in lines)}" if lines else ""


def package_environment(threads: int | None = None) -> dict[str, str]:
    """Return this process's environment with this package importable and, if given, the thread count of libraries."""
    paths = (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH"))
    counts = {} if threads is None else dict.fromkeys(THREAD_VARIABLES, str(threads))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **counts}


def library_environment(threads: int) -> dict[str, str]:
    """Return the environment of another interpreter: without our import path, with the thread count of libraries."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | dict.fromkeys(THREAD_VARIABLES, str(threads))


def memory_of(pid: int | str) -> Mapping[str, int]:
    """Return bytes in memory now (`VmRSS`) and at most (`VmHWM`); empty where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines if line.startswith(("VmRSS:", "VmHWM:")))
    return {name.rstrip(":"): int(count) * 1024 for name, count, *_ in pairs}


def children_of(pid: int) -> list[int]:
    """Return the child processes of a process; empty where the system does not tell."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for children in lists for child in children.read_text().split()]


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU time of all threads of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def busy_cores(seconds: float = BUSY_WINDOW_S) -> float | None:
    """Return how many cores of the machine are busy, by all processes, while this one sleeps for so long."""
    before = _busy_ticks()
    start = time.monotonic()
    time.sleep(seconds)
    after, passed = _busy_ticks(), time.monotonic() - start
    if before is None or after is None:
        return None
    return round((after - before) / os.sysconf("SC_CLK_TCK") / passed, 2)


def _busy_ticks() -> int | None:
    """Return the time that all cores together were not idle; stolen time counts as busy."""
    try:
        user, nice, system, _, _, *others = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    except (OSError, ValueError):
        return None
    return user + nice + system + sum(others[:3])  # the rest, of guests, is part of user and nice


def resident_memory() -> int | None:
    """Return the bytes of this process in memory now."""
    return memory_of("self").get("VmRSS")


def peak_memory() -> int:
    """Return the largest memory use of this process, ever or since `reset_peak_memory`."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return memory_of("self").get("VmHWM") or (peak if sys.platform == "darwin" else peak * 1024)


def reset_peak_memory() -> bool:
    """Restart the peak from the present use; return False where the system cannot."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


def can_drop_pages() -> bool:
    """Return whether files can be dropped from the page cache here."""
    return hasattr(os, "posix_fadvise")


def drop_pages(files: list[Path]) -> None:
    """Ask the system to drop the cached pages of these files; needs no privileges."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                os.fsync(handle)  # dirty pages cannot be dropped
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def cached_fraction(files: list[Path]) -> float | None:
    """Return which part of these files is in the page cache, 0 to 1."""
    total = sum(file.stat().st_size for file in files)
    sizes = [_cached_bytes(file) for file in files]
    return None if not total or None in sizes else sum(filter(None, sizes)) / total


def _cached_bytes(file: Path) -> int | None:
    size = file.stat().st_size
    if not size:
        return 0
    with file.open("rb") as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages: np.ndarray[tuple[int], np.dtype[np.uint8]] = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        mincore = getattr(ctypes.CDLL(None), "mincore", None)
        failed = mincore is None or mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        )
        del view  # or the mapping cannot be closed
    return None if failed else min(size, int((pages & 1).sum()) * mmap.PAGESIZE)
