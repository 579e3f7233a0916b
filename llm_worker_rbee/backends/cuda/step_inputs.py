"""The integers of a step, from the batch to the device: padded to the step's sizes, one block of memory, one copy."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..ops import ROPE_AXES, Batch, Ints, LayerCache, StepLimits, first_kv
from .device import is_interpreted
from .kernels.attention_prefill import QUERY_TILE, SMALL_QUERY_TILE, query_tiles
from .kernels.elementwise import launch_fill_pending
from .kernels.lora import TOKENS, group_tokens, max_tiles

DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
STEP_SIZES: tuple[int, ...] = (16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
if is_interpreted():  # which computes padding too, one program at a time
    STEP_SIZES = (1, 2, 4, 8, *STEP_SIZES)
STEP_MULTIPLE = 128
DECODE_SLOTS = (16, 64, 256)  # decoding tokens of a step with prefill; more of them: as many as it has tokens
LOGITS_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MAX_SIZE_WITH_HEAD = 256  # decoding tokens of a graph that ends with the logits: larger results are not kept
FEW_REQUESTS = 16  # a captured step of a pooling model has room for 1 request, these, or as many as it has tokens


class StepSizes(NamedTuple):
    """What the arrays of a step have room for."""

    tokens: int
    decoding: int  # tokens at the front that decode by split-KV; the others go through tiles of queries
    has_tiles: bool
    num_logits: int | None  # None: of all tokens
    is_captured: bool = True
    tile_queries: int = QUERY_TILE
    requests: int = 0  # of a pooling model, which returns a row for each; 0: as many as tokens

    @property
    def has_head(self) -> bool:
        """Whether the logits are part of the step's graph."""
        return self.num_logits is None and self.tokens <= MAX_SIZE_WITH_HEAD

    @property
    def graph(self) -> Hashable:
        """The key of its graph, which computes the logits of all tokens or none."""
        return self.tokens, self.decoding, self.num_logits is None, self.tile_queries, self.requests


def padded(count: int, sizes: tuple[int, ...], multiple: int) -> int:
    """Return the smallest size that has room, or the next multiple."""
    return next((size for size in sizes if size >= count), -(-count // multiple) * multiple)


def decode_sizes(requests: int, *, is_tiled: bool) -> StepSizes:
    """Return the sizes of a step in which every request computes one token and its logits."""
    size = padded(requests, DECODE_SIZES, STEP_MULTIPLE)
    decoding, queries = (0, SMALL_QUERY_TILE) if is_tiled else (size, QUERY_TILE)
    return StepSizes(size, decoding, is_tiled, None, size <= DECODE_SIZES[-1], queries)


def prefill_sizes(tokens: int, decoding: int, num_logits: int, *, is_tiled: bool) -> StepSizes:
    """Return the sizes of any other step."""
    size = padded(tokens, STEP_SIZES, STEP_MULTIPLE)
    slots, queries = (
        (0, SMALL_QUERY_TILE) if is_tiled else (min(size, padded(decoding, DECODE_SLOTS, size)), QUERY_TILE)
    )
    return StepSizes(size, slots, True, padded_logits(num_logits), size <= STEP_SIZES[-1], queries)


def pooling_sizes(batch: Batch, *, batch_invariant: bool, is_captured: bool) -> StepSizes:
    """Return the sizes of a step of a pooling model, which is padded only where it is captured."""
    tokens, requests = len(batch.ids), len(batch.context_len)
    is_small = batch_invariant or batch.context_len.max() <= SMALL_QUERY_TILE
    if is_captured and tokens <= STEP_SIZES[-1]:
        tokens = padded(tokens, STEP_SIZES, STEP_SIZES[-1])
        requests = next(count for count in (1, FEW_REQUESTS, tokens) if count >= requests)
    queries = SMALL_QUERY_TILE if is_small else QUERY_TILE
    return StepSizes(tokens, 0, True, None, is_captured and tokens <= STEP_SIZES[-1], queries, requests)


def padded_logits(count: int) -> int:
    """Return how many logits are computed where a step needs `count` of them."""
    return padded(count, LOGITS_SIZES, LOGITS_SIZES[-1]) if count else 0


def all_sizes(limits: StepLimits, *, is_tiled: bool) -> Iterator[StepSizes]:
    """Yield the sizes of every step within the limits, the largest first: graphs share memory. Uncaptured steps run the
    kernels of the largest of them."""
    most = padded(limits.max_tokens, STEP_SIZES, STEP_MULTIPLE)
    if most > STEP_SIZES[-1]:
        yield prefill_sizes(most, 0, 0, is_tiled=is_tiled)
    for tokens in reversed([size for size in STEP_SIZES if size <= most]):
        slots = [count for count in (*DECODE_SLOTS, tokens) if count <= tokens]
        sizes = {prefill_sizes(tokens, min(count, limits.max_batch), 0, is_tiled=is_tiled) for count in slots}
        yield from sorted(sizes, reverse=True)
    largest = padded(limits.max_batch, DECODE_SIZES, STEP_MULTIPLE)
    for size in reversed([size for size in DECODE_SIZES if size <= largest]):
        yield decode_sizes(size, is_tiled=is_tiled)


def uncaptured_sizes(limits: StepLimits, *, is_tiled: bool) -> Iterator[StepSizes]:
    """Yield the sizes of larger steps within the limits."""
    for tokens in range(STEP_SIZES[-1] + STEP_MULTIPLE, limits.max_tokens, STEP_MULTIPLE):
        yield prefill_sizes(tokens, 0, 0, is_tiled=is_tiled)


def all_logits_sizes(limits: StepLimits) -> list[int]:
    """Return the numbers of logits of steps within the limits."""
    largest = padded_logits(limits.max_logits)
    return [size for size in LOGITS_SIZES if size <= largest]


STAGING_INTS = 1 << 20
STATIC_INTS = 1 << 15  # where graphs read, at first
ALIGNMENT = 4  # int32: 16 bytes
ARRAYS_PER_TOKEN = 20  # a bound on the values of a step without its block tables
NO_IDS = np.empty(0, np.int64)
NO_BATCH = Batch(
    ids=NO_IDS,
    positions=NO_IDS,
    slot_mapping=NO_IDS,
    query_start=np.zeros(1, np.int64),
    context_len=NO_IDS,
    block_table=np.zeros((1, 1), np.int64),
    logits_index=NO_IDS,
)

Arrays = Mapping[str, tuple[int, NDArray[Any], int]]  # by name: (room, values, padding of the rest of the room)


def new_requests(tokens: int, block_size: int, num_logits: int = 1, max_length: int | None = None) -> Batch:
    """Return the first step of a request, or of several of at most `max_length` tokens, in the first blocks."""
    length = tokens if max_length is None else min(tokens, max_length)
    starts = np.append(np.arange(0, tokens, length), tokens)
    positions, requests = np.arange(tokens) % length, len(starts) - 1
    return Batch(
        ids=np.zeros(tokens, np.int64),
        positions=positions,
        slot_mapping=positions,
        query_start=starts,
        context_len=np.diff(starts),
        block_table=np.tile(np.arange(-(-length // block_size)), (requests, 1)),
        logits_index=np.arange(tokens)[-num_logits:],
        state_in=np.full(requests, -1),
        state_out=np.full(tokens, -1),
        token_types=np.zeros(tokens, np.int64),
    )


def warm_up_batches(kv: Sequence[LayerCache], limits: StepLimits) -> list[Batch]:
    """Return steps that need every kernel of a model which runs op by op, or pools."""
    blocks, _, block_size, _ = first_kv(kv).k.shape
    max_length = min(limits.max_context, blocks * block_size)
    counts = sorted({min(tokens, limits.max_tokens) for tokens in (1, *STEP_SIZES, limits.max_tokens)})
    return [new_requests(count, block_size, limits.max_logits, max_length) for count in counts]


def aligned(count: int) -> int:
    """Return the offset after an array of `count` values."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def leading_ones(counts: Ints) -> int:
    """Return how many requests at the front have one token."""
    other = np.flatnonzero(counts != 1)
    return int(other[0]) if len(other) else len(counts)


def step_arrays(batch: Batch, sizes: StepSizes, more: Arrays | None = None) -> dict[str, Any]:
    """Return the arrays that the kernels of a step read, with `more` of a kind of model. Those of a graph have fixed
    places: the block tables, of any size, are its last, and behind them is what the output head reads outside of it."""
    table, size, requests = batch.block_table, sizes.tokens, sizes.requests or sizes.tokens
    decoding = leading_ones(np.diff(batch.query_start)) if sizes.decoding else 0
    arrays = {
        "width": (1, np.array(table.shape[1]), 0),
        "ids": (size, batch.ids, 0),
        "decode_positions": (sizes.decoding, batch.positions[:decoding], -1),
    }
    if sizes.has_tiles:
        tiles = query_tiles(batch.query_start, sizes.tile_queries, decoding)
        slots = batch.slot_mapping
        if decoding:
            slots = np.concatenate((np.full(decoding, -1), slots[decoding:]))
        arrays |= {
            "positions": (size, batch.positions, 0),
            "slots": (size, slots, -1),
            "query_start": (requests + 1, batch.query_start, len(batch.ids)),
            "context_len": (requests, batch.context_len, 0),
            "num_tiles": (1, np.array(len(tiles[0])), 0),
            "tile_request": (size, tiles[0], 0),
            "tile_first": (size, tiles[1], 0),
        }
    arrays |= more or {}
    arrays["tables"] = table.size, table, 0
    if sizes.num_logits is not None:
        arrays["logits_index"] = sizes.num_logits, batch.logits_index, 0
    return arrays


def state_arrays(batch: Batch, size: int) -> Arrays:
    """Return the arrays of a step of `size` tokens that layers with states read."""
    requests = np.repeat(np.arange(len(batch.state_in)), np.diff(batch.query_start))
    return {
        "query_start": (size + 1, batch.query_start, len(batch.ids)),
        "state_in": (size, batch.state_in, -1),
        "state_out": (size, batch.state_out, -1),
        "token_request": (size, requests, -1),
        "num_requests": (1, np.array(len(batch.state_in)), 0),
    }


def turn_arrays(batch: Batch, size: int, decoding: int) -> Arrays:
    """Return the positions of RoPE of a step without tokens of images, which are the same on all axes."""
    turns = batch.rope_positions.reshape(-1, ROPE_AXES)[:, 0]
    return {"turns": (size, turns, 0), "decode_turns": (decoding, turns[:decoding], 0)}


def adapter_arrays(batch: Batch, size: int, num_slots: int) -> Arrays:
    """Return the arrays of a step of `size` tokens about its adapters."""
    tiles = max_tiles(size, num_slots)
    slots, tokens = group_tokens(batch.adapters)
    scales = np.ascontiguousarray(batch.adapter_scales, np.float32).view(np.int32)
    return {
        "lora_slots": (tiles, slots, -1),
        "lora_tokens": (tiles * TOKENS, tokens, -1),
        "lora_scales": (size, scales, 0),
    }


class InputStaging:
    """Page-locked host memory through which the arrays of a step reach the device.

    Every array begins at 16 bytes, so that kernels are compiled once, for aligned pointers. Steps use the next piece of
    the memory in turn; the host waits only when it starts over. `static` is where graphs read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.static = torch.zeros(STATIC_INTS, dtype=torch.int32, device=device)
        self._allocate(STAGING_INTS)

    def _allocate(self, length: int) -> None:
        self._block = torch.empty(length, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self._ints = self._block.numpy()
        self._offset = 0

    def _reserve(self, count: int) -> int:
        """Return the offset of `count` values that no copy reads."""
        if self._offset + count > len(self._ints):
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            if count > len(self._ints):
                self._allocate(2 * count)
            self._offset = 0
        start = self._offset
        self._offset += count
        return start

    def reserve_static(self, count: int) -> bool:
        """Make room for steps of `count` values in graphs; return whether the addresses that they read have changed."""
        if count <= len(self.static):
            return False
        self.static = torch.zeros(count, dtype=torch.int32, device=self.device)
        return True

    def copy_to_device(self, batch: Batch, arrays: Arrays, *, is_static: bool) -> dict[str, torch.Tensor]:
        """Copy the arrays of a step to the device; return views of them by name. Ids that the step in flight samples
        are taken from the device."""
        total = total_size(arrays)
        first = offset = self._reserve(total)
        target = self.static if is_static else torch.empty(total, dtype=torch.int32, device=self.device)
        ints, views = self._ints, {}
        for name, (room, array, padding) in arrays.items():
            end = offset + array.size
            ints[offset:end] = array.reshape(-1)
            if array.size < room:
                ints[end : offset + room] = padding
            views[name] = target[offset - first : offset - first + room]
            offset += aligned(room)
        target[:total].copy_(self._block[first:offset], non_blocking=True)
        if batch.pending is not None:
            launch_fill_pending(views["ids"], batch.pending)
        return views


def total_size(arrays: Arrays) -> int:
    """Return the values of all arrays, with their padding to the next one."""
    return sum(aligned(room) for room, _, _ in arrays.values())
