"""The input of an encoder: embeddings of tokens, positions and segments, added and normalized."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.ops import Array, Backend, Batch, PackedWeight
from .layer_norm import LayerNorm


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """The tables that a model has."""

    tokens: PackedWeight
    scale: float = 1.0
    positions: PackedWeight | None = None
    token_types: PackedWeight | None = None
    norm: LayerNorm | None = None

    def __call__(self, ops: Backend, batch: Batch) -> Array:
        """Return (T, width)."""
        x = ops.embed(self.tokens, batch.ids, self.scale)
        if self.positions is not None:
            x = ops.add(ops.embed(self.positions, batch.positions), x)
        if self.token_types is not None:
            x = ops.add(ops.embed(self.token_types, batch.token_types), x)
        return x if self.norm is None else self.norm(ops, x)
