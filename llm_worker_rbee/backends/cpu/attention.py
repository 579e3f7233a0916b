"""Attention over the paged cache: each query over its own request's keys, causal by the bound of a loop.

Keys lie (block, kv head, chunk, value, 16 positions): a vector holds one value of 16 positions, a score needs no sum
over lanes. Values lie (block, kv head, position, value). A piece of work is a tile of rows that look at the same keys:
neighbouring tokens of one head, or, for a token alone, the heads that share a KV head. A score or a mixture has one
order of additions whatever the tile: a query has the same bits alone, in a batch and in any chunk.
"""

from __future__ import annotations

import math
from functools import cache

import numba as nb
import numpy as np
from numpy.typing import NDArray

from ..isa import TABLE, current
from . import floats as f
from .compile import kernel, parallel, variant
from .vectors import no_floats, store_rows, times

LANES = 16
TILE = TABLE[current()].tokens
NOTHING = np.float32(-np.inf)
TOKENS = GROUP = ROWS_TILE = ROWS_GROUP = None  # set for each variant


@kernel
def softmax(scores, at, first, last, end):
    """Scores first .. last - 1 of a row in place; what lies before and behind them, up to `end`, becomes 0."""
    for i in range(at, at + first):
        scores[i] = NOTHING
    for i in range(at + last, at + end):
        scores[i] = NOTHING
    top = f.splat(NOTHING)
    for i in range(at, at + end, 16):
        top = f.largest(top, f.get(scores, i))
    low = f.splat(-f.highest(top))
    sums = f.splat(np.float32(0))
    for i in range(at, at + end, 16):
        e = f.exp(f.add(f.get(scores, i), low))
        f.put(scores, i, e)
        sums = f.add(sums, e)
    share = f.splat(np.float32(1) / f.total(sums))
    for i in range(at, at + end, 16):
        f.put(scores, i, f.mul(f.get(scores, i), share))


def rows(
    q, at, apart, keys, values, positions, token, along, blocks, size, kv_head, kv_heads, dim, scale, cap, window, out
):
    """TOKENS rows of q from `at` on, `apart` from each other; row t is at positions[token + t * along]."""
    chunks = size // LANES  # of a block
    last = positions[token + (TOKENS - 1) * along] + 1
    start = max(0, positions[token] + 1 - window) // size * size if window else 0
    n_blocks = -(-last // size) - start // size
    width = n_blocks * size
    scores = np.empty(TOKENS * width, np.float32)
    for b in range(n_blocks):
        block = blocks[start // size + b] * kv_heads + kv_head
        for c in range(chunks):
            line = (block * chunks + c) * dim * LANES
            total = no_floats(TOKENS)
            for d in range(dim):
                total = times(total, f.get(keys, line + d * LANES), q, at + d, apart)
            store_rows(scores, (b * chunks + c) * LANES, width, total, scale)
    for t in range(TOKENS):
        if cap:
            for i in range(t * width, (t + 1) * width):
                scores[i] = cap * np.float32(math.tanh(scores[i] / cap))
        end = positions[token + t * along] + 1
        begin = max(0, end - window) if window else 0
        softmax(scores, t * width, begin - start, end - start, width)
    for d in range(0, dim, LANES):
        total = no_floats(TOKENS)
        for b in range(n_blocks):
            row = (blocks[start // size + b] * kv_heads + kv_head) * size * dim + d
            for p in range(min(size, last - start - b * size)):
                total = times(total, f.get(values, row + p * dim), scores, b * size + p, width)
        store_rows(out, at + d, apart, total, np.float32(1))


ROWS_TILE = kernel(variant(rows, f"x{TILE}", TOKENS=TILE))


@kernel
def tiles(query_start):
    """(first token, tokens, request) of each tile: full ones of each request, then its rest one by one."""
    found = np.empty((query_start[-1], 3), np.int64)
    count = 0
    for r in range(query_start.shape[0] - 1):
        token = query_start[r]
        while token < query_start[r + 1]:
            size = TILE if token + TILE <= query_start[r + 1] else 1
            found[count, 0], found[count, 1], found[count, 2] = token, size, r
            count += 1
            token += size
    return found[:count]


@kernel
def deal(found, heads, kv_heads):
    """(tile, head) of each piece; a token alone is one piece for each KV head."""
    pieces = np.empty((found.shape[0] * heads, 2), np.int64)
    count = 0
    for i in range(found.shape[0]):
        for head in range(heads if found[i, 1] > 1 else kv_heads):
            pieces[count, 0], pieces[count, 1] = i, head
            count += 1
    return pieces[:count]


def attend(
    q, keys, values, positions, query_start, block_table, size, heads, kv_heads, dim, scale, cap, window, out, workers
):
    """All tokens of the step; later tokens have more to look at, so pieces are dealt out in turn."""
    found = tiles(query_start)
    pieces = deal(found, heads, kv_heads)
    for worker in nb.prange(workers):
        for piece in range(worker, pieces.shape[0], workers):
            token, count, request = found[pieces[piece, 0]]
            head, blocks = pieces[piece, 1], block_table[request]
            if count == 1:
                ROWS_GROUP(
                    q, (token * heads + head * GROUP) * dim, dim, keys, values, positions, token, 0, blocks, size,
                    head, kv_heads, dim, scale, cap, window, out,
                )  # fmt: skip
            else:
                ROWS_TILE(
                    q, (token * heads + head) * dim, heads * dim, keys, values, positions, token, 1, blocks, size,
                    head // GROUP, kv_heads, dim, scale, cap, window, out,
                )  # fmt: skip


@cache
def attend_for(group):
    """The kernel for models in which so many heads share a KV head."""
    own = kernel(variant(rows, f"x{group}", TOKENS=group)) if group != TILE else ROWS_TILE
    return parallel(variant(attend, f"g{group}", GROUP=group, ROWS_GROUP=own))


def empty(
    blocks: int, block_size: int, kv_heads: int, head_dim: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Room for keys and for values."""
    assert block_size % LANES == 0, "keys lie in chunks of 16 positions"
    padded = -(-head_dim // LANES) * LANES
    keys = np.zeros((blocks, kv_heads, block_size // LANES, padded, LANES), np.float32)
    return keys, np.zeros((blocks, kv_heads, block_size, padded), np.float32)


def attention(q, kv, batch, params, workers: int):
    """Each query over its own request's cached keys: (T, heads, head_dim) -> (T, heads * head_dim)."""
    tokens, heads, dim = q.shape
    kv_heads, size, padded = kv.v.shape[1:]
    if q.strides != (heads * padded * 4, padded * 4, 4):  # not as rope_store gives it
        wide = np.zeros((tokens, heads, padded), np.float32)
        wide[:, :, :dim] = q
        q = wide
    flat = np.lib.stride_tricks.as_strided(q, (tokens * heads * padded,), (4,))
    out = np.empty((tokens, heads, padded), np.float32)
    attend_for(heads // kv_heads)(
        flat, kv.k.reshape(-1), kv.v.reshape(-1), batch.positions, batch.query_start, batch.block_table, size, heads,
        kv_heads, padded, np.float32(params.scale), np.float32(params.soft_cap), params.window, out.reshape(-1),
        workers,
    )  # fmt: skip
    return out[:, :, :dim].reshape(tokens, heads * dim)
