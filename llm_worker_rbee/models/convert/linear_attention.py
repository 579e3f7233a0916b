"""Linear-attention layers in the layout of GGUF files.

safetensors hold the logarithm of the decay rate, and the value heads of a key head are neighbours; Qwen3-Next has the
rows of q, k, v and of the gate in one matrix, key head by key head. A GGUF has the rate itself, one matrix for q, k and
v and one for the gate, and for Qwen 3.5 value head h belongs to key head h % key heads. Blocks only move, when a tensor
is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...config import LinearAttentionConfig, ModelConfig
from ...weights import Tensor
from ...weights.checkpoint import NO_BYTES, DeferredTensor
from ...weights.quants import BLOCK_TYPES
from ..loader import split_groups

Order = NDArray[np.intp]
RATE, TIME_STEP, OUT = "ssm_a", "ssm_dt", "ssm_out"
HEADS_ALONE, HEADS_AFTER_KEYS = ("attn_gate", "ssm_beta", "ssm_alpha"), ("attn_qkv", "ssm_conv1d")


def gguf_linear_attention(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of a safetensors checkpoint, with linear attention in the layout of a GGUF."""
    if config.linear is None:
        return dict(tensors)
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = _split_projection(tensor, config.linear) if name.endswith(".ssm_in.weight") else [tensor]
        out |= {part.name: _adapt(part, config, config.linear) for part in parts}
    return out


def _split_projection(tensor: Tensor, n: LinearAttentionConfig) -> list[Tensor]:
    """Split the projection into the matrix of q, k and v and the matrix of the gate."""
    values = n.v_heads // n.k_heads * n.v_dim
    rows = np.concatenate(split_groups([n.k_dim, n.k_dim, values, values], n.k_heads))
    parts = {"attn_qkv": rows[: n.channels], "attn_gate": rows[n.channels :]}
    return [_take_rows(tensor, tensor.name.replace("ssm_in", role), order) for role, order in parts.items()]


def _adapt(tensor: Tensor, config: ModelConfig, n: LinearAttentionConfig) -> Tensor:
    role = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
    heads = np.arange(n.v_heads)
    if config.family.tensors.gguf_tiled_heads:
        heads = heads.reshape(n.k_heads, -1).T.reshape(-1)
    if role in (RATE, TIME_STEP):
        return _vector(tensor, heads, is_log=role == RATE)
    if not config.family.tensors.gguf_tiled_heads:
        return tensor
    if role == OUT:
        return _take_heads_of_columns(tensor, heads)
    if role in HEADS_ALONE or (role in HEADS_AFTER_KEYS and tensor.shape[0] == n.channels):
        before = tensor.shape[0] - n.v_heads * n.v_dim if role in HEADS_AFTER_KEYS else 0
        moved = np.arange(before, tensor.shape[0]).reshape(n.v_heads, -1)[heads].reshape(-1)
        return _take_rows(tensor, tensor.name, np.concatenate([np.arange(before), moved]))
    return tensor


def _vector(tensor: Tensor, heads: Order, *, is_log: bool) -> Tensor:
    values = tensor.dequantize()
    data = np.ascontiguousarray((-np.exp(values) if is_log else values)[heads], "<f4").view(np.uint8)
    return Tensor(tensor.name, BLOCK_TYPES["F32"], tensor.shape, data)


def _take_rows(tensor: Tensor, name: str, order: Order) -> Tensor:
    return _deferred(tensor, name, (len(order), *tensor.shape[1:]), partial(_row_bytes, tensor, order))


def _row_bytes(tensor: Tensor, order: Order) -> NDArray[np.uint8]:
    return tensor.load().take_rows(order).data


def _take_heads_of_columns(tensor: Tensor, heads: Order) -> Tensor:
    width = tensor.shape[1] // len(heads)
    if width % tensor.kind.block_size or tensor.order is not None:  # heads are not whole blocks
        make = partial(_column_floats, tensor, heads)
        return DeferredTensor(tensor.name, BLOCK_TYPES["F32"], tensor.shape, NO_BYTES, sources=(tensor,), make=make)
    return _deferred(tensor, tensor.name, tensor.shape, partial(_column_bytes, tensor, heads))


def _column_bytes(tensor: Tensor, heads: Order) -> NDArray[np.uint8]:
    return tensor.load().data.reshape(tensor.shape[0], len(heads), -1)[:, heads].reshape(-1)


def _column_floats(tensor: Tensor, heads: Order) -> NDArray[np.uint8]:
    values = tensor.dequantize().reshape(tensor.shape[0], len(heads), -1)[:, heads]
    return np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8)


def _deferred(
    tensor: Tensor, name: str, shape: tuple[int, ...], make: Callable[[], NDArray[np.uint8]]
) -> DeferredTensor:
    return DeferredTensor(name, tensor.kind, shape, NO_BYTES, order=tensor.order, sources=(tensor,), make=make)
