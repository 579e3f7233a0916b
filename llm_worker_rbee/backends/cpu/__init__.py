"""The CPU backend: every op of the reference in Numba kernels on packed weights. `reference.py` defines the ops.

Weights are copied and repacked when they are prepared; nothing of the model file is read afterwards. Keys and values
are float32, float16 or int8, each head padded to a multiple of 16 values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...config import ModelConfig
from ...weights import Checkpoint, Tensor
from .. import cpu_info, reference
from ..graph import Graph, Node
from ..ops import (
    AttentionParams,
    Backend,
    Batch,
    Ints,
    KVLayer,
    Logprobs,
    LoraSite,
    Progress,
    RopeTable,
    RouteParams,
    SampleRow,
    SitePairs,
    StateLayer,
    TokenMask,
)
from . import forward, precompile, sampling
from .experts import PackedExperts, combine_rows, grouped_linear, pack_experts, route_tokens
from .kernels import elementwise, gated_delta, kv_layout, lora
from .kernels.attention import NUMBERS_PER_TILE, attention_tasks, partial_bytes, split_work_task
from .kernels.encoder import axes_angles_task
from .kernels.kv_layout import kv_type_of, layer_addresses, padded_dim
from .kernels.pointers import aligned
from .kernels.program import Step
from .kernels.rope import angles_task, rope_store_task, temperature_of
from .linear import PackedWeight, dequantize_rows, pack_weight
from .program import Program, prepare_step, run_step

Floats = NDArray[np.float32]


@lru_cache(maxsize=1024)
def _norm_program(width: int, weight: int, eps: float, add_delta: bool, scale: float) -> Program:
    """Return one norm by the address of its weight: of a delta and a residual stream, to an output."""
    x, residual, out = range(Step.END, Step.END + 3)
    outputs, weights = (out, 0, 0), (weight, 0)
    return Program(
        [
            elementwise.norm_task(
                Step.TOKENS, x, residual, outputs, weights, width, eps, add_delta=add_delta, scale=scale
            )
        ]
    )


@cache
def _gated_program(width: int, activation: str) -> Program:
    return Program([elementwise.gated_task(Step.END, Step.END + 1, 0, width, activation)])


def _is_unknown_gate_of_experts(node: Node) -> bool:
    """Return whether an activation would run on the host, which knows nothing of grouped rows."""
    return node.op == "gated" and len(node.output.shape) == 3 and node["activation"] not in elementwise.ACTIVATIONS


class CpuBackend(Backend):
    """Numba kernels on the CPU with a number of threads of its own."""

    name = "cpu"
    threads: int

    def __init__(self, threads: int | None = None) -> None:
        self.threads = cpu_info.choose_thread_count(threads)

    def load_kernels(
        self, checkpoint: Checkpoint, config: ModelConfig, kv_type: str, progress: Progress | None = None
    ) -> int:
        return precompile.load_kernels(precompile.model_kernels(checkpoint, config, kv_type), progress)

    def prepare(self, tensors: Sequence[Tensor]) -> PackedWeight:
        return pack_weight(tensors, self.threads)

    def prepare_experts(self, experts: Sequence[Sequence[Tensor]]) -> PackedExperts:
        return pack_experts(experts, self.threads)

    def prepare_vector(self, values: Floats) -> Floats:
        return np.array(values, np.float32)

    def empty_kv(self, blocks: int, block_size: int, kv_heads: int, head_dim: int, kind: str = "float32") -> KVLayer:
        return kv_layout.empty_layer(blocks, block_size, kv_heads, head_dim, kind)

    def empty_state(
        self, slots: int, conv_shape: tuple[int, int], matrix_shape: tuple[int, int, int] | None = None
    ) -> StateLayer:
        shapes = (conv_shape,) if matrix_shape is None else (conv_shape, matrix_shape)
        return StateLayer(*(aligned(np.zeros, (slots, *shape), np.float32) for shape in shapes))

    def pack_adapter(self, site: LoraSite, pairs: SitePairs) -> lora.PackedPairs:
        return lora.pack_pairs(site, pairs)

    def place_adapter(self, site: LoraSite, slot: int, packed: lora.PackedPairs | None, num_slots: int) -> None:
        site.packed = lora.SiteTable(site, num_slots) if site.packed is None else site.packed
        site.packed.place(slot, packed)

    def compute(self, op: str, args: dict[str, Any]) -> Any:
        if op in ("shrink", "expand"):
            return forward.run_adapters(op, args, self.threads)
        return forward.run_alone(op, args, self.threads)

    def embed(self, table: PackedWeight, ids: Ints, scale: float = 1.0) -> Floats:
        (part,) = table.parts
        return dequantize_rows(part, ids, scale, min(self.threads, max(1, len(ids))))

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        rows = np.ascontiguousarray(x, np.float32)
        return self._norm(rows, rows, weight, eps, False).reshape(x.shape)

    def add_rms_norm(
        self, x: Floats, residual: Floats, weight: Floats, eps: float, scale: float = 1.0
    ) -> tuple[Floats, Floats]:
        total = np.array(residual, np.float32)
        return self._norm(np.ascontiguousarray(x, np.float32), total, weight, eps, True, scale), total

    def _norm(
        self, x: Floats, residual: Floats, weight: Floats, eps: float, add_delta: bool, scale: float = 1.0
    ) -> Floats:
        out, tokens = np.empty_like(residual), residual.size // weight.size
        program = _norm_program(weight.size, weight.ctypes.data, eps, add_delta, scale)
        run_step(program, dict(enumerate((x, residual, out), Step.END)), {Step.TOKENS: tokens}, self.threads)
        return out

    def add(self, x: Floats, residual: Floats) -> Floats:
        return residual + x

    def linear(self, x: Floats, w: PackedWeight, bias: Floats | None = None) -> Floats:
        out = w.matmul(x, self.threads)
        return out if bias is None else out + bias

    split_heads = staticmethod(reference.split_heads)
    merge = staticmethod(reference.merge)
    pool = staticmethod(reference.pool)
    join = staticmethod(reference.join)
    clamp = staticmethod(reference.clamp)
    interpolate = staticmethod(reference.interpolate)
    place_images = staticmethod(reference.place_images)

    def rope_store(
        self, q: Floats, k: Floats, v: Floats, positions: Ints, table: RopeTable, kv: KVLayer, slot_mapping: Ints
    ) -> Floats:
        """Return q as a view of padded heads."""
        tokens, heads, dim = q.shape
        pairs, kv_heads = len(table.inv_freq), k.shape[1]
        out = np.empty((tokens, heads, padded_dim(dim)), np.float32)
        angles = (np.empty(tokens * pairs, np.float32) for _ in range(2))
        buffers = dict(enumerate((*angles, np.concatenate((q, k, v), axis=1, dtype=np.float32), out), Step.END))
        cos, _, qkv, queries = buffers
        angle_task = angles_task if table.axes is None else axes_angles_task
        inputs: dict[int, NDArray[Any]] = {
            Step.POSITIONS if table.axes is None else Step.ROPE_POSITIONS: positions.astype(np.int64),
            Step.SLOT_MAPPING: slot_mapping.astype(np.int64),
            Step.KV: layer_addresses([kv]),
        }
        kind, temperature = kv_type_of(kv), temperature_of(table)
        store = rope_store_task(0, cos, pairs, heads, kv_heads, dim, kind, qkv, queries, temperature)
        counts: dict[int, int] = {Step.TOKENS: tokens, Step.BLOCK_SIZE: kv.v.shape[2]}
        run_step(Program([angle_task(table, cos), store]), {**inputs, **buffers}, counts, self.threads)
        return out[:, :, :dim]

    def attention(
        self, q: Floats, kv: KVLayer, batch: Batch, params: AttentionParams, sinks: Floats | None = None
    ) -> Floats:
        return self.prepare_attention(q, kv, batch, params, sinks)()

    def prepare_attention(
        self, q: Floats, kv: KVLayer, batch: Batch, params: AttentionParams, sinks: Floats | None = None
    ) -> Callable[[], Floats]:
        """Return a function that attends and returns the same array each time."""
        tokens, heads, dim = q.shape
        kv_heads, size, padded = kv.v.shape[1:]
        queries = np.zeros((tokens, heads, padded), np.float32)
        queries[:, :, :dim] = q
        out = np.empty_like(queries)
        buffers = dict(enumerate((queries, out, np.empty(tokens * heads * NUMBERS_PER_TILE, np.int64)), Step.END))
        entry, result, work = buffers
        tasks = attention_tasks(0, heads, kv_heads, dim, params, kv_type_of(kv), entry, result, work, sinks=sinks)
        tasks.insert(0, split_work_task(heads, kv_heads, self.threads, work))
        partials = np.empty(
            partial_bytes(heads, kv_heads, dim, self.threads, batch.block_table.shape[1] * size), np.uint8
        )
        entries = {
            Step.POSITIONS: batch.positions,
            Step.QUERY_START: batch.query_start,
            Step.BLOCK_TABLE: batch.block_table,
            Step.KV: layer_addresses([kv]),
            **buffers,
        }
        if params.spans and batch.spans.size:
            entries[Step.SPANS] = batch.spans
        if partials.size:
            entries[Step.PARTIALS] = partials
        counts: dict[int, int] = {
            Step.TOKENS: tokens,
            Step.BLOCK_SIZE: size,
            Step.TABLE_WIDTH: batch.block_table.shape[1],
            Step.REQUESTS: len(batch.context_len),
        }
        run = prepare_step(Program(tasks), entries, counts, self.threads)

        def attend(held: tuple[Any, ...] = (kv, sinks)) -> Floats:  # which it keeps alive
            run()
            return out[:, :, :dim].reshape(tokens, heads * dim)

        return attend

    def gated(self, gate_up: Floats, activation: str) -> Floats:
        if activation not in elementwise.ACTIVATIONS:
            return reference.gated(gate_up, activation)
        half = gate_up.shape[-1] // 2
        gate_up, out = np.ascontiguousarray(gate_up, np.float32), np.empty((*gate_up.shape[:-1], half), np.float32)
        entries = dict(enumerate((gate_up, out), Step.END))
        run_step(_gated_program(half, activation), entries, {Step.TOKENS: out.size // half}, self.threads)
        return out

    def route(
        self, logits: Floats, params: RouteParams, bias: Floats | None = None, scales: Floats | None = None
    ) -> tuple[Ints, Floats]:
        return route_tokens(logits, params, bias, scales, self.threads)

    def grouped_linear(self, x: Floats, w: PackedExperts, experts: Ints, bias: Floats | None = None) -> Floats:
        return grouped_linear(x, w, experts, bias, self.threads)

    def combine(
        self, x: Floats, weights: Floats, shared: Floats | None = None, shared_gate: Floats | None = None
    ) -> Floats:
        return combine_rows(x, weights, shared, shared_gate, self.threads)

    def take(self, x: Floats, index: Ints) -> Floats:
        return x[index]

    def logits(self, x: Floats, head: PackedWeight, soft_cap: float = 0.0) -> Floats:
        raw = self.linear(x, head.two_term())
        return np.float32(soft_cap) * np.tanh(raw / np.float32(soft_cap)) if soft_cap else raw

    def fuse(self, record: Callable[[], Graph]) -> forward.CpuForward | None:
        graph = record()
        if any(_is_unknown_gate_of_experts(node) for node in graph.nodes):
            return None
        if not all(gated_delta.has_kernel(node["params"]) for node in graph.nodes if node.op == "gated_delta"):
            return None
        return forward.CpuForward(graph, self.threads)

    def sample(self, raw_logits: Floats, rows: Sequence[SampleRow]) -> Ints:
        return sampling.sample(raw_logits, rows, self.threads)

    def logprobs(
        self, raw_logits: Floats, chosen: Ints, k: int, masks: Sequence[TokenMask | None] | None = None
    ) -> Logprobs:
        return sampling.logprobs(raw_logits, chosen, k, self.threads, masks)
