"""The fused forward of a whole model: which kernels a step takes, its inputs on the device, graphs where sizes repeat.

Decode steps run in CUDA graphs, padded to one of DECODE_SIZES (padding has position -1 and writes nothing): up to
SMALL_BATCH tokens through decode_small_batch.py, more through forward_batched.py. So do steps with prefill, where few
requests prefill at once and the sizes are common ones; larger ones run uncaptured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..graph import Graph, ProgramLine
from ..ops import Batch, Ints, KVLayer, Profiler, RopeTable
from .attention_decode import CosSin
from .attention_prefill import QUERY_TILE, SMALL_QUERY_TILE, query_tiles
from .cuda_graphs import CudaGraphs
from .decode_small_batch import SmallBatchDecoder
from .device import activate, as_memory_error
from .elementwise import IS_GELU
from .forward_batched import BatchedForward
from .fused_ops import (
    Attention,
    EmbedNorm,
    FusedOp,
    GatedLinear,
    describe,
    fuse_graph,
    layer_weights,
)

NO_IDS = np.empty(0, np.int64)
SMALL_BATCH = 4  # tokens up to which GEMV is faster than the tensor cores
DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
PREFILL_GRAPH_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)  # tokens of a step, padded
DECODE_ALONGSIDE_SIZES = (0, 16, 64, 256)  # of them decoding
NUM_LOGITS_SIZES = (0, 1, 4, 16, 64, 256)
MAX_PREFILL_REQUESTS = 8  # in a graph
MAX_TABLE_ENTRIES = 1 << 22  # of block tables on the device
MIN_POSITIONS = 8192  # of the first cos and sin tables
STAGING_INTS = 1 << 20
ALIGNMENT = 4  # int32: 16 bytes

Arrays = Mapping[str, tuple[int, NDArray[Any], int]]  # by name: (room, values, padding of the rest of the room)


def aligned(count: int) -> int:
    """Return the offset after an array of `count` values."""
    return -(-count // ALIGNMENT) * ALIGNMENT


class InputStaging:
    """Page-locked host memory through which the integers of a step reach the device: one block, one copy.

    Every array begins at 16 bytes, so that kernels are compiled once, for aligned pointers. Steps use the next piece of
    the memory in turn; the host waits only when it starts over."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
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

    def copy_to_device(self, arrays: Arrays, target: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Copy arrays to the device, into `target` if given; return views of them by name."""
        total = sum(aligned(room) for room, _, _ in arrays.values())
        first = offset = self._reserve(total)
        ints, views = self._ints, {}
        if target is None:
            target = torch.empty(total, dtype=torch.int32, device=self.device)
        for name, (room, array, padding) in arrays.items():
            end = offset + array.size
            ints[offset:end] = array.reshape(-1)
            if array.size < room:
                ints[end : offset + room] = padding
            views[name] = target[offset - first : offset - first + room]
            offset += aligned(room)
        target[:total].copy_(self._block[first:offset], non_blocking=True)
        return views


class Decoder:
    """The fused forward of a model on one device.

    Where logits must not depend on the batch (`batch_invariant`), prefill and decode tokens alike go through tiles of
    queries; decode steps still run in graphs.
    """

    def __init__(
        self, ops: Sequence[FusedOp], device: torch.device, *, batch_invariant: bool, lines: list[ProgramLine]
    ) -> None:
        self.ops, self.device, self._lines = ops, device, lines
        self.graphs = CudaGraphs(device)
        self.staging = InputStaging(device)
        self.batched = BatchedForward(ops, device, batch_invariant)
        self._small: dict[int, SmallBatchDecoder] = {}
        self._static_inputs: torch.Tensor | None = None
        self._ropes: dict[int, CosSin] = {}  # by id of the RoPE table
        self._num_positions = 0
        self._graph_cache: weakref.ref[Any] | None = None  # the first tensor of the KV cache that graphs write to
        takes_gemv = all(w.is_packed or w.is_fp8 for w in layer_weights(ops))
        self._max_small = SMALL_BATCH if takes_gemv else 1
        if any(isinstance(op, Attention) and op.following.is_packed and op.head_dim % 32 for op in ops):
            self._max_small = 0  # int8 blocks of 32 would hold values of two heads
        self._step = self._tiled_step if batch_invariant else self._split_kv_step

    def __call__(self, batch: Batch, kv: Sequence[KVLayer]) -> torch.Tensor:
        """Run one step: write the cache and return the logits at `batch.logits_index`, float32 on the device, valid
        until the next step."""
        activate(self.device)
        with as_memory_error():
            self._prepare(batch, kv)
            return self._step(batch, kv)

    def program(self, kv_type: str) -> list[ProgramLine]:
        return self._lines

    @property
    def graph_bytes(self) -> int:
        return self.graphs.nbytes

    def run_profiled(self, batch: Batch, kv: Sequence[KVLayer], profiler: Profiler) -> torch.Tensor:
        def step() -> torch.Tensor:
            logits = self(batch, kv)
            if logits.is_cuda:
                torch.cuda.synchronize()
            return logits

        out: torch.Tensor = profiler("decoder", step)()
        return out

    def _split_kv_step(self, batch: Batch, kv: Sequence[KVLayer]) -> torch.Tensor:
        tokens = len(batch.ids)
        if tokens == len(batch.context_len) == len(batch.logits_index) and tokens <= DECODE_SIZES[-1]:
            size = next(size for size in DECODE_SIZES if size >= tokens)
            if batch.block_table.shape[1] * size <= MAX_TABLE_ENTRIES:
                return self._decode_step(batch, kv, tokens, size)
        return self._mixed_step(batch, kv)

    def _decode_step(self, batch: Batch, kv: Sequence[KVLayer], tokens: int, size: int) -> torch.Tensor:
        """Run a step in which every request decodes, through a graph."""
        table = batch.block_table
        arrays = {
            "width": (1, np.array(table.shape[1]), 0), "ids": (size, _host_ids(batch), 0),
            "decode_positions": (size, batch.positions, -1), "tables": (table.size, table, 0),
        }  # fmt: skip
        inputs = self._stage(batch, arrays, is_static=True)
        inputs["tile_first"] = inputs["width"][:0]
        if size <= self._max_small:
            if size not in self._small:
                self._small[size] = SmallBatchDecoder(self.ops, size, self.device)
            small = self._small[size]
            args = (inputs["ids"], inputs["decode_positions"], inputs["tables"], inputs["width"])
            return self.graphs.run(size, lambda: small.step(*args, kv, self._ropes))[:tokens]
        return self.graphs.run(size, lambda: self.batched.step(size, inputs, size, None, kv, self._ropes))[:tokens]

    def _mixed_step(self, batch: Batch, kv: Sequence[KVLayer]) -> torch.Tensor:
        """Run a step with prefill: through a graph where its sizes are common ones."""
        decoding = _leading_ones(np.diff(batch.query_start))
        requests, firsts = query_tiles(batch.query_start, QUERY_TILE, decoding)
        tokens, num_logits, table = len(batch.ids), len(batch.logits_index), batch.block_table
        sizes = (
            _size_of(tokens, PREFILL_GRAPH_SIZES), _size_of(decoding, DECODE_ALONGSIDE_SIZES),
            _size_of(num_logits, NUM_LOGITS_SIZES),
        )  # fmt: skip
        fits = None not in sizes and len(requests) <= tokens // QUERY_TILE + MAX_PREFILL_REQUESTS
        fits = fits and len(table) <= decoding + MAX_PREFILL_REQUESTS and table.size <= MAX_TABLE_ENTRIES
        if not fits:
            sizes = (tokens, decoding, num_logits)
        size, decode_size, logits_size = (int(n or 0) for n in sizes)
        slots = np.concatenate((np.full(decoding, -1), batch.slot_mapping[decoding:]))
        max_tiles, max_requests = len(requests), len(table)
        if fits:
            max_tiles, max_requests = size // QUERY_TILE + MAX_PREFILL_REQUESTS, decode_size + MAX_PREFILL_REQUESTS
        arrays = {
            "width": (1, np.array(table.shape[1]), 0), "ids": (size, _host_ids(batch), 0),
            "positions": (size, batch.positions, 0), "decode_positions": (decode_size, batch.positions[:decoding], -1),
            "slots": (size, slots, -1), "query_start": (max_requests + 1, batch.query_start, 0),
            "context_len": (max_requests, batch.context_len, 0), "tile_request": (max_tiles, requests, -1),
            "tile_first": (max_tiles, firsts, 0), "logits_index": (logits_size, batch.logits_index, 0),
            "tables": (table.size, table, 0),
        }  # fmt: skip
        inputs = self._stage(batch, arrays, is_static=fits)

        def step() -> torch.Tensor:
            return self.batched.step(size, inputs, decode_size, logits_size, kv, self._ropes)

        return (self.graphs.run((size, decode_size, logits_size), step) if fits else step())[:num_logits]

    def _tiled_step(self, batch: Batch, kv: Sequence[KVLayer]) -> torch.Tensor:
        """Run a step whose tokens all go through tiles of queries of one size."""
        tokens, num_logits, table = len(batch.ids), len(batch.logits_index), batch.block_table
        size = _size_of(tokens, DECODE_SIZES) if tokens == len(table) == num_logits else None
        if size is None or table.shape[1] * size > MAX_TABLE_ENTRIES:
            size = 0
        tile = SMALL_QUERY_TILE
        requests, firsts = query_tiles(batch.query_start, tile)
        max_tokens, max_tiles, max_requests = (size, size, size) if size else (tokens, len(requests), len(table))
        arrays = {
            "width": (1, np.array(table.shape[1]), 0), "ids": (max_tokens, _host_ids(batch), 0),
            "positions": (max_tokens, batch.positions, 0), "slots": (max_tokens, batch.slot_mapping, -1),
            "query_start": (max_requests + 1, batch.query_start, 0),
            "context_len": (max_requests, batch.context_len, 0), "tile_request": (max_tiles, requests, -1),
            "tile_first": (max_tiles, firsts, 0), "logits_index": (size or num_logits, batch.logits_index, 0),
            "tables": (table.size, table, 0),
        }  # fmt: skip
        inputs = self._stage(batch, arrays, is_static=bool(size))
        if not size:
            return self.batched.step(tokens, inputs, 0, num_logits, kv, self._ropes, tile_queries=tile)

        def step() -> torch.Tensor:
            return self.batched.step(size, inputs, 0, None, kv, self._ropes, tile_queries=tile)

        return self.graphs.run(size, step)[:tokens]

    def _stage(self, batch: Batch, arrays: Arrays, *, is_static: bool) -> dict[str, torch.Tensor]:
        """Copy the arrays of a step to the device, of a graph to the addresses that it holds."""
        if is_static and self._static_inputs is None:
            size = MAX_TABLE_ENTRIES + 4 * PREFILL_GRAPH_SIZES[-1] + 16 * DECODE_SIZES[-1]
            self._static_inputs = torch.zeros(size, dtype=torch.int32, device=self.device)
        inputs = self.staging.copy_to_device(arrays, self._static_inputs if is_static else None)
        if isinstance(batch.ids, torch.Tensor):  # sampled by the step before, and on the device already
            inputs["ids"][: len(batch.ids)].copy_(cast(torch.Tensor, batch.ids))
        return inputs

    def _prepare(self, batch: Batch, kv: Sequence[KVLayer]) -> None:
        """Extend the cos and sin tables if needed; drop graphs if these or the KV cache have moved."""
        max_context = int(batch.context_len.max())
        if max_context > self._num_positions:
            self._num_positions = max(2 * self._num_positions, max_context, MIN_POSITIONS)
            tables = {id(op.rope): op.rope for op in self.ops if isinstance(op, Attention)}
            self._ropes = {key: rope_tables(t, self._num_positions, self.device) for key, t in tables.items()}
            self._graph_cache = None
        if self._graph_cache is None or self._graph_cache() is not kv[0].k:
            self._graph_cache = weakref.ref(kv[0].k)
            self.graphs.clear()


def rope_tables(table: RopeTable, positions: int, device: torch.device) -> CosSin:
    """Return cosines and sines of all positions: angles in float32, as everywhere, their functions exact."""
    inv_freq = torch.tensor(table.inv_freq, device=device)
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * inv_freq
    cos, sin = (f(angles.double()).mul(table.scale).float().contiguous() for f in (torch.cos, torch.sin))
    return CosSin(cos, sin)


def _host_ids(batch: Batch) -> Ints:
    return NO_IDS if isinstance(batch.ids, torch.Tensor) else batch.ids


def _size_of(count: int, sizes: tuple[int, ...]) -> int | None:
    """Return the smallest size that has room."""
    return next((size for size in sizes if size >= count), None)


def _leading_ones(counts: Ints) -> int:
    """Return how many requests at the front have one token."""
    other = np.flatnonzero(counts != 1)
    return int(other[0]) if len(other) else len(counts)


def fuse(record: Callable[[], Graph], device: torch.device, *, batch_invariant: bool) -> Decoder | None:
    """Return the decoder of a model; None if it has a feature that these kernels lack: then it runs unfused."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what packing needed: the KV cache takes the rest
    graph = record()
    ops = fuse_graph(graph)
    if ops is None or not all(map(_is_supported, ops)):
        return None
    return Decoder(ops, device, batch_invariant=batch_invariant, lines=describe(graph))


def _is_supported(op: FusedOp) -> bool:
    match op:
        case EmbedNorm():
            return len(op.table.parts) == 1 and len(op.norm.weight) % 32 == 0
        case GatedLinear():
            return op.activation in IS_GELU and op.w.rows % 64 == 0
        case Attention():
            return op.head_dim % 4 == 0  # the KV cache is read in words of 32 bits
        case _:
            return True
