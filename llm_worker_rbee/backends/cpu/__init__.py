"""The op table in Numba: every op of the reference, fast, on packed weights. `reference.py` says what each one means.

Weights are copied and repacked when they are prepared; nothing of the model file is read afterwards. Keys and values
are float32, float16 or int8, each head padded to a multiple of 16 values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...weights import Tensor
from ..ops import AttentionParams, Batch, Ints, KVLayer, Logprobs, ModelParts, RopeTable, SampleRow
from . import elementwise, forward, sampling
from . import kv_layout as kv_places
from . import linear as linear_op
from .program import Step, run_one

Floats = NDArray[np.float32]


def prepare(tensors: Sequence[Tensor]) -> linear_op.Weight:
    """Repack a weight for the kernels; several tensors become one matrix, their rows one after the other."""
    return linear_op.prepare(tensors)


def prepare_vector(values: Floats) -> Floats:
    """A small float32 vector of our own."""
    return np.array(values, np.float32)


def empty_kv(blocks: int, block_size: int, kv_heads: int, head_dim: int, kind: str = "float32") -> KVLayer:
    """Room for the keys and values of one layer; kv.py has their places."""
    return kv_places.empty(blocks, block_size, kv_heads, head_dim, kind)


def embed(table: linear_op.Weight, ids: Ints, scale: float = 1.0) -> Floats:
    """Rows of the embedding table: (T,) -> (T, width)."""
    rows = table.rows_at(ids)
    return rows if scale == 1.0 else rows * np.float32(scale)


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    stream = np.ascontiguousarray(x, np.float32)
    return _norm(stream, stream, weight, eps, False).reshape(x.shape)


def add_rms_norm(x: Floats, residual: Floats, weight: Floats, eps: float) -> tuple[Floats, Floats]:
    """The residual stream with `x` added, and its norm."""
    stream = np.array(residual, np.float32)
    return _norm(np.ascontiguousarray(x, np.float32), stream, weight, eps, True), stream


def _norm(x: Floats, stream: Floats, weight: Floats, eps: float, joined: bool) -> Floats:
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


def linear(x: Floats, w: linear_op.Weight, bias: Floats | None = None) -> Floats:
    """x @ w.T + bias: (T, columns) -> (T, rows)."""
    out = w.times(x)
    return out if bias is None else out + bias


def rope_store(
    q: Floats, k: Floats, v: Floats, positions: Ints, table: RopeTable, kv: KVLayer, slot_mapping: Ints
) -> Floats:
    """Rotate q and k, write k and v into the cache, give back q: (T, heads, padded head)."""
    return forward.unfused_rope_store(q, k, v, positions, table, kv, slot_mapping)


def attention(q: Floats, kv: KVLayer, batch: Batch, params: AttentionParams) -> Floats:
    """Each query over its own request's cached keys: (T, heads, head_dim) -> (T, heads * head_dim)."""
    return forward.unfused_attention(q, kv, batch, params)


def gated(gate_up: Floats, activation: str) -> Floats:
    """act(gate) * up, where the first half of each row is the gate: (T, 2 * d_ff) -> (T, d_ff)."""
    rows, half = gate_up.shape[0], gate_up.shape[-1] // 2
    gate_up, out = np.ascontiguousarray(gate_up, np.float32), np.empty((rows, half), np.float32)
    args = (Step.TOKENS, Step.GATE_UP, 0, Step.HIDDEN, 0, 0, half, forward.ACTIVATIONS.index(activation))
    entries: dict[int, Floats] = {Step.GATE_UP: gate_up, Step.HIDDEN: out}
    run_one(elementwise.GATED, args, -(-half // elementwise.WIDE), elementwise.FEW, rows, entries)
    return out


def take(x: Floats, index: Ints) -> Floats:
    """Some rows of x."""
    return x[index]


def logits(x: Floats, head: linear_op.Weight, soft_cap: float = 0.0) -> Floats:
    """The output head: (N, width) -> (N, vocabulary)."""
    raw = linear(x, head.finely())
    return np.float32(soft_cap) * np.tanh(raw / np.float32(soft_cap)) if soft_cap else raw


def fuse(model: ModelParts) -> forward.Model:
    """A whole step as one program."""
    return forward.Model(model)


def sample(raw_logits: Floats, rows: Sequence[SampleRow]) -> Ints:
    """One token for each row: (N, vocabulary) -> (N,)."""
    return sampling.sample(raw_logits, rows)


def logprobs(raw_logits: Floats, chosen: Ints, k: int) -> Logprobs:
    """Log-probabilities of the chosen tokens and of the k likeliest, from the raw logits."""
    return sampling.logprobs(raw_logits, chosen, k)
