"""Kernels between the products: norms, gates, layouts of activations, embedding rows.

A token is a program. Fused and single ops run the same kernels, without fused multiply-add: then a value that stays in
registers has the bits of one that was stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..device import pdl_options
from ..packed_weight import Activations, GemvActivations, Int8Activations, PackedWeight, kernel_outputs
from .compact_kinds import COMPACT, block_values, is_compact, load_block
from .gemm import GROUP_BLOCKS, dequantize_columns, interleaved_offset
from .gemv import apply_gate, plane_stride, store_int8_block, store_int8_blocks
from .intrinsics import launch_next, pack_halves, sum_squares, wait_for_previous

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_oai")  # of gates


@triton.jit
def copy_blocks(
    arrays, lengths, offsets, blocks, rows, ROW_WORDS: tl.constexpr, TO_BLOCKS: tl.constexpr, SIZE: tl.constexpr
):
    """Copy blocks, given by number, of arrays, given by address, to rows (blocks, ROW_WORDS) of words, or back."""
    part = tl.program_id(1)
    length, offset = tl.load(lengths + part), tl.load(offsets + part)
    array = tl.load(arrays + part).to(tl.pointer_type(tl.int32))
    array += tl.load(blocks + tl.program_id(0)).to(tl.int64) * length
    rows += tl.program_id(0).to(tl.int64) * ROW_WORDS + offset
    for first in range(0, length, SIZE):
        i = first + tl.arange(0, SIZE)
        if TO_BLOCKS:
            tl.store(array + i, tl.load(rows + i, mask=i < length), mask=i < length)
        else:
            tl.store(rows + i, tl.load(array + i, mask=i < length), mask=i < length)


@triton.jit
def mean_square(y, width: tl.constexpr, EXACT: tl.constexpr):
    """Return the mean of squares of a row (blocks, 32); EXACT: as `sum_squares`."""
    if EXACT:
        total = tl.sum(tl.sum(sum_squares(tl.reshape(y, (1, y.shape[0] * 32)), True), 1), 0)
    else:
        total = tl.sum(tl.sum(y * y, 1), 0)
    return total / width


@triton.jit
def scale_row(y, norm, mask, eps, width: tl.constexpr, EXACT: tl.constexpr):
    """Return the norm of a row (blocks, 32); `norm` are the addresses of its weight."""
    return y * tl.rsqrt(mean_square(y, width, EXACT) + eps) * tl.load(norm, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["part_rows", "tokens"])
def add_rms_norm_rows(
    parts, part_rows, residual, norm, out, factors, tokens, eps,
    width: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr = False,
    EXACT: tl.constexpr = False, post=None, index=None, out_scales=None, out_sums=None, weights=None,
    K: tl.constexpr = 1, shared=None, gate=None, bias=None, stream_scale=None, sum_norm=None, shared_norm=None,
):  # fmt: skip
    """Add parts to the residual stream and store its norm as activations of the next product.

    parts (SPLITS, part_rows, width). SIZE is the number of blocks of 32, rounded up to a power of two, 16 or more.
    `bias` is added to the parts' sum, `post` is the weight of a norm of it before it is added. With `index`, token t is
    row index[t], and the stream ends here. With `out_scales`, activations are int8 blocks. `stream_scale`
    multiplies the stream. Without `norm` the stream itself is stored.

    With `weights` (tokens, K), parts are the K experts' results of a token, (tokens, K, width), and `shared`, times the
    sigmoid of its gate, is the expert of all tokens; `sum_norm` is the weight of a norm of the experts' sum alone,
    `shared_norm` of one of `shared`."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SIZE)[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = n < width
    launch_next(PDL)
    wait_for_previous(PDL)
    row = t
    if index is not None:
        row = tl.load(index + t).to(tl.int64)
    y = tl.load(residual + row * width + n, mask=mask, other=0.0)
    if SPLITS > 0:
        if weights is not None:
            delta = tl.load(parts + row * K * width + n, mask=mask, other=0.0) * tl.load(weights + row * K)
            for s in tl.static_range(1, K):
                part = tl.load(parts + (row * K + s) * width + n, mask=mask, other=0.0)
                delta += part * tl.load(weights + row * K + s)
            if sum_norm is not None:
                delta = scale_row(delta, sum_norm + n, mask, eps, width, EXACT)
            if shared is not None:
                part = tl.load(shared + row * width + n, mask=mask, other=0.0)
                if shared_norm is not None:
                    part = scale_row(part, shared_norm + n, mask, eps, width, EXACT)
                if gate is not None:
                    part = part / (1.0 + tl.exp(-tl.load(gate + row)))
                delta += part
        else:
            delta = tl.load(parts + row * width + n, mask=mask, other=0.0).to(tl.float32)
            for s in tl.static_range(1, SPLITS):
                delta += tl.load(parts + (s * part_rows + row) * width + n, mask=mask, other=0.0).to(tl.float32)
        if bias is not None:
            delta += tl.load(bias + n, mask=mask, other=0.0)
        if post is not None:
            delta = scale_row(delta, post + n, mask, eps, width, EXACT)
        y += delta
        if stream_scale is not None:
            y *= stream_scale
        if index is None:
            tl.store(residual + row * width + n, y, mask=mask)
    if norm is not None:
        y = scale_row(y, norm + n, mask, eps, width, EXACT)
    store_row(y, t, tokens, out, factors, width, INTERLEAVED, out_scales, out_sums)


@triton.jit(do_not_specialize=["tokens"])
def swiglu_rows(
    parts, out, factors, tokens,
    width: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr = False, ACTIVATION: tl.constexpr = "silu", out_scales=None, out_sums=None, inputs=None,
    inputs_stride=0, inputs_first=0,
):  # fmt: skip
    """Store act(gate) * up of parts (SPLITS, tokens, 2 * width) as activations: int8 blocks with `out_scales`.

    With `inputs`, parts are gates alone, (SPLITS, tokens, width), and token t has its factors at t * inputs_stride +
    inputs_first."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SIZE)[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = n < width
    launch_next(PDL)
    wait_for_previous(PDL)
    gate = tl.zeros((SIZE, 32), tl.float32)
    up = tl.zeros((SIZE, 32), tl.float32)
    GATES: tl.constexpr = 2 if inputs is None else 1
    for s in tl.static_range(SPLITS):
        at = parts + (s * tokens + t) * (GATES * width) + n
        gate += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if inputs is None:
            up += tl.load(at + width, mask=mask, other=0.0).to(tl.float32)
    if inputs is not None:
        up = tl.load(inputs + t * inputs_stride + inputs_first + n, mask=mask, other=0.0)
    z = apply_gate(gate, up, ACTIVATION)
    store_row(z, t, tokens, out, factors, width, INTERLEAVED, out_scales, out_sums)


@triton.jit(do_not_specialize=["tokens"])
def convert_rows(
    x,
    out,
    factors,
    tokens,
    width: tl.constexpr,
    SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Store rows x (tokens, width) as activations."""
    t = tl.program_id(0).to(tl.int64)
    launch_next(PDL)
    wait_for_previous(PDL)
    n = tl.arange(0, SIZE)[:, None] * 32 + tl.arange(0, 32)[None, :]
    z = tl.load(x + t * width + n, mask=n < width, other=0.0).to(tl.float32)
    store_row(z, t, tokens, out, factors, width, INTERLEAVED)


@triton.jit
def float16_factor(z):
    """Return the power of two that brings a row to at most 2**10, so that it fits float16."""
    largest = tl.maximum(tl.max(tl.max(tl.abs(z), 1), 0), 1e-30)
    exponent = (largest.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23  # rounded up
    return ((exponent - 10) << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_row(
    z, t, tokens, out, factors, width: tl.constexpr, INTERLEAVED: tl.constexpr, out_scales=None, out_sums=None
):
    """Store the activations (blocks, 32) of a token: int8 blocks with `out_scales`, else interleaved (gemm.py) or
    row-major; float16 and e4m3 divided by a factor."""
    block = tl.arange(0, z.shape[0])
    b, c = block[:, None], tl.arange(0, 32)[None, :]
    at = out + t * width + b * 32 + c
    mask = b * 32 + c < width
    if out_scales is not None:
        store_int8_blocks(z, t, block, block < width // 32, out, out_scales, out_sums, width // 32)
    elif INTERLEAVED:
        factor = float16_factor(z)
        tl.store(factors + t, factor)
        groups = (width // 32 + GROUP_BLOCKS - 1) // GROUP_BLOCKS
        # Columns c and c + 2 are neighbours: one word.
        q, p = tl.arange(0, 8)[None, :, None], tl.arange(0, 2)[None, None, :]
        first, second = tl.split(tl.permute(tl.reshape(z / factor, (z.shape[0], 8, 2, 2)), (0, 1, 3, 2)))
        at = interleaved_offset(t, block[:, None, None], q * 4 + p, tokens, groups) // 2
        words = out.to(tl.pointer_type(tl.int32), bitcast=True)
        is_there = (block < groups * GROUP_BLOCKS)[:, None, None] & (p >= 0) & (q >= 0)
        tl.store(words + at, pack_halves(first, second), mask=is_there)
    elif out.dtype.element_ty == tl.float8e4nv:
        factor = tl.maximum(tl.max(tl.max(tl.abs(z), 1), 0), 1e-30) / 448.0  # the largest e4m3
        tl.store(factors + t, factor)
        tl.store(at, (z / factor).to(out.dtype.element_ty), mask=mask)
    elif out.dtype.element_ty == tl.float16:
        factor = float16_factor(z)
        tl.store(factors + t, factor)
        tl.store(at, (z / factor).to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(at, z.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_rows(
    x,
    weight,
    out,
    eps,
    heads,
    token_stride,
    row_stride,
    width: tl.constexpr,
    SIZE: tl.constexpr,
    EXACT: tl.constexpr = False,
    added=None,
):
    """Norm a head per program. x (tokens, heads, width) may be a strided view. `added` is added to the norm."""
    r = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SIZE)
    mask = i < width
    y = tl.load(x + r // heads * token_stride + r % heads * row_stride + i, mask=mask, other=0.0)
    z = y * tl.rsqrt(sum_squares(y, EXACT) / width + eps) * tl.load(weight + i, mask=mask, other=0.0)
    if added is not None:
        z += tl.load(added + r * width + i, mask=mask, other=0.0)
    tl.store(out + r * width + i, z, mask=mask)


@triton.jit
def embed_rows(
    ids, low, high, scales, unit, norm, residual, out, out_scales, out_sums, out_squares,
    width: tl.constexpr, KIND: tl.constexpr, INT8: tl.constexpr, PDL: tl.constexpr, small=None, table=None,
):  # fmt: skip
    """Store rows of a table as the residual stream, and times the first norm's weight as activations.

    Program token * blocks + block: other axes of a grid end at 65,535. KIND "dense" reads `low`. `unit` includes the
    model's embedding scale. INT8 None: the stream alone."""
    BLOCKS: tl.constexpr = (width + 31) // 32
    block = tl.program_id(0) % BLOCKS
    t = (tl.program_id(0) // BLOCKS).to(tl.int64)
    launch_next(PDL)
    wait_for_previous(PDL)
    c = block * 32 + tl.arange(0, 32)
    mask = c < width  # a dense table may have any width
    # negative: sampling was undecided on the device; this row is recomputed
    n = tl.maximum(tl.load(ids + t), 0).to(tl.int64)
    if KIND == "dense":
        y = tl.load(low + n * width + c, mask=mask, other=0.0).to(tl.float32) * unit
    elif is_compact(COMPACT, KIND):
        b = tl.full((1, 1), block, tl.int32)
        held = load_block(low, high, small, scales, n, b, b >= 0, width // 32, KIND, "")
        y = tl.reshape(block_values(held, table, KIND), (32,)) * unit
    else:
        i = tl.arange(0, 32)
        scale = tl.load(scales + n * plane_stride(width // 32) + block)
        y = dequantize_columns(low, high, scale, n, block, i, i < 32, width // 32, KIND) * unit
    tl.store(residual + t * width + c, y, mask=mask)
    if INT8 is not None:
        tl.store(out_squares + t * (width // 32) + block, tl.sum(y * y, 0))
        z = y * tl.load(norm + c)
        if INT8:
            store_int8_block(z, t, block, out, out_scales, out_sums, width // 32)
        else:
            tl.store(out + t * width + c, z.to(out.dtype.element_ty))


def launch_embedding(
    table: PackedWeight,
    scale: float,
    ids: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor | None = None,
    out: Int8Activations | torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Start the residual stream (tokens, width) with rows of a table of one part; store the first norm to `out`."""
    (part,), (tokens, width) = table.parts, residual.shape
    to = (residual, residual, residual) if out is None else kernel_outputs(out)
    embed_rows[(triton.cdiv(width, 32) * tokens,)](
        ids, part.low if part.values is None else part.values, part.high, part.scales, part.unit * scale,
        residual if norm is None else norm, residual, *to, residual if squares is None else squares, width, part.kind,
        None if out is None else isinstance(out, Int8Activations), pdl, part.small, part.table, num_warps=1,
        **pdl_options(pdl),
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def fill_pending_ids(ids, pending, count, BLOCK: tl.constexpr):
    """Replace each id -1 - r by token r of the step in flight."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + i, mask=i < count, other=0)
    tl.store(ids + i, tl.load(pending - 1 - token, mask=token < 0, other=0), mask=token < 0)


def launch_fill_pending(ids: torch.Tensor, pending: torch.Tensor) -> None:
    """Put the tokens of the step in flight, where a failed one is negative, in the place of pending ids."""
    fill_pending_ids[(triton.cdiv(len(ids), 256),)](ids, pending, len(ids), BLOCK=256, num_warps=2)


def targets(out: Activations | GemvActivations) -> tuple[Any, Any, Any, Any, bool]:
    """Return (values, factors, int8 scales, int8 sums, is interleaved) of activations, as kernels store them."""
    if isinstance(out.values, Int8Activations):
        values, scales, sums = kernel_outputs(out.values)
        return values, values, scales, sums, False
    factors = out.factors if isinstance(out, Activations) else None
    is_interleaved = isinstance(out, Activations) and out.is_interleaved
    return out.values, out.values if factors is None else factors, None, None, is_interleaved


def num_blocks(width: int) -> int:
    """Return the blocks of 32 of a row as kernels hold them: a power of two."""
    return max(16, int(triton.next_power_of_2(triton.cdiv(width, 32))))


class WeightedExperts(NamedTuple):
    """How the results of experts, (1, tokens * k, width), are added up."""

    weights: torch.Tensor  # (tokens, k)
    k: int
    shared: torch.Tensor | None = None  # (tokens, width)
    gate: torch.Tensor | None = None  # (tokens, 1): the logit of its factor
    sum_norm: torch.Tensor | None = None  # weight of a norm of the experts' sum
    shared_norm: torch.Tensor | None = None  # likewise of `shared`


def launch_add_norm(
    parts: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    out: Activations | GemvActivations,
    post: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    pdl: bool = False,
    *,
    exact: bool = False,
    experts: WeightedExperts | None = None,
    bias: torch.Tensor | None = None,
    stream_scale: float = 1.0,
) -> None:
    """Add parts (splits, tokens, width) and `bias`, or those of `experts`, by their own norm if `post`, to the stream;
    store its norm, or itself. With `index`, of these tokens alone, and the stream stays as it is. `exact`: sums of
    squares depend on no order. `stream_scale` multiplies the sum."""
    tokens, width = len(residual) if index is None else len(index), residual.shape[1]
    size = num_blocks(width)
    values, factors, scales, sums, is_interleaved = targets(out)
    splits, parts = (0, residual[None]) if parts is None else (len(parts), parts)
    weights, k, shared, gate, *norms = experts or (None, 1, None, None, None, None)
    add_rms_norm_rows[(tokens,)](
        parts, parts.shape[1], residual, norm, values, factors, tokens, eps, width, size,
        splits, is_interleaved, pdl, exact, post, index, scales, sums, weights, k, shared, gate, bias,
        None if stream_scale == 1.0 else stream_scale, *norms,
        num_warps=max(1, min(16, size // 8)), enable_fp_fusion=False, **pdl_options(pdl),
    )  # fmt: skip


def launch_gated(
    parts: torch.Tensor,
    out: Activations | GemvActivations,
    activation: str,
    pdl: bool = False,
    inputs: torch.Tensor | None = None,
    layer: int = 0,
) -> None:
    """Store act(gate) * up of parts (splits, tokens, 2 * width) as activations; with the `inputs` of all layers,
    act(parts) times those of a layer, parts (splits, tokens, width)."""
    splits, tokens, rows = parts.shape
    width, stride = (rows // 2, 0) if inputs is None else (rows, inputs.shape[1])
    size = num_blocks(width)
    values, factors, scales, sums, is_interleaved = targets(out)
    swiglu_rows[(tokens,)](
        parts, values, factors, tokens, width, size, splits, is_interleaved, pdl, activation, scales, sums, inputs,
        stride, layer * width, num_warps=max(1, min(16, size // 16)), enable_fp_fusion=False, **pdl_options(pdl),
    )  # fmt: skip


def launch_convert(x: torch.Tensor, out: Activations, pdl: bool = False) -> None:
    """Store rows of any float type as activations."""
    tokens, width = x.shape
    size = num_blocks(width)
    values, factors, _, _, is_interleaved = targets(out)
    options: Any = {"num_warps": max(1, min(16, size // 16)), **pdl_options(pdl)}
    convert_rows[(tokens,)](x.contiguous(), values, factors, tokens, width, size, is_interleaved, pdl, **options)


def launch_head_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, exact: bool = False, added: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the norm of the heads of x (tokens, heads, dim), which may be a strided view, plus `added`."""
    tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    rms_norm_rows[(tokens * heads,)](
        x, weight, out, eps, heads, x.stride(0), x.stride(1), dim, triton.next_power_of_2(dim), exact, added,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out
