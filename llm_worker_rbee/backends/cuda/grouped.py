"""Attention of tokens that answer where many heads share keys: as attention.py, a group of heads on the tensor cores.

The heads of a group are rows of a product: SOME of them (the group, and copies of its last up to a power of two), over
and over up to PAD; a tile of keys is (TILE, dim). Queries and weights are rounded as the cache is (float8: to
bfloat16); scores and sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .heads import LOG2E, as_words, chunk_of, join, part_of_head, powers, rotated, store_own, write_heads
from .intrinsics import start_next, wait_before


@triton.jit
def tile_at(
    table, start, end, kv_head, KV_HEADS: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr
):
    """Where a tile of keys lies, (TILE, WIDTH), and which of them are before `end`."""
    row = tl.arange(0, TILE)
    there = row < end - start
    if P % TILE == 0:  # in one block
        block = tl.load(table + start // P, mask=start < end, other=0).to(tl.int64)
        at = ((block * KV_HEADS + kv_head) * P + start % P) * WIDTH + row * WIDTH
    else:
        blocks = tl.load(table + (start + row) // P, mask=there, other=0).to(tl.int64)
        at = ((blocks * KV_HEADS + kv_head) * P + (start + row) % P) * WIDTH
    return at[:, None] + tl.arange(0, WIDTH)[None, :], there[:, None]


@triton.jit
def as_tile(words, KIND: tl.constexpr, T: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr):
    """Words of the cache, (TILE, words), as a factor of a product, (TILE, DIM)."""
    if KIND.primitive_bitwidth == 32:
        tile = words
    elif KIND.primitive_bitwidth == 16:
        tile = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)).to(KIND, bitcast=True)
    else:
        even = tl.join(words.to(tl.int8), (words >> 16).to(tl.int8))
        odd = tl.join((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
        tile = tl.join(even, odd).to(KIND, bitcast=True)
    return tl.reshape(tile, (TILE, DIM)).to(T)


@triton.jit
def take_tile(
    k, v, q, start, end, position, top, total, mixed, T: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """A tile (TILE, DIM) into the sums of all heads."""
    keys = start + tl.arange(0, TILE)
    seen = keys < end
    if WINDOW > 0:
        seen = seen & (keys > position - WINDOW)
    scores = tl.where(seen[None, :], powers(tl.dot(q, tl.trans(k)), CAP), -1e30)
    n_top = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp2(top - n_top)
    weights = tl.where(seen[None, :], tl.exp2(scores - n_top[:, None]), 0.0)
    mixed = tl.dot(weights.to(T), v, mixed * shrink[:, None])
    return n_top, total * shrink + tl.sum(weights, 1), mixed


@triton.jit
def decode_grouped(
    qkv, cos, sin, k_cache, v_cache, tables, width, positions, partial, extremes, counters,
    out, out_d, out_s, scale, bias, q_norm, k_norm, eps, apart,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    BYTES: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, SOME: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """The arguments of decode_attention. T: what is multiplied."""
    DIM: tl.constexpr = 2 * HALF
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PAD: tl.constexpr = 16 if SOME < 16 else SOME
    KIND: tl.constexpr = k_cache.dtype.element_ty
    WIDTH: tl.constexpr = DIM * KIND.primitive_bitwidth // 32
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    t = tl.program_id(2)
    start_next(PDL)
    k_words = as_words(k_cache)
    v_words = as_words(v_cache)
    position = tl.load(positions + t)
    table = tables + t * tl.load(width)
    first, end, chunks = chunk_of(position, split, TILE, SPLITS, LEAST, WINDOW)
    if split >= chunks:
        return
    i = tl.arange(0, DIM)
    if STAGES == 0:
        at, there = tile_at(table, first, end, kv_head, KV_HEADS, P, TILE, WIDTH)
        k = tl.load(k_words + at, mask=there, other=0)
        v = tl.load(v_words + at, mask=there, other=0)
    cosines = tl.load(cos + position * HALF + i % HALF)
    sines = tl.load(sin + position * HALF + i % HALF) * tl.where(i < HALF, -1.0, 1.0)
    wait_before(PDL)
    row = qkv + t * ((HEADS + 2 * KV_HEADS) * DIM)
    new_k = rotated(row, HEADS + kv_head, cosines, sines, bias, k_norm, eps, apart, HALF, PARTS).to(KIND)
    new_v = part_of_head(row, HEADS + KV_HEADS + kv_head, i, bias, apart, DIM, PARTS).to(KIND)
    last = split == chunks - 1
    if last:
        store_own(k_cache, v_cache, table, position, kv_head, new_k, new_v, KV_HEADS, DIM, P)
    head = kv_head * GROUP + tl.minimum(tl.arange(0, SOME), GROUP - 1)
    q = rotated(row, head[:, None], cosines, sines, bias, q_norm, eps, apart, HALF, PARTS)
    q *= scale * (1.0 if CAP > 0 else LOG2E)
    own = powers(tl.sum(q * new_k.to(tl.float32)[None, :], 1), CAP)
    own = tl.reshape(tl.broadcast_to(own[None, :], (PAD // SOME, SOME)), (PAD,))
    top = tl.where(last, own, -1e30)
    total = tl.where(last, own * 0.0 + 1.0, 0.0)
    mixed = tl.zeros((PAD, DIM), tl.float32) + tl.where(last, new_v.to(tl.float32), 0.0)[None, :]
    q = tl.reshape(tl.broadcast_to(q.to(T)[None, :, :], (PAD // SOME, SOME, DIM)), (PAD, DIM))
    if STAGES == 0:
        for start in range(first, end, TILE):
            k_now = as_tile(k, KIND, T, TILE, DIM)
            v_now = as_tile(v, KIND, T, TILE, DIM)
            at, there = tile_at(table, start + TILE, end, kv_head, KV_HEADS, P, TILE, WIDTH)
            k = tl.load(k_words + at, mask=there, other=0)
            v = tl.load(v_words + at, mask=there, other=0)
            top, total, mixed = take_tile(
                k_now, v_now, q, start, end, position, top, total, mixed, T, TILE, WINDOW, CAP
            )
    else:
        for start in tl.range(first, end, TILE, num_stages=STAGES):
            at, there = tile_at(table, start, end, kv_head, KV_HEADS, P, TILE, DIM)
            k = tl.load(k_cache + at, mask=there, other=0.0).to(T)
            v = tl.load(v_cache + at, mask=there, other=0.0).to(T)
            top, total, mixed = take_tile(k, v, q, start, end, position, top, total, mixed, T, TILE, WINDOW, CAP)
    r = tl.arange(0, PAD)
    if chunks == 1:
        write_heads(
            mixed / total[:, None], t, kv_head * GROUP + r, r < GROUP, out, out_d, out_s, HEADS * DIM, DIM, BYTES
        )
    else:
        place = (t * HEADS + kv_head * GROUP + r) * SPLITS + split
        tl.store(partial + place[:, None] * DIM + i[None, :], mixed, mask=(r < GROUP)[:, None])
        tl.store(extremes + place * 2, top, mask=r < GROUP)
        tl.store(extremes + place * 2 + 1, total, mask=r < GROUP)
        join(partial, extremes, counters, t, kv_head, chunks, out, out_d, out_s, HEADS, KV_HEADS, DIM, SPLITS, BYTES)
