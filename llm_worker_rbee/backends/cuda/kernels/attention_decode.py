"""Decode attention with split-KV (flash-decoding): rotation, KV-cache write, scores, values and the quantized result.

The cache is (blocks, kv_heads, P, dim): what a head reads of a block is contiguous. The context of a request is divided
into at most SPLITS splits of whole tiles. Each program (split, kv head, request) stores a partial result, and the one
that finishes last combines them in order, so the bits do not depend on timing. Partial results are (B, heads, SPLITS,
dim) with (maximum, sum) of each, in base 2. Keys and values of earlier steps are loaded before the previous kernel
ends.
`decode_attention` computes each head of a group by itself, `decode_attention_gqa` all of them on tensor cores.
"""

# Kernels add to tuples that are empty at first.
# mypy: disable-error-code="assignment, misc"
from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...ops import KVLayer
from ..device import is_interpreted, pdl_options
from ..packed_weight import Activations, Int8Activations, kernel_outputs
from .gemm import GROUP_BLOCKS, interleaved_offset
from .gemv import store_int8_blocks
from .intrinsics import high_half, launch_next, low_half, wait_for_previous
from .rope import CosSin, load_cos_sin, load_rotated, new_kv, padded_dim

SMALL_BATCH, LARGE_BATCH = 4, 128  # requests: up to SMALL_BATCH latency counts, not bandwidth
MAX_EARLY_REQUESTS = 16  # up to which the kernel starts before the previous one has ended
TARGET_PROGRAMS = 2048
MAX_SPLITS = 16
WIDE_HEAD_BYTES = 512  # of a key; of longer ones fewer fit into registers and shared memory
MIN_DOT_GROUP = 4  # query heads per KV head from which tensor cores are used


class SplitKVConfig(NamedTuple):
    """How decode attention is divided into programs; it determines the order of sums, so the last bits."""

    tile_keys: int  # with tensor cores; else for each 16 bytes that a lane reads at a time
    num_warps: int
    max_splits: int  # of a request; 0: by TARGET_PROGRAMS
    min_tiles: int  # of a split
    num_stages: int  # tiles in flight through shared memory; 0: one in registers
    tensor_cores: bool


# By batch size: "small" up to SMALL_BATCH requests, "large" from LARGE_BATCH on.
MHA_CONFIGS = {
    "small": SplitKVConfig(8, 2, 16, 1, 0, False),
    "medium": SplitKVConfig(4, 1, 0, 4, 0, False),
    "large": SplitKVConfig(2, 1, 0, 8, 0, False),
}
SMALL_GROUP_CONFIGS = {"small": SplitKVConfig(4, 1, 32, 1, 0, False), "medium": SplitKVConfig(4, 1, 0, 4, 0, False)}
GQA_CONFIGS = {"small": SplitKVConfig(16, 1, 32, 1, 0, True), "medium": SplitKVConfig(32, 1, 0, 2, 3, True)}
LARGE_GROUP_CONFIGS = {"small": SplitKVConfig(64, 8, 16, 1, 0, True), "medium": GQA_CONFIGS["medium"]}
INTERPRETER_CONFIGS = {"small": SplitKVConfig(2, 1, 4, 1, 0, False), "medium": SplitKVConfig(8, 1, 2, 1, 2, True)}


def split_kv_config(requests: int, heads: int, kv_heads: int) -> SplitKVConfig:
    """Return the configuration for a number of decoding requests."""
    group, size = heads // kv_heads, "small" if requests <= SMALL_BATCH else "medium"
    if is_interpreted():
        return INTERPRETER_CONFIGS["small" if group < MIN_DOT_GROUP else size]
    table = MHA_CONFIGS if group == 1 else SMALL_GROUP_CONFIGS
    if group >= MIN_DOT_GROUP:
        table = GQA_CONFIGS if group == MIN_DOT_GROUP else LARGE_GROUP_CONFIGS
    config = table.get("large", table["medium"]) if requests >= LARGE_BATCH else table[size]
    if config.max_splits:
        return config
    splits = -(-TARGET_PROGRAMS // (requests * kv_heads * (2 if config.tensor_cores else 1)))
    return config._replace(max_splits=min(MAX_SPLITS, 1 << (splits - 1).bit_length()))


def tile_runs(config: SplitKVConfig, dim: int, item: int, block_size: int) -> tuple[int, int]:
    """Return (keys of a run, runs of a tile): a run lies in one block of keys of `dim` values of `item` bytes."""
    tile = config.tile_keys * config.num_warps * max(1, 512 // (padded_dim(dim) * item))
    keys = gcd(block_size, config.tile_keys)
    return keys, tile // keys


LOG2E = tl.constexpr(1.4426950408889634)
ROWS, INT8, INTERLEAVED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # forms of results
MAX_HALF = tl.constexpr(65504.0)  # which weighted means of a float16 cache cannot exceed


@triton.jit
def cap_scores(scores, CAP: tl.constexpr):
    """Return CAP * tanh(scores / CAP) if CAP > 0."""
    if CAP > 0:
        e = tl.exp(-2.0 * tl.abs(scores) / CAP)
        size = CAP * (1.0 - e) / (1.0 + e)
        scores = tl.where(scores < 0, -size, size)
    return scores


@triton.jit
def scale_scores_log2(scores, CAP: tl.constexpr):
    """Return scores in base 2. Without a cap the queries carry the factor already."""
    if CAP > 0:
        scores = cap_scores(scores, CAP) * LOG2E
    return scores


@triton.jit
def store_heads(y, t, heads, mask, outputs, width, DIM: tl.constexpr, FORM: tl.constexpr):
    """Store the results (rows, padded DIM) of the heads in `mask` to `outputs`, (values, scales, sums, tokens): as int8
    blocks (then a head is whole blocks), or as values of any dtype alone, interleaved (gemm.py) as float16."""
    out, out_scales, out_sums, tokens = outputs
    SIZE: tl.constexpr = padded_dim(DIM)
    if FORM == INT8:
        GROUPS: tl.constexpr = SIZE // 32
        ROWS: tl.constexpr = y.shape[0] * GROUPS
        group = tl.arange(0, GROUPS)
        block = tl.reshape(heads[:, None] * (DIM // 32) + group[None, :], (ROWS,))
        mask = tl.broadcast_to(mask[:, None], (heads.shape[0], GROUPS))
        if SIZE != DIM:
            mask = mask & (group < DIM // 32)[None, :]
        mask, y = tl.reshape(mask, (ROWS,)), tl.reshape(y, (ROWS, 32))
        store_int8_blocks(y, t, block, mask, out, out_scales, out_sums, width // 32)
    else:
        i = tl.arange(0, SIZE)
        column = heads[:, None] * DIM + i[None, :]
        mask = mask[:, None]
        if SIZE != DIM:
            mask = mask & (i < DIM)[None, :]
        store_values(y, t, column, mask, out, tokens, width, FORM)


@triton.jit
def store_values(y, t, column, mask, out, tokens, width, FORM: tl.constexpr):
    """Store columns of tokens in any dtype, or interleaved (gemm.py) as float16."""
    if FORM == INTERLEAVED:
        at = interleaved_offset(t, column // 32, column % 32, tokens, width // (32 * GROUP_BLOCKS))
        y = tl.minimum(tl.maximum(y, -MAX_HALF), MAX_HALF)
    else:
        at = t * width + column
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def store_head(y, t, head, outputs, width, DIM: tl.constexpr, FORM: tl.constexpr):
    """Store the result of one head."""
    one = tl.zeros((1,), tl.int32)
    store_heads(y[None, :], t, one + head, one == 0, outputs, width, DIM, FORM)


@triton.jit
def split_range(
    position, split, TILE: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr, WINDOW: tl.constexpr
):
    """Return (first key, end, number of splits) of a split of the keys before `position`: a function of that alone."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position + 1 - WINDOW, 0) // TILE * TILE
    tiles = tl.maximum((position - begin + TILE - 1) // TILE, 1)
    tiles_per_split = tl.maximum((tiles + SPLITS - 1) // SPLITS, MIN_TILES)
    first = begin + split * tiles_per_split * TILE
    splits = tl.where(position < 0, 0, (tiles + tiles_per_split - 1) // tiles_per_split)
    return first, tl.minimum(first + tiles_per_split * TILE, position), splits


@triton.jit
def words_pointer(cache):
    """View a 16- or 8-bit cache as 32-bit words: single values would take a register each."""
    words = cache
    if cache.dtype.element_ty.primitive_bitwidth != 32:
        words = cache.to(tl.pointer_type(tl.int32), bitcast=True)
    return words


@triton.jit
def combine_splits(
    partial, stats, counters, t, kv_head, splits, outputs, sinks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Combine the results of all splits in the program that finishes last, which resets the counter to zero."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tl.debug_barrier()
    before = tl.atomic_add(counters + t * KV_HEADS + kv_head, 1, sem="acq_rel")
    if before == splits - 1:
        tl.store(counters + t * KV_HEADS + kv_head, 0)
        y = ()  # all loads first: a load does not pass a store
        for g in tl.static_range(GROUP):
            head = kv_head * GROUP + g
            first = (t * HEADS + head) * SPLITS
            y = y + (combine_head(partial, stats, first, splits, sinks, head, padded_dim(DIM), SPLITS),)
        for g in tl.static_range(GROUP):
            store_head(y[g], t, kv_head * GROUP + g, outputs, HEADS * DIM, DIM, FORM)


@triton.jit
def add_sinks(l_i, m_i, sinks, head):
    """Return sums with the logits of heads that join the softmax, if there are any."""
    if sinks is not None:
        l_i += tl.exp2(tl.load(sinks + head) * LOG2E - m_i)
    return l_i


@triton.jit
def combine_head(partial, stats, first, splits, sinks, head, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """Return the combined partial results of a head, in order. Loads are independent: one wait per CHUNK splits."""
    CHUNK: tl.constexpr = 8 if SPLITS > 8 else SPLITS
    s = tl.arange(0, SPLITS)
    m_i = tl.max(tl.load(stats + (first + s) * 2, mask=s < splits, other=-1e30, cache_modifier=".cg"), 0)
    l_i = 0.0
    acc = tl.zeros((SIZE,), tl.float32)
    for start in tl.static_range(0, SPLITS, CHUNK):
        split = start + tl.arange(0, CHUNK)
        mask = split < splits
        at = first + split
        weight = tl.exp2(tl.load(stats + at * 2, mask=mask, other=-1e30, cache_modifier=".cg") - m_i)
        weight = tl.where(mask, weight, 0.0)
        l_i += tl.sum(weight * tl.load(stats + at * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg"), 0)
        rows = partial + at[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        rows = tl.load(rows, mask=mask[:, None], other=0.0, cache_modifier=".cg")
        acc += tl.sum(rows * weight[:, None], 0)
    return acc / add_sinks(l_i, m_i, sinks, head)


@triton.jit
def combine_group(
    partial, stats, counters, t, kv_head, splits, outputs, sinks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, FORM: tl.constexpr,
    GROUP_PAD: tl.constexpr,
):  # fmt: skip
    """Do what combine_splits does, all heads of the group at once: the loads of CHUNK splits wait together."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    SIZE: tl.constexpr = padded_dim(DIM)
    CHUNK: tl.constexpr = 4 if SPLITS > 4 else SPLITS
    tl.debug_barrier()
    before = tl.atomic_add(counters + t * KV_HEADS + kv_head, 1, sem="acq_rel")
    if before == splits - 1:
        tl.store(counters + t * KV_HEADS + kv_head, 0)
        r, s, i = tl.arange(0, GROUP_PAD), tl.arange(0, SPLITS), tl.arange(0, SIZE)
        head = kv_head * GROUP + tl.minimum(r, GROUP - 1)
        first = (t * HEADS + head) * SPLITS
        maxima = (first[:, None] + s[None, :]) * 2
        maxima = tl.load(stats + maxima, mask=(s < splits)[None, :], other=-1e30, cache_modifier=".cg")
        m_i = tl.max(maxima, 1)
        l_i = tl.zeros((GROUP_PAD,), tl.float32)
        acc = tl.zeros((GROUP_PAD, SIZE), tl.float32)
        for start in range(0, splits, CHUNK):
            for n in tl.static_range(CHUNK):
                at = first + start + n
                mask = tl.zeros((GROUP_PAD,), tl.int32) + (start + n) < splits
                weight = tl.exp2(tl.load(stats + at * 2, mask=mask, other=-1e30, cache_modifier=".cg") - m_i)
                weight = tl.where(mask, weight, 0.0)
                l_i += weight * tl.load(stats + at * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
                rows = partial + at[:, None] * SIZE + i[None, :]
                acc += tl.load(rows, mask=mask[:, None], other=0.0, cache_modifier=".cg") * weight[:, None]
        l_i = add_sinks(l_i, m_i, sinks, head)
        store_heads(acc / l_i[:, None], t, head, r < GROUP, outputs, HEADS * DIM, DIM, FORM)


@triton.jit
def load_block_ids(table, start, end, RUN_KEYS: tl.constexpr, RUNS: tl.constexpr, P: tl.constexpr):
    """Load the block of each run of RUN_KEYS keys from `start` on; a run never leaves its block."""
    keys = start + tl.arange(0, RUNS) * RUN_KEYS
    return tl.load(table + keys // P, mask=keys < end, other=0)


@triton.jit
def word_offsets(
    blocks,
    start,
    end,
    kv_head,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    P: tl.constexpr,
    RUN_KEYS: tl.constexpr,
    RUNS: tl.constexpr,
    PER_WORD: tl.constexpr,
):
    """Return the offsets of the words of a tile, (RUNS, RUN_KEYS, words), and a mask of those before `end`."""
    WORDS: tl.constexpr = DIM // PER_WORD  # of a key
    keys = start + tl.arange(0, RUNS) * RUN_KEYS
    row = tl.arange(0, RUN_KEYS)
    word = tl.arange(0, padded_dim(DIM) // PER_WORD)
    at = ((blocks.to(tl.int64) * KV_HEADS + kv_head) * P + keys % P) * WORDS
    at = at[:, None, None] + ((row * WORDS)[None, :, None] + word[None, None, :])
    mask = (row[None, :] < (end - keys)[:, None])[:, :, None]
    if padded_dim(DIM) != DIM:
        mask = mask & (word < WORDS)[None, None, :]
    return at, mask


@triton.jit
def unpack(words, KV_TYPE: tl.constexpr, SIZE: tl.constexpr):
    """Unpack (RUNS, RUN_KEYS, words) of the cache to (RUNS, RUN_KEYS, SIZE) float32."""
    values = words
    if KV_TYPE.primitive_bitwidth == 8:
        pairs = tl.join(
            tl.join(unpack_byte(words, 0, KV_TYPE), unpack_byte(words, 2, KV_TYPE)),
            tl.join(unpack_byte(words, 1, KV_TYPE), unpack_byte(words, 3, KV_TYPE)),
        )
        values = tl.reshape(pairs, (words.shape[0], words.shape[1], SIZE))
    elif KV_TYPE == tl.bfloat16:
        pairs = tl.join((words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True))
        values = tl.reshape(pairs, (words.shape[0], words.shape[1], SIZE))
    elif KV_TYPE == tl.float16:
        values = tl.reshape(tl.join(low_half(words), high_half(words)), (words.shape[0], words.shape[1], SIZE))
    return values


@triton.jit
def unpack_byte(words, i: tl.constexpr, KV_TYPE: tl.constexpr):
    """Return byte i of each word as float32."""
    return (words >> (8 * i)).to(tl.int8).to(KV_TYPE, bitcast=True).to(tl.float32)


@triton.jit
def visible_keys(keys, end, position, WINDOW: tl.constexpr):
    """Return the mask of the keys that the query attends to."""
    visible = keys < end
    if WINDOW > 0:
        visible = visible & (keys > position - WINDOW)
    return visible


@triton.jit
def softmax_tile(k, visible, q, m_is, l_is, CAP: tl.constexpr, GROUP: tl.constexpr):
    """Return (new maxima m_i, new sums l_i, weights (RUNS, RUN_KEYS), alphas) of every head for a tile. Only the sum
    over the head crosses lanes."""
    new_ms, new_ls, weights, alphas = (), (), (), ()
    for g in tl.static_range(GROUP):
        scores = tl.where(visible, scale_scores_log2(tl.sum(k * q[g][None, None, :], 2), CAP), -1e30)
        m_i = tl.maximum(m_is[g], tl.max(scores, 1))
        alpha = tl.exp2(m_is[g] - m_i)
        weight = tl.where(visible, tl.exp2(scores - m_i[:, None]), 0.0)
        new_ms = new_ms + (m_i,)
        new_ls = new_ls + (l_is[g] * alpha + tl.sum(weight, 1),)
        weights = weights + (weight,)
        alphas = alphas + (alpha,)
    return new_ms, new_ls, weights, alphas


@triton.jit
def accumulate_values(v, weights, alphas, acc, GROUP: tl.constexpr):
    """Add the weighted values of a tile to the accumulators of every head, (RUNS, SIZE)."""
    new_acc = ()
    for g in tl.static_range(GROUP):
        new = tl.sum(v * weights[g][:, :, None], 1)
        new_acc = new_acc + (acc[g] * alphas[g][:, None] + new,)
    return new_acc


@triton.jit
def query_factor(scale, q_scale, position, CAP: tl.constexpr):
    """Return the factor of a query: the scale of scores, in base 2 unless capped, and its own by position."""
    factor = scale * (1.0 if CAP > 0 else LOG2E)
    if q_scale is not None:
        factor *= tl.load(q_scale + position)
    return factor


@triton.jit(do_not_specialize=["tokens"])
def decode_attention(
    qkv, cos, sin, q_scale, k_cache, v_cache, block_tables, table_width, positions, partial, stats, counters,
    out, out_scales, out_sums, scale, bias, q_norm, k_norm, eps, tokens,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr,
    RUN_KEYS: tl.constexpr, RUNS: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, sinks=None,
    V_NORM: tl.constexpr = False, SHARED: tl.constexpr = False, rope_positions=None,
):  # fmt: skip
    """Attend with one token per request. RoPE turns the first 2 * HALF of the DIM values of a head.

    qkv (PARTS, tokens, (HEADS + 2 KV_HEADS) * DIM); partial (B, HEADS, SPLITS, padded DIM), stats (B, HEADS, SPLITS, 2)
    float32; cos, sin (positions, HALF); block_tables (B, table_width[0]). A tile is RUNS runs of RUN_KEYS keys, each
    summed by its own lanes until the end; a split has MIN_TILES tiles or more. Position -1 is padding. STAGES > 0: that
    many tiles in flight through shared memory, else one in registers. `sinks` (HEADS) join the softmax. SHARED: qkv has
    queries alone, and another layer has written the cache. `rope_positions`: where they are not places in the cache."""
    SIZE: tl.constexpr = padded_dim(DIM)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILE: tl.constexpr = RUN_KEYS * RUNS
    key = (tl.arange(0, RUNS) * RUN_KEYS)[:, None] + tl.arange(0, RUN_KEYS)[None, :]  # of a tile
    KV_TYPE: tl.constexpr = k_cache.dtype.element_ty
    PER_WORD: tl.constexpr = 32 // KV_TYPE.primitive_bitwidth
    k_words, v_words = words_pointer(k_cache), words_pointer(v_cache)
    outputs = (out, out_scales, out_sums, tokens)
    split, kv_head, t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    launch_next(PDL)
    position = tl.load(positions + t)
    table = block_tables + t * tl.load(table_width)
    first, end, splits = split_range(position, split, TILE, SPLITS, MIN_TILES, WINDOW)
    if split >= splits:
        return
    i = tl.arange(0, SIZE)
    if STAGES == 0:
        blocks = load_block_ids(table, first, end, RUN_KEYS, RUNS, P)
        at, mask = word_offsets(blocks, first, end, kv_head, KV_HEADS, DIM, P, RUN_KEYS, RUNS, PER_WORD)
        k = tl.load(k_words + at, mask=mask, other=0)
        v = tl.load(v_words + at, mask=mask, other=0)
        blocks = load_block_ids(table, first + TILE, end, RUN_KEYS, RUNS, P)
    turn = position
    if rope_positions is not None:
        turn = tl.load(rope_positions + t)
    cosines, sines = load_cos_sin(cos, sin, turn, DIM, HALF)
    wait_for_previous(PDL)
    ROW: tl.constexpr = (HEADS if SHARED else HEADS + 2 * KV_HEADS) * DIM
    row, part_stride = qkv + t * ROW, tokens * ROW
    new_k, new_v = new_kv(
        row, kv_head, cosines, sines, bias, k_norm, eps, part_stride, k_cache, v_cache, table, position,
        split == splits - 1, HEADS, KV_HEADS, DIM, HALF, P, PARTS, V_NORM, SHARED,
    )  # fmt: skip
    is_own = (tl.arange(0, RUNS) == 0) & (split == splits - 1)  # this run starts with the new token
    q_factor = query_factor(scale, q_scale, position, CAP)
    q, m_is, l_is, acc = (), (), (), ()
    for g in tl.static_range(GROUP):
        one = load_rotated(row, kv_head * GROUP + g, cosines, sines, bias, q_norm, eps, part_stride, DIM, HALF, PARTS)
        one *= q_factor
        q = q + (one,)
        m_is = m_is + (tl.where(is_own, scale_scores_log2(tl.sum(one * new_k.to(tl.float32), 0), CAP), -1e30),)
        l_is = l_is + (tl.where(is_own, 1.0, 0.0),)
        acc = acc + (tl.where(is_own[:, None], new_v.to(tl.float32)[None, :], 0.0),)
    if STAGES == 0:
        for start in range(first, end, TILE):
            visible = visible_keys(start + key, end, position, WINDOW)
            m_is, l_is, weights, alphas = softmax_tile(unpack(k, KV_TYPE, SIZE), visible, q, m_is, l_is, CAP, GROUP)
            at, mask = word_offsets(blocks, start + TILE, end, kv_head, KV_HEADS, DIM, P, RUN_KEYS, RUNS, PER_WORD)
            k = tl.load(k_words + at, mask=mask, other=0)  # into the registers of the keys just used
            blocks = load_block_ids(table, start + 2 * TILE, end, RUN_KEYS, RUNS, P)
            acc = accumulate_values(unpack(v, KV_TYPE, SIZE), weights, alphas, acc, GROUP)
            v = tl.load(v_words + at, mask=mask, other=0)
    else:
        for start in tl.range(first, end, TILE, num_stages=STAGES):
            blocks = load_block_ids(table, start, end, RUN_KEYS, RUNS, P)
            at, mask = word_offsets(blocks, start, end, kv_head, KV_HEADS, DIM, P, RUN_KEYS, RUNS, PER_WORD)
            k = tl.load(k_words + at, mask=mask, other=0)
            v = tl.load(v_words + at, mask=mask, other=0)
            visible = visible_keys(start + key, end, position, WINDOW)
            m_is, l_is, weights, alphas = softmax_tile(unpack(k, KV_TYPE, SIZE), visible, q, m_is, l_is, CAP, GROUP)
            acc = accumulate_values(unpack(v, KV_TYPE, SIZE), weights, alphas, acc, GROUP)
    y = ()
    for g in tl.static_range(GROUP):
        m_i = tl.max(m_is[g], 0)
        factors = tl.exp2(m_is[g] - m_i)
        l_i = tl.sum(l_is[g] * factors, 0)
        one = tl.sum(acc[g] * factors[:, None], 0)
        if splits == 1:
            one = one / add_sinks(l_i, m_i, sinks, kv_head * GROUP + g)
        else:
            index = (t * HEADS + kv_head * GROUP + g) * SPLITS + split
            tl.store(partial + index * SIZE + i, one)
            tl.store(stats + index * 2, m_i)
            tl.store(stats + index * 2 + 1, l_i)
        y = y + (one,)
    if splits == 1:
        for g in tl.static_range(GROUP):
            store_head(y[g], t, kv_head * GROUP + g, outputs, HEADS * DIM, DIM, FORM)
    else:
        combine_splits(partial, stats, counters, t, kv_head, splits, outputs, sinks, HEADS, KV_HEADS, DIM, SPLITS, FORM)


@triton.jit
def load_tile(
    k_cache,
    v_cache,
    table,
    start,
    end,
    kv_head,
    KV_HEADS: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Load a tile of keys and one of values of WIDTH values or words, (TILE, SIZE); zeros from `end` on."""
    row = tl.arange(0, TILE)
    mask = row < end - start
    if P % TILE == 0:  # in one block
        block = tl.load(table + start // P, mask=start < end, other=0).to(tl.int64)
        at = ((block * KV_HEADS + kv_head) * P + start % P) * WIDTH + row * WIDTH
    else:
        blocks = tl.load(table + (start + row) // P, mask=mask, other=0).to(tl.int64)
        at = ((blocks * KV_HEADS + kv_head) * P + (start + row) % P) * WIDTH
    i = tl.arange(0, SIZE)[None, :]
    mask = mask[:, None]
    if SIZE != WIDTH:
        mask = mask & (i < WIDTH)
    at = at[:, None] + i
    return tl.load(k_cache + at, mask=mask, other=0.0), tl.load(v_cache + at, mask=mask, other=0.0)


@triton.jit
def words_to_tile(words, KV_TYPE: tl.constexpr, DOT_TYPE: tl.constexpr, SIZE: tl.constexpr):
    """Convert words of the cache, (keys, words), to an operand of tl.dot, (keys, SIZE)."""
    if KV_TYPE.primitive_bitwidth == 32:
        tile = words
    elif KV_TYPE.primitive_bitwidth == 16:
        tile = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)).to(KV_TYPE, bitcast=True)
    else:
        even = tl.join(words.to(tl.int8), (words >> 16).to(tl.int8))
        odd = tl.join((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
        tile = tl.join(even, odd).to(KV_TYPE, bitcast=True)
    return tl.reshape(tile, (words.shape[0], SIZE)).to(DOT_TYPE)


@triton.jit
def accumulate_tile(k, v, q, start, end, position, m_i, l_i, acc, WINDOW: tl.constexpr, CAP: tl.constexpr):
    """Add a tile (keys, SIZE) to the accumulators of all heads: one step of online softmax."""
    visible = visible_keys(start + tl.arange(0, k.shape[0]), end, position, WINDOW)[None, :]
    scores = tl.where(visible, scale_scores_log2(tl.dot(q, tl.trans(k)), CAP), -1e30)
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    alpha = tl.exp2(m_i - m_new)
    weights = tl.where(visible, tl.exp2(scores - m_new[:, None]), 0.0)
    acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None])
    return m_new, l_i * alpha + tl.sum(weights, 1), acc


@triton.jit(do_not_specialize=["tokens"])
def decode_attention_gqa(
    qkv, cos, sin, q_scale, k_cache, v_cache, block_tables, table_width, positions, partial, stats, counters,
    out, out_scales, out_sums, scale, bias, q_norm, k_norm, eps, tokens,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    FORM: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, GROUP_PAD: tl.constexpr,
    DOT_TYPE: tl.constexpr, sinks=None, V_NORM: tl.constexpr = False, SHARED: tl.constexpr = False, rope_positions=None,
):  # fmt: skip
    """Do what decode_attention does, with the heads of a group as rows of one product on tensor cores.

    The group is padded to GROUP_PAD with copies of its last head and repeated up to DOT_ROWS. Queries and weights are
    rounded to DOT_TYPE; scores and sums are float32."""
    SIZE: tl.constexpr = padded_dim(DIM)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    DOT_ROWS: tl.constexpr = 16 if GROUP_PAD < 16 else GROUP_PAD
    KV_TYPE: tl.constexpr = k_cache.dtype.element_ty
    WORDS: tl.constexpr = DIM * KV_TYPE.primitive_bitwidth // 32  # of a key
    PADDED_WORDS: tl.constexpr = SIZE * KV_TYPE.primitive_bitwidth // 32
    k_words, v_words = words_pointer(k_cache), words_pointer(v_cache)
    outputs = (out, out_scales, out_sums, tokens)
    split, kv_head, t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    launch_next(PDL)
    position = tl.load(positions + t)
    table = block_tables + t * tl.load(table_width)
    first, end, splits = split_range(position, split, TILE, SPLITS, MIN_TILES, WINDOW)
    if split >= splits:
        return
    i = tl.arange(0, SIZE)
    if STAGES == 0:
        k, v = load_tile(k_words, v_words, table, first, end, kv_head, KV_HEADS, P, TILE, WORDS, PADDED_WORDS)
    turn = position
    if rope_positions is not None:
        turn = tl.load(rope_positions + t)
    cosines, sines = load_cos_sin(cos, sin, turn, DIM, HALF)
    wait_for_previous(PDL)
    ROW: tl.constexpr = (HEADS if SHARED else HEADS + 2 * KV_HEADS) * DIM
    row, part_stride = qkv + t * ROW, tokens * ROW
    last = split == splits - 1
    new_k, new_v = new_kv(
        row, kv_head, cosines, sines, bias, k_norm, eps, part_stride, k_cache, v_cache, table, position, last, HEADS,
        KV_HEADS, DIM, HALF, P, PARTS, V_NORM, SHARED,
    )  # fmt: skip
    head = kv_head * GROUP + tl.minimum(tl.arange(0, GROUP_PAD), GROUP - 1)
    q = load_rotated(row, head[:, None], cosines, sines, bias, q_norm, eps, part_stride, DIM, HALF, PARTS)
    q *= query_factor(scale, q_scale, position, CAP)
    own_score = scale_scores_log2(tl.sum(q * new_k.to(tl.float32)[None, :], 1), CAP)
    own_score = tl.reshape(tl.broadcast_to(own_score[None, :], (DOT_ROWS // GROUP_PAD, GROUP_PAD)), (DOT_ROWS,))
    m_i = tl.where(last, own_score, -1e30)
    l_i = tl.where(last, own_score * 0.0 + 1.0, 0.0)
    acc = tl.zeros((DOT_ROWS, SIZE), tl.float32) + tl.where(last, new_v.to(tl.float32), 0.0)[None, :]
    q = tl.broadcast_to(q.to(DOT_TYPE)[None, :, :], (DOT_ROWS // GROUP_PAD, GROUP_PAD, SIZE))
    q = tl.reshape(q, (DOT_ROWS, SIZE))
    if STAGES == 0:
        for start in range(first, end, TILE):
            k_now, v_now = words_to_tile(k, KV_TYPE, DOT_TYPE, SIZE), words_to_tile(v, KV_TYPE, DOT_TYPE, SIZE)
            k, v = load_tile(
                k_words, v_words, table, start + TILE, end, kv_head, KV_HEADS, P, TILE, WORDS, PADDED_WORDS
            )
            m_i, l_i, acc = accumulate_tile(k_now, v_now, q, start, end, position, m_i, l_i, acc, WINDOW, CAP)
    else:
        for start in tl.range(first, end, TILE, num_stages=STAGES):
            k, v = load_tile(k_cache, v_cache, table, start, end, kv_head, KV_HEADS, P, TILE, DIM, SIZE)
            k, v = k.to(DOT_TYPE), v.to(DOT_TYPE)
            m_i, l_i, acc = accumulate_tile(k, v, q, start, end, position, m_i, l_i, acc, WINDOW, CAP)
    r = tl.arange(0, DOT_ROWS)
    if splits == 1:
        l_i = add_sinks(l_i, m_i, sinks, kv_head * GROUP + tl.minimum(r % GROUP_PAD, GROUP - 1))
        store_heads(acc / l_i[:, None], t, kv_head * GROUP + r, r < GROUP, outputs, HEADS * DIM, DIM, FORM)
    else:
        index = (t * HEADS + kv_head * GROUP + r) * SPLITS + split
        tl.store(partial + index[:, None] * SIZE + i[None, :], acc, mask=(r < GROUP)[:, None])
        tl.store(stats + index * 2, m_i, mask=r < GROUP)
        tl.store(stats + index * 2 + 1, l_i, mask=r < GROUP)
        combine_group(
            partial, stats, counters, t, kv_head, splits, outputs, sinks, HEADS, KV_HEADS, DIM, SPLITS, FORM, GROUP_PAD
        )


def split_kv_scratch(tokens: int, heads: int, dim: int, config: SplitKVConfig, device: torch.device) -> Any:
    """Allocate (partial, stats) that the splits of decode attention hand to each other."""
    return tuple(torch.empty(tokens, heads, config.max_splits, n, device=device) for n in (padded_dim(dim), 2))


def launch_decode_attention(
    qkv: Any,
    op: Any,
    kv: KVLayer,
    rope: CosSin,
    positions: Any,
    block_tables: Any,
    table_width: Any,
    tokens: int,
    config: SplitKVConfig,
    scratch: tuple[Any, Any, Any],
    out: Any,
    pdl: bool,
    rope_positions: Any = None,
) -> None:
    """Attend with decoding tokens by the fused op; qkv (parts, tokens, rows), scratch (partial, stats, counters);
    interleaved activations have factors of 1."""
    form = INT8 if isinstance(out, Int8Activations) else INTERLEAVED if isinstance(out, Activations) else ROWS
    out = out.values if isinstance(out, Activations) else out
    scale, window, cap = op.params[:3]
    (kv_heads, block_size), item, is_shared = kv.k.shape[1:3], kv.k.element_size(), op.n_kv_heads == 0
    common = (
        qkv, rope.cos, rope.sin, rope.q_scale, kv.k, kv.v, block_tables, table_width, positions, *scratch,
        *kernel_outputs(out), scale, op.bias, op.q_norm, op.k_norm, op.eps, qkv.shape[1], op.n_heads, kv_heads,
        op.head_dim, rope.cos.shape[1], block_size,
    )  # fmt: skip
    if config.tensor_cores and kv.k.dtype == torch.float32 and not is_interpreted():
        # the tensor cores would round a float32 cache
        config = config._replace(tile_keys=4, num_warps=1, num_stages=0, tensor_cores=False)
    elif config.tensor_cores and padded_dim(op.head_dim) * item > WIDE_HEAD_BYTES and not is_interpreted():
        warps, stages = max(4, config.num_warps), min(2, config.num_stages)
        config = config._replace(tile_keys=16, num_warps=warps, num_stages=stages)
    rest = (config.max_splits, config.min_tiles, window, cap, form.value, pdl, qkv.shape[0], config.num_stages)
    # The programs of many requests that start early crowd the multiprocessors that are free first.
    options: Any = {"num_warps": config.num_warps, **pdl_options(pdl and tokens <= MAX_EARLY_REQUESTS)}
    grid = (config.max_splits, kv_heads, tokens)
    if config.tensor_cores:
        group = triton.next_power_of_2(op.n_heads // kv_heads)
        dtype = tl.float32 if is_interpreted() else tl.float16 if kv.k.dtype == torch.float16 else tl.bfloat16
        more = group, dtype, op.sinks, op.v_norm, is_shared, rope_positions
        decode_attention_gqa[grid](*common, config.tile_keys, *rest, *more, **options)
    else:
        runs = tile_runs(config, op.head_dim, item, block_size)
        decode_attention[grid](*common, *runs, *rest, op.sinks, op.v_norm, is_shared, rope_positions, **options)
