"""Sixteen float64 at once, for sampling: loads from float32 or float64, sums, maxima, and an exponential."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .simd import LANES, Vector, address, floats, load, splat_value

doubles = Vector("f64x16", ir.DoubleType(), LANES)
_WORDS = ir.VectorType(ir.IntType(64), LANES)
_LOG2E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.6931471803691238, 1.9082149292705877e-10
_SHIFT = 1.5 * 2.0**52  # a float64 this large has no fraction, and the low bits of its mantissa are free
_SERIES = [1.0 / math.factorial(n) for n in range(11, -1, -1)]
LOWEST = -60.0  # e to less than this is nothing beside 1, however many there are


def _constant(value: float) -> ir.Constant:
    return ir.Constant(doubles.ir, [value] * LANES)


def _fma(b: Any, *args: Any) -> Any:
    return b.call(
        b.module.declare_intrinsic("llvm.fma.v16f64", (), ir.FunctionType(doubles.ir, [doubles.ir] * 3)), args
    )


@intrinsic
def get(_: Any, array: Any, index: Any) -> Any:
    """16 neighbours of an array of float32 or float64."""
    narrow = array.dtype == types.float32

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        value = load(context, b, sig.args[0], args[0], args[1], floats.ir if narrow else doubles.ir)
        return b.fpext(value, doubles.ir) if narrow else value

    return doubles(array, types.intp), gen


@intrinsic
def put(_: Any, array: Any, index: Any, value: Any) -> Any:
    """Write 16 float64."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store(args[2], address(context, b, sig.args[0], args[0], args[1], doubles.ir)).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, doubles), gen


@intrinsic
def splat(_: Any, value: Any) -> Any:
    """One float64 in every lane."""
    return doubles(types.float64), lambda context, b, sig, args: splat_value(b, args[0], doubles.ir)


@intrinsic
def above(_: Any, x: Any, y: Any) -> Any:
    """x where it is larger than y; y elsewhere."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.select(b.fcmp_ordered(">", *args), *args)

    return doubles(doubles, doubles), gen


@intrinsic
def add(_: Any, x: Any, y: Any) -> Any:
    """x + y."""
    return doubles(doubles, doubles), lambda context, b, sig, args: b.fadd(*args)


@intrinsic
def mul(_: Any, x: Any, y: Any) -> Any:
    """x * y."""
    return doubles(doubles, doubles), lambda context, b, sig, args: b.fmul(*args)


@intrinsic
def fma(_: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z."""
    return doubles(doubles, doubles, doubles), lambda context, b, sig, args: _fma(b, *args)


@intrinsic
def exp(_: Any, x: Any) -> Any:
    """e^x for x up to 0, within 1e-14 of it; 0 below LOWEST."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        low = _constant(LOWEST)
        tiny = b.fcmp_ordered("<", args[0], low)
        value = b.select(tiny, low, args[0])
        shifted = _fma(b, value, _constant(_LOG2E), _constant(_SHIFT))
        power = b.fsub(shifted, _constant(_SHIFT))
        rest = _fma(b, power, _constant(-_LN2_HIGH), value)
        rest = _fma(b, power, _constant(-_LN2_LOW), rest)
        series = _constant(_SERIES[0])
        for factor in _SERIES[1:]:
            series = _fma(b, series, rest, _constant(factor))
        whole = b.add(b.bitcast(shifted, _WORDS), ir.Constant(_WORDS, [1023] * LANES))
        two = b.bitcast(b.shl(whole, ir.Constant(_WORDS, [52] * LANES)), doubles.ir)
        return b.select(tiny, _constant(0.0), b.fmul(series, two))

    return doubles(doubles), gen


def _reduced(b: Any, value: Any, join: Any) -> Any:
    found = b.extract_element(value, ir.Constant(ir.IntType(32), 0))
    for lane in range(1, LANES):
        found = join(found, b.extract_element(value, ir.Constant(ir.IntType(32), lane)))
    return found


@intrinsic
def total(_: Any, x: Any) -> Any:
    """The sum of all lanes."""
    return types.float64(doubles), lambda context, b, sig, args: _reduced(b, args[0], b.fadd)


@intrinsic
def highest(_: Any, x: Any) -> Any:
    """The largest lane."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return _reduced(b, args[0], lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y))

    return types.float64(doubles), gen
