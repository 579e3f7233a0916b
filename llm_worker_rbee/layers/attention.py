"""Token mixers: attention over a paged cache, the short convolution of LFM2, and Gated DeltaNet (linear attention).

Attention is QKV, optional q/k norms, RoPE with the cache write, scores, output projection. A convolution mixes a token
with the few before it, which are all of its state. The gated delta rule has a convolution of q, k and v, then a matrix
per value head as its state.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.ops import (
    Array,
    AttentionParams,
    Backend,
    Batch,
    GatedDeltaParams,
    GatedDeltaWeights,
    KVLayer,
    RopeTable,
    StateLayer,
)
from .linear import Linear
from .norm import RMSNorm


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Grouped-query attention; the fused projection holds q rows, then k rows, then v rows.

    A layer without KV heads has q rows alone, and attends to the keys and values of another layer.
    """

    qkv: Linear
    output: Linear
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope: RopeTable
    params: AttentionParams
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    v_norm: RMSNorm | None = None
    sinks: Array | None = None  # (n_heads,), logits that join the denominators of the softmax
    gate: Linear | None = None  # attention times the sigmoid of this projection

    def __call__(self, ops: Backend, x: Array, kv: KVLayer, batch: Batch) -> Array:
        """Map (T, width) to (T, width); writes the keys and values of this step."""
        q, k, v = ops.split_heads(self.qkv(ops, x), self.n_heads, self.n_kv_heads, self.head_dim)
        q = q if self.q_norm is None else self.q_norm(ops, q)
        k = k if self.k_norm is None else self.k_norm(ops, k)
        v = v if self.v_norm is None else self.v_norm(ops, v)
        positions = batch.positions if self.rope.axes is None else batch.rope_positions
        q = ops.rope_store(q, k, v, positions, self.rope, kv, batch.slot_mapping)
        mixed = ops.attention(q, kv, batch, self.params, self.sinks)
        return self.output(ops, mixed if self.gate is None else ops.sigmoid_gate(mixed, self.gate(ops, x)))


@dataclass(frozen=True, slots=True, eq=False)
class ShortConv:
    """output(c * conv(b * v)); the fused projection holds rows of b, then c, then v."""

    input: Linear
    weight: Array  # (width, kernel)
    output: Linear

    def __call__(self, ops: Backend, x: Array, state: StateLayer, batch: Batch) -> Array:
        """Map (T, width) to (T, width); writes the states of this step."""
        return self.output(ops, ops.causal_conv(self.input(ops, x), self.weight, state, batch, gated=True))


@dataclass(frozen=True, slots=True, eq=False)
class GatedDelta:
    """The rule with its projections."""

    qkvz: Linear  # rows of q, k, v, then of the output gate
    gates: Linear  # a row for each value head: of beta, then of alpha
    conv: Array  # (channels, kernel), over q, k and v
    params: GatedDeltaParams
    weights: GatedDeltaWeights
    output: Linear

    def __call__(self, ops: Backend, x: Array, state: StateLayer, batch: Batch) -> Array:
        """Map (T, width) to (T, width); writes the states after this step."""
        projected, gates = self.qkvz(ops, x), self.gates(ops, x)
        qkv = ops.causal_conv(projected, self.conv, state, batch, "silu")
        return self.output(ops, ops.gated_delta(qkv, projected, gates, self.params, self.weights, state, batch))
