"""The layout of keys and values in the paged KV cache, and tiles of them in registers.

The array's type tells the KV type: float32, float16 (as uint16) or int8 with a scale per position and head. Loads give
floats whatever the type; an index counts elements from the start of the array's memory. A tile is rows x vectors:
total[r, v] is 16 lanes of vector v for row r. Prefetches bring nearer what the load of the same name would read: decode
waits for memory, not for arithmetic.

keys    (block, kv head, chunk of 16 positions, value, 16 positions)      scales (block, kv head, position)
values  (block, kv head, position, value)                                 scales (block, kv head, position)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...cpu_info import INSTRUCTION_SETS
from ...ops import KVLayer, LayerCache, StateLayer
from ..jit import ir, kernel, types
from . import simd as f
from .dot_int8 import ISA
from .pointers import aligned, emit_prefetch, f32, i8, u16
from .simd import F16, F32, I8, LANES, Tile, emits, f32x16, literal_int, map_tile

DTYPES = {"float32": np.float32, "float16": np.uint16, "int8": np.int8}
KV_TYPES = {np.dtype(dtype): kind for kind, dtype in DTYPES.items()}
ARRAY_OF_TYPE: Any = {"float32": f32, "float16": u16, "int8": i8}  # how a task sees the cache
FMA_BY_LANE = INSTRUCTION_SETS[ISA].fma_by_lane
FMA_STEPS = 4  # values of a head that are multiplied together; heads are padded to a multiple of it
ADDRESSES_PER_LAYER = 4  # of layer_addresses: keys, values, their scales; or inputs of a convolution, matrices


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
    return KV_TYPES[layer.k.dtype]


def layer_addresses(layers: Sequence[LayerCache]) -> Any:
    """Return the addresses of each layer's keys, values and their scales, or of its states; 0 if there are none."""

    def arrays(layer: LayerCache) -> tuple[Any, ...]:
        if isinstance(layer, StateLayer):
            return layer.conv, layer.matrix, None, None
        return layer.k, layer.v, layer.k_scales, layer.v_scales

    found = [array for layer in layers for array in arrays(layer)]
    return np.array([0 if array is None else array.ctypes.data for array in found], np.int64)


@kernel
def chunk_index(blocks, chunk, chunks, kv_head, kv_heads):
    """Return the index of chunk `chunk` of a request's keys, counted in chunks."""
    if chunks == 1:  # the usual case, without a division
        return blocks[chunk] * kv_heads + kv_head
    return (blocks[chunk // chunks] * kv_heads + kv_head) * chunks + chunk % chunks


@kernel
def key_chunk(blocks, chunk, end, chunks, kv_head, kv_heads):
    """Return the index of one chunk; from `end` on, the last chunk's."""
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


@emits(lambda array, index, value: types.void(array, types.intp, types.float32))
def store_one(b: Any, array: Any, index: Any, value: Any) -> None:
    """Write one float32 as the array's type; for int8 it must be a whole number."""
    if array.dtype == types.uint16:
        value = b.fptrunc(value, F16)
    if array.dtype == types.int8:
        value = b.fptosi(value, I8)
    f.emit_store(b, array, index, value)


@emits(lambda array: types.boolean(array))
def is_int8(b: Any, array: Any) -> Any:
    """Tell at compile time whether the array is int8 with scales."""
    return ir.Constant(ir.IntType(1), int(array.dtype == types.int8))


@emits(lambda size: Tile(f32x16, literal_int(size))(size), prefer_literal=True)
def zero_tile(b: Any, size: int) -> Any:
    """Return a tile of `size` vectors of zeros."""
    return map_tile(b, size, lambda _: ir.Constant(f32x16.ir, [0.0] * LANES))


def _in_chunk(b: Any, lines: Any, i: int, length: Any, offset: Any) -> Any:
    """Emit the index at `offset` of chunk i."""
    return b.add(b.mul(b.extract_value(lines, i), length), offset)


def _add_constant(b: Any, index: Any, more: int) -> Any:
    return b.add(index, ir.Constant(index.type, more))


def _emit_factors(b: Any, x: Any, index: Any, stride: Any, rows: int, steps: int) -> list[list[Any]]:
    """Emit factors[step][r], x[index + step + r * stride] in every lane.

    Where an instruction multiplies by one lane of a vector, adjacent factors are loaded as a vector: a broadcast costs
    as much as a product there, and a load nothing.
    """
    starts = [f.strided_index(b, index, stride, r) for r in range(rows)]
    if not FMA_BY_LANE or steps == 1:
        return [
            [f.emit_splat(b, f.emit_load(b, x, _add_constant(b, start, k), F32), f32x16.ir) for start in starts]
            for k in range(steps)
        ]
    vector = ir.VectorType(F32, steps)
    loaded, lanes = [f.emit_load(b, x, start, vector) for start in starts], ir.VectorType(ir.IntType(32), LANES)
    undefined = ir.Constant(vector, ir.Undefined)
    return [[b.shuffle_vector(one, undefined, ir.Constant(lanes, [k] * LANES)) for one in loaded] for k in range(steps)]


def _emit_outer(b: Any, total: Any, load: Callable[[int, int], Any], factors: list[list[Any]]) -> Any:
    """Emit total[r, v] + the sum over steps of load(step, v) * factors[step][r], added step by step."""
    sums = [b.extract_value(total, i) for i in range(total.type.count)]
    wide = len(sums) // len(factors[0])
    for k, row_factors in enumerate(factors):
        vectors = [load(k, v) for v in range(wide)]
        sums = [f.emit_fma(b, row_factors[i // wide], vectors[i % wide], one) for i, one in enumerate(sums)]
    return map_tile(b, len(sums), lambda i: sums[i])


def _fma_keys(total: Any, keys: Any, lines: Any, length: Any, offset: Any, x: Any, *_: Any) -> Any:
    return total(total, keys, lines, types.intp, types.intp, x, types.intp, types.intp)


@emits(_fma_keys)
def fma_keys(
    b: Any, total: Any, keys: Any, lines: Any, length: Any, offset: Any, x: Any, index: Any, stride: Any
) -> Any:
    """Return total[r, v] + keys[lines[v] * length + offset + 16 k ...] * x[index + k + r * stride], k = 0 .. 3."""
    wide = lines.type.count
    factors = _emit_factors(b, x, index, stride, total.type.count // wide, FMA_STEPS)
    starts = [_in_chunk(b, lines, v, length, offset) for v in range(wide)]
    return _emit_outer(
        b, total, lambda k, v: f.emit_load_floats(b, keys, _add_constant(b, starts[v], k * LANES)), factors
    )


def _fma_rows(total: Any, y: Any, at: Any, pitch: Any, x: Any, index: Any, stride: Any, rows: Any, steps: Any) -> Any:
    return total(total, y, types.intp, types.intp, x, types.intp, types.intp, rows, steps)


@emits(_fma_rows, prefer_literal=True)
def fma_rows(
    b: Any, total: Any, y: Any, at: Any, pitch: Any, x: Any, index: Any, stride: Any, rows: int, steps: int
) -> Any:
    """Return total[r, v] + y[at + k * pitch + 16 v ...] * x[index + k + r * stride], k = 0 .. steps - 1."""
    starts = [f.strided_index(b, at, pitch, k) for k in range(steps)]
    factors = _emit_factors(b, x, index, stride, rows, steps)
    return _emit_outer(b, total, lambda k, v: f.emit_load_floats(b, y, _add_constant(b, starts[k], v * LANES)), factors)


@emits(lambda keys, scales, lines, unit: Tile(f32x16, len(lines))(keys, scales, lines, types.float32))
def key_factors(b: Any, keys: Any, scales: Any, lines: Any, unit: Any) -> Any:
    """Return the factors of products with these chunks of 16 keys: `unit`, times their scales if int8."""
    factor = f.emit_splat(b, unit, f32x16.ir)

    def one(i: int) -> Any:
        if keys.dtype != types.int8:
            return factor
        index = b.mul(b.extract_value(lines, i), ir.Constant(ir.IntType(64), LANES))
        return b.fmul(f.emit_load(b, scales, index, f32x16.ir), factor)

    return map_tile(b, lines.type.count, one)


@emits(lambda array, index, stride, total, by: types.void(array, types.intp, types.intp, total, by))
def store_products(b: Any, array: Any, index: Any, stride: Any, total: Any, by: Any) -> None:
    """Write array[index + r * stride + 16 v ...] = total[r, v] * by[v]."""
    wide = by.type.count
    for i in range(total.type.count):
        value = b.fmul(b.extract_value(total, i), b.extract_value(by, i % wide))
        f.emit_store(b, array, _in_tile(b, index, stride, i, wide), value)


def _in_tile(b: Any, index: Any, stride: Any, i: int, wide: int) -> Any:
    """Emit the index of vector i of a tile with `wide` vectors in a row."""
    return _add_constant(b, f.strided_index(b, index, stride, i // wide), i % wide * LANES)


def _tile_at(array: Any, index: Any, stride: Any, rows: Any, vectors: Any) -> Any:
    return Tile(f32x16, literal_int(rows) * literal_int(vectors))(array, types.intp, types.intp, rows, vectors)


@emits(_tile_at, prefer_literal=True)
def load_tile(b: Any, array: Any, index: Any, stride: Any, rows: int, vectors: int) -> Any:
    """Load the tile at array[index + r * stride + 16 v ...]."""

    def one(i: int) -> Any:
        return f.emit_load(b, array, _in_tile(b, index, stride, i, vectors), f32x16.ir)

    return map_tile(b, rows * vectors, one)


@emits(
    lambda array, index, stride, total, vectors: types.void(array, types.intp, types.intp, total, vectors),
    prefer_literal=True,
)
def store_tile(b: Any, array: Any, index: Any, stride: Any, total: Any, vectors: int) -> None:
    """Write the tile to array[index + r * stride + 16 v ...]."""
    for i in range(total.type.count):
        f.emit_store(b, array, _in_tile(b, index, stride, i, vectors), b.extract_value(total, i))


@emits(lambda array, lines, length, offset: types.void(array, lines, types.intp, types.intp))
def prefetch_keys(b: Any, array: Any, lines: Any, length: Any, offset: Any) -> None:
    """Prefetch what `fma_keys` would load."""
    for i in range(lines.type.count):
        start = _in_chunk(b, lines, i, length, offset)
        for ahead in range(0, FMA_STEPS * LANES, 64 * 8 // array.dtype.bitwidth):
            emit_prefetch(b, f.element_pointer(b, array, _add_constant(b, start, ahead), I8))


@emits(lambda array, index, vectors: types.void(array, types.intp, vectors), prefer_literal=True)
def prefetch_contiguous(b: Any, array: Any, index: Any, vectors: int) -> None:
    """Prefetch `vectors` adjacent vectors."""
    for i in range(0, vectors * LANES, 64 * 8 // array.dtype.bitwidth):
        emit_prefetch(b, f.element_pointer(b, array, _add_constant(b, index, i), I8))
