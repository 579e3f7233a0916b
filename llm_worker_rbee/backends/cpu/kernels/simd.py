"""SIMD vectors as Numba values: 64 bytes, 16 int32, float32 or float64, and tiles of them. One width on every machine.

A Numba type whose data model is an LLVM vector lives in registers like any local variable; LLVM splits 64 bytes into
the machine's registers (one with AVX-512, two with AVX2, four on Arm). A tile holds one vector for each token that a
kernel computes at once: an operation on a tile becomes one instruction per token, without a loop.

LLVM does not vectorise a plain loop that adds floats, as that would change the order of the sum; these operations are
vectors by type. Their arguments tell float32 from float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce, wraps
from typing import Any, NamedTuple

from .... import machine
from ..jit import cgutils, intrinsic, ir, models, register_model, types

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
LANES = 16
# A sum of integers that begins at the bits of this float is, up to 2**22, the bits of MAGIC + sum.
MAGIC, MAGIC_BITS = 1.5 * 2.0**23, 0x4B400000


class Vector(types.Type):  # type: ignore[misc]
    """A vector in registers."""

    def __init__(self, name: str, element: ir.Type, lanes: int) -> None:
        self.ir = ir.VectorType(element, lanes)
        super().__init__(name)


class Tile(types.Type):  # type: ignore[misc]
    """One vector per token."""

    def __init__(self, vector: Vector, tokens: int) -> None:
        self.ir = ir.ArrayType(vector.ir, tokens)
        super().__init__(f"{vector.name}*{tokens}")


@register_model(Vector)
@register_model(Tile)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, kind.ir)


u8x64, i32x16, f32x16 = Vector("u8x64", I8, 64), Vector("i32x16", I32, LANES), Vector("f32x16", F32, LANES)
f64x16 = Vector("f64x16", ir.DoubleType(), LANES)
# LLVM types without a Numba type; I32X16 is also the view of 64 bytes as words, for shifts
I8X16, F16X16, I32X16 = ir.VectorType(I8, LANES), ir.VectorType(F16, LANES), ir.VectorType(I32, LANES)
I16X16 = ir.VectorType(I16, LANES)


def literal_int(literal: Any) -> int:
    """Return the value of an integer that is known at compile time."""
    return int(literal.literal_value)


class ArrayValue(NamedTuple):
    """A contiguous array, as an emitter gets it."""

    data: Any  # LLVM pointer to its first byte
    dtype: Any  # Numba type of its elements


def emits(signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes an intrinsic of a function of an LLVM builder and arguments, which emits its value.

    `signature` is Numba's, or a function of the argument types that returns it. The emitter gets an array as
    `ArrayValue`, a literal (option `prefer_literal`) as its value, and everything else as an LLVM value.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            return emit(b, *(_unwrap(context, b, kind, value) for kind, value in zip(sig.args, args, strict=True)))

        @wraps(emit)
        def typed(_: Any, *kinds: Any) -> Any:
            return signature(*kinds) if callable(signature) else signature, gen

        return intrinsic(**options)(typed) if options else intrinsic(typed)

    return decorate


def _unwrap(context: Any, b: Any, kind: Any, value: Any) -> Any:
    if isinstance(kind, types.Array):
        return ArrayValue(b.bitcast(context.make_array(kind)(context, b, value).data, I8.as_pointer()), kind.dtype)
    return kind.literal_value if isinstance(kind, types.Literal) else value


def strided_index(b: Any, index: Any, stride: Any, times: int) -> Any:
    """Emit index + times * stride."""
    return b.add(index, b.mul(stride, ir.Constant(stride.type, times)))


def offset_index(b: Any, index: Any, more: int) -> Any:
    """Emit index + more."""
    return b.add(index, ir.Constant(index.type, more))


def element_pointer(b: Any, array: ArrayValue, index: Any, target: ir.Type) -> Any:
    """Emit a pointer to element `index`, as a pointer to `target`."""
    size = ir.Constant(index.type, array.dtype.bitwidth // 8)
    return b.bitcast(b.gep(array.data, [b.mul(index, size)]), target.as_pointer())


def emit_load(b: Any, array: ArrayValue, index: Any, target: ir.Type) -> Any:
    """Emit a load of `target` at element `index`, of any alignment."""
    value = b.load(element_pointer(b, array, index, target))
    value.align = 1
    return value


class _VolatileLoad(ir.instructions.LoadInstr):  # type: ignore[misc]
    """A load that is neither moved nor merged with another; llvmlite cannot emit one."""

    def descr(self, buf: Any) -> None:
        (place,) = self.operands
        buf.append(f"load volatile {self.type}, {place.type} {place.get_reference()}, align {self.align}\n")


def emit_reload(b: Any, place: Any) -> Any:
    """Emit a load from a pointer where it stands: LLVM would load once and copy registers, which costs more on Arm."""
    value = _VolatileLoad(b.block, place)
    value.align = 1
    b._insert(value)
    return value


def emit_load_floats(b: Any, array: ArrayValue, index: Any) -> Any:
    """Emit a load of 16 floats: float64 as they are; float32, float16 (as uint16) and int8 as float32."""
    if array.dtype == types.int8:
        return b.sitofp(b.sext(emit_load(b, array, index, I8X16), I32X16), f32x16.ir)
    if array.dtype == types.uint16:
        return b.fpext(emit_load(b, array, index, F16X16), f32x16.ir)
    return emit_load(b, array, index, _vector_of(array.dtype).ir)


def _vector_of(scalar: Any) -> Vector:
    return f64x16 if scalar == types.float64 else f32x16


def emit_splat(b: Any, scalar: Any, vector: ir.VectorType) -> Any:
    """Emit a vector with one value in every lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count))


def emit_store(b: Any, array: ArrayValue, index: Any, value: Any) -> None:
    """Emit a store at element `index`, of any alignment."""
    b.store(value, element_pointer(b, array, index, value.type)).align = 1


def emit_call(b: Any, name: str, result: ir.Type, *args: Any) -> Any:
    """Emit a call of an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return b.call(b.module.declare_intrinsic(name, (), kind), args)


def emit_vector_call(b: Any, name: str, *args: Any) -> Any:
    """Emit a call of an LLVM intrinsic on vectors of one type."""
    kind = args[0].type
    element = {"float": "f32", "double": "f64"}.get(str(kind.element), str(kind.element))
    return emit_call(b, f"llvm.{name}.v{kind.count}{element}", kind, *args)


def emit_fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """Emit x * y + z, rounded once."""
    return emit_vector_call(b, "fma", x, y, z)


def emit_shift_mask(b: Any, line: Any, shift: int, mask: int) -> Any:
    """Emit each byte shifted right (left if negative) and masked; bits from a neighbour byte are masked away."""
    if shift > 0 and mask == 255 >> shift:  # the top bits: one instruction where bytes can be shifted
        return b.lshr(line, ir.Constant(u8x64.ir, [shift] * 64))
    words = b.bitcast(line, I32X16)
    by = ir.Constant(I32X16, [abs(shift)] * LANES)
    moved = words if not shift else b.lshr(words, by) if shift > 0 else b.shl(words, by)
    return b.and_(b.bitcast(moved, u8x64.ir), ir.Constant(u8x64.ir, [mask] * 64))


def map_tile(b: Any, tokens: int, function: Callable[[int], Any]) -> Any:
    """Emit a tile whose vector of token t is function(t)."""
    vectors = [function(token) for token in range(tokens)]
    value: Any = ir.Constant(ir.ArrayType(vectors[0].type, tokens), ir.Undefined)
    for token, vector in enumerate(vectors):
        value = b.insert_value(value, vector, token)
    return value


class ExpConstants(NamedTuple):
    """What exp needs of a float type; its result is 0 below `low`, and it takes numbers up to `high`."""

    log2e: float
    ln2_high: float
    ln2_low: float
    degree: int  # of the series
    low: float
    high: float  # 0: not clamped
    mantissa_bits: int
    bias: int  # of the exponent


EXP_F32 = ExpConstants(1.44269504088896341, 0.693359375, -2.12194440e-4, 7, -87.0, 88.0, 23, 127)
EXP_F64 = ExpConstants(1.4426950408889634, 0.6931471803691238, 1.9082149292705877e-10, 11, -60.0, 0, 52, 1023)
# the coefficients of g in `gelu`, and of 2 ** x for |x| up to 1/2: fitted, so that the largest error is least
GELU_TAIL = (
    -1.1511502422713966,
    -0.4588980486063366,
    -0.053271787543582055,
    0.00800564977555348,
    -0.0007505140011163098,
    3.139276080108903e-05,
)
GELU_END = 6.0
EXP2_SERIES = (
    1.0,
    0.6931469775991352,
    0.24022242084971795,
    0.055507337433536114,
    0.00967151265816617,
    0.0013264727160215808,
)
MIN_EXPONENT_F64 = EXP_F64.low  # exp of less is negligible beside 1, however many there are


def _max_nan_second(b: Any, x: Any, y: Any) -> Any:
    """Emit x where x > y, else y: y also where x is NaN. One instruction on x86, unlike llvm.maxnum."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _nan_mask(b: Any, mask: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_unordered("uno", x, y), ir.Constant(x.type, [math.nan] * LANES), mask)


def _addend(b: Any, kind: ir.VectorType, value: float) -> Any:
    """Emit a constant that an FMA is added to: on Arm the sum overwrites it, and to load it again costs less than to
    copy it."""
    constant = ir.Constant(kind, [value] * LANES)
    return emit_reload(b, cgutils.global_constant(b.module, "addend", constant)) if machine.is_arm() else constant


def _polynomial(b: Any, x: Any, factors: Sequence[float]) -> Any:
    """Emit the sum of factors[n] * x ** n, of an even number of factors: in pairs, a chain of half the length."""
    square, highest_first = b.fmul(x, x), list(zip(factors[-2::-2], factors[-1::-2], strict=True))
    pairs = [
        emit_fma(b, ir.Constant(x.type, [odd] * LANES), x, _addend(b, x.type, even)) for even, odd in highest_first
    ]
    return reduce(lambda total, pair: emit_fma(b, total, square, pair), pairs)


def _exp(b: Any, x: Any) -> Any:
    k = EXP_F32 if x.type.element == F32 else EXP_F64
    integers = ir.VectorType(ir.IntType(32 if k is EXP_F32 else 64), LANES)

    def constant(value: float, kind: Any = x.type) -> ir.Constant:
        return ir.Constant(kind, [value] * LANES)

    tiny = b.fcmp_ordered("<", x, constant(k.low))
    value = b.select(tiny, constant(k.low), x)
    if k.high:
        value = b.select(b.fcmp_ordered("<", constant(k.high), value), constant(k.high), value)
    rounding = 1.5 * 2.0**k.mantissa_bits  # a number this large has no fraction, and its low bits are free
    shifted = emit_fma(b, value, constant(k.log2e), _addend(b, x.type, rounding))  # its low bits: the power, rounded
    power = b.fsub(shifted, constant(rounding))
    rest = emit_fma(b, power, constant(-k.ln2_high), value)
    rest = emit_fma(b, power, constant(-k.ln2_low), rest)
    series = constant(1.0 / math.factorial(k.degree))
    for n in range(k.degree - 1, -1, -1):
        series = emit_fma(b, series, rest, _addend(b, x.type, 1.0 / math.factorial(n)))
    exponent = b.add(b.bitcast(shifted, integers), constant(k.bias, integers))
    two = b.bitcast(b.shl(exponent, constant(k.mantissa_bits, integers)), x.type)
    return b.select(tiny, constant(0.0), b.fmul(series, two))


def _exp2(b: Any, shifted: Any, rest: Any) -> Any:
    """Emit 2 ** (n + rest) of float32, where `shifted` is MAGIC + n; the result must be a normal number."""
    exponent = b.shl(b.bitcast(shifted, I32X16), ir.Constant(I32X16, [23] * LANES))
    series = b.bitcast(_polynomial(b, rest, EXP2_SERIES), I32X16)
    return b.bitcast(b.add(series, exponent), f32x16.ir)


def _exp_nonpositive(b: Any, x: Any) -> Any:
    low, log2e, magic = (ir.Constant(x.type, [value] * LANES) for value in (EXP_F32.low, EXP_F32.log2e, MAGIC))
    shifted = emit_fma(b, x, log2e, _addend(b, x.type, MAGIC))  # its low bits: the power, rounded
    rest = emit_fma(b, x, log2e, b.fsub(magic, shifted))
    zero = ir.Constant(x.type, [0.0] * LANES)
    return b.select(b.fcmp_ordered("<", x, low), zero, _exp2(b, shifted, rest))


def _relu(b: Any, x: Any) -> Any:
    """Emit max(x, 0); NaN stays NaN."""
    zero = ir.Constant(x.type, [0.0] * LANES)
    return b.select(b.fcmp_ordered("<", x, zero), zero, x)


def _gelu(b: Any, x: Any) -> Any:
    """Emit x * Phi(x) = max(x, 0) - |x| * Phi(-|x|) of float32, where Phi(-z) = 2 ** (z * g(z) - 1), g a polynomial.

    Within 1e-7 and half a unit in the last place. From z = GELU_END on the last term is less than that.
    """

    def constant(value: float) -> ir.Constant:
        return ir.Constant(x.type, [value] * LANES)

    z = emit_vector_call(b, "fabs", x)
    z = b.select(b.fcmp_ordered("<", z, constant(GELU_END)), z, constant(GELU_END))
    power = emit_fma(b, z, _polynomial(b, z, GELU_TAIL), _addend(b, x.type, -1.0))
    shifted = b.fadd(power, constant(MAGIC))
    tail = _exp2(b, shifted, b.fadd(power, b.fsub(constant(MAGIC), shifted)))
    return emit_fma(b, b.fmul(z, constant(-1.0)), tail, _relu(b, x))


_operation = emits(lambda *vectors: vectors[0](*vectors))  # on vectors of one type
add = _operation(lambda b, x, y: b.fadd(x, y))
mul = _operation(lambda b, x, y: b.fmul(x, y))
div = _operation(lambda b, x, y: b.fdiv(x, y))
fma = _operation(emit_fma)
fabs = _operation(lambda b, x: emit_vector_call(b, "fabs", x))
rint = _operation(lambda b, x: emit_vector_call(b, "rint", x))  # halves to even
max_nan_second = _operation(_max_nan_second)
nan_mask = _operation(_nan_mask)  # `mask`, and NaN in each lane where x or y is NaN
# NaN stays NaN. Of float32 within 2 units in the last place up to 88; of float64 for x up to 0, within 1e-14 of it.
exp = _operation(_exp)
# Of float32 up to 0: within 2e-7 + 2e-8 |x| of it. Half of the work, for the weights of attention.
exp_nonpositive = _operation(_exp_nonpositive)
relu, gelu = _operation(_relu), _operation(_gelu)


@emits(lambda value: _vector_of(value)(value))
def splat(b: Any, value: Any) -> Any:
    """Return a vector with one float32 or float64 in every lane."""
    return emit_splat(b, value, ir.VectorType(value.type, LANES))


@emits(lambda array, index: _vector_of(array.dtype)(array, types.intp))
def load(b: Any, array: Any, index: Any) -> Any:
    """Load 16 float64, or 16 float32, float16 (as uint16) or int8 as float32."""
    return emit_load_floats(b, array, index)


@emits(lambda array, index: f64x16(array, types.intp))
def load_f64(b: Any, array: Any, index: Any) -> Any:
    """Load 16 float32 or float64 as float64."""
    value = emit_load_floats(b, array, index)
    return b.fpext(value, f64x16.ir) if array.dtype == types.float32 else value


# A mask has int32 words, whose bit i % 32 of word i // 32 says whether element i is allowed.
@emits(lambda array, index, mask: _vector_of(array.dtype)(array, types.intp, mask))
def load_allowed(b: Any, array: Any, index: Any, mask: Any) -> Any:
    """Load 16 float32 or float64 from a multiple of 16 on, with -inf for those that the mask does not allow."""
    return _emit_load_allowed(b, array, index, mask)


@emits(lambda array, index, mask: f64x16(array, types.intp, mask))
def load_allowed_f64(b: Any, array: Any, index: Any, mask: Any) -> Any:
    """Load the same as float64."""
    value = _emit_load_allowed(b, array, index, mask)
    return b.fpext(value, f64x16.ir) if array.dtype == types.float32 else value


def _emit_load_allowed(b: Any, array: ArrayValue, index: Any, mask: Any) -> Any:
    value = emit_load_floats(b, array, index)
    bits = b.bitcast(_emit_mask_bits(b, mask, index, I16), ir.VectorType(I1, LANES))
    return b.select(bits, value, ir.Constant(value.type, [-math.inf] * LANES))


def _emit_mask_bits(b: Any, mask: ArrayValue, index: Any, kind: ir.IntType) -> Any:
    """Emit a load of as many bits of the mask as `kind` has; `index` is a multiple of their number."""
    place = b.gep(mask.data, [b.lshr(index, ir.Constant(index.type, 3))])
    value = b.load(b.bitcast(place, kind.as_pointer()))
    value.align = 1
    return value


@emits(lambda mask, index: types.boolean(mask, types.intp))
def allows_any(b: Any, mask: Any, index: Any) -> Any:
    """Return whether one of 64 elements, from a multiple of 64 on, is allowed."""
    return b.icmp_unsigned("!=", _emit_mask_bits(b, mask, index, I64), ir.Constant(I64, 0))


@emits(lambda mask, index: types.boolean(mask, types.intp))
def is_allowed(b: Any, mask: Any, index: Any) -> Any:
    """Return whether one element is allowed."""
    bit = b.trunc(b.and_(index, ir.Constant(index.type, 7)), I8)
    return b.trunc(b.lshr(_emit_mask_bits(b, mask, index, I8), bit), I1)


@emits(lambda array, index, value: types.void(array, types.intp, value))
def store(b: Any, array: Any, index: Any, value: Any) -> None:
    """Write 16 floats, rounded to float16 if the array holds uint16; to int8 they must be whole numbers."""
    if array.dtype == types.uint16:
        value = b.fptrunc(value, F16X16)
    if array.dtype == types.int8:
        value = b.trunc(b.fptosi(value, I32X16), I8X16)
    emit_store(b, array, index, value)


def _reduce(b: Any, value: Any, combine: Any) -> Any:
    """Emit a reduction of all lanes: of float32 as a tree, of float64 one after the other, on every machine alike."""
    if value.type.element != F32:
        return reduce(combine, [b.extract_element(value, ir.Constant(I32, lane)) for lane in range(LANES)])
    count = LANES
    while count > 1:
        count //= 2
        undefined, kind = ir.Constant(value.type, ir.Undefined), ir.VectorType(I32, count)
        index = [ir.Constant(kind, list(range(first, first + count))) for first in (0, count)]
        value = combine(*(b.shuffle_vector(value, undefined, lanes) for lanes in index))
    return b.extract_element(value, ir.Constant(I32, 0))


def _scalar_of(vector: Any) -> Any:
    return (types.float32 if vector == f32x16 else types.float64)(vector)


@emits(_scalar_of)
def hsum(b: Any, x: Any) -> Any:
    """Return the sum of all lanes."""
    return _reduce(b, x, b.fadd)


@emits(_scalar_of)
def hmax(b: Any, x: Any) -> Any:
    """Return the largest lane."""
    return _reduce(b, x, partial(_max_nan_second, b))


@emits(f32x16(f32x16, types.int64, types.int64, types.float32))
def select_lanes(b: Any, x: Any, first: Any, last: Any, other: Any) -> Any:
    """Return lanes first .. last - 1 of x, and `other` elsewhere."""
    lanes = ir.Constant(I32X16, list(range(LANES)))
    low, high = (emit_splat(b, b.trunc(bound, I32), I32X16) for bound in (first, last))
    inside = b.and_(b.icmp_signed(">=", lanes, low), b.icmp_signed("<", lanes, high))
    return b.select(inside, x, emit_splat(b, other, f32x16.ir))


@emits(lambda array, index, bfloat: types.float32(array, types.intp, bfloat), prefer_literal=True)
def load_one_f16(b: Any, array: Any, index: Any, bfloat: bool) -> Any:
    """Load one float16 or bfloat16 (in an array of uint16) as a float."""
    bits = emit_load(b, array, index, I16)
    if bfloat:
        return b.bitcast(b.shl(b.zext(bits, I32), ir.Constant(I32, 16)), F32)
    return b.fpext(b.bitcast(bits, F16), F32)


@emits(lambda array, index, bfloat: f32x16(array, types.intp, bfloat), prefer_literal=True)
def load_as_f32(b: Any, array: Any, index: Any, bfloat: bool) -> Any:
    """Load 16 float32, or 16 float16 or bfloat16 (both as uint16), as floats."""
    if array.dtype != types.uint16 or not bfloat:
        return emit_load_floats(b, array, index)
    value = b.zext(emit_load(b, array, index, I16X16), I32X16)
    return b.bitcast(b.shl(value, ir.Constant(I32X16, [16] * LANES)), f32x16.ir)


@emits(lambda array, index: f32x16(array, types.intp))
def load_e4m3(b: Any, array: Any, index: Any) -> Any:
    """Load 16 e4m3 numbers as floats, times 2**-8: shifted, they are float16, whose bias is larger by 8."""
    shifted = b.shl(b.sext(emit_load(b, array, index, I8X16), I16X16), ir.Constant(I16X16, [7] * LANES))
    bits = b.and_(shifted, ir.Constant(I16X16, [0xBFFF] * LANES))  # without the sign's copy in the exponent
    return b.fpext(b.bitcast(bits, F16X16), f32x16.ir)


@emits(lambda total, part, vector: total(total, part, f32x16))
def add_scaled_tile(b: Any, total: Any, part: Any, vector: Any) -> Any:
    """Return total + part * vector."""

    def one(token: int) -> Any:
        return emit_fma(b, b.extract_value(part, token), vector, b.extract_value(total, token))

    return map_tile(b, total.type.count, one)


@emits(lambda tokens: Tile(f32x16, literal_int(tokens))(tokens), prefer_literal=True)
def zero_floats(b: Any, tokens: int) -> Any:
    """Return a float tile of zeros."""
    return map_tile(b, tokens, lambda _: ir.Constant(f32x16.ir, [0.0] * LANES))


def _accumulators(tokens: Any, magic: Any, sums: Any, index: Any, stride: Any, offset: Any) -> Any:
    return Tile(i32x16, literal_int(tokens))(tokens, magic, sums, types.intp, types.intp, offset)


@emits(_accumulators, prefer_literal=True)
def init_dot(b: Any, tokens: int, magic: bool, sums: Any, index: Any, stride: Any, offset: int) -> Any:
    """Return integer accumulators: in every lane minus `offset` times the token's element of an int32 array.

    With `magic` they are MAGIC_BITS, and `finish_dot` subtracts the rest.
    """
    if magic:
        place = cgutils.global_constant(b.module, "magic", ir.Constant(I32X16, [MAGIC_BITS] * LANES))

    def one(token: int) -> Any:
        if magic:
            return emit_reload(b, place)
        if offset == 0:
            return ir.Constant(I32X16, [0] * LANES)
        value = emit_load(b, sums, strided_index(b, index, stride, token), I32)
        return emit_splat(b, b.mul(value, ir.Constant(I32, -offset)), I32X16)

    return map_tile(b, tokens, one)


@emits(lambda x, y: x(x, y))
def add_tiles(b: Any, x: Any, y: Any) -> Any:
    """Return the sum of two integer tiles."""
    return map_tile(b, x.type.count, lambda token: b.add(b.extract_value(x, token), b.extract_value(y, token)))


def _finished(acc: Any, magic: Any, sums: Any, index: Any, stride: Any, offset: Any) -> Any:
    result = Tile(f32x16, acc.ir.count) if magic.literal_value else acc
    return result(acc, magic, sums, types.intp, types.intp, offset)


@emits(_finished, prefer_literal=True)
def finish_dot(b: Any, acc: Any, magic: bool, sums: Any, index: Any, stride: Any, offset: int) -> Any:
    """Return the sums that `init_dot` began: as they are, or with `magic` as floats, by a subtraction."""
    if not magic:
        return acc

    def one(token: int) -> Any:
        start = ir.Constant(I32, MAGIC_BITS)
        if offset:
            value = emit_load(b, sums, strided_index(b, index, stride, token), I32)
            start = b.add(start, b.mul(value, ir.Constant(I32, offset)))
        less = b.bitcast(emit_splat(b, start, I32X16), f32x16.ir)
        return b.fsub(b.bitcast(b.extract_value(acc, token), f32x16.ir), less)  # exact

    return map_tile(b, acc.type.count, one)


@emits(lambda total, acc, scales, *_: total(total, acc, scales, types.intp, types.intp, f32x16))
def add_scaled_dot(b: Any, total: Any, acc: Any, scales: Any, index: Any, stride: Any, weights: Any) -> Any:
    """Return total + (float(acc) * scale of the token) * weights: the first product is rounded, then one FMA."""

    def one(token: int) -> Any:
        scale = emit_splat(b, emit_load(b, scales, strided_index(b, index, stride, token), F32), f32x16.ir)
        value = b.extract_value(acc, token)
        value = value if value.type == f32x16.ir else b.sitofp(value, f32x16.ir)
        return emit_fma(b, b.fmul(value, scale), weights, b.extract_value(total, token))

    return map_tile(b, total.type.count, one)


@emits(lambda total, vector, x, index, stride: total(total, f32x16, x, types.intp, types.intp))
def fma_broadcast(b: Any, total: Any, vector: Any, x: Any, index: Any, stride: Any) -> Any:
    """Return total + vector * x[index + token * stride], one float of each token."""

    def one(token: int) -> Any:
        value = emit_load(b, x, strided_index(b, index, stride, token), F32)
        return emit_fma(b, emit_splat(b, value, f32x16.ir), vector, b.extract_value(total, token))

    return map_tile(b, total.type.count, one)


@emits(lambda tile, factor: f32x16(tile, types.float32))
def add_pair(b: Any, tile: Any, factor: Any) -> Any:
    """Return the sum of the two vectors of a tile, each times a factor first."""
    by = emit_splat(b, factor, f32x16.ir)
    return b.fadd(*(b.fmul(b.extract_value(tile, t), by) for t in range(2)))


@emits(lambda array, index, stride, tile, unit: types.void(array, types.intp, types.intp, tile, types.float32))
def store_tile(b: Any, array: Any, index: Any, stride: Any, tile: Any, unit: Any) -> None:
    """Write 16 results of each token, times `unit`."""
    factor = emit_splat(b, unit, f32x16.ir)
    for token in range(tile.type.count):
        at = strided_index(b, index, stride, token)
        emit_store(b, array, at, b.fmul(b.extract_value(tile, token), factor))


@emits(lambda array, index, which, factor: f32x16(array, types.intp, which, f32x16), prefer_literal=True)
def nibbles_times(b: Any, array: Any, index: Any, which: int, factor: Any) -> Any:
    """Return the lower (0) or upper (1) four bits of 16 adjacent bytes as floats, times a vector."""
    value = b.zext(emit_load(b, array, index, I8X16), I32X16)
    value = b.lshr(value, ir.Constant(I32X16, [4 * which] * LANES))
    value = b.and_(value, ir.Constant(I32X16, [15] * LANES))
    return b.fmul(b.sitofp(value, f32x16.ir), factor)
