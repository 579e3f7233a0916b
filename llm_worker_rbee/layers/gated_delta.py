"""Linear attention by the gated delta rule (Gated DeltaNet): a convolution of q, k and v, then a matrix per value head
that each token changes. The state of a sequence has one size, however long it is."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.ops import Array, Backend, Batch, GatedDeltaParams, GatedDeltaWeights, StateLayer
from .linear import Linear


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
