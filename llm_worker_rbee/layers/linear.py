"""A matrix product with a packed weight and an optional bias; limits of its inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from ..backends.ops import Array, Backend, PackedWeight


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """(T, columns) -> (T, rows)."""

    weight: PackedWeight
    bias: Array | None = None  # (rows,)
    inputs: tuple[Array, Array] | None = None  # the lowest and highest of each column, (columns,)
    outputs: tuple[Array, Array] | None = None  # of each row
    others: tuple[Linear, ...] = ()  # more rows, which have other limits of their inputs

    def __call__(self, ops: Backend, x: Array) -> Array:
        """Return x @ weight.T + bias."""
        out = ops.linear(x if self.inputs is None else ops.clamp(x, *self.inputs), self.weight, self.bias)
        out = out if self.outputs is None else ops.clamp(out, *self.outputs)
        return reduce(ops.join, (other(ops, x) for other in self.others), out)
