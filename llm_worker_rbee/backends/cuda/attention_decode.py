"""Attention of tokens that answer, one each: rotation, cache write, scores, values and the bytes of the result at once.

The cache is (blocks, kv_heads, P, dim): what a head reads of a block is contiguous. The context of a request is cut
into at most SPLITS chunks of whole tiles; each program (chunk, kv head, request) leaves a partial result, and the one
that comes last joins them in order, so the bits do not depend on who was last. The keys and values of earlier steps are
on their way before the kernel before has finished. Needs rotary over the whole head.
Here each head of a group is computed by itself; grouped.py has the same with all of a group on the tensor cores.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import triton
import triton.language as tl

from . import device
from .intrinsics import high_half, low_half, start_next, wait_before


@triton.jit
def blocks_of(table, start, end, ROWS: tl.constexpr, STREAMS: tl.constexpr, P: tl.constexpr):
    """Where the keys from `start` on lie: a block for each stream, whose ROWS neighbouring keys never leave it."""
    keys = start + tl.arange(0, STREAMS) * ROWS
    return tl.load(table + keys // P, mask=keys < end, other=0)


@triton.jit
def words_at(
    blocks, start, end, kv_head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, STREAMS: tl.constexpr,
    PER: tl.constexpr,
):  # fmt: skip
    """Where the words of a tile lie, (STREAMS, ROWS, DIM // PER), and which of them are before `end`."""
    keys = start + tl.arange(0, STREAMS) * ROWS
    row = tl.arange(0, ROWS)
    at = ((blocks.to(tl.int64) * KV_HEADS + kv_head) * P + keys % P) * (DIM // PER)
    within = (row * (DIM // PER))[None, :, None] + tl.arange(0, DIM // PER)[None, None, :]
    return at[:, None, None] + within, (row[None, :] < (end - keys)[:, None])[:, :, None]


@triton.jit
def unpacked(words, KIND: tl.constexpr, DIM: tl.constexpr):
    """(STREAMS, ROWS, words) -> (STREAMS, ROWS, DIM) float32; KIND is what the cache holds."""
    if KIND.primitive_bitwidth == 32:
        return words
    if KIND.primitive_bitwidth == 8:
        pairs = tl.join(
            tl.join(quarter(words, 0, KIND), quarter(words, 2, KIND)),
            tl.join(quarter(words, 1, KIND), quarter(words, 3, KIND)),
        )
    elif KIND == tl.bfloat16:
        pairs = tl.join((words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True))
    else:
        pairs = tl.join(low_half(words), high_half(words))
    return tl.reshape(pairs, (words.shape[0], words.shape[1], DIM))


@triton.jit
def quarter(words, i: tl.constexpr, KIND: tl.constexpr):
    """Byte i of each word, as float32."""
    return (words >> (8 * i)).to(tl.int8).to(KIND, bitcast=True).to(tl.float32)


@triton.jit
def seen_of(start, end, position, ROWS: tl.constexpr, STREAMS: tl.constexpr, WINDOW: tl.constexpr):
    """Which keys of a tile count, (STREAMS, ROWS)."""
    keys = start + (tl.arange(0, STREAMS) * ROWS)[:, None] + tl.arange(0, ROWS)[None, :]
    seen = keys < end
    if WINDOW > 0:
        seen = seen & (keys > position - WINDOW)
    return seen


@triton.jit
def weigh(k, seen, q, tops, totals, CAP: tl.constexpr, GROUP: tl.constexpr):
    """Weights (STREAMS, ROWS) of a tile for every head, with the new tops and totals, and what the sums shrink by. Only
    the sum over DIM crosses lanes."""
    n_tops, n_totals, weights, shrinks = (), (), (), ()
    for g in tl.static_range(GROUP):
        scores = tl.where(seen, powers(tl.sum(k * q[g][None, None, :], 2), CAP), -1e30)
        top = tl.maximum(tops[g], tl.max(scores, 1))
        shrink = tl.exp2(tops[g] - top)
        weight = tl.where(seen, tl.exp2(scores - top[:, None]), 0.0)
        n_tops = n_tops + (top,)
        n_totals = n_totals + (totals[g] * shrink + tl.sum(weight, 1),)
        weights = weights + (weight,)
        shrinks = shrinks + (shrink,)
    return n_tops, n_totals, weights, shrinks


@triton.jit
def mix(v, weights, shrinks, mixed, GROUP: tl.constexpr):
    """The values of a tile into the sums of every head, (STREAMS, DIM)."""
    n_mixed = ()
    for g in tl.static_range(GROUP):
        new = tl.sum(v * weights[g][:, :, None], 1)
        n_mixed = n_mixed + (mixed[g] * shrinks[g][:, None] + new,)
    return n_mixed


@triton.jit
def decode_attention(
    qkv, cos, sin, k_cache, v_cache, tables, width, positions, partial, extremes, counters,
    out, out_d, out_s, scale, bias, q_norm, k_norm, eps, apart,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    STREAMS: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    BYTES: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """qkv (PARTS, B, (HEADS + 2 KV_HEADS) * dim); partial (B, HEADS, SPLITS, dim), extremes (B, HEADS, SPLITS, 2)
    float32; cos, sin (positions, HALF); tables (B, width[0]). A tile is STREAMS runs of ROWS keys, each run summed by
    lanes of its own until the end; a chunk has LEAST tiles or more. Who stands at -1 is nobody. Scores are powers of
    two. STAGES > 0: so many tiles on their way through shared memory, else one in registers."""
    DIM: tl.constexpr = 2 * HALF
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILE: tl.constexpr = ROWS * STREAMS
    KIND: tl.constexpr = k_cache.dtype.element_ty
    PER: tl.constexpr = 32 // KIND.primitive_bitwidth
    k_words = as_words(k_cache)
    v_words = as_words(v_cache)
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    t = tl.program_id(2)
    start_next(PDL)
    position = tl.load(positions + t)
    table = tables + t * tl.load(width)
    first, end, chunks = chunk_of(position, split, TILE, SPLITS, LEAST, WINDOW)
    if split >= chunks:
        return
    i = tl.arange(0, DIM)
    if STAGES == 0:
        blocks = blocks_of(table, first, end, ROWS, STREAMS, P)
        at, there = words_at(blocks, first, end, kv_head, KV_HEADS, DIM, P, ROWS, STREAMS, PER)
        k = tl.load(k_words + at, mask=there, other=0)
        v = tl.load(v_words + at, mask=there, other=0)
        blocks = blocks_of(table, first + TILE, end, ROWS, STREAMS, P)
    cosines = tl.load(cos + position * HALF + i % HALF)
    sines = tl.load(sin + position * HALF + i % HALF) * tl.where(i < HALF, -1.0, 1.0)
    wait_before(PDL)
    row = qkv + t * ((HEADS + 2 * KV_HEADS) * DIM)
    new_k = rotated(row, HEADS + kv_head, cosines, sines, bias, k_norm, eps, apart, HALF, PARTS)
    new_k = new_k.to(k_cache.dtype.element_ty)
    new_v = part_of_head(row, HEADS + KV_HEADS + kv_head, i, bias, apart, DIM, PARTS).to(v_cache.dtype.element_ty)
    if split == chunks - 1:
        store_own(k_cache, v_cache, table, position, kv_head, new_k, new_v, KV_HEADS, DIM, P)
    own = (tl.arange(0, STREAMS) == 0) & (split == chunks - 1)  # who begins with the token itself
    q, tops, totals, mixed = (), (), (), ()
    for g in tl.static_range(GROUP):
        one = rotated(row, kv_head * GROUP + g, cosines, sines, bias, q_norm, eps, apart, HALF, PARTS)
        one *= scale * (1.0 if CAP > 0 else LOG2E)
        q = q + (one,)
        tops = tops + (tl.where(own, powers(tl.sum(one * new_k.to(tl.float32), 0), CAP), -1e30),)
        totals = totals + (tl.where(own, 1.0, 0.0),)
        mixed = mixed + (tl.where(own[:, None], new_v.to(tl.float32)[None, :], 0.0),)
    if STAGES == 0:
        for start in range(first, end, TILE):
            seen = seen_of(start, end, position, ROWS, STREAMS, WINDOW)
            tops, totals, weights, shrinks = weigh(unpacked(k, KIND, DIM), seen, q, tops, totals, CAP, GROUP)
            at, there = words_at(blocks, start + TILE, end, kv_head, KV_HEADS, DIM, P, ROWS, STREAMS, PER)
            k = tl.load(k_words + at, mask=there, other=0)  # into the registers of those that are done with
            blocks = blocks_of(table, start + 2 * TILE, end, ROWS, STREAMS, P)
            mixed = mix(unpacked(v, KIND, DIM), weights, shrinks, mixed, GROUP)
            v = tl.load(v_words + at, mask=there, other=0)
    else:
        for start in tl.range(first, end, TILE, num_stages=STAGES):
            blocks = blocks_of(table, start, end, ROWS, STREAMS, P)
            at, there = words_at(blocks, start, end, kv_head, KV_HEADS, DIM, P, ROWS, STREAMS, PER)
            k = tl.load(k_words + at, mask=there, other=0)
            v = tl.load(v_words + at, mask=there, other=0)
            seen = seen_of(start, end, position, ROWS, STREAMS, WINDOW)
            tops, totals, weights, shrinks = weigh(unpacked(k, KIND, DIM), seen, q, tops, totals, CAP, GROUP)
            mixed = mix(unpacked(v, KIND, DIM), weights, shrinks, mixed, GROUP)
    y = ()
    for g in tl.static_range(GROUP):
        top = tl.max(tops[g], 0)
        factors = tl.exp2(tops[g] - top)
        total = tl.sum(totals[g] * factors, 0)
        one = tl.sum(mixed[g] * factors[:, None], 0)
        if chunks == 1:
            one = one / total
        else:
            place = (t * HEADS + kv_head * GROUP + g) * SPLITS + split
            tl.store(partial + place * DIM + i, one)
            tl.store(extremes + place * 2, top)
            tl.store(extremes + place * 2 + 1, total)
        y = y + (one,)
    if chunks == 1:
        for g in tl.static_range(GROUP):
            write_head(y[g], t, kv_head * GROUP + g, out, out_d, out_s, HEADS * DIM, DIM, BYTES)
    else:
        join(partial, extremes, counters, t, kv_head, chunks, out, out_d, out_s, HEADS, KV_HEADS, DIM, SPLITS, BYTES)


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


LOG2E = tl.constexpr(1.4426950408889634)


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
    """A head's vector (or those of a column of heads), normed if there are weights for that, rotated: value i pairs
    with value i + HALF."""
    i = tl.arange(0, 2 * HALF)
    j = (i + HALF) % (2 * HALF)
    x = part_of_head(row, head, i, bias, apart, 2 * HALF, PARTS)
    y = part_of_head(row, head, j, bias, apart, 2 * HALF, PARTS)
    if norm is not None:
        factor = tl.rsqrt(tl.sum(x * x, len(x.shape) - 1, keep_dims=True) / (2 * HALF) + eps)
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
def powers(scores, CAP: tl.constexpr):
    """Scores as powers of two. Where there is no cap the queries had that factor already."""
    if CAP > 0:
        scores = cap_scores(scores, CAP) * LOG2E
    return scores


@triton.jit
def write_heads(y, t, heads, there, out, out_d, out_s, width, DIM: tl.constexpr, BYTES: tl.constexpr):
    """The results (rows, DIM) of some heads, those that are `there`, to the next product: as blocks of 32 bytes or as
    they are."""
    if BYTES:
        GROUPS: tl.constexpr = DIM // 32
        ROWS: tl.constexpr = y.shape[0] * GROUPS
        blocks = width // 32
        y = tl.reshape(y, (ROWS, 32))
        block = tl.reshape(heads[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :], (ROWS,))
        there = tl.reshape(tl.broadcast_to(there[:, None], (heads.shape[0], GROUPS)), (ROWS,))
        c = tl.arange(0, 32)[None, :]
        d = tl.max(tl.abs(y), 1) / 127.0
        q = tl.floor(y * tl.where(d > 0, 1.0 / d, 0.0)[:, None] + 0.5)
        at = ((t * 8 + c // 4) * blocks + block[:, None]) * 4 + c % 4
        tl.store(out + at, q.to(tl.int8), mask=there[:, None])
        tl.store(out_d + t * blocks + block, d, mask=there)
        tl.store(out_s + (t * 2) * blocks + block, tl.sum(tl.where(c < 16, q, 0.0), 1) * d, mask=there)
        tl.store(out_s + (t * 2 + 1) * blocks + block, tl.sum(tl.where(c < 16, 0.0, q), 1) * d, mask=there)
    else:
        at = t * width + heads[:, None] * DIM + tl.arange(0, DIM)[None, :]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=there[:, None])


@triton.jit
def write_head(y, t, head, out, out_d, out_s, width, DIM: tl.constexpr, BYTES: tl.constexpr):
    """The result of one head, (DIM,)."""
    one = tl.zeros((1,), tl.int32)
    write_heads(y[None, :], t, one + head, one == 0, out, out_d, out_s, width, DIM, BYTES)


@triton.jit
def chunk_of(position, split, TILE: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr):
    """(first key, end, chunks) of a chunk of the keys before `position`; by that alone, so that the bits are too."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position + 1 - WINDOW, 0) // TILE * TILE
    tiles = tl.maximum((position - begin + TILE - 1) // TILE, 1)
    each = tl.maximum((tiles + SPLITS - 1) // SPLITS, LEAST)
    first = begin + split * each * TILE
    chunks = tl.where(position < 0, 0, (tiles + each - 1) // each)
    return first, tl.minimum(first + each * TILE, position), chunks


@triton.jit
def as_words(cache):
    """A cache of small numbers, as words of 32 bits: numbers by themselves would take a register each."""
    if cache.dtype.element_ty.primitive_bitwidth == 32:
        return cache
    return cache.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def store_own(
    k_cache, v_cache, table, position, kv_head, new_k, new_v,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The token's own key and value to their place."""
    block = tl.load(table + position // P).to(tl.int64)
    at = ((block * KV_HEADS + kv_head) * P + position % P) * DIM + tl.arange(0, DIM)
    tl.store(k_cache + at, new_k)
    tl.store(v_cache + at, new_v)


@triton.jit
def join(
    partial, extremes, counters, t, kv_head, chunks, out, out_d, out_s,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """The results of all chunks, by the program that comes last, which leaves the counter at zero."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tl.debug_barrier()
    before = tl.atomic_add(counters + t * KV_HEADS + kv_head, 1, sem="acq_rel")
    if before == chunks - 1:
        tl.store(counters + t * KV_HEADS + kv_head, 0)
        y = ()  # all first: a load does not pass a store
        for g in tl.static_range(GROUP):
            y = y + (joined(partial, extremes, (t * HEADS + kv_head * GROUP + g) * SPLITS, chunks, DIM, SPLITS),)
        for g in tl.static_range(GROUP):
            write_head(y[g], t, kv_head * GROUP + g, out, out_d, out_s, HEADS * DIM, DIM, BYTES)


@triton.jit
def joined(partial, extremes, first, chunks, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """All partial results of a head, in order. All loads are independent of each other: one wait, not one a piece."""
    FEW: tl.constexpr = 8 if SPLITS > 8 else SPLITS
    s = tl.arange(0, SPLITS)
    top = tl.max(tl.load(extremes + (first + s) * 2, mask=s < chunks, other=-1e30, cache_modifier=".cg"), 0)
    total = 0.0
    mixed = tl.zeros((DIM,), tl.float32)
    for start in tl.static_range(0, SPLITS, FEW):
        few = start + tl.arange(0, FEW)
        there = few < chunks
        at = first + few
        weight = tl.exp2(tl.load(extremes + at * 2, mask=there, other=-1e30, cache_modifier=".cg") - top)
        weight = tl.where(there, weight, 0.0)
        total += tl.sum(weight * tl.load(extremes + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg"), 0)
        rows = partial + at[:, None] * DIM + tl.arange(0, DIM)[None, :]
        rows = tl.load(rows, mask=there[:, None], other=0.0, cache_modifier=".cg")
        mixed += tl.sum(rows * weight[:, None], 0)
    return mixed / total


FEW, CROWD = 4, 128  # requests up to which latency counts, not the rate of reading
PROGRAMS = 2048  # that many requests should be cut into
MANY_SPLITS = 16
DOT = 4  # heads that share keys from which the tensor cores take them


class Cut(NamedTuple):
    """A tile is `rows` keys for each 16 bytes a lane reads at a time, or with `dot` so many keys; a chunk has `least`
    tiles or more, a request at most `splits` chunks; `stages` of tiles on their way in shared memory, 0: one in
    registers."""

    rows: int
    warps: int
    splits: int
    least: int
    stages: int
    dot: bool


ONE_HEAD = {"few": Cut(8, 2, 16, 1, 0, False), "many": Cut(4, 1, 0, 4, 0, False), "crowd": Cut(2, 1, 0, 8, 0, False)}
PAIRED = {"few": Cut(4, 1, 32, 1, 0, False), "many": Cut(4, 1, 0, 4, 0, False)}  # two or three heads that share keys
GROUPED = {"few": Cut(16, 1, 32, 1, 0, True), "many": Cut(32, 1, 0, 2, 3, True)}
LARGE = {"few": Cut(16, 1, 16, 1, 0, True), "many": GROUPED["many"]}  # groups of more than DOT
PLAIN = {"few": Cut(2, 1, 4, 1, 0, False), "many": Cut(8, 1, 2, 1, 2, True)}  # the interpreter: short tiles, both ways


def cut_for(requests: int, heads: int, kv_heads: int) -> Cut:
    """The cut for so many requests."""
    group, size = heads // kv_heads, "few" if requests <= FEW else "many"
    if device.interpreting():
        return PLAIN["few"] if group < DOT or requests <= FEW else PLAIN["many"]
    table = ONE_HEAD if group == 1 else PAIRED if group < DOT else GROUPED if group == DOT else LARGE
    cut = table.get("crowd", table["many"]) if requests >= CROWD else table[size]
    if cut.splits:
        return cut
    wanted = -(-PROGRAMS // (requests * kv_heads * (2 if cut.dot else 1)))  # who uses the tensor cores needs fewer
    return cut._replace(splits=min(MANY_SPLITS, 1 << (wanted - 1).bit_length()))


def keys_for(dim: int, item: int) -> tuple[int, int]:
    """(keys of a tile, stages) for tokens that read, of heads of `dim` numbers of `item` bytes; fewer where shared
    memory is less than a Hopper's and a key is long."""
    if device.shared_memory() >= 200 << 10 or dim * item <= 256:
        return 64, 2
    return (32, 1) if dim * item <= 512 else (16, 1)


def runs_of(cut: Cut, dim: int, item: int, size: int) -> tuple[int, int]:
    """(keys of a run, runs) of a tile: a run lies in one block of `size` keys of `dim` numbers of `item` bytes."""
    tile = cut.rows * cut.warps * max(1, 512 // (dim * item))
    rows = gcd(size, cut.rows)
    return rows, tile // rows
