"""Operations on 16 float32 at once: loads, stores, arithmetic, reductions in a fixed order, and exp.

LLVM does not vectorise a plain loop that adds floats, as that would change the order of the sum; these operations are
vectors by type. simd_f64.py has the same names for float64, so kernels import them as `f` and `w`.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .simd import F16X16, I8X16, I32, I32X16, LANES, element_pointer, emit_fma, emit_load_floats, emit_splat, f32x16

LOG2E, LN2_HIGH, LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
MIN_EXPONENT = -87.0  # exp(-87) is 1.6e-38: below it the result is 0
ROUNDING_SHIFT = 1.5 * 2**23  # a float32 this large has no fraction, and the low bits of its mantissa are free
SERIES = [1.0 / math.factorial(n) for n in range(7, -1, -1)]


def operation(vector: Any, count: int, emit: Any) -> Any:
    """Return the intrinsic that applies `emit(builder, *vectors)` to 1, 2 or 3 vectors of this type."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return emit(b, *args)

    def unary(_: Any, x: Any) -> Any:
        return vector(vector), gen

    def binary(_: Any, x: Any, y: Any) -> Any:
        return vector(vector, vector), gen

    def ternary(_: Any, x: Any, y: Any, z: Any) -> Any:
        return vector(vector, vector, vector), gen

    return intrinsic((unary, binary, ternary)[count - 1])


def llvm_function(vector: Any, name: str, count: int) -> Any:
    """Return the emitter of a call of an LLVM function on `count` vectors of this type."""

    def emit(b: Any, *args: Any) -> Any:
        kind = ir.FunctionType(vector.ir, [vector.ir] * count)
        return b.call(b.module.declare_intrinsic(f"llvm.{name}", (), kind), args)

    return emit


def splat_operation(vector: Any, scalar: Any) -> Any:
    """Return the intrinsic that puts one scalar into every lane."""

    def splat(_: Any, value: Any) -> Any:
        return vector(scalar), lambda context, b, sig, args: emit_splat(b, args[0], vector.ir)

    return intrinsic(splat)


def emit_max_nan_second(b: Any, x: Any, y: Any) -> Any:
    """Emit x where x > y, else y: y also where x is NaN. One instruction on x86, unlike llvm.maxnum."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _constant(value: float) -> ir.Constant:
    return ir.Constant(f32x16.ir, [value] * LANES)


splat = splat_operation(f32x16, types.float32)
add = operation(f32x16, 2, lambda b, x, y: b.fadd(x, y))
mul = operation(f32x16, 2, lambda b, x, y: b.fmul(x, y))
div = operation(f32x16, 2, lambda b, x, y: b.fdiv(x, y))
fma = operation(f32x16, 3, emit_fma)
fabs = operation(f32x16, 1, llvm_function(f32x16, "fabs.v16f32", 1))
rint = operation(f32x16, 1, llvm_function(f32x16, "rint.v16f32", 1))  # halves to even
max_nan_second = operation(f32x16, 2, emit_max_nan_second)


@intrinsic
def load(_: Any, array: Any, index: Any) -> Any:
    """Load 16 float32, float16 (as uint16) or int8 as floats."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return emit_load_floats(context, b, sig.args[0], args[0], args[1])

    return f32x16(array, types.intp), gen


@intrinsic
def store(_: Any, array: Any, index: Any, value: Any) -> Any:
    """Write 16 floats, rounded to float16 if the array holds uint16."""
    narrow = array.dtype == types.uint16

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        stored = b.fptrunc(args[2], F16X16) if narrow else args[2]
        b.store(stored, element_pointer(context, b, sig.args[0], args[0], args[1], stored.type)).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), gen


@intrinsic
def store_i8(_: Any, array: Any, index: Any, x: Any) -> Any:
    """Write 16 whole numbers as int8."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        value = b.trunc(b.fptosi(args[2], I32X16), I8X16)
        b.store(value, element_pointer(context, b, sig.args[0], args[0], args[1], I8X16)).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), gen


def _reduce(b: Any, value: Any, combine: Any) -> Any:
    """Emit a reduction of all lanes as a tree, in the same order on every machine."""
    count = LANES
    while count > 1:
        count //= 2
        undefined = ir.Constant(value.type, ir.Undefined)
        kind = ir.VectorType(I32, count)
        low, high = (
            b.shuffle_vector(value, undefined, ir.Constant(kind, list(range(first, first + count))))
            for first in (0, count)
        )
        value = combine(low, high)
    return b.extract_element(value, ir.Constant(I32, 0))


@intrinsic
def hsum(_: Any, x: Any) -> Any:
    """Return the sum of all lanes."""
    return types.float32(f32x16), lambda context, b, sig, args: _reduce(b, args[0], b.fadd)


@intrinsic
def hmax(_: Any, x: Any) -> Any:
    """Return the largest lane."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return _reduce(b, args[0], lambda low, high: emit_max_nan_second(b, low, high))

    return types.float32(f32x16), gen


@intrinsic
def select_lanes(_: Any, x: Any, first: Any, last: Any, other: Any) -> Any:
    """Return lanes first .. last - 1 of x, and `other` elsewhere."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        lanes = ir.Constant(I32X16, list(range(LANES)))
        low, high = (emit_splat(b, b.trunc(bound, I32), I32X16) for bound in args[1:3])
        inside = b.and_(b.icmp_signed(">=", lanes, low), b.icmp_signed("<", lanes, high))
        return b.select(inside, args[0], emit_splat(b, args[3], f32x16.ir))

    return f32x16(f32x16, types.int64, types.int64, types.float32), gen


def _nan_mask(b: Any, mask: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_unordered("uno", x, y), _constant(math.nan), mask)


nan_mask = operation(f32x16, 3, _nan_mask)  # `mask`, and NaN in each lane where x or y is NaN


def _exp(b: Any, x: Any) -> Any:
    low, high = _constant(MIN_EXPONENT), _constant(88.0)
    value = b.select(b.fcmp_ordered(">", low, x), low, x)
    value = b.select(b.fcmp_ordered("<", high, value), high, value)
    shifted = emit_fma(b, value, _constant(LOG2E), _constant(ROUNDING_SHIFT))  # its low bits: the power, rounded
    power = b.fsub(shifted, _constant(ROUNDING_SHIFT))
    rest = emit_fma(b, power, _constant(-LN2_HIGH), value)
    rest = emit_fma(b, power, _constant(-LN2_LOW), rest)
    series = _constant(SERIES[0])
    for factor in SERIES[1:]:
        series = emit_fma(b, series, rest, _constant(factor))
    exponent = b.add(b.bitcast(shifted, I32X16), ir.Constant(I32X16, [127] * LANES))
    two = b.bitcast(b.shl(exponent, ir.Constant(I32X16, [23] * LANES)), f32x16.ir)
    tiny = b.fcmp_ordered("<", x, low)
    return b.select(tiny, _constant(0.0), b.fmul(series, two))


exp = operation(f32x16, 1, _exp)  # within 2 units in the last place up to 88; 0 below MIN_EXPONENT; NaN stays NaN
