"""Attention over the paged KV cache: each query over its own request's keys, causal by the bound of a loop.

kv_layout.py has the places of keys and values. A piece of work is a tile of rows that read the same keys: adjacent
tokens of one head (prefill), or heads of one token that share a KV head (decode). Three steps: scores, softmax (not yet
divided by its sum), weighted sum of values. A score or a sum is one chain of additions, by value or by position,
whatever the tile: a query has the same bits alone, in a batch and in any chunk. Nothing past a row's own positions is
ever added, not even times 0.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache

import numba as nb
import numpy as np

from ..cpu_info import INSTRUCTION_SETS
from ..ops import AttentionParams
from . import kv_layout as kv
from . import simd as f
from .dot_int8 import ISA
from .jit import TaskKernel, kernel, variant
from .pointers import f32, f64, i64, int64_pointer, scratch
from .program import Step, Task, pack_args, pack_floats
from .quantize_activations import quantize_blocks
from .simd import LANES

MAX_ACCUMULATORS = 24 if INSTRUCTION_SETS[ISA].tile_tokens >= 8 else 4  # of 16 floats, that fit in registers
TOKENS_TILE = 6 if MAX_ACCUMULATORS == 24 else 2  # adjacent tokens of a piece
PREFETCH_POSITIONS = 32  # how far values are prefetched
MAX_HEADS_TILE = 4  # each size is compiled for itself
NEGATIVE_INFINITY = np.float32(-np.inf)
# set for each variant
ROWS = BY_TOKEN = VECTORS = CHUNKS = MIN_VECTORS = MIN_CHUNKS = PREFETCH = CACHED = HEADS_TILE = None
SCORE = SOFTMAX = ATTEND_VALUES = ACCUMULATE_PV = ACCUMULATE_PV_ONE = VECTOR_BY_VECTOR = None


# Arguments of `attend` and `split_work`; ACTIVATIONS is optional: quantize the results.
SplitArg = IntEnum("SplitArg", "HEADS WORK", start=0)
AttentionArg = IntEnum(
    "AttentionArg", "LAYER HEADS KV_HEADS PADDED WINDOW SCALE SOFT_CAP QUERIES OUT WORK ACTIVATIONS", start=0
)


def score(
    q, at, stride, keys, values, k_scales, blocks, size, kv_head, kv_heads, dim, scale, start, last, scores, width
):
    """Write scores of ROWS rows with positions start .. last - 1, and up to the end of the last chunks.

    `start` is a multiple of 16; position p of row r goes to scores[r * width + p - start]. If fewer than VECTORS chunks
    are left, the last one is computed again: a narrow tile waits for its own sums and would not be faster.
    """
    chunks, first, end = size // LANES, start // LANES, -(-last // LANES)
    chunk = first
    while chunk + MIN_VECTORS < end:
        lines = CHUNKS(blocks, chunk, end, chunks, kv_head, kv_heads)
        more = chunk + VECTORS < end
        next_array, next_chunk = (keys, chunk + VECTORS) if more else (values, first)
        next_lines = CHUNKS(blocks, next_chunk, end, chunks, kv_head, kv_heads)
        total = kv.zero_tile(ROWS, lines)
        for d in range(dim):
            if PREFETCH:
                kv.prefetch_keys(next_array, next_lines, dim * LANES, d * LANES)
            total = kv.fma_outer(total, kv.load_keys(keys, lines, dim * LANES, d * LANES), q, at + d, stride)
        factors = kv.key_factors(keys, k_scales, lines, scale)
        kv.store_products(scores, chunk * LANES - start, width, total, factors)
        chunk += VECTORS
    if chunk < end:  # the rest
        last_lines = MIN_CHUNKS(blocks, chunk, end, chunks, kv_head, kv_heads)
        rest = kv.zero_tile(ROWS, last_lines)
        for d in range(dim):
            rest = kv.fma_outer(rest, kv.load_keys(keys, last_lines, dim * LANES, d * LANES), q, at + d, stride)
        last_factors = kv.key_factors(keys, k_scales, last_lines, scale)
        kv.store_products(scores, chunk * LANES - start, width, rest, last_factors)


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
    a = b = c = d = f.splat(NEGATIVE_INFINITY)
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
    """Replace scores first .. last - 1 of the row at `at` by e^(score - max); return 1 / their sum."""
    low, high = at + first // LANES * LANES, at + -(-last // LANES) * LANES
    if cap:
        cap_scores(scores, low, high, cap)
    f.store(scores, low, f.select_lanes(f.load(scores, low), at + first - low, at + last - low, NEGATIVE_INFINITY))
    tail = high - LANES
    f.store(scores, tail, f.select_lanes(f.load(scores, tail), at + first - tail, at + last - tail, NEGATIVE_INFINITY))
    less = f.splat(-max_score(scores, low, high))
    sums = f.splat(np.float32(0))
    for i in range(low, high, LANES):
        e = f.exp(f.add(f.load(scores, i), less))
        f.store(scores, i, e)
        sums = f.add(sums, e)
    return np.float32(1) / f.hsum(sums)


@kernel
def apply_v_scales(scores, at, v_scales, blocks, size, kv_head, kv_heads, start, first, last):
    """Multiply the weights of positions first .. last - 1 by the scales of their values."""
    for p in range(first // LANES * LANES, last, LANES):
        scale = kv.value_index(blocks, p, size, kv_head, kv_heads)
        f.store(scores, at + p - start, f.mul(f.load(scores, at + p - start), f.load(v_scales, scale)))


def accumulate_pv(
    values, blocks, size, kv_head, kv_heads, dim, start, first, last, scores, at, width, out, to, stride, d
):
    """Add weight * value to values d .. dim - 1 of ROWS rows of `out`, over positions first .. last - 1 in their order.

    The weights are at scores[at:], as `score` left them.
    """
    while d + LANES * VECTORS <= dim:
        total = kv.load_tile(out, to + d, stride, ROWS, VECTORS)
        p, block, stop = first, first // size, (first // size + 1) * size
        while p < last:
            row = ((blocks[block] * kv_heads + kv_head) * size + p + size - stop) * dim + d
            far = kv.value_index(blocks, min(stop + PREFETCH_POSITIONS, last - 1), size, kv_head, kv_heads) * dim + d
            for i in range(min(stop, last) - p):
                if PREFETCH:
                    kv.prefetch_contiguous(values, far + i * dim, VECTORS)
                value = kv.load_contiguous(values, row + i * dim, VECTORS)
                total = kv.fma_outer(total, value, scores, at + p - start + i, width)
            p, block, stop = stop, block + 1, stop + size
        kv.store_tile(out, to + d, stride, total, VECTORS)
        d += LANES * VECTORS
    if VECTORS > 1 and d < dim:  # the rest, vector by vector
        VECTOR_BY_VECTOR(
            values, blocks, size, kv_head, kv_heads, dim, start, first, last, scores, at, width, out, to, stride, d
        )


@kernel
def score_span(position, last_position, window):
    """Return (first position, width of the scores) of a tile at these positions: multiples of 16 and 64."""
    start = max(0, position + 1 - window) // LANES * LANES if window else 0
    return start, -(-(last_position + 1 - start) // (4 * LANES)) * 4 * LANES


def softmax_tile(
    scores, width, start, positions, token, window, cap, values, v_scales, blocks, size, kv_head, kv_heads
):
    """Compute the softmax of ROWS rows; 1 / sum of each goes behind their scores, at ROWS * width."""
    for r in range(ROWS):
        end = positions[token + r * BY_TOKEN] + 1
        begin = max(0, end - window) if window else 0
        scores[ROWS * width + r] = softmax_row(scores, r * width, begin - start, end - start, cap)
        if kv.is_int8(values):
            apply_v_scales(scores, r * width, v_scales, blocks, size, kv_head, kv_heads, start, begin, end)


def attend_values(
    scores, width, start, positions, token, window, values, blocks, size, kv_head, kv_heads, dim, out, at, stride
):
    """Sum the values of ROWS rows: positions that all of them see together, the others row by row."""
    head, tail = positions[token] + 1, positions[token + (ROWS - 1) * BY_TOKEN] + 1  # ends of the first and last row
    common = max(0, tail - window) if window else 0  # first position that all rows see; the last is head - 1
    for r in range(ROWS):
        for i in range(at + r * stride, at + r * stride + dim, LANES):
            f.store(out, i, f.splat(np.float32(0)))
    if BY_TOKEN:
        for r in range(ROWS if window else 0):
            end = positions[token + r] + 1
            ACCUMULATE_PV_ONE(
                values, blocks, size, kv_head, kv_heads, dim, start, max(0, end - window), min(end, common),
                scores, r * width, width, out, at + r * stride, stride, 0,
            )  # fmt: skip
    ACCUMULATE_PV(
        values, blocks, size, kv_head, kv_heads, dim, start, common, head, scores, 0, width, out, at, stride, 0
    )
    if BY_TOKEN:
        for r in range(1, ROWS):
            ACCUMULATE_PV_ONE(
                values, blocks, size, kv_head, kv_heads, dim, start, max(head, common), positions[token + r] + 1,
                scores, r * width, width, out, at + r * stride, stride, 0,
            )  # fmt: skip
    for r in range(ROWS):
        share = f.splat(scores[ROWS * width + r])
        for i in range(at + r * stride, at + r * stride + dim, LANES):
            f.store(out, i, f.mul(f.load(out, i), share))


CHUNK_INDICES = {1: kv.key_chunk, 2: kv.two_key_chunks, 4: kv.four_key_chunks}


def vectors_per_row(rows: int) -> int:
    """Return how many vectors of each row a tile holds."""
    return 4 if 4 * rows <= MAX_ACCUMULATORS else 2 if 2 * rows <= MAX_ACCUMULATORS else 1


@cache
def accumulate_pv_kernel(rows: int, prefetch: bool, vectors: int):
    """Return the weighted sum over positions that all rows see; `prefetch` where memory is the bound."""
    rest = accumulate_pv_kernel(rows, False, 1) if vectors > 1 else None
    sizes = {"ROWS": rows, "VECTORS": vectors, "PREFETCH": prefetch}
    return kernel(variant(accumulate_pv, f"r{rows}a{prefetch}v{vectors}", **sizes, VECTOR_BY_VECTOR=rest))


def heads_per_tile(group: int) -> int:
    """Return how many of the heads that share a KV head make a tile: a divisor of their number."""
    return max(n for n in range(1, min(group, MAX_HEADS_TILE) + 1) if group % n == 0)


@kernel
def split_into_tiles(query_start, heads, heads_tile, work):
    """Write (first token, tokens, request, head) of each piece to work[4 * i ...]; return (prefill, decode) tiles.

    Full tiles of each request, the longest contexts first, then the last tokens of each, `heads_tile` heads together.
    Pieces that read the same keys follow each other. There are at most tokens * heads.
    """
    n = 0
    for r in range(query_start.shape[0] - 1):
        first, last = query_start[r], query_start[r + 1]
        for head in range(heads):
            for token in range(last - (last - first) % TOKENS_TILE - TOKENS_TILE, first - 1, -TOKENS_TILE):
                work[4 * n], work[4 * n + 1], work[4 * n + 2], work[4 * n + 3] = token, TOKENS_TILE, r, head
                n += 1
    tiles = n
    for r in range(query_start.shape[0] - 1):
        first, last = query_start[r], query_start[r + 1]
        for head in range(0, heads, heads_tile):
            for token in range(last - (last - first) % TOKENS_TILE, last):
                work[4 * n], work[4 * n + 1], work[4 * n + 2], work[4 * n + 3] = token, 1, r, head
                n += 1
    return tiles, n - tiles


def split_work(args, step, piece):
    """Split the attention of a step into pieces and count them."""
    a, s = i64(args), i64(step)
    starts = nb.carray(int64_pointer(s[Step.QUERY_START]), (s[Step.REQUESTS] + 1,))
    work = a[SplitArg.WORK]
    s[work + 1], s[work + 2] = split_into_tiles(starts, a[SplitArg.HEADS], HEADS_TILE, i64(s[work]))


def attend(args, step, piece):
    """Compute one piece: ROWS adjacent tokens of a head (BY_TOKEN), or ROWS heads of one token.

    Row r is at positions[token + r * BY_TOKEN]; its query and its result begin at `at + r * stride`.
    """
    a, s = i64(args), i64(step)
    tiles, cache = a[AttentionArg.WORK], i64(s[Step.KV] + 8 * kv.ADDRESSES_PER_LAYER * a[AttentionArg.LAYER])
    work, i = i64(s[tiles]), 4 * (piece if BY_TOKEN else s[tiles + 1] + piece)
    token, request, head = work[i], work[i + 2], work[i + 3]
    keys, values, k_scales, v_scales = CACHED(cache[0]), CACHED(cache[1]), f32(cache[2]), f32(cache[3])
    q, out, positions = f32(s[a[AttentionArg.QUERIES]]), f32(s[a[AttentionArg.OUT]]), i64(s[Step.POSITIONS])
    blocks, size = i64(s[Step.BLOCK_TABLE] + request * s[Step.TABLE_WIDTH] * 8), s[Step.BLOCK_SIZE]
    heads, kv_heads, dim = a[AttentionArg.HEADS], a[AttentionArg.KV_HEADS], a[AttentionArg.PADDED]
    scale, cap = np.float32(f64(args)[AttentionArg.SCALE]), np.float32(f64(args)[AttentionArg.SOFT_CAP])
    kv_head, window = head // (heads // kv_heads), a[AttentionArg.WINDOW]
    at, stride = (token * heads + head) * dim, heads * dim if BY_TOKEN else dim
    last = positions[token + (ROWS - 1) * BY_TOKEN]
    start, width = score_span(positions[token], last, window)
    scores = scratch(ROWS * width + ROWS)
    SCORE(
        q, at, stride, keys, values, k_scales, blocks, size, kv_head, kv_heads, dim, scale, start, last + 1, scores,
        width,
    )  # fmt: skip
    SOFTMAX(scores, width, start, positions, token, window, cap, values, v_scales, blocks, size, kv_head, kv_heads)
    ATTEND_VALUES(
        scores, width, start, positions, token, window, values, blocks, size, kv_head, kv_heads, dim, out, at, stride
    )
    if a[AttentionArg.ACTIVATIONS]:  # whole pairs of blocks are quantized while they are in the cache
        for r in range(ROWS if BY_TOKEN else 1):
            first = at + r * stride
            end = (first + (dim if BY_TOKEN else ROWS * dim)) // 32
            quantize_blocks(
                out, first, s, a[AttentionArg.ACTIVATIONS], first // 32, end, heads * dim // 32, s[Step.TOKENS]
            )


@cache
def split_work_kernel(group: int) -> TaskKernel:
    """Return the kernel for `group` heads per KV head."""
    heads = heads_per_tile(group)
    return TaskKernel(split_work, str(heads), HEADS_TILE=heads)


@cache
def attention_kernel(rows: int, by_token: int, kv_type: str) -> TaskKernel:
    """Return attention of tiles: `rows` adjacent tokens (by_token 1) or heads of one token (0)."""
    name, vectors = f"r{rows}a{by_token}", vectors_per_row(rows)
    chunks = {"CHUNKS": CHUNK_INDICES[vectors], "MIN_CHUNKS": CHUNK_INDICES[min(2, vectors)]}
    sizes = {"ROWS": rows, "VECTORS": vectors, "MIN_VECTORS": min(2, vectors), "PREFETCH": not by_token}
    pv = {
        "ACCUMULATE_PV": accumulate_pv_kernel(rows, not by_token, vectors),
        "ACCUMULATE_PV_ONE": accumulate_pv_kernel(1, False, vectors_per_row(1)),
    }
    parts = {
        "SCORE": kernel(variant(score, f"r{rows}a{not by_token}", **sizes, **chunks)),
        "SOFTMAX": kernel(variant(softmax_tile, name, ROWS=rows, BY_TOKEN=by_token)),
        "ATTEND_VALUES": kernel(variant(attend_values, name, ROWS=rows, BY_TOKEN=by_token, **pv)),
    }
    name = f"tiles,{kv_type}" if by_token else f"{rows},{kv_type}"
    return TaskKernel(attend, name, ROWS=rows, BY_TOKEN=by_token, CACHED=kv.ARRAY_OF_TYPE[kv_type], **parts)


def attention_kernels(group: int, kv_type: str) -> list[TaskKernel]:
    """Return attention of tiles of tokens, and of single tokens for `group` heads per KV head."""
    return [attention_kernel(TOKENS_TILE, 1, kv_type), attention_kernel(heads_per_tile(group), 0, kv_type)]


def can_quantize_output(dim: int) -> bool:
    """Return whether attention can quantize its heads: they share no pair of blocks, and none is padded."""
    return dim % 64 == 0


def split_work_task(heads: int, kv_heads: int, work: int) -> Task:
    """Return the task that runs once in a step, before attention.

    `work` is the entry of the pieces, (first token, tokens, request, head) each; their numbers follow it: tiles of
    adjacent tokens, and heads of one token.
    """
    return Task(split_work_kernel(heads // kv_heads), pack_args(heads, work), 1, Step.TOKENS, 1 << 40)


def attention_tasks(
    layer: int, heads: int, kv_heads: int, dim: int, params: AttentionParams, kv_type: str, queries: int, out: int,
    work: int, activations: int = 0,
) -> list[Task]:  # fmt: skip
    """Return the attention of all tokens of a layer; the last arguments are entries (0: no quantized results)."""
    padded, entries = kv.padded_dim(dim), (queries, out, work, activations)
    args = pack_args(layer, heads, kv_heads, padded, params.window, 0, 0, *entries)
    pack_floats(args, AttentionArg.SCALE, [params.scale, params.soft_cap])
    kernels = attention_kernels(heads // kv_heads, kv_type)
    return [Task(kernel, args, 1, count) for count, kernel in enumerate(kernels, work + 1)]
