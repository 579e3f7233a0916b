"""Prefill attention: a tile of queries of one request and head over its paged keys.

The loop ends at the last key that the tile may see: of a causal model its last query, of others the last key of the
sequence or of the window, which reaches WINDOW // 2 to both sides. With spans, ranges of keys of each query, it goes
from the first to the last of them; a causal query also sees what lies before it, as far as the window. Queries and
the cache are float16 or bfloat16 (float32 under the interpreter); scores and sums are float32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from ...ops import AttentionParams, Ints, KVLayer
from ..device import HOPPER_SHARED_BYTES, is_interpreted, pdl_options, shared_memory_bytes
from ..packed_weight import E4M3, Activations
from .attention_decode import INTERLEAVED, ROWS, WIDE_HEAD_BYTES, cap_scores, store_values
from .intrinsics import launch_next, wait_for_previous
from .rope import padded_dim

SMALL_QUERY_TILE, QUERY_TILE = 16, 64  # queries of a program
MIN_TILE_PROGRAMS = 32  # beside one for each full tile of queries: they go on with further tiles


def query_tiles(query_start: Ints, queries: int, decoding: int = 0) -> tuple[Ints, Ints]:
    """Return runs of `queries` tokens of the requests after the decoding ones: (request, first token of the run)."""
    counts = np.diff(query_start)[decoding:]
    each = -(-counts // queries)
    requests = np.repeat(np.arange(len(counts)), each)
    before = np.cumsum(each) - each
    return requests + decoding, (np.arange(len(requests)) - before[requests]) * queries


def tile_programs(tokens: int, tile_queries: int) -> int:
    """Return the programs for each head among which the tiles of a step are divided."""
    return min(tokens, tokens // tile_queries + MIN_TILE_PROGRAMS)


def prefill_tile(shared_bytes: int, dim: int, item: int) -> tuple[int, int]:
    """Return (keys of a tile, stages) for heads of `dim` values of `item` bytes; fewer keys where they are long, or a
    program has less shared memory than on Hopper."""
    if shared_bytes >= HOPPER_SHARED_BYTES:
        return (64, 2) if dim * item <= WIDE_HEAD_BYTES else (32, 1)
    if dim * item <= 256:
        return 64, 2
    return (32, 1) if dim * item <= 512 else (16, 1)


@triton.jit
def attend_keys(
    queries, k_cache, v_cache, table, kv_head, at, end, query_positions, m_i, l_i, acc, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, P: tl.constexpr, TILE_KEYS: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, oldest=None, last=None,
):  # fmt: skip
    """Attend with a tile of queries to TILE_KEYS keys from `at` on. Without MASKED all of them are seen; with `oldest`
    and `last` those from the one to before the other."""
    SIZE: tl.constexpr = padded_dim(DIM)
    i = tl.arange(0, SIZE)
    keys = at + tl.arange(0, TILE_KEYS)
    is_key = keys < end
    key_mask = is_key[:, None]
    if SIZE != DIM:
        key_mask = key_mask & (i < DIM)[None, :]
    if MASKED or SIZE != DIM:
        block = tl.load(table + keys // P, mask=is_key, other=0).to(tl.int64)
        offset = ((block * KV_HEADS + kv_head) * P + keys % P) * DIM
        k = tl.load(k_cache + offset[None, :] + i[:, None], mask=tl.trans(key_mask), other=0.0)  # (DIM, TILE_KEYS)
        v = tl.load(v_cache + offset[:, None] + i[None, :], mask=key_mask, other=0.0)
    else:
        block = tl.load(table + keys // P).to(tl.int64)
        offset = ((block * KV_HEADS + kv_head) * P + keys % P) * DIM
        k = tl.load(k_cache + offset[None, :] + i[:, None])
        v = tl.load(v_cache + offset[:, None] + i[None, :])
    k, v = k.to(queries.dtype), v.to(queries.dtype)
    scores = cap_scores(tl.dot(queries, k, input_precision="ieee") * scale, CAP)
    if MASKED:
        if oldest is None:
            visible = is_visible(keys[None, :], query_positions[:, None], end, WINDOW, CAUSAL)
        else:
            visible = (keys[None, :] >= oldest[:, None]) & (keys[None, :] < last[:, None])
        scores = tl.where(visible, scores, -1e30)
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    weights = tl.exp(scores - m_new[:, None])
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    alpha = tl.exp(m_i - m_new)
    l_i = l_i * alpha + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, l_i, acc


@triton.jit
def is_visible(keys, queries, end, WINDOW: tl.constexpr, CAUSAL: tl.constexpr):
    """Return whether queries see keys, both by position."""
    if CAUSAL:
        visible = keys <= queries
        if WINDOW > 0:
            visible = visible & (keys > queries - WINDOW)
    else:
        visible = (keys < end) & (queries >= 0)
        if WINDOW > 0:
            visible = visible & (tl.abs(keys - queries) <= WINDOW // 2)
    return visible


@triton.jit
def attend_tile(
    q, k_cache, v_cache, block_tables, table_width, query_start, context_len, request, first, out, tokens, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, P: tl.constexpr, TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, sinks=None, CAUSAL: tl.constexpr = True,
    FORM: tl.constexpr = ROWS, spans=None,
):  # fmt: skip
    """Attend with the queries of a request from its first-th of this step on."""
    SIZE: tl.constexpr = padded_dim(DIM)
    head = tl.program_id(1)
    start = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - start
    past = tl.load(context_len + request) - count  # keys of earlier steps
    m = first + tl.arange(0, TILE_QUERIES)
    i = tl.arange(0, SIZE)
    row, column = (start + m).to(tl.int64)[:, None], head * DIM + i[None, :]
    query_mask = (m < count)[:, None]
    if SIZE != DIM:
        query_mask = query_mask & (i < DIM)[None, :]
    queries = tl.load(q + (row * (HEADS * DIM) + column), mask=query_mask, other=0.0)
    table = block_tables + request * tl.load(table_width)
    kv_head = head // (HEADS // KV_HEADS)
    query_positions = past + m
    end = past + tl.minimum(first + TILE_QUERIES, count)
    BEHIND: tl.constexpr = WINDOW - 1 if CAUSAL else WINDOW // 2
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(past + first - BEHIND, 0) // TILE_KEYS * TILE_KEYS
    if not CAUSAL:
        query_positions = tl.minimum(query_positions, end - 1)  # missing queries see keys too
        end = tl.minimum(end + WINDOW // 2, past + count) if WINDOW > 0 else past + count
    oldest, last = None, None
    if spans is not None:
        is_query = m < count
        last = tl.load(spans + 2 * (start + m) + 1, mask=is_query, other=0)
        if CAUSAL:
            oldest = tl.where(is_query, tl.maximum(query_positions - WINDOW + 1, 0) if WINDOW > 0 else 0, end)
            last = tl.where(is_query, tl.maximum(last, query_positions + 1), 0)
        else:
            oldest = tl.load(spans + 2 * (start + m), mask=is_query, other=end)
        begin, end = tl.min(oldest, 0) // TILE_KEYS * TILE_KEYS, tl.max(last, 0)
    m_i = tl.full((TILE_QUERIES,), -1e30, tl.float32)
    l_i = tl.zeros((TILE_QUERIES,), tl.float32)
    acc = tl.zeros((TILE_QUERIES, SIZE), tl.float32)
    if not CAUSAL and WINDOW == 0 and spans is None:  # whole tiles of keys, which all queries see
        begin = end // TILE_KEYS * TILE_KEYS
        for at in range(0, begin, TILE_KEYS):
            m_i, l_i, acc = attend_keys(
                queries, k_cache, v_cache, table, kv_head, at, end, query_positions, m_i, l_i, acc, scale, KV_HEADS,
                DIM, P, TILE_KEYS, WINDOW, CAP, CAUSAL, False,
            )  # fmt: skip
    for at in range(begin, end, TILE_KEYS):
        m_i, l_i, acc = attend_keys(
            queries, k_cache, v_cache, table, kv_head, at, end, query_positions, m_i, l_i, acc, scale, KV_HEADS,
            DIM, P, TILE_KEYS, WINDOW, CAP, CAUSAL, True, oldest, last,
        )  # fmt: skip
    if spans is not None:
        l_i = tl.where(m < count, l_i, 1.0)  # missing queries have seen none
    if sinks is not None:
        l_i += tl.exp(tl.load(sinks + head) - m_i)
    store_values(acc / l_i[:, None], row, column, query_mask, out, tokens, HEADS * DIM, FORM)


@triton.jit(do_not_specialize=["tokens"])
def prefill_attention(
    q, k_cache, v_cache, block_tables, table_width, query_start, context_len, num_tiles, tile_request, tile_first, out,
    tokens, scale, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, P: tl.constexpr,
    TILE_QUERIES: tl.constexpr, TILE_KEYS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, sinks=None,
    CAUSAL: tl.constexpr = True, PDL: tl.constexpr = False, FORM: tl.constexpr = ROWS, spans=None,
):  # fmt: skip
    """Attend with TILE_QUERIES queries of request tile_request[tile], from its tile_first[tile]-th of this step on; the
    step has `tokens`.

    Program (i, head) has tiles i, i + programs, .. of num_tiles[0]. block_tables (requests, table_width[0]). `sinks`
    (HEADS) join the denominators of the softmax. spans (tokens, 2) are positions of keys: first, last + 1."""
    launch_next(PDL)
    wait_for_previous(PDL)
    for tile in range(tl.program_id(0), tl.load(num_tiles), tl.num_programs(0)):
        attend_tile(
            q, k_cache, v_cache, block_tables, table_width, query_start, context_len, tl.load(tile_request + tile),
            tl.load(tile_first + tile), out, tokens, scale, HEADS, KV_HEADS, DIM, P, TILE_QUERIES, TILE_KEYS, WINDOW,
            CAP, sinks, CAUSAL, FORM, spans,
        )  # fmt: skip


def query_dtype(cache: torch.dtype) -> torch.dtype:
    """Return the dtype of scores' operands: the cache's, where the tensor cores (and the interpreter) have it."""
    if is_interpreted():
        return torch.float32
    return torch.bfloat16 if cache == E4M3 else cache


class QueryTiles(NamedTuple):
    """Runs of queries of one request each, and the arrays of the requests, on the device."""

    queries: int  # of a tile
    programs: int  # for each head, among which the tiles are divided
    block_tables: torch.Tensor  # (requests, table_width[0])
    table_width: torch.Tensor
    query_start: torch.Tensor
    context_len: torch.Tensor
    num_tiles: torch.Tensor  # (1,)
    request: torch.Tensor  # of each tile
    first: torch.Tensor  # the first query of each tile


def launch_prefill_attention(
    q: torch.Tensor,
    kv: KVLayer,
    tiles: QueryTiles,
    params: AttentionParams,
    out: torch.Tensor | Activations,
    sinks: torch.Tensor | None = None,
    pdl: bool = False,
    spans: torch.Tensor | None = None,
) -> None:
    """Attend with queries (tokens, heads, dim); out (tokens, heads * dim), or interleaved with factors of 1."""
    values, form = (out.values, INTERLEAVED) if isinstance(out, Activations) else (out, ROWS)
    (_, heads, dim), (kv_heads, block_size) = q.shape, kv.k.shape[1:3]
    keys, stages = prefill_tile(shared_memory_bytes(q.device), dim, q.element_size())
    warps = 4 if dim * q.element_size() <= WIDE_HEAD_BYTES else 8
    prefill_attention[(tiles.programs, heads)](
        q, kv.k, kv.v, *tiles[2:], values, len(values), params.scale, heads, kv_heads, dim, block_size, tiles.queries,
        keys, params.window, params.soft_cap, sinks, params.causal, pdl, form.value, spans, num_warps=warps,
        num_stages=stages, **pdl_options(pdl),
    )  # fmt: skip
