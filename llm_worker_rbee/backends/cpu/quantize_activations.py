"""Activations as signed bytes: blocks of 32 columns, each with its scale and its sums.

x = q * scale, scale = largest |x| / 127 (0 for a block of zeros). Kernels need the sums of q over 32 and over 16
columns, for weights that are stored with an offset or a minimum. Six neighbouring entries of a step hold their
addresses: q, scale, sums, sums16, scaled, scaled16.

Where more is wanted (`finely`), a token is two rows: its bytes, and the bytes of what these leave over. Their products
are added; what is then lost is a 254th of what was.

Two neighbouring blocks of activations as bytes at once: one intrinsic, the heart of activations.py.

What must be folded over lanes (the largest, the sums) is folded for both blocks together; the sums come from one dot
product with ones. Sizes are compared as integers: a NaN is larger than everything then, and never vanishes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from . import simd_f32 as f
from .dot_int8 import DOTS, NAME, joined
from .jit import kernel
from .pointers import f32, i8, i32, scratch
from .simd import F32, I8, I32, LANES, address, bytes64, floats, load, words64

Floats = NDArray[np.float32]


class Quantized(NamedTuple):
    """Room for so many tokens."""

    q: NDArray[np.int8]
    scale: Floats
    sums: NDArray[np.int32]
    sums16: NDArray[np.int32]
    scaled: Floats
    scaled16: Floats


def room(tokens: int, columns: int) -> Quantized:
    """Room for `tokens` rows of up to so many columns."""
    blocks = tokens * -(-columns // 32)
    return Quantized(
        np.empty(32 * blocks, np.int8),
        np.empty(blocks, np.float32),
        np.empty(blocks, np.int32),
        np.empty(2 * blocks, np.int32),
        np.empty(blocks, np.float32),
        np.empty(2 * blocks, np.float32),
    )


@kernel
def quantize(x, at, s, entry, first, last):
    """Blocks first .. last - 1 of the activations; the values of block `first` begin at x[at]. Two at a time."""
    q, scale, sums, sums16 = i8(s[entry]), f32(s[entry + 1]), i32(s[entry + 2]), i32(s[entry + 3])
    scaled, scaled16 = f32(s[entry + 4]), f32(s[entry + 5])
    b = first
    while b + 2 <= last:
        quantize_pair(x, at + (b - first) * 32, q, scale, sums, sums16, scaled, scaled16, b)
        b += 2
    if b < last:
        quantize_last(x, at + (b - first) * 32, q, scale, sums, sums16, scaled, scaled16, b)


@kernel
def quantize_last(x, at, q, scale, sums, sums16, scaled, scaled16, block):
    """A block that has no neighbour: with one of zeros, of which nothing is kept."""
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
def quantize_finely(x, at, s, entry, token, columns, count):
    """A token as two rows: its bytes in row `token`, those of the rest in row count + token."""
    n, rest = columns // 32, scratch(columns)
    quantize(x, at, s, entry, token * n, (token + 1) * n)
    q, scale = i8(s[entry]), f32(s[entry + 1])
    for b in range(n):
        less = f.splat(-scale[token * n + b])
        for i in range(b * 32, b * 32 + 32, 16):
            f.put(rest, i, f.add(f.get(x, at + i), f.mul(less, f.get(q, token * columns + i))))
    quantize(rest, 0, s, entry, (count + token) * n, (count + token + 1) * n)


def _shuffled(b: Any, x: Any, y: Any, lanes: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _moved(b: Any, x: Any, by: int) -> Any:
    """Lane i holds what lane i ^ by held."""
    return _shuffled(b, x, x, [i ^ by for i in range(LANES)])


def _function(b: Any, name: str, kind: ir.Type, count: int) -> Any:
    return b.module.declare_intrinsic(name, (), ir.FunctionType(kind, [kind] * count))


def _tops(b: Any, x: list[Any]) -> Any:
    """The largest |value| of the first two vectors in lanes 0..7, of the last two in lanes 8..15."""
    most = _function(b, f"llvm.smax.v{LANES}i32", words64, 2)
    mask = ir.Constant(words64, [0x7FFFFFFF] * LANES)
    sizes = [b.and_(b.bitcast(v, words64), mask) for v in x]
    one, two = b.call(most, sizes[:2]), b.call(most, sizes[2:])
    top = b.call(most, [_shuffled(b, one, two, [*range(8), *range(16, 24)]),
                        _shuffled(b, one, two, [*range(8, 16), *range(24, 32)])])  # fmt: skip
    for by in (4, 2, 1):
        top = b.call(most, [top, _moved(b, top, by)])
    return b.bitcast(top, floats.ir)


def _bytes(b: Any, x: list[Any], top: Any) -> Any:
    """All 64 values in steps of a 127th of their block's largest, which are the first two of `top`."""
    zero, steps = (ir.Constant(top.type, [value] * top.type.count) for value in (0.0, 127.0))
    inverse = b.select(b.fcmp_ordered(">", top, zero), b.fdiv(steps, top), zero)
    rint = _function(b, f"llvm.rint.v{LANES}f32", floats.ir, 1)
    made = []
    for i, v in enumerate(x):
        factor = _shuffled(b, inverse, inverse, [i // 2] * LANES)
        whole = b.fptosi(b.call(rint, [b.fmul(v, factor)]), words64)
        made.append(b.trunc(whole, ir.VectorType(I8, LANES)))
    return joined(b, made)


@intrinsic
def quantize_pair(
    _: Any, x: Any, at: Any, q: Any, scale: Any, sums: Any, sums16: Any, scaled: Any, scaled16: Any, block: Any
) -> Any:
    """Blocks `block` and the next, from x[at] on; activations.py says what is written where."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        index = args[8]

        def put(which: int, times: int, value: Any) -> None:
            place = b.mul(index, ir.Constant(index.type, times))
            b.store(value, address(context, b, sig.args[which], args[which], place, value.type)).align = 1

        values = [
            load(context, b, sig.args[0], args[0], b.add(args[1], ir.Constant(args[1].type, 16 * i)), floats.ir)
            for i in range(4)
        ]
        tops = _tops(b, values)
        top = _shuffled(b, tops, tops, [0, 8, 0, 8])  # a division of four takes less than one of sixteen
        made = _bytes(b, values, top)
        put(2, 32, made)
        nothing = b.fmul(top, ir.Constant(top.type, [0.0] * 4))  # NaN for what is infinite
        d = b.fadd(b.fdiv(top, ir.Constant(top.type, [127.0] * 4)), nothing)
        ones, none = ir.Constant(bytes64.ir, [1] * 64), ir.Constant(words64, [0] * LANES)
        total = DOTS[NAME][0](b, none, ones, made)
        for by in (1, 2):
            total = b.add(total, _moved(b, total, by))
        by16, by32 = [0, 4, 8, 12], [0, 8]
        whole = b.add(total, _moved(b, total, 4))
        for integers, lanes, at_sums, at_scaled in ((whole, by32, 4, 6), (total, by16, 5, 7)):
            times = len(lanes) // 2
            few = _shuffled(b, integers, integers, lanes)
            put(at_sums, times, few)
            factor = _shuffled(b, d, d, [lane // 8 for lane in lanes])
            put(at_scaled, times, b.fmul(factor, b.sitofp(few, ir.VectorType(F32, len(lanes)))))
        put(3, 1, _shuffled(b, d, d, [0, 1]))
        return context.get_dummy_value()

    return types.void(x, types.intp, q, scale, sums, sums16, scaled, scaled16, types.intp), gen
