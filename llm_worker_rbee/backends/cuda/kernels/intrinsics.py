"""Instructions that Triton lacks: int8 dot products (dp4a) and programmatic dependent launch (PDL); bit unpacking.

The interpreter has no inline assembly: there INTERPRETED is true and each helper takes its plain twin.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def signed_byte(word, i: tl.constexpr):
    """Return signed byte i of each word."""
    return (word << (24 - 8 * i)) >> 24


@triton.jit
def e4m3_to_half(word):
    """Return 2**-8 times the e4m3 number in the lowest byte of each word: shifted, it is a float16."""
    return (((word & 128) << 8) | ((word & 127) << 7)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def dp4a(a, b, c):
    """Return c + the sum of four products of signed bytes."""
    if INTERPRETED:
        for i in tl.static_range(4):
            c += signed_byte(a, i) * signed_byte(b, i)
        return c
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def dp4a_us(a, b, c):
    """Return the same for unsigned bytes of `a`."""
    if INTERPRETED:
        for i in tl.static_range(4):
            c += ((a >> (8 * i)) & 255) * signed_byte(b, i)
        return c
    return tl.inline_asm_elementwise(
        "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )


NIBBLE_LOOKUP_PTX = tl.constexpr("""{ .reg .b32 a, s, l, h, p, r;
and.b32 a, $2, 0x77777777; and.b32 s, $2, 0x88888888; shr.u32 s, s, 1; or.b32 s, s, 0x32103210;
prmt.b32 l, $3, $4, a; prmt.b32 h, $5, $6, a; prmt.b32 p, l, h, s;
shr.u32 a, a, 16; shr.u32 s, s, 16;
prmt.b32 l, $3, $4, a; prmt.b32 h, $5, $6, a; prmt.b32 r, l, h, s;
prmt.b32 $0, p, r, 0x6420; prmt.b32 $1, p, r, 0x7531; }""")


@triton.jit
def lookup_nibbles(word, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr, d: tl.constexpr):
    """Look up eight nibbles in the sixteen bytes a, b, c, d: the bytes of the low nibbles, then of the high ones.

    By byte permutes: of the lower and of the upper eight bytes, then by the nibble's top bit."""
    if INTERPRETED:
        return lookup_low_nibbles(word, a, b, c, d), lookup_low_nibbles(word >> 4, a, b, c, d)
    return tl.inline_asm_elementwise(
        NIBBLE_LOOKUP_PTX, "=r,=r,r,r,r,r,r", [word, a, b, c, d], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )


@triton.jit
def lookup_low_nibbles(word, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr, d: tl.constexpr):
    """Look up the low nibble of each byte: the plain twin of the PTX."""
    out = word & 0
    for i in tl.static_range(4):
        code = (word >> (8 * i)) & 15
        entries = tl.where(code < 8, tl.where(code < 4, a, b), tl.where(code < 12, c, d))
        out = out | (((entries >> (8 * (code & 3))) & 255) << (8 * i))
    return out


@triton.jit
def pack_halves(low, high):
    """Return two numbers as float16 in a 32-bit word."""
    a = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return a | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the writes of the previous kernel are visible. Weights may be read earlier."""
    if PDL:
        gdc_wait()


@triton.jit
def launch_next(PDL: tl.constexpr):
    """Let the next kernel start; it waits before it reads."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def low_half(pair):
    """Return the float16 in the low half of each 32-bit word, as float32."""
    return (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high_half(pair):
    """Return the float16 in the high half, as float32."""
    return (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high_bit_shift(c):
    """Return the shift of the high bits of column c in their half word: two bits of q6, of q5 the even word's bit."""
    return (c % 2) * 8 + (1 - c // 16) * 4 + c % 4 // 2 * 2


@triton.jit
def spread_high_bits(half):
    """Spread the fields of a half word to every fourth bit in byte order: the last sixteen columns at 0, 8, .., the
    first at 4, 12, .."""
    u = half.to(tl.int32) & 0xFFFF
    return u | (u << 14)


@triton.jit
def sum_squares(x, EXACT: tl.constexpr):
    """Return the sums of squares over the last axis, which is kept. EXACT: of integers, whose sum does not depend on
    the order that the compiler chooses; their unit is 2**-50 of the largest square."""
    LAST: tl.constexpr = len(x.shape) - 1
    if not EXACT:
        return tl.sum(x * x, LAST, keep_dims=True)
    largest = tl.maximum(tl.max(tl.abs(x), LAST, keep_dims=True), 1e-15)
    exponent = (largest.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23  # of the next power of two
    scaled = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    total = tl.sum((scaled * scaled * 1125899906842624.0).to(tl.int64), LAST, keep_dims=True)
    unit = (exponent << 23).to(tl.float32, bitcast=True)
    return total.to(tl.float32) * 8.881784197001252e-16 * unit * unit
