"""Attention of tokens that read, many of a request at once: a tile of queries of one head, over its paged keys.

Causality is the bound of the loop; only tiles that a query of this program may not see whole are masked. Queries and
the cache are float16 or bfloat16 (float32 under the interpreter); scores and sums float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_decode import cap_scores, part_of_head, rotated


@triton.jit
def rope_store(
    qkv, cos, sin, positions, slots, q_out, k_cache, v_cache,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr,
    bias=None, q_norm=None, k_norm=None, eps=0.0, apart=0, PARTS: tl.constexpr = 1, EACH: tl.constexpr = 1,
):  # fmt: skip
    """Program (EACH heads, token): queries are rotated into q_out (T, HEADS, dim), keys into their slot, values copied
    there. EACH divides both numbers of heads. A token whose slot is negative is nobody's."""
    DIM: tl.constexpr = 2 * HALF
    first = tl.program_id(0) * EACH
    head = first + tl.arange(0, EACH)[:, None]
    t = tl.program_id(1)
    i = tl.arange(0, DIM)
    slot = tl.load(slots + t).to(tl.int64)
    if slot < 0:
        return
    row = qkv + t.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM)
    angle = tl.load(positions + t) * HALF + i % HALF
    cosines = tl.load(cos + angle)
    sines = tl.load(sin + angle) * tl.where(i < HALF, -1.0, 1.0)
    if first < HEADS:
        x = rotated(row, head, cosines, sines, bias, q_norm, eps, apart, HALF, PARTS)
        tl.store(q_out + (t.to(tl.int64) * HEADS + head) * DIM + i, x.to(q_out.dtype.element_ty))
    else:
        kv_head = (head - HEADS) % KV_HEADS
        to = ((slot // P * KV_HEADS + kv_head) * P + slot % P) * DIM + i
        if first < HEADS + KV_HEADS:
            x = rotated(row, head, cosines, sines, bias, k_norm, eps, apart, HALF, PARTS)
            tl.store(k_cache + to, x.to(k_cache.dtype.element_ty))
        else:
            x = part_of_head(row, head, i, bias, apart, DIM, PARTS)
            tl.store(v_cache + to, x.to(v_cache.dtype.element_ty))


@triton.jit
def prefill_attention(
    q, k_cache, v_cache, tables, table_width, query_start, context_len, tile_request, tile_first, out, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, P: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SIZE: tl.constexpr = 0,
    width=None,
):  # fmt: skip
    """Program (tile, head): QUERIES queries of request tile_request[tile], from its tile_first[tile]-th in this step.
    SIZE is a power of two, for heads that are none. A negative request is nobody. The width of the tables may be on the
    device: width[0]."""
    WIDE: tl.constexpr = SIZE if SIZE > 0 else DIM
    tile = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.load(tile_request + tile)
    if request < 0:
        return
    if width is not None:
        table_width = tl.load(width)
    first = tl.load(tile_first + tile)
    start = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - start
    before = tl.load(context_len + request) - count  # keys of earlier steps
    m = first + tl.arange(0, QUERIES)
    i = tl.arange(0, WIDE)
    rows = (start + m).to(tl.int64)[:, None] * (HEADS * DIM) + head * DIM + i[None, :]
    wanted = (m < count)[:, None]
    if WIDE != DIM:
        wanted = wanted & (i < DIM)[None, :]
    queries = tl.load(q + rows, mask=wanted, other=0.0)
    table = tables + request * table_width
    kv_head = head // (HEADS // KV_HEADS)
    place = before + m  # positions of the queries
    end = before + tl.minimum(first + QUERIES, count)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(before + first + 1 - WINDOW, 0) // KEYS * KEYS
    top = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, WIDE), tl.float32)
    for at in range(begin, end, KEYS):
        keys = at + tl.arange(0, KEYS)
        there = keys < end
        held = there[:, None]
        if WIDE != DIM:
            held = held & (i < DIM)[None, :]
        block = tl.load(table + keys // P, mask=there, other=0).to(tl.int64)
        where = ((block * KV_HEADS + kv_head) * P + keys % P) * DIM
        k = tl.load(k_cache + where[None, :] + i[:, None], mask=tl.trans(held), other=0.0)  # (DIM, KEYS)
        k = k.to(queries.dtype)
        v = tl.load(v_cache + where[:, None] + i[None, :], mask=held, other=0.0).to(queries.dtype)
        scores = cap_scores(tl.dot(queries, k, input_precision="ieee") * scale, CAP)
        seen = keys[None, :] <= place[:, None]
        if WINDOW > 0:
            seen = seen & (keys[None, :] > place[:, None] - WINDOW)
        scores = tl.where(seen, scores, -1e30)
        new = tl.maximum(top, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp(scores - new[:, None]), 0.0)
        shrink = tl.exp(top - new)
        total = total * shrink + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
        top = new
    tl.store(out + rows, (mixed / total[:, None]).to(out.dtype.element_ty), mask=wanted)
