"""Products of many tokens with packed weights, on the tensor cores.

A word of a plane holds eight columns of one block. Unpacked, they are eight float16 of one lane, and the lane has four
neighbouring blocks: just what it feeds to the tensor cores, if the columns are summed in that order. So no value of a
weight moves between lanes, and activations are laid out in the order of the sum, by word and by sixteen blocks:

    spread   (4 words, tokens, blocks / 16, 128): of block 16 g + 4 lane + n and column 16 last + 4 word + 2 r + p
             place ((n * 2 + p) * 2 + last) * 8 + 2 lane + r of group g; blocks that are not there are zeros

For long prompts `dequantize` writes the matrix as bfloat16 once and the vendor's product reads it.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from .intrinsics import PLAIN, byte, high_half, high_place, low_half, start_next, wait_before

GROUP = tl.constexpr(16)  # blocks


@triton.jit
def spread_place(t, b, c, tokens, groups):
    """Where column c of block b of token t lies: see above."""
    word, last, r, p = c % 16 // 4, c // 16, c % 4 // 2, c % 2
    lane, n = b % GROUP // 4, b % 4
    return ((word * tokens + t) * groups + b // GROUP) * 128 + ((n * 2 + p) * 2 + last) * 8 + 2 * lane + r


@triton.jit
def spread(x, out, tokens, blocks, KB: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr = False):
    """(tokens, blocks * 32), as they are, to spread ones."""
    t = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    b = (tl.program_id(1) * KB + tl.arange(0, KB))[None, :, None]
    c = tl.arange(0, 32)[None, None, :]
    groups = (blocks + GROUP - 1) // GROUP
    start_next(PDL)
    wait_before(PDL)
    values = tl.load(x + (t * blocks + b) * 32 + c, mask=(t < tokens) & (b < blocks), other=0.0)
    at = out + spread_place(t, b, c, tokens, groups)
    tl.store(at, values.to(out.dtype.element_ty), mask=(t < tokens) & (b < groups * GROUP))


@triton.jit
def in_order(e, BN: tl.constexpr):
    """Eight columns of (BN, GROUP) blocks -> (BN, GROUP * 8), as they are summed."""
    first = tl.join(tl.join(e[0], e[1]), tl.join(e[2], e[3]))  # (BN, GROUP, r, last)
    second = tl.join(tl.join(e[4], e[5]), tl.join(e[6], e[7]))
    w = tl.reshape(tl.join(first, second), (BN, 4, 4, 2, 2, 2))  # lane, n, r, last, p
    return tl.reshape(tl.permute(w, (0, 2, 5, 4, 1, 3)), (BN, GROUP * 8))


@triton.jit
def matmul(
    x, factors, unit, low, high, scales, out, tokens, rows, blocks: tl.constexpr,
    KIND: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STRIDE: tl.constexpr = 0, PDL: tl.constexpr = False,
):  # fmt: skip
    """x spread * factors (tokens) @ (rows, columns).T -> out (parts, tokens, rows), whose sum it is. A program has BN
    rows and BM tokens of a part of the columns, and a turn one word of GROUP blocks of each row; of kinds with a fifth
    bit two words, because those share its plane."""
    PLANES: tl.constexpr = 8 if KIND == "q8" or KIND == "q8d" else 4
    WORDS: tl.constexpr = 2 if KIND == "q5" or KIND == "q5m" else 1
    TURNS: tl.constexpr = 4 // WORDS
    STEPS: tl.constexpr = (blocks + GROUP - 1) // GROUP
    WIDE: tl.constexpr = (blocks + GROUP - 1) // GROUP * 128  # a token's row of one word
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n_at = tl.minimum(n, rows - 1)[:, None]
    m_at = tl.minimum(m, tokens - 1)[None, :]
    k = tl.arange(0, GROUP * 8)[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    start_next(PDL)
    wait_before(PDL)
    each = tl.cdiv(STEPS, tl.num_programs(2))
    first = tl.program_id(2) * each
    for turn in range(first * TURNS, tl.minimum(first + each, STEPS) * TURNS):
        step = turn // TURNS
        b = step * GROUP + tl.arange(0, GROUP)[None, :]
        ok = b < blocks
        s = tl.load(scales + n_at * blocks + b, mask=ok, other=0)
        for j in tl.static_range(WORDS):
            i = turn % TURNS * WORDS + j
            word = tl.load(low + (n_at * PLANES + i) * blocks + b, mask=ok, other=0)
            if KIND == "q8" or KIND == "q8d":
                more = tl.load(low + (n_at * PLANES + 4 + i) * blocks + b, mask=ok, other=0)
            elif KIND == "q6":
                more = tl.load(high + (n_at * 4 + i) * blocks + b, mask=ok, other=0)
            elif KIND == "q5" or KIND == "q5m":
                more = tl.load(high + (n_at * 2 + i // 2) * blocks + b, mask=ok, other=0)
            elif KIND == "q4mm":
                more = tl.load(high + n_at * blocks + b, mask=ok, other=0)
            else:
                more = word
            w = in_order(eight_columns(word, more, s, j, KIND), BN)
            acc = tl.dot(w, tl.load(x + (i * tokens + m_at) * WIDE + (step * (GROUP * 8) + k)), acc)
    wide = STRIDE if STRIDE > 0 else rows  # of a row of `out`, of which this matrix may be a part
    at = (tl.program_id(2) * tokens + m[None, :]) * wide + n[:, None]
    acc = acc * (unit * tl.load(factors + m, mask=m < tokens, other=0.0))[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(m < tokens)[None, :] & (n < rows)[:, None])


@triton.jit
def matmul_numbers(
    x, w, scales, out, tokens, rows, columns,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """x (tokens, columns) @ w (rows, columns).T -> out (parts, tokens, rows), whose sum it is: in an order that depends
    on the parts alone, which the vendor's product does not promise. SCALED: times scales (rows)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    n_at = tl.minimum(n, rows - 1).to(tl.int64)[:, None] * columns
    m_at = tl.minimum(m, tokens - 1).to(tl.int64)[None, :] * columns
    acc = tl.zeros((BN, BM), tl.float32)
    each = tl.cdiv(tl.cdiv(columns, BK), tl.num_programs(2)) * BK
    first = tl.program_id(2) * each
    for start in range(first, tl.minimum(first + each, columns), BK):
        ok = start + k < columns
        weights = tl.load(w + n_at + (start + k)[None, :], mask=ok[None, :], other=0.0)
        numbers = tl.load(x + m_at + (start + k)[:, None], mask=ok[:, None], other=0.0)
        acc = tl.dot(weights.to(x.dtype.element_ty), numbers, acc, input_precision="ieee")
    if SCALED:
        acc = acc * tl.load(scales + n, mask=n < rows, other=0.0)[:, None]
    at = (tl.program_id(2) * tokens + m[None, :]).to(tl.int64) * rows + n[:, None]
    tl.store(out + at, acc, mask=(m < tokens)[None, :] & (n < rows)[:, None])


@triton.jit
def dequantize(
    unit, low, high, scales, out, rows, blocks,
    KIND: tl.constexpr, ROWS: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """The matrix as (rows, columns) of numbers. A program has ROWS rows and KB blocks of each."""
    PLANES: tl.constexpr = 8 if KIND == "q8" or KIND == "q8d" else 4
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1) * KB + tl.arange(0, KB)
    c = tl.arange(0, 32)
    ok2 = (n < rows)[:, None] & (b < blocks)[None, :]
    ok = ok2[:, :, None]
    n3, b3, c3 = n[:, None, None], b[None, :, None], c[None, None, :]
    if KIND == "q8" or KIND == "q8d":
        word = tl.load(low + (n3 * PLANES + c3 // 4) * blocks + b3, mask=ok, other=0)
        value = ((word << (24 - 8 * (c3 % 4))) >> 24).to(tl.float32)
    else:
        word = tl.load(low + (n3 * PLANES + (c3 % 16) // 4) * blocks + b3, mask=ok, other=0)
        code = (word >> (8 * (c3 % 4) + 4 * (c3 // 16))) & 15
        if KIND == "q6":
            h = tl.load(high + (n3 * 4 + c3 % 16 // 4) * blocks + b3, mask=ok, other=0)
            code = code | (((h >> high_place(c3)) & 3) << 4)
        elif KIND == "q5" or KIND == "q5m":
            h = tl.load(high + (n3 * 2 + c3 % 16 // 8) * blocks + b3, mask=ok, other=0)
            code = code | (((h >> (high_place(c3) + c3 // 4 % 2)) & 1) << 4)
        OFFSET: tl.constexpr = 8 if KIND == "q4" else (16 if KIND == "q5" else (32 if KIND == "q6" else 0))
        value = (code - OFFSET).to(tl.float32)
    s = tl.load(scales + n[:, None] * blocks + b[None, :], mask=ok2, other=0)
    if KIND == "q6" or KIND == "q8d" or KIND == "q4mm":
        value = value * tl.where(c3 < 16, low_half(s)[:, :, None], high_half(s)[:, :, None])
        if KIND == "q4mm":
            m = tl.load(high + n[:, None] * blocks + b[None, :], mask=ok2, other=0)
            value = value + tl.where(c3 < 16, low_half(m)[:, :, None], high_half(m)[:, :, None])
    elif KIND == "q4m" or KIND == "q5m":
        value = value * low_half(s)[:, :, None] + high_half(s)[:, :, None]
    else:
        value = value * s.to(tl.float32)[:, :, None]
    at = (n3.to(tl.int64) * blocks + b3) * 32 + c3
    tl.store(out + at, (value * unit).to(out.dtype.element_ty), mask=ok)


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
