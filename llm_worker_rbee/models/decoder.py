"""The decoder of all families: embedding, blocks, final norm, logits. It keeps no state between calls."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.ops import Array, Backend, Batch, FusedForward, ModelParts, PackedWeight
from ..cache import KVCache
from ..config import ModelConfig
from ..layers.block import Block
from ..layers.rms_norm import RMSNorm


@dataclass(frozen=True, slots=True, eq=False)
class Transformer:
    """A model whose weights are packed for one backend."""

    config: ModelConfig
    ops: Backend
    embedding: PackedWeight
    embedding_scale: float
    blocks: tuple[Block, ...]
    norm: RMSNorm
    head: PackedWeight
    fused: FusedForward | None = None  # the backend's fused forward, if it has one

    def forward(self, batch: Batch, cache: KVCache) -> Array:
        """Compute one flat batch: write the KV cache, return the logits at `batch.logits_index`: (N, vocabulary)."""
        if self.fused is not None:
            return self.fused(batch, cache.layers)
        return self.forward_unfused(batch, cache)

    def forward_unfused(self, batch: Batch, cache: KVCache) -> Array:
        """Compute the same op by op."""
        ops = self.ops
        x, residual = ops.embed(self.embedding, batch.ids, self.embedding_scale), None
        for block, kv in zip(self.blocks, cache.layers, strict=True):
            x, residual = block(ops, x, residual, kv, batch)
        x, _ = self.norm.add_and_norm(ops, ops.take(x, batch.logits_index), ops.take(residual, batch.logits_index))
        return ops.logits(x, self.head, self.config.final_cap)

    def parts(self) -> ModelParts:
        """Return all weights, for a fused forward."""
        blocks = tuple(block.parts() for block in self.blocks)
        return ModelParts(
            self.embedding, self.embedding_scale, blocks, self.norm.weight, self.head, self.config.final_cap
        )
