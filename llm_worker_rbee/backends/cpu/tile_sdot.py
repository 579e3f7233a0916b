"""Products of unpacked weights with `sdot`, the dot product of 64-bit Arm: tiles of 8 rows x 4 tokens.

The pipes of a Neoverse-N1 do two vector instructions a cycle beside loads, so loads are free: what would take an
instruction (a broadcast, a copy, a product of constants) is read from the panel instead. A block of a panel of four
tokens has 256 bytes:

      0  int8     values of each token, 32 columns
    128  float32  -MAGIC * scale of each token, in four lanes
    192  float32  scale of each token
    208  float32  scaled sum of each token
    224  float32  scaled sums of columns 0..15 of each token, then of columns 16..31

An integer sum begins at the bits of MAGIC and ends as those of the float MAGIC + sum. fma(MAGIC + sum, scale, -MAGIC *
scale) is sum * scale, rounded once, as a scale has 22 bits: one instruction instead of a conversion (which takes two
turns of one pipe) and a product.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .simd import (
    F32,
    I8,
    I32,
    MAGIC,
    MAGIC_BITS,
    ArrayValue,
    Tile,
    Vector,
    element_pointer,
    emit_call,
    emit_fma,
    emit_load,
    emit_reload,
    emit_splat,
    emit_store,
    emits,
    map_tile,
)
from .tile_kernel import TileKernel

TOKENS, ROW_VECTORS = 4, 2  # of a tile
PANEL_BYTES, MINUS_MAGIC, SCALE, SUM, SUM16 = 256, 128, 192, 208, 224
SCALES_PER_BLOCK = HAS_MINIMUM = None  # set for each variant
I8X16, I32X4, F32X4 = ir.VectorType(I8, 16), ir.VectorType(I32, 4), ir.VectorType(F32, 4)
totals8 = Tile(Vector("f32x4", F32, 4), ROW_VECTORS * TOKENS)  # row vector after row vector
CELLS = [(row, token) for row in range(ROW_VECTORS) for token in range(TOKENS)]


def _plus(b: Any, index: Any, more: int) -> Any:
    return b.add(index, ir.Constant(index.type, more))


def _lane(b: Any, vector: Any, lane: int) -> Any:
    """Emit one lane in every lane: the instructions take it from the register."""
    lanes = ir.Constant(ir.VectorType(I32, vector.type.count), [lane] * vector.type.count)
    return b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), lanes)


def _store_token(b: Any, panel: Any, at: Any, token: Any, values: Any, scale: Any, total: Any, totals: Any) -> None:
    def put(first: int, size: int, value: Any) -> None:
        where = b.add(_plus(b, at, first), b.mul(token, ir.Constant(token.type, size)))
        emit_store(b, panel, where, value)

    put(0, 32, values)
    put(MINUS_MAGIC, 16, emit_splat(b, b.fmul(scale, ir.Constant(F32, -MAGIC)), F32X4))
    put(SCALE, 4, scale)
    put(SUM, 4, total)
    for half in range(2):
        put(SUM16 + 16 * half, 4, b.extract_element(totals, ir.Constant(I32, half)))


@emits(lambda totals, at, stride: totals8(totals, types.intp, types.intp))
def load_totals(b: Any, totals: Any, at: Any, stride: Any) -> Any:
    """Return the totals of 8 rows x 4 tokens."""

    def one(cell: int) -> Any:
        row, token = CELLS[cell]
        where = b.add(_plus(b, at, 4 * row), b.mul(stride, ir.Constant(stride.type, token)))
        return emit_load(b, totals, where, F32X4)

    return map_tile(b, len(CELLS), one)


@emits(lambda totals, at, stride, tile: types.void(totals, types.intp, types.intp, tile))
def store_totals(b: Any, totals: Any, at: Any, stride: Any, tile: Any) -> None:
    """Write them back."""
    for cell, (row, token) in enumerate(CELLS):
        where = b.add(_plus(b, at, 4 * row), b.mul(stride, ir.Constant(stride.type, token)))
        emit_store(b, totals, where, b.extract_value(tile, cell))


def _emit_dots(b: Any, weights: Any, at: Any, panel: Any, first: Any, quads: range) -> dict[tuple[int, int], Any]:
    """Emit MAGIC + the integer sums over some quads of columns."""
    start = cgutils.global_constant(b.module, "magic", ir.Constant(I32X4, [MAGIC_BITS] * 4))
    acc = {cell: emit_reload(b, start) for cell in CELLS}
    for quad in quads:
        if quad % 4 == 0:
            places = [element_pointer(b, panel, _plus(b, first, 32 * t + 4 * quad), I8X16) for t in range(TOKENS)]
            x = [b.bitcast(emit_reload(b, place), I32X4) for place in places]
        w = [emit_load(b, weights, _plus(b, at, 64 * quad + 16 * row), I8X16) for row in range(ROW_VECTORS)]
        for token in range(TOKENS):
            four = b.bitcast(_lane(b, x[token], quad % 4), I8X16)
            for row in range(ROW_VECTORS):
                name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
                acc[row, token] = emit_call(b, name, I32X4, acc[row, token], w[row], four)
    return {cell: b.bitcast(value, F32X4) for cell, value in acc.items()}


def _tile_signature(total: Any, scales_per_block: Any, has_minimum: Any, *rest: Any) -> Any:
    weights, _, scales, minima, _, panel, _ = rest
    index = types.intp
    return total(total, scales_per_block, has_minimum, weights, index, scales, minima, index, panel, index)


@emits(_tile_signature, prefer_literal=True)
def add_block(
    b: Any, total: Any, scales_per_block: int, has_minimum: bool, weights: Any, line: Any, scales: Any, minima: Any,
    scale: Any, panel: Any, at: Any,
) -> Any:  # fmt: skip
    """Return total + 8 rows of a block . the activations of 4 tokens."""
    value = [b.extract_value(total, cell) for cell in range(len(CELLS))]

    def near(first: int) -> Any:
        return emit_load(b, panel, _plus(b, at, first), F32X4)

    def row_vectors(array: ArrayValue, half: int) -> list[Any]:
        return [emit_load(b, array, _plus(b, scale, 16 * half + 4 * row), F32X4) for row in range(ROW_VECTORS)]

    for half in range(scales_per_block):
        quads = range(8) if scales_per_block == 1 else range(4 * half, 4 * half + 4)
        dots, weight_scales, activation_scales = (
            _emit_dots(b, weights, line, panel, at, quads), row_vectors(scales, half), near(SCALE),
        )  # fmt: skip
        for cell, (row, token) in enumerate(CELLS):
            less = emit_reload(b, element_pointer(b, panel, _plus(b, at, MINUS_MAGIC + 16 * token), F32X4))
            dot = emit_fma(b, dots[row, token], _lane(b, activation_scales, token), less)
            value[cell] = emit_fma(b, dot, weight_scales[row], value[cell])
        if has_minimum:
            sums, low = near(SUM if scales_per_block == 1 else SUM16 + 16 * half), row_vectors(minima, half)
            for cell, (row, token) in enumerate(CELLS):
                value[cell] = emit_fma(b, _lane(b, sums, token), low[row], value[cell])
    return map_tile(b, len(CELLS), value.__getitem__)


def multiply(weights, line, scales, minima, panels, at, blocks, totals, to, stride):
    """Add 16 rows x 4 tokens over some blocks to the totals."""
    for row in range(0, 16, 8):
        total = load_totals(totals, to + row, stride)
        for b in range(blocks):
            w, s, p = line + 512 * b + 4 * row, 16 * SCALES_PER_BLOCK * b + row, at + PANEL_BYTES * b
            total = add_block(total, SCALES_PER_BLOCK, HAS_MINIMUM, weights, w, scales, minima, s, panels, p)
        store_totals(totals, to + row, stride, total)


SDOT = TileKernel(TOKENS, PANEL_BYTES, _store_token, None, multiply)
