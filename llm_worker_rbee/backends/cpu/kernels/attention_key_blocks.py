"""Attention over blocks of keys: scores, softmax, weighted sums of values; and how the results of blocks are merged.

A row is one head of one token. Its positions are cut at multiples of KEY_BLOCK, whatever the piece of work. Each block
gives the largest score, the sum of e^(score - largest) and the sum of values with those weights; blocks are merged in
their order. A score or a sum is one chain of additions, by value or by position, so a row has the same bits alone, in a
batch, in any chunk and tile, and on any number of threads. Nothing past a row's own positions is ever added, not even
times 0.

Two ways through a block, with the same sums: `score` and `accumulate_pv` read the cache as it is (few rows: decode);
`score_rows` and `accumulate_rows` convert SPAN positions at a time to floats, which all tiles of rows read (prefill).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ...cpu_info import INSTRUCTION_SETS
from ..jit import kernel
from . import kv_layout as kv
from . import simd as f
from .dot_int8 import ISA
from .kv_layout import FMA_STEPS
from .simd import LANES

KEY_BLOCK = 512  # positions; bits depend on it, so it is the same on every machine
SPAN = 64  # positions that are converted to floats at a time: in the first-level cache with the queries
PREFETCH_POSITIONS = 32  # how far values are prefetched
TILE_ROWS, TILE_VECTORS = INSTRUCTION_SETS[ISA].attention_tile
NEGATIVE_INFINITY, LOWEST = np.float32(-np.inf), np.finfo(np.float32).min
# set for each variant
ROWS = VECTORS = SIZE = CHUNKS = MIN_VECTORS = MIN_CHUNKS = MIN_SIZE = PREFETCH = None
VECTOR_BY_VECTOR = MULTIPLY_TILE = MULTIPLY_ONE = ACCUMULATE_SINGLE = None


class KVView(NamedTuple):
    """Keys and values of one KV head of a request (kv_layout.py)."""

    keys: Any
    values: Any
    k_scales: Any
    v_scales: Any
    blocks: Any  # the request's block table
    size: int  # positions of a KV block
    kv_head: int
    kv_heads: int
    dim: int  # padded


class Rows(NamedTuple):
    """The rows of a piece: row r is head r % heads of token r // heads; positions ascend."""

    positions: Any
    token: int  # the first one
    tokens: int
    heads: int
    window: int
    length: int  # of the sequence, where rows see both sides; 0: they see what lies before them
    spans: Any  # first and last + 1 of the positions that a token sees, or that a row sees beside those before it
    has_spans: bool


class Partial(NamedTuple):
    """The softmax and the sums of values of some rows, so far or of one block, in an array of floats.

    From `at` on: `rows` largest scores (a multiple of 16), their sums of e^(score - largest), then `dim` values a row.
    """

    array: Any
    at: int
    rows: int


@kernel
def row_span(rows, r):
    """Return (first, last + 1) of the positions that row r sees; rows past the end see what the last one sees."""
    token = rows.token + min(r // rows.heads, rows.tokens - 1)
    end = rows.positions[token] + 1
    if rows.has_spans:
        if rows.length:
            return rows.spans[2 * token], rows.spans[2 * token + 1]
        return max(0, end - rows.window) if rows.window else 0, max(end, rows.spans[2 * token + 1])
    if rows.length:
        near = rows.window // 2 if rows.window else rows.length
        return max(0, end - 1 - near), min(rows.length, end + near)
    return max(0, end - rows.window) if rows.window else 0, end


def score(view, q, at, scale, start, last, scores):
    """Write scores of ROWS rows with positions start .. last - 1, and up to the end of the last chunks.

    `start` is a multiple of 16; position p of row r goes to scores[r * KEY_BLOCK + p % KEY_BLOCK]. If fewer than
    VECTORS chunks are left, the last one is computed again: a narrow tile waits for its own sums and would not be
    faster.
    """
    keys, blocks, dim, chunks = view.keys, view.blocks, view.dim, view.size // LANES
    kv_head, kv_heads, length = view.kv_head, view.kv_heads, dim * LANES
    first, end = start // LANES, -(-last // LANES)
    chunk, to = first, start % KEY_BLOCK
    while chunk + MIN_VECTORS < end:
        lines = CHUNKS(blocks, chunk, end, chunks, kv_head, kv_heads)
        ahead = chunk + max(VECTORS, PREFETCH_POSITIONS // LANES)
        far_array, ahead = (keys, ahead) if ahead < end else (view.values, ahead - end + first)
        far_lines = CHUNKS(blocks, ahead, end, chunks, kv_head, kv_heads)
        total = kv.zero_tile(SIZE)
        for d in range(0, dim, FMA_STEPS):
            if PREFETCH:
                kv.prefetch_keys(far_array, far_lines, length, d * LANES)
            total = kv.fma_keys(total, keys, lines, length, d * LANES, q, at + d, dim)
        kv.store_products(scores, to, KEY_BLOCK, total, kv.key_factors(keys, view.k_scales, lines, scale))
        chunk, to = chunk + VECTORS, to + VECTORS * LANES
    if chunk < end:  # the rest
        last_lines = MIN_CHUNKS(blocks, chunk, end, chunks, kv_head, kv_heads)
        rest = kv.zero_tile(MIN_SIZE)
        for d in range(0, dim, FMA_STEPS):
            rest = kv.fma_keys(rest, keys, last_lines, length, d * LANES, q, at + d, dim)
        kv.store_products(scores, to, KEY_BLOCK, rest, kv.key_factors(keys, view.k_scales, last_lines, scale))


def accumulate_pv(view, first, last, end, scores, out, to, d):
    """Add weight * value to values d .. dim - 1 of ROWS rows of `out`, over positions first .. last - 1 in their order.

    The weights are where `score` left them. Keys up to position end - 1 are read next.
    """
    values, blocks, size, dim = view.values, view.blocks, view.size, view.dim
    kv_head, kv_heads = view.kv_head, view.kv_heads
    while d + LANES * VECTORS <= dim:
        total = kv.load_tile(out, to + d, dim, ROWS, VECTORS)
        p, block, stop = first, first // size, (first // size + 1) * size
        while p < last:
            row = ((blocks[block] * kv_heads + kv_head) * size + p + size - stop) * dim + d
            ahead = min(stop + PREFETCH_POSITIONS, end - 1)
            far_array = values if ahead < last else view.keys
            far = kv.value_index(blocks, ahead, size, kv_head, kv_heads) // size * size * dim + d
            weight, count = p % KEY_BLOCK, min(stop, last) - p
            for i in range(0, count - FMA_STEPS + 1, FMA_STEPS):
                if PREFETCH:
                    for step in range(FMA_STEPS):
                        kv.prefetch_contiguous(far_array, far + (i + step) * dim, VECTORS)
                total = kv.fma_rows(total, values, row + i * dim, dim, scores, weight + i, KEY_BLOCK, ROWS, FMA_STEPS)
            for i in range(count // FMA_STEPS * FMA_STEPS, count):
                total = kv.fma_rows(total, values, row + i * dim, dim, scores, weight + i, KEY_BLOCK, ROWS, 1)
            p, block, stop = stop, block + 1, stop + size
        kv.store_tile(out, to + d, dim, total, VECTORS)
        d += LANES * VECTORS
    if VECTORS > 1 and d < dim:  # the rest, vector by vector
        VECTOR_BY_VECTOR(view, first, last, end, scores, out, to, d)


@kernel
def convert_keys(view, first, last, scale, floats):
    """Convert the keys of positions first .. last - 1 (at most SPAN, from a chunk's start on) to floats.

    Value d of position p goes to floats[d * SPAN + p - first], the factor of its products behind them, at dim * SPAN.
    """
    keys, dim, chunks, length = view.keys, view.dim, view.size // LANES, view.dim * LANES
    for p in range(0, last - first, LANES):
        chunk = kv.chunk_index(view.blocks, (first + p) // LANES, chunks, view.kv_head, view.kv_heads)
        for d in range(dim):
            f.store(floats, d * SPAN + p, f.load(keys, chunk * length + d * LANES))
        kv.store_tile(floats, dim * SPAN + p, 0, kv.key_factors(keys, view.k_scales, (chunk,), scale), 1)


@kernel
def convert_values(view, first, last, floats):
    """Convert the values of positions first .. last - 1 to floats; position p goes to floats[(p - first) * dim:]."""
    values, dim = view.values, view.dim
    for p in range(first, last):
        row = kv.value_index(view.blocks, p, view.size, view.kv_head, view.kv_heads) * dim
        for d in range(0, dim, LANES):
            f.store(floats, (p - first) * dim + d, f.load(values, row + d))


def score_rows(view, rows, count, q, scale, start, last, scores, floats):
    """Write scores of `count` rows with positions start .. last - 1 of a block, by tiles of ROWS x 16 VECTORS.

    Row r is at q[r * dim]; position p of row r goes to scores[r * KEY_BLOCK + p % KEY_BLOCK]. Chunks that no row of a
    tile sees are left out.
    """
    dim = view.dim
    for position in range(start // SPAN * SPAN, last, SPAN):
        convert_keys(view, position, min(position + SPAN, last), scale, floats)
        for r in range(0, count, ROWS):
            begin, stop = row_span(rows, r)[0] - position, min(row_span(rows, r + ROWS - 1)[1] - position, SPAN)
            p = max(0, begin) // (LANES * VECTORS) * LANES * VECTORS
            while p < stop:
                total = kv.zero_tile(SIZE)
                for d in range(0, dim, FMA_STEPS):
                    total = kv.fma_rows(total, floats, d * SPAN + p, SPAN, q, r * dim + d, dim, ROWS, FMA_STEPS)
                factors = kv.load_tile(floats, dim * SPAN + p, 0, 1, VECTORS)
                kv.store_products(scores, r * KEY_BLOCK + position % KEY_BLOCK + p, KEY_BLOCK, total, factors)
                p += LANES * VECTORS


def multiply_values(floats, at, count, dim, scores, weight, out, to, d):
    """Add weight * value to values d .. dim - 1 of ROWS rows of `out`, for `count` positions from floats[at] on."""
    while d + LANES * VECTORS <= dim:
        total = kv.load_tile(out, to + d, dim, ROWS, VECTORS)
        i = 0
        while i + FMA_STEPS <= count:
            total = kv.fma_rows(total, floats, at + i * dim + d, dim, scores, weight + i, KEY_BLOCK, ROWS, FMA_STEPS)
            i += FMA_STEPS
        while i < count:
            total = kv.fma_rows(total, floats, at + i * dim + d, dim, scores, weight + i, KEY_BLOCK, ROWS, 1)
            i += 1
        kv.store_tile(out, to + d, dim, total, VECTORS)
        d += LANES * VECTORS
    if VECTORS > 1 and d < dim:
        VECTOR_BY_VECTOR(floats, at, count, dim, scores, weight, out, to, d)


def accumulate_single(rows, r, first, last, position, floats, dim, scores, out, to):
    """Add positions first .. last - 1, as far as each of ROWS rows sees them, row by row."""
    for i in range(r, r + ROWS):
        begin, end = row_span(rows, i)
        begin, end = max(begin, first), min(end, last)
        if begin < end:
            weight = i * KEY_BLOCK + begin % KEY_BLOCK
            MULTIPLY_ONE(floats, (begin - position) * dim, end - begin, dim, scores, weight, out, to + i * dim, 0)


def accumulate_rows(view, rows, count, start, last, scores, out, to, floats):
    """Sum the values of `count` rows over positions start .. last - 1 of a block; row r goes to out[to + r * dim].

    In each tile, positions that all rows see are added together, the others row by row.
    """
    dim = view.dim
    for i in range(to, to + -(-count // ROWS) * ROWS * dim, LANES):
        f.store(out, i, f.splat(np.float32(0)))
    for position in range(start, last, SPAN):
        stop = min(position + SPAN, last)
        convert_values(view, position, stop, floats)
        for r in range(0, count, ROWS):
            low = min(max(row_span(rows, r + ROWS - 1)[0], position), stop)
            high = max(low, min(row_span(rows, r)[1], stop))
            if position < low:
                ACCUMULATE_SINGLE(rows, r, position, low, position, floats, dim, scores, out, to)
            if low < high:
                weight = r * KEY_BLOCK + low % KEY_BLOCK
                MULTIPLY_TILE(floats, (low - position) * dim, high - low, dim, scores, weight, out, to + r * dim, 0)
            if high < stop:
                ACCUMULATE_SINGLE(rows, r, high, stop, position, floats, dim, scores, out, to)


@kernel
def cap_scores(scores, first, last, cap):
    """Apply cap * tanh(s / cap), by tanh(y) = 1 - 2 / (1 + e^2y)."""
    one, two, high = f.splat(np.float32(1)), f.splat(np.float32(2) / cap), f.splat(cap)
    for i in range(first, last, LANES):
        e = f.exp(f.mul(f.load(scores, i), two))
        f.store(scores, i, f.mul(high, f.add(one, f.div(f.splat(np.float32(-2)), f.add(one, e)))))


@kernel
def max_score(scores, first, last):
    """Return the largest of first .. last - 1, whole vectors; four independent chains hide the latency."""
    a = b = c = d = f.splat(LOWEST)
    i = first
    while i + 4 * LANES <= last:
        a, b = f.max_nan_second(f.load(scores, i), a), f.max_nan_second(f.load(scores, i + LANES), b)
        c, d = f.max_nan_second(f.load(scores, i + 2 * LANES), c), f.max_nan_second(f.load(scores, i + 3 * LANES), d)
        i += 4 * LANES
    while i < last:
        a = f.max_nan_second(f.load(scores, i), a)
        i += LANES
    return f.hmax(f.max_nan_second(f.max_nan_second(a, b), f.max_nan_second(c, d)))


@kernel
def softmax_row(scores, at, first, last, cap):
    """Replace scores first .. last - 1 of the row at `at` by e^(score - largest); return (largest, sum)."""
    low, high = at + first // LANES * LANES, at + -(-last // LANES) * LANES
    if cap:
        cap_scores(scores, low, high, cap)
    f.store(scores, low, f.select_lanes(f.load(scores, low), at + first - low, at + last - low, NEGATIVE_INFINITY))
    tail = high - LANES
    f.store(scores, tail, f.select_lanes(f.load(scores, tail), at + first - tail, at + last - tail, NEGATIVE_INFINITY))
    largest = max_score(scores, low, high)
    less = f.splat(-largest)
    sums = f.splat(np.float32(0))
    for i in range(low, high, LANES):
        e = f.exp_nonpositive(f.add(f.load(scores, i), less))
        f.store(scores, i, e)
        sums = f.add(sums, e)
    return largest, f.hsum(sums)


@kernel
def apply_v_scales(view, scores, at, first, last):
    """Multiply the weights of positions first .. last - 1 by the scales of their values."""
    for p in range(first // LANES * LANES, last, LANES):
        scale = kv.value_index(view.blocks, p, view.size, view.kv_head, view.kv_heads)
        i = at + p % KEY_BLOCK
        f.store(scores, i, f.mul(f.load(scores, i), f.load(view.v_scales, scale)))


@kernel
def softmax_rows(view, rows, count, start, last, cap, scores, part):
    """Compute the softmax of `count` rows over positions start .. last - 1 of a block, not divided by its sum."""
    for r in range(count):
        begin, end = row_span(rows, r)
        begin, end, at = max(begin, start), min(end, last), r * KEY_BLOCK
        largest, total = LOWEST, np.float32(0)
        if begin < end:
            first = begin % KEY_BLOCK
            largest, total = softmax_row(scores, at, first, first + end - begin, cap)
            if kv.is_int8(view.values):
                apply_v_scales(view, scores, at, begin, end)
        part.array[part.at + r], part.array[part.at + part.rows + r] = largest, total


@kernel
def clear(part, floats):
    """Begin with no position; `floats` is the length of the sums of values."""
    for i in range(part.at, part.at + part.rows):
        part.array[i] = LOWEST
    for i in range(part.at + part.rows, part.at + 2 * part.rows + floats):
        part.array[i] = 0


@kernel
def merge(rows, count, dim, start, last, total, part):
    """Merge the results of positions start .. last - 1, whose softmax is overwritten; rows that see none stay."""
    x, y, n = total.array, part.array, total.rows
    for i in range(0, n, LANES):
        before, block = f.load(x, total.at + i), f.load(y, part.at + i)
        largest = f.max_nan_second(block, before)
        less = f.mul(largest, f.splat(np.float32(-1)))
        keep, add = f.exp(f.add(before, less)), f.exp(f.add(block, less))
        sums = f.fma(f.load(y, part.at + n + i), add, f.mul(f.load(x, total.at + n + i), keep))
        f.store(x, total.at + i, largest)
        f.store(x, total.at + n + i, sums)
        f.store(y, part.at + i, keep)
        f.store(y, part.at + n + i, add)
    for r in range(count):
        begin, end = row_span(rows, r)
        if max(begin, start) < min(end, last):
            keep, add = f.splat(y[part.at + r]), f.splat(y[part.at + n + r])
            for d in range(2 * n + r * dim, 2 * n + r * dim + dim, LANES):
                values = f.mul(f.load(x, total.at + d), keep)
                f.store(x, total.at + d, f.fma(f.load(y, part.at + d), add, values))


@kernel
def add_sink(total, r, sink):
    """Let a logit join the softmax of row r; its value is zeros."""
    at = total.at + r
    total.array[at + total.rows] += np.float32(math.exp(np.float64(sink) - np.float64(total.array[at])))


@kernel
def divide_row(total, r, dim, out, at):
    """Write row r divided by its sum to out[at:]."""
    share = f.splat(np.float32(1) / total.array[total.at + total.rows + r])
    row = total.at + 2 * total.rows + r * dim
    for d in range(0, dim, LANES):
        f.store(out, at + d, f.mul(f.load(total.array, row + d), share))
