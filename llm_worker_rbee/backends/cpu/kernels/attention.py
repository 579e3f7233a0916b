"""Attention over the paged KV cache: each query over its own request's keys, causal or not by the bounds of a loop.

kv_layout.py has the places of keys and values, attention_key_blocks.py the work in a block of keys. Kinds of pieces:

prefill   adjacent tokens of a request, all heads that share a KV head (or one, if there are few pieces): keys and
          values are converted to floats once for all rows
decode    one token, heads that share a KV head, and a part of the blocks of keys if there are few pieces: the piece
          that ends last merges the blocks, in their order
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np

from ...ops import AttentionParams
from ..jit import TaskKernel, kernel, nb, variant
from . import attention_key_blocks as blockwise
from . import kv_layout as kv
from . import simd as f
from .attention_key_blocks import KEY_BLOCK, SPAN, TILE_ROWS, TILE_VECTORS, KVView, Partial, Rows
from .pointers import atomic_add, f32, f64, i64, int64_pointer, scratch
from .program import Step, Task, pack_args, pack_floats
from .quantize_activations import quantize_blocks
from .simd import LANES

MAX_ACCUMULATORS = 24 if TILE_VECTORS == 4 else 4  # of 16 floats, that fit in registers beside a conversion
MIN_PREFILL_TOKENS = 6  # fewer tokens of a request are decoded one by one
PREFILL_ROWS = 192  # of a piece, about: what shares converted keys
MAX_PREFILL_TOKENS, SMALL_PREFILL_TOKENS = 64, 8  # of a piece; few pieces are cut down to the second
PIECES_PER_THREAD = 4  # at least, if the work can be split into so many
PREFETCH = True
CHUNK_INDICES = {1: kv.key_chunk, 2: kv.two_key_chunks, 4: kv.four_key_chunks}
MAX_HEADS_TILE = 8 if TILE_VECTORS == 4 else 4  # heads that share the keys of a decode tile; registers hold so many
ROWS_TILE = {"ROWS": TILE_ROWS, "VECTORS": TILE_VECTORS, "SIZE": TILE_ROWS * TILE_VECTORS}
# set for each variant
ROWS = CACHED = HEADS_TILE = DECODE_TILES = None
SCORE: Any = None
ACCUMULATE_PV: Any = None
SCORE_ROWS: Any = None
ACCUMULATE_ROWS: Any = None


# Arguments of `split_work` and of attention; optional are ACTIVATIONS (quantize the results) and SINKS (an address).
SplitArg = IntEnum("SplitArg", "HEADS KV_HEADS THREADS WORK", start=0)
AttentionArg = IntEnum(
    "AttentionArg",
    "LAYER HEADS KV_HEADS PADDED WINDOW SCALE SOFT_CAP QUERIES OUT WORK ACTIVATIONS SINKS IS_CAUSAL SPANS",
    start=0,
)
# Entries of a step from that of the work on: the address of tiles, (first token, tokens, request, first head) each; the
# numbers of prefill and decode pieces; pieces of each decode tile; heads of a prefill piece.
WorkEntry = IntEnum("WorkEntry", "TILES PREFILL DECODE SPLITS HEADS", start=0)
NUMBERS_PER_TILE = 4


@kernel
def key_blocks(positions):
    """Return the number of blocks of keys."""
    return -(-positions // KEY_BLOCK)


@kernel
def partial_size(rows, dim):
    """Return the floats of one block's results for up to 16 rows."""
    return 2 * LANES + rows * dim


@kernel
def prefill_shape(query_start, heads, kv_heads, threads):
    """Return (tokens, heads) of a prefill piece: the largest that leave enough pieces for all threads."""
    group, total = heads // kv_heads, 0
    for r in range(query_start.shape[0] - 1):
        length = query_start[r + 1] - query_start[r]
        total += length if length >= MIN_PREFILL_TOKENS else 0
    tokens = max(SMALL_PREFILL_TOKENS, min(MAX_PREFILL_TOKENS, PREFILL_ROWS // group))
    while tokens > SMALL_PREFILL_TOKENS and total * kv_heads < tokens * threads * PIECES_PER_THREAD:
        tokens = max(SMALL_PREFILL_TOKENS, tokens // 2)
    return tokens, group if total * kv_heads >= tokens * threads else 1


@kernel
def prefill_tiles(query_start, tokens, heads, heads_piece, work):
    """Write the prefill pieces and return their number: those with the same keys together, the longest first."""
    n = 0
    for r in range(query_start.shape[0] - 1):
        first, last = query_start[r], query_start[r + 1]
        if last - first < MIN_PREFILL_TOKENS:
            continue
        for head in range(0, heads, heads_piece):
            for token in range(first + (last - first - 1) // tokens * tokens, first - 1, -tokens):
                i = n * NUMBERS_PER_TILE
                work[i], work[i + 1], work[i + 2], work[i + 3] = token, min(tokens, last - token), r, head
                n += 1
    return n


def decode_tiles(query_start, heads, group, work, n):
    """Write the decode tiles behind n others, and return their number; their second number counts pieces that ended.

    Where tiles do not divide the heads of a group, the last one begins earlier: two tiles write a head, the same bits.
    """
    before = n
    for r in range(query_start.shape[0] - 1):
        first, last = query_start[r], query_start[r + 1]
        if last - first >= MIN_PREFILL_TOKENS:
            continue
        for start in range(0, heads, group):
            for head in range(start, start + group, HEADS_TILE):
                for token in range(first, last):
                    i = n * NUMBERS_PER_TILE
                    work[i], work[i + 1], work[i + 2] = token, 0, r
                    work[i + 3] = min(head, start + group - HEADS_TILE)
                    n += 1
    return n - before


@kernel
def longest_decode(query_start, positions):
    """Return the positions that the longest of the requests without prefill pieces sees."""
    longest = 0
    for r in range(query_start.shape[0] - 1):
        if query_start[r + 1] - query_start[r] < MIN_PREFILL_TOKENS:
            longest = max(longest, positions[query_start[r + 1] - 1] + 1)
    return longest


def split_work(args, step, piece):
    """Split the attention of a step into pieces and count them."""
    a, s = i64(args), i64(step)
    starts = nb.carray(int64_pointer(s[Step.QUERY_START]), (s[Step.REQUESTS] + 1,))
    heads, kv_heads, threads, entry = a[SplitArg.HEADS], a[SplitArg.KV_HEADS], a[SplitArg.THREADS], a[SplitArg.WORK]
    work = i64(s[entry + WorkEntry.TILES])
    tokens, heads_piece = prefill_shape(starts, heads, kv_heads, threads)
    prefill = prefill_tiles(starts, tokens, heads, heads_piece, work)
    tiles = DECODE_TILES(starts, heads, heads // kv_heads, work, prefill)
    splits = 1
    if s[Step.PARTIALS] and 0 < tiles < threads * PIECES_PER_THREAD:
        longest = longest_decode(starts, i64(s[Step.POSITIONS]))
        splits = min(-(-threads * PIECES_PER_THREAD // tiles), key_blocks(longest))
    s[entry + WorkEntry.PREFILL], s[entry + WorkEntry.DECODE] = prefill, tiles * splits
    s[entry + WorkEntry.SPLITS], s[entry + WorkEntry.HEADS] = splits, heads_piece


@kernel
def quantize_heads(a, s, out, at, floats):
    """Quantize results while they are in the cache: whole pairs of blocks."""
    entry, row_blocks = a[AttentionArg.ACTIVATIONS], a[AttentionArg.HEADS] * a[AttentionArg.PADDED] // 32
    if entry:
        quantize_blocks(out, at, s, entry, at // 32, (at + floats) // 32, row_blocks, s[Step.TOKENS])


@kernel
def view_of(a, s, keys, values, request, head):
    """Return the inputs of the heads of a tile."""
    layer = i64(s[Step.KV] + 8 * kv.ADDRESSES_PER_LAYER * a[AttentionArg.LAYER])
    blocks = i64(s[Step.BLOCK_TABLE] + request * s[Step.TABLE_WIDTH] * 8)
    kv_heads = a[AttentionArg.KV_HEADS]
    kv_head = head // (a[AttentionArg.HEADS] // kv_heads)
    return KVView(
        keys,
        values,
        f32(layer[2]),
        f32(layer[3]),
        blocks,
        s[Step.BLOCK_SIZE],
        kv_head,
        kv_heads,
        a[AttentionArg.PADDED],
    )


@kernel
def rows_of(a, s, token, tokens, per_token, request):
    """Return the rows of a piece; where they see both sides, all tokens of the sequence are in the step."""
    positions, length = i64(s[Step.POSITIONS]), 0
    if not a[AttentionArg.IS_CAUSAL]:
        length = positions[i64(s[Step.QUERY_START])[request + 1] - 1] + 1
    spans = s[Step.SPANS] if a[AttentionArg.SPANS] else 0
    return Rows(positions, token, tokens, per_token, a[AttentionArg.WINDOW], length, i64(spans), spans != 0)


@kernel
def copy_queries(q, at, stride, tokens, length, to):
    """Copy `length` floats of each token to adjacent rows."""
    for t in range(tokens):
        for i in range(0, length, LANES):
            f.store(to, t * length + i, f.load(q, at + t * stride + i))


def attend_prefill(args, step, piece):
    """Compute one piece: adjacent tokens of a request, heads that share a KV head."""
    a, s = i64(args), i64(step)
    entry, layer = a[AttentionArg.WORK], i64(s[Step.KV] + 8 * kv.ADDRESSES_PER_LAYER * a[AttentionArg.LAYER])
    work, tile, per_token = i64(s[entry]), NUMBERS_PER_TILE * piece, s[entry + WorkEntry.HEADS]
    token, tokens, request, head = work[tile], work[tile + 1], work[tile + 2], work[tile + 3]
    view = view_of(a, s, CACHED(layer[0]), CACHED(layer[1]), request, head)
    rows = rows_of(a, s, token, tokens, per_token, request)
    scale, cap = np.float32(f64(args)[AttentionArg.SCALE]), np.float32(f64(args)[AttentionArg.SOFT_CAP])
    q, out, dim = f32(s[a[AttentionArg.QUERIES]]), f32(s[a[AttentionArg.OUT]]), view.dim
    at, stride, count = (token * a[AttentionArg.HEADS] + head) * dim, a[AttentionArg.HEADS] * dim, tokens * per_token
    padded = -(-(count + ROWS - 1) // LANES) * LANES  # whole tiles, and whole vectors of one number a row
    size = padded * (dim + 2)
    memory = scratch(padded * (dim + KEY_BLOCK) + 2 * size + SPAN * (dim + 1))
    scores, total = memory[padded * dim :], Partial(memory, padded * (dim + KEY_BLOCK), padded)
    part, floats = Partial(memory, total.at + size, padded), memory[total.at + 2 * size :]
    copy_queries(q, at, stride, tokens, per_token * dim, memory)
    for i in range(count * dim, padded * dim):
        memory[i] = 0
    blockwise.clear(total, padded * dim)
    blockwise.clear(part, 0)
    begin, end = blockwise.row_span(rows, 0)[0], blockwise.row_span(rows, count - 1)[1]
    first = begin // KEY_BLOCK
    for block in range(first, -(-end // KEY_BLOCK)):
        start, last = max(begin, block * KEY_BLOCK), min(end, (block + 1) * KEY_BLOCK)
        to = total if block == first else part  # the first block merged with nothing would have the same bits
        SCORE_ROWS(view, rows, count, memory, scale, start, last, scores, floats)
        blockwise.softmax_rows(view, rows, count, start, last, cap, scores, to)
        ACCUMULATE_ROWS(view, rows, count, start, last, scores, memory, to.at + 2 * padded, floats)
        if block > first:
            blockwise.merge(rows, count, dim, start, last, total, part)
    for r in range(count):
        place = at + r // per_token * stride + r % per_token * dim
        if a[AttentionArg.SINKS]:
            blockwise.add_sink(total, r, f32(a[AttentionArg.SINKS])[head + r % per_token])
        blockwise.divide_row(total, r, dim, out, place)
        quantize_heads(a, s, out, place, dim)


def attend_decode(args, step, piece):
    """Compute one piece: ROWS heads of one token, over all blocks of keys, or over a part of them."""
    a, s = i64(args), i64(step)
    entry, layer = a[AttentionArg.WORK], i64(s[Step.KV] + 8 * kv.ADDRESSES_PER_LAYER * a[AttentionArg.LAYER])
    splits = s[entry + WorkEntry.SPLITS]
    number, split = piece // splits, piece % splits
    work, tile = i64(s[entry]), NUMBERS_PER_TILE * (s[entry + WorkEntry.PREFILL] + number)
    token, request, head = work[tile], work[tile + 2], work[tile + 3]
    view = view_of(a, s, CACHED(layer[0]), CACHED(layer[1]), request, head)
    rows = rows_of(a, s, token, 1, ROWS, request)
    scale, cap = np.float32(f64(args)[AttentionArg.SCALE]), np.float32(f64(args)[AttentionArg.SOFT_CAP])
    q, out, dim = f32(s[a[AttentionArg.QUERIES]]), f32(s[a[AttentionArg.OUT]]), view.dim
    at = (token * a[AttentionArg.HEADS] + head) * dim
    begin, end = blockwise.row_span(rows, 0)
    first, count, size = begin // KEY_BLOCK, -(-end // KEY_BLOCK) - begin // KEY_BLOCK, partial_size(ROWS, dim)
    scores = scratch(ROWS * KEY_BLOCK + 2 * size)
    total, parts = Partial(scores, ROWS * KEY_BLOCK, LANES), scores[ROWS * KEY_BLOCK + size :]
    if splits > 1:
        parts = f32(s[Step.PARTIALS] + 4 * size * number * key_blocks(s[Step.TABLE_WIDTH] * s[Step.BLOCK_SIZE]))
    for block in range(first + count * split // splits, first + count * (split + 1) // splits):
        start, last = max(begin, block * KEY_BLOCK), min(end, (block + 1) * KEY_BLOCK)
        part = Partial(parts, (block - first) * size if splits > 1 else 0, LANES)
        if splits == 1 and block == first:  # merged with nothing it would have the same bits
            part = total
        blockwise.clear(part, ROWS * dim)
        SCORE(view, q, at, scale, start // LANES * LANES, last, scores)
        blockwise.softmax_rows(view, rows, ROWS, start, last, cap, scores, part)
        ACCUMULATE_PV(view, start, last, end, scores, part.array, part.at + 2 * LANES, 0)
        if splits == 1 and block > first:
            blockwise.merge(rows, ROWS, dim, start, last, total, part)
    if splits > 1:
        if atomic_add(s[entry] + 8 * (tile + 1), 1) < splits - 1:
            return
        work[tile + 1] = 0  # for the next layer
        blockwise.clear(total, ROWS * dim)
        for block in range(first, first + count):
            part = Partial(parts, (block - first) * size, LANES)
            start, last = max(begin, block * KEY_BLOCK), min(end, (block + 1) * KEY_BLOCK)
            blockwise.merge(rows, ROWS, dim, start, last, total, part)
    for r in range(ROWS):
        if a[AttentionArg.SINKS]:
            blockwise.add_sink(total, r, f32(a[AttentionArg.SINKS])[head + r])
        blockwise.divide_row(total, r, dim, out, at + r * dim)
    quantize_heads(a, s, out, at, ROWS * dim)


def vectors_per_row(rows: int) -> int:
    """Return how many vectors of each row a decode tile holds."""
    return 4 if 4 * rows <= MAX_ACCUMULATORS else 2 if 2 * rows <= MAX_ACCUMULATORS else 1


def heads_per_tile(group: int) -> int:
    """Return how many of the heads that share a KV head make a decode tile: as few tiles as can be, of equal size."""
    return -(-group // -(-group // MAX_HEADS_TILE))


@cache
def _tile_kernel(template: Any, rows: int, vectors: int, prefetch: bool = False) -> Any:
    """Return a weighted sum of values by tiles, and vector by vector where less than a tile is left."""
    rest = _tile_kernel(template, rows, 1) if vectors > 1 else None
    sizes = {"ROWS": rows, "VECTORS": vectors, "PREFETCH": prefetch}
    return kernel(variant(template, f"r{rows}v{vectors}p{prefetch}", **sizes, VECTOR_BY_VECTOR=rest))


@cache
def split_work_kernel(group: int) -> TaskKernel:
    """Return the kernel for `group` heads per KV head."""
    heads = heads_per_tile(group)
    tiles = kernel(variant(decode_tiles, str(heads), HEADS_TILE=heads))
    return TaskKernel(split_work, str(heads), DECODE_TILES=tiles)


def score_rows_kernel() -> Any:
    """Return the scores of tiles of rows (prefill)."""
    return kernel(variant(blockwise.score_rows, "", **ROWS_TILE))


def score_kernel(rows: int) -> Any:
    """Return the scores of `rows` heads of one token (decode)."""
    vectors = vectors_per_row(rows)
    narrow = min(2, vectors)
    sizes = {"ROWS": rows, "VECTORS": vectors, "SIZE": rows * vectors, "CHUNKS": CHUNK_INDICES[vectors]}
    rest = {"MIN_VECTORS": narrow, "MIN_SIZE": rows * narrow, "MIN_CHUNKS": CHUNK_INDICES[narrow]}
    return kernel(variant(blockwise.score, f"r{rows}", **sizes, **rest, PREFETCH=PREFETCH))


@cache
def prefill_kernel(kv_type: str) -> TaskKernel:
    """Return attention of pieces of several tokens."""
    one = _tile_kernel(blockwise.multiply_values, 1, vectors_per_row(1))
    single = kernel(variant(blockwise.accumulate_single, "", ROWS=TILE_ROWS, MULTIPLY_ONE=one))
    tile = _tile_kernel(blockwise.multiply_values, TILE_ROWS, TILE_VECTORS)
    parts = {
        "SCORE_ROWS": score_rows_kernel(),
        "ACCUMULATE_ROWS": kernel(
            variant(blockwise.accumulate_rows, "", **ROWS_TILE, MULTIPLY_TILE=tile, ACCUMULATE_SINGLE=single)
        ),
    }
    return TaskKernel(attend_prefill, kv_type, ROWS=TILE_ROWS, CACHED=kv.ARRAY_OF_TYPE[kv_type], **parts)


@cache
def decode_kernel(rows: int, kv_type: str) -> TaskKernel:
    """Return attention of `rows` heads of one token."""
    accumulate = _tile_kernel(blockwise.accumulate_pv, rows, vectors_per_row(rows), PREFETCH)
    parts = {"SCORE": score_kernel(rows), "ACCUMULATE_PV": accumulate}
    return TaskKernel(attend_decode, f"{rows},{kv_type}", ROWS=rows, CACHED=kv.ARRAY_OF_TYPE[kv_type], **parts)


def attention_kernels(group: int, kv_type: str) -> list[TaskKernel]:
    """Return attention of several tokens, and of single tokens for `group` heads per KV head."""
    return [prefill_kernel(kv_type), decode_kernel(heads_per_tile(group), kv_type)]


def partial_bytes(heads: int, kv_heads: int, dim: int, threads: int, positions: int) -> int:
    """Return the bytes at `Step.PARTIALS` for decode tiles in several pieces, of contexts in tables of `positions`."""
    size = partial_size.py_func(heads_per_tile(heads // kv_heads), kv.padded_dim(dim))
    tiles = threads * PIECES_PER_THREAD if threads > 1 and positions > KEY_BLOCK else 0
    return int(4 * size * tiles * key_blocks.py_func(positions))


def can_quantize_output(dim: int) -> bool:
    """Return whether attention can quantize its heads: they share no pair of blocks, and none is padded."""
    return dim % 64 == 0


def split_work_task(heads: int, kv_heads: int, threads: int, work: int) -> Task:
    """Return the task that runs once in a step, before attention; `work` is the first of the entries `WorkEntry`."""
    args = pack_args(heads, kv_heads, threads, work)
    return Task(split_work_kernel(heads // kv_heads), args, 1, Step.TOKENS, 1 << 40)


def attention_tasks(
    layer: int,
    heads: int,
    kv_heads: int,
    dim: int,
    params: AttentionParams,
    kv_type: str,
    queries: int,
    out: int,
    work: int,
    activations: int = 0,
    sinks: Any = None,
) -> list[Task]:
    """Return the attention of all tokens of a layer; entries are before `sinks` (0: no quantized results)."""
    padded, entries = kv.padded_dim(dim), (queries, out, work, activations)
    more = 0 if sinks is None else sinks, params.causal, params.spans
    args = pack_args(layer, heads, kv_heads, padded, params.window, 0, 0, *entries, *more)
    pack_floats(args, AttentionArg.SCALE, [params.scale, params.soft_cap])
    kernels = attention_kernels(heads // kv_heads, kv_type)
    return [Task(kernel, args, 1, count) for count, kernel in enumerate(kernels, work + WorkEntry.PREFILL)]
