"""Kernels between the products of pooling models: norms with biases, MLP activations, means of a sequence's rows.

A token is a program, as in elementwise.py. Partial products (splits, tokens, width) are summed here, multiplied by the
factors of float16 activations, and get their bias; results are stored as activations of the next product, as float32
rows, or both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..packed_weight import Activations
from .elementwise import mean_square, num_blocks, scale_row, store_row, targets
from .gemv import apply_gate

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "tanh")  # of an MLP without gates
MEAN_ROWS, MEAN_COLUMNS = 16, 128  # a program's tile of rows that are averaged


class Product(NamedTuple):
    """A product before its bias: parts to be summed, and the factors of the activations that it was made of."""

    parts: torch.Tensor  # (splits, tokens, width)
    factors: torch.Tensor | None = None  # (tokens,)
    bias: torch.Tensor | None = None  # (width,)


class Results(NamedTuple):
    """Where rows are stored: as activations, as float32, or both."""

    activations: Activations | None = None
    rows: torch.Tensor | None = None


@triton.jit
def load_product(parts, part_rows, factors, bias, t, first, n, mask, width, SPLITS: tl.constexpr):
    """Return columns first + n of row t of a product of `width` columns as float32."""
    x = tl.load(parts + t * width + first + n, mask=mask, other=0.0).to(tl.float32)
    for s in tl.static_range(1, SPLITS):
        x += tl.load(parts + (s * part_rows + t) * width + first + n, mask=mask, other=0.0).to(tl.float32)
    if factors is not None:
        x *= tl.load(factors + t)
    if bias is not None:
        x += tl.load(bias + first + n, mask=mask, other=0.0)
    return x


@triton.jit
def row_mean(y, width: tl.constexpr, EXACT: tl.constexpr):
    """Return the mean of a row (blocks, 32). EXACT: the sum is of integers, in units of 2**-50 of the largest value,
    so that it does not depend on the order that the compiler chooses."""
    if EXACT:
        largest = tl.maximum(tl.max(tl.max(tl.abs(y), 1), 0), 1e-15)
        exponent = (largest.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23  # of the next power of two
        scaled = y * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        total = tl.sum(tl.sum((scaled * 1125899906842624.0).to(tl.int64), 1), 0)
        unit = (exponent << 23).to(tl.float32, bitcast=True)
        return total.to(tl.float32) * 8.881784197001252e-16 * unit / width
    return tl.sum(tl.sum(y, 1), 0) / width


@triton.jit(do_not_specialize=["part_rows", "tokens"])
def add_norm_rows(
    parts, part_rows, part_factors, part_bias, stream, total, weight, bias, out, factors, rows, tokens, eps, post_eps,
    width: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, INTERLEAVED: tl.constexpr,
    CENTERED: tl.constexpr, EXACT: tl.constexpr = False, post=None, stream_scale=None,
):  # fmt: skip
    """Add a product to the residual stream and norm the sum: layer norm if CENTERED, else RMS norm.

    `post` is the weight of an RMS norm of the product before it is added, `total` where the sum is stored, `rows` where
    the norm is stored in float32, `out` as activations. `stream_scale` multiplies the sum."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SIZE)[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = n < width
    y = tl.load(stream + t * width + n, mask=mask, other=0.0)
    if SPLITS > 0:
        delta = load_product(parts, part_rows, part_factors, part_bias, t, 0, n, mask, width, SPLITS)
        if post is not None:
            delta = scale_row(delta, post + n, mask, post_eps, width, EXACT)
        y += delta
        if stream_scale is not None:
            y *= stream_scale
        if total is not None:
            tl.store(total + t * width + n, y, mask=mask)
    if CENTERED:
        y = tl.where(mask, y - row_mean(y, width, EXACT), 0.0)
    z = y * tl.rsqrt(mean_square(y, width, EXACT) + eps) * tl.load(weight + n, mask=mask, other=0.0)
    if bias is not None:
        z += tl.load(bias + n, mask=mask, other=0.0)
    if rows is not None:
        tl.store(rows + t * width + n, z, mask=mask)
    if out is not None:
        store_row(z, t, tokens, out, factors, width, INTERLEAVED)


@triton.jit(do_not_specialize=["tokens"])
def activate_rows(
    parts,
    part_factors,
    part_bias,
    out,
    factors,
    rows,
    tokens,
    width: tl.constexpr,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
):
    """Store act(x) of a product (tokens, width), or with GATED act(gate) * up of one with twice the columns."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SIZE)[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = n < width
    WIDTH: tl.constexpr = 2 * width if GATED else width
    x = load_product(parts, tokens, part_factors, part_bias, t, 0, n, mask, WIDTH, SPLITS)
    if GATED:
        z = apply_gate(
            x, load_product(parts, tokens, part_factors, part_bias, t, width, n, mask, WIDTH, SPLITS), ACTIVATION
        )
    elif ACTIVATION == "relu":
        z = tl.where(x < 0, 0.0, x)  # NaN stays
    elif ACTIVATION == "tanh":
        z = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))
    else:
        z = apply_gate(x, 1.0, ACTIVATION)
    if rows is not None:
        tl.store(rows + t * width + n, z, mask=mask)
    if out is not None:
        store_row(z, t, tokens, out, factors, width, INTERLEAVED)


@triton.jit
def mean_of_rows(x, query_start, out, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Average the rows of a request, ROWS at a time: the order depends on their number alone. Program (request,
    columns)."""
    request = tl.program_id(0)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start, end = tl.load(query_start + request), tl.load(query_start + request + 1)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * width + c[None, :]
        acc += tl.load(x + at, mask=(row < end)[:, None] & (c < width)[None, :], other=0.0)
    mean = tl.sum(acc, 0) / tl.maximum(end - start, 1).to(tl.float32)
    tl.store(out + request.to(tl.int64) * width + c, mean, mask=c < width)


def launch_norm(
    product: Product | None,
    stream: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    results: Results,
    total: torch.Tensor | None = None,
    *,
    centered: bool,
    exact: bool,
    post: tuple[torch.Tensor, float] | None = None,
    stream_scale: float = 1.0,
) -> None:
    """Norm the stream (tokens, width), once a product is added to it; store the sum in `total`. `post`: weight and eps
    of a norm of the product. `exact`: sums depend on no order."""
    tokens, width = stream.shape
    size = num_blocks(width)
    values, factors, is_interleaved = _activation_targets(results.activations)
    parts, part_factors, part_bias = product or (stream[None], None, None)
    post_weight, post_eps = post or (None, 0.0)
    add_norm_rows[(tokens,)](
        parts, parts.shape[1], part_factors, part_bias, stream, total, weight, bias, values, factors, results.rows,
        tokens, eps, post_eps, width, size, 0 if product is None else len(parts), is_interleaved, centered, exact,
        post_weight, None if stream_scale == 1.0 else stream_scale,
        num_warps=max(1, min(8, size // 8)), enable_fp_fusion=False,
    )  # fmt: skip


def launch_activation(product: Product, results: Results, activation: str, *, gated: bool) -> None:
    """Store act(x), or act(gate) * up, of a product."""
    splits, tokens, width = product.parts.shape
    width = width // 2 if gated else width
    size = num_blocks(width)
    values, factors, is_interleaved = _activation_targets(results.activations)
    activate_rows[(tokens,)](
        *product, values, factors, results.rows, tokens, width, size, splits, is_interleaved, activation, gated,
        num_warps=max(1, min(16, size // 16)), enable_fp_fusion=False,
    )  # fmt: skip


def _activation_targets(out: Activations | None) -> tuple[torch.Tensor | None, torch.Tensor | None, bool]:
    if out is None:
        return None, None, False
    values, factors, _, _, is_interleaved = targets(out)
    return values, factors, is_interleaved


def launch_mean(x: torch.Tensor, query_start: torch.Tensor) -> torch.Tensor:
    """Return the mean of each request's rows: (tokens, width) -> (requests, width)."""
    requests, width = len(query_start) - 1, x.shape[1]
    out = torch.empty(requests, width, device=x.device)
    grid = requests, triton.cdiv(width, MEAN_COLUMNS)
    mean_of_rows[grid](x, query_start, out, width, MEAN_ROWS, MEAN_COLUMNS, num_warps=4)
    return out
