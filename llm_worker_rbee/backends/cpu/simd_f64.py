"""Operations on 16 float64 at once, for sampling: loads from float32 or float64, sums, maxima, and exp."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .simd import I32, LANES, Vector, element_pointer, emit_load, f32x16
from .simd_f32 import emit_max_nan_second, llvm_function, operation, splat_operation

f64x16 = Vector("f64x16", ir.DoubleType(), LANES)
I64X16 = ir.VectorType(ir.IntType(64), LANES)
LOG2E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.6931471803691238, 1.9082149292705877e-10
ROUNDING_SHIFT = 1.5 * 2.0**52  # a float64 this large has no fraction, and the low bits of its mantissa are free
SERIES = [1.0 / math.factorial(n) for n in range(11, -1, -1)]
MIN_EXPONENT = -60.0  # exp of less is negligible beside 1, however many there are


def _constant(value: float) -> ir.Constant:
    return ir.Constant(f64x16.ir, [value] * LANES)


emit_fma = llvm_function(f64x16, "fma.v16f64", 3)
splat = splat_operation(f64x16, types.float64)
add = operation(f64x16, 2, lambda b, x, y: b.fadd(x, y))
mul = operation(f64x16, 2, lambda b, x, y: b.fmul(x, y))
fma = operation(f64x16, 3, emit_fma)
max_nan_second = operation(f64x16, 2, emit_max_nan_second)


@intrinsic
def load(_: Any, array: Any, index: Any) -> Any:
    """Load 16 float32 or float64."""
    narrow = array.dtype == types.float32

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        value = emit_load(context, b, sig.args[0], args[0], args[1], f32x16.ir if narrow else f64x16.ir)
        return b.fpext(value, f64x16.ir) if narrow else value

    return f64x16(array, types.intp), gen


@intrinsic
def store(_: Any, array: Any, index: Any, value: Any) -> Any:
    """Write 16 float64."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store(args[2], element_pointer(context, b, sig.args[0], args[0], args[1], f64x16.ir)).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, f64x16), gen


def _exp(b: Any, x: Any) -> Any:
    low = _constant(MIN_EXPONENT)
    tiny = b.fcmp_ordered("<", x, low)
    value = b.select(tiny, low, x)
    shifted = emit_fma(b, value, _constant(LOG2E), _constant(ROUNDING_SHIFT))
    power = b.fsub(shifted, _constant(ROUNDING_SHIFT))
    rest = emit_fma(b, power, _constant(-LN2_HIGH), value)
    rest = emit_fma(b, power, _constant(-LN2_LOW), rest)
    series = _constant(SERIES[0])
    for factor in SERIES[1:]:
        series = emit_fma(b, series, rest, _constant(factor))
    exponent = b.add(b.bitcast(shifted, I64X16), ir.Constant(I64X16, [1023] * LANES))
    two = b.bitcast(b.shl(exponent, ir.Constant(I64X16, [52] * LANES)), f64x16.ir)
    return b.select(tiny, _constant(0.0), b.fmul(series, two))


exp = operation(f64x16, 1, _exp)  # for x up to 0, within 1e-14 of it; 0 below MIN_EXPONENT


def _reduce(b: Any, value: Any, combine: Any) -> Any:
    """Emit a reduction of all lanes, one after the other."""
    found = b.extract_element(value, ir.Constant(I32, 0))
    for lane in range(1, LANES):
        found = combine(found, b.extract_element(value, ir.Constant(I32, lane)))
    return found


@intrinsic
def hsum(_: Any, x: Any) -> Any:
    """Return the sum of all lanes."""
    return types.float64(f64x16), lambda context, b, sig, args: _reduce(b, args[0], b.fadd)


@intrinsic
def hmax(_: Any, x: Any) -> Any:
    """Return the largest lane."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return _reduce(b, args[0], lambda x, y: emit_max_nan_second(b, x, y))

    return types.float64(f64x16), gen
