"""A decoder in plain NumPy: modules, and one function with everything inlined; also the parts that they are made of.

`DENSE` is the reference backend with float32 weights, so that a matrix product is one library call on both sides: with
quantized weights the reference would spend its time on dequantizing. `GROWING` is the old worker's way: keys and values
are concatenated anew in every step, and a materialised mask is added. `run_block` calls nothing but NumPy: q and k are
rotated together, the cache is contiguous and allocated once, temporaries are reused, and causality is the bound of a
loop over tiles of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_worker_rbee.backends import reference
from llm_worker_rbee.backends.ops import AttentionParams, Batch, Ints, RopeTable
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.config import ModelConfig
from llm_worker_rbee.errors import UnsupportedModelError
from llm_worker_rbee.layers.attention import Attention
from llm_worker_rbee.layers.block import Block, Norm
from llm_worker_rbee.layers.mlp import SwiGLU
from llm_worker_rbee.layers.norm import RMSNorm
from llm_worker_rbee.models import Transformer
from llm_worker_rbee.weights import Tensor

Floats = NDArray[np.float32]
QUERY_TILE = 64  # queries that share one loop bound
FUTURE = np.triu(np.ones((QUERY_TILE, QUERY_TILE), np.bool_), 1)


class KVBuffers(NamedTuple):
    """Contiguous keys and values of one layer, allocated once: (capacity, kv_heads, head_dim)."""

    k: Floats
    v: Floats

    @staticmethod
    def zeros(capacity: int, kv_heads: int, head_dim: int) -> KVBuffers:
        return KVBuffers(*(np.zeros((capacity, kv_heads, head_dim), np.float32) for _ in range(2)))


def rope_tables(table: RopeTable, start: int, end: int) -> tuple[Floats, Floats]:
    """Return cos and sin at each position: (T, 1, half)."""
    angle = np.arange(start, end, dtype=np.float32)[:, None, None] * table.inv_freq
    return np.float32(table.scale) * np.cos(angle), np.float32(table.scale) * np.sin(angle)


def rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotate the pairs (i, i + half)."""
    half = cos.shape[-1]
    low, high = x[..., :half], x[..., half:]
    return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def additive_mask(length: int, queries: Ints | None = None) -> Floats:
    """Return 0 where a query may attend and minus infinity elsewhere: (queries, length); queries default to all."""
    keys = np.arange(length)
    seen = reference.causal_mask(keys if queries is None else queries, keys)
    return np.where(seen, np.float32(0), np.float32(-np.inf))


def masked_attention(q: Floats, k: Floats, v: Floats, mask: Floats, params: AttentionParams) -> Floats:
    """Attend with a materialised mask: q (T, heads, dim) over k and v (S, kv_heads, dim)."""
    length, kv_heads = k.shape[:2]
    scores = reference.attention_scores(q.transpose(1, 0, 2), k.transpose(1, 0, 2), params)
    scores += mask
    mixed = reference.softmax(scores).reshape(kv_heads, -1, length) @ v.transpose(1, 0, 2)
    return mixed.reshape(q.shape[1], -1, q.shape[2]).transpose(1, 0, 2)


class DenseBackend(ReferenceBackend):
    """The reference backend on weights that are plain float32 arrays."""

    def prepare(self, tensors: Sequence[Tensor]) -> Any:
        return np.concatenate([tensor.dequantize() for tensor in tensors])

    def embed(self, table: Any, ids: Ints, scale: float = 1.0) -> Floats:
        return table[ids] * np.float32(scale)  # type: ignore[no-any-return]

    def linear(self, x: Floats, w: Any, bias: Floats | None = None) -> Floats:
        out: Floats = x @ w.T
        return out if bias is None else out + bias

    def logits(self, x: Floats, head: Any, soft_cap: float = 0.0) -> Floats:
        raw: Floats = x @ head.T
        return np.float32(soft_cap) * np.tanh(raw / np.float32(soft_cap)) if soft_cap else raw


class GrowingCacheBackend(DenseBackend):
    """The same with keys and values as long as the tokens seen, (S, kv_heads, head_dim): slots are ignored."""

    def empty_kv(self, blocks: int, block_size: int, kv_heads: int, head_dim: int, kind: str = "float32") -> Any:
        empty = np.empty((0, kv_heads, head_dim), np.float32)
        return SimpleNamespace(k=empty, v=empty)

    def rope_store(
        self, q: Floats, k: Floats, v: Floats, positions: Ints, table: RopeTable, kv: Any, slots: Ints
    ) -> Floats:
        kv.k = np.concatenate([kv.k, reference.rope(k, positions, table)])
        kv.v = np.concatenate([kv.v, v])
        return reference.rope(q, positions, table)

    def attention(
        self, q: Floats, kv: Any, batch: Batch, params: AttentionParams, sinks: Floats | None = None
    ) -> Floats:
        mask = self.mask(len(kv.k), batch.positions)
        return masked_attention(q, kv.k, kv.v, mask, params).reshape(q.shape[0], -1)

    def mask(self, length: int, queries: Ints) -> Floats:
        return additive_mask(length, queries)


class CachedMaskBackend(GrowingCacheBackend):
    """The same with masks kept by the number of queries and keys."""

    def __init__(self) -> None:
        self.masks: dict[tuple[int, int], Floats] = {}

    def mask(self, length: int, queries: Ints) -> Floats:
        key = len(queries), length
        if key not in self.masks:
            self.masks[key] = additive_mask(length, queries)
        return self.masks[key]


DENSE, GROWING, CACHED_MASKS = DenseBackend(), GrowingCacheBackend(), CachedMaskBackend()


def normalize(x: Floats, norm: Norm | None) -> Floats:
    """RMS norm with the weight applied in place."""
    assert isinstance(norm, RMSNorm)  # of a plain llama
    x = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(norm.eps))
    x *= norm.weight
    return x


def run_block(b: Block, stream: Floats, cos: Floats, sin: Floats, kv: KVBuffers, start: int) -> tuple[Floats, Floats]:
    """Run one block over the tokens from `start` on: (what it adds last, the residual stream before that addition)."""
    assert isinstance(b.attention, Attention)
    a, tokens, half = b.attention, stream.shape[0], cos.shape[-1]
    end, rotated, group = start + tokens, a.n_heads + a.n_kv_heads, a.n_heads // a.n_kv_heads

    x = normalize(stream, b.attention_norm)
    heads = (x @ a.qkv.weight.T).reshape(tokens, rotated + a.n_kv_heads, a.head_dim)
    low, high = heads[:, :rotated, :half], heads[:, :rotated, half:]
    low_sin = low * sin
    low *= cos
    low -= high * sin
    high *= cos
    high += low_sin
    kv.k[start:end], kv.v[start:end] = heads[:, a.n_heads : rotated], heads[:, rotated:]

    q = heads[:, : a.n_heads].transpose(1, 0, 2).reshape(a.n_kv_heads, group, tokens, a.head_dim)
    mixed = np.empty((tokens, a.n_kv_heads, group, a.head_dim), np.float32)
    for first in range(0, tokens, QUERY_TILE):
        n = min(QUERY_TILE, tokens - first)
        seen = start + first + n  # keys that the last query of the tile sees: later ones are never touched
        tile = q[:, :, first : first + n].reshape(a.n_kv_heads, group * n, a.head_dim)
        scores = tile @ kv.k[:seen].transpose(1, 2, 0)
        scores *= np.float32(a.params.scale)
        if n > 1:
            corner = scores.reshape(a.n_kv_heads, group, n, seen)[..., seen - n :]
            np.copyto(corner, np.float32(-np.inf), where=FUTURE[:n, :n])
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        out = scores @ kv.v[:seen].transpose(1, 0, 2)
        mixed[first : first + n] = out.reshape(a.n_kv_heads, group, n, a.head_dim).transpose(2, 0, 1, 3)
    stream = mixed.reshape(tokens, -1) @ a.output.weight.T + stream

    assert isinstance(b.mlp, SwiGLU)
    both = normalize(stream, b.mlp_norm) @ b.mlp.gate_up.weight.T
    gate, up = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
    up *= gate
    np.negative(gate, out=gate)
    np.exp(gate, out=gate)
    gate += 1
    up /= gate
    return up @ b.mlp.down.weight.T, stream


def fused_forward(
    model: Transformer, ids: Ints, cos: Floats, sin: Floats, buffers: Sequence[KVBuffers], start: int
) -> Floats:
    """Return the logits after the last of these tokens: (1, vocabulary); cos and sin hold every position."""
    stream, end = model.embedding[ids], start + len(ids)
    for block, kv in zip(model.blocks, buffers, strict=True):
        added, stream = run_block(block, stream, cos[start:end], sin[start:end], kv, start)
        stream = stream + added
    return np.asarray(normalize(stream[-1:], model.norm) @ model.head.T, np.float32)


def require_plain_llama(config: ModelConfig) -> None:
    """Raise UnsupportedModelError if the model has what `fused_forward` leaves out."""
    family = config.family
    extras = {
        "biases": family.attention.qkv_bias, "q/k norms": family.attention.qk_norm, "post norms": family.norms.post,
        "a scaled embedding": family.scaled_embedding, "a window": any(config.windows),
        "multipliers": family.multipliers, "layers without rope": config.nope_layers,
        "an attention temperature": config.temperature_beta, "soft caps": config.attention_cap or config.final_cap,
        "a partial rotation": config.rope_dim != config.head_dim,
        f"activation {config.activation}": config.activation != "silu",
    }  # fmt: skip
    if found := [name for name, present in extras.items() if present]:
        raise UnsupportedModelError(f"the experiment needs a plain llama: this model has {found[0]}")
