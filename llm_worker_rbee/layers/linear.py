"""A matrix product with a packed weight, and its bias where there is one."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.ops import Array, Backend, PackedWeight


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """(T, columns) -> (T, rows)."""

    weight: PackedWeight
    bias: Array | None = None  # (rows,)

    def __call__(self, ops: Backend, x: Array) -> Array:
        """x @ weight.T + bias."""
        return ops.linear(x, self.weight, self.bias)
