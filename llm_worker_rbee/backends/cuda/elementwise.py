"""Kernels between the products: norms, gates, embedding rows, int8 quantization, RoPE + cache write.

The first group serves larger fused batches (activations for tensor cores), the second the unfused ops (float32, any
width: SIZE is the next power of two), the last is the first kernel of a fused step.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .gemm import GROUP_BLOCKS, interleaved_offset
from .gemv import activate_gate, store_int8_block
from .intrinsics import high_bit_shift, high_half, launch_next, low_half, wait_for_previous
from .packed_weight import DENSE, E4M3, E4M3_MAX, Int8Activations, kernel_outputs

IS_GELU = {"silu": False, "gelu_tanh": True}


@triton.jit
def add_rms_norm_rows(
    parts, residual, norm, out, factors, tokens, eps,
    width: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr = False,
    post=None, out_scales=None, out_sums=None,
):  # fmt: skip
    """Add parts (SPLITS, tokens, width) to the residual stream and store its norm as activations of the next product.

    A token per program. SIZE is the number of blocks of 32, rounded up to a power of two, 16 or more. `post` is the
    weight of a norm of the parts' sum before it is added. With `out_scales`, activations are int8 blocks."""
    t = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, SIZE)[:, None]
    c = tl.arange(0, 32)[None, :]
    n = b * 32 + c
    mask = n < width
    launch_next(PDL)
    wait_for_previous(PDL)
    y = tl.load(residual + t * width + n, mask=mask, other=0.0)
    if post is None:
        for s in tl.static_range(SPLITS):
            y += tl.load(parts + (s * tokens + t) * width + n, mask=mask, other=0.0).to(tl.float32)
    else:
        delta = tl.load(parts + t * width + n, mask=mask, other=0.0).to(tl.float32)
        for s in tl.static_range(1, SPLITS):
            delta += tl.load(parts + (s * tokens + t) * width + n, mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(tl.sum(delta * delta, 1), 0) / width + eps)
        y += delta * scale * tl.load(post + n, mask=mask, other=0.0)
    tl.store(residual + t * width + n, y, mask=mask)
    mean = tl.sum(tl.sum(y * y, 1), 0) / width
    z = y * tl.rsqrt(mean + eps) * tl.load(norm + n, mask=mask, other=0.0)
    if out_scales is not None:
        store_int8_blocks(z, t, tl.arange(0, SIZE), out, out_scales, out_sums, width // 32)
    else:
        store_row(z, t, b, c, mask, tokens, out, factors, width, INTERLEAVED)


@triton.jit
def swiglu_rows(
    parts, out, factors, tokens,
    width: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr = False, GELU: tl.constexpr = False, out_scales=None, out_sums=None,
):  # fmt: skip
    """Store act(gate) * up of parts (SPLITS, tokens, 2 * width) as activations, a token per program.

    With `out_scales`, activations are int8 blocks."""
    t = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, SIZE)[:, None]
    c = tl.arange(0, 32)[None, :]
    n = b * 32 + c
    mask = n < width
    launch_next(PDL)
    wait_for_previous(PDL)
    gate = tl.zeros((SIZE, 32), tl.float32)
    up = tl.zeros((SIZE, 32), tl.float32)
    for s in tl.static_range(SPLITS):
        at = parts + (s * tokens + t) * (2 * width) + n
        gate += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(at + width, mask=mask, other=0.0).to(tl.float32)
    z = activate_gate(gate, GELU) * up
    if out_scales is not None:
        store_int8_blocks(z, t, tl.arange(0, SIZE), out, out_scales, out_sums, width // 32)
    else:
        store_row(z, t, b, c, mask, tokens, out, factors, width, INTERLEAVED)


@triton.jit
def store_int8_blocks(y, row, b, out, out_scales, out_sums, blocks):
    """Quantize blocks b of a row, y (blocks, 32), with their scales and sums; return the rounding errors."""
    c = tl.arange(0, 32)[None, :]
    mask = b < blocks
    d = tl.max(tl.abs(y), 1) / 127.0
    q = tl.floor(y * (1.0 / tl.where(d > 0, d, 1.0))[:, None] + 0.5)
    at = ((row * 8 + c // 4) * blocks + b[:, None]) * 4 + c % 4
    tl.store(out + at, q.to(tl.int8), mask=mask[:, None])
    tl.store(out_scales + row * blocks + b, d, mask=mask)
    tl.store(out_sums + (row * 2) * blocks + b, tl.sum(tl.where(c < 16, q, 0.0), 1) * d, mask=mask)
    tl.store(out_sums + (row * 2 + 1) * blocks + b, tl.sum(tl.where(c < 16, 0.0, q), 1) * d, mask=mask)
    return y - q * d[:, None]


@triton.jit
def float16_factor(z):
    """Return the power of two that brings a row to at most 2**10, so that it fits float16."""
    largest = tl.max(tl.max(tl.abs(z), 1), 0)
    return tl.exp2(tl.ceil(tl.log2(tl.maximum(largest, 1e-30))) - 10.0)


@triton.jit
def store_row(z, t, b, c, mask, tokens, out, factors, width: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Store the activations of a token, interleaved (gemm.py) or row-major; float16 and e4m3 divided by a factor."""
    if INTERLEAVED:
        factor = float16_factor(z)
        tl.store(factors + t, factor)
        groups = (width // 32 + GROUP_BLOCKS - 1) // GROUP_BLOCKS
        at = out + interleaved_offset(t, b, c, tokens, groups)
        tl.store(at, (z / factor).to(out.dtype.element_ty), mask=b < groups * GROUP_BLOCKS)
    elif out.dtype.element_ty == tl.float8e4nv:
        factor = tl.maximum(tl.max(tl.max(tl.abs(z), 1), 0), 1e-30) / 448.0  # the largest e4m3
        tl.store(factors + t, factor)
        tl.store(out + t * width + b * 32 + c, (z / factor).to(out.dtype.element_ty), mask=mask)
    elif out.dtype.element_ty == tl.float16:
        factor = float16_factor(z)
        tl.store(factors + t, factor)
        tl.store(out + t * width + b * 32 + c, (z / factor).to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(out + t * width + b * 32 + c, z.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_rows(
    x, residual, weight, out, total, eps, heads, token_stride, row_stride,
    width: tl.constexpr, SIZE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Norm a row per program. x (tokens, heads, width) may be a strided view."""
    r = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SIZE)
    mask = i < width
    y = tl.load(x + r // heads * token_stride + r % heads * row_stride + i, mask=mask, other=0.0)
    if ADD:
        y += tl.load(residual + r * width + i, mask=mask, other=0.0)
        tl.store(total + r * width + i, y, mask=mask)
    z = y * tl.rsqrt(tl.sum(y * y, 0) / width + eps) * tl.load(weight + i, mask=mask, other=0.0)
    tl.store(out + r * width + i, z, mask=mask)


@triton.jit
def gated_rows(x, out, width, SIZE: tl.constexpr, GELU: tl.constexpr):
    """Store act(gate) * up of rows of 2 * width. Program (SIZE columns, token)."""
    t = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = i < width
    gate = tl.load(x + t * (2 * width) + i, mask=mask, other=0.0)
    up = tl.load(x + t * (2 * width) + width + i, mask=mask, other=0.0)
    tl.store(out + t * width + i, activate_gate(gate, GELU) * up, mask=mask)


@triton.jit
def quantize_int8(x, out, out_scales, out_sums, tokens, blocks, TILE_BLOCKS: tl.constexpr, TWO_TERM: tl.constexpr):
    """Quantize activations for gemv.py. Program (TILE_BLOCKS blocks, token). TWO_TERM: the rounding errors too, as rows
    `tokens` further on."""
    t = tl.program_id(1)
    b = tl.program_id(0) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    mask = b < blocks
    c = tl.arange(0, 32)[None, :]
    y = tl.load(x + (t * blocks + b[:, None]) * 32 + c, mask=mask[:, None], other=0.0)
    for i in tl.static_range(2 if TWO_TERM else 1):
        y = store_int8_blocks(y, t + i * tokens, b, out, out_scales, out_sums, blocks)


@triton.jit
def rope_store_rows(
    q, k, v, cos, sin, slot_mapping, q_out, k_cache, v_cache,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
    P: tl.constexpr, MAX_VALUE: tl.constexpr,
):  # fmt: skip
    """Rotate the first 2 * HALF values by cos, sin (tokens, HALF); store queries in q_out, keys and values in their
    slot, clamped to MAX_VALUE where the cache has no infinity. Program (head, token)."""
    head = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, SIZE)
    mask = i < DIM
    if head < HEADS:
        at = q + t * q_token_stride + head * q_head_stride
    elif head < HEADS + KV_HEADS:
        at = k + t * k_token_stride + (head - HEADS) * k_head_stride
    else:
        at = v + t * v_token_stride + (head - HEADS - KV_HEADS) * v_head_stride
    x = tl.load(at + i, mask=mask, other=0.0)
    if head < HEADS + KV_HEADS:
        is_rotated = i < 2 * HALF
        partner = tl.where(i < HALF, i + HALF, i - HALF)
        other = tl.load(at + partner, mask=is_rotated, other=0.0) * tl.where(i < HALF, -1.0, 1.0)
        cosines = tl.load(cos + t * HALF + i % HALF, mask=is_rotated, other=1.0)
        x = x * cosines + other * tl.load(sin + t * HALF + i % HALF, mask=is_rotated, other=0.0)
    if head < HEADS:
        tl.store(q_out + (t * HEADS + head) * DIM + i, x.to(q_out.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slot_mapping + t).to(tl.int64)
        if slot >= 0:  # a negative slot is padding
            to = ((slot // P * KV_HEADS + (head - HEADS) % KV_HEADS) * P + slot % P) * DIM + i
            if MAX_VALUE > 0:
                x = tl.minimum(tl.maximum(x, -MAX_VALUE), MAX_VALUE)
            if head < HEADS + KV_HEADS:
                tl.store(k_cache + to, x.to(k_cache.dtype.element_ty), mask=mask)
            else:
                tl.store(v_cache + to, x.to(v_cache.dtype.element_ty), mask=mask)


@triton.jit
def dequantize_block(low, high, scales, n, block, blocks: tl.constexpr, KIND: tl.constexpr):
    """Return the 32 values of a block of row n, before the unit. gemv.py draws the planes."""
    WORDS_PER_BLOCK: tl.constexpr = 8 if KIND == "q8" or KIND == "q8d" else 4
    OFFSET: tl.constexpr = 8 if KIND == "q4" else (16 if KIND == "q5" else (32 if KIND == "q6" else 0))
    c = tl.arange(0, 32)
    s = tl.load(scales + n * blocks + block)
    if KIND == "q8" or KIND == "q8d":
        word = tl.load(low + (n * WORDS_PER_BLOCK + c // 4) * blocks + block)
        y = ((word << (24 - 8 * (c % 4))) >> 24).to(tl.float32)
        y = y * (tl.where(c < 16, low_half(s), high_half(s)) if KIND == "q8d" else s.to(tl.float32))
    else:
        word = tl.load(low + (n * WORDS_PER_BLOCK + (c % 16) // 4) * blocks + block)
        code = (word >> (8 * (c % 4) + 4 * (c // 16))) & 15
        if KIND == "q6":
            h = tl.load(high + (n * 4 + c % 16 // 4) * blocks + block)
            code = code | (((h >> high_bit_shift(c)) & 3) << 4)
        elif KIND == "q5" or KIND == "q5m":
            h = tl.load(high + (n * 2 + c % 16 // 8) * blocks + block)
            code = code | (((h >> (high_bit_shift(c) + c // 4 % 2)) & 1) << 4)
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
def embed_rows(
    ids, low, high, scales, unit, norm, residual, out, out_scales, out_sums, out_squares,
    width: tl.constexpr, KIND: tl.constexpr, INT8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store rows of a table as the residual stream, and times the first norm's weight as activations.

    Program (block, token). KIND "dense" reads `low`. `unit` includes the model's embedding scale. With the stream as
    the table it selects the tokens whose logits are computed. INT8 None: the stream alone."""
    block = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    launch_next(PDL)
    wait_for_previous(PDL)
    c = block * 32 + tl.arange(0, 32)
    # id -1: sampling was undecided on the device; this row is recomputed
    n = tl.maximum(tl.load(ids + t), 0).to(tl.int64)
    if KIND == "dense":
        y = tl.load(low + n * width + c).to(tl.float32) * unit
    else:
        y = dequantize_block(low, high, scales, n, block, width // 32, KIND) * unit
    tl.store(residual + t * width + c, y)
    if INT8 is not None:
        tl.store(out_squares + t * (width // 32) + block, tl.sum(y * y, 0))
        z = y * tl.load(norm + c)
        if INT8:
            store_int8_block(z, t, block, out, out_scales, out_sums, width // 32)
        else:
            tl.store(out + t * width + c, z.to(out.dtype.element_ty))


def launch_embedding(
    table: Any, scale: float, ids: Any, tokens: int, residual: Any, norm: Any, out: Any, squares: Any, pdl: bool
) -> None:
    """Select rows of a PackedWeight or of a plain tensor; with `out` None store the residual stream alone."""
    is_tensor = isinstance(table, torch.Tensor)
    part: Any = table if is_tensor else table.parts[0]
    kind = DENSE if is_tensor else part.kind
    low = table if is_tensor else (part.values if kind == DENSE else part.low)
    high, scales, unit = (low, low, 1.0) if kind == DENSE else (part.high, part.scales, part.unit)
    to = (residual, residual, residual) if out is None else kernel_outputs(out)
    width = residual.shape[1]
    embed_rows[(width // 32, tokens)](
        ids, low, high, scales, unit * scale, norm, residual, *to, residual if squares is None else squares, width,
        kind, None if out is None else isinstance(out, Int8Activations), pdl,
        num_warps=1, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def launch_add_norm(
    parts: torch.Tensor | None, residual: torch.Tensor, op: Any, out: Any, factors: Any, pdl: bool,
    is_interleaved: bool = False,
) -> None:  # fmt: skip
    """Add parts (splits, tokens, width), by their own norm if `op.post`, to the residual stream; store its norm."""
    tokens, width = residual.shape
    size = max(16, triton.next_power_of_2(width // 32))
    post = None if parts is None or op.post is None else op.post.weight
    values, *int8 = kernel_outputs(out)
    int8 = int8 if isinstance(out, Int8Activations) else [None, None]
    add_rms_norm_rows[(tokens,)](
        residual if parts is None else parts, residual, op.norm.weight, values, values if factors is None else factors,
        tokens, op.norm.eps, width, size, 0 if parts is None else parts.shape[0], is_interleaved, pdl, post, *int8,
        num_warps=max(1, min(8, size // 8)), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def launch_gated(
    parts: torch.Tensor, width: int, out: Any, factors: Any, is_gelu: bool, pdl: bool, is_interleaved: bool = False
) -> None:
    """Store act(gate) * up of parts (splits, tokens, 2 * width) as activations."""
    splits, tokens, _ = parts.shape
    size = max(16, triton.next_power_of_2(width // 32))
    values, *int8 = kernel_outputs(out)
    int8 = int8 if isinstance(out, Int8Activations) else [None, None]
    swiglu_rows[(tokens,)](
        parts, values, values if factors is None else factors, tokens, width, size, splits, is_interleaved, pdl,
        is_gelu, *int8, num_warps=max(1, min(16, size // 16)), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def launch_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the norm of the last axis of x, or of residual + x, which `total` gets; x may be a strided view."""
    width = x.shape[-1]
    rows = x if x.dim() == 3 and x.stride(-1) == 1 else x.reshape(-1, 1, width)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    rms_norm_rows[(rows.shape[0] * rows.shape[1],)](
        rows, x if residual is None else residual.contiguous(), weight, out, out if total is None else total, eps,
        rows.shape[1], rows.stride(0), rows.stride(1), width=width, SIZE=triton.next_power_of_2(width),
        ADD=residual is not None, num_warps=1 if width <= 256 else 8,
    )  # fmt: skip
    return out


def launch_rope_store(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor,
    out: torch.Tensor, kv: Any,
) -> None:  # fmt: skip
    """Rotate q to `out` and k to the cache by cos and sin (tokens, pairs), and copy v there."""
    tokens, heads, dim = q.shape
    kv_heads, block_size = kv.k.shape[1:3]
    rope_store_rows[(heads + 2 * kv_heads, tokens)](
        q, k, v, cos, sin, slots, out, kv.k, kv.v, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, SIZE=triton.next_power_of_2(dim), HALF=cos.shape[1], P=block_size,
        MAX_VALUE=E4M3_MAX if kv.k.dtype == E4M3 else 0.0, num_warps=1,
    )  # fmt: skip
