"""An op table with float32 weights in memory, and the same model written as one function: the two sides of the dispute.

`DENSE` is the reference backend but for its weights, so that a matrix product is one call of the library on both sides.
`block` and `forward` call nothing but NumPy: q and k are rotated together, the cache is contiguous and made beforehand,
temporaries are reused, and causality is the bound of a loop over tiles of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np

from ...backends import reference
from ...backends.ops import OPS, Ints, Ops, RopeTable
from ...config import ModelConfig
from ...errors import UnsupportedModelError
from ...layers.block import Block
from ...models import Transformer
from ...weights import Tensor
from .harness import Floats

TILE = 64  # queries that share one bound
FUTURE = np.triu(np.ones((TILE, TILE), np.bool_), 1)


def _prepare(tensors: Sequence[Tensor]) -> Floats:
    return np.concatenate([tensor.dequantize() for tensor in tensors])


def _embed(table: Floats, ids: Ints, scale: float = 1.0) -> Floats:
    return table[ids] * np.float32(scale)


def _linear(x: Floats, w: Floats, bias: Floats | None = None) -> Floats:
    out = x @ w.T
    return out if bias is None else out + bias


def _logits(x: Floats, head: Floats, soft_cap: float = 0.0) -> Floats:
    raw = x @ head.T
    return np.float32(soft_cap) * np.tanh(raw / np.float32(soft_cap)) if soft_cap else raw


def op_table(**changed: Any) -> Ops:
    """The reference backend with some ops replaced."""
    return cast(Ops, SimpleNamespace(**({name: getattr(reference, name) for name in OPS} | changed)))


DENSE_OPS = {"prepare": _prepare, "embed": _embed, "linear": _linear, "logits": _logits}
DENSE = op_table(**DENSE_OPS)


class Room(NamedTuple):
    """Keys and values of one layer, made beforehand: (capacity, kv_heads, head_dim)."""

    k: Floats
    v: Floats

    @staticmethod
    def of(capacity: int, kv_heads: int, head_dim: int) -> Room:
        """Room for so many tokens."""
        return Room(*(np.zeros((capacity, kv_heads, head_dim), np.float32) for _ in range(2)))


def angles(table: RopeTable, start: int, end: int) -> tuple[Floats, Floats]:
    """cos and sin at each position: (T, 1, half)."""
    angle = np.arange(start, end, dtype=np.float32)[:, None, None] * table.inv_freq
    return np.float32(table.scale) * np.cos(angle), np.float32(table.scale) * np.sin(angle)


def block(b: Block, stream: Floats, cos: Floats, sin: Floats, room: Room, start: int) -> tuple[Floats, Floats]:
    """One decoder block over the tokens from `start` on: (what it adds last, the stream before that addition)."""
    a, tokens, half = b.attention, stream.shape[0], cos.shape[-1]
    end, turning, group = start + tokens, a.n_heads + a.n_kv_heads, a.n_heads // a.n_kv_heads

    x = stream / np.sqrt(np.mean(np.square(stream), axis=-1, keepdims=True) + np.float32(b.attention_norm.eps))
    x *= b.attention_norm.weight
    heads = (x @ a.qkv.weight.T).reshape(tokens, turning + a.n_kv_heads, a.head_dim)
    low, high = heads[:, :turning, :half], heads[:, :turning, half:]
    kept = low * sin
    low *= cos
    low -= high * sin
    high *= cos
    high += kept
    room.k[start:end], room.v[start:end] = heads[:, a.n_heads : turning], heads[:, turning:]

    q = heads[:, : a.n_heads].transpose(1, 0, 2).reshape(a.n_kv_heads, group, tokens, a.head_dim)
    mixed = np.empty((tokens, a.n_kv_heads, group, a.head_dim), np.float32)
    for first in range(0, tokens, TILE):
        n = min(TILE, tokens - first)
        seen = start + first + n  # keys that the last query of the tile sees: later ones are never touched
        tile = q[:, :, first : first + n].reshape(a.n_kv_heads, group * n, a.head_dim)
        scores = tile @ room.k[:seen].transpose(1, 2, 0)
        scores *= np.float32(a.params.scale)
        if n > 1:
            corner = scores.reshape(a.n_kv_heads, group, n, seen)[..., seen - n :]
            np.copyto(corner, np.float32(-np.inf), where=FUTURE[:n, :n])
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        got = scores @ room.v[:seen].transpose(1, 0, 2)
        mixed[first : first + n] = got.reshape(a.n_kv_heads, group, n, a.head_dim).transpose(2, 0, 1, 3)
    stream = mixed.reshape(tokens, -1) @ a.output.weight.T + stream

    x = stream / np.sqrt(np.mean(np.square(stream), axis=-1, keepdims=True) + np.float32(b.mlp_norm.eps))
    x *= b.mlp_norm.weight
    both = x @ b.mlp.gate_up.weight.T
    gate, up = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
    up *= gate
    np.negative(gate, out=gate)
    np.exp(gate, out=gate)
    gate += 1
    up /= gate
    return up @ b.mlp.down.weight.T, stream


def forward(model: Transformer, ids: Ints, cos: Floats, sin: Floats, rooms: Sequence[Room], start: int) -> Floats:
    """The logits after the last of these tokens: (1, vocabulary); cos and sin hold every position."""
    stream = model.embedding[ids]
    end = start + len(ids)
    for b, room in zip(model.blocks, rooms, strict=True):
        added, stream = block(b, stream, cos[start:end], sin[start:end], room, start)
        stream = stream + added
    x = stream[-1:]
    x = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(model.norm.eps)) * model.norm.weight
    return np.asarray(x @ model.head.T, np.float32)


def require_plain(config: ModelConfig) -> None:
    """The one function knows the plain llama only: what it would leave out is refused."""
    family = config.family
    extras = {
        "biases": family.qkv_bias,
        "q/k norms": family.qk_norm,
        "post norms": family.post_norms,
        "a scaled embedding": family.scaled_embedding,
        "a window": any(config.windows),
        "soft caps": config.attention_cap or config.final_cap,
        "a partial rotation": config.rope_dim != config.head_dim,
        f"activation {config.activation}": config.activation != "silu",
    }
    found = [name for name, there in extras.items() if there]
    if found:
        raise UnsupportedModelError(f"the experiment for claim 4 needs a plain llama: this model has {found[0]}")
