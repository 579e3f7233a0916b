"""Offload of CPU-heavy request work from the event loop: large JSON bodies, templates, tokenizing, large replies.

Small and large work have threads of their own, so small work never waits behind large work. Queued work is bounded by
its bytes; work whose awaiting task is cancelled before it starts is never done.
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
LARGE_BYTES = 64 << 10
MIN_COUNTED_BYTES = 4 << 10  # each piece of work counts as at least this
MAX_QUEUED_BYTES = 32 << 20  # of large and of small work each; one piece alone may be larger
EMA_WEIGHT = 0.3
MAX_RETRY_S = 60


class BoundedExecutor:
    """A thread pool whose queue is bounded by bytes."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_bytes = 0
        self._seconds_per_byte = 0.0
        self._is_closed = False

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of work on `size` bytes; raise if the queue is full."""
        if self._is_closed:
            raise ShuttingDownError("the worker is shutting down")
        size = max(size, MIN_COUNTED_BYTES)
        if self._num_bytes and self._num_bytes + size > MAX_QUEUED_BYTES:
            retry = max(1, min(MAX_RETRY_S, math.ceil(self._num_bytes * self._seconds_per_byte)))
            raise QueueFullError(f"{self._num_bytes} bytes of other requests wait to be parsed or tokenized", retry)
        self._num_bytes += size
        try:
            seconds, result = await asyncio.get_running_loop().run_in_executor(self._threads, _timed, work)
        finally:
            self._num_bytes -= size
        self._seconds_per_byte += EMA_WEIGHT * (seconds / size - self._seconds_per_byte)
        return result

    def close(self) -> None:
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)


class OffloadPool:
    """Two bounded executors: for small and for large work."""

    def __init__(self) -> None:
        self._small, self._large = BoundedExecutor("small", 2), BoundedExecutor("large", 1)

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of work on `size` bytes."""
        return await (self._large if size > LARGE_BYTES else self._small).run(size, work)

    async def parse_body(self, body: bytes, parse: Callable[[bytes], T]) -> T:
        """Return `parse(body)`; a small body is parsed in the event loop."""
        if len(body) <= LARGE_BYTES:
            return parse(body)
        return await self._large.run(len(body), lambda: parse(body))

    async def encode_reply(self, size: int, encode: Callable[[], bytes]) -> bytes:
        """Return a reply of about `size` bytes. It is never refused: its tokens are computed already."""
        if size <= LARGE_BYTES:
            return encode()
        return await asyncio.to_thread(encode)

    def close(self) -> None:
        """Take no new work; drop what is queued."""
        self._small.close()
        self._large.close()


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result
