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

The loop over blocks is assembly, because the order decides: an `fmla` writes its result one cycle later than an `sdot`,
so each change from `fmla` to `sdot` costs a pipe a turn, and LLVM scatters them. Here all dot products of a scale come
first, then all `fmla`. 60 G multiply-adds a second instead of 52 in the first-level cache, of 80 without any scale
(docs/decisions/cpu.md#d079).
"""

from __future__ import annotations

from typing import Any

from ...jit import binding, cgutils, ir, types
from .. import simd as f
from .tile_kernel import TileKernel, block_signature

binding.initialize_native_asmparser()
TOKENS, ROW_VECTORS = 4, 2  # of a tile
PREFETCH_BYTES = 512  # of a panel ahead, from the second-level cache
PANEL_BYTES, MINUS_MAGIC, SCALE, SUM, SUM16 = 256, 128, 192, 208, 224
SCALES_PER_BLOCK = HAS_MINIMUM = None  # set for each variant
I64, I32X4, F32X4 = ir.IntType(64), ir.VectorType(f.I32, 4), ir.VectorType(f.F32, 4)
totals8 = f.Tile(f.Vector("f32x4", f.F32, 4), ROW_VECTORS * TOKENS)  # row vector after row vector
CELLS = [(row, token) for row in range(ROW_VECTORS) for token in range(TOKENS)]
# Operands of the assembly: eight totals, pointers that move on, the blocks that are left; then the address of MAGIC.
WEIGHTS, PANEL, SCALES, MINIMA, BLOCKS, START = (f"${{{number}}}" for number in (8, 9, 10, 11, 12, 26))
# Registers v8 to v31: sums of each row vector and token, activations, weights, scaled sums. Those of activations and
# weights hold the scales once the dot products are done.
SUMS = [[f"{8 + TOKENS * row + token}" for token in range(TOKENS)] for row in range(ROW_VECTORS)]
SCALED = [[f"{24 + TOKENS * row + token}" for token in range(TOKENS)] for row in range(ROW_VECTORS)]
X, W = ("16", "17", "18", "19"), ("20", "21", "22", "23")
X_SCALE, X_SUM, W_SCALE, W_MINIMUM = "16", "17", ("18", "19"), ("20", "21")


def _store_token(b: Any, panel: Any, at: Any, token: Any, values: Any, scale: Any, total: Any, totals: Any) -> None:
    def put(first: int, size: int, value: Any) -> None:
        where = b.add(f.offset_index(b, at, first), b.mul(token, ir.Constant(token.type, size)))
        f.emit_store(b, panel, where, value)

    put(0, 32, values)
    put(MINUS_MAGIC, 16, f.emit_splat(b, b.fmul(scale, ir.Constant(f.F32, -f.MAGIC)), F32X4))
    put(SCALE, 4, scale)
    put(SUM, 4, total)
    for half in range(2):
        put(SUM16 + 16 * half, 4, b.extract_element(totals, ir.Constant(f.I32, half)))


@f.emits(lambda totals, at, stride: totals8(totals, types.intp, types.intp))
def load_totals(b: Any, totals: Any, at: Any, stride: Any) -> Any:
    """Return the totals of 8 rows x 4 tokens."""

    def one(cell: int) -> Any:
        row, token = CELLS[cell]
        where = b.add(f.offset_index(b, at, 4 * row), b.mul(stride, ir.Constant(stride.type, token)))
        return f.emit_load(b, totals, where, F32X4)

    return f.map_tile(b, len(CELLS), one)


@f.emits(lambda totals, at, stride, tile: types.void(totals, types.intp, types.intp, tile))
def store_totals(b: Any, totals: Any, at: Any, stride: Any, tile: Any) -> None:
    """Write them back."""
    for cell, (row, token) in enumerate(CELLS):
        where = b.add(f.offset_index(b, at, 4 * row), b.mul(stride, ir.Constant(stride.type, token)))
        f.emit_store(b, totals, where, b.extract_value(tile, cell))


def _load(register: str, pointer: str, offset: int = 0) -> str:
    return f"ldr q{register}, [{pointer}, #{offset}]"


def _dots(quads: range) -> list[str]:
    """Return the integer sums of 8 rows x 4 tokens over some quads of columns."""
    steps = [(quad, row) for quad in quads for row in range(ROW_VECTORS)]
    scaled = [_load(SCALED[row][t], PANEL, MINUS_MAGIC + 16 * t) for row, t in CELLS]
    loads = [_load(W[i % len(W)], WEIGHTS, 64 * quad + 16 * row) for i, (quad, row) in enumerate(steps)]
    lines = [loads[0]]
    for i, (quad, row) in enumerate(steps):
        if quad == quads[0]:
            lines += [_load(register, START) for register in SUMS[row]]
        if quad % 4 == 0 and row == 0:
            lines += [_load(register, PANEL, 32 * token + 4 * quad) for token, register in enumerate(X)]
        lines += loads[i + 1 : i + 2]  # one step ahead
        if i >= len(steps) - len(scaled):  # spread over the last steps
            lines.append(scaled[i - len(steps)])
        if quad < 2:  # a cache line of the panel each
            lines.append(f"prfm pldl1keep, [{PANEL}, #{PREFETCH_BYTES + 64 * (2 * quad + row)}]")
        dot = f"v{W[i % len(W)]}.16b"
        lines += [f"sdot v{SUMS[row][t]}.4s, {dot}, v{X[t]}.4b[{quad % 4}]" for t in range(TOKENS)]
    return lines


def _add_to_totals(scale: int, x_sum: int, has_minimum: bool) -> list[str]:
    """Return SCALED = sums * scale of each token, total += SCALED * scale of the rows, and the minimum likewise.

    `scale` and `x_sum` are the offsets of the first scale of the rows and of the scaled sums of the activations.
    """
    lines = [_load(X_SCALE, PANEL, SCALE)]
    lines += [_load(W_SCALE[row], SCALES, scale + 16 * row) for row in range(ROW_VECTORS)]
    if has_minimum:
        lines += [_load(X_SUM, PANEL, x_sum)]
        lines += [_load(W_MINIMUM[row], MINIMA, scale + 16 * row) for row in range(ROW_VECTORS)]
    lines += [f"fmla v{SCALED[row][t]}.4s, v{SUMS[row][t]}.4s, v{X_SCALE}.s[{t}]" for row, t in CELLS]
    lines += [f"fmla ${{{cell}}}.4s, v{SCALED[row][t]}.4s, v{W_SCALE[row]}.4s" for cell, (row, t) in enumerate(CELLS)]
    if has_minimum:
        lines += [f"fmla ${{{cell}}}.4s, v{W_MINIMUM[row]}.4s, v{X_SUM}.s[{t}]" for cell, (row, t) in enumerate(CELLS)]
    return lines


def loop_code(scales_per_block: int, has_minimum: bool) -> str:
    """Return the loop over blocks as assembly."""
    lines = ["1:"]
    for half in range(scales_per_block):
        quads = range(8) if scales_per_block == 1 else range(4 * half, 4 * half + 4)
        x_sum = SUM if scales_per_block == 1 else SUM16 + 16 * half
        lines += _dots(quads) + _add_to_totals(64 * half, x_sum, has_minimum)
    moves = (WEIGHTS, 512), (PANEL, PANEL_BYTES), (SCALES, 64 * scales_per_block), (MINIMA, 64 * scales_per_block)
    lines += [f"add {pointer}, {pointer}, #{size}" for pointer, size in moves]
    return "\\0A".join([*lines, f"subs {BLOCKS}, {BLOCKS}, #1", "b.ne 1b"])


@f.emits(block_signature, prefer_literal=True)
def add_blocks(
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
    blocks: Any,
) -> Any:
    """Return total + 8 rows of one or more blocks . the activations of 4 tokens."""
    start = cgutils.global_constant(b.module, "magic", ir.Constant(I32X4, [f.MAGIC_BITS] * 4))
    places = (weights, line), (panel, at), (scales, scale), (minima, scale)
    operands = [b.extract_value(total, cell) for cell in range(len(CELLS))]
    operands += [b.ptrtoint(f.element_pointer(b, array, index, f.I8), I64) for array, index in places]
    operands.append(blocks)
    results, ties = ["=&w"] * len(CELLS) + ["=&r"] * 5, [str(number) for number in range(13)]
    clobbers = [f"~{{v{number}}}" for number in range(8, 32)] + ["~{cc}", "~{memory}"]
    kind = ir.LiteralStructType([operand.type for operand in operands])
    operands.append(b.ptrtoint(start, I64))
    function = ir.FunctionType(kind, [operand.type for operand in operands])
    constraints = ",".join([*results, *ties, "r", *clobbers])
    made = b.asm(function, loop_code(scales_per_block, has_minimum), constraints, operands, True)
    return f.map_tile(b, len(CELLS), lambda cell: b.extract_value(made, cell))


def multiply(weights, line, scales, minima, panels, at, blocks, totals, to, stride):
    """Add 16 rows x 4 tokens over some blocks to the totals."""
    for row in range(0, 16, 8):
        total, w = load_totals(totals, to + row, stride), line + 4 * row
        total = add_blocks(total, SCALES_PER_BLOCK, HAS_MINIMUM, weights, w, scales, minima, row, panels, at, blocks)
        store_totals(totals, to + row, stride, total)


SDOT = TileKernel(TOKENS, PANEL_BYTES, _store_token, None, multiply)
