"""Rotation, the paged cache and attention in plain torch: the op-by-op path, for every head size, window and soft cap.

The cache is (blocks, kv_heads, P, dim). Scores are float32; a long prompt's queries are taken a few at a time.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import InvalidRequestError
from ..ops import AttentionParams, Batch, Ints, KVLayer, RopeTable
from .device import current, memory_errors, upload

KV_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8": torch.float8_e4m3fn,
}
LARGEST_FLOAT8 = 448.0
SCORES = 1 << 26  # held at a time

_frequencies: dict[int, tuple[NDArray[np.float32], torch.Tensor]] = {}  # by the host's table, which is kept alive


def empty_kv(blocks: int, block_size: int, kv_heads: int, head_dim: int, kind: str) -> KVLayer:
    """Room for the keys and values of one layer."""
    if kind not in KV_DTYPES:
        raise InvalidRequestError(f"kv_type {kind!r} is not for a GPU: use one of {', '.join(KV_DTYPES)}", "kv_type")
    shape = (blocks, kv_heads, block_size, head_dim)
    with memory_errors():
        k, v = (torch.zeros(shape, dtype=KV_DTYPES[kind], device=current()) for _ in range(2))
    return KVLayer(k, v)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first 2 * half values of each head, x (T, heads, dim): value i pairs with value i + half."""
    half = cos.shape[-1]
    low, high = x[..., :half], x[..., half : 2 * half]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, x[..., 2 * half :]), -1)


def rope_store(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: Ints, table: RopeTable, kv: KVLayer, slots: Ints
) -> torch.Tensor:
    """Rotate q and k, write k and v into the cache, give back q."""
    angle = upload(positions, torch.float32)[:, None] * _on_device(table.inv_freq)
    cos, sin = (table.scale * f(angle)[:, None] for f in (torch.cos, torch.sin))
    size = kv.k.shape[2]
    block, offset = upload(np.stack((slots // size, slots % size)), torch.int64)
    for cache, new in ((kv.k, rotate(k, cos, sin)), (kv.v, v)):
        _store(cache, block, offset, new)
    return rotate(q, cos, sin)


def _on_device(inv_freq: NDArray[np.float32]) -> torch.Tensor:
    if id(inv_freq) not in _frequencies:
        _frequencies[id(inv_freq)] = (inv_freq, torch.tensor(inv_freq, device=current()))
    return _frequencies[id(inv_freq)][1]


def _store(cache: torch.Tensor, block: torch.Tensor, offset: torch.Tensor, new: torch.Tensor) -> None:
    """new (T, kv_heads, dim), rounded to what the cache holds. Bytes are moved as bytes: few ops know float8."""
    if cache.dtype == torch.float8_e4m3fn:
        narrow = new.clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(cache.dtype)
        cache.view(torch.uint8)[block, :, offset] = narrow.view(torch.uint8)
    else:
        cache[block, :, offset] = new.to(cache.dtype)


def gather(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` cached vectors of a request, (kv_heads, length, dim) float32."""
    used = blocks[: -(-length // cache.shape[2])]
    narrow = cache.dtype == torch.float8_e4m3fn
    found = cache.view(torch.uint8)[used].view(cache.dtype) if narrow else cache[used]
    return found.transpose(0, 1).flatten(1, 2)[:, :length].float()


def attention(q: torch.Tensor, kv: KVLayer, batch: Batch, params: AttentionParams) -> torch.Tensor:
    """Each query over its own request's cached keys: (T, heads, dim) -> (T, heads * dim)."""
    tokens, heads, dim = q.shape
    out = q.new_empty(tokens, heads * dim, dtype=torch.float32)
    tables = upload(batch.block_table, torch.int64)
    places = upload(batch.positions, torch.int64)
    for r, length in enumerate(batch.context_len.tolist()):
        keys, values = (gather(cache, tables[r], length) for cache in (kv.k, kv.v))
        start, end = int(batch.query_start[r]), int(batch.query_start[r + 1])
        step = max(1, SCORES // (heads * length))
        for first in range(start, end, step):
            some = slice(first, min(first + step, end))
            out[some] = _attend(q[some].float(), keys, values, places[some], params)
    return out


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """Some queries of one request: (T, heads, dim) -> (T, heads * dim)."""
    tokens, heads, dim = q.shape
    grouped = q.transpose(0, 1).reshape(len(keys), -1, dim)  # the query heads that share a KV head stand together
    scores = (grouped @ keys.transpose(1, 2)).view(heads, tokens, -1) * params.scale
    if params.soft_cap:
        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
    distance = places[:, None] - torch.arange(keys.shape[1], device=q.device)
    hidden = distance < 0
    if params.window:
        hidden |= distance >= params.window
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    mixed = weights.view(len(keys), -1, keys.shape[1]) @ values
    return mixed.view(heads, tokens, dim).transpose(0, 1).reshape(tokens, -1)
