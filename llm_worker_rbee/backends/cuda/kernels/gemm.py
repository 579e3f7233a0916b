"""GEMM on tensor cores: packed weights dequantized in registers, and dense ones. gemv.py draws the planes.

A word of a plane holds eight columns of one block. Dequantized, they are eight float16 of one lane, and the lane has
four neighbouring blocks: just what it feeds to the tensor cores, if the columns are summed in that order. So no weight
moves between lanes, and activations are laid out in the order of the sum, by word and by sixteen blocks:

    interleaved   (4 words, tokens, blocks / 16, 128): of block 16 g + 4 lane + n and column 16 last + 4 word + 2 r + p
                  place ((n * 2 + p) * 2 + last) * 8 + 2 lane + r of group g; missing blocks are zeros

A word is dequantized by PTX made from a few lines of text for each kind; the interpreter takes the plain twin. Compact
kinds (compact_kinds.py) become signed bytes first, a whole block at a time.
"""

# Kernels add to tuples that are empty at first.
# mypy: disable-error-code="assignment, misc"
from __future__ import annotations

import struct

import triton
import triton.language as tl

from .compact_kinds import COMPACT, block_scales, block_values, code_words, is_compact, kind_field, load_block
from .gemv import expert_planes, high_planes, is_held, low_words, plane_stride
from .intrinsics import INTERPRETED, e4m3_to_half, high_bit_shift, high_half, low_half, pack_halves, signed_byte

GROUP_BLOCKS = tl.constexpr(16)
FEW_SLOTS = tl.constexpr(16)  # a larger tile with at most this many slots is multiplied as a tile of this size


@triton.jit
def interleaved_offset(t, b, c, tokens, groups):
    """Return the offset of column c of block b of token t in the interleaved layout."""
    word, last, r, p = c % 16 // 4, c // 16, c % 4 // 2, c % 2
    lane, n = b % GROUP_BLOCKS // 4, b % 4
    return ((word * tokens + t) * groups + b // GROUP_BLOCKS) * 128 + ((n * 2 + p) * 2 + last) * 8 + 2 * lane + r


@triton.jit
def reorder_for_dot(e, BN: tl.constexpr):
    """Bring eight columns of (BN, GROUP_BLOCKS) blocks into the order of the sum: (BN, GROUP_BLOCKS * 8)."""
    first = tl.join(tl.join(e[0], e[1]), tl.join(e[2], e[3]))  # (BN, GROUP, r, last)
    second = tl.join(tl.join(e[4], e[5]), tl.join(e[6], e[7]))
    w = tl.reshape(tl.join(first, second), (BN, 4, 4, 2, 2, 2))  # lane, n, r, last, p
    return tl.reshape(tl.permute(w, (0, 2, 5, 4, 1, 3)), (BN, GROUP_BLOCKS * 8))


@triton.constexpr_function
def words_per_load(compact, kind):
    """Return how many of the four words of a block an iteration multiplies."""
    return 4 if kind in compact else 2 if kind in ("q5", "q5m") else 1


@triton.jit
def load_word(low, high, n, i, b, mask, blocks, KIND: tl.constexpr):
    """Load word i of blocks b of rows n, and what belongs to it: the last sixteen bytes, or high bits."""
    WORDS_PER_BLOCK: tl.constexpr = low_words(KIND)
    HIGH_PLANES: tl.constexpr = high_planes(KIND)
    stride = plane_stride(blocks)
    word = tl.load(low + (n * WORDS_PER_BLOCK + i) * stride + b, mask=mask, other=0)
    extra = word
    if WORDS_PER_BLOCK == 8:
        extra = tl.load(low + (n * WORDS_PER_BLOCK + 4 + i) * stride + b, mask=mask, other=0)
    elif HIGH_PLANES > 0:
        extra = tl.load(high + (n * HIGH_PLANES + i * HIGH_PLANES // 4) * stride + b, mask=mask, other=0)
    return word, extra


@triton.jit(do_not_specialize=["tokens"])
def gemm_packed(
    x, factors, unit, low, high, scales, out, tokens, rows, out_rows, blocks: tl.constexpr,
    KIND: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, small=None, table=None,
    tile_experts=None, tile_slots=None, SLOTS: tl.constexpr = 1, bias=None,
):  # fmt: skip
    """Multiply interleaved x * factors (tokens) by packed weights; out (splits, tokens, out_rows) sums to the product;
    `out` may hold more rows than this part of a matrix.

    With `tile_experts`, tile i of the second axis is of an expert of a stack (-1: no tile), and of the slots
    tile_slots[BM * i ..] (-1: none); result s is of activations s // SLOTS, without splits, plus `bias` (experts,
    out_rows).

    A program has BN rows and BM tokens of one split of the columns; an iteration loads one word of GROUP_BLOCKS blocks
    of each row, of 5-bit kinds two words, because they share a half word of high bits, of compact kinds all."""
    if tile_experts is None:
        m = tl.program_id(1) * BM + tl.arange(0, BM)
        multiply_tokens(
            x, factors, unit, low, high, small, scales, table, out, tokens, rows, out_rows, m, m % tokens, m < tokens,
            None, blocks, KIND, BN, BM,
        )  # fmt: skip
    else:
        expert = tl.load(tile_experts + tl.program_id(1))
        if expert < 0:
            return
        low, high, scales, first_block = expert_planes(low, high, scales, expert, rows, blocks, KIND)
        if small is not None:
            small += first_block
        if bias is not None:
            bias += expert * out_rows
        first = tl.program_id(1) * BM
        has_few = False
        if BM > FEW_SLOTS:
            has_few = tl.load(tile_slots + first + FEW_SLOTS) < 0  # a tile is filled from its beginning
        if has_few:
            multiply_slots(
                x, factors, unit, low, high, small, scales, table, out, tokens, rows, out_rows, tile_slots + first,
                bias, blocks, KIND, BN, FEW_SLOTS if BM > FEW_SLOTS else BM, SLOTS,
            )  # fmt: skip
        else:
            multiply_slots(
                x, factors, unit, low, high, small, scales, table, out, tokens, rows, out_rows, tile_slots + first,
                bias, blocks, KIND, BN, BM, SLOTS,
            )  # fmt: skip


@triton.jit
def multiply_slots(
    x, factors, unit, low, high, small, scales, table, out, tokens, rows, out_rows, slots, bias, blocks: tl.constexpr,
    KIND: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Multiply the activations of BM slots by the rows of their expert."""
    m = tl.load(slots + tl.arange(0, BM))
    spare = (tl.program_id(1) * BM + tl.arange(0, BM)) % tokens
    at = tl.where(m >= 0, m // SLOTS, spare)
    multiply_tokens(
        x, factors, unit, low, high, small, scales, table, out, tokens, rows, out_rows, m, at, m >= 0, bias, blocks,
        KIND, BN, BM,
    )  # fmt: skip


@triton.jit
def multiply_tokens(
    x, factors, unit, low, high, small, scales, table, out, tokens, rows, out_rows, m, m_at, is_token, bias,
    blocks: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Multiply BM activations m_at (any in the place of missing ones) by BN rows, to results m."""
    PER_LOAD: tl.constexpr = words_per_load(COMPACT, KIND)
    LOADS: tl.constexpr = 4 // PER_LOAD
    STEPS: tl.constexpr = (blocks + GROUP_BLOCKS - 1) // GROUP_BLOCKS
    TOKEN_STRIDE: tl.constexpr = STEPS * 128  # of one word
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    n_at, m_at, is_token = tl.minimum(n, rows - 1)[:, None], m_at[None, :], is_token[None, :]
    k = tl.arange(0, GROUP_BLOCKS * 8)[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    each = tl.cdiv(STEPS, tl.num_programs(2))
    first = tl.program_id(2) * each
    for load in range(first * LOADS, tl.minimum(first + each, STEPS) * LOADS):
        step = load // LOADS
        b = step * GROUP_BLOCKS + tl.arange(0, GROUP_BLOCKS)[None, :]
        mask = is_held(b, blocks, KIND)
        if is_compact(COMPACT, KIND):
            block = load_block(low, high, small, scales, n_at, b, mask, blocks, KIND, "")
            codes = code_words(block, table, KIND)
            s_first, s_last, m_first, m_last = block_scales(block, KIND)
            s, minima = pack_halves(s_first, s_last), pack_halves(m_first, m_last)
        else:
            s = tl.load(scales + n_at * plane_stride(blocks) + b, mask=mask, other=0)
        for j in tl.static_range(PER_LOAD):
            i = load % LOADS * PER_LOAD + j
            if is_compact(COMPACT, KIND):
                e = dequantize_bytes(codes[j], codes[4 + j], s, minima, kind_field(COMPACT, KIND, "has_minima"))
            else:
                word, extra = load_word(low, high, n_at, i, b, mask, blocks, KIND)
                e = dequantize_word(word, extra, s, j, KIND)
            w = reorder_for_dot(e, BN)
            at = x + (i * tokens + m_at) * TOKEN_STRIDE + (step * (GROUP_BLOCKS * 8) + k)
            # of few tokens most may be missing, and all programs would load the same ones
            activations = tl.load(at, mask=is_token, other=0.0) if BM <= 32 else tl.load(at)
            acc = tl.dot(w, activations, acc)
    at = (tl.program_id(2) * tokens + m[None, :]).to(tl.int64) * out_rows + n[:, None]
    acc = acc * (unit * tl.load(factors + m_at, mask=is_token, other=0.0))
    if bias is not None:
        acc += tl.load(bias + n, mask=n < rows, other=0.0)[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=is_token & (n < rows)[:, None])


@triton.jit(do_not_specialize=["tokens"])
def gemm_dense(
    x, w, scales, out, tokens, rows, columns,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SCALED: tl.constexpr, out_rows=None, factors=None,
    tile_experts=None, tile_slots=None, SLOTS: tl.constexpr = 1, bias=None,
):  # fmt: skip
    """Multiply x (tokens, columns) by w (rows, columns).T; out (splits, tokens, rows) sums to the product. The order
    depends on the number of splits alone, which cuBLAS does not promise. SCALED: times scales (rows).

    `tile_experts`: as in `gemm_packed`, with rows of `out_rows` values, and `factors` of the activations."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    n_at = tl.minimum(n, rows - 1).to(tl.int64)[:, None] * columns
    m_at, is_token = m.to(tl.int64)[None, :] * columns, (m < tokens)[None, :]
    if tile_experts is not None:
        expert = tl.load(tile_experts + tl.program_id(1))
        if expert < 0:
            return
        w += expert.to(tl.int64) * rows * columns
        m = tl.load(tile_slots + m)
        is_token = (m >= 0)[None, :]
        row = tl.maximum(m, 0) // SLOTS
        m_at = row.to(tl.int64)[None, :] * columns
    acc = tl.zeros((BN, BM), tl.float32)
    each = tl.cdiv(tl.cdiv(columns, BK), tl.num_programs(2)) * BK
    first = tl.program_id(2) * each
    for start in range(first, tl.minimum(first + each, columns), BK):
        mask = start + k < columns
        weights = tl.load(w + n_at + (start + k)[None, :], mask=mask[None, :], other=0.0)
        activations = tl.load(x + m_at + (start + k)[:, None], mask=mask[:, None] & is_token, other=0.0)
        acc = tl.dot(weights.to(x.dtype.element_ty), activations, acc, input_precision="ieee")
    if SCALED:
        acc = acc * tl.load(scales + n, mask=n < rows, other=0.0)[:, None]
    stride = rows
    if tile_experts is not None:
        stride = out_rows
        if factors is not None:
            acc = acc * tl.load(factors + row)[None, :]
        if bias is not None:
            acc += tl.load(bias + expert * out_rows + n, mask=n < rows, other=0.0)[:, None]
    at = (tl.program_id(2) * tokens + m[None, :]).to(tl.int64) * stride + n[:, None]
    tl.store(out + at, acc, mask=is_token & (n < rows)[:, None])


@triton.constexpr_function
def code_offset(kind):
    """Return the offset of the unsigned codes of a kind without minima."""
    return {"q4": 8, "q5": 16, "q6": 32}.get(kind, 0)


@triton.jit
def doubled_e2m1(code):
    """Return twice the value of a float of four bits, an integer."""
    m = code & 7
    magnitude = tl.where(m < 2, m, (2 + (m & 1)) << tl.maximum((m >> 1) - 1, 0))
    return tl.where(code > 7, -magnitude, magnitude)


@triton.jit
def dequantize_columns(low, high, s, n, b, c, mask, blocks, KIND: tl.constexpr):
    """Return columns c of blocks b of rows n, where `mask` is true, before the unit. gemv.py draws the planes.

    s: scales of the blocks. All are broadcast."""
    stride = plane_stride(blocks)
    if KIND == "q8":
        word = tl.load(low + (n * 8 + c // 4) * stride + b, mask=mask, other=0)
        value = ((word << (24 - 8 * (c % 4))) >> 24).to(tl.float32)
    elif KIND == "e4m3":
        word = tl.load(low + (n * 8 + c // 4) * stride + b, mask=mask, other=0)
        value = e4m3_to_half(word >> (8 * (c % 4))).to(tl.float32)
    elif KIND == "mxfp4" or KIND == "nvfp4":
        word = tl.load(low + (n * 4 + (c % 16) // 4) * stride + b, mask=mask, other=0)
        value = doubled_e2m1((word >> (8 * (c % 4) + 4 * (c // 16))) & 15).to(tl.float32)
    else:
        word = tl.load(low + (n * 4 + (c % 16) // 4) * stride + b, mask=mask, other=0)
        code = (word >> (8 * (c % 4) + 4 * (c // 16))) & 15
        if KIND == "q6":
            h = tl.load(high + (n * 4 + c % 16 // 4) * stride + b, mask=mask, other=0)
            code = code | (((h >> high_bit_shift(c)) & 3) << 4)
        elif KIND == "q5" or KIND == "q5m":
            h = tl.load(high + (n * 2 + c % 16 // 8) * stride + b, mask=mask, other=0)
            code = code | (((h >> (high_bit_shift(c) + c // 4 % 2)) & 1) << 4)
        value = (code - code_offset(KIND)).to(tl.float32)
    if KIND == "q6" or KIND == "nvfp4":
        value = value * tl.where(c < 16, low_half(s), high_half(s))
    elif KIND == "q4m" or KIND == "q5m":
        value = value * low_half(s) + high_half(s)
    else:
        value = value * s.to(tl.float32)
    return value


@triton.jit(do_not_specialize=["rows"])
def dequantize(
    low,
    high,
    scales,
    out,
    rows,
    blocks,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    small=None,
    table=None,
):
    """Write the matrix before the unit as (rows, columns): ROWS rows and TILE_BLOCKS blocks of each per program."""
    n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    b = (tl.program_id(1) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS))[None, :]
    mask = (n < rows) & (b < blocks)
    if is_compact(COMPACT, KIND):
        value = block_values(load_block(low, high, small, scales, n, b, mask, blocks, KIND, ""), table, KIND)
    else:
        s = tl.load(scales + n * plane_stride(blocks) + b, mask=mask, other=0)
        value = tl.reshape(join_words(low, high, s, n, b, mask, blocks, KIND), (ROWS, TILE_BLOCKS, 32))
    at = (n.to(tl.int64) * blocks + b)[:, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask[:, :, None])


@triton.jit
def join_words(low, high, s, n, b, mask, blocks, KIND: tl.constexpr):
    """Return whole blocks before the unit: (rows, blocks, 2, 2, 2, 2, 2) float16, columns in order."""
    w = join_last(low, high, s, n, b, mask, blocks, 0, KIND)
    x = join_last(low, high, s, n, b, mask, blocks, 1, KIND)
    y = join_last(low, high, s, n, b, mask, blocks, 2, KIND)
    z = join_last(low, high, s, n, b, mask, blocks, 3, KIND)
    out = ()
    for i in tl.static_range(4):  # 2 p + r
        out = out + (tl.join(tl.join(w[i], y[i]), tl.join(x[i], z[i])),)
    return tl.join(tl.join(out[0], out[1]), tl.join(out[2], out[3]))


@triton.jit
def join_last(low, high, s, n, b, mask, blocks, i: tl.constexpr, KIND: tl.constexpr):
    """Return columns 2 r + p of word i as a tensor for each 2 p + r, with those of the last sixteen beside them."""
    word, extra = load_word(low, high, n, i, b, mask, blocks, KIND)
    e = dequantize_word(word, extra, s, i % 2 if KIND == "q5" or KIND == "q5m" else 0, KIND)
    return tl.join(e[0], e[2]), tl.join(e[1], e[3]), tl.join(e[4], e[6]), tl.join(e[5], e[7])


def half_pair(number):
    """Return two equal float16 as a PTX word."""
    bits = struct.unpack("<H", struct.pack("<e", number))[0]
    return f"0x{bits:04X}{bits:04X}"


SCALE_PTX = {  # $10: scales; $11: minima. s, z (scales), m, y (minima): of the first and the last sixteen columns
    "one": "mov.b32 s, {$10, $10}; mov.b32 z, s;",
    "minimum": "prmt.b32 s, $10, $10, 0x1010; mov.b32 z, s; prmt.b32 m, $10, $10, 0x3232; mov.b32 y, m;",
    "two": "prmt.b32 s, $10, $10, 0x1010; prmt.b32 z, $10, $10, 0x3232;",
    "two and minima": "prmt.b32 s, $10, $10, 0x1010; prmt.b32 z, $10, $10, 0x3232;"
    " prmt.b32 m, $11, $11, 0x1010; prmt.b32 y, $11, $11, 0x3232;",
}
# Of kinds; "bytes" are the codes of compact kinds, with minima in operand $11 or without.
SCALE_LAYOUT = {
    "q4": "one",
    "q5": "one",
    "q8": "one",
    "q4m": "minimum",
    "q5m": "minimum",
    "q6": "two",
    "bytes": "two",
    "mxfp4": "one",
    "nvfp4": "two",
    "e4m3": "one",
    "bytes and minima": "two and minima",
}
SIGNED_BYTES = ("q8", "bytes", "bytes and minima")
FLOAT4 = ("mxfp4", "nvfp4")  # E2M1


def word_ptx(kind, word):
    """Return the PTX that dequantizes word $8, with $9 (high bits or bytes) and scales $10, to $0 .. $7.

    Two columns at a time, c and c + 2, are halves of the word already: their bits are put below those of the float16
    1024, whose last place is one (of the last sixteen columns: 16), and 1024 is subtracted: exact. Then the scale.
    """
    offset = code_offset(kind)
    start = half_pair(-1152.0 if kind in SIGNED_BYTES else -1024.0 - offset)
    lines = [".reg .b32 a, b, f, g, t, s, z, m, y, k, l, q; .reg .b16 n;", SCALE_PTX[SCALE_LAYOUT[kind]]]
    if kind in FLOAT4:
        lines.append(f"mov.b32 k, {half_pair(2.0**15)}; mul.rn.f16x2 s, s, k; mul.rn.f16x2 z, z, k;")
    lines.append(f"mov.b32 k, {start}; mov.b32 l, {half_pair(-64.0 - offset)}; mov.b32 q, {half_pair(1 / 16)};")
    if kind in ("q5", "q5m", "q6"):  # f: fields at 4 and 8, b: at 8 (from 0), g: at 4 (from 12)
        lines.append("mov.b16 n, 0; mov.b32 f, {$9, n}; shl.b32 b, f, 14; or.b32 f, f, b;")
        lines.append(f"shr.u32 f, f, {word}; shl.b32 b, f, 8; shr.u32 g, f, 8;")
    for odd in (0, 1):
        for last in (0, 1):
            lines += pair_ptx(kind, odd, last)
            lines.append(f"mov.b32 {{${4 * odd + 2 * last}, ${4 * odd + 2 * last + 1}}}, t;")
    return "{ " + "\n".join(lines) + " }"


def shift_ptx(to, left):
    """Return the line that shifts word $8 to the left, or to the right if `left` is negative."""
    return f"shl.b32 {to}, $8, {left};" if left >= 0 else f"shr.u32 {to}, $8, {-left};"


def pair_ptx(kind, odd, last):
    """Return the lines that leave columns odd and odd + 2 of the first or the last sixteen in t."""
    if kind in SIGNED_BYTES:  # with the sign flipped: 1024 + 128 + value
        lines = [
            f"shr.u32 a, {'$9' if last else '$8'}, {8 * odd};",
            "lop3.b32 t, a, 0x00FF00FF, 0x64806480, 0x6A; add.rn.f16x2 t, t, k;",
        ]
    elif kind in FLOAT4:  # exponent and mantissa are those of a float16 of 2**-14 times the value, its sign is the top
        place = 8 * odd + 4 * last
        lines = [
            f"{shift_ptx('b', 9 - place)} and.b32 b, b, 0x0E000E00;",
            f"{shift_ptx('t', 12 - place)} lop3.b32 t, t, 0x80008000, b, 0xEA;",
        ]
    elif kind == "e4m3":  # likewise, of 2**-8 times the value
        lines = [
            f"shr.u32 a, {'$9' if last else '$8'}, {8 * odd}; shl.b32 b, a, 7; and.b32 b, b, 0x3F803F80;",
            "shl.b32 t, a, 8; lop3.b32 t, t, 0x80008000, b, 0xEA;",
        ]
    else:
        nibbles = 0x00F000F0 if last else 0x000F000F
        lines = [f"shr.u32 a, $8, {8 * odd}; lop3.b32 t, a, {nibbles}, 0x64006400, 0xEA;"]
        if kind in ("q5", "q5m", "q6"):
            mask = (0x03000300 if last else 0x00300030) if kind == "q6" else (0x01000100 if last else 0x00100010)
            field = {(0, 0): "f", (0, 1): "b", (1, 0): "g", (1, 1): "f"}[odd, last]
            lines.append(f"lop3.b32 t, {field}, {mask}, t, 0xEA;")
        lines.append("fma.rn.f16x2 t, t, q, l;" if last else "add.rn.f16x2 t, t, k;")
    scale, minimum = ("z", "y") if last else ("s", "m")
    has_minimum = "minim" in SCALE_LAYOUT[kind]
    return [*lines, f"fma.rn.f16x2 t, t, {scale}, {minimum};" if has_minimum else f"mul.rn.f16x2 t, t, {scale};"]


def word_operands(kind):
    """Return the operand constraints of a kind: half words or words."""
    extra = "h" if kind in ("q5", "q5m", "q6") else "r"
    scales = "h" if SCALE_LAYOUT[kind] == "one" else "r"
    return "=h," * 8 + f"r,{extra},{scales}" + (",r" if kind == "bytes and minima" else "")


WORD_PTX = tl.constexpr({kind: word_ptx(kind, 0) for kind in SCALE_LAYOUT})
SECOND_WORD_PTX = tl.constexpr({kind: word_ptx(kind, 1) for kind in SCALE_LAYOUT})  # of two that share a half word
WORD_OPERANDS = tl.constexpr({kind: word_operands(kind) for kind in SCALE_LAYOUT})


@triton.constexpr_function
def lookup(table, kind):
    """Index a table of texts at compile time."""
    return table[kind]


@triton.jit
def dequantize_bytes(first, last, s, minima, HAS_MINIMA: tl.constexpr):
    """Return the eight columns of two words of signed codes in the order of `dequantize_word`.
    s, minima: two float16 of the first and the last sixteen columns."""
    if INTERPRETED:
        out = ()
        for c in tl.static_range(8):  # odd, last, r
            code = signed_byte(last if c // 2 % 2 else first, c // 4 + 2 * (c % 2)).to(tl.float32)
            value = code * (high_half(s) if c // 2 % 2 else low_half(s))
            if HAS_MINIMA:
                value = value + (high_half(minima) if c // 2 % 2 else low_half(minima))
            out = out + (value.to(tl.float16),)
        return out
    KIND: tl.constexpr = "bytes and minima" if HAS_MINIMA else "bytes"
    return tl.inline_asm_elementwise(
        lookup(WORD_PTX, KIND),
        lookup(WORD_OPERANDS, KIND),
        [first, last, s, minima] if HAS_MINIMA else [first, last, s],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def dequantize_word(word, extra, s, j: tl.constexpr, KIND: tl.constexpr):
    """Return the eight columns of each word as float16: (c, c + 2) of the first, of the last sixteen for c = 0, then 1.
    `extra` holds the last sixteen bytes or the high bits (of word j of two that share them)."""
    if INTERPRETED:
        e = dequantize_pair(word, extra, s, 0, 0, j, KIND) + dequantize_pair(word, extra, s, 0, 1, j, KIND)
        return e + dequantize_pair(word, extra, s, 1, 0, j, KIND) + dequantize_pair(word, extra, s, 1, 1, j, KIND)
    TEXT: tl.constexpr = lookup(SECOND_WORD_PTX, KIND) if j else lookup(WORD_PTX, KIND)
    return tl.inline_asm_elementwise(
        TEXT,
        lookup(WORD_OPERANDS, KIND),
        [word, extra, s],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def dequantize_pair(word, extra, s, odd: tl.constexpr, last: tl.constexpr, j: tl.constexpr, KIND: tl.constexpr):
    """Return columns odd and odd + 2 of the first or the last sixteen: the plain twin of the PTX."""
    out = ()
    for r in tl.static_range(2):
        c: tl.constexpr = odd + 2 * r
        if KIND == "q8":
            code = signed_byte(extra if last else word, c)
        elif KIND == "e4m3":
            code = e4m3_to_half((extra if last else word) >> (8 * c))
        else:
            code = (word >> (8 * c + 4 * last)) & 15
            if KIND == "q6":
                code = code | (((extra.to(tl.int32) >> high_bit_shift(16 * last + c)) & 3) << 4)
            elif KIND == "q5" or KIND == "q5m":
                code = code | (((extra.to(tl.int32) >> (high_bit_shift(16 * last + c) + j)) & 1) << 4)
        if KIND == "mxfp4" or KIND == "nvfp4":
            code = doubled_e2m1(code)
        value = (code - code_offset(KIND)).to(tl.float32)
        if KIND == "q4" or KIND == "q5" or KIND == "q8" or KIND == "mxfp4" or KIND == "e4m3":
            value = value * s.to(tl.float32)
        elif KIND == "q4m" or KIND == "q5m":
            value = value * low_half(s) + high_half(s)
        else:
            value = value * (high_half(s) if last else low_half(s))
        out = out + (value.to(tl.float16),)
    return out
