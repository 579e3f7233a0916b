"""The layout of keys and values in the paged KV cache, and tiles of them in registers.

The array's type tells the KV type: float32, float16 (as uint16) or int8 with a scale per position and head. Loads give
floats whatever the type; an index counts elements from the start of the array's memory. A tile is rows x vectors:
total[r, v] is 16 lanes of vector v for row r. Prefetches bring nearer what the load of the same name would read: decode
waits for memory, not for arithmetic.

keys    (block, kv head, chunk of 16 positions, value, 16 positions)      scales (block, kv head, position)
values  (block, kv head, position, value)                                 scales (block, kv head, position)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..ops import KVLayer
from . import simd as f
from .jit import kernel
from .pointers import aligned, emit_prefetch, f32, i8, u16
from .simd import F16, F32, I8, LANES, Tile, f32x16, literal_int, map_tile

DTYPES = {"float32": np.float32, "float16": np.uint16, "int8": np.int8}
ARRAY_OF_TYPE: Any = {"float32": f32, "float16": u16, "int8": i8}  # how a task sees the cache
ADDRESSES_PER_LAYER = 4  # of layer_addresses: keys, values, their scales


def empty_layer(blocks: int, block_size: int, kv_heads: int, head_dim: int, kind: str) -> KVLayer:
    """Return zeroed keys and values of one layer; each head is padded to a multiple of 16 values."""
    assert block_size % LANES == 0, "keys lie in chunks of 16 positions"
    padded = padded_dim(head_dim)
    keys = aligned(np.zeros, (blocks, kv_heads, block_size // LANES, padded, LANES), DTYPES[kind])
    values = aligned(np.zeros, (blocks, kv_heads, block_size, padded), DTYPES[kind])
    if kind != "int8":
        return KVLayer(keys, values)
    return KVLayer(keys, values, *(aligned(np.zeros, (blocks, kv_heads, block_size), np.float32) for _ in range(2)))


def padded_dim(head_dim: int) -> int:
    """Return the values of a head in the cache: a multiple of 16."""
    return -(-head_dim // LANES) * LANES


def kv_type_of(layer: KVLayer) -> str:
    """Return the KV type of a layer."""
    return next(kind for kind, dtype in DTYPES.items() if layer.k.dtype == dtype)


def layer_addresses(layers: Sequence[KVLayer]) -> Any:
    """Return the addresses of each layer's keys, values and their scales; 0 if there are none."""
    arrays = [array for layer in layers for array in (layer.k, layer.v, layer.k_scales, layer.v_scales)]
    return np.array([0 if array is None else array.ctypes.data for array in arrays], np.int64)


@kernel
def chunk_index(blocks, chunk, chunks, kv_head, kv_heads):
    """Return the index of chunk `chunk` of a request's keys, counted in chunks."""
    if chunks == 1:  # the usual case, without a division
        return blocks[chunk] * kv_heads + kv_head
    return (blocks[chunk // chunks] * kv_heads + kv_head) * chunks + chunk % chunks


@kernel
def key_chunk(blocks, chunk, end, chunks, kv_head, kv_heads):
    """Return the index of one chunk; from `end` on, that of the last one."""
    return (chunk_index(blocks, min(chunk, end - 1), chunks, kv_head, kv_heads),)


@kernel
def two_key_chunks(blocks, chunk, end, chunks, kv_head, kv_heads):
    """Return the indices of two chunks from `chunk` on."""
    low, high = min(chunk, end - 1), min(chunk + 1, end - 1)
    return chunk_index(blocks, low, chunks, kv_head, kv_heads), chunk_index(blocks, high, chunks, kv_head, kv_heads)


@kernel
def four_key_chunks(blocks, chunk, end, chunks, kv_head, kv_heads):
    """Return the indices of four chunks from `chunk` on."""
    low = two_key_chunks(blocks, chunk, end, chunks, kv_head, kv_heads)
    high = two_key_chunks(blocks, chunk + 2, end, chunks, kv_head, kv_heads)
    return low[0], low[1], high[0], high[1]


@kernel
def value_index(blocks, p, size, kv_head, kv_heads):
    """Return the index of the value at position p of a request, counted in values."""
    return (blocks[p // size] * kv_heads + kv_head) * size + p % size


def _add_multiple(b: Any, index: Any, stride: Any, times: int) -> Any:
    return b.add(index, b.mul(stride, ir.Constant(stride.type, times)))


@intrinsic
def store_one(_: Any, array: Any, index: Any, value: Any) -> Any:
    """Write one float32 as the array's type; for int8 it must be a whole number."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> None:
        kind, value = sig.args[0].dtype, args[2]
        if kind == types.uint16:
            value = b.fptrunc(value, F16)
        if kind == types.int8:
            value = b.fptosi(value, I8)
        f.emit_store(context, b, sig.args[0], args[0], args[1], value)

    return types.void(array, types.intp, types.float32), gen


@intrinsic
def is_int8(_: Any, array: Any) -> Any:
    """Tell at compile time whether the array is int8 with scales."""
    answer = ir.Constant(ir.IntType(1), int(array.dtype == types.int8))
    return types.boolean(array), lambda context, b, sig, args: answer


@intrinsic(prefer_literal=True)
def zero_tile(_: Any, rows: Any, lines: Any) -> Any:
    """Return zeros for `rows` rows and one vector per chunk."""
    tile, zero = Tile(f32x16, literal_int(rows) * len(lines)), ir.Constant(f32x16.ir, [0.0] * LANES)
    return tile(rows, lines), lambda context, b, sig, args: map_tile(b, tile, lambda _: zero)


@intrinsic
def load_keys(_: Any, array: Any, lines: Any, length: Any, offset: Any) -> Any:
    """Load the vector at chunk * length + offset of every chunk."""
    tile = Tile(f32x16, len(lines))

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        def one(i: int) -> Any:
            index = b.add(b.mul(b.extract_value(args[1], i), args[2]), args[3])
            return f.emit_load_floats(context, b, sig.args[0], args[0], index)

        return map_tile(b, tile, one)

    return tile(array, lines, types.intp, types.intp), gen


@intrinsic(prefer_literal=True)
def load_contiguous(_: Any, array: Any, index: Any, vectors: Any) -> Any:
    """Load `vectors` adjacent vectors."""
    tile = Tile(f32x16, literal_int(vectors))

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        def one(i: int) -> Any:
            return f.emit_load_floats(context, b, sig.args[0], args[0], _add_constant(b, args[1], i * LANES))

        return map_tile(b, tile, one)

    return tile(array, types.intp, vectors), gen


def _add_constant(b: Any, index: Any, more: int) -> Any:
    return b.add(index, ir.Constant(index.type, more))


@intrinsic
def fma_outer(_: Any, total: Any, vectors: Any, x: Any, index: Any, stride: Any) -> Any:
    """Return total[r, v] + vectors[v] * x[index + r * stride]."""
    wide = vectors.tokens

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        factors = [
            f.emit_load(context, b, sig.args[2], args[2], _add_multiple(b, args[3], args[4], r), F32)
            for r in range(total.tokens // wide)
        ]
        splats = [f.emit_splat(b, factor, f32x16.ir) for factor in factors]

        def one(i: int) -> Any:
            return f.emit_fma(b, splats[i // wide], b.extract_value(args[1], i % wide), b.extract_value(args[0], i))

        return map_tile(b, total, one)

    return total(total, vectors, x, types.intp, types.intp), gen


@intrinsic
def key_factors(_: Any, keys: Any, scales: Any, lines: Any, unit: Any) -> Any:
    """Return the factors of products with these chunks of 16 keys: `unit`, times their scales if int8."""
    tile, scaled = Tile(f32x16, len(lines)), keys.dtype == types.int8

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        unit = f.emit_splat(b, args[3], f32x16.ir)

        def one(i: int) -> Any:
            index = b.mul(b.extract_value(args[2], i), ir.Constant(ir.IntType(64), LANES))
            return b.fmul(f.emit_load(context, b, sig.args[1], args[1], index, f32x16.ir), unit) if scaled else unit

        return map_tile(b, tile, one)

    return tile(keys, scales, lines, types.float32), gen


@intrinsic
def store_products(_: Any, array: Any, index: Any, stride: Any, total: Any, by: Any) -> Any:
    """Write array[index + r * stride + 16 v ...] = total[r, v] * by[v]."""
    wide = by.tokens

    def gen(context: Any, b: Any, sig: Any, args: Any) -> None:
        for i in range(total.tokens):
            value = b.fmul(b.extract_value(args[3], i), b.extract_value(args[4], i % wide))
            _store_vector(context, b, sig, args, i, wide, value)

    return types.void(array, types.intp, types.intp, total, by), gen


def _store_vector(context: Any, b: Any, sig: Any, args: Any, i: int, wide: int, value: Any) -> None:
    index = _add_constant(b, _add_multiple(b, args[1], args[2], i // wide), i % wide * LANES)
    f.emit_store(context, b, sig.args[0], args[0], index, value)


@intrinsic(prefer_literal=True)
def load_tile(_: Any, array: Any, index: Any, stride: Any, rows: Any, vectors: Any) -> Any:
    """Load the tile at array[index + r * stride + 16 v ...]."""
    wide = literal_int(vectors)
    tile = Tile(f32x16, literal_int(rows) * wide)

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        def one(i: int) -> Any:
            index = _add_constant(b, _add_multiple(b, args[1], args[2], i // wide), i % wide * LANES)
            return f.emit_load(context, b, sig.args[0], args[0], index, f32x16.ir)

        return map_tile(b, tile, one)

    return tile(array, types.intp, types.intp, rows, vectors), gen


@intrinsic(prefer_literal=True)
def store_tile(_: Any, array: Any, index: Any, stride: Any, total: Any, vectors: Any) -> Any:
    """Write the tile to array[index + r * stride + 16 v ...]."""
    wide = literal_int(vectors)

    def gen(context: Any, b: Any, sig: Any, args: Any) -> None:
        for i in range(total.tokens):
            _store_vector(context, b, sig, args, i, wide, b.extract_value(args[3], i))

    return types.void(array, types.intp, types.intp, total, vectors), gen


@intrinsic
def prefetch_keys(_: Any, array: Any, lines: Any, length: Any, offset: Any) -> Any:
    """Prefetch what `load_keys` would load."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> None:
        for i in range(len(lines)):
            index = b.add(b.mul(b.extract_value(args[1], i), args[2]), args[3])
            emit_prefetch(b, f.element_pointer(context, b, sig.args[0], args[0], index, I8))

    return types.void(array, lines, types.intp, types.intp), gen


@intrinsic(prefer_literal=True)
def prefetch_contiguous(_: Any, array: Any, index: Any, vectors: Any) -> Any:
    """Prefetch what `load_contiguous` would load."""
    count = literal_int(vectors)

    def gen(context: Any, b: Any, sig: Any, args: Any) -> None:
        for i in range(0, count * LANES, 64 * 8 // sig.args[0].dtype.bitwidth):
            index = _add_constant(b, args[1], i)
            emit_prefetch(b, f.element_pointer(context, b, sig.args[0], args[0], index, I8))

    return types.void(array, types.intp, vectors), gen
