"""The small kernels of the op-by-op path: norms, gates, activations as bytes, rotation with the cache write.

Everything is float32 and may have any width: SIZE is the next power of two. They are for the families that the whole
decoder does not know; its own kernels do the same beside the products.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
