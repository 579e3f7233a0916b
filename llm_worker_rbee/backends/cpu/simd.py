"""SIMD vectors as Numba values: 64 bytes, 16 integers, 16 floats, and tiles of them. One width for every machine.

A Numba type whose data model is an LLVM vector lives in registers like any local variable; LLVM splits a vector of 64
bytes into what the machine has (one register with AVX-512, two with AVX2, four on Arm). A tile is as many vectors as a
kernel works on tokens at once: each operation on a tile becomes one instruction a token, without a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

I8, I16, I32, F16, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()
LANES = 16
Gen = Callable[..., Any]


class Vector(types.Type):
    """A vector in registers."""

    def __init__(self, name: str, element: ir.Type, lanes: int) -> None:
        self.ir = ir.VectorType(element, lanes)
        super().__init__(name)


class Tile(types.Type):
    """As many vectors of one kind as there are tokens."""

    def __init__(self, vector: Vector, tokens: int) -> None:
        self.vector, self.tokens = vector, tokens
        self.ir = ir.ArrayType(vector.ir, tokens)
        super().__init__(f"{vector.name}*{tokens}")


@register_model(Vector)
@register_model(Tile)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, kind.ir)


bytes64, ints, floats = Vector("u8x64", I8, 64), Vector("i32x16", I32, LANES), Vector("f32x16", F32, LANES)
halves = ir.VectorType(F16, LANES)
words64 = ir.VectorType(I32, LANES)  # the same 64 bytes as words, for shifts


@cache
def int_tile(tokens: int) -> Tile:
    """The tile of 16 integers a token."""
    return Tile(ints, tokens)


@cache
def float_tile(tokens: int) -> Tile:
    """The tile of 16 floats a token."""
    return Tile(floats, tokens)


def address(context: Any, b: Any, array_type: Any, array: Any, index: Any, target: ir.Type) -> Any:
    """A pointer to element `index` of a contiguous array, as a pointer to `target`."""
    data = context.make_array(array_type)(context, b, array).data
    size = ir.Constant(index.type, array_type.dtype.bitwidth // 8)
    return b.bitcast(b.gep(b.bitcast(data, I8.as_pointer()), [b.mul(index, size)]), target.as_pointer())


def load(context: Any, b: Any, array_type: Any, array: Any, index: Any, target: ir.Type) -> Any:
    """What lies there; nothing is assumed about its alignment."""
    value = b.load(address(context, b, array_type, array, index, target))
    value.align = 1
    return value


def splat_value(b: Any, scalar: Any, vector: ir.VectorType) -> Any:
    """One value in every lane."""
    nothing = ir.Constant(vector, ir.Undefined)
    first = b.insert_element(nothing, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count))


def each(b: Any, tile: Tile, function: Callable[[int], Any]) -> Any:
    """A tile whose vectors the function makes."""
    value: Any = ir.Constant(tile.ir, ir.Undefined)
    for token in range(tile.tokens):
        value = b.insert_value(value, function(token), token)
    return value


def _tokens(literal: Any) -> int | None:
    return int(literal.literal_value) if isinstance(literal, types.IntegerLiteral) else None


@intrinsic
def load_halves(_: Any, array: Any, index: Any) -> Any:
    """16 halves (in an array of uint16) as floats."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.fpext(load(context, b, sig.args[0], args[0], args[1], halves), floats.ir)

    return floats(array, types.intp), gen


@intrinsic
def half_at(_: Any, array: Any, index: Any, bfloat: Any) -> Any:
    """One float16 or bfloat16 (in an array of uint16) as a float."""
    if not isinstance(bfloat, types.BooleanLiteral):
        return None
    upper = bool(bfloat.literal_value)

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        bits = load(context, b, sig.args[0], args[0], args[1], I16)
        if upper:
            return b.bitcast(b.shl(b.zext(bits, I32), ir.Constant(I32, 16)), F32)
        return b.fpext(b.bitcast(bits, F16), F32)

    return types.float32(array, types.intp, bfloat), gen


def masked(b: Any, line: Any, shift: int, mask: int) -> Any:
    """Each byte shifted right (left, where negative) and masked; bits of a neighbour that move in are masked away."""
    if shift > 0 and mask == 255 >> shift:  # the top bits: one instruction where bytes can be shifted
        return b.lshr(line, ir.Constant(bytes64.ir, [shift] * 64))
    words = b.bitcast(line, words64)
    by = ir.Constant(words64, [abs(shift)] * LANES)
    moved = words if not shift else b.lshr(words, by) if shift > 0 else b.shl(words, by)
    return b.and_(b.bitcast(moved, bytes64.ir), ir.Constant(bytes64.ir, [mask] * 64))


@intrinsic
def no_floats(_: Any, tokens: Any) -> Any:
    """A tile of zeros."""
    count = _tokens(tokens)
    if count is None:
        return None
    tile = float_tile(count)
    zero = ir.Constant(floats.ir, [0.0] * LANES)
    return tile(tokens), lambda context, b, sig, args: each(b, tile, lambda _: zero)


@intrinsic
def start(_: Any, tokens: Any, sums: Any, index: Any, stride: Any, offset: Any) -> Any:
    """Integer accumulators of each token: minus `offset` times its element of an int32 array, in every lane."""
    count, times = _tokens(tokens), _tokens(offset)
    if count is None or times is None:
        return None
    tile = int_tile(count)

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        if times == 0:
            return each(b, tile, lambda _: ir.Constant(ints.ir, [0] * LANES))
        factor = ir.Constant(I32, -times)

        def one(token: int) -> Any:
            at = b.add(args[2], b.mul(args[3], ir.Constant(args[3].type, token)))
            return splat_value(b, b.mul(load(context, b, sig.args[1], args[1], at, I32), factor), ints.ir)

        return each(b, tile, one)

    return tile(tokens, sums, types.intp, types.intp, offset), gen


@intrinsic
def added(_: Any, one: Any, two: Any) -> Any:
    """The sum of two tiles of integers."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return each(b, one, lambda t: b.add(*(b.extract_value(arg, t) for arg in args)))

    return one(one, two), gen


@intrinsic
def scaled(_: Any, total: Any, acc: Any, scales: Any, index: Any, stride: Any, weights: Any) -> Any:
    """total += float(acc) * scale of the token * weights: rounded after the first product, and once more."""
    tile = total

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        fma = b.module.declare_intrinsic("llvm.fma.v16f32", (), ir.FunctionType(floats.ir, [floats.ir] * 3))

        def one(token: int) -> Any:
            at = b.add(args[3], b.mul(args[4], ir.Constant(args[4].type, token)))
            scale = splat_value(b, load(context, b, sig.args[2], args[2], at, F32), floats.ir)
            value = b.fmul(b.sitofp(b.extract_value(args[1], token), floats.ir), scale)
            return b.call(fma, [value, args[5], b.extract_value(args[0], token)])

        return each(b, tile, one)

    return tile(total, acc, scales, types.intp, types.intp, floats), gen


@intrinsic
def shifted(_: Any, total: Any, sums: Any, index: Any, stride: Any, minima: Any) -> Any:
    """total += sum of the token's block * minima."""
    tile = total

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        fma = b.module.declare_intrinsic("llvm.fma.v16f32", (), ir.FunctionType(floats.ir, [floats.ir] * 3))

        def one(token: int) -> Any:
            at = b.add(args[2], b.mul(args[3], ir.Constant(args[3].type, token)))
            value = splat_value(b, load(context, b, sig.args[1], args[1], at, F32), floats.ir)
            return b.call(fma, [value, args[4], b.extract_value(args[0], token)])

        return each(b, tile, one)

    return tile(total, sums, types.intp, types.intp, floats), gen


@intrinsic
def store_rows(_: Any, array: Any, index: Any, stride: Any, tile: Any, unit: Any) -> Any:
    """Write 16 results of each token, times `unit`."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        factor = splat_value(b, args[4], floats.ir)
        for token in range(tile.tokens):
            at = b.add(args[1], b.mul(args[2], ir.Constant(args[2].type, token)))
            place = address(context, b, sig.args[0], args[0], at, floats.ir)
            b.store(b.fmul(b.extract_value(args[3], token), factor), place).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, tile, types.float32), gen


@intrinsic
def nibble_times(_: Any, array: Any, index: Any, which: Any, factor: Any) -> Any:
    """16 neighbouring bytes: their lower (0) or upper (1) four bits as floats, times a vector."""
    if not isinstance(which, types.IntegerLiteral):
        return None
    shift = 4 * int(which.literal_value)

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        narrow = ir.VectorType(I8, LANES)
        value = b.zext(load(context, b, sig.args[0], args[0], args[1], narrow), ints.ir)
        value = b.and_(b.lshr(value, ir.Constant(ints.ir, [shift] * LANES)), ir.Constant(ints.ir, [15] * LANES))
        return b.fmul(b.sitofp(value, floats.ir), args[3])

    return floats(array, types.intp, which, floats), gen


@intrinsic
def wide(_: Any, array: Any, index: Any, bfloat: Any) -> Any:
    """16 neighbours of float32, or of float16 or bfloat16 (both as uint16), as floats."""
    if not isinstance(bfloat, types.BooleanLiteral):
        return None
    upper, narrow = bool(bfloat.literal_value), array.dtype == types.uint16

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        if not narrow:
            return load(context, b, sig.args[0], args[0], args[1], floats.ir)
        if not upper:
            return b.fpext(load(context, b, sig.args[0], args[0], args[1], halves), floats.ir)
        value = b.zext(load(context, b, sig.args[0], args[0], args[1], ir.VectorType(I16, LANES)), ints.ir)
        return b.bitcast(b.shl(value, ir.Constant(ints.ir, [16] * LANES)), floats.ir)

    return floats(array, types.intp, bfloat), gen


@intrinsic
def times(_: Any, total: Any, weights: Any, x: Any, index: Any, stride: Any) -> Any:
    """total += weights * one float of each token."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        fma = b.module.declare_intrinsic("llvm.fma.v16f32", (), ir.FunctionType(floats.ir, [floats.ir] * 3))

        def one(token: int) -> Any:
            at = b.add(args[3], b.mul(args[4], ir.Constant(args[4].type, token)))
            value = splat_value(b, load(context, b, sig.args[2], args[2], at, F32), floats.ir)
            return b.call(fma, [value, args[1], b.extract_value(args[0], token)])

        return each(b, total, one)

    return total(total, floats, x, types.intp, types.intp), gen
