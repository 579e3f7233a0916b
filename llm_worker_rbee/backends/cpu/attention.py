"""Attention over the paged cache: each query over its own request's keys, causal by the bound of a loop.

kv.py has the places of keys and values. A piece of work is a tile of rows that look at the same keys: neighbouring
tokens of one head, or, for a token alone, heads that share a KV head. Three steps: scores, softmax (not yet divided by
its sum), mixture. A score or a mixture is one chain of additions, by value or by position, whatever the tile: a query
has the same bits alone, in a batch and in any chunk. Nothing past a row's own positions is ever added, not even
times 0.

Which rows of a step attention works on together: a tile of neighbouring tokens, or some heads of a token alone.

Rotary embedding with the cache write, and attention, as tasks of a program: which piece is what, and where it lies.

The arithmetic of one piece is in rotary.py and py. What the cache holds (float32, float16, int8 with scales)
is known when a task is compiled.
"""

from __future__ import annotations

from functools import cache

import numba as nb
import numpy as np

from ..isa import TABLE, current
from ..ops import AttentionParams
from . import simd_f32 as f
from .jit import Task, kernel, variant
from .kv_layout import (
    ask_lines,
    ask_neighbours,
    at_lines,
    factors,
    four_lines,
    get_rows,
    is_bytes,
    neighbours,
    no_rows,
    one_line,
    outer,
    put_products,
    put_rows,
    two_lines,
    value_row,
)
from .pointers import f32, f64, i64, ints_at, scratch
from .program import Instruction, Step, Table, doubles, table_of
from .quantize_activations import quantize
from .rope import (
    BYTES,
    CAP,
    HEADS,
    HELD,
    KV_HEADS,
    LAYER,
    PADDED,
    PLACES,
    S_KV,
    S_MIXED,
    S_POSITIONS,
    S_QUERIES,
    S_QUERY_START,
    S_REQUESTS,
    S_SINGLES,
    S_SIZE,
    S_TABLE,
    S_TILES,
    S_WIDTH,
    S_WORK,
    SCALE,
    WINDOW,
    padded,
)

LANES = 16
ROOM = 24 if TABLE[current()].tokens >= 8 else 4  # accumulators of 16 floats that registers hold, beside the operands
TILE = 6 if ROOM == 24 else 2  # neighbouring tokens of a piece
FAR = 32  # positions between values that are asked for and those that are mixed
NOTHING = np.float32(-np.inf)
ROWS = ALONG = WIDE = LINES = FEW = FEW_LINES = AHEAD = SCORE = SOFTEN = BLEND = MIX = MIX_ONE = (
    None  # set for each variant
)


def score(
    q, at, apart, keys, values, k_scales, blocks, size, kv_head, kv_heads, dim, scale, start, last, scores, width
):
    """Scores of ROWS rows with positions start .. last - 1, and up to the end of the last chunks.

    `start` is a multiple of 16; position p of row r goes to scores[r * width + p - start]. Of fewer than WIDE chunks
    the last one is taken again: a narrow tile waits for its own sums, and is not made faster by being narrow.
    """
    chunks, first, end = size // LANES, start // LANES, -(-last // LANES)
    chunk = first
    while chunk + FEW < end:
        lines = LINES(blocks, chunk, end, chunks, kv_head, kv_heads)
        more = chunk + WIDE < end
        coming, then = (keys, chunk + WIDE) if more else (values, first)
        later = LINES(blocks, then, end, chunks, kv_head, kv_heads)
        total = no_rows(ROWS, lines)
        for d in range(dim):
            if AHEAD:
                ask_lines(coming, later, dim * LANES, d * LANES)
            total = outer(total, at_lines(keys, lines, dim * LANES, d * LANES), q, at + d, apart)
        put_products(scores, chunk * LANES - start, width, total, factors(keys, k_scales, lines, scale))
        chunk += WIDE
    if chunk < end:  # the same for the rest
        few = FEW_LINES(blocks, chunk, end, chunks, kv_head, kv_heads)
        rest = no_rows(ROWS, few)
        for d in range(dim):
            rest = outer(rest, at_lines(keys, few, dim * LANES, d * LANES), q, at + d, apart)
        put_products(scores, chunk * LANES - start, width, rest, factors(keys, k_scales, few, scale))


@kernel
def cap_scores(scores, first, last, cap):
    """cap * tanh(s / cap), by tanh(y) = 1 - 2 / (1 + e^2y)."""
    one, two, high = f.splat(np.float32(1)), f.splat(np.float32(2) / cap), f.splat(cap)
    for i in range(first, last, LANES):
        e = f.exp(f.mul(f.get(scores, i), two))
        f.put(scores, i, f.mul(high, f.add(one, f.div(f.splat(np.float32(-2)), f.add(one, e)))))


@kernel
def largest(scores, first, last):
    """The largest of first .. last - 1, whole vectors; four chains, for each step of one waits for that before."""
    a = b = c = d = f.splat(NOTHING)
    i = first
    while i + 4 * LANES <= last:
        a, b = f.above(f.get(scores, i), a), f.above(f.get(scores, i + LANES), b)
        c, d = f.above(f.get(scores, i + 2 * LANES), c), f.above(f.get(scores, i + 3 * LANES), d)
        i += 4 * LANES
    while i < last:
        a = f.above(f.get(scores, i), a)
        i += LANES
    return f.highest(f.above(f.above(a, b), f.above(c, d)))


@kernel
def soften(scores, at, first, last, cap):
    """Scores first .. last - 1 of the row at `at` become e^(score - largest); gives 1 / their sum."""
    low, high = at + first // LANES * LANES, at + -(-last // LANES) * LANES
    if cap:
        cap_scores(scores, low, high, cap)
    f.put(scores, low, f.within(f.get(scores, low), at + first - low, at + last - low, NOTHING))
    f.put(
        scores,
        high - LANES,
        f.within(f.get(scores, high - LANES), at + first - high + LANES, at + last - high + LANES, NOTHING),
    )
    less = f.splat(-largest(scores, low, high))
    sums = f.splat(np.float32(0))
    for i in range(low, high, LANES):
        e = f.exp(f.add(f.get(scores, i), less))
        f.put(scores, i, e)
        sums = f.add(sums, e)
    return np.float32(1) / f.total(sums)


@kernel
def weigh(scores, at, v_scales, blocks, size, kv_head, kv_heads, start, first, last):
    """Weights of positions first .. last - 1 times the scales of their values."""
    for p in range(first // LANES * LANES, last, LANES):
        scale = value_row(blocks, p, size, kv_head, kv_heads)
        f.put(scores, at + p - start, f.mul(f.get(scores, at + p - start), f.get(v_scales, scale)))


def mix(values, blocks, size, kv_head, kv_heads, dim, start, first, last, scores, at, width, out, to, apart, d, end):
    """Values d .. end - 1 (multiples of 16) of ROWS rows of `out` += weight * value, over positions first .. last - 1.

    In the order of the positions; the weights are at scores[at:], as `score` left them.
    """
    while d + LANES * WIDE <= end:
        total = get_rows(out, to + d, apart, ROWS, WIDE)
        p, block, stop = first, first // size, (first // size + 1) * size
        while p < last:
            row = ((blocks[block] * kv_heads + kv_head) * size + p + size - stop) * dim + d
            far = value_row(blocks, min(stop + FAR, last - 1), size, kv_head, kv_heads) * dim + d
            for i in range(min(stop, last) - p):
                if AHEAD:
                    ask_neighbours(values, far + i * dim, WIDE)
                total = outer(total, neighbours(values, row + i * dim, WIDE), scores, at + p - start + i, width)
            p, block, stop = stop, block + 1, stop + size
        put_rows(out, to + d, apart, total, WIDE)
        d += LANES * WIDE
    while d < end:  # the same for the rest, vector by vector
        rest = get_rows(out, to + d, apart, ROWS, 1)
        p, block, stop = first, first // size, (first // size + 1) * size
        while p < last:
            row = ((blocks[block] * kv_heads + kv_head) * size + p + size - stop) * dim + d
            for i in range(min(stop, last) - p):
                rest = outer(rest, neighbours(values, row + i * dim, 1), scores, at + p - start + i, width)
            p, block, stop = stop, block + 1, stop + size
        put_rows(out, to + d, apart, rest, 1)
        d += LANES


@kernel
def span(position, last_position, window):
    """(first position, its scores' width) of a tile whose rows are at these positions: multiples of 16 and 64."""
    start = max(0, position + 1 - window) // LANES * LANES if window else 0
    return start, -(-(last_position + 1 - start) // (4 * LANES)) * 4 * LANES


def soften_rows(scores, width, start, positions, token, window, cap, values, v_scales, blocks, size, kv_head, kv_heads):
    """The softmax of ROWS rows; behind their scores, at ROWS * width, each one's 1 / sum."""
    for r in range(ROWS):
        end = positions[token + r * ALONG] + 1
        begin = max(0, end - window) if window else 0
        scores[ROWS * width + r] = soften(scores, r * width, begin - start, end - start, cap)
        if is_bytes(values):
            weigh(scores, r * width, v_scales, blocks, size, kv_head, kv_heads, start, begin, end)


def blend(
    scores, width, start, positions, token, window, values, blocks, size, kv_head, kv_heads, dim, out, at, apart, d,
    d_end,
):  # fmt: skip
    """Values d .. d_end - 1 (multiples of 16) of ROWS rows: the positions that all see together, the others apart."""
    head, tail = positions[token] + 1, positions[token + (ROWS - 1) * ALONG] + 1  # where the first and last row end
    common = max(0, tail - window) if window else 0  # the first position that all rows see; the last is head - 1
    for r in range(ROWS):
        for i in range(at + r * apart + d, at + r * apart + d_end, LANES):
            f.put(out, i, f.splat(np.float32(0)))
    if ALONG:
        for r in range(ROWS if window else 0):
            end = positions[token + r] + 1
            MIX_ONE(
                values, blocks, size, kv_head, kv_heads, dim, start, max(0, end - window), min(end, common),
                scores, r * width, width, out, at + r * apart, apart, d, d_end,
            )  # fmt: skip
    MIX(values, blocks, size, kv_head, kv_heads, dim, start, common, head, scores, 0, width, out, at, apart, d, d_end)
    if ALONG:
        for r in range(1, ROWS):
            MIX_ONE(
                values, blocks, size, kv_head, kv_heads, dim, start, max(head, common), positions[token + r] + 1,
                scores, r * width, width, out, at + r * apart, apart, d, d_end,
            )  # fmt: skip
    for r in range(ROWS):
        share = f.splat(scores[ROWS * width + r])
        for i in range(at + r * apart + d, at + r * apart + d_end, LANES):
            f.put(out, i, f.mul(f.get(out, i), share))


def rows(
    q, at, apart, keys, values, k_scales, v_scales, positions, token, blocks, size, kv_head, kv_heads, dim, scale, cap,
    window, scores, out,
):  # fmt: skip
    """ROWS rows of q from `at` on, `apart` from each other, to the same places of `out`: scores, softmax, mixture.

    Row r is at positions[token + r * ALONG]: neighbouring tokens, or heads of one. `scores` is scratch, of
    `score_room()` floats, best from an address that 64 divides. `dim` is that of the padded heads.
    """
    last = positions[token + (ROWS - 1) * ALONG]
    start, width = span(positions[token], last, window)
    SCORE(
        q, at, apart, keys, values, k_scales, blocks, size, kv_head, kv_heads, dim, scale, start, last + 1, scores,
        width,
    )  # fmt: skip
    SOFTEN(scores, width, start, positions, token, window, cap, values, v_scales, blocks, size, kv_head, kv_heads)
    BLEND(
        scores, width, start, positions, token, window, values, blocks, size, kv_head, kv_heads, dim, out, at, apart,
        0, dim,
    )  # fmt: skip


LINES_OF = {1: one_line, 2: two_lines, 4: four_lines}


@cache
def wide(count):
    """Vectors beside each other for so many rows."""
    return 4 if 4 * count <= ROOM else 2 if 2 * count <= ROOM else 1


@cache
def mixer(count, ahead):
    """The mixture of so many rows over the same positions; `ahead`: memory is what it waits for."""
    return kernel(variant(mix, f"r{count}a{ahead}", ROWS=count, WIDE=wide(count), AHEAD=ahead))


@cache
def scorer(count, ahead):
    """The scores of so many rows; `ahead`: memory is what they wait for."""
    many, few = wide(count), min(2, wide(count))
    lines = {"LINES": LINES_OF[many], "FEW_LINES": LINES_OF[few]}
    return kernel(variant(score, f"r{count}a{ahead}", ROWS=count, WIDE=many, FEW=few, AHEAD=ahead, **lines))


@cache
def softener(count, along):
    """The softmax of so many rows."""
    return kernel(variant(soften_rows, f"r{count}a{along}", ROWS=count, ALONG=along))


@cache
def blender(count, along):
    """The mixture of so many rows, each over its own positions, divided by the sums."""
    parts = {"MIX": mixer(count, not along), "MIX_ONE": mixer(1, False)}
    return kernel(variant(blend, f"r{count}a{along}", ROWS=count, ALONG=along, **parts))


@cache
def rows_for(count, along):
    """All three on so many rows: neighbouring tokens (along 1) or heads of one token (0)."""
    parts = {"SCORE": scorer(count, not along), "SOFTEN": softener(count, along), "BLEND": blender(count, along)}
    return kernel(variant(rows, f"r{count}a{along}", ROWS=count, ALONG=along, **parts))


def part_of(group: int) -> int:
    """How many of the heads that share a KV head are worked on together: a divisor of their number."""
    most = 4  # each size is compiled for itself
    return max(n for n in range(1, min(group, most) + 1) if group % n == 0)


@kernel
def score_room(count, longest):
    """Floats of scratch for `count` rows over `longest` positions."""
    return count * (longest + 4 * LANES) + count


@kernel
def deal_rows(query_start, heads, part, work):
    """(first token, tokens, request, head) of each piece to work[4 * i ...], at most tokens * heads; (tiles, others).

    Full tiles of each request, the longest first, then the last tokens of each, `part` heads together. Pieces that read
    the same keys follow each other.
    """
    n = 0
    for r in range(query_start.shape[0] - 1):
        first, last = query_start[r], query_start[r + 1]
        for head in range(heads):
            for token in range(last - (last - first) % TILE - TILE, first - 1, -TILE):
                work[4 * n], work[4 * n + 1], work[4 * n + 2], work[4 * n + 3] = token, TILE, r, head
                n += 1
    tiles = n
    for r in range(query_start.shape[0] - 1):
        first, last = query_start[r], query_start[r + 1]
        for head in range(0, heads, part):
            for token in range(last - (last - first) % TILE, last):
                work[4 * n], work[4 * n + 1], work[4 * n + 2], work[4 * n + 3] = token, 1, r, head
                n += 1
    return tiles, n - tiles


PART = ROWS = ALONG = ATTEND = CACHED = None  # set for each variant


def deal(args, step, piece):
    """Cut attention into pieces and count them."""
    a, s = i64(args), i64(step)
    starts = nb.carray(ints_at(s[S_QUERY_START]), (s[S_REQUESTS] + 1,))
    s[S_TILES], s[S_SINGLES] = deal_rows(starts, a[HEADS], PART, i64(s[S_WORK]))


def attend(args, step, piece):
    """One piece: a tile of tokens (ALONG), or a token alone with ROWS heads."""
    a, s = i64(args), i64(step)
    work, kv, at = i64(s[S_WORK]), i64(s[S_KV]), PLACES * a[LAYER]
    i = 4 * (piece if ALONG else s[S_TILES] + piece)
    token, request, head = work[i], work[i + 2], work[i + 3]
    keys, values, k_scales, v_scales = CACHED(kv[at]), CACHED(kv[at + 1]), f32(kv[at + 2]), f32(kv[at + 3])
    q, out, positions = f32(s[S_QUERIES]), f32(s[S_MIXED]), i64(s[S_POSITIONS])
    blocks = i64(s[S_TABLE] + request * s[S_WIDTH] * 8)
    heads, kv_heads, dim, size, window = a[HEADS], a[KV_HEADS], a[PADDED], s[S_SIZE], a[WINDOW]
    scale, cap = np.float32(f64(args)[SCALE]), np.float32(f64(args)[CAP])
    scores = scratch(score_room(ROWS, positions[token + (ROWS - 1) * ALONG] + 1))
    ATTEND(
        q, (token * heads + head) * dim, heads * dim if ALONG else dim, keys, values, k_scales, v_scales, positions,
        token, blocks, size, head // (heads // kv_heads), kv_heads, dim, scale, cap, window, scores, out,
    )  # fmt: skip
    if a[BYTES]:  # heads that are whole pairs of blocks: their bytes are made while they are near
        for r in range(ROWS if ALONG else 1):
            at = ((token + r) * heads + head) * dim
            quantize(out, at, s, a[BYTES], at // 32, (at + (dim if ALONG else ROWS * dim)) // 32)


@cache
def deal_for(group: int) -> Task:
    """How attention is cut, where so many heads share a KV head."""
    part = part_of(group)
    return Task(deal, str(part), PART=part)


@cache
def tiles_for(kind: str) -> Task:
    """Attention of tiles of tokens."""
    rows = rows_for(TILE, 1)
    return Task(attend, f"tiles,{kind}", ROWS=TILE, ALONG=1, CACHED=HELD[kind], ATTEND=rows)


@cache
def singles_for(group: int, kind: str) -> Task:
    """Attention of tokens alone, where so many heads share a KV head."""
    part = part_of(group)
    rows = rows_for(part, 0)
    return Task(attend, f"{part},{kind}", ROWS=part, ALONG=0, CACHED=HELD[kind], ATTEND=rows)


def whole_bytes(dim: int) -> bool:
    """Whether attention can make the bytes of its heads: they share no pair of blocks, and none is padded."""
    return dim % 64 == 0


def arguments(
    layer: int, rope: int, pairs: int, heads: int, kv_heads: int, dim: int, params: AttentionParams, bytes_at: int = 0
) -> Table:
    """What the tasks of one layer are told: the number of its rotary table, the entry of the bytes that they make."""
    angles = Step.ANGLES + 2 * rope
    args = table_of(layer, angles, pairs, heads, kv_heads, dim, padded(dim), params.window, 0, 0, bytes_at)
    return doubles(args, SCALE, [params.scale, params.soft_cap])


def deal_instruction(args: Table) -> Instruction:
    """To come once in a step, before attention."""
    return Instruction(deal_for(int(args[HEADS] // args[KV_HEADS])), args, 1, Step.TOKENS, 1 << 40)


def attend_instructions(args: Table, kind: str) -> list[Instruction]:
    """Attention of all tokens."""
    singles = singles_for(int(args[HEADS] // args[KV_HEADS]), kind)
    return [Instruction(tiles_for(kind), args, 1, Step.TILES, 1), Instruction(singles, args, 1, Step.SINGLES, 1)]
