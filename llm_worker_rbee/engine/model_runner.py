"""Scheduled tokens -> batch -> logits: the arrays of a step.

`ModelRunner` keeps the block tables of the running requests, one row for each batch slot, and writes only new entries.
`SingleSequence` runs one sequence without a scheduler, for callers that look at logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..backends.ops import ROPE_AXES, Array, Batch, Ints, pending_id
from ..images.prompt import step_arrays
from ..models import Transformer
from ..models.kv_cache import KVCache
from .request import Request, ScheduledTokens
from .sampler import rows_before_logits

SPARE_BLOCKS = 16  # the width of the block table of decode steps is a multiple of it
CHUNK_TOKENS = 512  # of a SingleSequence step: bounds the memory of attention scores
CHUNK_TOKENS_WITH_LOGITS = 64  # likewise, where each token's logits are needed


class ModelRunner:
    """A model, its KV cache, and the block tables of `max_batch` requests."""

    def __init__(self, model: Transformer, cache: KVCache, max_batch: int, max_context: int) -> None:
        self.model = model
        self.cache = cache
        self._tables: Ints = np.zeros((max_batch, -(-max_context // cache.block_size)), np.int64)
        self._arange: Ints = np.arange(max_batch + 1)
        self._keeps_arrays = not model.ops.has_device_memory  # which copies arrays, and knows copies by identity
        self._decode: _DecodeBatch | None = None  # the last one that a step may follow with the same arrays
        self._has_adapters = model.adapters is not None

    def run(
        self, scheduled: Sequence[ScheduledTokens], should_stop: Callable[[], bool] | None = None
    ) -> tuple[Array, list[int] | None]:
        """Compute a step; return the logits that it needs, one row each, and their tokens, if the step samples them."""
        batch = self.batch(scheduled)
        if should_stop is not None:
            batch = replace(batch, should_stop=should_stop)
        fused = self.model.fused_for(batch)
        if fused is None or not fused.samples or not (rows := rows_before_logits(scheduled)):
            return forward(self.model, batch, self.cache), None
        logits, tokens = fused.sample(batch, self.cache.layers, rows)
        return logits, tokens if min(tokens) >= 0 else None

    def run_hidden(self, scheduled: Sequence[ScheduledTokens]) -> tuple[Array, Array]:
        """Compute a step; return the same logits, and the hidden state of every token."""
        with np.errstate(all="ignore"):
            return self.model.forward_hidden(self.batch(scheduled), self.cache)

    def batch(
        self, scheduled: Sequence[ScheduledTokens], pending: Array | None = None, *, has_states: bool = True
    ) -> Batch:
        """Return the arrays of a step, valid until the next one; `pending`: the tokens of the step in flight, if it
        follows one."""
        ids: list[int] = []
        requests, starts, stops, logits_from = zip(*scheduled, strict=True)
        for request, start, stop, _ in scheduled:
            length = len(request.ids)
            if request.num_blocks_in_table < len(request.blocks):
                self._write_table(request)
            if request.pending_row >= 0:
                ids.append(pending_id(request.pending_row))
            elif start + 1 == stop == length:
                ids.append(request.ids[start])
            else:
                ids += request.ids[start:stop]
                ids += request.drafts[max(0, start - length) : max(0, stop - length)]
        has_states = has_states and self.cache.n_slots > 0
        has_images = self.model.image_parts > 0 and has_image_tokens(scheduled)
        if len(ids) == len(requests) and logits_from == starts and not has_images:
            batch = self._decode_batch(requests, ids, starts, pending, has_states)
        else:
            slots = [request.batch_slot for request in requests]
            batch = self._mixed_batch(ids, slots, pending, *map(_array, (starts, stops, logits_from)))
            batch = self._with_images(batch, scheduled) if self.model.image_parts else batch
            if has_states:
                batch = replace(batch, state_in=np.empty_like(batch.context_len), state_out=np.empty_like(batch.ids))
            if self._has_adapters:
                batch = replace(batch, **_adapters(requests, [stop - start for _, start, stop, _ in scheduled]))
        if has_states:
            batch.state_in[:], batch.state_out[:] = _states(scheduled, len(ids))
        return batch

    def _with_images(self, batch: Batch, scheduled: Sequence[ScheduledTokens]) -> Batch:
        """Return a step with the rows of images, and with positions on several axes, where it has any."""
        chunks = [(request.images, start, stop) for request, start, stop, _ in scheduled]
        model = self.model
        ids = batch.ids if model.pads_images else None
        fields = step_arrays(chunks, has_axes=model.has_axes, sees_both_ways=model.sees_both_ways, ids=ids)
        return replace(batch, **fields) if fields else batch

    def release(self) -> None:
        """Keep nothing of finished requests, after the last one."""
        self._decode = None

    def _decode_batch(
        self, requests: tuple[Request, ...], ids: list[int], starts: tuple[int, ...], pending: Any, has_states: bool
    ) -> Batch:
        """Return the same as `_mixed_batch`, faster, if each request computes one token and its logits."""
        size, held = self.cache.block_size, self._decode
        width, num_states = max(starts) // size + 1, len(ids) if has_states else 0
        if held is None or pending is not None or not held.fits(requests, width, num_states):
            count, is_kept = len(ids), pending is None and self._keeps_arrays
            width += -width % SPARE_BLOCKS if is_kept else 0
            arrays: list[Ints] = [np.empty(count, np.int64) for _ in range(4)]
            has_axes = self.model.image_parts and self.model.has_axes
            batch = Batch(
                ids=arrays[0],
                positions=arrays[1],
                slot_mapping=arrays[2],
                query_start=self._arange[: count + 1],
                context_len=arrays[3],
                block_table=self._tables[[request.batch_slot for request in requests], :width],
                logits_index=self._arange[:count],
                pending=pending,
                state_in=np.empty(num_states, np.int64),
                state_out=np.empty(num_states, np.int64),
                rope_positions=np.empty((count if has_axes else 0, ROPE_AXES), np.int64),
                **(_adapters(requests, [1] * count) if self._has_adapters else {}),
            )
            held = _DecodeBatch(requests, batch, [array.data for array in arrays])
            self._decode = held if is_kept else None
        token_ids, positions, slot_mapping, context_len = held.views
        for i, at in enumerate(starts):
            token_ids[i], positions[i], context_len[i] = ids[i], at, at + 1
            slot_mapping[i] = requests[i].blocks[at // size] * size + at % size
        if held.batch.rope_positions.size:
            deltas = [0 if request.images is None else request.images.delta for request in requests]
            held.batch.rope_positions[:] = np.add(starts, deltas)[:, None]
        return held.batch

    def _mixed_batch(
        self, ids: list[int], slots: list[int], pending: Array | None, starts: Ints, stops: Ints, logits_from: Ints
    ) -> Batch:
        query_start: Ints = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(stops - starts, out=query_start[1:])
        size = self.cache.block_size
        tables = self._tables[slots, : -(-int(stops.max()) // size)]
        owners, positions = _token_positions(starts, stops, query_start)
        blocks, offsets = np.divmod(positions, size)
        return Batch(
            ids=_array(ids),
            positions=positions,
            slot_mapping=tables[owners, blocks] * size + offsets,
            query_start=query_start,
            context_len=stops,
            block_table=tables,
            logits_index=_last_indices(query_start[1:], stops - logits_from),
            pending=pending,
        )

    def _write_table(self, request: Request) -> None:
        """Write the new blocks of a request, and its row of the kept batch."""
        first, last, row = request.num_blocks_in_table, len(request.blocks), self._tables[request.batch_slot]
        row[first:last] = request.blocks[first:]
        request.num_blocks_in_table = last
        if self._decode is not None and request in self._decode.requests:
            table = self._decode.batch.block_table
            table[self._decode.requests.index(request)] = row[: table.shape[1]]


class _DecodeBatch(NamedTuple):
    """A batch of one token of each of some requests, whose arrays are changed in place while they decode."""

    requests: tuple[Request, ...]
    batch: Batch
    views: Sequence[memoryview]  # of ids, positions, slot_mapping, context_len: they write numbers faster than arrays

    def fits(self, requests: tuple[Request, ...], width: int, num_states: int) -> bool:
        """Return whether the arrays belong to a step of these requests, with so many columns and states."""
        has_columns = width <= self.batch.block_table.shape[1]
        return has_columns and num_states == self.batch.state_out.size and requests == self.requests


def has_image_tokens(scheduled: Sequence[ScheduledTokens]) -> bool:
    """Return whether a step computes tokens of images."""
    return any(item.images is not None and item.images.inside(start, stop) for item, start, stop, _ in scheduled)


def _adapters(requests: Sequence[Request], counts: Sequence[int]) -> dict[str, Any]:
    """Return the adapters of a step's tokens, as fields of its batch; none if no token has one."""
    if all(request.adapter_slot < 0 for request in requests):
        return {}
    slots = np.array([request.adapter_slot for request in requests], np.int64)
    scales = np.array([request.adapter_scale for request in requests], np.float32)
    return {"adapters": np.repeat(slots, counts), "adapter_scales": np.repeat(scales, counts)}


def _states(scheduled: Sequence[ScheduledTokens], num_tokens: int) -> tuple[list[int], list[int]]:
    """Return the slots that a step reads states from, and writes them to."""
    state_out, at = [-1] * num_tokens, 0
    state_in = [request.states[start] if start else -1 for request, start, _, _ in scheduled]
    for request, start, stop, _ in scheduled:
        for tokens, slot in request.states.items():
            if start < tokens <= stop:
                state_out[at + tokens - start - 1] = slot
        at += stop - start
    return state_in, state_out


def forward(model: Transformer, batch: Batch, cache: KVCache) -> Array:
    """Run the model; an overflow gives no warning here, but an error where logits are sampled."""
    if model.fused_for(batch) is not None:  # kernels give none
        return model.forward(batch, cache)
    with np.errstate(all="ignore"):
        return model.forward(batch, cache)


def _array(numbers: Sequence[int]) -> Ints:
    return np.array(numbers, np.int64)


def _token_positions(starts: Ints, stops: Ints, query_start: Ints) -> tuple[Ints, Ints]:
    """Return for each token the index of its request in the batch, and its position in that request."""
    count, total = len(starts), int(query_start[-1])
    if total == count:  # one token each
        return np.arange(count), starts
    owners = np.repeat(np.arange(count), stops - starts)
    return owners, np.arange(total) + (starts - query_start[:-1])[owners]


def _last_indices(ends: Ints, counts: Ints) -> Ints:
    """Return the last counts[i] integers before ends[i], for each i, joined."""
    before = np.cumsum(counts)
    return np.arange(int(before[-1])) + np.repeat(ends - before, counts)


class SingleSequence:
    """A model and a KV cache for one sequence of at most `capacity` tokens."""

    def __init__(self, model: Transformer, capacity: int, kv_type: str = "float32") -> None:
        self.model = model
        n_blocks = -(-capacity // KVCache.default_block_size)
        self.cache = KVCache(model.ops, model.config, n_blocks, kv_type=kv_type)
        self.block_table: Ints = np.arange(n_blocks, dtype=np.int64)

    def step(self, request: Request, limit: int, *, all_logits: bool = False) -> Array:
        """Compute up to `limit` of the remaining tokens; return the logits of the last one, or of all."""
        start = request.num_computed_tokens
        ids = request.ids[start : start + limit]
        batch = replace(self.batch(ids, start, all_logits=all_logits), **_adapters([request], [len(ids)]))
        logits = forward(self.model, batch, self.cache)
        request.num_computed_tokens += len(ids)
        return logits

    def batch(self, ids: list[int], start: int, *, all_logits: bool) -> Batch:
        n = len(ids)
        positions = np.arange(start, start + n, dtype=np.int64)
        states: dict[str, Any] = {"state_in": _array([0 if start else -1]), "state_out": _array([*[-1] * (n - 1), 0])}
        if not self.cache.n_slots:
            states = {}
        return Batch(
            ids=_array(ids),
            positions=positions,
            slot_mapping=self.cache.slots(self.block_table, positions),
            query_start=_array([0, n]),
            context_len=_array([start + n]),
            block_table=self.block_table[None, :],
            logits_index=np.arange(n, dtype=np.int64) if all_logits else _array([n - 1]),
            **states,
        )

    def catch_up(self, request: Request, *, all_logits: bool = False) -> Iterator[tuple[int, Array]]:
        """Compute all remaining tokens; yield the first position and the logits of each chunk, as `step`."""
        limit = CHUNK_TOKENS_WITH_LOGITS if all_logits else CHUNK_TOKENS
        while request.num_computed_tokens < request.num_tokens:
            start = request.num_computed_tokens
            yield start, self.step(request, limit, all_logits=all_logits)
