"""Work that would hold the event loop up, in threads of its own: reading large bodies, tokenizing, large replies.

Small work has its own threads and never stands behind large work. What waits is bounded by its bytes; what is given up
before it began (its awaiting task is cancelled) is never done.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ..errors import QueueFullError, ShuttingDownError

T = TypeVar("T")
LARGE = 64 << 10  # bytes
LEAST = 4 << 10  # that a piece of work counts as
MOST_QUEUED = 32 << 20  # bytes, of large and of small work each; one piece alone may be larger
NEWEST = 0.3  # weight of the speed that was seen last
LONGEST_RETRY_S = 60


class Line:
    """Threads, and what waits for them."""

    def __init__(self, name: str, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._num_bytes = 0
        self._byte_s = 0.0
        self._is_closed = False

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Its result, in its turn."""
        if self._is_closed:
            raise ShuttingDownError("the worker is shutting down")
        size = max(size, LEAST)
        if self._num_bytes and self._num_bytes + size > MOST_QUEUED:
            retry = max(1, min(LONGEST_RETRY_S, math.ceil(self._num_bytes * self._byte_s)))
            raise QueueFullError(f"{self._num_bytes} bytes of other requests are waiting to be read", retry)
        self._num_bytes += size
        try:
            seconds, result = await asyncio.get_running_loop().run_in_executor(self._threads, _timed, work)
        finally:
            self._num_bytes -= size
        self._byte_s += NEWEST * (seconds / size - self._byte_s)
        return result

    def close(self) -> None:
        """Nothing new; what waits is given up."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)


class Desk:
    """The two lines."""

    def __init__(self) -> None:
        self._small, self._large = Line("small", 2), Line("large", 1)

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Work on so many bytes."""
        return await (self._large if size > LARGE else self._small).run(size, work)

    async def read(self, body: bytes, checked: Callable[[bytes], T]) -> T:
        """A body, checked: here where it is small."""
        if len(body) <= LARGE:
            return checked(body)
        return await self._large.run(len(body), lambda: checked(body))

    async def made(self, size: int, make: Callable[[], bytes]) -> bytes:
        """A reply of about so many bytes: here where it is small, and never refused, for its work is done."""
        if size <= LARGE:
            return make()
        return await asyncio.to_thread(make)

    def close(self) -> None:
        """Nothing new."""
        self._small.close()
        self._large.close()


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result
