"""The block of BERT: what attention and MLP add to the residual stream is normalized with it (post-LN)."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.ops import Array, Backend, Batch, LayerCache
from .attention import Attention
from .layer_norm import LayerNorm
from .mlp import MLP
from .swiglu import SwiGLU


@dataclass(frozen=True, slots=True, eq=False)
class EncoderBlock:
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    attention: Attention
    attention_norm: LayerNorm
    mlp: MLP | SwiGLU
    mlp_norm: LayerNorm

    def __call__(self, ops: Backend, x: Array, residual: None, kv: LayerCache, batch: Batch) -> tuple[Array, None]:
        """Map (T, width) to (T, width); no residual stream is kept beside it."""
        x, _ = self.attention_norm.add_and_norm(ops, self.attention(ops, x, kv, batch), x)
        x, _ = self.mlp_norm.add_and_norm(ops, self.mlp(ops, x), x)
        return x, None
