"""Spans -> batch -> logits: the arrays of one step. It keeps the block tables of those who run, one row each, and
writes only what is new in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..backends.ops import Array, Batch, Ints
from ..cache import KVCache
from ..models import Transformer
from .request import Request, ScheduledTokens


class ModelRunner:
    """A model, its cache, and room for the block tables of `max_batch` requests."""

    def __init__(self, model: Transformer, cache: KVCache, max_batch: int, max_context: int) -> None:
        self.model = model
        self.cache = cache
        self._tables: Ints = np.zeros((max_batch, -(-max_context // cache.block_size)), np.int64)
        self._numbers: Ints = np.arange(max_batch + 1)

    def run(self, spans: Sequence[ScheduledTokens]) -> Array:
        """One step; the logits that the spans want, one row each."""
        return forward(self.model, self.batch(spans), self.cache)

    def batch(self, spans: Sequence[ScheduledTokens]) -> Batch:
        """The arrays of a step."""
        ids: list[int] = []
        requests, starts, stops, wanted = zip(*spans, strict=True)
        for request, start, stop in zip(requests, starts, stops, strict=True):
            known = len(request.ids)
            if request.num_blocks_in_table < len(request.blocks):
                self._list_blocks(request)
            if start + 1 == stop == known:
                ids.append(request.ids[start])
            else:
                ids += request.ids[start:stop]
                ids += request.drafts[max(0, start - known) : max(0, stop - known)]
        rows = [request.batch_slot for request in requests]
        if len(ids) == len(rows) and wanted == starts:
            return self._one_each(_array(ids), rows, _array(starts))
        return self._arrays(ids, rows, *map(_array, (starts, stops, wanted)))

    def next_batch(self, requests: Sequence[Request], ids: Array) -> Batch:
        """The arrays of the step after the one that is under way, whose tokens (`ids`) only the device knows."""
        for request in requests:
            if request.num_blocks_in_table < len(request.blocks):
                self._list_blocks(request)
        positions = _array([len(request.ids) for request in requests])
        return self._one_each(ids, [request.batch_slot for request in requests], positions)

    def _one_each(self, ids: Ints, rows: list[int], positions: Ints) -> Batch:
        """What `_arrays` gives where everybody answers: one token each, and its logits."""
        count, size = len(rows), self.cache.block_size
        tables = self._tables[rows, : int(positions.max()) // size + 1]
        blocks, offsets = np.divmod(positions, size)
        return Batch(
            ids=ids,
            positions=positions,
            slot_mapping=tables[self._numbers[:count], blocks] * size + offsets,
            query_start=self._numbers[: count + 1],
            context_len=positions + 1,
            block_table=tables,
            logits_index=self._numbers[:count],
        )

    def _arrays(self, ids: list[int], rows: list[int], starts: Ints, stops: Ints, wanted_from: Ints) -> Batch:
        query_start: Ints = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(stops - starts, out=query_start[1:])
        tables = self._tables[rows, : self._width(int(stops.max()))]
        owners, positions = _places(starts, stops, query_start)
        blocks, offsets = np.divmod(positions, self.cache.block_size)
        return Batch(
            ids=_array(ids),
            positions=positions,
            slot_mapping=tables[owners, blocks] * self.cache.block_size + offsets,
            query_start=query_start,
            context_len=stops,
            block_table=tables,
            logits_index=_tails(query_start[1:], stops - wanted_from),
        )

    def _width(self, tokens: int) -> int:
        return -(-tokens // self.cache.block_size)

    def _list_blocks(self, request: Request) -> None:
        first, last = request.num_blocks_in_table, len(request.blocks)
        self._tables[request.batch_slot, first:last] = request.blocks[first:]
        request.num_blocks_in_table = last


def forward(model: Transformer, batch: Batch, cache: KVCache) -> Array:
    """The model's step; what overflows shows in the logits, where it is an error."""
    with np.errstate(all="ignore"):
        return model.forward(batch, cache)


def _array(numbers: Sequence[int]) -> Ints:
    return np.array(numbers, np.int64)


def _places(starts: Ints, stops: Ints, query_start: Ints) -> tuple[Ints, Ints]:
    """For each token its request's number in the batch, and its position in that request."""
    count, total = len(starts), int(query_start[-1])
    if total == count:  # one token each
        return np.arange(count), starts
    owners = np.repeat(np.arange(count), stops - starts)
    return owners, np.arange(total) + (starts - query_start[:-1])[owners]


def _tails(ends: Ints, counts: Ints) -> Ints:
    """The last counts[i] numbers before ends[i], for each i."""
    before = np.cumsum(counts)
    return np.arange(int(before[-1])) + np.repeat(ends - before, counts)


CHUNK_TOKENS = 512  # tokens a step: bounds the memory of the scores
CHUNK_TOKENS_WITH_LOGITS = 64  # likewise, where each token's logits are wanted too


class SingleSequence:
    """A model and room for one sequence of at most `capacity` tokens."""

    def __init__(self, model: Transformer, capacity: int, kv_type: str = "float32") -> None:
        self.model = model
        n_blocks = -(-capacity // KVCache.default_block_size)
        self.cache = KVCache(model.ops, model.config, n_blocks, kv_type=kv_type)
        self.block_table: Ints = np.arange(n_blocks, dtype=np.int64)

    def step(self, request: Request, limit: int, *, all_logits: bool = False) -> Array:
        """Compute up to `limit` tokens that are not computed yet; logits of the last of them, or of all."""
        start = request.num_computed_tokens
        ids = request.ids[start : start + limit]
        batch = self.batch(ids, start, all_logits=all_logits)
        with np.errstate(all="ignore"):  # overflow shows in the logits, where it is an error
            logits = self.model.forward(batch, self.cache)
        request.num_computed_tokens += len(ids)
        return logits

    def batch(self, ids: list[int], start: int, *, all_logits: bool) -> Batch:
        """The arrays of one step of one request."""
        n = len(ids)
        positions = np.arange(start, start + n, dtype=np.int64)
        return Batch(
            ids=np.array(ids, np.int64),
            positions=positions,
            slot_mapping=self.cache.slots(self.block_table, positions),
            query_start=np.array([0, n], np.int64),
            context_len=np.array([start + n], np.int64),
            block_table=self.block_table[None, :],
            logits_index=np.arange(n, dtype=np.int64) if all_logits else np.array([n - 1], np.int64),
        )

    def catch_up(self, request: Request, *, all_logits: bool = False) -> Iterator[tuple[int, Array]]:
        """Compute all that is not computed yet; of each chunk its first position and logits, as `step` gives them."""
        limit = CHUNK_TOKENS_WITH_LOGITS if all_logits else CHUNK_TOKENS
        while request.num_computed_tokens < request.num_tokens:
            start = request.num_computed_tokens
            yield start, self.step(request, limit, all_logits=all_logits)
