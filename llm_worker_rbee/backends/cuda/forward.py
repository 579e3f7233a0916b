"""The fused forward of a model: it pads a step to one of few sizes and copies its inputs to the device
(step_inputs.py), and runs it, from a CUDA graph where there is one. launch.py launches the kernels of decoders;
pooling.py has the same for pooling models.

`launch_all` and `capture_all` leave nothing to compile, load or capture for later steps. Without them that happens when
a size occurs.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ..graph import Graph, Node, ProgramLine, op_names
from ..ops import CAPTURING, Backend, Batch, LayerCache, LoraSite, Profiler, Progress, StepLimits, first_kv
from . import precompile, profile
from .cuda_graphs import CudaGraphs
from .device import activate, as_memory_error, has_wgmma
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
    distinct_layers,
    fuse_graph,
    with_gate_factors,
    without_adapters,
    without_hidden,
)
from .step_inputs import (
    ARRAYS_PER_TOKEN,
    NO_BATCH,
    STEP_SIZES,
    Arrays,
    InputStaging,
    StepSizes,
    adapter_arrays,
    all_logits_sizes,
    all_sizes,
    decode_sizes,
    leading_ones,
    new_requests,
    prefill_sizes,
    state_arrays,
    step_arrays,
    total_size,
    turn_arrays,
    uncaptured_sizes,
)

SMALL_BATCH = 4  # tokens up to which GEMV is faster than the tensor cores
MAX_TABLE_ENTRIES = 1 << 24  # of the block tables of a graph
MIN_POSITIONS = 8192  # of the first cos and sin tables
PROGRAM_BLOCK, PROGRAM_TOKENS = 16, 64  # of the prompt whose launches a program lists


class CapturedForward(ABC):
    """A fused forward on one device, whose steps are replayed from CUDA graphs: the base of decoders and of pooling
    models. Its launcher runs `layers` in their order."""

    launcher: Any
    sample: Any  # no step does: `Backend.sample_async` launches it
    samples = False

    def __init__(self, ops: Backend, device: torch.device, nodes: Sequence[Node], mixers: Iterable[Mixer]) -> None:
        self.ops, self.device, self.nodes, self._mixers = ops, device, nodes, tuple(mixers)
        self.graphs = CudaGraphs(device)
        self.staging = InputStaging(device)
        self._max_gemv = 0  # tokens
        self._ropes: dict[int, CosSin] = {}  # by id of the RoPE table
        self._num_positions = 0
        self._graph_cache: weakref.ref[Any] | None = None  # the first tensor of the KV cache that graphs write to

    def __call__(self, batch: Batch, kv: Sequence[LayerCache]) -> torch.Tensor:
        """Run one step: write the cache and return the logits at `batch.logits_index`, of a pooling model the rows of
        all requests: float32 on the device, valid until the next step."""
        activate(self.device)
        with as_memory_error():
            return self._step(batch, kv)

    def launch(self, batch: Batch, kv: Sequence[LayerCache]) -> torch.Tensor:
        """Run the step launch by launch, without a graph."""
        activate(self.device)
        return self._step(batch, kv, is_captured=False)

    def run_profiled(self, batch: Batch, kv: Sequence[LayerCache], profiler: Profiler) -> torch.Tensor:
        activate(self.device)
        return profile.run(self.launcher, lambda: self.launch(batch, kv), profiler)

    @property
    def graph_bytes(self) -> int:
        return self.graphs.nbytes

    def program(self, kv_type: str) -> list[ProgramLine]:
        """Return the fused ops with the kernels that they launch for one token and for a prompt; none is launched."""
        activate(self.device)
        kv = self._smallest_cache(kv_type)
        steps = [self._launched(new_requests(tokens, PROGRAM_BLOCK), kv) for tokens in (1, PROGRAM_TOKENS)]
        lines = []
        for node, few, many in zip(self.nodes, *(map(", ".join, step) for step in steps), strict=True):
            runs = few if few == many else f"1 token: {few}; {PROGRAM_TOKENS}: {many}"
            lines.append(ProgramLine(node.op, op_names(node), runs))
        return lines

    def _smallest_cache(self, kv_type: str) -> list[Any]:
        layers: dict[int, LayerCache] = {}
        for op in self._mixers:
            if isinstance(op, Attention):
                kv_heads = op.n_kv_heads or 1  # none: the cache is another layer's
                layers.setdefault(op.layer, self.ops.empty_kv(1, PROGRAM_BLOCK, kv_heads, op.head_dim, kv_type))
            else:
                p = op.params if isinstance(op, GatedDelta) else None
                matrix = None if p is None else (p.v_heads, p.k_dim, p.v_dim)
                layers[op.layer] = self.ops.empty_state(1, (op.conv.shape[1] - 1, op.conv.shape[0]), matrix)
        return [layers.get(layer) for layer in range(max(layers) + 1)]

    def _launched(self, batch: Batch, kv: Sequence[LayerCache]) -> list[list[str]]:
        """Return the names of the kernels of a step by fused op, without launching them."""
        names: list[list[str]] = []

        def layers() -> Iterator[Any]:
            for layer in self.launcher.layers:
                names.append([])
                yield layer
            names.append([])  # the output head

        sizes = self._sizes(batch, is_captured=False)
        self._reserve(sizes.tokens, len(batch.ids), kv)
        step = self._stage(batch, sizes, kv)
        with precompile.noting_launches(lambda name: names[-1].append(name)):
            self._run(step, sizes, layers())
        return names[: len(self.nodes)]

    @abstractmethod
    def _sizes(self, batch: Batch, *, is_captured: bool) -> StepSizes:
        """Return the size that the arrays of a step have room for; `is_captured`: it may run from a graph."""

    @abstractmethod
    def _launch(self, step: StepInputs, sizes: StepSizes, layers: Iterable[Any] | None = None) -> Any:
        """Launch what a graph holds, of all layers or of these; return its result, None before the output head."""

    @abstractmethod
    def _warm_up_steps(self, kv: Sequence[LayerCache], limits: StepLimits) -> list[tuple[Batch, StepSizes]]:
        """Return steps of all sizes within the limits, the largest first: graphs share memory."""

    @abstractmethod
    def launch_all(self, kv: Sequence[LayerCache], limits: StepLimits, *, every_size: bool = False) -> int:
        """Launch every kernel of steps within the limits. Return the size of the vocabulary, 0 without logits.

        `every_size`: also uncaptured steps that share Triton's kernels with others: cuBLAS may have its own."""

    def _more_arrays(self, batch: Batch, sizes: StepSizes) -> Arrays | None:
        """Return the arrays of a step that only this kind of model reads."""
        return None

    def _step(self, batch: Batch, kv: Sequence[LayerCache], *, is_captured: bool = True) -> torch.Tensor:
        sizes = self._sizes(batch, is_captured=is_captured and batch.block_table.size <= MAX_TABLE_ENTRIES)
        self._reserve(sizes.tokens, int(batch.context_len.max()), kv)
        return self._run(self._stage(batch, sizes, kv), sizes)[: len(batch.logits_index)]

    def _run(self, step: StepInputs, sizes: StepSizes, layers: Iterable[Any] | None = None) -> torch.Tensor:
        launch = partial(self._launch, step, sizes, layers)
        result = self.graphs.run(sizes.graph, launch) if sizes.is_captured else launch()
        rows: torch.Tensor = self.launcher.run_head(step) if result is None else result
        return rows

    def _stage(self, batch: Batch, sizes: StepSizes, kv: Sequence[LayerCache]) -> StepInputs:
        """Copy the arrays of a step to the device, of a graph to the addresses that it holds."""
        arrays = step_arrays(batch, sizes, self._more_arrays(batch, sizes))
        if sizes.is_captured and self.staging.reserve_static(total_size(arrays)):
            self.graphs.clear()
        inputs = self.staging.copy_to_device(batch, arrays, is_static=sizes.is_captured)
        takes_gemv = sizes.num_logits is None and 0 < sizes.decoding <= self._max_gemv
        return StepInputs(batch, sizes.tokens, sizes.decoding, takes_gemv, sizes.tile_queries, inputs, kv, self._ropes)

    def _reserve(self, tokens: int, max_context: int, kv: Sequence[LayerCache]) -> None:
        """Make room for a step; drop graphs if something that they read has moved."""
        has_moved = self.launcher.reserve(max(tokens, STEP_SIZES[-1]))
        if max_context > self._num_positions:
            self._num_positions = max(2 * self._num_positions, max_context, MIN_POSITIONS)
            tables = {id(op.rope): op.rope for op in self._mixers if isinstance(op, Attention)}
            positions = torch.arange(self._num_positions, device=self.device)
            self._ropes = {key: rope_tables(table, positions) for key, table in tables.items()}
            has_moved = True
        keys = first_kv(kv).k
        if has_moved or self._graph_cache is None or self._graph_cache() is not keys:
            self._graph_cache = weakref.ref(keys)
            self.graphs.clear()

    def _reserve_all(self, tokens: int, kv: Sequence[LayerCache], limits: StepLimits) -> None:
        """Make room for all steps within the limits, of so many tokens at most."""
        activate(self.device)
        blocks = -(-limits.max_context // first_kv(kv).k.shape[2])
        self._reserve(tokens, limits.max_context, kv)
        if self.staging.reserve_static(min(limits.max_batch * blocks, MAX_TABLE_ENTRIES) + ARRAYS_PER_TOKEN * tokens):
            self.graphs.clear()

    def capture_all(self, kv: Sequence[LayerCache], limits: StepLimits, progress: Progress) -> None:
        """Capture every graph of steps within the limits; their kernels have been launched."""
        activate(self.device)
        steps = [(batch, sizes) for batch, sizes in self._warm_up_steps(kv, limits) if sizes.is_captured]
        with self.graphs.counting_memory():
            for count, (batch, sizes) in enumerate(steps):
                progress(CAPTURING, count, len(steps))
                self.graphs.capture(sizes.graph, partial(self._launch, self._stage(batch, sizes, kv), sizes))
        progress(CAPTURING, len(steps), len(steps))


class CudaForward(CapturedForward):
    """The fused forward of a decoder. Where logits must not depend on the batch (`batch_invariant`), prefill and decode
    tokens alike go through tiles of queries."""

    def __init__(
        self,
        ops: Backend,
        device: torch.device,
        nodes: Sequence[Node],
        fused: Sequence[FusedOp],
        *,
        batch_invariant: bool,
        keeps_hidden: bool,
        sites: Mapping[int, LoraSite] | None = None,
    ) -> None:
        """`sites`: of adapters, by the identities of weights; every step of this forward has adapters."""
        super().__init__(ops, device, nodes, (op for op in fused if isinstance(op, Mixer)))
        self.launcher = Launcher(fused, device, batch_invariant=batch_invariant, sites=sites)
        self._num_slots = max((len(site.packed.records) for site in (sites or {}).values()), default=0)
        self.fused, self._is_tiled, self._keeps_hidden = fused, batch_invariant, keeps_hidden
        self._has_states = any(isinstance(op, GatedDelta | ShortConv) for op in fused)
        self._has_axes = any(isinstance(op, Attention) and op.rope.axes is not None for op in fused)
        self._max_gemv = 0 if sites else max_gemv_tokens(fused, batch_invariant=batch_invariant)

    def with_hidden(self, batch: Batch, kv: Sequence[LayerCache]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the same step; return the hidden states of its tokens too, which the residual stream has."""
        logits = self(batch, kv)
        with as_memory_error():
            return logits, self.launcher.hidden_states(len(batch.ids))

    def time_decode_graph(self, requests: int) -> float | None:
        """Return the seconds of a replay of the graph of a decode step; None if it is not captured."""
        return self.graphs.time_replay(decode_sizes(requests, is_tiled=self._is_tiled).graph)

    def _sizes(self, batch: Batch, *, is_captured: bool) -> StepSizes:
        tokens, num_logits = len(batch.ids), len(batch.logits_index)
        if tokens == len(batch.context_len) == num_logits:
            sizes = decode_sizes(tokens, is_tiled=self._is_tiled)
        else:
            decoding = 0 if self._is_tiled else leading_ones(np.diff(batch.query_start))
            sizes = prefill_sizes(tokens, decoding, num_logits, is_tiled=self._is_tiled)
        return sizes if is_captured else sizes._replace(is_captured=False)

    def _launch(self, step: StepInputs, sizes: StepSizes, layers: Iterable[Any] | None = None) -> Any:
        """Launch all, with the logits of all tokens, or the layers alone."""
        if sizes.has_head:
            return self.launcher.run(step, layers)
        self.launcher.run_layers(step, layers)
        return None

    def _more_arrays(self, batch: Batch, sizes: StepSizes) -> Arrays | None:
        arrays = dict(state_arrays(batch, sizes.tokens)) if self._has_states else {}
        if self._has_axes:
            arrays |= turn_arrays(batch, sizes.tokens, sizes.decoding)
        return {**arrays, **adapter_arrays(batch, sizes.tokens, self._num_slots)} if self._num_slots else arrays

    def _warm_up_steps(self, kv: Sequence[LayerCache], limits: StepLimits) -> list[tuple[Batch, StepSizes]]:
        """Return steps without tokens: all are padding."""
        sizes = list(all_sizes(limits, is_tiled=self._is_tiled))
        self._reserve_all(max(size.tokens for size in sizes), kv, limits)
        return [(NO_BATCH, size) for size in sizes]

    def launch_all(self, kv: Sequence[LayerCache], limits: StepLimits, *, every_size: bool = False) -> int:
        sizes = [size for _, size in self._warm_up_steps(kv, limits)]
        layers = distinct_layers(self.fused)
        for size in (*sizes, *(uncaptured_sizes(limits, is_tiled=self._is_tiled) if every_size else ())):
            step = self._stage(NO_BATCH, size, kv)
            x = self.launcher.run_layers(step, layers)
            if size.has_head:
                self.launcher.compute_logits(self.launcher.head, x)
            elif size.num_logits is None:
                self.launcher.run_head(step)
        for count in all_logits_sizes(limits):
            self.launcher.run_head(self._stage(NO_BATCH, prefill_sizes(1, 0, count, is_tiled=True), kv))
        if self._keeps_hidden:
            self.launcher.hidden_states(1)
        pending = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._stage(replace(NO_BATCH, pending=pending), sizes[0], kv)
        return int(self.launcher.head.head.rows)


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


def make_forward(recorded: Graph, ops: Backend, device: torch.device, *, batch_invariant: bool) -> CudaForward | None:
    """Return the decoder of a model; None if it has a feature that these kernels lack: then it runs unfused."""
    graph, sites = without_hidden(recorded), dict[int, LoraSite]()
    if graph is not None and any(node.op == "expand" for node in graph.nodes):
        graph, sites = without_adapters(graph) or (None, {})
    program = None if graph is None else fuse_graph(graph)
    if program is None:
        return None
    if has_wgmma(device):
        program = program[0], with_gate_factors(program[1])
    keeps_hidden = recorded.hidden is not None
    options: dict[str, Any] = {"batch_invariant": batch_invariant, "keeps_hidden": keeps_hidden, "sites": sites}
    return CudaForward(ops, device, *program, **options)
