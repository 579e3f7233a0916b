"""The fused forward of a model: it pads a step to one of few sizes (step_inputs.py), copies its inputs to the device
(step_inputs.py), and runs it, from a CUDA graph where there is one. launch.py launches the kernels.

`launch_all` and `capture_all` leave nothing to compile, load or capture for later steps. Without them that happens when
a size occurs.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ..graph import Graph, ProgramLine
from ..ops import CAPTURING, Batch, Ints, LayerCache, Profiler, Progress, StepLimits, first_kv
from . import profile
from .cuda_graphs import CudaGraphs
from .device import activate, as_memory_error
from .kernels.attention_prefill import QUERY_TILE, SMALL_QUERY_TILE
from .kernels.rope import CosSin, rope_tables
from .launch import Launcher, StepInputs
from .lowering import (
    Attention,
    ExpertsAddNorm,
    FusedOp,
    GatedDelta,
    Logits,
    Mixer,
    ShortConv,
    Start,
    describe,
    distinct_layers,
    fuse_graph,
    without_hidden,
)
from .step_inputs import (
    ARRAYS_PER_TOKEN,
    NO_BATCH,
    STEP_SIZES,
    InputStaging,
    StepSizes,
    all_logits_sizes,
    all_sizes,
    decode_sizes,
    prefill_sizes,
    step_arrays,
    total_size,
    uncaptured_sizes,
)

SMALL_BATCH = 4  # tokens up to which GEMV is faster than the tensor cores
MAX_TABLE_ENTRIES = 1 << 24  # of the block tables of a graph
MIN_POSITIONS = 8192  # of the first cos and sin tables


class CudaForward:
    """The fused forward of a model on one device.

    Where logits must not depend on the batch (`batch_invariant`), prefill and decode tokens alike go through tiles of
    queries.
    """

    def __init__(
        self,
        ops: Sequence[FusedOp],
        device: torch.device,
        *,
        batch_invariant: bool,
        lines: list[ProgramLine],
        keeps_hidden: bool = False,
    ) -> None:
        self.ops, self.device, self._lines = ops, device, lines
        self.graphs = CudaGraphs(device)
        self.staging = InputStaging(device)
        self.forward = Launcher(ops, device, batch_invariant=batch_invariant)
        self._batch_invariant, self._keeps_hidden = batch_invariant, keeps_hidden
        self._tile_queries = SMALL_QUERY_TILE if batch_invariant else QUERY_TILE
        self._ropes: dict[int, CosSin] = {}  # by id of the RoPE table
        self._num_positions = 0
        self._graph_cache: weakref.ref[Any] | None = None  # the first tensor of the KV cache that graphs write to
        self._has_states = any(isinstance(op, GatedDelta | ShortConv) for op in ops)
        self._max_gemv = max_gemv_tokens(ops, batch_invariant=batch_invariant)

    def __call__(self, batch: Batch, kv: Sequence[LayerCache]) -> torch.Tensor:
        """Run one step: write the cache and return the logits at `batch.logits_index`, float32 on the device, valid
        until the next step."""
        activate(self.device)
        with as_memory_error():
            return self._step(batch, kv)

    def with_hidden(self, batch: Batch, kv: Sequence[LayerCache]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the same step; return the hidden states of its tokens too, which the residual stream has."""
        logits = self(batch, kv)
        with as_memory_error():
            return logits, self.forward.hidden_states(len(batch.ids))

    def program(self, kv_type: str) -> list[ProgramLine]:
        return self._lines

    @property
    def graph_bytes(self) -> int:
        return self.graphs.nbytes

    def run_profiled(self, batch: Batch, kv: Sequence[LayerCache], profiler: Profiler) -> torch.Tensor:
        """Run the step launch by launch, without a graph."""
        activate(self.device)
        return profile.run(self.forward, lambda: self._step(batch, kv, captured=False), profiler)

    def time_decode_graph(self, requests: int) -> float | None:
        """Return the seconds of a replay of the graph of a decode step; None if it is not captured."""
        return self.graphs.time_replay(decode_sizes(requests, is_tiled=self._batch_invariant).graph)

    def _step(self, batch: Batch, kv: Sequence[LayerCache], *, captured: bool = True) -> torch.Tensor:
        """Run a step, through a graph (`captured`) where its sizes are common ones."""
        tokens, num_logits = len(batch.ids), len(batch.logits_index)
        is_tiled, decoding = self._batch_invariant, 0
        if tokens == len(batch.context_len) == num_logits:
            sizes, decoding = decode_sizes(tokens, is_tiled=is_tiled), 0 if is_tiled else tokens
        else:
            decoding = 0 if is_tiled else _leading_ones(np.diff(batch.query_start))
            sizes = prefill_sizes(tokens, decoding, num_logits, is_tiled=is_tiled)
        if batch.block_table.size > MAX_TABLE_ENTRIES or not captured:
            sizes = sizes._replace(is_captured=False)
        self._reserve(sizes.tokens, int(batch.context_len.max()), kv)
        return self._run(batch, sizes, decoding, kv)[:num_logits]

    def _run(self, batch: Batch, sizes: StepSizes, decoding: int, kv: Sequence[LayerCache]) -> torch.Tensor:
        step = self._stage(batch, sizes, decoding, kv)
        if sizes.is_captured:
            logits = self.graphs.run(sizes.graph, lambda: self._launch(step, sizes))
        else:
            logits = self._launch(step, sizes)
        return self.forward.run_head(step) if logits is None else logits

    def _launch(self, step: StepInputs, sizes: StepSizes) -> torch.Tensor | None:
        """Launch what a graph holds: all, with the logits of all tokens, or the layers alone."""
        if sizes.has_head:
            return self.forward.run(step)
        self.forward.run_layers(step)
        return None

    def _stage(self, batch: Batch, sizes: StepSizes, decoding: int, kv: Sequence[LayerCache]) -> StepInputs:
        """Copy the arrays of a step to the device, of a graph to the addresses that it holds."""
        arrays = step_arrays(batch, sizes, decoding, self._tile_queries, has_states=self._has_states)
        if sizes.is_captured and self.staging.reserve_static(total_size(arrays)):
            self.graphs.clear()
        inputs = self.staging.copy_to_device(batch, arrays, is_static=sizes.is_captured)
        takes_gemv = sizes.num_logits is None and 0 < sizes.decoding <= self._max_gemv
        return StepInputs(sizes.tokens, sizes.decoding, takes_gemv, self._tile_queries, inputs, kv, self._ropes)

    def _reserve(self, tokens: int, max_context: int, kv: Sequence[LayerCache]) -> None:
        """Make room for a step; drop graphs if something that they read has moved."""
        has_moved = self.forward.reserve(max(tokens, STEP_SIZES[-1]))
        if max_context > self._num_positions:
            self._num_positions = max(2 * self._num_positions, max_context, MIN_POSITIONS)
            tables = {id(op.rope): op.rope for op in self.ops if isinstance(op, Attention)}
            positions = torch.arange(self._num_positions, device=self.device)
            self._ropes = {key: rope_tables(table, positions) for key, table in tables.items()}
            has_moved = True
        keys = first_kv(kv).k
        if has_moved or self._graph_cache is None or self._graph_cache() is not keys:
            self._graph_cache = weakref.ref(keys)
            self.graphs.clear()

    def launch_all(self, kv: Sequence[LayerCache], limits: StepLimits, *, every_size: bool = False) -> int:
        """Launch every kernel of steps within the limits; all tokens are padding. Return the size of the vocabulary.

        `every_size`: also uncaptured steps whose kernels of Triton are those of others: cuBLAS may have its own."""
        activate(self.device)
        sizes = self._reserve_all(kv, limits)
        layers = distinct_layers(self.ops)
        for size in (*sizes, *(uncaptured_sizes(limits, is_tiled=self._batch_invariant) if every_size else ())):
            x = self.forward.run_layers(self._stage(NO_BATCH, size, 0, kv), layers)
            if size.has_head:
                self.forward.compute_logits(self.forward.head, x)
        for count in all_logits_sizes(limits):
            self.forward.run_head(self._stage(NO_BATCH, prefill_sizes(1, 0, count, is_tiled=True), 0, kv))
        if self._keeps_hidden:
            self.forward.hidden_states(1)
        pending = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._stage(replace(NO_BATCH, pending=pending), sizes[0], 0, kv)
        return self.forward.head.head.rows

    def capture_all(self, kv: Sequence[LayerCache], limits: StepLimits, progress: Progress) -> None:
        """Capture every graph of steps within the limits; their kernels have been launched."""
        activate(self.device)
        sizes = [size for size in self._reserve_all(kv, limits) if size.is_captured]
        with self.graphs.counting_memory():
            for count, size in enumerate(sizes):
                progress(CAPTURING, count, len(sizes))
                self.graphs.capture(size.graph, partial(self._launch, self._stage(NO_BATCH, size, 0, kv), size))
        progress(CAPTURING, len(sizes), len(sizes))

    def _reserve_all(self, kv: Sequence[LayerCache], limits: StepLimits) -> list[StepSizes]:
        """Make room for all steps within the limits; return their sizes."""
        sizes = list(all_sizes(limits, is_tiled=self._batch_invariant))
        most, blocks = max(size.tokens for size in sizes), -(-limits.max_context // first_kv(kv).k.shape[2])
        self._reserve(most, limits.max_context, kv)
        if self.staging.reserve_static(min(limits.max_batch * blocks, MAX_TABLE_ENTRIES) + ARRAYS_PER_TOKEN * most):
            self.graphs.clear()
        return sizes


def max_gemv_tokens(ops: Sequence[FusedOp], *, batch_invariant: bool) -> int:
    """Return up to how many decoding tokens take GEMV."""
    if batch_invariant or any(isinstance(op, Attention) and op.following.is_packed and op.head_dim % 32 for op in ops):
        return 0  # int8 blocks of 32 would hold values of two heads
    experts = [op for op in ops if isinstance(op, ExpertsAddNorm)]
    if not all(len(op.w.parts) == 1 and op.w.is_packed and op.down.is_packed for op in experts):
        return 0  # gate and up of a GEMV are one matrix
    mixers = [op for op in ops if isinstance(op, Mixer)]
    weights = [op.w for op in ops if not isinstance(op, Start | Mixer | Logits)]
    weights += [op.parallel.down for op in experts if op.parallel is not None]
    weights += [w for op in mixers for w in (op.qkv, op.gate) if w is not None]
    return SMALL_BATCH if all(w.is_packed or w.is_fp8 for w in weights) else 1


def _leading_ones(counts: Ints) -> int:
    """Return how many requests at the front have one token."""
    other = np.flatnonzero(counts != 1)
    return int(other[0]) if len(other) else len(counts)


def make_forward(recorded: Graph, device: torch.device, *, batch_invariant: bool) -> CudaForward | None:
    """Return the decoder of a model; None if it has a feature that these kernels lack: then it runs unfused."""
    graph = without_hidden(recorded)
    ops = None if graph is None else fuse_graph(graph)
    if graph is None or ops is None:
        return None
    return CudaForward(
        ops, device, batch_invariant=batch_invariant, lines=describe(graph), keeps_hidden=recorded.hidden is not None
    )
