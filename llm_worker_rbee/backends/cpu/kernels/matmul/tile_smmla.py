"""Products of unpacked weights with `smmla`, the matrix product of bytes of 64-bit Arm with i8mm: 8 rows x 4 tokens.

An instruction multiplies 8 columns of two tokens with 8 columns of two rows: its lanes are (token 0, row 0), (token 0,
row 1), (token 1, row 0), (token 1, row 1), twice the products of `sdot`. What belongs to a pair of tokens lies in the
panel with each number twice, as the lanes want it. A block of a panel of four tokens has 288 bytes:

      0  int8     for each 8 columns: their values of each token
    128  float32  -MAGIC * scale of each token
    160  float32  scale of each token
    192  float32  scaled sum of each token
    224  float32  scaled sums of columns 0..15 of each token, then of columns 16..31

Integer sums begin at the bits of MAGIC (tile_sdot.py).
"""

from __future__ import annotations

from typing import Any

from ...jit import cgutils, ir, types
from .. import simd as f
from .tile_kernel import TileKernel, block_signature

ROW_PAIRS, TOKEN_PAIRS = 4, 2  # of a tile
PANEL_BYTES, MINUS_MAGIC, SCALE, SUM, SUM16 = 288, 128, 160, 192, 224
SCALES_PER_BLOCK = HAS_MINIMUM = None  # set for each variant
I8X16, I32X4 = ir.VectorType(f.I8, 16), ir.VectorType(f.I32, 4)
F32X2, F32X4 = ir.VectorType(f.F32, 2), ir.VectorType(f.F32, 4)
pair_totals8 = f.Tile(f.Vector("f32x2x2", f.F32, 4), ROW_PAIRS * TOKEN_PAIRS)  # row pair after row pair
CELLS = [(rows, tokens) for rows in range(ROW_PAIRS) for tokens in range(TOKEN_PAIRS)]


def _shuffle(b: Any, x: Any, y: Any, lanes: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(f.I32, len(lanes)), lanes))


def _store_token(b: Any, panel: Any, at: Any, token: Any, values: Any, scale: Any, total: Any, totals: Any) -> None:
    def put(first: int, value: Any) -> None:
        f.emit_store(b, panel, f.strided_index(b, f.offset_index(b, at, first), token, 8), value)

    for columns in range(4):
        put(32 * columns, _shuffle(b, values, values, list(range(8 * columns, 8 * columns + 8))))
    put(MINUS_MAGIC, f.emit_splat(b, b.fmul(scale, ir.Constant(f.F32, -f.MAGIC)), F32X2))
    put(SCALE, f.emit_splat(b, scale, F32X2))
    put(SUM, f.emit_splat(b, total, F32X2))
    for half in range(2):
        put(SUM16 + 32 * half, _shuffle(b, totals, totals, [half, half]))


def _weight_order(b: Any, quads: list[Any]) -> list[Any]:
    """Emit the bytes of 8 columns of row 0, of row 1, ... row 15, then of the next 8 columns."""
    ordered = []
    for left, right in zip(quads[::2], quads[1::2], strict=True):
        x, y = b.bitcast(left, f.I32X16), b.bitcast(right, f.I32X16)
        for first in (0, 8):
            lanes = [lane for row in range(first, first + 8) for lane in (row, 16 + row)]
            ordered.append(b.bitcast(_shuffle(b, x, y, lanes), f.u8x64.ir))
    return ordered


def _token_places(b: Any, at: Any, stride: Any, cell: int) -> list[Any]:
    """Emit the indices of the first row of a cell, for each of its two tokens."""
    rows, tokens = CELLS[cell]
    return [f.strided_index(b, f.offset_index(b, at, 2 * rows), stride, 2 * tokens + token) for token in range(2)]


@f.emits(lambda totals, at, stride: pair_totals8(totals, types.intp, types.intp))
def load_totals(b: Any, totals: Any, at: Any, stride: Any) -> Any:
    """Return the totals of 8 rows x 4 tokens."""

    def one(cell: int) -> Any:
        first, second = (f.emit_load(b, totals, place, F32X2) for place in _token_places(b, at, stride, cell))
        return _shuffle(b, first, second, [0, 1, 2, 3])

    return f.map_tile(b, len(CELLS), one)


@f.emits(lambda totals, at, stride, tile: types.void(totals, types.intp, types.intp, tile))
def store_totals(b: Any, totals: Any, at: Any, stride: Any, tile: Any) -> None:
    """Write them back."""
    for cell in range(len(CELLS)):
        value = b.extract_value(tile, cell)
        for token, place in enumerate(_token_places(b, at, stride, cell)):
            f.emit_store(b, totals, place, _shuffle(b, value, value, [2 * token, 2 * token + 1]))


def _emit_dots(b: Any, weights: Any, at: Any, panel: Any, first: Any, columns: range) -> dict[tuple[int, int], Any]:
    """Emit MAGIC + the integer sums over some eights of columns."""
    start = cgutils.global_constant(b.module, "magic", ir.Constant(I32X4, [f.MAGIC_BITS] * 4))
    acc = {cell: f.emit_reload(b, start) for cell in CELLS}
    for eight in columns:
        x = [
            f.emit_load(b, panel, f.offset_index(b, first, 32 * eight + 16 * pair), I8X16)
            for pair in range(TOKEN_PAIRS)
        ]
        w = [
            f.emit_load(b, weights, f.offset_index(b, at, 128 * eight + 16 * pair), I8X16) for pair in range(ROW_PAIRS)
        ]
        for rows, tokens in CELLS:
            name = "llvm.aarch64.neon.smmla.v4i32.v16i8"
            acc[rows, tokens] = f.emit_call(b, name, I32X4, acc[rows, tokens], x[tokens], w[rows])
    return {cell: b.bitcast(value, F32X4) for cell, value in acc.items()}


@f.emits(block_signature, prefer_literal=True)
def add_block(
    b: Any,
    total: Any,
    scales_per_block: int,
    has_minimum: bool,
    weights: Any,
    line: Any,
    scales: Any,
    minima: Any,
    scale: Any,
    panel: Any,
    at: Any,
) -> Any:
    """Return total + 8 rows of a block . the activations of 4 tokens."""
    value = [b.extract_value(total, cell) for cell in range(len(CELLS))]

    def of_tokens(first: int) -> list[Any]:
        return [f.emit_load(b, panel, f.offset_index(b, at, first + 16 * pair), F32X4) for pair in range(TOKEN_PAIRS)]

    def of_rows(array: f.ArrayValue, half: int) -> list[Any]:
        pairs = [
            f.emit_load(b, array, f.offset_index(b, scale, 16 * half + 2 * pair), F32X2) for pair in range(ROW_PAIRS)
        ]
        return [_shuffle(b, pair, pair, [0, 1, 0, 1]) for pair in pairs]

    for half in range(scales_per_block):
        columns = range(4) if scales_per_block == 1 else range(2 * half, 2 * half + 2)
        dots, weight_scales = _emit_dots(b, weights, line, panel, at, columns), of_rows(scales, half)
        activation_scales, less = of_tokens(SCALE), of_tokens(MINUS_MAGIC)
        for cell, (rows, tokens) in enumerate(CELLS):
            dot = f.emit_fma(b, dots[rows, tokens], activation_scales[tokens], less[tokens])
            value[cell] = f.emit_fma(b, dot, weight_scales[rows], value[cell])
        if has_minimum:
            sums, low = of_tokens(SUM if scales_per_block == 1 else SUM16 + 32 * half), of_rows(minima, half)
            for cell, (rows, tokens) in enumerate(CELLS):
                value[cell] = f.emit_fma(b, sums[tokens], low[rows], value[cell])
    return f.map_tile(b, len(CELLS), value.__getitem__)


def multiply(weights, line, scales, minima, panels, at, blocks, totals, to, stride):
    """Add 16 rows x 4 tokens over some blocks to the totals."""
    for row in range(0, 16, 8):
        total = load_totals(totals, to + row, stride)
        for b in range(blocks):
            w, s, p = line + 512 * b + 8 * row, 16 * SCALES_PER_BLOCK * b + row, at + PANEL_BYTES * b
            total = add_block(total, SCALES_PER_BLOCK, HAS_MINIMUM, weights, w, scales, minima, s, panels, p)
        store_totals(totals, to + row, stride, total)


SMMLA = TileKernel(2 * TOKEN_PAIRS, PANEL_BYTES, _store_token, _weight_order, multiply)
