"""Products of 9 and more tokens with packed weights, on the tensor cores.

A word of a plane holds eight columns of one block; taking one of them from each word of a (rows, blocks) tile gives a
(rows, blocks) matrix of one column a block, whose scales are a tile of the same shape: no value moves. Its partner are
the same columns of the activations, so those are laid out by column within the block, (32, tokens, blocks): `spread`.
For long prompts `dequantize` writes the matrix as bfloat16 once and the vendor's product reads it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .intrinsics import column_halves, high_half, low_half, start_next, wait_before


@triton.jit
def spread(x, out, tokens, blocks, KB: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr = False):
    """(tokens, blocks * 32) -> (32, tokens, blocks)."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    b = tl.program_id(1) * KB + tl.arange(0, KB)
    c = tl.arange(0, 32)
    ok = (t < tokens)[:, None, None] & (b < blocks)[None, :, None]
    start_next(PDL)
    wait_before(PDL)
    values = tl.load(x + (t[:, None, None] * blocks + b[None, :, None]) * 32 + c[None, None, :], mask=ok, other=0.0)
    at = (c[None, None, :] * tokens + t[:, None, None]) * blocks + b[None, :, None]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=ok)


@triton.jit
def column(word, high, i, c: tl.constexpr, last: tl.constexpr, KIND: tl.constexpr):
    """Column 16 * last + 4 * i + c of each block, as int32 codes."""
    if KIND == "q8" or KIND == "q8d":
        code = (word << (24 - 8 * c)) >> 24
    else:
        code = (word >> (8 * c + 4 * last)) & 15
        if KIND == "q6":
            code = code | (((high >> (8 * c + 2 * i)) & 3) << 4)
        elif KIND == "q5m" or KIND == "q5":
            code = code | (((high >> (8 * c + 4 * last + i)) & 1) << 4)
    return code


@triton.jit
def number(code, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Small codes as floats, less their offset: put into the last bits of 1024 (float16) or 128 (bfloat16)."""
    if KIND == "q8" or KIND == "q8d":
        value = code.to(DTYPE)
    elif DTYPE == tl.float16:
        OFFSET: tl.constexpr = 8 if KIND == "q4" else (16 if KIND == "q5" else (32 if KIND == "q6" else 0))
        value = (code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - (1024.0 + OFFSET)
        value = value.to(tl.float16)
    else:
        OFFSET: tl.constexpr = 8 if KIND == "q4" else (16 if KIND == "q5" else (32 if KIND == "q6" else 0))
        value = (code | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True) - (128.0 + OFFSET)
        value = value.to(tl.bfloat16)
    return value


@triton.jit
def matmul(
    x, factors, unit, low, high, scales, out, tokens, rows, blocks: tl.constexpr,
    KIND: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, KB: tl.constexpr, DTYPE: tl.constexpr,
    SPLIT: tl.constexpr, FAST: tl.constexpr, STRIDE: tl.constexpr = 0,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """x (32, tokens, blocks) * factors (tokens) @ (rows, columns).T -> out (SPLIT, tokens, rows). A program has BN rows
    and BM tokens."""
    PLANES: tl.constexpr = 8 if KIND == "q8" or KIND == "q8d" else 4
    HIGHS: tl.constexpr = 2 if KIND == "q6" else 1
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n_at = tl.minimum(n, rows - 1)[:, None]
    m_ok = (m < tokens)[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    start_next(PDL)
    wait_before(PDL)
    steps = tl.cdiv(blocks, KB)
    each = tl.cdiv(steps, SPLIT)
    first = tl.program_id(2) * each
    for turn in range(first * 4, tl.minimum(first + each, steps) * 4):
        i = turn % 4  # one word of each block: eight columns
        b = (turn // 4) * KB + tl.arange(0, KB)
        ok = (b < blocks)[None, :]
        s = tl.load(scales + n_at * blocks + b[None, :], mask=ok, other=0)
        word = tl.load(low + (n_at * PLANES + i) * blocks + b[None, :], mask=ok, other=0)
        for last in tl.static_range(2):
            h = word
            if (KIND == "q8" or KIND == "q8d") and last == 1:
                word = tl.load(low + (n_at * PLANES + 4 + i) * blocks + b[None, :], mask=ok, other=0)
            if KIND == "q6":
                h = tl.load(high + (n_at * HIGHS + last) * blocks + b[None, :], mask=ok, other=0)
            elif KIND == "q5" or KIND == "q5m" or KIND == "q4mm":
                h = tl.load(high + n_at * blocks + b[None, :], mask=ok, other=0)
            if KIND == "q6" or KIND == "q8d" or KIND == "q4mm":
                factor = (low_half(s) if last == 0 else high_half(s)).to(DTYPE)
            elif KIND == "q4m" or KIND == "q5m":
                factor = low_half(s).to(DTYPE)
            else:
                factor = s.to(DTYPE)
            for c in tl.static_range(4):
                if FAST:
                    w = column_halves(word, c, last, KIND) * factor
                else:
                    w = number(column(word, h, i, c, last, KIND), KIND, DTYPE) * factor
                if KIND == "q4m" or KIND == "q5m":
                    w = w + high_half(s).to(DTYPE)
                elif KIND == "q4mm":
                    w = w + (low_half(h) if last == 0 else high_half(h)).to(DTYPE)
                at = x + ((16 * last + 4 * i + c) * tokens + m[None, :]) * blocks + b[:, None]
                acc = tl.dot(w, tl.load(at, mask=m_ok & (b < blocks)[:, None], other=0.0), acc)
    wide = STRIDE if STRIDE > 0 else rows  # of a row of `out`, of which this matrix may be a part
    at = (tl.program_id(2) * tokens + m[None, :]) * wide + n[:, None]
    acc = acc * (unit * tl.load(factors + m, mask=m < tokens, other=0.0))[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=m_ok & (n < rows)[:, None])


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
            h = tl.load(high + (n3 * 2 + c3 // 16) * blocks + b3, mask=ok, other=0)
            code = code | (((h >> (8 * (c3 % 4) + 2 * ((c3 % 16) // 4))) & 3) << 4)
        elif KIND == "q5" or KIND == "q5m":
            h = tl.load(high + n3 * blocks + b3 + 0 * c3, mask=ok, other=0)
            code = code | (((h >> (8 * (c3 % 4) + c3 // 4)) & 1) << 4)
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
