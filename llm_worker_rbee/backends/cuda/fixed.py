"""The op table once more, for `--deterministic`: a token's numbers do not depend on who else is in the step.

Products and attention sum in an order that is the same for any number of tokens, wherever a prompt is cut, and whether
a token is read or answers; everything else works row by row anyway. It costs speed: docs/gpu.md says how much.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ops import AttentionParams, Batch, Fused, KVLayer, ModelParts
from . import (
    add_rms_norm,
    decoder,
    device,
    device_bytes,
    embed,
    empty_kv,
    free_bytes,
    gated,
    is_lost,
    logprobs,
    matrix,
    prepare,
    prepare_vector,
    products,
    rms_norm,
    rope_store,
    sample,
    sample_later,
    single,
    take,
    use,
)
from .many import FIXED_QUERIES

__all__ = [
    "DEVICE", "add_rms_norm", "device_bytes", "embed", "empty_kv", "free_bytes", "gated", "is_lost", "logprobs",
    "prepare", "prepare_vector", "rms_norm", "rope_store", "sample", "sample_later", "take", "use",
]  # fmt: skip

DEVICE: str


def __getattr__(name: str) -> Any:
    if name == "DEVICE":
        return str(device.current())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def linear(x: torch.Tensor, w: matrix.Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ w.T + bias: (T, columns) -> (T, rows)."""
    out = products.in_fixed_order(x, w)
    return out if bias is None else out + bias


def attention(q: torch.Tensor, kv: KVLayer, batch: Batch, params: AttentionParams) -> torch.Tensor:
    """Each query over its own request's cached keys: (T, heads, head_dim) -> (T, heads * head_dim)."""
    return single.attention(q, kv, batch, params, FIXED_QUERIES)


def logits(x: torch.Tensor, head: matrix.Matrix, soft_cap: float = 0.0) -> torch.Tensor:
    """The output head: (N, width) -> (N, vocabulary)."""
    raw = products.in_fixed_order(x, head)
    return soft_cap * torch.tanh(raw / soft_cap) if soft_cap else raw


def fuse(model: ModelParts) -> Fused | None:
    """A whole step in few kernels, where the decoder knows all that the family needs."""
    return decoder.fuse(model, fixed=True)
