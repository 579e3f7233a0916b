"""The fused forward of a model: it stages the inputs of a step, chooses its padded sizes, and keeps the CUDA graphs.

Decode steps run in CUDA graphs, padded to one of DECODE_SIZES (padding has position -1 and writes nothing). So do steps
with prefill, where few requests prefill at once and the sizes are common ones; larger ones run uncaptured. forward.py
launches the kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..graph import Graph, ProgramLine
from ..ops import Batch, Ints, KVLayer, Profiler, RopeTable
from .attention_prefill import QUERY_TILE, SMALL_QUERY_TILE, query_tiles
from .cuda_graphs import CudaGraphs
from .device import activate, as_memory_error
from .forward import Forward, StepInputs
from .fused_ops import Attention, EmbedNorm, FusedOp, Logits, describe, fuse_graph
from .rope import CosSin

NO_IDS = np.empty(0, np.int64)
NO_TILES = NO_IDS, NO_IDS
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


class StepSizes(NamedTuple):
    """What the arrays of a step have room for; of a graph it is padded."""

    tokens: int
    decoding: int  # tokens that decode by split-KV; the others go through tiles of queries
    tiles: int
    requests: int
    num_logits: int | None  # None: of all tokens
    key: Any = None  # of its graph; None: it runs uncaptured


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
        self.forward = Forward(ops, device, batch_invariant=batch_invariant)
        self._batch_invariant = batch_invariant
        self._static_inputs: torch.Tensor | None = None
        self._ropes: dict[int, CosSin] = {}  # by id of the RoPE table
        self._num_positions = 0
        self._graph_cache: weakref.ref[Any] | None = None  # the first tensor of the KV cache that graphs write to
        self._max_gemv = max_gemv_tokens(ops, batch_invariant=batch_invariant)

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

    def _step(self, batch: Batch, kv: Sequence[KVLayer]) -> torch.Tensor:
        """Run a step, through a graph where its sizes are common ones."""
        is_decode = len(batch.ids) == len(batch.context_len) == len(batch.logits_index)
        decoding = 0
        if not self._batch_invariant:
            decoding = len(batch.ids) if is_decode else _leading_ones(np.diff(batch.query_start))
        tile_queries = SMALL_QUERY_TILE if self._batch_invariant else QUERY_TILE
        tiles = query_tiles(batch.query_start, tile_queries, decoding) if decoding < len(batch.ids) else NO_TILES
        sizes = self._padded_sizes(batch, decoding, len(tiles[0]), is_decode=is_decode)
        arrays = _step_arrays(batch, sizes, decoding, tiles)
        inputs = self._stage(batch, arrays, is_static=sizes.key is not None)
        takes_gemv = sizes.num_logits is None and 0 < sizes.decoding <= self._max_gemv
        step = StepInputs(sizes.tokens, sizes.decoding, takes_gemv, tile_queries, inputs, kv, self._ropes)
        count = len(batch.logits_index)
        if sizes.key is None:
            return self.forward.run(step)[:count]
        return self.graphs.run(sizes.key, lambda: self.forward.run(step))[:count]

    def _padded_sizes(self, batch: Batch, decoding: int, tiles: int, *, is_decode: bool) -> StepSizes:
        """Return the sizes of the graph that has room for a step, else its own."""
        tokens, num_logits, table = len(batch.ids), len(batch.logits_index), batch.block_table
        if is_decode:
            size = _size_of(tokens, DECODE_SIZES)
            if size is not None and table.shape[1] * size <= MAX_TABLE_ENTRIES:
                is_tiled = decoding == 0
                return StepSizes(size, 0 if is_tiled else size, size if is_tiled else 0, size, None, size)
        key = (
            _size_of(tokens, PREFILL_GRAPH_SIZES), _size_of(decoding, DECODE_ALONGSIDE_SIZES),
            _size_of(num_logits, NUM_LOGITS_SIZES),
        )  # fmt: skip
        fits = not self._batch_invariant and tiles <= tokens // QUERY_TILE + MAX_PREFILL_REQUESTS
        fits = fits and len(table) <= decoding + MAX_PREFILL_REQUESTS and table.size <= MAX_TABLE_ENTRIES
        if not fits or None in key:
            return StepSizes(tokens, decoding, tiles, len(table), num_logits)
        size, decode_size, logits_size = (int(n or 0) for n in key)
        max_tiles = size // QUERY_TILE + MAX_PREFILL_REQUESTS
        return StepSizes(size, decode_size, max_tiles, decode_size + MAX_PREFILL_REQUESTS, logits_size, key)

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
            positions = torch.arange(self._num_positions, device=self.device)
            self._ropes = {key: rope_tables(table, positions) for key, table in tables.items()}
            self._graph_cache = None
        if self._graph_cache is None or self._graph_cache() is not kv[0].k:
            self._graph_cache = weakref.ref(kv[0].k)
            self.graphs.clear()


def rope_tables(table: RopeTable, positions: torch.Tensor) -> CosSin:
    """Return cosines and sines of positions: angles in float32, as everywhere, their functions exact."""
    angles = positions.float()[:, None] * torch.tensor(table.inv_freq, device=positions.device)
    cos, sin = (f(angles.double()).mul(table.scale).float().contiguous() for f in (torch.cos, torch.sin))
    return CosSin(cos, sin)


def max_gemv_tokens(ops: Sequence[FusedOp], *, batch_invariant: bool) -> int:
    """Return up to how many decoding tokens take GEMV."""
    if batch_invariant or any(isinstance(op, Attention) and op.following.is_packed and op.head_dim % 32 for op in ops):
        return 0  # int8 blocks of 32 would hold values of two heads
    layers = (op for op in ops if not isinstance(op, EmbedNorm | Logits))
    weights = (op.qkv if isinstance(op, Attention) else op.w for op in layers)
    return SMALL_BATCH if all(w.is_packed or w.is_fp8 for w in weights) else 1


def _step_arrays(batch: Batch, sizes: StepSizes, decoding: int, tiles: tuple[Ints, Ints]) -> dict[str, Any]:
    """Return the arrays that the kernels of a step read; the block tables, of any size, at the end."""
    table, size = batch.block_table, sizes.tokens
    arrays = {
        "width": (1, np.array(table.shape[1]), 0), "ids": (size, _host_ids(batch), 0),
        "decode_positions": (sizes.decoding, batch.positions[:decoding], -1),
    }  # fmt: skip
    if sizes.tiles:
        slots = batch.slot_mapping
        if decoding:
            slots = np.concatenate((np.full(decoding, -1), slots[decoding:]))
        arrays |= {
            "positions": (size, batch.positions, 0), "slots": (size, slots, -1),
            "query_start": (sizes.requests + 1, batch.query_start, 0),
            "context_len": (sizes.requests, batch.context_len, 0),
            "tile_request": (sizes.tiles, tiles[0], -1), "tile_first": (sizes.tiles, tiles[1], 0),
        }  # fmt: skip
    if sizes.num_logits is not None:
        arrays["logits_index"] = (sizes.num_logits, batch.logits_index, 0)
    return arrays | {"tables": (table.size, table, 0)}


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
    if ops is None:
        return None
    return Decoder(ops, device, batch_invariant=batch_invariant, lines=describe(graph))
