"""One decoder block. The residual stream is passed separately: each addition is fused with the norm after it."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.ops import Array, Backend, Batch, KVLayer
from .attention import Attention
from .rms_norm import RMSNorm
from .swiglu import SwiGLU


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Attention and MLP, each with a norm before and, in some families, one after."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: SwiGLU
    post_attention_norm: RMSNorm | None = None
    post_mlp_norm: RMSNorm | None = None

    def __call__(
        self, ops: Backend, x: Array, residual: Array | None, kv: KVLayer, batch: Batch
    ) -> tuple[Array, Array]:
        """Map (delta of the previous block, residual) to (delta of this block, residual without it)."""
        if residual is None:
            x, residual = self.attention_norm(ops, x), x
        else:
            x, residual = self.attention_norm.add_and_norm(ops, x, residual)
        x = self.attention(ops, x, kv, batch)
        if self.post_attention_norm is not None:
            x = self.post_attention_norm(ops, x)
        x, residual = self.mlp_norm.add_and_norm(ops, x, residual)
        x = self.mlp(ops, x)
        if self.post_mlp_norm is not None:
            x = self.post_mlp_norm(ops, x)
        return x, residual
