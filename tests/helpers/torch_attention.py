"""RoPE with the cache write, and paged attention, in plain torch: the twin of the CUDA kernels.

The cache is (blocks, kv_heads, P, dim). Scores are float32; the queries of a long prompt are taken some at a time.
"""

from __future__ import annotations

import numpy as np
import torch

from llm_worker_rbee.backends.cuda.device import upload
from llm_worker_rbee.backends.cuda.packed_weight import E4M3, E4M3_MAX
from llm_worker_rbee.backends.ops import AttentionParams, Batch, Ints, KVLayer, RopeTable

MAX_SCORES = 1 << 26  # held at a time


def rope_store(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: Ints, table: RopeTable, kv: KVLayer, slots: Ints
) -> torch.Tensor:
    """Rotate q and k, write k and v into the cache, and return q."""
    inv_freq = torch.tensor(table.inv_freq, device=q.device)
    angle = upload(positions, q.device, torch.float32)[:, None] * inv_freq
    cos, sin = (table.scale * f(angle) for f in (torch.cos, torch.sin))
    size = kv.k.shape[2]
    block, offset = upload(np.stack((slots // size, slots % size)), q.device, torch.int64)
    for cache, new in ((kv.k, _rotate(k, cos, sin)), (kv.v, v)):
        if cache.dtype == E4M3:  # moved as bytes: few torch ops take float8
            narrow = new.clamp(-E4M3_MAX, E4M3_MAX).to(cache.dtype)
            cache.view(torch.uint8)[block, :, offset] = narrow.view(torch.uint8)
        else:
            cache[block, :, offset] = new.to(cache.dtype)
    steps = np.log1p(positions // table.temperature_length)
    factor = upload(1 + table.temperature_beta * steps, q.device, torch.float32)
    return _rotate(q, cos, sin) * factor[:, None, None]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2 * half values of each head of x (T, heads, dim): value i pairs with value i + half."""
    cos, sin = cos[:, None], sin[:, None]
    half = cos.shape[-1]
    low, high = x[..., :half], x[..., half : 2 * half]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, x[..., 2 * half :]), -1)


def gather(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first `length` cached vectors of a request, (kv_heads, length, dim) float32."""
    used = blocks[: -(-length // cache.shape[2])]
    narrow = cache.dtype == torch.float8_e4m3fn
    found = cache.view(torch.uint8)[used].view(cache.dtype) if narrow else cache[used]
    return found.transpose(0, 1).flatten(1, 2)[:, :length].float()


def attention(
    q: torch.Tensor, kv: KVLayer, batch: Batch, params: AttentionParams, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Attend each query to its own request's keys: (T, heads, dim) -> (T, heads * dim)."""
    tokens, heads, dim = q.shape
    out = q.new_empty(tokens, heads * dim, dtype=torch.float32)
    tables = upload(batch.block_table, q.device, torch.int64)
    positions = upload(batch.positions, q.device, torch.int64)
    for r, length in enumerate(batch.context_len.tolist()):
        keys, values = (gather(cache, tables[r], length) for cache in (kv.k, kv.v))
        start, end = int(batch.query_start[r]), int(batch.query_start[r + 1])
        step = max(1, MAX_SCORES // (heads * length))
        for first in range(start, end, step):
            some = slice(first, min(first + step, end))
            out[some] = _attend(q[some].float(), keys, values, positions[some], params, sinks)
    return out


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, params: AttentionParams,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attend some queries of one request: (T, heads, dim) -> (T, heads * dim)."""
    tokens, heads, dim = q.shape
    grouped = q.transpose(0, 1).reshape(len(keys), -1, dim)  # query heads of a KV head stand together
    scores = (grouped @ keys.transpose(1, 2)).view(heads, tokens, -1) * params.scale
    if params.soft_cap:
        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
    distance = positions[:, None] - torch.arange(keys.shape[1], device=q.device)
    if params.causal:
        hidden = distance < 0
        if params.window:
            hidden |= distance >= params.window
    else:
        hidden = distance.abs() > (params.window // 2 if params.window else keys.shape[1])
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(heads, tokens, 1)), -1)
    weights = torch.softmax(scores, -1)[..., : keys.shape[1]].contiguous()
    mixed = weights.view(len(keys), -1, keys.shape[1]) @ values
    return mixed.view(heads, tokens, dim).transpose(0, 1).reshape(tokens, -1)
