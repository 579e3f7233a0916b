"""Products of many tokens with packed weights, on the tensor cores.

A word of a plane holds eight columns of one block. Unpacked, they are eight float16 of one lane, and the lane has four
neighbouring blocks: just what it feeds to the tensor cores, if the columns are summed in that order. So no value of a
weight moves between lanes, and activations are laid out in the order of the sum, by word and by sixteen blocks:

    spread   (4 words, tokens, blocks / 16, 128): of block 16 g + 4 lane + n and column 16 last + 4 word + 2 r + p
             place ((n * 2 + p) * 2 + last) * 8 + 2 lane + r of group g; blocks that are not there are zeros

For long prompts `dequantize` writes the matrix as bfloat16 once and the vendor's product reads it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .columns import eight_columns
from .intrinsics import high_half, high_place, low_half, start_next, wait_before

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
