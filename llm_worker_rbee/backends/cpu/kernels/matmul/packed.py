"""Products straight from packed codes, 16 rows side by side: for few tokens, and on most machines for any number.

A block is 16 rows x 32 columns. Columns come in eight quads of four; a line of 64 bytes holds one quad of all 16 rows
(each 32-bit lane is a row), and narrower codes share a line between quads (packed_weight.py). For each group of columns
the dot product is exact in integers; then one float32 step adds it, scaled, to the sum. That order does not depend on
the tile: a row has the same bits alone, in a batch, and however the pieces are split.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from ....cpu_info import INSTRUCTION_SETS
from ...jit import kernel, variant
from ...packed_weight import LAYOUTS, Layout
from .. import simd
from ..dot_int8 import ISA, WEIGHT_BIAS, dot_block
from ..kv_layout import FMA_STEPS, fma_rows
from ..pointers import f32, f64, i8, i32, i64, prefetch, scratch, u8, u16

MAX_TILE_TOKENS = INSTRUCTION_SETS[ISA].tile_tokens
WIDE_BLOCK_TILE_TOKENS = 12  # for layouts whose blocks leave fewer registers
# of float weights: at least the rows of attention's tile, which fills the registers
FLOAT_TILE_TOKENS = max(INSTRUCTION_SETS[ISA].attention_tile[0], min(MAX_TILE_TOKENS, WIDE_BLOCK_TILE_TOKENS))
FP8_TILE_TOKENS = 8  # two tiles of sums, of a block and of the row
MID_TILE_TOKENS = 4 if MAX_TILE_TOKENS > 4 else MAX_TILE_TOKENS // 2  # for the rest, and for a few requests at once
# tokens of a piece: their activations stay in the second-level cache
TOKENS_PER_PIECE = 144 if MAX_TILE_TOKENS > 4 else 12 * MAX_TILE_TOKENS
TWO_CHAINS = MAX_TILE_TOKENS > 4  # two shorter chains of dot products hide latency, if registers hold both
ADDS_TERMS_IN_TILE = MID_TILE_TOKENS == 2  # of a single token: its two terms are one tile
GROUPS_IN_L1 = 4  # row groups that each tile of tokens meets in turn: they stay in the first-level cache
MAGIC_SUMS = INSTRUCTION_SETS[ISA].magic_sums
# set for each variant
TILE = MID = TOKENS = LAYOUT = BLOCK_BYTES = SCALES_PER_BLOCK = HAS_MINIMUM = SCALE_SHIFT = OFFSET = None
NIBBLE_SCALES = PREFETCH_BYTES = SUMS_OF_16 = BFLOAT = NARROW = OPERANDS = ROWS_TILE = ROWS_MID = ROWS_ONE = None


# Arguments of a product: COUNT, INPUT and OUTPUT are entries of the step, FIRST is the first column in the output, BIAS
# the address of what is added to the output, or 0.
LinearArg = IntEnum(
    "LinearArg",
    "COUNT INPUT OUTPUT STRIDE FIRST ROWS COLUMNS GROUPS_PER_PIECE PACKED SCALES MINIMA NIBBLE_SCALES UNIT TWO_TERM "
    "BIAS",
    start=0,
)


def int8_operands(a, s):
    """Return the packed weights, then activations: values, scales, and sums as `dot_rows` needs them."""
    weights = u8(a[LinearArg.PACKED]), u16(a[LinearArg.SCALES]), u16(a[LinearArg.MINIMA])
    at, sums = s[a[LinearArg.INPUT] :], SUMS_OF_16
    return weights, u8(a[LinearArg.NIBBLE_SCALES]), i8(at[0]), f32(at[1]), f32(at[4 + sums]), i32(at[2 + sums])


def dot_rows(operands, out, place, start, stop, token, columns, stride, unit):
    """Compute groups start .. stop - 1 of 16 rows for TOKENS tokens, or (stride 0) the sum of two.

    xs and xi are sums of the activations, scaled and as integers. With NIBBLE_SCALES, 16 columns share a byte of scale
    and minimum, and 256 columns the factors of these.
    """
    (packed, scales, minima), nibbles, xq, xd, xs, xi = operands
    n = columns // 32
    n_scales = (n * SCALES_PER_BLOCK) >> SCALE_SHIFT
    for group in range(start, stop):
        total = simd.zero_floats(TOKENS)
        for block in range(n):
            line = (group * n + block) * BLOCK_BYTES
            at, b = token * columns + block * 32, token * n + block
            # of the first tile only: those that follow find the weights in the cache
            if PREFETCH_BYTES and token < TOKENS and not NIBBLE_SCALES:
                prefetch(packed, line + PREFETCH_BYTES, BLOCK_BYTES)
            if SUMS_OF_16:
                if NIBBLE_SCALES:
                    s, byte = (group * n_scales + (block >> 3)) * 16, (group * n + block) * 32
                    d, m = simd.load(scales, s), simd.load(minima, s)
                    first = simd.nibbles_times(nibbles, byte, 0, d)
                    second = simd.nibbles_times(nibbles, byte + 16, 0, d)
                else:
                    s = (group * n_scales + block * 2) * 16
                    first, second = simd.load(scales, s), simd.load(scales, s + 16)
                acc = simd.init_dot(TOKENS, MAGIC_SUMS, xi, 2 * b, 2 * n, OFFSET)
                acc = dot_block(acc, LAYOUT, 0, packed, line, xq, at, columns)
                dot = simd.finish_dot(acc, MAGIC_SUMS, xi, 2 * b, 2 * n, OFFSET)
                total = simd.add_scaled_dot(total, dot, xd, b, n, first)
                if NIBBLE_SCALES:
                    total = simd.fma_broadcast(total, simd.nibbles_times(nibbles, byte, 1, m), xs, 2 * b, 2 * n)
                acc = simd.init_dot(TOKENS, MAGIC_SUMS, xi, 2 * b + 1, 2 * n, OFFSET)
                acc = dot_block(acc, LAYOUT, 1, packed, line, xq, at, columns)
                dot = simd.finish_dot(acc, MAGIC_SUMS, xi, 2 * b + 1, 2 * n, OFFSET)
                total = simd.add_scaled_dot(total, dot, xd, b, n, second)
                if NIBBLE_SCALES:
                    total = simd.fma_broadcast(
                        total, simd.nibbles_times(nibbles, byte + 16, 1, m), xs, 2 * b + 1, 2 * n
                    )
            else:
                s = (group * n_scales + (block >> SCALE_SHIFT)) * 16
                acc = simd.init_dot(TOKENS, MAGIC_SUMS, xi, b, n, OFFSET)
                if TWO_CHAINS:
                    acc = dot_block(acc, LAYOUT, 0, packed, line, xq, at, columns)
                    two = simd.init_dot(TOKENS, False, xi, b, n, 0)
                    acc = simd.add_tiles(acc, dot_block(two, LAYOUT, 1, packed, line, xq, at, columns))
                else:
                    acc = dot_block(acc, LAYOUT, 2, packed, line, xq, at, columns)
                dot = simd.finish_dot(acc, MAGIC_SUMS, xi, b, n, OFFSET)
                total = simd.add_scaled_dot(total, dot, xd, b, n, simd.load(scales, s))
                if HAS_MINIMUM:
                    total = simd.fma_broadcast(total, simd.load(minima, s), xs, b, n)
        if TOKENS == 2 and stride == 0:  # the two terms of one token
            simd.store(out, place + (group - start) * 16, simd.add_pair(total, unit))
        else:
            simd.store_tile(out, place + (group - start) * 16, stride, total, unit)


def float_operands(a, s):
    """Return the weights and the activations."""
    return u16(a[LinearArg.PACKED]) if NARROW else f32(a[LinearArg.PACKED]), f32(s[a[LinearArg.INPUT]])


def float_rows(operands, out, place, start, stop, token, columns, stride, unit):
    """Compute groups of 16 rows of float weights for TOKENS tokens: column by column, so that a sum has one order."""
    weights, x = operands
    for group in range(start, stop):
        total, whole = simd.zero_floats(TOKENS), 0 if BFLOAT else columns - columns % FMA_STEPS
        for column in range(0, whole, FMA_STEPS):
            at, w = token * columns + column, (group * columns + column) * 16
            total = fma_rows(total, weights, w, 16, x, at, columns, TOKENS, FMA_STEPS)
        for column in range(whole, columns):
            w = simd.load_as_f32(weights, (group * columns + column) * 16, BFLOAT)
            total = simd.fma_broadcast(total, w, x, token * columns + column, columns)
        simd.store_tile(out, place + (group - start) * 16, stride, total, unit)


def fp8_operands(a, s):
    """Return the weights with their scales, and the activations."""
    return (u8(a[LinearArg.PACKED]), u16(a[LinearArg.SCALES])), f32(s[a[LinearArg.INPUT]])


def fp8_rows(operands, out, place, start, stop, token, columns, stride, unit):
    """Compute groups of 16 rows of e4m3 weights for TOKENS tokens: column by column of a block, then its scale."""
    (packed, scales), x = operands
    n = columns // 32
    for group in range(start, stop):
        total = simd.zero_floats(TOKENS)
        for block in range(group * n, group * n + n):
            part, at = simd.zero_floats(TOKENS), token * columns + (block - group * n) * 32
            for column in range(32):
                w = simd.load_e4m3(packed, (block * 32 + column) * 16)
                part = simd.fma_broadcast(part, w, x, at + column, columns)
            total = simd.add_scaled_tile(total, part, simd.load(scales, block * 16))
        simd.store_tile(out, place + (group - start) * 16, stride, total, unit)


@kernel
def piece_bounds(a, tokens, piece):
    """Return (first group, last, first token, last) of a piece."""
    parts = (tokens + TOKENS_PER_PIECE - 1) // TOKENS_PER_PIECE
    group, token = piece // parts * a[LinearArg.GROUPS_PER_PIECE], piece % parts * TOKENS_PER_PIECE
    last_group = min((a[LinearArg.ROWS] + 15) // 16, group + a[LinearArg.GROUPS_PER_PIECE])
    return group, last_group, token, min(tokens, token + TOKENS_PER_PIECE)


@kernel
def next_tile_tokens(left, largest, middle):
    """Return how many tokens the next tile has."""
    return largest if left >= largest else middle if left >= middle else 1


@kernel
def copy_partial_group(some, out, place, stride, count, tokens):
    """Copy the first `count` of 16 results of each token: the last group of a matrix may be short."""
    for t in range(tokens):
        for i in range(count):
            out[place + t * stride + i] = some[t * 16 + i]


@kernel
def add_two_terms(some, tokens, out, place, stride, count):
    """Add the two rows of each token: 16 results of all first rows lie in `some`, then of all second ones."""
    for t in range(tokens):
        one, two, to = 16 * t, 16 * (tokens + t), place + t * stride
        if count >= 16:
            simd.store(out, to, simd.add(simd.load(some, one), simd.load(some, two)))
        else:
            for i in range(count):
                out[to + i] = some[one + i] + some[two + i]


@kernel
def add_bias(a, out, first, last, group, end):
    """Add the bias to groups `group` to end - 1 of tokens `first` to last - 1."""
    bias, stride = f32(a[LinearArg.BIAS]), a[LinearArg.STRIDE]
    low, high = a[LinearArg.FIRST] + group * 16, a[LinearArg.FIRST] + min(end * 16, a[LinearArg.ROWS])
    whole = high - (high - low) % 16
    for t in range(first, last):
        for i in range(low, whole, 16):
            simd.store(out, t * stride + i, simd.add(simd.load(out, t * stride + i), simd.load(bias, i)))
        for i in range(whole, high):
            out[t * stride + i] += bias[i]


def packed_matmul(args, step, piece):
    """Compute some rows for some tokens; second rows of two-term activations lie behind all first ones."""
    a, s = i64(args), i64(step)
    columns, unit, operands = a[LinearArg.COLUMNS], np.float32(f64(args)[LinearArg.UNIT]), OPERANDS(a, s)
    two_term, tokens = a[LinearArg.TWO_TERM], s[a[LinearArg.COUNT]]
    rows, stride, out = a[LinearArg.ROWS], a[LinearArg.STRIDE], f32(s[a[LinearArg.OUTPUT]])
    begin, end, first, stop = piece_bounds(a, tokens, piece)
    length = stop - first
    row, n, whole = 0, 2 * length if two_term else length, rows // 16
    is_pair = ADDS_TERMS_IN_TILE and two_term and tokens == 1
    in_one_pass = is_pair or not two_term
    groups_per_pass = end - begin if length == 1 and in_one_pass else GROUPS_IN_L1 if in_one_pass else 1
    buffer = scratch(16 * max(TILE, n if two_term else 0))
    while begin < end:
        is_second_term = row >= length
        token = row - length + tokens + first if is_second_term else row + first
        count = next_tile_tokens((n if is_second_term or length == tokens else length) - row, TILE, MID)
        group, last = begin, min(end, begin + groups_per_pass)
        while group < last:
            place = a[LinearArg.FIRST] + group * 16 + token * stride
            direct = group < whole and in_one_pass
            if direct:
                to, at, token_stride = out, place, 0 if is_pair else stride
            else:
                to, at, token_stride = buffer, 16 * row if two_term else 0, 16
            next_group = min(last, whole) if direct else group + 1
            if count == TILE:
                ROWS_TILE(operands, to, at, group, next_group, token, columns, token_stride, unit)
            elif count == MID:
                ROWS_MID(operands, to, at, group, next_group, token, columns, token_stride, unit)
            else:
                ROWS_ONE(operands, to, at, group, next_group, token, columns, token_stride, unit)
            if is_pair and not direct:
                add_two_terms(buffer, 1, out, place, stride, rows - group * 16)
            elif not (direct or two_term):
                copy_partial_group(buffer, out, place, stride, rows - group * 16, count)
            if a[LinearArg.BIAS] and in_one_pass:  # while it is in the first-level cache
                add_bias(a, out, token, token + (1 if is_pair else count), group, next_group)
            group = next_group
        row += count
        if row == n:
            if not in_one_pass:
                place = a[LinearArg.FIRST] + begin * 16 + first * stride
                add_two_terms(buffer, length, out, place, stride, rows - begin * 16)
                if a[LinearArg.BIAS]:
                    add_bias(a, out, first, stop, begin, last)
            begin, row = last, 0


def packed_kernel(layout: Layout) -> Any:
    """Return the product of a layout as a part of a task kernel."""
    number = LAYOUTS.index(layout)
    if layout.float_type == "FP8":
        tiles = _tile_kernels(fp8_rows, number, min(FP8_TILE_TOKENS, MAX_TILE_TOKENS))
        return kernel(variant(packed_matmul, layout.name, OPERANDS=kernel(fp8_operands), **tiles))
    if layout.float_type:
        operands = variant(float_operands, layout.float_type, NARROW=layout.float_type != "F32")
        tiles = _tile_kernels(float_rows, number, FLOAT_TILE_TOKENS, BFLOAT=layout.float_type == "BF16")
        return kernel(variant(packed_matmul, layout.name, OPERANDS=kernel(operands), **tiles))
    sums_of_16 = int(layout.columns_per_scale == 16 or layout.nibble_scales)
    values = {
        "LAYOUT": number,
        "BLOCK_BYTES": layout.block_bytes,
        "SCALES_PER_BLOCK": 2 if layout.columns_per_scale == 16 else 1,
        "SCALE_SHIFT": max(layout.columns_per_scale // 32, 1).bit_length() - 1,
        "HAS_MINIMUM": layout.has_minimum,
        "NIBBLE_SCALES": layout.nibble_scales,
        "PREFETCH_BYTES": INSTRUCTION_SETS[ISA].prefetch_bytes[layout.has_minimum],
        "SUMS_OF_16": sums_of_16,
        "OFFSET": WEIGHT_BIAS if layout.table or layout.planes == (8,) else layout.offset,
    }
    is_narrow = not sums_of_16 and layout.planes != (8,)
    largest = MAX_TILE_TOKENS if is_narrow else min(WIDE_BLOCK_TILE_TOKENS, MAX_TILE_TOKENS)
    tiles = _tile_kernels(dot_rows, number, largest, **values)
    operands = variant(int8_operands, str(sums_of_16), SUMS_OF_16=sums_of_16)
    return kernel(variant(packed_matmul, layout.name, OPERANDS=kernel(operands), **tiles))


def _tile_kernels(template: Any, number: int, largest: int, **values: Any) -> dict[str, Any]:
    """Return the rows of a product for each size of tile, of up to `largest` tokens."""
    middle = MID_TILE_TOKENS if largest <= MAX_TILE_TOKENS else MAX_TILE_TOKENS
    made = {t: kernel(variant(template, f"{number}x{t}", TOKENS=t, **values)) for t in sorted({largest, middle, 1})}
    tiles = {"ROWS_TILE": made[largest], "ROWS_MID": made[middle], "ROWS_ONE": made[1]}
    return {"TILE": largest, "MID": middle, **tiles}
