"""The first kernel of a step: rows of a table (packed, or numbers) become the stream and the first activations.

With the stream itself as a table it also picks the tokens whose logits are wanted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .epilogue import write_block
from .intrinsics import high_half, high_place, low_half, start_next, wait_before


@triton.jit
def packed_block(low, high, scales, n, block, blocks: tl.constexpr, KIND: tl.constexpr):
    """The 32 values of a block of row n, before the unit: matvec.py draws the planes."""
    PLANES: tl.constexpr = 8 if KIND == "q8" or KIND == "q8d" else 4
    OFFSET: tl.constexpr = 8 if KIND == "q4" else (16 if KIND == "q5" else (32 if KIND == "q6" else 0))
    c = tl.arange(0, 32)
    s = tl.load(scales + n * blocks + block)
    if KIND == "q8" or KIND == "q8d":
        word = tl.load(low + (n * PLANES + c // 4) * blocks + block)
        y = ((word << (24 - 8 * (c % 4))) >> 24).to(tl.float32)
        y = y * (tl.where(c < 16, low_half(s), high_half(s)) if KIND == "q8d" else s.to(tl.float32))
    else:
        word = tl.load(low + (n * PLANES + (c % 16) // 4) * blocks + block)
        code = (word >> (8 * (c % 4) + 4 * (c // 16))) & 15
        if KIND == "q6":
            h = tl.load(high + (n * 4 + c % 16 // 4) * blocks + block)
            code = code | (((h >> high_place(c)) & 3) << 4)
        elif KIND == "q5" or KIND == "q5m":
            h = tl.load(high + (n * 2 + c % 16 // 8) * blocks + block)
            code = code | (((h >> (high_place(c) + c // 4 % 2)) & 1) << 4)
        y = (code - OFFSET).to(tl.float32)
        if KIND == "q6" or KIND == "q4mm":
            y = y * tl.where(c < 16, low_half(s), high_half(s))
            if KIND == "q4mm":
                m = tl.load(high + n * blocks + block)
                y = y + tl.where(c < 16, low_half(m), high_half(m))
        elif KIND == "q4m" or KIND == "q5m":
            y = y * low_half(s) + high_half(s)
        else:
            y = y * s.to(tl.float32)
    return y


@triton.jit
def embed(
    ids, low, high, scales, unit, norm, stream, out, out_d, out_s, out_squares,
    width: tl.constexpr, KIND: tl.constexpr, BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block, token): 32 values of the stream, times the first norm's weight for the first product. KIND
    "numbers" reads `low`. `unit` includes the model's own scale of embeddings."""
    block = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    start_next(PDL)
    wait_before(PDL)
    c = block * 32 + tl.arange(0, 32)
    n = tl.maximum(tl.load(ids + t), 0).to(tl.int64)  # who was not chosen on the device is made again
    if KIND == "numbers":
        y = tl.load(low + n * width + c).to(tl.float32) * unit
    else:
        y = packed_block(low, high, scales, n, block, width // 32, KIND) * unit
    tl.store(stream + t * width + c, y)
    if BYTES is not None:
        tl.store(out_squares + t * (width // 32) + block, tl.sum(y * y, 0))
        z = y * tl.load(norm + c)
        if BYTES:
            write_block(z, t, block, out, out_d, out_s, width // 32)
        else:
            tl.store(out + t * width + c, z.to(out.dtype.element_ty))
