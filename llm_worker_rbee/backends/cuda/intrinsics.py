"""What Triton has no word for: the dot product of bytes, nibbles as halves, waiting for the kernel before (PDL).

The interpreter knows no inline assembly: there `PLAIN` is true and each helper is its plain twin.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PLAIN = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _byte(word, i: tl.constexpr):
    """Signed byte i of each word."""
    return (word << (24 - 8 * i)) >> 24


@triton.jit
def dp4a(a, b, c):
    """c + the sum of four products of signed bytes."""
    if PLAIN:
        for i in tl.static_range(4):
            c += _byte(a, i) * _byte(b, i)
        return c
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def dp4a_us(a, b, c):
    """The same where the bytes of `a` have no sign."""
    if PLAIN:
        for i in tl.static_range(4):
            c += ((a >> (8 * i)) & 255) * _byte(b, i)
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
def prefetch(at, size):
    """Ask for so many bytes (a multiple of 16) to be brought into the L2 cache: a hint, sent by one thread."""
    if not PLAIN:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            .reg .u32 t;
            mov.u32 t, %tid.x;
            setp.eq.u32 p, t, 0;
            @p cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r", [at.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def column_halves(word, c: tl.constexpr, last: tl.constexpr, KIND: tl.constexpr):
    """Column c of four (of the last sixteen, if `last`) in each word as float16, less the kind's offset.

    Two words at a time: their bytes c are put side by side and below the bits of 1024, whose last place is one (of the
    high nibbles sixteen times as much); a fused multiply-add leaves the number, exactly.
    """
    OFFSET: tl.constexpr = 8 if KIND == "q4" else 0
    if PLAIN:
        code = ((word >> (8 * c + 4 * last)) & 15) - OFFSET
        if KIND == "q8" or KIND == "q8d":
            code = (word << (24 - 8 * c)) >> 24
        value = code.to(tl.float16)
    else:
        PICK: tl.constexpr = c | (c << 4) | ((4 + c) << 8) | ((4 + c) << 12)
        if KIND == "q8" or KIND == "q8d":  # the sign turned: 1024 + 128 + value
            value = tl.inline_asm_elementwise(
                "{ .reg .b32 t; prmt.b32 t, $1, $2, $3; lop3.b32 t, t, 0x00FF00FF, 0x64806480, 0x6A;"
                " fma.rn.f16x2 $0, t, $5, $7; }",
                "=r,r,r,r,r,r,r,r,r", [word, PICK, 0x3C003C00, -0x1B7F1B80], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            MASK: tl.constexpr = 0x00F000F0 if last else 0x000F000F
            TIMES: tl.constexpr = 0x2C002C00 if last else 0x3C003C00
            # -64 - offset, -1024 - offset: D400, D480; E400, E408
            LAST: tl.constexpr = -0x2B7F2B80 if OFFSET else -0x2BFF2C00
            FIRST: tl.constexpr = -0x1BF71BF8 if OFFSET else -0x1BFF1C00
            PLUS: tl.constexpr = LAST if last else FIRST
            value = tl.inline_asm_elementwise(
                "{ .reg .b32 t; prmt.b32 t, $1, $2, $3; lop3.b32 t, t, $5, 0x64006400, 0xEA;"
                " fma.rn.f16x2 $0, t, $7, $9; }",
                "=r,r,r,r,r,r,r,r,r,r,r", [word, PICK, MASK, TIMES, PLUS], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
    return value
