"""SIMD vectors as Numba values: 64 bytes, 16 int32, 16 float32, and tiles of them. One width on every machine.

A Numba type whose data model is an LLVM vector lives in registers like any local variable; LLVM splits 64 bytes into
the machine's registers (one with AVX-512, two with AVX2, four on Arm). A tile holds one vector for each token that a
kernel computes at once: an operation on a tile becomes one instruction per token, without a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from . import f16c_fallback

f16c_fallback.install()  # before any kernel converts float16
I8, I16, I32, F16, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()
LANES = 16


class Vector(types.Type):
    """A vector in registers."""

    def __init__(self, name: str, element: ir.Type, lanes: int) -> None:
        self.ir = ir.VectorType(element, lanes)
        super().__init__(name)


class Tile(types.Type):
    """One vector per token."""

    def __init__(self, vector: Vector, tokens: int) -> None:
        self.vector, self.tokens = vector, tokens
        self.ir = ir.ArrayType(vector.ir, tokens)
        super().__init__(f"{vector.name}*{tokens}")


@register_model(Vector)
@register_model(Tile)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, kind.ir)


u8x64, i32x16, f32x16 = Vector("u8x64", I8, 64), Vector("i32x16", I32, LANES), Vector("f32x16", F32, LANES)
# LLVM types without a Numba type; I32X16 is also the view of 64 bytes as words, for shifts
I8X16, F16X16, I32X16 = ir.VectorType(I8, LANES), ir.VectorType(F16, LANES), ir.VectorType(I32, LANES)


@cache
def int_tile(tokens: int) -> Tile:
    """Return the type of a tile of 16 int32 per token."""
    return Tile(i32x16, tokens)


@cache
def float_tile(tokens: int) -> Tile:
    """Return the type of a tile of 16 float32 per token."""
    return Tile(f32x16, tokens)


def literal_int(literal: Any) -> int | None:
    """Return the value of an integer that is known at compile time, or None."""
    return int(literal.literal_value) if isinstance(literal, types.IntegerLiteral) else None


def element_pointer(context: Any, b: Any, array_type: Any, array: Any, index: Any, target: ir.Type) -> Any:
    """Emit a pointer to element `index` of a contiguous array, as a pointer to `target`."""
    data = context.make_array(array_type)(context, b, array).data
    size = ir.Constant(index.type, array_type.dtype.bitwidth // 8)
    return b.bitcast(b.gep(b.bitcast(data, I8.as_pointer()), [b.mul(index, size)]), target.as_pointer())


def emit_load(context: Any, b: Any, array_type: Any, array: Any, index: Any, target: ir.Type) -> Any:
    """Emit a load of `target` at element `index`, of any alignment."""
    value = b.load(element_pointer(context, b, array_type, array, index, target))
    value.align = 1
    return value


def emit_load_floats(context: Any, b: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Emit a load of 16 float32, float16 (as uint16) or int8 as floats."""
    if array_type.dtype == types.int8:
        return b.sitofp(b.sext(emit_load(context, b, array_type, array, index, I8X16), I32X16), f32x16.ir)
    if array_type.dtype == types.uint16:
        return b.fpext(emit_load(context, b, array_type, array, index, F16X16), f32x16.ir)
    return emit_load(context, b, array_type, array, index, f32x16.ir)


def emit_splat(b: Any, scalar: Any, vector: ir.VectorType) -> Any:
    """Emit a vector with one value in every lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count))


def emit_fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """Emit x * y + z of 16 floats, rounded once."""
    kind = ir.FunctionType(f32x16.ir, [f32x16.ir] * 3)
    return b.call(b.module.declare_intrinsic("llvm.fma.v16f32", (), kind), [x, y, z])


def emit_shift_mask(b: Any, line: Any, shift: int, mask: int) -> Any:
    """Emit each byte shifted right (left if negative) and masked; bits from a neighbour byte are masked away."""
    if shift > 0 and mask == 255 >> shift:  # the top bits: one instruction where bytes can be shifted
        return b.lshr(line, ir.Constant(u8x64.ir, [shift] * 64))
    words = b.bitcast(line, I32X16)
    by = ir.Constant(I32X16, [abs(shift)] * LANES)
    moved = words if not shift else b.lshr(words, by) if shift > 0 else b.shl(words, by)
    return b.and_(b.bitcast(moved, u8x64.ir), ir.Constant(u8x64.ir, [mask] * 64))


def map_tile(b: Any, tile: Tile, function: Callable[[int], Any]) -> Any:
    """Emit a tile whose vector of token t is function(t)."""
    value: Any = ir.Constant(tile.ir, ir.Undefined)
    for token in range(tile.tokens):
        value = b.insert_value(value, function(token), token)
    return value


def _load_of_token(context: Any, b: Any, array: tuple[Any, Any], index: Any, stride: Any, token: int, kind: Any) -> Any:
    """Emit element index + token * stride of an array (its type, its value), a scalar."""
    at = b.add(index, b.mul(stride, ir.Constant(stride.type, token)))
    return emit_load(context, b, *array, at, kind)


@intrinsic
def load_f16x16(_: Any, array: Any, index: Any) -> Any:
    """Load 16 float16 (in an array of uint16) as floats."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.fpext(emit_load(context, b, sig.args[0], args[0], args[1], F16X16), f32x16.ir)

    return f32x16(array, types.intp), gen


@intrinsic
def load_one_f16(_: Any, array: Any, index: Any, bfloat: Any) -> Any:
    """Load one float16 or bfloat16 (in an array of uint16) as a float."""
    if not isinstance(bfloat, types.BooleanLiteral):
        return None
    is_bfloat = bool(bfloat.literal_value)

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        bits = emit_load(context, b, sig.args[0], args[0], args[1], I16)
        if is_bfloat:
            return b.bitcast(b.shl(b.zext(bits, I32), ir.Constant(I32, 16)), F32)
        return b.fpext(b.bitcast(bits, F16), F32)

    return types.float32(array, types.intp, bfloat), gen


@intrinsic
def load_as_f32(_: Any, array: Any, index: Any, bfloat: Any) -> Any:
    """Load 16 float32, or 16 float16 or bfloat16 (both as uint16), as floats."""
    if not isinstance(bfloat, types.BooleanLiteral):
        return None
    is_bfloat, narrow = bool(bfloat.literal_value), array.dtype == types.uint16

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        if not narrow:
            return emit_load(context, b, sig.args[0], args[0], args[1], f32x16.ir)
        if not is_bfloat:
            return b.fpext(emit_load(context, b, sig.args[0], args[0], args[1], F16X16), f32x16.ir)
        value = b.zext(emit_load(context, b, sig.args[0], args[0], args[1], ir.VectorType(I16, LANES)), i32x16.ir)
        return b.bitcast(b.shl(value, ir.Constant(i32x16.ir, [16] * LANES)), f32x16.ir)

    return f32x16(array, types.intp, bfloat), gen


@intrinsic
def zero_floats(_: Any, tokens: Any) -> Any:
    """Return a float tile of zeros."""
    count = literal_int(tokens)
    if count is None:
        return None
    tile = float_tile(count)
    zero = ir.Constant(f32x16.ir, [0.0] * LANES)
    return tile(tokens), lambda context, b, sig, args: map_tile(b, tile, lambda _: zero)


@intrinsic
def init_dot(_: Any, tokens: Any, sums: Any, index: Any, stride: Any, offset: Any) -> Any:
    """Return integer accumulators: in every lane minus `offset` times the token's element of an int32 array."""
    count, times = literal_int(tokens), literal_int(offset)
    if count is None or times is None:
        return None
    tile = int_tile(count)

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        if times == 0:
            return map_tile(b, tile, lambda _: ir.Constant(i32x16.ir, [0] * LANES))

        def one(token: int) -> Any:
            value = _load_of_token(context, b, (sig.args[1], args[1]), args[2], args[3], token, I32)
            return emit_splat(b, b.mul(value, ir.Constant(I32, -times)), i32x16.ir)

        return map_tile(b, tile, one)

    return tile(tokens, sums, types.intp, types.intp, offset), gen


@intrinsic
def add_tiles(_: Any, x: Any, y: Any) -> Any:
    """Return the sum of two integer tiles."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return map_tile(b, x, lambda t: b.add(*(b.extract_value(arg, t) for arg in args)))

    return x(x, y), gen


@intrinsic
def add_scaled_dot(_: Any, total: Any, acc: Any, scales: Any, index: Any, stride: Any, weights: Any) -> Any:
    """Return total + (float(acc) * scale of the token) * weights: the first product is rounded, then one FMA."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        def one(token: int) -> Any:
            scale = _load_of_token(context, b, (sig.args[2], args[2]), args[3], args[4], token, F32)
            scale = emit_splat(b, scale, f32x16.ir)
            value = b.fmul(b.sitofp(b.extract_value(args[1], token), f32x16.ir), scale)
            return emit_fma(b, value, args[5], b.extract_value(args[0], token))

        return map_tile(b, total, one)

    return total(total, acc, scales, types.intp, types.intp, f32x16), gen


@intrinsic
def fma_broadcast(_: Any, total: Any, vector: Any, x: Any, index: Any, stride: Any) -> Any:
    """Return total + vector * x[index + token * stride], one float of each token."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        def one(token: int) -> Any:
            value = _load_of_token(context, b, (sig.args[2], args[2]), args[3], args[4], token, F32)
            return emit_fma(b, emit_splat(b, value, f32x16.ir), args[1], b.extract_value(args[0], token))

        return map_tile(b, total, one)

    return total(total, f32x16, x, types.intp, types.intp), gen


@intrinsic
def store_tile(_: Any, array: Any, index: Any, stride: Any, tile: Any, unit: Any) -> Any:
    """Write 16 results of each token, times `unit`."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        factor = emit_splat(b, args[4], f32x16.ir)
        for token in range(tile.tokens):
            at = b.add(args[1], b.mul(args[2], ir.Constant(args[2].type, token)))
            place = element_pointer(context, b, sig.args[0], args[0], at, f32x16.ir)
            b.store(b.fmul(b.extract_value(args[3], token), factor), place).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, tile, types.float32), gen


@intrinsic
def nibbles_times(_: Any, array: Any, index: Any, which: Any, factor: Any) -> Any:
    """Return the lower (0) or upper (1) four bits of 16 adjacent bytes as floats, times a vector."""
    half = literal_int(which)
    if half is None:
        return None

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        value = b.zext(emit_load(context, b, sig.args[0], args[0], args[1], I8X16), i32x16.ir)
        value = b.lshr(value, ir.Constant(i32x16.ir, [4 * half] * LANES))
        value = b.and_(value, ir.Constant(i32x16.ir, [15] * LANES))
        return b.fmul(b.sitofp(value, f32x16.ir), args[3])

    return f32x16(array, types.intp, which, f32x16), gen
