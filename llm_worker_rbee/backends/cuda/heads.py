"""What the kernels of attention share: rotation, scores, chunks of a context and their joining, the bytes of a result.

Partial results are (B, heads, SPLITS, dim) with (top, total) of each; tops are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
