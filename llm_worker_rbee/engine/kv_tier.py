"""The tiers behind the block pool: the host's memory, for a GPU, and the disk. Full blocks and snapshots of states are
copied there behind the steps, and come back before a request is admitted.

Between steps the engine hands blocks to two threads: one copies blocks that the prefix cache holds, at the lowest
priority, the other copies blocks of waiting requests straight into free blocks of the KV cache. What was read is
published like computed blocks, so that the scheduler finds it as any other prefix. A request whose blocks are being
read is held; others go on. Whatever fails in here costs a prefix hit, never a request.

    pool.pin, pool.unpin    blocks that a thread reads from or writes to belong to no request meanwhile
    area.ram                which row of the host's memory holds which block: a pool like the device's
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from itertools import groupby, takewhile
from operator import attrgetter
from typing import Any, NamedTuple

from ..backends.ops import HostRows
from ..structured_outputs.constraint import lower_thread_priority
from .block_pool import DIGEST_BYTES, BlockPool
from .kv_store import BlockStore, Place, TierStats
from .request import Request
from .state_pool import StatePool

WRITE_BLOCKS = 16  # of one job of the writer
READ_BLOCKS = 512  # of one job of the reader: the engine's thread takes them in at once
MAX_READERS = 8  # threads that read and verify the blocks of a job
MAX_PENDING = 1 << 16  # blocks that wait to be written: the tokens of each, no keys and values
READ_WAIT_S = 0.005  # of a step in which all requests wait for blocks
SPARE_BLOCKS = 4  # for each running request, which reading leaves free
FIRST_RATE = 0.5e9  # bytes a second, before any is measured
TRIAL_BLOCKS = 16  # that are read where that rate would not pay, to measure it
TRIAL_INTERVAL = 32  # requests for which reading did not pay, between two trials; the first ones follow sooner
READ_S = 0.002  # of a job, beside its bytes
OPEN_WAIT_S = 1.0  # after the start, for the store of an idle engine
logger = logging.getLogger("llm_worker_rbee.engine")

SecondsPerToken = Callable[[int], float]  # of a prompt, after so many tokens, with the current decodes; 0: not known


class Area:
    """Blocks of one kind on the device, keys and values or states, and copies of them in the host's memory."""

    def __init__(self, pool: BlockPool, rows: HostRows, salt: bytes = b"") -> None:
        self.pool, self.rows, self._salt = pool, rows, salt
        self.ram = BlockPool(rows.num_rows, pool.block_size) if rows.num_rows else None

    def key(self, block_hash: bytes) -> bytes:
        """Return the hash under which the store has a block."""
        return blake2b(self._salt + block_hash, digest_size=DIGEST_BYTES).digest() if self._salt else block_hash

    def find(self, block_hash: bytes, store: BlockStore | None) -> Place | int | None:
        """Return the row or the place of a block."""
        if self.ram is not None and (rows := self.ram.match([block_hash])):
            return rows[0]
        place = None if store is None else store.find(self.key(block_hash))
        return place if place is not None and place.size == self.rows.row_bytes else None


Source = tuple[Area, int, Place | int]  # the index of a block of a request; its place on disk, or its row


class _Copy(NamedTuple):
    """A block, the row that it is copied to or from, and its place on disk."""

    area: Area
    block_hash: bytes
    ids: Sequence[int]
    block: int  # -1: the row has it already
    row: int
    place: Place | None = None


class _Waiting(NamedTuple):
    """A request that waits for blocks, and what `read_ahead` got with it."""

    request: Request
    hashes: Sequence[bytes]


class _Reading(NamedTuple):
    """Blocks that are being read, and the requests that wait for them."""

    waiting: list[_Waiting]
    copies: list[_Copy]
    future: Future[tuple[int, float]]  # how many of them verified, and seconds
    num_cached: int  # blocks of the first request, before


class KVTier:
    """Moves blocks between the KV cache, the host's memory and a `BlockStore`. Its methods belong to the engine's
    thread."""

    def __init__(
        self,
        blocks: HostRows,
        pool: BlockPool,
        open_store: Callable[[], BlockStore | None],
        seconds_per_token: SecondsPerToken,
        state_rows: HostRows | None = None,
        states: StatePool | None = None,
    ) -> None:
        """`open_store` is called in a thread, since it may have to read the whole model; None: there is no disk."""
        self._stats = TierStats()
        self._blocks, self._states, self._seconds_per_token = Area(pool, blocks), states, seconds_per_token
        self._snapshots = None if states is None or state_rows is None else Area(states.pool, state_rows, b"state")
        self.block_bytes = blocks.row_bytes  # in all layers
        self._pending: OrderedDict[bytes, tuple[Area, bytes, Sequence[int]]] = OrderedDict()  # to write, by key
        self._writer = ThreadPoolExecutor(1, "kv-writer", initializer=lower_thread_priority)
        self._reader = ThreadPoolExecutor(1, "kv-reader")
        self._verifiers = ThreadPoolExecutor(min(MAX_READERS, os.cpu_count() or 1), "kv-verifier")
        self._opening: Future[BlockStore | None] = self._writer.submit(open_store)
        self._open_by = time.monotonic() + OPEN_WAIT_S
        self._refreshing: Future[None] | None = None
        self._written: tuple[list[_Copy], Future[int]] | None = None
        self._readings: list[_Reading] = []
        self._rates: dict[bool, float] = {}  # bytes a second, where blocks come from the disk
        self._dropped: set[bytes] = set()  # keys of blocks that were withdrawn while threads copied some
        self._num_refused = 0  # requests for which reading did not pay
        self._was_idle = False  # when `collect` was last called

    @property
    def _areas(self) -> list[Area]:
        return [self._blocks] if self._snapshots is None else [self._blocks, self._snapshots]

    @property
    def stats(self) -> TierStats:
        """What was read and written since the engine started."""
        store = self._opening.result() if self._opening.done() and not self._opening.exception() else None
        return replace(
            self._stats,
            num_waiting_blocks=len(self._pending),
            num_evicted_segments=0 if store is None else store.num_evicted,
            num_ram_blocks=sum(area.ram.num_cached for area in self._areas if area.ram is not None),
        )

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
        return self._opening.done() and self.store is None and self._blocks.ram is None

    def publish(self, block_hash: bytes, ids: Sequence[int]) -> None:
        """Note that the prefix cache has gained a block with these tokens."""
        self._note(self._blocks, block_hash, ids)

    def publish_state(self, block_hash: bytes, ids: Sequence[int]) -> None:
        """Note that it has gained a snapshot after the block with these tokens."""
        if self._snapshots is not None:
            self._note(self._snapshots, block_hash, ids)

    def _note(self, area: Area, block_hash: bytes, ids: Sequence[int]) -> None:
        if len(self._pending) < MAX_PENDING and not self._is_off:
            self._pending[area.key(block_hash)] = area, block_hash, ids

    def drop(self, hashes: Sequence[bytes]) -> None:
        """Withdraw blocks from all tiers: a step with them has failed."""
        store = self.store
        for area in self._areas:
            for block_hash in hashes:
                key = area.key(block_hash)
                self._pending.pop(key, None)
                if self._transfers():
                    self._dropped.add(key)
                if area.ram is not None:
                    area.ram.unpublish(area.ram.match([block_hash]))
                if store is not None:
                    self._writer.submit(store.drop, key)

    def read_ahead(self, request: Request, hashes: Sequence[bytes], *, num_running: int, may_try: bool = True) -> None:
        """Begin to read the blocks that follow the cached prefix of a request, and hold it meanwhile; unless computing
        them is predicted to be faster. `hashes` are those that a prefix hit may cover. An engine that has just been
        started waits a moment for the store."""
        if not num_running and hashes and not self._opening.done():
            wait([self._opening], max(0.0, self._open_by - time.monotonic()))
        store, pool, waiting = self.store, self._blocks.pool, _Waiting(request, hashes)
        if not hashes or self._is_off:
            return
        for reading in self._readings:
            if reading.copies[0].block_hash in hashes:  # with the same beginning: it reads the rest itself
                return self._join(reading, waiting)
        pool.touch(matched := pool.match(hashes))
        room = pool.num_free_beside(matched) - SPARE_BLOCKS * (num_running + 1)
        sources = self._find(store, hashes, len(matched), room)
        is_refreshing = self._refreshing is not None and not self._refreshing.done()
        is_missing = store is not None and len(matched) + len(sources) < len(hashes)
        if is_missing and store is not None and store.is_refresh_due and not is_refreshing:
            self._refreshing = self._writer.submit(store.refresh)  # for the next request
        if not sources:
            return None
        if self._readings and len(sources) > room - sum(len(each.waiting[0].hashes) for each in self._readings):
            return self._join(self._readings[-1], waiting)  # each would evict what the other has read
        read_s, compute_s = self._read_seconds(sources), self._compute_seconds(waiting, len(matched), sources)
        if self._pays(read_s, compute_s):
            self._begin_reading(store, waiting, sources, len(matched))
        elif may_try and (count := self._trial_blocks(sources)):
            self._begin_reading(store, waiting, sources[:count], len(matched))
        return None

    def _join(self, reading: _Reading, waiting: _Waiting) -> None:
        """Hold a request until a job has ended."""
        reading.waiting.append(waiting)
        waiting.request.is_held = True

    def _find(self, store: BlockStore | None, hashes: Sequence[bytes], first: int, room: int) -> list[Source]:
        """Return at most `room` blocks that continue a prefix, up to the last one with a snapshot after it, where the
        model has states."""
        sources, end = list[Source](), first
        while end < len(hashes) and len(sources) < room:
            if not self._blocks.pool.is_cached(hashes[end]):
                if (source := self._blocks.find(hashes[end], store)) is None:
                    break
                sources.append((self._blocks, end, source))
            end += 1
        if (snapshots := self._snapshots) is None or self._states is None:
            return sources
        for i in range(end, 0, -1):
            before = [source for source in sources if source[1] < i]
            if snapshots.pool.is_cached(hashes[i - 1]):
                return before
            state = snapshots.find(hashes[i - 1], store) if self._states.num_spare > 0 else None
            if state is not None:
                return [*before, (snapshots, i - 1, state)]
        return []

    def _max_copies(self) -> int:
        """Return how many blocks a job may read: each needs a row of the host's memory."""
        return min([READ_BLOCKS, *(area.ram.num_free // 2 for area in self._areas if area.ram is not None)])

    def _begin_reading(
        self, store: BlockStore | None, waiting: _Waiting, sources: Sequence[Source], num_cached: int
    ) -> None:
        """Let the reader read blocks of a request, as many as a job may have, and hold it meanwhile."""
        size, copies, sources = self._blocks.pool.block_size, list[_Copy](), sources[: self._max_copies()]
        for area, _, source in sources:  # first of all, before other rows are taken for blocks from disk
            if area.ram is not None and isinstance(source, int):
                area.ram.pin([source])
        for area, i, source in sources:
            (block,) = area.pool.pin([], 1) or [-1]
            row, place = (block, source) if isinstance(source, Place) else (source, None)
            if area.ram is not None and place is not None:
                (row,) = area.ram.pin([], 1) or [-1]
            ids = waiting.request.ids[i * size : (i + 1) * size]
            copies.append(_Copy(area, waiting.hashes[i], ids, block, row, place))
        while copies and -1 in copies[-1][3:5]:  # drafts hold all states
            self._give_back([copies.pop()])
        if not copies:
            return
        try:
            future = self._reader.submit(self._read, store, copies)
        except RuntimeError:  # the process ends
            self._give_back(copies)
            raise
        self._readings.append(_Reading([waiting], copies, future, num_cached))
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
        may_write = self._written is None and not is_stuck and self._opening.done() and not self._is_off
        if self._pending and may_write and (batch := self._next_batch(self.store)):
            try:
                self._written = batch, self._writer.submit(self._write, self.store, batch)
            except RuntimeError:  # the process ends
                self._give_back(batch)
                raise

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
            batch = self._next_batch(store)
            self._write(store, batch)
            self._give_back(batch)

    def settle(self) -> None:
        """Wait until no thread touches the KV cache: before its blocks go to others."""
        for threads in (self._reader, self._writer) if self._opening.done() else (self._reader,):
            with suppress(RuntimeError):  # they are shut down
                threads.submit(int).result()  # after a job that an interrupt has kept from being recorded
        wait([future for future in self._transfers() if not future.cancelled()])

    def reset(self, pool: BlockPool, states: StatePool | None = None) -> None:
        """Go on with other pools, after `settle` and after an engine has dropped its requests."""
        for area in self._areas:
            if area.ram is not None:
                area.ram.unpin(list(area.ram.pinned.elements()))
        self._readings, self._written, self._blocks.pool, self._states = [], None, pool, states
        if self._snapshots is not None and states is not None:
            self._snapshots.pool = states.pool
        self._pending.clear()
        self._dropped.clear()

    def abandon(self) -> None:
        """Release all requests and blocks: the tiers are not used any more."""
        self.settle()
        for waiting in [each for reading in self._readings for each in reading.waiting]:
            waiting.request.is_held = False
        self._give_back(self._copies())
        self._readings, self._written = [], None
        self._pending.clear()
        self.close()

    def close(self, flush_s: float = 0.0) -> None:
        """Write what waits, for so long, and stop the threads."""
        try:
            if self._pending or self._written is not None:
                self.flush(flush_s)
        finally:
            for threads in (self._writer, self._reader):
                threads.shutdown(wait=False, cancel_futures=True)
            self._verifiers.shutdown(wait=False)  # a job of the reader waits for all of its own

    def _copies(self) -> list[_Copy]:
        """Return all copies that threads make."""
        copies = [copy for reading in self._readings for copy in reading.copies]
        return copies if self._written is None else [*copies, *self._written[0]]

    def _transfers(self) -> list[Future[Any]]:
        """Return the work that reads from the KV cache or writes to it."""
        futures: list[Future[Any]] = [reading.future for reading in self._readings]
        return futures if self._written is None else [*futures, self._written[1]]

    def _futures(self) -> list[Future[Any]]:
        """Return all that a step may wait for."""
        return self._transfers() if self._opening.done() else [*self._transfers(), self._opening]

    def _compute_seconds(self, waiting: _Waiting, cached: int, sources: Sequence[Source]) -> float | None:
        """Return the predicted seconds of computing what the sources have; None if they are not known."""
        start, stop, size = cached, sources[-1][1] + 1, self._blocks.pool.block_size
        if self._states is not None:
            start = self._states.longest_snapshot(waiting.hashes[:cached])
        return (stop - start) * size * self._seconds_per_token((start + stop) * size // 2) or None

    def _read_seconds(self, sources: Sequence[Source]) -> float:
        """Return the predicted seconds of reading."""
        sizes = Counter[bool]()
        for area, _, source in sources:
            sizes[isinstance(source, Place)] += area.rows.row_bytes
        return READ_S + sum(size / self._rates.get(is_disk, FIRST_RATE) for is_disk, size in sizes.items())

    def _pays(self, read_s: float, compute_s: float | None) -> bool:
        """Return whether reading is predicted to be faster than computing."""
        return compute_s is None or read_s < compute_s

    def _trial_blocks(self, sources: Sequence[Source]) -> int:
        """Return how many blocks are read although that is not predicted to pay: the rate may have changed."""
        self._num_refused += 1
        is_measured = all(isinstance(source, Place) in self._rates for _, _, source in sources)
        is_early = self._num_refused < TRIAL_INTERVAL and self._num_refused.bit_count() == 1
        return 0 if is_measured and not is_early and self._num_refused % TRIAL_INTERVAL else TRIAL_BLOCKS

    def _read(self, store: BlockStore | None, copies: Sequence[_Copy]) -> tuple[int, float]:
        """Read blocks in order up to the first that does not verify, in the reader's thread; return how many there are,
        and the seconds. Nothing touches the others when it returns."""
        start, count, verified = time.perf_counter(), 0, list[Future[bool]]()
        try:
            for copy in copies:
                verified.append(self._verifiers.submit(self._verify, store, copy))
            while count < len(copies):
                batch = zip(copies[count : count + WRITE_BLOCKS], verified[count:], strict=False)
                intact = [copy for copy, _ in takewhile(lambda pair: pair[1].result(), batch)]
                for area, group in groupby(intact, attrgetter("area")):
                    rows, blocks = zip(*((copy.row, copy.block) for copy in group), strict=True)
                    area.rows.load(rows, blocks)
                count += len(intact)
                if len(intact) < WRITE_BLOCKS:
                    break
        finally:
            wait(verified)
            for area in self._areas:
                area.rows.finish()
        return count, time.perf_counter() - start

    def _verify(self, store: BlockStore | None, copy: _Copy) -> bool:
        """Read a block from disk to its row, if it is not there already; return whether it is this block."""
        if copy.place is None or store is None:
            return True
        return store.read(copy.place, copy.area.key(copy.block_hash), copy.ids, copy.area.rows.views(copy.row))

    def _finish(self, reading: _Reading, num_running: int) -> None:
        """Publish the blocks that verified, and let the requests be admitted, or read what else they need."""
        count, seconds = 0, 0.0
        try:
            count, seconds = reading.future.result()
        except Exception as error:
            logger.warning("keys and values could not be read: %s", error)
        self._count_read(reading.copies, count, seconds)
        for copy in reading.copies[:count]:
            if copy.area.key(copy.block_hash) not in self._dropped:
                copy.area.pool.publish(copy.block, copy.block_hash)
        self._publish_rows(reading.copies[:count])
        self._give_back(reading.copies)
        first, *others = reading.waiting
        for waiting in others:
            waiting.request.is_held = waiting.request.is_looked_up = False
        first.request.is_held = False
        is_whole = count == len(reading.copies) and not first.request.is_finished
        if is_whole and len(self._blocks.pool.match(first.hashes)) > reading.num_cached:
            self.read_ahead(*first, num_running=num_running, may_try=False)

    def _publish_rows(self, copies: Sequence[_Copy]) -> None:
        """Let rows be found, unless their blocks were withdrawn."""
        for copy in copies:
            if copy.area.ram is not None and copy.area.key(copy.block_hash) not in self._dropped:
                copy.area.ram.publish(copy.row, copy.block_hash)
        if not self._transfers():
            self._dropped.clear()

    def _count_read(self, copies: Sequence[_Copy], count: int, seconds: float) -> None:
        """Count what was read, and learn how fast the disk or the host's memory is."""
        stats, from_disk = self._stats, [copy.area.rows.row_bytes for copy in copies[:count] if copy.place is not None]
        total = sum(copy.area.rows.row_bytes for copy in copies[:count])
        stats.num_read_blocks += len(from_disk)
        stats.num_failed_blocks += len(copies) - count
        stats.read_bytes += sum(from_disk)
        stats.num_ram_read_blocks += count - len(from_disk)
        stats.ram_read_bytes += total - sum(from_disk)
        stats.read_s += seconds
        if count and len(from_disk) in (0, count):
            rate = total / max(seconds - READ_S, 0.25 * seconds, 1e-9)
            self._rates[bool(from_disk)] = (self._rates.get(bool(from_disk), rate) + rate) / 2

    def _next_batch(self, store: BlockStore | None) -> list[_Copy]:
        """Return the oldest waiting blocks that are still cached, with what they need."""
        batch: list[_Copy] = []
        if store is not None:  # what it costs to compute the blocks again
            store.seconds_per_byte = self._seconds_per_token(0) * self._blocks.pool.block_size / self.block_bytes
        for _ in range(min(len(self._pending), 16 * WRITE_BLOCKS)):
            key, (area, block_hash, ids) = self._pending.popitem(last=False)
            is_stored = store is None or store.find(key) is not None
            if (copy := self._take_cached(area, block_hash, ids, is_stored=is_stored)) is not None:
                batch.append(copy)
                if len(batch) == WRITE_BLOCKS:
                    break
        return batch

    def _take_cached(self, area: Area, block_hash: bytes, ids: Sequence[int], *, is_stored: bool) -> _Copy | None:
        """Take a cached block and its row, to be copied; None if there is nothing to copy, or no room."""
        rows = [] if area.ram is None else area.ram.match([block_hash])
        if is_stored and (rows or area.ram is None):
            return None
        if rows and area.ram is not None:
            return _Copy(area, block_hash, ids, -1, area.ram.pin(rows)[0])  # type: ignore[index]
        has_room = area is self._blocks or (self._states is not None and self._states.num_spare > 0)
        blocks = area.pool.match([block_hash])
        row = blocks if area.ram is None else area.ram.pin([], 1)
        if not blocks or not has_room or row is None:
            if row and area.ram is not None:
                area.ram.unpin(row)
            return None
        area.pool.pin(blocks)
        return _Copy(area, block_hash, ids, blocks[0], row[0])

    def _write(self, store: BlockStore | None, batch: Sequence[_Copy]) -> int:
        """Copy blocks to their rows and write them, in the writer's thread; return how many were written."""
        count = 0
        for area in self._areas:
            copies = [copy for copy in batch if copy.area is area]
            fresh = [copy for copy in copies if copy.block >= 0]
            area.rows.save([copy.block for copy in fresh], [copy.row for copy in fresh])
            if store is not None:
                keys = {area.key(copy.block_hash): copy for copy in copies}
                new = {key: copy for key, copy in keys.items() if store.find(key) is None}
                count += sum(store.write(key, copy.ids, area.rows.views(copy.row)) for key, copy in new.items())
        return count

    def _end_writing(self) -> None:
        """Publish the rows that blocks were copied to."""
        assert self._written is not None
        (batch, future), self._written = self._written, None
        try:
            count = future.result()
            self._stats.num_written_blocks += count
            self._stats.written_bytes += sum(copy.area.rows.row_bytes for copy in batch[:count])
            self._publish_rows(batch)
        except Exception as error:
            logger.warning("keys and values could not be written: %s", error)
        self._give_back(batch)

    def _give_back(self, copies: Sequence[_Copy], *, keep_blocks: bool = False) -> None:
        """Unpin the blocks, unless their pool is gone, and the rows of copies."""
        for area in self._areas:
            own = [copy for copy in copies if copy.area is area]
            if not keep_blocks:
                area.pool.unpin([copy.block for copy in own if copy.block >= 0])
            if area.ram is not None:
                area.ram.unpin([copy.row for copy in own if copy.row >= 0])
