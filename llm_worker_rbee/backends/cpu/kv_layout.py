"""What keys and values are kept as, and tiles of them in registers.

The array's type tells the kind: float32, float16 (as uint16) or int8 with a scale for each position and head. A tile is
rows x vectors: total[r, v] is 16 lanes of vector v for row r. Loads give floats whatever the kind; an index counts
elements from the start of the array's memory, so that a view with strides may be passed as it is.

keys    (block, kv head, chunk of 16 positions, value, 16 positions)      scales (block, kv head, position)
values  (block, kv head, position, value)                                 scales (block, kv head, position)

Keys and values asked for before they are needed: a token alone waits for memory, not for arithmetic.

What kv.py's loads of the same names would take is brought nearer; nothing is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..ops import KVLayer
from .jit import kernel
from .simd import F16, F32, I8, I32, LANES, address, each, float_tile, floats, halves, load, splat_value, words64

DTYPES = {"float32": np.float32, "float16": np.uint16, "int8": np.int8}
BYTES16 = ir.VectorType(I8, LANES)


def empty(blocks: int, block_size: int, kv_heads: int, head_dim: int, kind: str) -> KVLayer:
    """Room for keys and for values; each head is padded to a multiple of 16 values."""
    assert block_size % LANES == 0, "keys lie in chunks of 16 positions"
    padded = -(-head_dim // LANES) * LANES
    keys = zeros((blocks, kv_heads, block_size // LANES, padded, LANES), DTYPES[kind])
    values = zeros((blocks, kv_heads, block_size, padded), DTYPES[kind])
    if kind != "int8":
        return KVLayer(keys, values)
    return KVLayer(keys, values, *(zeros((blocks, kv_heads, block_size), np.float32) for _ in range(2)))


def kind_of(layer: KVLayer) -> str:
    """What it holds."""
    return next(kind for kind, dtype in DTYPES.items() if layer.k.dtype == dtype)


def places(layers: Sequence[KVLayer]) -> Any:
    """Addresses for the tasks: of each layer its keys, values and their scales; 0 where there are none."""
    arrays = [array for layer in layers for array in (layer.k, layer.v, layer.k_scales, layer.v_scales)]
    return np.array([0 if array is None else array.ctypes.data for array in arrays], np.int64)


def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """Zeros from an address that 64 divides: a vector that lies in two lines of a cache takes twice as long to load."""
    count = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.zeros(count + 64, np.uint8)
    first = -room.ctypes.data % 64
    return room[first : first + count].view(dtype).reshape(shape)


@kernel
def line(blocks, chunk, chunks, kv_head, kv_heads):
    """Where chunk `chunk` of a request's keys lies, counted in chunks."""
    if chunks == 1:  # as a rule, and without a division
        return blocks[chunk] * kv_heads + kv_head
    return (blocks[chunk // chunks] * kv_heads + kv_head) * chunks + chunk % chunks


@kernel
def one_line(blocks, chunk, end, chunks, kv_head, kv_heads):
    """One chunk; where there are none from `end` on, the last one."""
    return (line(blocks, min(chunk, end - 1), chunks, kv_head, kv_heads),)


@kernel
def two_lines(blocks, chunk, end, chunks, kv_head, kv_heads):
    """Two chunks, from `chunk` on."""
    low, high = min(chunk, end - 1), min(chunk + 1, end - 1)
    return line(blocks, low, chunks, kv_head, kv_heads), line(blocks, high, chunks, kv_head, kv_heads)


@kernel
def four_lines(blocks, chunk, end, chunks, kv_head, kv_heads):
    """Four chunks, from `chunk` on."""
    low = two_lines(blocks, chunk, end, chunks, kv_head, kv_heads)
    high = two_lines(blocks, chunk + 2, end, chunks, kv_head, kv_heads)
    return low[0], low[1], high[0], high[1]


@kernel
def value_row(blocks, p, size, kv_head, kv_heads):
    """Where the value at position p of a request lies, counted in values."""
    return (blocks[p // size] * kv_heads + kv_head) * size + p % size


def _fetch(context: Any, b: Any, kind: Any, array: Any, index: Any) -> Any:
    """16 neighbours as floats."""
    if kind.dtype == types.int8:
        return b.sitofp(b.sext(load(context, b, kind, array, index, BYTES16), words64), floats.ir)
    if kind.dtype == types.uint16:
        return b.fpext(load(context, b, kind, array, index, halves), floats.ir)
    return load(context, b, kind, array, index, floats.ir)


def _count(literal: Any) -> int | None:
    return int(literal.literal_value) if isinstance(literal, types.IntegerLiteral) else None


def _offset(b: Any, index: Any, stride: Any, times: int) -> Any:
    return b.add(index, b.mul(stride, ir.Constant(stride.type, times)))


@intrinsic
def poke(_: Any, array: Any, index: Any, value: Any) -> Any:
    """Write one float32, as what the array holds; for int8 it is a whole number already."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        kind, value = sig.args[0].dtype, args[2]
        if kind == types.uint16:
            value = b.fptrunc(value, F16)
        if kind == types.int8:
            value = b.fptosi(value, I8)
        b.store(value, address(context, b, sig.args[0], args[0], args[1], value.type)).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), gen


@intrinsic
def peek(_: Any, array: Any, index: Any) -> Any:
    """One float32."""
    return types.float32(array, types.intp), lambda context, b, sig, args: load(
        context, b, sig.args[0], args[0], args[1], F32
    )


@intrinsic
def is_bytes(_: Any, array: Any) -> Any:
    """Whether it is int8 with scales: known when the kernel is compiled."""
    answer = types.literal(array.dtype == types.int8)
    return types.boolean(array), lambda context, b, sig, args: ir.Constant(ir.IntType(1), int(answer.literal_value))


@intrinsic
def no_rows(_: Any, rows: Any, lines: Any) -> Any:
    """Zeros for so many rows and as many vectors as there are lines."""
    count = _count(rows)
    if count is None:
        return None
    tile, zero = float_tile(count * len(lines)), ir.Constant(floats.ir, [0.0] * LANES)
    return tile(rows, lines), lambda context, b, sig, args: each(b, tile, lambda _: zero)


@intrinsic
def at_lines(_: Any, array: Any, lines: Any, length: Any, offset: Any) -> Any:
    """The vector at line * length + offset of every line."""
    tile = float_tile(len(lines))

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        def one(i: int) -> Any:
            index = b.add(b.mul(b.extract_value(args[1], i), args[2]), args[3])
            return _fetch(context, b, sig.args[0], args[0], index)

        return each(b, tile, one)

    return tile(array, lines, types.intp, types.intp), gen


@intrinsic
def neighbours(_: Any, array: Any, index: Any, vectors: Any) -> Any:
    """So many vectors, one after the other."""
    count = _count(vectors)
    if count is None:
        return None
    tile = float_tile(count)

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return each(b, tile, lambda i: _fetch(context, b, sig.args[0], args[0], _plus(b, args[1], i * LANES)))

    return tile(array, types.intp, vectors), gen


def _plus(b: Any, index: Any, more: int) -> Any:
    return b.add(index, ir.Constant(index.type, more))


@intrinsic
def outer(_: Any, total: Any, vectors: Any, x: Any, index: Any, stride: Any) -> Any:
    """total[r, v] += vectors[v] * x[index + r * stride]."""
    wide = vectors.tokens

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        fma = b.module.declare_intrinsic("llvm.fma.v16f32", (), ir.FunctionType(floats.ir, [floats.ir] * 3))
        factors = [
            splat_value(b, load(context, b, sig.args[2], args[2], _offset(b, args[3], args[4], r), F32), floats.ir)
            for r in range(total.tokens // wide)
        ]

        def one(i: int) -> Any:
            return b.call(fma, [factors[i // wide], b.extract_value(args[1], i % wide), b.extract_value(args[0], i)])

        return each(b, total, one)

    return total(total, vectors, x, types.intp, types.intp), gen


@intrinsic
def factors(_: Any, keys: Any, scales: Any, lines: Any, unit: Any) -> Any:
    """What the products with these lines of 16 keys are multiplied by: `unit`, and their scales where they have any."""
    tile, scaled = float_tile(len(lines)), keys.dtype == types.int8

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        unit = splat_value(b, args[3], floats.ir)

        def one(i: int) -> Any:
            index = b.mul(b.extract_value(args[2], i), ir.Constant(ir.IntType(64), LANES))
            return b.fmul(load(context, b, sig.args[1], args[1], index, floats.ir), unit) if scaled else unit

        return each(b, tile, one)

    return tile(keys, scales, lines, types.float32), gen


@intrinsic
def put_products(_: Any, array: Any, index: Any, stride: Any, total: Any, by: Any) -> Any:
    """array[index + r * stride + 16 v ...] = total[r, v] * by[v]."""
    wide = by.tokens

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        for i in range(total.tokens):
            value = b.fmul(b.extract_value(args[3], i), b.extract_value(args[4], i % wide))
            _put(context, b, sig, args, i, wide, value)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, total, by), gen


def _put(context: Any, b: Any, sig: Any, args: Any, i: int, wide: int, value: Any) -> None:
    index = _plus(b, _offset(b, args[1], args[2], i // wide), i % wide * LANES)
    b.store(value, address(context, b, sig.args[0], args[0], index, floats.ir)).align = 1


@intrinsic
def get_rows(_: Any, array: Any, index: Any, stride: Any, rows: Any, vectors: Any) -> Any:
    """The tile at array[index + r * stride + 16 v ...]."""
    high, wide = _count(rows), _count(vectors)
    if high is None or wide is None:
        return None
    tile = float_tile(high * wide)

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        def one(i: int) -> Any:
            index = _plus(b, _offset(b, args[1], args[2], i // wide), i % wide * LANES)
            return load(context, b, sig.args[0], args[0], index, floats.ir)

        return each(b, tile, one)

    return tile(array, types.intp, types.intp, rows, vectors), gen


@intrinsic
def put_rows(_: Any, array: Any, index: Any, stride: Any, total: Any, vectors: Any) -> Any:
    """The way back."""
    wide = _count(vectors)
    if wide is None:
        return None

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        for i in range(total.tokens):
            _put(context, b, sig, args, i, wide, b.extract_value(args[3], i))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, total, vectors), gen


def _ask(context: Any, b: Any, kind: Any, array: Any, index: Any) -> None:
    """Ask for the line of the cache that holds an element, before it is needed."""
    place = address(context, b, kind, array, index, I8)
    function = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
    ask = b.module.declare_intrinsic("llvm.prefetch", (place.type,), function)
    b.call(ask, [place, *(ir.Constant(I32, value) for value in (0, 3, 1))])  # to read, to keep, data


@intrinsic
def ask_lines(_: Any, array: Any, lines: Any, length: Any, offset: Any) -> Any:
    """Ask for what `at_lines` would load."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        for i in range(len(lines)):
            index = b.add(b.mul(b.extract_value(args[1], i), args[2]), args[3])
            _ask(context, b, sig.args[0], args[0], index)
        return context.get_dummy_value()

    return types.void(array, lines, types.intp, types.intp), gen


@intrinsic
def ask_neighbours(_: Any, array: Any, index: Any, vectors: Any) -> Any:
    """Ask for what `neighbours` would load."""
    if not isinstance(vectors, types.IntegerLiteral):
        return None
    count = int(vectors.literal_value)

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        for i in range(0, count * LANES, 64 * 8 // sig.args[0].dtype.bitwidth):
            _ask(context, b, sig.args[0], args[0], b.add(args[1], ir.Constant(args[1].type, i)))
        return context.get_dummy_value()

    return types.void(array, types.intp, vectors), gen
