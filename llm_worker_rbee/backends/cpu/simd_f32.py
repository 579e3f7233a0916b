"""Sixteen float32 at once: loads, stores, arithmetic, sums over lanes in a fixed order, and an exponential.

Plain float loops are not vectorised where they add up (that would change the order of a sum); these are.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .simd import I32, LANES, address, floats, halves, load, splat_value, words64

_LOG2E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_LOWEST = -87.0  # exp of less is as good as nothing: 1.6e-38
_SHIFT = 1.5 * 2**23  # a float32 this large has no fraction, and the low bits of its mantissa are free
_SERIES = [1.0 / math.factorial(n) for n in range(7, -1, -1)]


def _constant(value: float) -> ir.Constant:
    return ir.Constant(floats.ir, [value] * LANES)


def _function(b: Any, name: str, count: int) -> Any:
    return b.module.declare_intrinsic(f"llvm.{name}.v16f32", (), ir.FunctionType(floats.ir, [floats.ir] * count))


@intrinsic
def get(_: Any, array: Any, index: Any) -> Any:
    """16 neighbours of an array of float32, of float16 (as uint16), or of signed bytes."""
    kind = {types.uint16: halves, types.int8: ir.VectorType(ir.IntType(8), LANES)}.get(array.dtype, floats.ir)

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        value = load(context, b, sig.args[0], args[0], args[1], kind)
        if array.dtype == types.int8:
            return b.sitofp(b.sext(value, words64), floats.ir)
        return b.fpext(value, floats.ir) if kind == halves else value

    return floats(array, types.intp), gen


@intrinsic
def put(_: Any, array: Any, index: Any, value: Any) -> Any:
    """Write 16 neighbours, rounded to float16 where the array holds such."""
    narrow = array.dtype == types.uint16

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        kept = b.fptrunc(args[2], halves) if narrow else args[2]
        b.store(kept, address(context, b, sig.args[0], args[0], args[1], kept.type)).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, floats), gen


@intrinsic
def splat(_: Any, value: Any) -> Any:
    """One float32 in every lane."""
    return floats(types.float32), lambda context, b, sig, args: splat_value(b, args[0], floats.ir)


@intrinsic
def add(_: Any, x: Any, y: Any) -> Any:
    """x + y."""
    return floats(floats, floats), lambda context, b, sig, args: b.fadd(*args)


@intrinsic
def mul(_: Any, x: Any, y: Any) -> Any:
    """x * y."""
    return floats(floats, floats), lambda context, b, sig, args: b.fmul(*args)


@intrinsic
def div(_: Any, x: Any, y: Any) -> Any:
    """x / y."""
    return floats(floats, floats), lambda context, b, sig, args: b.fdiv(*args)


@intrinsic
def fma(_: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    return floats(floats, floats, floats), lambda context, b, sig, args: b.call(_function(b, "fma", 3), args)


@intrinsic
def largest(_: Any, x: Any, y: Any) -> Any:
    """The larger of the two in each lane."""
    return floats(floats, floats), lambda context, b, sig, args: b.call(_function(b, "maxnum", 2), args)


@intrinsic
def absolute(_: Any, x: Any) -> Any:
    """|x|."""
    return floats(floats), lambda context, b, sig, args: b.call(_function(b, "fabs", 1), args)


def _folded(b: Any, value: Any, join: Any) -> Any:
    """All lanes joined in the order of a tree, the same on every machine."""
    count = LANES
    while count > 1:
        count //= 2
        nothing = ir.Constant(value.type, ir.Undefined)
        kind = ir.VectorType(I32, count)
        low, high = (
            b.shuffle_vector(value, nothing, ir.Constant(kind, list(range(first, first + count))))
            for first in (0, count)
        )
        value = join(low, high)
    return b.extract_element(value, ir.Constant(I32, 0))


@intrinsic
def total(_: Any, x: Any) -> Any:
    """The sum of all lanes."""
    return types.float32(floats), lambda context, b, sig, args: _folded(b, args[0], b.fadd)


@intrinsic
def highest(_: Any, x: Any) -> Any:
    """The largest lane."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        def join(low: Any, high: Any) -> Any:
            return b.select(b.fcmp_ordered(">", low, high), low, high)

        return _folded(b, args[0], join)

    return types.float32(floats), gen


@intrinsic
def above(_: Any, x: Any, y: Any) -> Any:
    """x where it is larger than y; y elsewhere, also where x is no number: one instruction, unlike `largest`."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.select(b.fcmp_ordered(">", *args), *args)

    return floats(floats, floats), gen


@intrinsic
def within(_: Any, x: Any, first: Any, last: Any, other: Any) -> Any:
    """Lanes first .. last - 1 of x, elsewhere `other`."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        lanes = ir.Constant(words64, list(range(LANES)))
        low, high = (splat_value(b, b.trunc(bound, I32), words64) for bound in args[1:3])
        inside = b.and_(b.icmp_signed(">=", lanes, low), b.icmp_signed("<", lanes, high))
        return b.select(inside, args[0], splat_value(b, args[3], floats.ir))

    return floats(floats, types.int64, types.int64, types.float32), gen


@intrinsic
def marked(_: Any, marks: Any, x: Any, y: Any) -> Any:
    """`marks`, and NaN in each lane where x or y is no number."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.select(b.fcmp_unordered("uno", args[1], args[2]), _constant(math.nan), args[0])

    return floats(floats, floats, floats), gen


@intrinsic
def exp(_: Any, x: Any) -> Any:
    """e^x within 2 units in the last place up to 88; below -87 it is 0; of what is no number it is none."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        fused, low, high = _function(b, "fma", 3), _constant(_LOWEST), _constant(88.0)
        value = b.select(b.fcmp_ordered(">", low, args[0]), low, args[0])
        value = b.select(b.fcmp_ordered("<", high, value), high, value)
        shifted = b.call(fused, [value, _constant(_LOG2E), _constant(_SHIFT)])  # its low bits: the power, rounded
        power = b.fsub(shifted, _constant(_SHIFT))
        rest = b.call(fused, [power, _constant(-_LN2_HIGH), value])
        rest = b.call(fused, [power, _constant(-_LN2_LOW), rest])
        series = _constant(_SERIES[0])
        for factor in _SERIES[1:]:
            series = b.call(fused, [series, rest, _constant(factor)])
        whole = b.add(b.bitcast(shifted, words64), ir.Constant(words64, [127] * LANES))
        two = b.bitcast(b.shl(whole, ir.Constant(words64, [23] * LANES)), floats.ir)
        tiny = b.fcmp_ordered("<", args[0], low)
        return b.select(tiny, _constant(0.0), b.fmul(series, two))

    return floats(floats), gen


@intrinsic
def rounded(_: Any, x: Any) -> Any:
    """To the nearest whole number, halves to even."""
    return floats(floats), lambda context, b, sig, args: b.call(_function(b, "rint", 1), args)


@intrinsic
def put_bytes(_: Any, array: Any, index: Any, x: Any) -> Any:
    """Write 16 whole numbers as signed bytes."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        narrow = ir.VectorType(ir.IntType(8), LANES)
        value = b.trunc(b.fptosi(args[2], words64), narrow)
        b.store(value, address(context, b, sig.args[0], args[0], args[1], narrow)).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, floats), gen
