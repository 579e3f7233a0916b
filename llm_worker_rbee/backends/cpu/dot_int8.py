"""What differs between machines: the dot product of bytes, once for each instruction set.

A dot product adds to each of 16 lanes four weight bytes times four activation bytes. Weights of up to seven bits are
positive on every machine. Weights of eight bits are stored as the machine likes them: plus 128 where the instruction
takes unsigned bytes (`BIAS` is then 128, and kernels start at -128 times the sum of the activations).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .. import isa
from . import f16c_fallback
from .layouts import LAYOUTS
from .simd import I8, I16, I32, LANES, bytes64, each, load, masked, splat_value, words64

f16c_fallback.provide()
NAME = isa.current()
BIAS = isa.TABLE[NAME].bias
# `sdot` takes its activations from any lane of a register; elsewhere a load that fills every lane is as good.
BY_ELEMENT = NAME == "neon_dotprod"
Emit = Callable[[Any, Any, Any, Any], Any]  # builder, accumulator, weights, activations -> accumulator


def _part(b: Any, vector: Any, first: int, count: int) -> Any:
    """Neighbouring lanes of a vector."""
    index = ir.Constant(ir.VectorType(I32, count), list(range(first, first + count)))
    return b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), index)


def joined(b: Any, parts: list[Any]) -> Any:
    """Vectors one after the other."""
    while len(parts) > 1:
        n = parts[0].type.count
        index = ir.Constant(ir.VectorType(I32, 2 * n), list(range(2 * n)))
        parts = [b.shuffle_vector(x, y, index) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _in_parts(lanes: int, one: Emit) -> Emit:
    """An instruction on registers of fewer lanes, applied to all of them."""

    def emit(b: Any, acc: Any, w: Any, x: Any) -> Any:
        made = [
            one(b, _part(b, acc, i, lanes), _part(b, w, 4 * i, 4 * lanes), _part(b, x, 4 * i, 4 * lanes))
            for i in range(0, LANES, lanes)
        ]
        return joined(b, made)

    return emit


def _call(name: str) -> Emit:
    """An instruction that LLVM knows by name, of three vectors."""

    def emit(b: Any, acc: Any, w: Any, x: Any) -> Any:
        kind = ir.FunctionType(acc.type, [acc.type, w.type, x.type])
        return b.call(b.module.declare_intrinsic(name, (), kind), [acc, w, x])

    return emit


def _pmaddubsw(b: Any, acc: Any, w: Any, x: Any) -> Any:
    """AVX2, for weights of up to seven bits: two products fit into 16 bits."""
    pairs, quads = ir.VectorType(I16, 16), ir.VectorType(I32, 8)
    two = b.module.declare_intrinsic("llvm.x86.avx2.pmadd.ub.sw", (), ir.FunctionType(pairs, [w.type, x.type]))
    four = b.module.declare_intrinsic("llvm.x86.avx2.pmadd.wd", (), ir.FunctionType(quads, [pairs, pairs]))
    return b.add(acc, b.call(four, [b.call(two, [w, x]), ir.Constant(pairs, [1] * 16)]))


def _pmaddubsw_signed(b: Any, acc: Any, w: Any, x: Any) -> Any:
    """AVX2, for eight bits: |w| times x with the sign of w; 2 * 128 * 127 still fits."""
    kind = ir.FunctionType(w.type, [w.type, w.type])
    sign = b.module.declare_intrinsic("llvm.x86.avx2.psign.b", (), kind)
    return _pmaddubsw(b, acc, b.call(sign, [w, w]), b.call(sign, [x, w]))


def _neon(b: Any, acc: Any, w: Any, x: Any) -> Any:
    """Arm without dot products: long multiplications, sums of neighbours (2 * 128 * 127 fits), and those of these."""
    wide, quads = ir.VectorType(I16, 8), ir.VectorType(I32, 4)
    half = ir.VectorType(I8, 8)
    multiply = b.module.declare_intrinsic("llvm.aarch64.neon.smull.v8i16", (), ir.FunctionType(wide, [half, half]))
    add = b.module.declare_intrinsic("llvm.aarch64.neon.addp.v8i16", (), ir.FunctionType(wide, [wide, wide]))
    widen = b.module.declare_intrinsic("llvm.aarch64.neon.saddlp.v4i32.v8i16", (), ir.FunctionType(quads, [wide]))
    products = [b.call(multiply, [_part(b, w, i, 8), _part(b, x, i, 8)]) for i in (0, 8)]
    return b.add(acc, b.call(widen, [b.call(add, products)]))


def _portable(b: Any, acc: Any, w: Any, x: Any) -> Any:
    """Any machine: the four bytes of each lane one after the other."""
    for byte in range(4):
        index = ir.Constant(ir.VectorType(I32, LANES), list(range(byte, 64, 4)))
        nothing = ir.Constant(bytes64.ir, ir.Undefined)
        u, v = (b.sext(b.shuffle_vector(side, nothing, index), words64) for side in (w, x))
        acc = b.add(acc, b.mul(u, v))
    return acc


_sdot = _in_parts(4, _call("llvm.aarch64.neon.sdot.v4i32.v16i8"))
_vnni512 = _call("llvm.x86.avx512.vpdpbusd.512")
_vnni256 = _in_parts(8, _call("llvm.x86.avx512.vpdpbusd.256"))
# instruction set -> (weights of up to seven bits, weights of eight)
DOTS: dict[str, tuple[Emit, Emit]] = {
    "avx512_vnni": (_vnni512, _vnni512),
    "avx_vnni": (_vnni256, _vnni256),
    "avx2": (_in_parts(8, _pmaddubsw), _in_parts(8, _pmaddubsw_signed)),
    "neon_dotprod": (_sdot, _sdot),
    "neon": (_in_parts(4, _neon), _in_parts(4, _neon)),
    "portable": (_portable, _portable),
}


def _shuffle(name: str, lanes: int) -> Callable[[Any, Any, Any], Any]:
    """A table of 16 bytes looked up by an instruction on registers of `lanes` bytes."""

    def emit(b: Any, index: Any, table: list[int]) -> Any:
        kind = ir.VectorType(I8, lanes)
        bytes16 = ir.Constant(kind, table * (lanes // 16))
        function = b.module.declare_intrinsic(name, (), ir.FunctionType(kind, [kind, kind]))
        parts = [_part(b, index, i, lanes) for i in range(0, 64, lanes)] if lanes < 64 else [index]
        return joined(b, [b.call(function, [bytes16, part]) for part in parts])

    return emit


def _selected(b: Any, index: Any, table: list[int]) -> Any:
    """Any machine: one comparison for each entry."""
    found = ir.Constant(bytes64.ir, [table[0]] * 64)
    for code, value in enumerate(table[1:], 1):
        here = b.icmp_unsigned("==", index, ir.Constant(bytes64.ir, [code] * 64))
        found = b.select(here, ir.Constant(bytes64.ir, [value] * 64), found)
    return found


LOOK_UPS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "avx512_vnni": _shuffle("llvm.x86.avx512.pshuf.b.512", 64),
    "avx_vnni": _shuffle("llvm.x86.avx2.pshuf.b", 32),
    "avx2": _shuffle("llvm.x86.avx2.pshuf.b", 32),
    "neon_dotprod": _shuffle("llvm.aarch64.neon.tbl1.v16i8", 16),
    "neon": _shuffle("llvm.aarch64.neon.tbl1.v16i8", 16),
    "portable": _selected,
}


def look_up(b: Any, index: Any, table: tuple[int, ...]) -> Any:
    """Entries of a table of up to 16 signed bytes, as this machine stores eight-bit weights."""
    entries = [(value + BIAS) % 256 for value in table]
    return LOOK_UPS[NAME](b, index, entries + [0] * (16 - len(entries)))


def _element(b: Any, vector: Any, lane: int) -> Any:
    """One of four words in every lane."""
    return b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), ir.Constant(words64, [lane] * LANES))


def _quad(b: Any, lines: Callable[[int], Any], planes: tuple[int, ...], quad: int) -> Any:
    """The codes of one quad of columns, a byte each, from lines of packed planes (layouts.py has the picture)."""
    code, first, place = None, 0, 0
    for width in planes:
        count = width  # lines of this plane: eight quads of `width` bits in lines of eight bits
        shift = width * (quad // count)
        part = lines(first + quad % count)
        if width < 8:
            part = masked(b, part, shift - place, ((1 << width) - 1) << place)
        code = part if code is None else b.or_(code, part)
        first, place = first + count, place + width
    return code


@intrinsic
def dot_half(_: Any, acc: Any, layout: Any, half: Any, packed: Any, line: Any, x: Any, at: Any, stride: Any) -> Any:
    """acc[token] += columns of a block . the token's activations: half 0 or 1 of the 32 columns, or all (2)."""
    if not (isinstance(layout, types.IntegerLiteral) and isinstance(half, types.IntegerLiteral)):
        return None
    kind, which = LAYOUTS[int(layout.literal_value)], int(half.literal_value)
    wide = kind.table is not None or kind.planes == (8,)
    emit = DOTS[NAME][wide]
    quads = [quad for quad in range(8) if quad // 4 == which or which == 2]
    quads.sort(key=lambda quad: quad % kind.planes[0])  # those of a line together: it need not stay in a register

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        tile, _, _, array, start, xs, place, apart = args

        def lines(number: int) -> Any:
            where = b.add(start, ir.Constant(start.type, 64 * number))
            return load(context, b, sig.args[3], array, where, bytes64.ir)

        def add(total: Any, token: int, weights: Any, quad: int) -> Any:
            near = quad // 4 * 4 if BY_ELEMENT else quad
            where = b.add(place, b.add(b.mul(apart, ir.Constant(apart.type, token)), ir.Constant(place.type, 4 * near)))
            some = load(context, b, sig.args[5], xs, where, ir.VectorType(I32, 4) if BY_ELEMENT else I32)
            four = _element(b, some, quad % 4) if BY_ELEMENT else splat_value(b, some, words64)
            return emit(b, total, weights, b.bitcast(four, bytes64.ir))

        for quad in quads:
            weights = _quad(b, lines, kind.planes, quad)
            if kind.table is not None:
                weights = look_up(b, weights, kind.table)

            def one(t: int, w: Any = weights, q: int = quad, old: Any = tile) -> Any:
                return add(b.extract_value(old, t), t, w, q)

            tile = each(b, acc, one)
        return tile

    return acc(acc, layout, half, packed, types.intp, x, types.intp, types.intp), gen
