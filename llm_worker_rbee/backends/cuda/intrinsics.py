"""What Triton has no word for: the dot product of bytes, waiting for the kernel before (PDL).

The interpreter knows no inline assembly: there `PLAIN` is true and each helper is its plain twin.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PLAIN = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def byte(word, i: tl.constexpr):
    """Signed byte i of each word."""
    return (word << (24 - 8 * i)) >> 24


@triton.jit
def dp4a(a, b, c):
    """c + the sum of four products of signed bytes."""
    if PLAIN:
        for i in tl.static_range(4):
            c += byte(a, i) * byte(b, i)
        return c
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def dp4a_us(a, b, c):
    """The same where the bytes of `a` have no sign."""
    if PLAIN:
        for i in tl.static_range(4):
            c += ((a >> (8 * i)) & 255) * byte(b, i)
        return c
    return tl.inline_asm_elementwise(
        "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def wait_before(PDL: tl.constexpr):
    """What the kernel before wrote may be read from here on. Weights may be read earlier."""
    if PDL:
        gdc_wait()


@triton.jit
def start_next(PDL: tl.constexpr):
    """The next kernel may be started: it waits by itself before it reads."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def low_half(pair):
    """The float16 in the low half of each 32-bit word, as float32."""
    return (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high_half(pair):
    """That in the high half."""
    return (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high_place(c):
    """Where the high bits of column c of a block lie in their half word: two bits of q6, of q5 the bit of its word."""
    return (c % 2) * 8 + (1 - c // 16) * 4 + c % 4 // 2 * 2


@triton.jit
def high_fields(half):
    """The half word's fields at every fourth bit: those of the last sixteen columns at 0, 8, .., of the first at 4, 12,
    .., in the order of the bytes of a word."""
    u = half.to(tl.int32) & 0xFFFF
    return u | (u << 14)
