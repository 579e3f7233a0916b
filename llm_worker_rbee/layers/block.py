"""One decoder block. The residual stream travels beside the activations: each addition joins the norm after it."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.types import Array, Batch, KVLayer, Ops
from .attention import Attention
from .rms_norm import RMSNorm
from .swiglu import SwiGLU


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Attention and MLP, each between norms: one before, and in some families one after."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: SwiGLU
    post_attention_norm: RMSNorm | None = None
    post_mlp_norm: RMSNorm | None = None

    def __call__(self, ops: Ops, x: Array, residual: Array | None, kv: KVLayer, batch: Batch) -> tuple[Array, Array]:
        """(what the block before added, the stream) -> (what this one adds, the stream before that addition)."""
        if residual is None:
            x, residual = self.attention_norm(ops, x), x
        else:
            x, residual = self.attention_norm.add(ops, x, residual)
        x = self.attention(ops, x, kv, batch)
        if self.post_attention_norm is not None:
            x = self.post_attention_norm(ops, x)
        x, residual = self.mlp_norm.add(ops, x, residual)
        x = self.mlp(ops, x)
        if self.post_mlp_norm is not None:
            x = self.post_mlp_norm(ops, x)
        return x, residual
