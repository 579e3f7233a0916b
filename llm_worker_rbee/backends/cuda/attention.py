"""Attention of tokens that answer, one each: rotation, cache write, scores, values and the bytes of the result at once.

The cache is (blocks, kv_heads, P, dim): what a head reads of a block is contiguous. The context of a request is cut
into at most SPLITS chunks of whole tiles; each program (chunk, kv head, request) leaves a partial result, and the one
that comes last joins them in order, so the bits do not depend on who was last. The keys and values of earlier steps are
on their way before the kernel before has finished. Needs rotary over the whole head.
Here each head of a group is computed by itself; grouped.py has the same with all of a group on the tensor cores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .heads import LOG2E, as_words, chunk_of, join, part_of_head, powers, rotated, store_own, write_head
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
