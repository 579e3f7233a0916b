"""Activations as int8: blocks of 32 columns, each with its scale and its sums.

x = q * scale, scale = max|x| / 127 (0 for a block of zeros), rounded to 22 bits; NaN if max|x| is above 1.7e33. Kernels
need the sums of q over 32 and over 16 columns for weights with an offset or a minimum. Seven adjacent entries of a step
hold their addresses: q, scale, sums, sums16, scaled (sums * scale), scaled16, panels. Where weights are unpacked first
(matmul/tile_kernel.py), steps of many tokens store everything in panels too, [panel][block].

Two-term quantization stores a token as two rows: its int8 values and the remainder's. The two products are added, and
the error is a 254th of one term's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...cpu_info import INSTRUCTION_SETS
from ..jit import ir, kernel, types
from . import simd as f
from .dot_int8 import DOT_PRODUCTS, ISA, TILE_KERNELS, concat_vectors
from .pointers import aligned, f32, i8, i32, scratch, u8
from .simd import F32, I8, I32, I32X16, LANES, MAGIC, emit_load, emit_store, emit_vector_call, emits, f32x16, u8x64

UNPACK_MIN_TOKENS = INSTRUCTION_SETS[ISA].unpack_min_tokens
TILES = TILE_KERNELS[ISA] if UNPACK_MIN_TOKENS else None
PANEL_TOKENS, PANEL_BYTES = (TILES.panel_tokens, TILES.panel_bytes) if TILES else (1, 0)
# (elements per block, type) of q, scale, sums, sums16, scaled, scaled16, panels
BUFFERS: Any = (
    (32, np.int8),
    (1, np.float32),
    (1, np.int32),
    (2, np.int32),
    (1, np.float32),
    (2, np.float32),
    (PANEL_BYTES // PANEL_TOKENS, np.uint8),
)
PANELS = len(BUFFERS) - 1


def allocate(tokens: int, columns: int) -> tuple[NDArray[Any], ...]:
    """Return the buffers for two terms of `tokens` rows of up to `columns` columns."""
    blocks = 2 * pad_to_panels(tokens) * -(-columns // 32)
    return tuple(aligned(np.empty, count * blocks, dtype) for count, dtype in BUFFERS)


def pad_to_panels(tokens: int) -> int:
    """Return the tokens for which buffers have room: the last panel is a whole one."""
    return -(-tokens // PANEL_TOKENS) * PANEL_TOKENS


@kernel
def quantize_blocks(x, at, s, entry, first, last, row_blocks, count):
    """Quantize blocks first .. last - 1, two at a time; the values of block `first` begin at x[at].

    They are of one row of `row_blocks`, of `count` tokens in the step; rows `count` and above are second terms.
    """
    q, scale, sums, sums16 = i8(s[entry]), f32(s[entry + 1]), i32(s[entry + 2]), i32(s[entry + 3])
    scaled, scaled16 = f32(s[entry + 4]), f32(s[entry + 5])
    b = first
    while b + 2 <= last:
        quantize_pair(x, at + (b - first) * 32, q, scale, sums, sums16, scaled, scaled16, b)
        b += 2
    if b < last:
        quantize_single_block(x, at + (b - first) * 32, q, scale, sums, sums16, scaled, scaled16, b)
    if UNPACK_MIN_TOKENS and count >= UNPACK_MIN_TOKENS:
        row = first // row_blocks
        if row >= count:
            row += (PANEL_TOKENS - count % PANEL_TOKENS) % PANEL_TOKENS
        to = (row // PANEL_TOKENS * row_blocks + first % row_blocks) * PANEL_BYTES
        for b in range(first, last):
            store_in_panel(u8(s[entry + PANELS]), to, row % PANEL_TOKENS, q, scale, scaled, scaled16, b)
            to += PANEL_BYTES


@kernel
def quantize_single_block(x, at, q, scale, sums, sums16, scaled, scaled16, block):
    """Quantize a block without a neighbour: beside one of zeros, whose results are dropped."""
    pair, bytes2 = np.zeros(64, np.float32), np.empty(64, np.int8)
    two, four = np.empty(2, np.float32), np.empty(4, np.float32)
    scale2, sums2, sums4 = np.empty(2, np.float32), np.empty(2, np.int32), np.empty(4, np.int32)
    for i in range(32):
        pair[i] = x[at + i]
    quantize_pair(pair, 0, bytes2, scale2, sums2, sums4, two, four, 0)
    for i in range(32):
        q[block * 32 + i] = bytes2[i]
    scale[block], sums[block], scaled[block] = scale2[0], sums2[0], two[0]
    for i in range(2):
        sums16[2 * block + i], scaled16[2 * block + i] = sums4[i], four[i]


@kernel
def quantize_two_term(x, at, s, entry, token, columns, count):
    """Quantize a token as two rows: its values in row `token`, the remainder in row count + token."""
    n, rest = columns // 32, scratch(columns)
    quantize_blocks(x, at, s, entry, token * n, (token + 1) * n, n, count)
    q, scale = i8(s[entry]), f32(s[entry + 1])
    for b in range(n):
        less = f.splat(-scale[token * n + b])
        for i in range(b * 32, b * 32 + 32, 16):
            f.store(rest, i, f.add(f.load(x, at + i), f.mul(less, f.load(q, token * columns + i))))
    quantize_blocks(rest, 0, s, entry, (count + token) * n, (count + token + 1) * n, n, count)


def _shuffle(b: Any, x: Any, y: Any, lanes: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _xor_lanes(b: Any, x: Any, by: int) -> Any:
    """Emit the vector whose lane i holds lane i ^ by."""
    return _shuffle(b, x, x, [i ^ by for i in range(LANES)])


def _block_maxima(b: Any, x: list[Any]) -> Any:
    """Emit max|x| of the first two vectors in lanes 0..7, of the last two in lanes 8..15.

    Magnitudes are compared as integers: NaN is then larger than everything, and never vanishes.
    """
    mask = ir.Constant(I32X16, [0x7FFFFFFF] * LANES)
    sizes = [b.and_(b.bitcast(v, I32X16), mask) for v in x]
    one, two = emit_vector_call(b, "smax", *sizes[:2]), emit_vector_call(b, "smax", *sizes[2:])
    halves = [*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]
    top = emit_vector_call(b, "smax", *(_shuffle(b, one, two, lanes) for lanes in halves))
    for by in (4, 2, 1):
        top = emit_vector_call(b, "smax", top, _xor_lanes(b, top, by))
    return b.bitcast(top, f32x16.ir)


def _to_int8(b: Any, x: list[Any], top: Any) -> Any:
    """Emit all 64 values in steps of a 127th of their block's maximum, the first two lanes of `top`.

    MAGIC + value is rounded to an integer, to even at a half, and its low byte is that integer: no conversion.
    """
    zero, steps = (ir.Constant(top.type, [value] * top.type.count) for value in (0.0, 127.0))
    inverse = b.select(b.fcmp_ordered(">", top, zero), b.fdiv(steps, top), zero)
    made = []
    for i, v in enumerate(x):
        factor = _shuffle(b, inverse, inverse, [i // 2] * LANES)
        whole = b.fadd(b.fmul(v, factor), ir.Constant(v.type, [MAGIC] * LANES))
        made.append(b.trunc(b.bitcast(whole, I32X16), ir.VectorType(I8, LANES)))
    return concat_vectors(b, made)


def _round_scale(b: Any, d: Any) -> Any:
    """Emit scales rounded to 22 bits (Veltkamp): MAGIC * scale is then exact (matmul/tile_sdot.py). NaN stays NaN."""
    five = b.fmul(d, ir.Constant(d.type, [5.0] * 4))
    return b.fsub(five, b.fsub(five, d))


@emits(lambda x, at, *outputs: types.void(x, types.intp, *outputs[:-1], types.intp))
def quantize_pair(
    b: Any, x: Any, at: Any, q: Any, scale: Any, sums: Any, sums16: Any, scaled: Any, scaled16: Any, block: Any
) -> None:
    """Quantize blocks `block` and the next, from x[at] on: reductions are made for both at once."""

    def put(array: Any, times: int, value: Any) -> None:
        emit_store(b, array, b.mul(block, ir.Constant(block.type, times)), value)

    values = [emit_load(b, x, b.add(at, ir.Constant(at.type, 16 * i)), f32x16.ir) for i in range(4)]
    tops = _block_maxima(b, values)
    top = _shuffle(b, tops, tops, [0, 8, 0, 8])  # a division of four takes less than one of sixteen
    made = _to_int8(b, values, top)
    put(q, 32, made)
    # NaN for what is infinite, or would be if its scale were multiplied by MAGIC
    large = b.fmul(top, ir.Constant(top.type, [MAGIC / 64] * 4))
    nothing = b.fmul(large, ir.Constant(top.type, [0.0] * 4))
    d = _round_scale(b, b.fadd(b.fdiv(top, ir.Constant(top.type, [127.0] * 4)), nothing))
    ones, none = ir.Constant(u8x64.ir, [1] * 64), ir.Constant(I32X16, [0] * LANES)
    total = DOT_PRODUCTS[ISA][0](b, none, ones, made)
    for by in (1, 2):
        total = b.add(total, _xor_lanes(b, total, by))
    whole = b.add(total, _xor_lanes(b, total, 4))
    by32, by16 = (whole, [0, 8], sums, scaled), (total, [0, 4, 8, 12], sums16, scaled16)
    for integers, lanes, to_sums, to_scaled in (by32, by16):
        times = len(lanes) // 2
        few = _shuffle(b, integers, integers, lanes)
        put(to_sums, times, few)
        factor = _shuffle(b, d, d, [lane // 8 for lane in lanes])
        put(to_scaled, times, b.fmul(factor, b.sitofp(few, ir.VectorType(F32, len(lanes)))))
    put(scale, 1, _shuffle(b, d, d, [0, 1]))


@emits(lambda panel, at, token, *arrays: types.void(panel, types.intp, types.intp, *arrays[:-1], types.intp))
def store_in_panel(
    b: Any, panel: Any, at: Any, token: Any, q: Any, scale: Any, scaled: Any, scaled16: Any, block: Any
) -> None:
    """Store a quantized block as one token's block of a panel."""
    assert TILES is not None

    def get(array: Any, times: int, kind: ir.Type) -> Any:
        return emit_load(b, array, b.mul(block, ir.Constant(block.type, times)), kind)

    values, two = get(q, 32, ir.VectorType(I8, 32)), get(scaled16, 2, ir.VectorType(F32, 2))
    TILES.emit_store_token(b, panel, at, token, values, get(scale, 1, F32), get(scaled, 1, F32), two)
