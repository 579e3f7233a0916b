"""The gated MLP: SwiGLU, or GeGLU with activation gelu_tanh."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.ops import Array, Backend
from .linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class SwiGLU:
    """down(act(gate(x)) * up(x)); the fused projection holds gate rows, then up rows."""

    gate_up: Linear
    down: Linear
    activation: str = "silu"

    def __call__(self, ops: Backend, x: Array) -> Array:
        """Map (T, width) to (T, width)."""
        return self.down(ops, ops.gated(self.gate_up(ops, x), self.activation))
