"""Between the products of larger batches: the residual stream with its norm, and the gate, for the tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from .intrinsics import start_next, wait_before
from .matmul import GROUP, spread_place


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
