"""The op table in Numba: every op of the reference, fast, on packed weights. `reference.py` says what each one means.

Weights are copied and repacked when they are prepared; nothing of the model file is read afterwards. Keys and values
are float32, each head padded to a multiple of 16 values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...weights import Tensor
from .. import sampling
from ..types import AttentionParams, Batch, Ints, KVLayer, Logprobs, RopeTable, SampleRow
from . import attention as attention_kernels
from . import elementwise, linear_op, rotary, threads

Floats = NDArray[np.float32]
FEW = 4  # rows that one thread works on faster than several
ACTIVATIONS = ("silu", "gelu_tanh")
EMPTY: Floats = np.empty(0, np.float32)


def prepare(tensors: Sequence[Tensor]) -> linear_op.Weight:
    """Repack a weight for the kernels; several tensors become one matrix, their rows one after the other."""
    return linear_op.prepare(tensors)


def prepare_vector(values: Floats) -> Floats:
    """A small float32 vector of our own."""
    return np.array(values, np.float32)


def empty_kv(blocks: int, block_size: int, kv_heads: int, head_dim: int) -> KVLayer:
    """Room for the keys and values of one layer."""
    rooms: tuple[Floats, Floats] = attention_kernels.empty(blocks, block_size, kv_heads, head_dim)
    return KVLayer(*rooms)


def embed(table: linear_op.Weight, ids: Ints, scale: float = 1.0) -> Floats:
    """Rows of the embedding table: (T,) -> (T, width)."""
    rows = table.rows_at(ids)
    return rows if scale == 1.0 else rows * np.float32(scale)


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    flat = np.ascontiguousarray(x).reshape(-1)
    out = np.empty_like(flat)
    width = x.shape[-1]
    rows = flat.size // width
    norm = elementwise.norm_few if rows <= FEW else elementwise.norm_many
    norm(flat, EMPTY, weight, np.float32(eps), out, EMPTY, rows, width, False)
    return out.reshape(x.shape)


def add_rms_norm(x: Floats, residual: Floats, weight: Floats, eps: float) -> tuple[Floats, Floats]:
    """The residual stream with `x` added, and its norm."""
    rows, width = x.shape
    out, stream = np.empty_like(x), np.empty_like(x)
    norm = elementwise.norm_few if rows <= FEW else elementwise.norm_many
    flat = (a.reshape(-1) for a in (x, residual))
    norm(*flat, weight, np.float32(eps), out.reshape(-1), stream.reshape(-1), rows, width, True)
    return out, stream


def linear(x: Floats, w: linear_op.Weight, bias: Floats | None = None) -> Floats:
    """x @ w.T + bias: (T, columns) -> (T, rows)."""
    out = w.times(x)
    return out if bias is None else out + bias


def rope_store(
    q: Floats, k: Floats, v: Floats, positions: Ints, table: RopeTable, kv: KVLayer, slot_mapping: Ints
) -> Floats:
    """Rotate q and k, write k and v into the cache, give back q: (T, heads, padded head)."""
    turned: Floats = rotary.rope_store(q, k, v, positions, table, kv, slot_mapping)
    return turned


def attention(q: Floats, kv: KVLayer, batch: Batch, params: AttentionParams) -> Floats:
    """Each query over its own request's cached keys: (T, heads, head_dim) -> (T, heads * head_dim)."""
    mixed: Floats = attention_kernels.attention(q, kv, batch, params, threads.count())
    return mixed


def gated(gate_up: Floats, activation: str) -> Floats:
    """act(gate) * up, where the first half of each row is the gate: (T, 2 * d_ff) -> (T, d_ff)."""
    rows, half = gate_up.shape[0], gate_up.shape[-1] // 2
    out = np.empty((rows, half), np.float32)
    work = elementwise.gated_few if rows <= FEW else elementwise.gated_many
    work(gate_up.reshape(-1), out.reshape(-1), rows, half, ACTIVATIONS.index(activation) == 1)
    return out


def take(x: Floats, index: Ints) -> Floats:
    """Some rows of x."""
    return x[index]


def logits(x: Floats, head: linear_op.Weight, soft_cap: float = 0.0) -> Floats:
    """The output head: (N, width) -> (N, vocabulary)."""
    raw = linear(x, head)
    return np.float32(soft_cap) * np.tanh(raw / np.float32(soft_cap)) if soft_cap else raw


def sample(raw_logits: Floats, rows: Sequence[SampleRow]) -> Ints:
    """One token for each row: (N, vocabulary) -> (N,)."""
    return np.array([sampling.sample_row(line, row) for line, row in zip(raw_logits, rows, strict=True)], np.int64)


def logprobs(raw_logits: Floats, chosen: Ints, k: int) -> Logprobs:
    """Log-probabilities of the chosen tokens and of the k likeliest, from the raw logits."""
    return sampling.logprobs(raw_logits, chosen, k)
