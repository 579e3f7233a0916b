"""The MLP without a gate."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.ops import Array, Backend
from .linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class MLP:
    """down(act(up(x)))."""

    up: Linear
    down: Linear
    activation: str

    def __call__(self, ops: Backend, x: Array) -> Array:
        """Map (T, width) to (T, width)."""
        return self.down(ops, ops.activate(self.up(ops, x), self.activation))
