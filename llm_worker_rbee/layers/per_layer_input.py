"""Per-layer embeddings: an embedding of each token for each layer, which a gate adds to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.ops import Array, Backend, Ints, PackedWeight
from .linear import Linear
from .rms_norm import RMSNorm


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
        """Map the residual stream, (T, width), to what is added to it."""
        gated = ops.per_layer_gate(self.gate(ops, x), inputs, self.layer, self.activation)
        return self.norm(ops, self.projection(ops, gated))
