"""The peak rates of a core for the kernels' work: int8 dot products, float32 FMA, reads of memory.

Each loop has the instruction of this machine on operands in registers or in the first-level cache, with as many
independent sums as hide its latency, and nothing else. Python calls them from several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from llm_worker_rbee.backends.cpu.jit import kernel
from llm_worker_rbee.backends.cpu.kernels import simd
from llm_worker_rbee.backends.cpu.kernels.dot_int8 import DOT_PRODUCTS, ISA, EmitDot, _by_registers, _instruction
from llm_worker_rbee.backends.cpu.kernels.matmul import tile_amx
from llm_worker_rbee.backends.cpu.kernels.pointers import aligned, f32, u8
from llm_worker_rbee.backends.cpu.kernels.simd import (
    I32X16,
    LANES,
    Tile,
    emit_fma,
    emit_load,
    emit_splat,
    emits,
    f32x16,
    i32x16,
    map_tile,
    u8x64,
)

# Independent sums, vectors of 16 lanes: as many as fit into the registers together with the operands.
NUM_SUMS = 12 if ISA.startswith("avx512") else 4
LINES = 16  # of 64 bytes: operands in the first-level cache
TILE_OPERATIONS = 4  # of AMX, one for each sum
_smmla = _by_registers(4, _instruction("llvm.aarch64.neon.smmla.v4i32.v16i8"))
DOT, MULTIPLY_ADDS = (_smmla, 128) if ISA == "neon_i8mm" else (DOT_PRODUCTS[ISA][0], 64)
int_sums, float_sums, byte_sums = Tile(i32x16, NUM_SUMS), Tile(f32x16, NUM_SUMS), Tile(u8x64, NUM_SUMS)


def _adds(sums: Any, step: EmitDot) -> Any:
    """Return the intrinsic that adds one line of 64 bytes times `x` to each sum."""

    @emits(lambda acc, lines, at, x: sums(acc, lines, types.intp, x))
    def add(b: Any, acc: Any, lines: Any, at: Any, x: Any) -> Any:
        kind = f32x16.ir if sums is float_sums else u8x64.ir
        line = emit_load(b, lines, at, kind)
        other = emit_splat(b, x, f32x16.ir) if sums is float_sums else b.bitcast(emit_splat(b, x, I32X16), u8x64.ir)
        return map_tile(b, NUM_SUMS, lambda i: step(b, b.extract_value(acc, i), line, other))

    return add


add_dots = _adds(int_sums, DOT)
add_fmas = _adds(float_sums, lambda b, acc, w, x: emit_fma(b, w, x, acc))


@emits(lambda data, at: byte_sums(data, types.intp))
def load_lines(b: Any, data: Any, at: Any) -> Any:
    """Return adjacent lines of 64 bytes."""
    return map_tile(b, NUM_SUMS, lambda i: emit_load(b, data, simd.offset_index(b, at, 64 * i), u8x64.ir))


@emits(byte_sums(byte_sums, byte_sums))
def combine(b: Any, x: Any, y: Any) -> Any:
    """Return the bits that differ: one instruction a register."""
    return map_tile(b, NUM_SUMS, lambda i: b.xor(b.extract_value(x, i), b.extract_value(y, i)))


@emits(lambda tile: types.int64(tile))
def fold(b: Any, tile: Any) -> Any:
    """Return a number that depends on all sums: without a use they would not be computed."""
    words = [b.bitcast(b.extract_value(tile, i), I32X16) for i in range(NUM_SUMS)]
    total = words[0]
    for word in words[1:]:
        total = b.xor(total, word)
    lanes = [b.extract_element(total, ir.Constant(simd.I32, lane)) for lane in range(LANES)]
    folded = lanes[0]
    for lane in lanes[1:]:
        folded = b.xor(folded, lane)
    return b.zext(folded, ir.IntType(64))


@emits(types.void())
def dot_tiles(b: Any) -> None:
    """Multiply tile registers of AMX in the shapes of tile_amx.py."""
    for tile in range(TILE_OPERATIONS):
        tile_amx._emit_tile(b, "tdpbssd", tile, tile_amx.FIRST_PANEL + tile % 2, tile_amx.FIRST_WEIGHTS + tile % 2)


@kernel
def run_dots(address, count):
    """Do `count` rounds of NUM_SUMS dot products of 16 lanes."""
    lines = u8(address)
    acc, x = zero_ints(), np.int32(lines[0])
    for i in range(count):
        acc = add_dots(acc, lines, (i & (LINES - 1)) * 64, x)
    return fold(acc)


@kernel
def run_fmas(address, count):
    """Do `count` rounds of NUM_SUMS FMA of 16 lanes."""
    lines = f32(address)
    acc, x = simd.zero_floats(NUM_SUMS), lines[0]
    for i in range(count):
        acc = add_fmas(acc, lines, (i & (LINES - 1)) * 16, x)
    return fold(acc)


@kernel
def run_amx(address, count):
    """Do `count` rounds of TILE_OPERATIONS products of tile registers."""
    tile_amx.begin(1)
    for _ in range(count):
        dot_tiles()
    tile_amx.end()
    return address


@kernel
def read_memory(address, size, count):
    """Read `size` bytes `count` times, a multiple of 64 * NUM_SUMS of them."""
    data = u8(address)
    acc = load_lines(data, 0)
    for _ in range(count):
        for at in range(0, size, 64 * NUM_SUMS):
            acc = combine(acc, load_lines(data, at))
    return fold(acc)


@emits(int_sums())
def zero_ints(b: Any) -> Any:
    """Return sums of zero."""
    return ir.Constant(int_sums.ir, None)


class Peak(NamedTuple):
    """A loop over operands in registers or in the first-level cache."""

    run: Callable[[int, int], object]  # (address of the operands, rounds)
    operations: float  # of a round


def peaks() -> dict[str, Peak]:
    """Return the loop of each arithmetic that the kernels have."""
    int8 = Peak(run_dots, 2.0 * NUM_SUMS * MULTIPLY_ADDS)
    if ISA == "avx512_amx":
        int8 = Peak(run_amx, 2.0 * TILE_OPERATIONS * 16 * 16 * 32)
    return {"float32": Peak(run_fmas, 2.0 * NUM_SUMS * LANES), "int8": int8}


def operands() -> Any:
    """Return LINES lines of ones."""
    return aligned(np.ones, LINES * 16, np.float32)
