"""Products of unpacked weights with AMX, the tile registers of x86-64: tiles of 16 rows x 16 tokens.

`tdpbssd` multiplies a tile of 16 tokens x 32 bytes by one of 32 columns x 16 rows, whose lines of 64 bytes (a quad of
columns of all 16 rows) are those of ../../packed_weight.py. The integer sums of a block go through memory to the vector
registers, which hold the totals. A few blocks are multiplied before the sums of the first one are read, so that both
units work at once. A block of a panel of 16 tokens has 768 bytes:

      0  int8     values of each token, 32 columns
    512  float32  scale of each token
    576  float32  scaled sum of each token
    640  float32  scaled sums of columns 0..15 of each token, then of columns 16..31

The system grants tile registers on request (`machine.request_amx`); `begin` sets their shapes, `end` releases them, so
that switching threads does not save 8 KB more.
"""

from __future__ import annotations

from typing import Any

from ...jit import cgutils, ir, types
from .. import simd as f
from ..pointers import stack_floats, u8
from .tile_kernel import TileKernel, block_signature

TOKENS = 16
PANEL_BYTES, SCALE, SUM, SUM16 = 768, 512, 576, 640
BLOCKS_AHEAD = 4
SUMS_BYTES = 1024  # integer sums of a tile
SUMS_FLOATS = BLOCKS_AHEAD * 2 * SUMS_BYTES // 4  # of the buffer, with two scales per block
FIRST_PANEL, FIRST_WEIGHTS = 4, 6  # of two tile registers each; those before hold sums
SCALES_PER_BLOCK = HAS_MINIMUM = None  # set for each variant
I64 = ir.IntType(64)
totals16 = f.Tile(f.f32x16, TOKENS)


def _emit_tile(b: Any, name: str, *args: Any) -> None:
    """Emit an instruction on tile registers, which are numbers here."""
    values = [ir.Constant(f.I8, arg) if isinstance(arg, int) else arg for arg in args]
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    b.call(b.module.declare_intrinsic(f"llvm.x86.{name}", (), kind), values)


def _store_token(b: Any, panel: Any, at: Any, token: Any, values: Any, scale: Any, total: Any, totals: Any) -> None:
    def put(first: int, size: int, value: Any) -> None:
        where = b.add(f.offset_index(b, at, first), b.mul(token, ir.Constant(token.type, size)))
        f.emit_store(b, panel, where, value)

    put(0, 32, values)
    put(SCALE, 4, scale)
    put(SUM, 4, total)
    for half in range(2):
        put(SUM16 + 64 * half, 4, b.extract_element(totals, ir.Constant(f.I32, half)))


def _tile_shapes(scales_per_block: int) -> bytes:
    """Return the operand of `ldtilecfg`: bytes per row and rows of each tile register."""
    columns = 32 // scales_per_block
    shapes = [(64, TOKENS)] * FIRST_PANEL + [(columns, TOKENS)] * 2 + [(64, columns // 4)] * 2
    widths = b"".join(width.to_bytes(2, "little") for width, _ in shapes)
    return bytes([1, *[0] * 15]) + widths.ljust(32, b"\0") + bytes(rows for _, rows in shapes).ljust(16, b"\0")


@f.emits(lambda scales_per_block: types.void(scales_per_block), prefer_literal=True)
def begin(b: Any, scales_per_block: int) -> None:
    """Set the shapes of the tile registers."""
    shapes = ir.Constant(ir.ArrayType(f.I8, 64), bytearray(_tile_shapes(scales_per_block)))
    place = cgutils.global_constant(b.module, f"tile_shapes{scales_per_block}", shapes)
    _emit_tile(b, "ldtilecfg", b.bitcast(place, f.I8.as_pointer()))


@f.emits(types.void())
def end(b: Any) -> None:
    """Release the tile registers."""
    _emit_tile(b, "tilerelease")


@f.emits(lambda totals, at, stride: totals16(totals, types.intp, types.intp))
def load_totals(b: Any, totals: Any, at: Any, stride: Any) -> Any:
    """Return the totals of 16 rows x 16 tokens."""
    return f.map_tile(
        b, TOKENS, lambda token: f.emit_load(b, totals, f.strided_index(b, at, stride, token), f.f32x16.ir)
    )


@f.emits(lambda totals, at, stride, tile: types.void(totals, types.intp, types.intp, tile))
def store_totals(b: Any, totals: Any, at: Any, stride: Any, tile: Any) -> None:
    """Write them back."""
    for token in range(TOKENS):
        f.emit_store(b, totals, f.strided_index(b, at, stride, token), b.extract_value(tile, token))


def _dot_signature(scales_per_block: Any, blocks: Any, sums: Any, weights: Any, _: Any, panel: Any, __: Any) -> Any:
    return types.void(scales_per_block, blocks, sums, weights, types.intp, panel, types.intp)


@f.emits(_dot_signature, prefer_literal=True)
def dot_tiles(
    b: Any, scales_per_block: int, blocks: int, sums: Any, weights: Any, line: Any, panel: Any, at: Any
) -> None:
    """Write the integer sums of some blocks, one tile of tokens x rows for each scale."""

    def place(array: Any, index: Any, more: int) -> Any:
        return f.element_pointer(b, array, f.offset_index(b, index, more), f.I8)

    for i in range(blocks * scales_per_block):
        block, half = divmod(i, scales_per_block)
        tile, x, w = i % FIRST_PANEL, FIRST_PANEL + i % 2, FIRST_WEIGHTS + i % 2
        _emit_tile(b, "tileloadd64", x, place(panel, at, PANEL_BYTES * block + 16 * half), ir.Constant(I64, 32))
        _emit_tile(b, "tileloadd64", w, place(weights, line, 512 * block + 256 * half), ir.Constant(I64, 64))
        _emit_tile(b, "tilezero", tile)
        _emit_tile(b, "tdpbssd", tile, x, w)
        _emit_tile(b, "tilestored64", tile, place(sums, ir.Constant(I64, 0), SUMS_BYTES * i), ir.Constant(I64, 64))


@f.emits(block_signature, prefer_literal=True)
def add_block(
    b: Any,
    total: Any,
    scales_per_block: int,
    has_minimum: bool,
    sums: Any,
    first: Any,
    scales: Any,
    minima: Any,
    scale: Any,
    panel: Any,
    at: Any,
) -> Any:
    """Return total + the integer sums of a block times the scales of tokens and rows, and the minima."""

    def of_token(field: int, token: int) -> Any:
        return f.emit_splat(b, f.emit_load(b, panel, f.offset_index(b, at, field + 4 * token), f.F32), f.f32x16.ir)

    for half in range(scales_per_block):
        factors = f.emit_load(b, scales, f.offset_index(b, scale, 16 * half), f.f32x16.ir)

        def scaled(token: int, half: int = half, factors: Any = factors, old: Any = total) -> Any:
            dot = f.emit_load(b, sums, f.offset_index(b, first, SUMS_BYTES * half + 64 * token), f.I32X16)
            value = b.fmul(b.sitofp(dot, f.f32x16.ir), of_token(SCALE, token))
            return f.emit_fma(b, value, factors, b.extract_value(old, token))

        total = f.map_tile(b, TOKENS, scaled)
        if has_minimum:
            low = f.emit_load(b, minima, f.offset_index(b, scale, 16 * half), f.f32x16.ir)
            field = SUM if scales_per_block == 1 else SUM16 + 64 * half

            def shifted(token: int, low: Any = low, field: int = field, old: Any = total) -> Any:
                return f.emit_fma(b, of_token(field, token), low, b.extract_value(old, token))

            total = f.map_tile(b, TOKENS, shifted)
    return total


def multiply(weights, line, scales, minima, panels, at, blocks, totals, to, stride):
    """Add 16 rows x 16 tokens over some blocks to the totals."""
    sums = u8(stack_floats(SUMS_FLOATS))
    total = load_totals(totals, to, stride)
    b = 0
    while b + BLOCKS_AHEAD <= blocks:
        dot_tiles(SCALES_PER_BLOCK, BLOCKS_AHEAD, sums, weights, line + 512 * b, panels, at + PANEL_BYTES * b)
        for i in range(BLOCKS_AHEAD):
            first, s, p = SUMS_BYTES * SCALES_PER_BLOCK * i, 16 * SCALES_PER_BLOCK * (b + i), at + PANEL_BYTES * (b + i)
            total = add_block(total, SCALES_PER_BLOCK, HAS_MINIMUM, sums, first, scales, minima, s, panels, p)
        b += BLOCKS_AHEAD
    while b < blocks:
        dot_tiles(SCALES_PER_BLOCK, 1, sums, weights, line + 512 * b, panels, at + PANEL_BYTES * b)
        s, p = 16 * SCALES_PER_BLOCK * b, at + PANEL_BYTES * b
        total = add_block(total, SCALES_PER_BLOCK, HAS_MINIMUM, sums, 0, scales, minima, s, panels, p)
        b += 1
    store_totals(totals, to, stride, total)


AMX = TileKernel(TOKENS, PANEL_BYTES, _store_token, None, multiply, begin, end)
