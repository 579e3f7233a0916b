"""From the hidden states of a step to one row for each sequence."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.ops import Array, Backend, Batch
from .layer_norm import LayerNorm
from .linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A layer after pooling: norm(act(linear(x)))."""

    linear: Linear
    activation: str = ""  # none
    norm: LayerNorm | None = None

    def __call__(self, ops: Backend, x: Array) -> Array:
        """Map (R, columns) to (R, rows)."""
        x = self.linear(ops, x)
        x = ops.activate(x, self.activation) if self.activation else x
        return x if self.norm is None else self.norm(ops, x)


@dataclass(frozen=True, slots=True, eq=False)
class Pooler:
    """The mean of a sequence, or its first or last token (`batch.logits_index`), then dense layers."""

    takes_mean: bool
    layers: tuple[Dense, ...] = ()

    def __call__(self, ops: Backend, x: Array, batch: Batch) -> Array:
        """Map (T, width), or for a single token (R, width), to (R, output width)."""
        x = ops.mean_rows(x, batch) if self.takes_mean else x
        for layer in self.layers:
            x = layer(ops, x)
        return x
