"""The gated short convolution of LFM2: it mixes a token with the few before it, which are all of its state."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.ops import Array, Backend, Batch, StateLayer
from .linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class ShortConv:
    """output(c * conv(b * v)); the fused projection holds rows of b, then c, then v."""

    input: Linear
    weight: Array  # (width, kernel)
    output: Linear

    def __call__(self, ops: Backend, x: Array, state: StateLayer, batch: Batch) -> Array:
        """Map (T, width) to (T, width); writes the states of this step."""
        return self.output(ops, ops.causal_conv(self.input(ops, x), self.weight, state, batch, gated=True))
