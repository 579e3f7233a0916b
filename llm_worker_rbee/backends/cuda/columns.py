"""The eight columns of a word of a plane as float16, scaled, in one lane's registers: what the tensor cores are fed.

PTX for each kind, made from a few lines of text, and its plain twin for the interpreter. matvec.py draws the planes.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from .intrinsics import PLAIN, byte, high_half, high_place, low_half


def float_pair(number):
    """Two float16 in a word, as PTX writes it."""
    bits = struct.unpack("<H", struct.pack("<e", number))[0]
    return f"0x{bits:04X}{bits:04X}"


OFFSETS = {"q4": 8, "q5": 16, "q6": 32}
SCALE_PTX = {  # $10: words of scales; $9: minima. s, z: the scale of the first and the last sixteen columns, twice each
    "one": "mov.b32 s, {$10, $10}; mov.b32 z, s;",
    "minimum": "prmt.b32 s, $10, $10, 0x1010; mov.b32 z, s; prmt.b32 m, $10, $10, 0x3232; mov.b32 y, m;",
    "two": "prmt.b32 s, $10, $10, 0x1010; prmt.b32 z, $10, $10, 0x3232;",
    "two and minima": "prmt.b32 s, $10, $10, 0x1010; prmt.b32 z, $10, $10, 0x3232;"
    " prmt.b32 m, $9, $9, 0x1010; prmt.b32 y, $9, $9, 0x3232;",
}
SCALES = {"q4": "one", "q5": "one", "q8": "one", "q4m": "minimum", "q5m": "minimum", "q6": "two", "q8d": "two",
          "q4mm": "two and minima"}  # fmt: skip


def eight_ptx(kind, word):
    """$8: the word; $9: what goes with it (as wide as it is there); $10: scales -> $0 .. $7.

    Two columns at a time, c and c + 2, which are halves of the word already: their bits are put below those of 1024,
    whose last place is one (sixteen of the last sixteen columns), and 1024 is taken away again: exact. Then the scale.
    """
    lines = [".reg .b32 a, b, f, g, t, s, z, m, y, k, l, q; .reg .b16 n;", SCALE_PTX[SCALES[kind]]]
    offset = OFFSETS.get(kind, 0)
    start = -1152.0 if kind in ("q8", "q8d") else -1024.0 - offset
    lines.append(
        f"mov.b32 k, {float_pair(start)}; mov.b32 l, {float_pair(-64.0 - offset)}; mov.b32 q, {float_pair(1 / 16)};"
    )
    if kind in ("q5", "q5m", "q6"):  # f: fields at 4 and 8, b: at 8 (of 0), g: at 4 (of 12)
        lines.append("mov.b16 n, 0; mov.b32 f, {$9, n}; shl.b32 b, f, 14; or.b32 f, f, b;")
        lines.append(f"shr.u32 f, f, {word}; shl.b32 b, f, 8; shr.u32 g, f, 8;")
    for odd in (0, 1):
        for last in (0, 1):
            lines += eight_pair(kind, odd, last)
            lines.append(f"mov.b32 {{${4 * odd + 2 * last}, ${4 * odd + 2 * last + 1}}}, t;")
    return "{ " + "\n".join(lines) + " }"


def eight_pair(kind, odd, last):
    """t: columns 2 and odd of the first or the last sixteen."""
    if kind in ("q8", "q8d"):  # bytes with the sign turned: 1024 + 128 + value
        lines = [f"shr.u32 a, {'$9' if last else '$8'}, {8 * odd};",
                 "lop3.b32 t, a, 0x00FF00FF, 0x64806480, 0x6A; add.rn.f16x2 t, t, k;"]  # fmt: skip
    else:
        nibbles = 0x00F000F0 if last else 0x000F000F
        lines = [f"shr.u32 a, $8, {8 * odd}; lop3.b32 t, a, {nibbles}, 0x64006400, 0xEA;"]
        if kind in ("q5", "q5m", "q6"):
            mask = (0x03000300 if last else 0x00300030) if kind == "q6" else (0x01000100 if last else 0x00100010)
            field = {(0, 0): "f", (0, 1): "b", (1, 0): "g", (1, 1): "f"}[odd, last]
            lines.append(f"lop3.b32 t, {field}, {mask}, t, 0xEA;")
        lines.append("fma.rn.f16x2 t, t, q, l;" if last else "add.rn.f16x2 t, t, k;")
    scale, minimum = ("z", "y") if last else ("s", "m")
    has_minimum = "minim" in SCALES[kind]
    return [*lines, f"fma.rn.f16x2 t, t, {scale}, {minimum};" if has_minimum else f"mul.rn.f16x2 t, t, {scale};"]


def eight_operands(kind):
    """What PTX calls the operands of a kind: half words or words."""
    return "=h," * 8 + ("r,h," if kind in ("q5", "q5m", "q6") else "r,r,") + ("h" if SCALES[kind] == "one" else "r")


PTX = tl.constexpr({kind: eight_ptx(kind, 0) for kind in SCALES})
SECOND_PTX = tl.constexpr({kind: eight_ptx(kind, 1) for kind in SCALES})  # of two words that share a half word of bits
OPERANDS = tl.constexpr({kind: eight_operands(kind) for kind in SCALES})


@triton.constexpr_function
def entry(table, kind):
    """Of a table of texts."""
    return table[kind]


@triton.jit
def eight_columns(word, more, s, j: tl.constexpr, KIND: tl.constexpr):
    """The eight columns of each word as float16, (c, c + 2) of the first, of the last sixteen for c = 0, then c = 1.
    `more` holds the last sixteen of bytes, high bits (of word j of two, where words share them) or minima."""
    if PLAIN:
        e = plain_pair(word, more, s, 0, 0, j, KIND) + plain_pair(word, more, s, 0, 1, j, KIND)
        return e + plain_pair(word, more, s, 1, 0, j, KIND) + plain_pair(word, more, s, 1, 1, j, KIND)
    TEXT: tl.constexpr = entry(SECOND_PTX, KIND) if j else entry(PTX, KIND)
    return tl.inline_asm_elementwise(
        TEXT, entry(OPERANDS, KIND), [word, more, s],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def plain_pair(word, more, s, odd: tl.constexpr, last: tl.constexpr, j: tl.constexpr, KIND: tl.constexpr):
    """Columns odd and odd + 2 of the first or the last sixteen: the twin of the PTX."""
    OFFSET: tl.constexpr = 8 if KIND == "q4" else (16 if KIND == "q5" else (32 if KIND == "q6" else 0))
    out = ()
    for r in tl.static_range(2):
        c: tl.constexpr = odd + 2 * r
        if KIND == "q8" or KIND == "q8d":
            code = byte(more if last else word, c)
        else:
            code = (word >> (8 * c + 4 * last)) & 15
            if KIND == "q6":
                code = code | (((more.to(tl.int32) >> high_place(16 * last + c)) & 3) << 4)
            elif KIND == "q5" or KIND == "q5m":
                code = code | (((more.to(tl.int32) >> (high_place(16 * last + c) + j)) & 1) << 4)
        value = (code - OFFSET).to(tl.float32)
        if KIND == "q4" or KIND == "q5" or KIND == "q8":
            value = value * s.to(tl.float32)
        elif KIND == "q4m" or KIND == "q5m":
            value = value * low_half(s) + high_half(s)
        else:
            value = value * (high_half(s) if last else low_half(s))
            if KIND == "q4mm":
                value = value + (high_half(more) if last else low_half(more))
        out = out + (value.to(tl.float16),)
    return out
