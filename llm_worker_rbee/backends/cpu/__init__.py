"""The op table in Numba: every op of the reference, fast, on packed weights. `reference.py` says what each one means.

Weights are copied and repacked when they are prepared; nothing of the model file is read afterwards. Keys and values
are float32, float16 or int8, each head padded to a multiple of 16 values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...config import ModelConfig
from ...weights import Checkpoint, Tensor
from ..ops import AttentionParams, Backend, Batch, Ints, KVLayer, Logprobs, ModelParts, Progress, RopeTable, SampleRow
from ..precompile import Needs, get_ready
from . import catalog, elementwise, forward, jit, sampling, threads
from . import kv_layout as kv_places
from . import linear as linear_op
from .program import Step, run_one

Floats = NDArray[np.float32]


class CpuBackend(Backend):
    """Numba kernels on the CPU with a number of threads of its own."""

    name = "cpu"

    def __init__(self, count: int | None = None) -> None:
        self.threads = threads.use(count)

    def load_kernels(
        self, checkpoint: Checkpoint, config: ModelConfig, kv_type: str, progress: Progress | None = None
    ) -> int:
        return get_ready(catalog.needed(*Needs.of(checkpoint, config, kv_type)), jit.folder(), progress)

    def prepare(self, tensors: Sequence[Tensor]) -> linear_op.Weight:
        return linear_op.prepare(tensors)

    def prepare_vector(self, values: Floats) -> Floats:
        return np.array(values, np.float32)

    def empty_kv(self, blocks: int, block_size: int, kv_heads: int, head_dim: int, kind: str = "float32") -> KVLayer:
        return kv_places.empty(blocks, block_size, kv_heads, head_dim, kind)

    def embed(self, table: linear_op.Weight, ids: Ints, scale: float = 1.0) -> Floats:
        rows = table.rows_at(ids)
        return rows if scale == 1.0 else rows * np.float32(scale)

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        stream = np.ascontiguousarray(x, np.float32)
        return self._norm(stream, stream, weight, eps, False).reshape(x.shape)

    def add_rms_norm(self, x: Floats, residual: Floats, weight: Floats, eps: float) -> tuple[Floats, Floats]:
        stream = np.array(residual, np.float32)
        return self._norm(np.ascontiguousarray(x, np.float32), stream, weight, eps, True), stream

    def _norm(self, x: Floats, stream: Floats, weight: Floats, eps: float, joined: bool) -> Floats:
        out = np.empty_like(stream)
        few, bits = elementwise.FEW, int(np.float64(eps).view(np.int64))
        args = (
            Step.TOKENS,
            Step.DELTA,
            Step.STREAM,
            Step.NORMED,
            0,
            0,
            len(weight),
            weight.ctypes.data,
            0,
            joined,
            bits,
            0,
        )
        entries: dict[int, Floats] = {Step.DELTA: x, Step.STREAM: stream, Step.NORMED: out}
        run_one(elementwise.NORM, args, 1, few, stream.size // len(weight), entries)
        return out

    def linear(self, x: Floats, w: linear_op.Weight, bias: Floats | None = None) -> Floats:
        out = w.times(x)
        return out if bias is None else out + bias

    def rope_store(
        self, q: Floats, k: Floats, v: Floats, positions: Ints, table: RopeTable, kv: KVLayer, slot_mapping: Ints
    ) -> Floats:
        return forward.unfused_rope_store(q, k, v, positions, table, kv, slot_mapping)

    def attention(self, q: Floats, kv: KVLayer, batch: Batch, params: AttentionParams) -> Floats:
        return forward.unfused_attention(q, kv, batch, params)

    def gated(self, gate_up: Floats, activation: str) -> Floats:
        rows, half = gate_up.shape[0], gate_up.shape[-1] // 2
        gate_up, out = np.ascontiguousarray(gate_up, np.float32), np.empty((rows, half), np.float32)
        args = (Step.TOKENS, Step.GATE_UP, 0, Step.HIDDEN, 0, 0, half, forward.ACTIVATIONS.index(activation))
        entries: dict[int, Floats] = {Step.GATE_UP: gate_up, Step.HIDDEN: out}
        run_one(elementwise.GATED, args, -(-half // elementwise.WIDE), elementwise.FEW, rows, entries)
        return out

    def take(self, x: Floats, index: Ints) -> Floats:
        return x[index]

    def logits(self, x: Floats, head: linear_op.Weight, soft_cap: float = 0.0) -> Floats:
        raw = self.linear(x, head.finely())
        return np.float32(soft_cap) * np.tanh(raw / np.float32(soft_cap)) if soft_cap else raw

    def fuse(self, model: ModelParts) -> forward.Model:
        return forward.Model(model)

    def sample(self, raw_logits: Floats, rows: Sequence[SampleRow]) -> Ints:
        return sampling.sample(raw_logits, rows)

    def logprobs(self, raw_logits: Floats, chosen: Ints, k: int) -> Logprobs:
        return sampling.logprobs(raw_logits, chosen, k)
