"""One decoder block. The residual stream is passed separately: each addition is fused with the norm after it.

Per-layer inputs are an embedding of each token for each layer, which a gate adds to the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.ops import Array, Backend, Batch, Ints, LayerCache, PackedWeight
from .attention import Attention, GatedDelta, ShortConv
from .linear import Linear
from .mlp import MLP, MoE, ParallelExperts, SwiGLU
from .norm import LayerNorm, RMSNorm


@dataclass(frozen=True, slots=True, eq=False)
class PerLayerInputs:
    """The inputs of all layers: rows of a table, plus a projection of the token's embedding."""

    table: PackedWeight  # (vocabulary, layers * dim)
    scale: float
    projection: Linear
    norm: RMSNorm  # of the projection, for each layer

    def __call__(self, ops: Backend, embeddings: Array, ids: Ints) -> Array:
        """Return (T, layers * dim)."""
        tokens = ops.embed(self.table, ids, self.scale)
        return ops.per_layer_inputs(self.projection(ops, embeddings), tokens, self.norm.weight, self.norm.eps)


@dataclass(frozen=True, slots=True, eq=False)
class PerLayerGate:
    """norm(projection(act(gate(x)) * inputs of the layer))."""

    gate: Linear
    projection: Linear
    norm: RMSNorm
    layer: int
    activation: str

    def __call__(self, ops: Backend, x: Array, inputs: Array) -> Array:
        """Map the residual stream, (T, width), to its increment."""
        gated = ops.per_layer_gate(self.gate(ops, x), inputs, self.layer, self.activation)
        return self.norm(ops, self.projection(ops, gated))


Norm = RMSNorm | LayerNorm


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Attention, short convolution or gated delta rule, then MLP; each with a norm before, after or both, by family."""

    attention_norm: Norm | None
    attention: Attention | ShortConv | GatedDelta
    mlp_norm: Norm | None
    mlp: SwiGLU | MoE | MLP
    post_attention_norm: RMSNorm | None = None
    post_mlp_norm: RMSNorm | None = None
    experts: ParallelExperts | None = None  # in parallel with the MLP
    per_layer_gate: PerLayerGate | None = None
    input_scale: float = 1.0  # of the residual stream once the delta of the previous block is added

    def __call__(
        self, ops: Backend, x: Array, residual: Array | None, kv: LayerCache, batch: Batch, inputs: Array | None = None
    ) -> tuple[Array, Array]:
        """Map (delta of the previous block, residual) to (delta of this block, residual without it).

        `inputs` are the per-layer embeddings of the tokens, if the model has them.
        """
        x, residual = _add_and_norm(ops, x, residual, self.attention_norm, self.input_scale)
        x = self.attention(ops, x, kv, batch)
        if self.post_attention_norm is not None:
            x = self.post_attention_norm(ops, x)
        x, residual = _add_and_norm(ops, x, residual, self.mlp_norm)
        x = self.mlp(ops, x)
        if self.experts is not None:
            x = self.experts(ops, x, residual)
        if self.post_mlp_norm is not None:
            x = self.post_mlp_norm(ops, x)
        if self.per_layer_gate is not None:
            residual = ops.add(x, residual)
            x = self.per_layer_gate(ops, residual, inputs)
        return x, residual


def _add_and_norm(
    ops: Backend, x: Array, residual: Array | None, norm: Norm | None, scale: float = 1.0
) -> tuple[Array, Array]:
    """Return (norm(residual + x), residual + x); without a norm the sum twice. Only with both is there a scale."""
    if norm is not None and residual is not None:
        return norm.add_and_norm(ops, x, residual, scale)
    stream = x if residual is None else ops.add(x, residual)
    return stream if norm is None else norm(ops, stream), stream
