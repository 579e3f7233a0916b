"""What this machine can do at best, measured: bytes read a second for several sizes, float32 operations a second.

A benchmark states the bytes and operations that its answer needs; the larger of the two times is its limit, and `% of
limit` is that over what was measured. Small data lives in a cache, so bandwidth is taken at the size at hand.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from .. import machine
from ..backends import Backend

SIZES = tuple(1 << shift for shift in (18, 20, 22, 24, 26, 28, 30))  # 256 KiB to 1 GiB
LEAST_S = 0.03  # time given to each size
MATRIX = 768
LITTLE = 8  # the largest buffer is at most this part of the memory that is free


class Work(NamedTuple):
    """What one call must at least do."""

    bytes: float = 0.0  # read and written
    operations: float = 0.0  # multiplications and additions
    resident: float | None = None  # the size of the data touched, where parts of it are read more than once


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured rates, with the number of threads they hold for."""

    threads: int
    bandwidth: tuple[tuple[int, float], ...]  # (size of the data, bytes a second)
    operations: float  # a second

    def bandwidth_at(self, size: float) -> float:
        """Bytes a second for data of this size: straight lines between the measured ones, on a scale of sizes."""
        sizes, rates = zip(*self.bandwidth, strict=True)
        return float(np.interp(np.log2(max(size, 1.0)), np.log2(sizes), rates))

    @property
    def memory_bandwidth(self) -> float:
        """Of the largest size: what memory itself gives."""
        return self.bandwidth[-1][1]

    def seconds(self, work: Work) -> float:
        """The least time for this work."""
        size = work.bytes if work.resident is None else work.resident
        return max(work.bytes / self.bandwidth_at(size), work.operations / self.operations)

    def bound_by(self, work: Work) -> str:
        """Which of the two is the limit."""
        size = work.bytes if work.resident is None else work.resident
        return "memory" if work.bytes / self.bandwidth_at(size) >= work.operations / self.operations else "arithmetic"

    def as_json(self) -> dict[str, Any]:
        """For `details` of a run."""
        return {
            "threads": self.threads,
            "bandwidth": [{"bytes": size, "bytes_per_second": rate} for size, rate in self.bandwidth],
            "operations_per_second": self.operations,
        }


def threads_of(ops: Backend) -> int:
    """How many threads a backend computes with: its own, or those of the matrix library."""
    return ops.threads or library_threads()


def library_threads() -> int:
    """How many threads the matrix library uses: what the environment says, or all cores."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        if os.environ.get(name, "").isdigit():
            return max(1, int(os.environ[name]))
    return machine.usable_cores()


@cache
def measured(threads: int) -> Limits:
    """The limits for so many threads; the first call takes about a second, later ones nothing."""
    available = machine.memory()[1] or SIZES[-1] * LITTLE
    buffer = np.ones(min(SIZES[-1], available // LITTLE) // 4, np.float32)
    with ThreadPoolExecutor(threads) as pool:
        ladder = tuple(
            (size, _read_rate(pool, buffer[: size // 4], threads)) for size in SIZES if size <= buffer.nbytes
        )
        return Limits(threads, ladder, _operation_rate(pool, threads))


def _read_rate(pool: ThreadPoolExecutor, data: Any, threads: int) -> float:
    parts = np.array_split(data, threads)
    once: Callable[[], object] = (lambda: np.max(data)) if threads == 1 else lambda: list(pool.map(np.max, parts))
    return float(data.nbytes) / _best(once)


def _operation_rate(pool: ThreadPoolExecutor, threads: int) -> float:
    """Of products side by side, where the matrix library itself uses fewer threads."""
    a = np.full((MATRIX, MATRIX), 0.5, np.float32)
    products = max(1, threads // library_threads())
    once: Callable[[], object] = lambda: list(pool.map(lambda _: a @ a, range(products)))  # noqa: E731
    return products * 2 * MATRIX**3 / _best(once if products > 1 else lambda: a @ a)


def _best(function: Callable[[], object]) -> float:
    """The shortest of many calls: what the machine can do when nothing disturbs it."""
    best, end = float("inf"), time.perf_counter() + LEAST_S
    function()
    for count in range(1000):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > end and count >= 2:
            break
    return best
