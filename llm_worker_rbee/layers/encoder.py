"""The parts of an encoder: embeddings, the block of BERT, and the rows of the sequences; patches and mergers of vision
towers.

Embeddings of tokens, positions and segments are added and normalized. The sum of the residual stream and the output of
attention or MLP is normalized (post-LN). The pooler makes one row for each sequence from the hidden states of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.ops import Array, Backend, Batch, LayerCache, PackedWeight
from .attention import Attention
from .block import Norm
from .linear import Linear
from .mlp import MLP, SwiGLU
from .norm import LayerNorm


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


@dataclass(frozen=True, slots=True, eq=False)
class EncoderBlock:
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    attention: Attention
    attention_norm: LayerNorm
    mlp: MLP | SwiGLU
    mlp_norm: LayerNorm

    def __call__(self, ops: Backend, x: Array, residual: None, kv: LayerCache, batch: Batch) -> tuple[Array, None]:
        """Map (T, width) to (T, width); there is no separate residual stream."""
        x, _ = self.attention_norm.add_and_norm(ops, self.attention(ops, x, kv, batch), x)
        x, _ = self.mlp_norm.add_and_norm(ops, self.mlp(ops, x), x)
        return x, None


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


@dataclass(frozen=True, slots=True, eq=False)
class PatchEmbedding:
    """A projection of the pixels of each patch, plus the vector of its place in a table of positions, or those of its
    row and its column; then a norm."""

    projection: Linear
    table: Array | None = None  # (rows, columns, width)
    sides: tuple[PackedWeight, PackedWeight] | None = None  # of rows and columns, (rows, width)
    norm: Norm | None = None

    def __call__(self, ops: Backend, batch: Batch) -> Array:
        """Return (T, width)."""
        x = self.projection(ops, batch.hidden)
        if self.table is not None:
            x = ops.add(ops.interpolate(self.table, batch.places), x)
        if self.sides is not None:
            x = ops.add(ops.embed(self.sides[0], batch.ids, 1.0), x)
            x = ops.add(ops.embed(self.sides[1], batch.token_types, 1.0), x)
        return x if self.norm is None else self.norm(ops, x)


@dataclass(frozen=True, slots=True, eq=False)
class Merger:
    """Groups of adjacent patches, joined to one row or averaged, then a scale and an offset of each column, a norm, and
    projections with GELU behind the first."""

    count: int  # patches of a token
    pools: bool
    norm: Norm | None
    first: Linear
    last: Linear | None = None
    middle: Linear | None = None  # before the first, without an activation
    affine: Linear | None = None  # a diagonal matrix and a bias

    def __call__(self, ops: Backend, x: Array, batch: Batch) -> Array:
        """Map (T, width) to the tokens of `batch.logits_index`, (N, width of the decoder)."""
        index = batch.logits_index
        x = ops.pool(x, index, self.count) if self.pools else ops.merge(x, index, self.count)
        for part in (self.affine, self.norm, self.middle):
            x = x if part is None else part(ops, x)
        x = self.first(ops, x)
        return x if self.last is None else self.last(ops, ops.activate(x, "gelu"))
