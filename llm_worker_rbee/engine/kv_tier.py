"""The disk behind the block pool: full blocks are written behind the steps, and read back before a request is admitted.

Between steps the engine hands blocks to two threads: one writes blocks that the prefix cache holds, at the lowest
priority, the other reads blocks of waiting requests straight into free blocks of the KV cache. What was read is
published like computed blocks, so that the scheduler finds it as any other prefix. A request whose blocks are being
read is held; others go on. Whatever fails in here costs a prefix hit, never a request.

    pool.pin, pool.unpin    blocks that a thread reads from or writes to belong to no request meanwhile
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, NamedTuple

from ..backends.ops import LayerCache
from ..structured_outputs.constraint import lower_thread_priority
from .block_pool import BlockPool
from .kv_store import BlockStore, Place, TierStats
from .request import Request

WRITE_BLOCKS = 16  # of one job of the writer
MAX_PENDING = 1 << 16  # blocks that wait to be written: the tokens of each, no keys and values
READ_WAIT_S = 0.005  # of a step in which all requests wait for blocks
SPARE_BLOCKS = 4  # for each running request, which reading leaves free
FIRST_READ_RATE = 0.5e9  # bytes a second, before any is measured
READ_S = 0.002  # of a job, beside its bytes
OPEN_WAIT_S = 1.0  # after the start, for the store of an idle engine
RATE_RECOVERY = 1.25  # of the measured rate, each time that reading did not pay
logger = logging.getLogger("llm_worker_rbee.engine")


class _Written(NamedTuple):
    """A block to write."""

    block_hash: bytes
    ids: Sequence[int]
    block: int


class _Waiting(NamedTuple):
    """A request that waits for blocks, and what `read_ahead` got with it."""

    request: Request
    hashes: Sequence[bytes]
    seconds_per_token: float


class _Reading(NamedTuple):
    """Blocks that are being read, and the requests that wait for them."""

    waiting: list[_Waiting]
    hashes: list[bytes]
    blocks: list[int]
    future: Future[tuple[int, float]]  # how many of them verified, and seconds


class KVTier:
    """Moves blocks between the KV cache and a `BlockStore`. Its methods belong to the engine's thread."""

    def __init__(
        self, layers: Sequence[LayerCache], pool: BlockPool, open_store: Callable[[], BlockStore | None]
    ) -> None:
        """`open_store` is called in a thread, since it may have to read the whole model; None: there is no disk."""
        self._stats = TierStats()
        distinct = {id(layer): layer for layer in layers}.values()
        arrays = [array for layer in distinct for array in layer]
        self._memory = [(memoryview(array).cast("B"), array[0].nbytes) for array in arrays]  # and the bytes of a block
        self.block_bytes: int = sum(size for _, size in self._memory)  # in all layers
        self._pool = pool
        self._pending: OrderedDict[bytes, Sequence[int]] = OrderedDict()  # hashes to write, and their tokens
        self._writer = ThreadPoolExecutor(1, "kv-writer", initializer=lower_thread_priority)
        self._reader = ThreadPoolExecutor(1, "kv-reader")
        self._opening: Future[BlockStore | None] = self._writer.submit(open_store)
        self._open_by = time.monotonic() + OPEN_WAIT_S
        self._refreshing: Future[None] | None = None
        self._written: tuple[list[_Written], Future[int]] | None = None
        self._readings: list[_Reading] = []
        self._read_rate = FIRST_READ_RATE
        self._was_idle = False  # when `collect` was last called

    @property
    def stats(self) -> TierStats:
        """What was read and written since the engine started."""
        store = self._opening.result() if self._opening.done() and not self._opening.exception() else None
        num_evicted = 0 if store is None else store.num_evicted
        return replace(self._stats, num_waiting_blocks=len(self._pending), num_evicted_segments=num_evicted)

    @property
    def store(self) -> BlockStore | None:
        """The store, once it is open."""
        if not self._opening.done():
            return None
        if (error := self._opening.exception()) is not None:
            logger.warning("kv_dir is not used: %s", error)
            self._opening = Future()
            self._opening.set_result(None)
        return self._opening.result()

    @property
    def has_work(self) -> bool:
        """Whether blocks are read or written, or wait for it."""
        return bool(self._readings or self._written or (self._pending and not self._is_off))

    @property
    def _is_off(self) -> bool:
        return self._opening.done() and self.store is None

    def publish(self, block_hash: bytes, ids: Sequence[int]) -> None:
        """Note that the prefix cache has gained a block with these tokens."""
        if len(self._pending) < MAX_PENDING and not self._is_off:
            self._pending[block_hash] = ids

    def drop(self, hashes: Sequence[bytes]) -> None:
        """Withdraw blocks from the disk: a step with them has failed."""
        for block_hash in hashes:
            self._pending.pop(block_hash, None)
        if (store := self.store) is not None and hashes:
            for block_hash in hashes:
                self._writer.submit(store.drop, block_hash)

    def read_ahead(
        self, request: Request, hashes: Sequence[bytes], seconds_per_token: float, *, num_running: int
    ) -> None:
        """Begin to read the blocks that follow the cached prefix of a request, and hold it meanwhile; unless computing
        them is predicted to be faster. `hashes` are those that a prefix hit may cover. An engine that has just been
        started waits a moment for the store."""
        if not num_running and hashes and not self._opening.done():
            wait([self._opening], max(0.0, self._open_by - time.monotonic()))
        store, cached = self.store, len(self._pool.match(hashes))
        missing = hashes[cached:]
        if store is None or not missing:
            return
        waiting = _Waiting(request, hashes, seconds_per_token)
        for reading in self._readings:
            if missing[0] in reading.hashes:  # with the same beginning: it reads the rest itself
                reading.waiting.append(waiting)
                request.is_held = True
                return
        room = max(0, self._pool.num_free - SPARE_BLOCKS * (num_running + 1))
        places = list(self._find(store, missing[:room]))
        is_refreshing = self._refreshing is not None and not self._refreshing.done()
        if len(places) < len(missing) and store.is_refresh_due and not is_refreshing:
            self._refreshing = self._writer.submit(store.refresh)  # for the next request
        if places and self._pays(len(places), seconds_per_token):
            self._begin_reading(store, waiting, cached, places)

    def _find(self, store: BlockStore, hashes: Sequence[bytes]) -> Iterator[Place]:
        """Yield the places of the longest prefix of these blocks."""
        for block_hash in hashes:
            place = store.find(block_hash)
            if place is None or place.size != self.block_bytes:
                return
            yield place

    def _begin_reading(self, store: BlockStore, waiting: _Waiting, cached: int, places: Sequence[Place]) -> None:
        """Let the reader read the blocks after the first `cached` ones of a request."""
        size, stop = self._pool.block_size, cached + len(places)
        chain = list(waiting.hashes[cached:stop])
        ids = [waiting.request.ids[i * size : (i + 1) * size] for i in range(cached, stop)]
        blocks = self._pool.pin([], len(places))
        assert blocks is not None
        try:
            future = self._reader.submit(self._read, store, list(zip(places, chain, ids, blocks, strict=True)))
        except RuntimeError:  # the process ends
            self._pool.unpin(blocks)
            raise
        self._readings.append(_Reading([waiting], chain, blocks, future))
        waiting.request.is_held = True

    def collect(self, *, is_idle: bool, has_next: bool, num_running: int) -> None:
        """Publish blocks that were read, release the requests that waited for them, and hand on blocks to write. Where
        no request runs, wait a moment for the threads; but let a next one that is not held try to be admitted first."""
        is_stuck = is_idle and self._was_idle and has_next  # it may need the blocks that are written
        if is_idle and self.has_work and (self._was_idle or not has_next):
            wait(self._futures(), READ_WAIT_S, FIRST_COMPLETED)
        self._was_idle = is_idle
        if self._readings:
            for reading in [each for each in self._readings if each.future.done()]:
                self._readings.remove(reading)
                self._finish(reading, num_running)
        if self._written is not None and self._written[1].done():
            self._end_writing()
        if self._pending and self._written is None and not is_stuck and (store := self.store) is not None:
            batch = self._next_batch(store)
            self._pool.pin([each.block for each in batch])
            self._written = batch, self._writer.submit(self._write, store, batch)

    def flush(self, timeout_s: float) -> None:
        """Write what waits, in this thread: others may not be started any more when a process ends."""
        end = time.monotonic() + timeout_s
        wait([self._opening], timeout_s)
        store = self.store
        if self._written is not None:
            wait([self._written[1]], max(0.0, end - time.monotonic()))
            if not self._written[1].done():
                return
            self._end_writing()
        while self._pending and store is not None and time.monotonic() < end:
            self._write(store, self._next_batch(store))

    def settle(self) -> None:
        """Wait until no thread touches the KV cache: before its blocks go to others."""
        wait(self._transfers())

    def reset(self, pool: BlockPool) -> None:
        """Go on with another pool, after `settle` and after an engine has dropped its requests."""
        self._readings, self._written, self._pool = [], None, pool
        self._pending.clear()

    def abandon(self) -> None:
        """Release all requests and blocks: the disk is not used any more."""
        self.settle()
        for reading in self._readings:
            self._pool.unpin(reading.blocks)
            for waiting in reading.waiting:
                waiting.request.is_held = False
        if self._written is not None:
            self._pool.unpin([each.block for each in self._written[0]])
        self.reset(self._pool)
        self.close()

    def close(self, flush_s: float = 0.0) -> None:
        """Write what waits, for so long, and stop the threads."""
        if self._pending or self._written is not None:
            self.flush(flush_s)
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _transfers(self) -> list[Future[Any]]:
        """Return the work that reads from the KV cache or writes to it."""
        futures: list[Future[Any]] = [reading.future for reading in self._readings]
        return futures if self._written is None else [*futures, self._written[1]]

    def _futures(self) -> list[Future[Any]]:
        """Return all that a step may wait for."""
        return self._transfers() if self._opening.done() else [*self._transfers(), self._opening]

    def _pays(self, num_blocks: int, seconds_per_token: float) -> bool:
        """Return whether reading so many blocks is predicted to be faster than computing them."""
        seconds = READ_S + num_blocks * self.block_bytes / self._read_rate
        if not seconds_per_token or seconds < num_blocks * self._pool.block_size * seconds_per_token:
            return True
        self._read_rate = min(FIRST_READ_RATE, RATE_RECOVERY * self._read_rate)  # it is measured again some time
        return False

    def _views(self, block: int) -> list[memoryview]:
        return [memory[block * size : (block + 1) * size] for memory, size in self._memory]

    def _read(self, store: BlockStore, items: Sequence[tuple[Place, bytes, Sequence[int], int]]) -> tuple[int, float]:
        """Read blocks in order up to the first that does not verify, in the reader's thread."""
        start, count = time.perf_counter(), 0
        for place, block_hash, ids, block in items:
            if not store.read(place, block_hash, ids, self._views(block)):
                break
            count += 1
        return count, time.perf_counter() - start

    def _finish(self, reading: _Reading, num_running: int) -> None:
        """Publish the blocks that verified, and let the requests be admitted, or read what else they need."""
        count, seconds = 0, 0.0
        try:
            count, seconds = reading.future.result()
        except Exception as error:
            logger.warning("kv_dir: blocks could not be read: %s", error)
        stats = self._stats
        stats.num_read_blocks += count
        stats.num_failed_blocks += len(reading.blocks) - count
        stats.read_bytes += count * self.block_bytes
        stats.read_s += seconds
        if count:
            self._read_rate = (self._read_rate + count * self.block_bytes / max(seconds, 1e-9)) / 2
        for block, block_hash in zip(reading.blocks[:count], reading.hashes, strict=False):
            self._pool.publish(block, block_hash)
        self._pool.unpin(reading.blocks)
        for waiting in reading.waiting:
            waiting.request.is_held = False
        for waiting in reading.waiting[1:] if count == len(reading.blocks) else ():
            if not waiting.request.is_finished:
                self.read_ahead(*waiting, num_running=num_running)

    def _next_batch(self, store: BlockStore) -> list[_Written]:
        """Return the oldest waiting blocks that are still cached."""
        batch: list[_Written] = []
        for _ in range(min(len(self._pending), 16 * WRITE_BLOCKS)):
            block_hash, ids = self._pending.popitem(last=False)
            blocks = self._pool.match([block_hash])
            if blocks and store.find(block_hash) is None:
                batch.append(_Written(block_hash, ids, blocks[0]))
                if len(batch) == WRITE_BLOCKS:
                    break
        return batch

    def _write(self, store: BlockStore, batch: Sequence[_Written]) -> int:
        """Write blocks, in the writer's thread; return how many were written."""
        return sum(store.write(each.block_hash, each.ids, self._views(each.block)) for each in batch)

    def _end_writing(self) -> None:
        assert self._written is not None
        (batch, future), self._written = self._written, None
        try:
            count = future.result()
            self._stats.num_written_blocks += count
            self._stats.written_bytes += count * self.block_bytes
        except Exception as error:
            logger.warning("kv_dir: blocks could not be written: %s", error)
        self._pool.unpin([each.block for each in batch])
