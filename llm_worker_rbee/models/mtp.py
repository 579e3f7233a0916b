"""Multi-token prediction: one more decoder block, which predicts the token after the next one.

It reads token p with the hidden state of the model at p - 1, after its final norm; after a token of its own, with the
hidden state that it returned itself. It shares the model's embedding and output head unless the file has others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..backends.graph import Graph, record
from ..backends.ops import Array, Backend, Batch, FusedForward, LayerCache, PackedWeight
from ..config import ModelConfig
from ..errors import InvalidRequestError
from ..layers.block import Block
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..weights import Checkpoint
from .kv_cache import KVCache


@dataclass(frozen=True, slots=True, eq=False)
class MtpHead:
    """The block of a model that predicts a further token, packed for one backend."""

    config: ModelConfig  # of one layer
    ops: Backend
    embedding: PackedWeight
    embedding_scale: float
    embedding_norm: RMSNorm
    hidden_norm: RMSNorm
    embedding_projection: Linear  # the two halves of `eh_proj`: their sum is the product with both side by side
    hidden_projection: Linear
    block: Block
    norm: RMSNorm
    head: PackedWeight
    fused: FusedForward | None = None

    def forward(self, batch: Batch, cache: KVCache) -> tuple[Array, Array]:
        """Write the cache; return the logits and the hidden states at `batch.logits_index`."""
        if self.fused is not None:
            return self.fused.with_hidden(batch, cache.layers)
        return self.compute(self.ops, batch, cache.layers)

    def compute(self, ops: Backend, batch: Batch, kv: Sequence[LayerCache]) -> tuple[Array, Array]:
        """Compute a step with these ops: the definition of the head."""
        embedded = self.embedding_norm(ops, ops.embed(self.embedding, batch.ids, self.embedding_scale))
        x = ops.add(
            self.embedding_projection(ops, embedded), self.hidden_projection(ops, self.hidden_norm(ops, batch.hidden))
        )
        x, residual = self.block(ops, x, None, kv[0], batch)
        last = ops.take(x, batch.logits_index), ops.take(residual, batch.logits_index)
        hidden, _ = self.norm.add_and_norm(ops, *last)
        return ops.logits(hidden, self.head, self.config.final_cap), hidden

    def graph(self) -> Graph:
        """Return the ops of a step, for a fused forward."""
        return record(self.compute, 1, self.config.d_model)


def head_config(config: ModelConfig) -> ModelConfig:
    """Return the shape of the head: of one layer with full attention."""
    return replace(
        config,
        n_layers=1,
        windows=(0,),
        layer_kinds=(),
        layer_kv_heads=(),
        layer_d_ff=(),
        shared_kv_layers=0,
        nope_layers=(),
        nextn_layers=0,
    )


def has_head(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Return whether a file has a head for multi-token prediction."""
    return config.nextn_layers > 0 and f"blk.{config.n_layers}.nextn.eh_proj.weight" in checkpoint.tensors


def require_head(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise if a file has no head for multi-token prediction."""
    if not has_head(checkpoint, config):
        raise InvalidRequestError(
            f"{checkpoint.path.name} has no head for multi-token prediction (nextn tensors): "
            "use a file that has one, speculative ngram, or a draft_model",
            "speculative",
        )
