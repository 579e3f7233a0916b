"""Between the products of larger batches: the residual stream with its norm, and the gate, for the tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from .gemm import GROUP, spread_place
from .gemv import write_block
from .intrinsics import high_half, high_place, low_half, start_next, wait_before


@triton.jit
def add_norm(
    parts, stream, norm, out, factors, tokens, eps,
    width: tl.constexpr, SIZE: tl.constexpr, SPLIT: tl.constexpr, SPREAD: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """A program a token: parts (SPLIT, tokens, width) join the stream, and its norm goes to the next product, spread
    (matmul.py) or as it is. SIZE is the number of blocks of 32, as a power of two, 16 or more."""
    t = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, SIZE)[:, None]
    c = tl.arange(0, 32)[None, :]
    n = b * 32 + c
    ok = n < width
    start_next(PDL)
    wait_before(PDL)
    y = tl.load(stream + t * width + n, mask=ok, other=0.0)
    for s in tl.static_range(SPLIT):
        y += tl.load(parts + (s * tokens + t) * width + n, mask=ok, other=0.0).to(tl.float32)
    tl.store(stream + t * width + n, y, mask=ok)
    mean = tl.sum(tl.sum(y * y, 1), 0) / width
    z = y * tl.rsqrt(mean + eps) * tl.load(norm + n, mask=ok, other=0.0)
    write_row(z, t, b, c, ok, tokens, out, factors, width, SPREAD)


@triton.jit
def gated(
    parts, out, factors, tokens,
    width: tl.constexpr, SIZE: tl.constexpr, SPLIT: tl.constexpr, SPREAD: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """silu(gate) * up from parts (SPLIT, tokens, 2 * width), a program a token."""
    t = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, SIZE)[:, None]
    c = tl.arange(0, 32)[None, :]
    n = b * 32 + c
    ok = n < width
    start_next(PDL)
    wait_before(PDL)
    gate = tl.zeros((SIZE, 32), tl.float32)
    up = tl.zeros((SIZE, 32), tl.float32)
    for s in tl.static_range(SPLIT):
        at = parts + (s * tokens + t) * (2 * width) + n
        gate += tl.load(at, mask=ok, other=0.0).to(tl.float32)
        up += tl.load(at + width, mask=ok, other=0.0).to(tl.float32)
    write_row(gate / (1.0 + tl.exp(-gate)) * up, t, b, c, ok, tokens, out, factors, width, SPREAD)


@triton.jit
def half_factor(z):
    """The power of two that a row is divided by to fit a float16."""
    most = tl.max(tl.max(tl.abs(z), 1), 0)
    return tl.exp2(tl.ceil(tl.log2(tl.maximum(most, 1e-30))) - 10.0)


@triton.jit
def write_row(z, t, b, c, ok, tokens, out, factors, width: tl.constexpr, SPREAD: tl.constexpr):
    """A token's activations. What is float16 is divided by a power of two, so that it is at most 2**10."""
    if SPREAD:
        factor = half_factor(z)
        tl.store(factors + t, factor)
        groups = (width // 32 + GROUP - 1) // GROUP
        at = out + spread_place(t, b, c, tokens, groups)
        tl.store(at, (z / factor).to(out.dtype.element_ty), mask=b < groups * GROUP)
    elif out.dtype.element_ty == tl.float8e4nv:
        factor = tl.maximum(tl.max(tl.max(tl.abs(z), 1), 0), 1e-30) / 448.0  # the largest there is
        tl.store(factors + t, factor)
        tl.store(out + t * width + b * 32 + c, (z / factor).to(out.dtype.element_ty), mask=ok)
    elif out.dtype.element_ty == tl.float16:
        factor = half_factor(z)
        tl.store(factors + t, factor)
        tl.store(out + t * width + b * 32 + c, (z / factor).to(out.dtype.element_ty), mask=ok)
    else:
        tl.store(out + t * width + b * 32 + c, z.to(out.dtype.element_ty), mask=ok)


@triton.jit
def norm_rows(
    x, residual, weight, out, total, eps, heads, apart, between,
    width: tl.constexpr, SIZE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Program a row: x (tokens, heads, width) may be a view, rows of a token `between` values apart, tokens `apart`."""
    r = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SIZE)
    ok = i < width
    y = tl.load(x + r // heads * apart + r % heads * between + i, mask=ok, other=0.0)
    if ADD:
        y += tl.load(residual + r * width + i, mask=ok, other=0.0)
        tl.store(total + r * width + i, y, mask=ok)
    z = y * tl.rsqrt(tl.sum(y * y, 0) / width + eps) * tl.load(weight + i, mask=ok, other=0.0)
    tl.store(out + r * width + i, z, mask=ok)


@triton.jit
def gate_rows(x, out, width, SIZE: tl.constexpr, GELU: tl.constexpr):
    """Program (piece, token): act(gate) * up from rows of 2 * width."""
    t = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    ok = i < width
    gate = tl.load(x + t * (2 * width) + i, mask=ok, other=0.0)
    up = tl.load(x + t * (2 * width) + width + i, mask=ok, other=0.0)
    inner = gate
    if GELU:  # 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u))
        inner = 2.0 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out + t * width + i, gate / (1.0 + tl.exp(-inner)) * up, mask=ok)


@triton.jit
def to_bytes(x, out, out_d, out_s, tokens, blocks, KB: tl.constexpr, FINE: tl.constexpr):
    """Program (KB blocks, token): bytes as matvec.py wants them. FINE: what they lost too, `tokens` rows further on."""
    t = tl.program_id(1)
    b = tl.program_id(0) * KB + tl.arange(0, KB)
    there = b < blocks
    c = tl.arange(0, 32)[None, :]
    y = tl.load(x + (t * blocks + b[:, None]) * 32 + c, mask=there[:, None], other=0.0)
    for turn in tl.static_range(2 if FINE else 1):
        row = t + turn * tokens
        d = tl.max(tl.abs(y), 1) / 127.0
        q = tl.floor(y * (1.0 / tl.where(d > 0, d, 1.0))[:, None] + 0.5)
        at = ((row * 8 + c // 4) * blocks + b[:, None]) * 4 + c % 4
        tl.store(out + at, q.to(tl.int8), mask=there[:, None])
        tl.store(out_d + row * blocks + b, d, mask=there)
        tl.store(out_s + (row * 2) * blocks + b, tl.sum(tl.where(c < 16, q, 0.0), 1) * d, mask=there)
        tl.store(out_s + (row * 2 + 1) * blocks + b, tl.sum(tl.where(c < 16, 0.0, q), 1) * d, mask=there)
        y = y - q * d[:, None]


@triton.jit
def rotate_store(
    q, k, v, cos, sin, slots, q_out, k_cache, v_cache, q_apart, q_between, k_apart, k_between, v_apart, v_between,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
    P: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Program (head, token): the first 2 * HALF values are rotated by cos, sin (tokens, HALF); a query goes to q_out, a
    key and a value into their slot, cut at what the cache can hold (LARGEST, where it has no infinity)."""
    head = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, SIZE)
    ok = i < DIM
    if head < HEADS:
        at = q + t * q_apart + head * q_between
    elif head < HEADS + KV_HEADS:
        at = k + t * k_apart + (head - HEADS) * k_between
    else:
        at = v + t * v_apart + (head - HEADS - KV_HEADS) * v_between
    x = tl.load(at + i, mask=ok, other=0.0)
    if head < HEADS + KV_HEADS:
        turned = i < 2 * HALF
        partner = tl.where(i < HALF, i + HALF, i - HALF)
        other = tl.load(at + partner, mask=turned, other=0.0) * tl.where(i < HALF, -1.0, 1.0)
        cosines = tl.load(cos + t * HALF + i % HALF, mask=turned, other=1.0)
        x = x * cosines + other * tl.load(sin + t * HALF + i % HALF, mask=turned, other=0.0)
    if head < HEADS:
        tl.store(q_out + (t * HEADS + head) * DIM + i, x.to(q_out.dtype.element_ty), mask=ok)
    else:
        slot = tl.load(slots + t).to(tl.int64)
        to = ((slot // P * KV_HEADS + (head - HEADS) % KV_HEADS) * P + slot % P) * DIM + i
        if LARGEST > 0:
            x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
        if head < HEADS + KV_HEADS:
            tl.store(k_cache + to, x.to(k_cache.dtype.element_ty), mask=ok)
        else:
            tl.store(v_cache + to, x.to(v_cache.dtype.element_ty), mask=ok)


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
