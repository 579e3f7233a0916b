"""A matrix product with a packed weight and an optional bias."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.ops import Array, Backend, PackedWeight


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """(T, columns) -> (T, rows)."""

    weight: PackedWeight
    bias: Array | None = None  # (rows,)

    def __call__(self, ops: Backend, x: Array) -> Array:
        """Return x @ weight.T + bias."""
        return ops.linear(x, self.weight, self.bias)
