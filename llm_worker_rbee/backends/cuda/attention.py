"""Attention of tokens that answer, one each: rotation, cache write, scores, values and the bytes of the result at once.

The cache is (blocks, kv_heads, P, dim): what a head reads of a block is contiguous. The context of a request is cut
into at most SPLITS chunks of whole tiles; each program (chunk, kv head, request) leaves a partial result, and the one
that comes last joins them in order, so the bits do not depend on who was last. The keys and values of earlier steps are
on their way before the kernel before has finished. Needs rotary over the whole head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .intrinsics import start_next, wait_before


@triton.jit
def part_of_head(row, head, i, bias, apart, DIM: tl.constexpr, PARTS: tl.constexpr):
    """Values i of a head of a token's row, as float32: a product's PARTS, `apart` from each other, and its bias."""
    x = tl.load(row + head * DIM + i).to(tl.float32)
    for s in tl.static_range(1, PARTS):
        x += tl.load(row + s * apart + head * DIM + i).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + head * DIM + i)
    return x


@triton.jit
def rotated(row, head, cosines, sines, bias, norm, eps, apart, HALF: tl.constexpr, PARTS: tl.constexpr):
    """A head's vector, normed if there are weights for that, rotated: value i pairs with value i + HALF."""
    i = tl.arange(0, 2 * HALF)
    j = (i + HALF) % (2 * HALF)
    x = part_of_head(row, head, i, bias, apart, 2 * HALF, PARTS)
    y = part_of_head(row, head, j, bias, apart, 2 * HALF, PARTS)
    if norm is not None:
        factor = tl.rsqrt(tl.sum(x * x, 0) / (2 * HALF) + eps)
        x = x * factor * tl.load(norm + i)
        y = y * factor * tl.load(norm + j)
    return x * cosines + y * sines


@triton.jit
def cap_scores(scores, CAP: tl.constexpr):
    """CAP * tanh(scores / CAP), where there is a cap."""
    if CAP > 0:
        e = tl.exp(-2.0 * tl.abs(scores) / CAP)
        size = CAP * (1.0 - e) / (1.0 + e)
        scores = tl.where(scores < 0, -size, size)
    return scores


@triton.jit
def write_head(y, t, head, out, out_d, out_s, width, DIM: tl.constexpr, BYTES: tl.constexpr):
    """The result of one head, to the next product: as blocks of 32 bytes or as it is."""
    if BYTES:
        GROUPS: tl.constexpr = DIM // 32
        blocks = width // 32
        y = tl.reshape(y, (GROUPS, 32))
        block = head * GROUPS + tl.arange(0, GROUPS)
        c = tl.arange(0, 32)[None, :]
        d = tl.max(tl.abs(y), 1) / 127.0
        q = tl.floor(y * tl.where(d > 0, 1.0 / d, 0.0)[:, None] + 0.5)
        tl.store(out + ((t * 8 + c // 4) * blocks + block[:, None]) * 4 + c % 4, q.to(tl.int8))
        tl.store(out_d + t * blocks + block, d)
        tl.store(out_s + (t * 2) * blocks + block, tl.sum(tl.where(c < 16, q, 0.0), 1) * d)
        tl.store(out_s + (t * 2 + 1) * blocks + block, tl.sum(tl.where(c < 16, 0.0, q), 1) * d)
    else:
        i = tl.arange(0, DIM)
        tl.store(out + t * width + head * DIM + i, y.to(out.dtype.element_ty))


@triton.jit
def load_tile(
    k_cache, v_cache, table, first, position, kv_head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys and values of TILE positions from `first` on, those before `position`: (TILE, DIM)."""
    keys = first + tl.arange(0, TILE)
    there = keys < position
    block = tl.load(table + keys // P, mask=there, other=0).to(tl.int64)
    at = (((block * KV_HEADS + kv_head) * P + keys % P) * DIM)[:, None] + tl.arange(0, DIM)[None, :]
    k = tl.load(k_cache + at, mask=there[:, None], other=0.0)
    return k, tl.load(v_cache + at, mask=there[:, None], other=0.0)


@triton.jit
def decode_attention(
    qkv, cos, sin, k_cache, v_cache, tables, width, positions, partial, extremes, counters,
    out, out_d, out_s, scale, bias, q_norm, k_norm, eps, apart,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, BYTES: tl.constexpr,
    PDL: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """qkv (PARTS, B, (HEADS + 2 KV_HEADS) * dim); partial (B, HEADS, SPLITS, dim), extremes (B, HEADS, SPLITS, 2)
    float32; cos, sin (positions, HALF); tables (B, width[0]). A chunk has LEAST tiles or more. Who stands at -1 is
    nobody."""
    DIM: tl.constexpr = 2 * HALF
    GROUP: tl.constexpr = HEADS // KV_HEADS
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    t = tl.program_id(2)
    start_next(PDL)
    position = tl.load(positions + t)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position + 1 - WINDOW, 0) // TILE * TILE
    tiles = (position + 1 - begin + TILE - 1) // TILE
    each = tl.maximum((tiles + SPLITS - 1) // SPLITS, LEAST)
    active = (tiles + each - 1) // each
    if split >= active:
        return
    i = tl.arange(0, DIM)
    table = tables + t * tl.load(width)
    first = begin + split * each * TILE
    end = tl.minimum(first + each * TILE, position + 1)
    k, v = load_tile(k_cache, v_cache, table, first, position, kv_head, KV_HEADS, DIM, P, TILE)
    cosines = tl.load(cos + position * HALF + i % HALF)
    sines = tl.load(sin + position * HALF + i % HALF) * tl.where(i < HALF, -1.0, 1.0)
    wait_before(PDL)
    row = qkv + t * ((HEADS + 2 * KV_HEADS) * DIM)
    new_k = rotated(row, HEADS + kv_head, cosines, sines, bias, k_norm, eps, apart, HALF, PARTS)
    new_k = new_k.to(k_cache.dtype.element_ty)
    new_v = part_of_head(row, HEADS + KV_HEADS + kv_head, i, bias, apart, DIM, PARTS).to(v_cache.dtype.element_ty)
    if split == active - 1:
        block = tl.load(table + position // P).to(tl.int64)
        at = ((block * KV_HEADS + kv_head) * P + position % P) * DIM + i
        tl.store(k_cache + at, new_k)
        tl.store(v_cache + at, new_v)
    q, tops, totals, mixed = (), (), (), ()
    for g in tl.static_range(GROUP):
        q = q + (rotated(row, kv_head * GROUP + g, cosines, sines, bias, q_norm, eps, apart, HALF, PARTS) * scale,)
        tops = tops + (-1e30,)
        totals = totals + (0.0,)
        mixed = mixed + (tl.zeros((DIM,), tl.float32),)
    for start in range(first, end, TILE):
        keys = start + tl.arange(0, TILE)
        seen = keys <= position
        if WINDOW > 0:
            seen = seen & (keys > position - WINDOW)
        own = (keys == position)[:, None]
        k_now = tl.where(own, new_k[None, :], k)
        v_now = tl.where(own, new_v[None, :], v)
        until = tl.minimum(end, position)
        k, v = load_tile(k_cache, v_cache, table, start + TILE, until, kv_head, KV_HEADS, DIM, P, TILE)
        n_tops, n_totals, n_mixed = (), (), ()
        for g in tl.static_range(GROUP):
            scores = tl.where(seen, cap_scores(tl.sum(k_now.to(tl.float32) * q[g][None, :], 1), CAP), -1e30)
            top = tl.maximum(tops[g], tl.max(scores, 0))
            shrink = tl.exp(tops[g] - top)
            weights = tl.where(seen, tl.exp(scores - top), 0.0)
            n_tops = n_tops + (top,)
            n_totals = n_totals + (totals[g] * shrink + tl.sum(weights, 0),)
            n_mixed = n_mixed + (mixed[g] * shrink + tl.sum(v_now.to(tl.float32) * weights[:, None], 0),)
        tops, totals, mixed = n_tops, n_totals, n_mixed
    if active == 1:
        for g in tl.static_range(GROUP):
            write_head(mixed[g] / totals[g], t, kv_head * GROUP + g, out, out_d, out_s, HEADS * DIM, DIM, BYTES)
    else:
        for g in tl.static_range(GROUP):
            at = (t * HEADS + kv_head * GROUP + g) * SPLITS + split
            tl.store(partial + at * DIM + i, mixed[g])
            tl.store(extremes + at * 2, tops[g])
            tl.store(extremes + at * 2 + 1, totals[g])
        tl.debug_barrier()
        before = tl.atomic_add(counters + t * KV_HEADS + kv_head, 1, sem="acq_rel")
        if before == active - 1:
            for g in tl.static_range(GROUP):
                y = joined(partial, extremes, (t * HEADS + kv_head * GROUP + g) * SPLITS, active, DIM, SPLITS)
                write_head(y, t, kv_head * GROUP + g, out, out_d, out_s, HEADS * DIM, DIM, BYTES)
            tl.store(counters + t * KV_HEADS + kv_head, 0)


@triton.jit
def joined(partial, extremes, first, active, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """All partial results of a head, in order, a few at a time."""
    FEW: tl.constexpr = 8
    s = tl.arange(0, SPLITS)
    top = tl.max(tl.load(extremes + (first + s) * 2, mask=s < active, other=-1e30, cache_modifier=".cg"), 0)
    total = 0.0
    mixed = tl.zeros((DIM,), tl.float32)
    for start in range(0, active, FEW):
        few = start + tl.arange(0, FEW)
        there = few < active
        at = first + few
        weight = tl.exp(tl.load(extremes + at * 2, mask=there, other=-1e30, cache_modifier=".cg") - top)
        weight = tl.where(there, weight, 0.0)
        total += tl.sum(weight * tl.load(extremes + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg"), 0)
        rows = partial + at[:, None] * DIM + tl.arange(0, DIM)[None, :]
        rows = tl.load(rows, mask=there[:, None], other=0.0, cache_modifier=".cg")
        mixed += tl.sum(rows * weight[:, None], 0)
    return mixed / total
