"""Dot products of int8 for each instruction set: the only code that differs between machines.

A dot product adds to each of 16 lanes four weight bytes times four activation bytes. Weights of up to seven bits are
unsigned everywhere. Weights of eight bits are stored as the instruction wants them: plus 128 where it takes unsigned
bytes (WEIGHT_BIAS is then 128, and kernels start at -128 times the sum of the activations).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import cpu_info
from ..jit import ir, types
from ..packed_weight import LAYOUTS
from . import simd as f
from .matmul.tile_amx import AMX
from .matmul.tile_kernel import TileKernel
from .matmul.tile_sdot import SDOT
from .matmul.tile_smmla import SMMLA

ISA = cpu_info.current_isa()
WEIGHT_BIAS = cpu_info.INSTRUCTION_SETS[ISA].weight_bias
LANE_ACTIVATIONS = cpu_info.INSTRUCTION_SETS[ISA].lane_activations
SHIFT_INSERT = cpu_info.INSTRUCTION_SETS[ISA].shift_insert
# for products of many tokens (matmul/linear.py)
TILE_KERNELS: dict[str, TileKernel] = {"avx512_amx": AMX, "neon_i8mm": SMMLA, "neon_dotprod": SDOT}
EmitDot = Callable[[Any, Any, Any, Any], Any]  # (builder, accumulator, weights, activations) -> accumulator


def _lanes(b: Any, vector: Any, first: int, count: int) -> Any:
    """Return adjacent lanes of a vector."""
    index = ir.Constant(ir.VectorType(f.I32, count), list(range(first, first + count)))
    return b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), index)


def concat_vectors(b: Any, parts: list[Any]) -> Any:
    """Emit the concatenation of vectors."""
    while len(parts) > 1:
        n = parts[0].type.count
        index = ir.Constant(ir.VectorType(f.I32, 2 * n), list(range(2 * n)))
        parts = [b.shuffle_vector(x, y, index) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _by_registers(lanes: int, one: EmitDot) -> EmitDot:
    """Return an instruction on registers of fewer lanes, applied to all 16."""

    def emit(b: Any, acc: Any, w: Any, x: Any) -> Any:
        made = [
            one(b, _lanes(b, acc, i, lanes), _lanes(b, w, 4 * i, 4 * lanes), _lanes(b, x, 4 * i, 4 * lanes))
            for i in range(0, f.LANES, lanes)
        ]
        return concat_vectors(b, made)

    return emit


def _instruction(name: str) -> EmitDot:
    """Return a call of an LLVM intrinsic of three vectors."""
    return lambda b, acc, w, x: f.emit_call(b, name, acc.type, acc, w, x)


def _pmaddubsw(b: Any, acc: Any, w: Any, x: Any) -> Any:
    """AVX2, weights of up to seven bits: the sum of two products fits into 16 bits."""
    pairs = f.emit_call(b, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(f.I16, 16), w, x)
    return b.add(acc, f.emit_call(b, "llvm.x86.avx2.pmadd.wd", acc.type, pairs, ir.Constant(pairs.type, [1] * 16)))


def _pmaddubsw_signed(b: Any, acc: Any, w: Any, x: Any) -> Any:
    """AVX2, weights of eight bits: |w| times x with the sign of w; 2 * 128 * 127 still fits."""
    magnitudes, signed = (f.emit_call(b, "llvm.x86.avx2.psign.b", w.type, side, w) for side in (w, x))
    return _pmaddubsw(b, acc, magnitudes, signed)


def _pmaddubsw512(b: Any, acc: Any, w: Any, x: Any) -> Any:
    """AVX-512 without dot products, weights of up to seven bits."""
    pairs = f.emit_call(b, "llvm.x86.avx512.pmaddubs.w.512", ir.VectorType(f.I16, 32), w, x)
    return b.add(
        acc, f.emit_call(b, "llvm.x86.avx512.pmaddw.d.512", acc.type, pairs, ir.Constant(pairs.type, [1] * 32))
    )


def _pmaddubsw512_signed(b: Any, acc: Any, w: Any, x: Any) -> Any:
    """AVX-512 without dot products, weights of eight bits: |w| times x with the sign of w, by a mask."""
    zero = ir.Constant(w.type, [0] * w.type.count)
    is_negative = b.icmp_signed("<", w, zero)
    magnitudes, signed = (b.select(is_negative, b.sub(zero, side), side) for side in (w, x))
    return _pmaddubsw512(b, acc, magnitudes, signed)


def _neon(b: Any, acc: Any, w: Any, x: Any) -> Any:
    """Arm without dot products: widening multiplications, then two pairwise sums (2 * 128 * 127 fits)."""
    wide, halves = ir.VectorType(f.I16, 8), [[_lanes(b, side, i, 8) for side in (w, x)] for i in (0, 8)]
    products = [f.emit_call(b, "llvm.aarch64.neon.smull.v8i16", wide, *half) for half in halves]
    pairs = f.emit_call(b, "llvm.aarch64.neon.addp.v8i16", wide, *products)
    return b.add(acc, f.emit_call(b, "llvm.aarch64.neon.saddlp.v4i32.v8i16", acc.type, pairs))


def _portable(b: Any, acc: Any, w: Any, x: Any) -> Any:
    """Any machine: the four bytes of each lane one after the other."""
    for byte in range(4):
        index = ir.Constant(ir.VectorType(f.I32, f.LANES), list(range(byte, 64, 4)))
        nothing = ir.Constant(f.u8x64.ir, ir.Undefined)
        u, v = (b.sext(b.shuffle_vector(side, nothing, index), f.I32X16) for side in (w, x))
        acc = b.add(acc, b.mul(u, v))
    return acc


_sdot = _by_registers(4, _instruction("llvm.aarch64.neon.sdot.v4i32.v16i8"))
_vnni512 = _instruction("llvm.x86.avx512.vpdpbusd.512")
_vnni256 = _by_registers(8, _instruction("llvm.x86.avx512.vpdpbusd.256"))
# instruction set -> (weights of up to seven bits, weights of eight)
DOT_PRODUCTS: dict[str, tuple[EmitDot, EmitDot]] = {
    "avx512_amx": (_vnni512, _vnni512),
    "avx512_vnni": (_vnni512, _vnni512),
    "avx512": (_pmaddubsw512, _pmaddubsw512_signed),
    "avx_vnni": (_vnni256, _vnni256),
    "avx2": (_by_registers(8, _pmaddubsw), _by_registers(8, _pmaddubsw_signed)),
    "neon_i8mm": (_sdot, _sdot),
    "neon_dotprod": (_sdot, _sdot),
    "neon": (_by_registers(4, _neon), _by_registers(4, _neon)),
    "portable": (_portable, _portable),
}


def _byte_shuffle(name: str, lanes: int) -> Callable[[Any, Any, Any], Any]:
    """Return the lookup in a table of 16 bytes by an instruction on registers of `lanes` bytes."""

    def emit(b: Any, index: Any, table: list[int]) -> Any:
        bytes16 = ir.Constant(ir.VectorType(f.I8, lanes), table * (lanes // 16))
        parts = [_lanes(b, index, i, lanes) for i in range(0, 64, lanes)] if lanes < 64 else [index]
        return concat_vectors(b, [f.emit_call(b, name, bytes16.type, bytes16, part) for part in parts])

    return emit


def _compare_chain(b: Any, index: Any, table: list[int]) -> Any:
    """Any machine: one comparison per table entry."""
    found = ir.Constant(f.u8x64.ir, [table[0]] * 64)
    for code, value in enumerate(table[1:], 1):
        here = b.icmp_unsigned("==", index, ir.Constant(f.u8x64.ir, [code] * 64))
        found = b.select(here, ir.Constant(f.u8x64.ir, [value] * 64), found)
    return found


TABLE_LOOKUPS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "avx512_amx": _byte_shuffle("llvm.x86.avx512.pshuf.b.512", 64),
    "avx512_vnni": _byte_shuffle("llvm.x86.avx512.pshuf.b.512", 64),
    "avx512": _byte_shuffle("llvm.x86.avx512.pshuf.b.512", 64),
    "avx_vnni": _byte_shuffle("llvm.x86.avx2.pshuf.b", 32),
    "avx2": _byte_shuffle("llvm.x86.avx2.pshuf.b", 32),
    "neon_i8mm": _byte_shuffle("llvm.aarch64.neon.tbl1.v16i8", 16),
    "neon_dotprod": _byte_shuffle("llvm.aarch64.neon.tbl1.v16i8", 16),
    "neon": _byte_shuffle("llvm.aarch64.neon.tbl1.v16i8", 16),
    "portable": _compare_chain,
}


def emit_table_lookup(b: Any, index: Any, table: tuple[int, ...], bias: int = WEIGHT_BIAS) -> Any:
    """Emit entries of a table of up to 16 int8, plus `bias`."""
    entries = [(value + bias) % 256 for value in table]
    return TABLE_LOOKUPS[ISA](b, index, entries + [0] * (16 - len(entries)))


def _shift_insert(b: Any, name: str, target: Any, source: Any) -> Any:
    """Emit `source` shifted by four bits into `target`, whose other four bits stay."""
    kind, parts = (
        ir.VectorType(f.I8, 16),
        [[_lanes(b, side, i, 16) for side in (target, source)] for i in range(0, 64, 16)],
    )
    shift = ir.Constant(f.I32, 4)
    return concat_vectors(b, [f.emit_call(b, f"llvm.aarch64.neon.{name}.v16i8", kind, *part, shift) for part in parts])


def _insert_quad(b: Any, low: Any, high: Any, width: int, quad: int) -> Any:
    """Emit codes of four bits of `low` with `width` bits of `high` above them."""
    shift, mask = width * (quad // width), (1 << width) - 1

    def each(value: int) -> ir.Constant:
        return ir.Constant(f.u8x64.ir, [value] * 64)

    if quad < 4:
        moved = b.lshr(high, each(shift)) if shift else high
        return b.and_(_shift_insert(b, "vsli", low, moved), each(mask << 4 | 15))
    moved = b.lshr(high, each(shift - 4)) if shift > 4 else b.shl(high, each(4 - shift)) if shift < 4 else high
    return _shift_insert(b, "vsri", b.and_(moved, each(mask << 4)), low)


def _unpack_quad(b: Any, lines: Callable[[int], Any], planes: tuple[int, ...], quad: int) -> Any:
    """Emit the codes of one quad of columns, one byte each, from the lines of the bit planes (../packed_weight.py)."""
    if SHIFT_INSERT and len(planes) == 2 and planes[0] == 4:
        return _insert_quad(b, lines(quad % 4), lines(4 + quad % planes[1]), planes[1], quad)
    code, first, place = None, 0, 0
    for width in planes:
        shift = width * (quad // width)  # a plane has `width` lines: eight quads of `width` bits in bytes
        part = lines(first + quad % width)
        if width < 8:
            part = f.emit_shift_mask(b, part, shift - place, ((1 << width) - 1) << place)
        code = part if code is None else b.or_(code, part)
        first, place = first + width, place + width
    return code


def _dot_signature(acc: Any, layout: Any, half: Any, packed: Any, line: Any, x: Any, *_: Any) -> Any:
    return acc(acc, layout, half, packed, types.intp, x, types.intp, types.intp)


@f.emits(_dot_signature, prefer_literal=True)
def dot_block(b: Any, acc: Any, layout: int, half: int, packed: Any, line: Any, x: Any, at: Any, stride: Any) -> Any:
    """Return acc + codes of a block . the activations of each token: half 0 or 1 of the 32 columns, or all (2)."""
    kind = LAYOUTS[layout]
    emit = DOT_PRODUCTS[ISA][kind.table is not None or kind.planes == (8,)]
    # quads of one line together: the line need not stay in a register
    quads = sorted((q for q in range(8) if q // 4 == half or half == 2), key=lambda quad: quad % kind.planes[0])

    def lines(number: int) -> Any:
        return f.emit_load(b, packed, b.add(line, ir.Constant(line.type, 64 * number)), f.u8x64.ir)

    def add(total: Any, token: int, weights: Any, quad: int) -> Any:
        first = quad // 4 * 4 if LANE_ACTIVATIONS else quad
        where = b.add(at, b.add(b.mul(stride, ir.Constant(stride.type, token)), ir.Constant(at.type, 4 * first)))
        loaded = f.emit_load(b, x, where, ir.VectorType(f.I32, 4) if LANE_ACTIVATIONS else f.I32)
        if LANE_ACTIVATIONS:
            undefined, lane = ir.Constant(loaded.type, ir.Undefined), ir.Constant(f.I32X16, [quad % 4] * f.LANES)
            activations = b.shuffle_vector(loaded, undefined, lane)
        else:
            activations = f.emit_splat(b, loaded, f.I32X16)
        return emit(b, total, weights, b.bitcast(activations, f.u8x64.ir))

    for quad in quads:
        weights = _unpack_quad(b, lines, kind.planes, quad)
        if kind.table is not None:
            weights = emit_table_lookup(b, weights, kind.table)

        def one(t: int, w: Any = weights, q: int = quad, old: Any = acc) -> Any:
            return add(b.extract_value(old, t), t, w, q)

        acc = f.map_tile(b, acc.type.count, one)
    return acc


@f.emits(
    lambda layout, packed, line, *_: types.void(layout, packed, types.intp, packed, types.intp), prefer_literal=True
)
def unpack_block(b: Any, layout: int, packed: Any, line: Any, out: Any, at: Any) -> None:
    """Write a block as 512 signed bytes, offset and table applied, in the order of this machine's `TileKernel`."""
    kind, order = LAYOUTS[layout], TILE_KERNELS[ISA].emit_weight_order

    def lines(number: int) -> Any:
        return f.emit_load(b, packed, b.add(line, ir.Constant(line.type, 64 * number)), f.u8x64.ir)

    def signed(quad: int) -> Any:
        codes = _unpack_quad(b, lines, kind.planes, quad)
        if kind.table is not None:
            return emit_table_lookup(b, codes, kind.table, 0)
        less = WEIGHT_BIAS if kind.planes == (8,) else kind.offset
        return b.sub(codes, ir.Constant(f.u8x64.ir, [less] * 64)) if less else codes

    quads = [signed(quad) for quad in range(8)]
    for number, value in enumerate(order(b, quads) if order else quads):
        f.emit_store(b, out, b.add(at, ir.Constant(at.type, 64 * number)), value)
