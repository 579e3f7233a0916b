"""Activations as int8: blocks of 32 columns, each with its scale and its sums.

x = q * scale, scale = max|x| / 127 (0 for a block of zeros). Kernels need the sums of q over 32 and over 16 columns for
weights with an offset or a minimum. Six adjacent entries of a step hold their addresses: q, scale, sums, sums16,
scaled (sums * scale), scaled16.

Two-term quantization stores a token as two rows: its int8 values and those of the remainder. The two products are
added, and the error is a 254th of that of one term.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from . import simd as f
from .dot_int8 import DOT_PRODUCTS, ISA, concat_vectors
from .jit import kernel
from .pointers import f32, i8, i32, scratch
from .simd import F32, I8, I32, I32X16, LANES, emit_load, emit_store, emit_vector_call, emits, f32x16, u8x64

# (elements per block, type) of q, scale, sums, sums16, scaled, scaled16
BUFFERS: Any = (32, np.int8), (1, np.float32), (1, np.int32), (2, np.int32), (1, np.float32), (2, np.float32)


def allocate(tokens: int, columns: int) -> tuple[NDArray[Any], ...]:
    """Return the buffers for `tokens` rows of up to `columns` columns."""
    blocks = tokens * -(-columns // 32)
    return tuple(np.empty(count * blocks, dtype) for count, dtype in BUFFERS)


@kernel
def quantize_blocks(x, at, s, entry, first, last):
    """Quantize blocks first .. last - 1, two at a time; the values of block `first` begin at x[at]."""
    q, scale, sums, sums16 = i8(s[entry]), f32(s[entry + 1]), i32(s[entry + 2]), i32(s[entry + 3])
    scaled, scaled16 = f32(s[entry + 4]), f32(s[entry + 5])
    b = first
    while b + 2 <= last:
        quantize_pair(x, at + (b - first) * 32, q, scale, sums, sums16, scaled, scaled16, b)
        b += 2
    if b < last:
        quantize_single_block(x, at + (b - first) * 32, q, scale, sums, sums16, scaled, scaled16, b)


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
    quantize_blocks(x, at, s, entry, token * n, (token + 1) * n)
    q, scale = i8(s[entry]), f32(s[entry + 1])
    for b in range(n):
        less = f.splat(-scale[token * n + b])
        for i in range(b * 32, b * 32 + 32, 16):
            f.store(rest, i, f.add(f.load(x, at + i), f.mul(less, f.load(q, token * columns + i))))
    quantize_blocks(rest, 0, s, entry, (count + token) * n, (count + token + 1) * n)


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
    """Emit all 64 values in steps of a 127th of their block's maximum, the first two lanes of `top`."""
    zero, steps = (ir.Constant(top.type, [value] * top.type.count) for value in (0.0, 127.0))
    inverse = b.select(b.fcmp_ordered(">", top, zero), b.fdiv(steps, top), zero)
    made = []
    for i, v in enumerate(x):
        factor = _shuffle(b, inverse, inverse, [i // 2] * LANES)
        whole = b.fptosi(emit_vector_call(b, "rint", b.fmul(v, factor)), I32X16)
        made.append(b.trunc(whole, ir.VectorType(I8, LANES)))
    return concat_vectors(b, made)


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
    nothing = b.fmul(top, ir.Constant(top.type, [0.0] * 4))  # NaN for what is infinite
    d = b.fadd(b.fdiv(top, ir.Constant(top.type, [127.0] * 4)), nothing)
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
