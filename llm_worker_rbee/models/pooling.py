"""Pooling models: encoders and decoders whose step returns a row for each sequence, an embedding or the logits of a
ranker.

There is no KV cache: the keys and values of one layer lie in a workspace that the next layer overwrites, and a sequence
is computed in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..backends.graph import Graph, record
from ..backends.ops import Array, Backend, Batch, FusedForward, Ints, KVLayer, Progress, StepLimits, WarmUp
from ..config import ModelConfig, PoolingConfig
from ..errors import ContextLengthError, InvalidRequestError
from ..layers.block import Block, Norm
from ..layers.encoder import Embeddings, EncoderBlock, Pooler

BLOCK_SIZE = 16  # tokens of a block of the workspace
WARM_UP_TOKENS = 1024  # larger steps have no kernels of their own


class Workspace:
    """The keys and values of one layer for the tokens of a step; it grows with the largest step."""

    def __init__(self, ops: Backend, config: ModelConfig, kv_type: str) -> None:
        self.ops, self.config, self.kv_type = ops, config, kv_type
        self._blocks = 0
        self._layer: KVLayer | None = None

    def layers(self, blocks: int) -> list[KVLayer]:
        """Return the same memory for every layer, of at least so many blocks."""
        if self._layer is None or blocks > self._blocks:
            self._layer = None  # the old one first, so that both need not fit
            self._blocks = 1 << (blocks - 1).bit_length()
            heads, dim = self.config.kv_shape(0)
            self._layer = self.ops.empty_kv(self._blocks, BLOCK_SIZE, heads, dim, self.kv_type)
        return [self._layer] * self.config.n_layers


@dataclass(frozen=True, slots=True, eq=False)
class PoolingModel:
    """A pooling model whose weights are packed for one backend."""

    config: ModelConfig
    pooling: PoolingConfig
    ops: Backend
    embeddings: Embeddings
    blocks: tuple[Block | EncoderBlock, ...]
    norm: Norm | None
    pooler: Pooler
    output_dim: int  # columns of what `run` returns
    workspace: Workspace
    fused: FusedForward | None = None

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of a sequence."""
        return min(self.pooling.max_length or self.config.context_length, self.config.context_length)

    def run(self, sequences: Sequence[Ints], token_types: Sequence[Ints] | None = None) -> NDArray[np.float32]:
        """Compute a step of whole sequences, none of them empty: (R, output_dim), on the host and not normalized.

        A row has the same bits in any batch, if the backend is batch-invariant.
        """
        batch = make_batch(sequences, token_types, takes_first=self.pooling.kind == "cls")
        self.check_tables(batch)
        return self.ops.to_host(self.forward(batch, self.workspace.layers(int(batch.block_table.max()) + 1)))

    def check_tables(self, batch: Batch) -> None:
        """Raise on a position or a segment that the model has no row for."""
        c = self.config
        if (longest := int(batch.context_len.max())) > c.context_length:
            raise ContextLengthError(f"a sequence has {longest} tokens, the model takes {c.context_length}")
        if c.token_types and (last := int(batch.token_types.max())) >= c.token_types:
            raise InvalidRequestError(f"a token is of segment {last}, the model has {c.token_types}")

    def forward(self, batch: Batch, kv: Sequence[KVLayer]) -> Array:
        """Compute a step: (R, output_dim)."""
        return self.compute(self.ops, batch, kv)[0] if self.fused is None else self.fused(batch, kv)

    def warm_up(self, max_step_tokens: int, progress: Progress = lambda what, done, total: None) -> WarmUp:
        """Do all one-time work of the backend before the first step: compile and load kernels."""
        kv = self.workspace.layers(-(-max(max_step_tokens, self.max_length) // BLOCK_SIZE))
        tokens = min(max_step_tokens, WARM_UP_TOKENS)
        limits = StepLimits(max_batch=1, max_tokens=tokens, max_logits=1, max_context=self.max_length)
        return self.ops.warm_up(partial(self.forward, kv=kv), self.fused, kv, limits, progress)

    def compute(self, ops: Backend, batch: Batch, kv: Sequence[KVLayer]) -> tuple[Array, None]:
        """Compute a step with these ops: the definition of the model."""
        x, residual = self.embeddings(ops, batch), None
        for block, layer in zip(self.blocks, kv, strict=True):
            x, residual = block(ops, x, residual, layer, batch)
        if not self.pooler.takes_mean:
            x = ops.take(x, batch.logits_index)
            residual = None if residual is None else ops.take(residual, batch.logits_index)
        if residual is not None:
            assert self.norm is not None
            x, _ = self.norm.add_and_norm(ops, x, residual)
        return self.pooler(ops, x, batch), None

    def graph(self) -> Graph:
        """Return the ops of a step, for a fused forward."""
        return record(self.compute, len(self.blocks))


def make_batch(sequences: Sequence[Ints], token_types: Sequence[Ints] | None = None, *, takes_first: bool) -> Batch:
    """Return the step of whole sequences, each in blocks of its own; `logits_index` is their first or last token."""
    counts = np.fromiter(map(len, sequences), np.int64, len(sequences))
    start = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    positions = np.arange(start[-1]) - np.repeat(start[:-1], counts)
    blocks = -(-counts // BLOCK_SIZE)
    first = np.cumsum(blocks) - blocks
    column = np.arange(blocks.max(initial=0))
    ids = np.concatenate([np.asarray(ids, np.int64) for ids in sequences])
    types = np.zeros(len(ids), np.int64) if token_types is None else np.concatenate(list(map(np.asarray, token_types)))
    return Batch(
        ids=ids,
        positions=positions,
        slot_mapping=np.repeat(first * BLOCK_SIZE, counts) + positions,
        query_start=start,
        context_len=counts,
        block_table=np.where(column < blocks[:, None], first[:, None] + column, 0),
        logits_index=start[:-1] if takes_first else start[1:] - 1,
        token_types=types.astype(np.int64, copy=False),
    )
