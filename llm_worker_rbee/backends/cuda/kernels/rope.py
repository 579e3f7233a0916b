"""RoPE: loading a head rotated, and the kernel that rotates queries and writes keys and values to the cache.

The first 2 * HALF of the DIM values of a head are rotated, i with i + HALF; the others are copied. A head is held in
registers padded to a power of two; without padding, loads and stores have no predicates.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...ops import KVLayer, RopeTable
from ..device import is_interpreted, pdl_options
from ..packed_weight import E4M3, E4M3_MAX
from .intrinsics import launch_next, sum_squares, wait_for_previous


class CosSin(NamedTuple):
    """Cosines and sines of RoPE, (positions, half), and the factor of queries by position, if there is one."""

    cos: torch.Tensor
    sin: torch.Tensor
    q_scale: torch.Tensor | None = None  # (positions,)


def rope_tables(table: RopeTable, positions: torch.Tensor) -> CosSin:
    """Return cosines and sines of positions: angles in float32, as everywhere, their functions exact. Positions on
    several axes, (tokens, axes), give each pair's of its own."""
    turns = positions[:, None] if table.axes is None or positions.dim() == 1 else positions[:, table.axes]
    angles = turns.float() * torch.tensor(table.inv_freq, device=positions.device)
    cos, sin = (f(angles.double()).mul(table.scale).float().contiguous() for f in (torch.cos, torch.sin))
    if not table.temperature_beta:
        return CosSin(cos, sin)
    steps = torch.log1p((positions // table.temperature_length).double())
    return CosSin(cos, sin, (1 + table.temperature_beta * steps).float())


@triton.constexpr_function
def padded_dim(dim):
    """Return the values of a head in registers: a power of two that the tensor cores take."""
    return max(16, triton.next_power_of_2(dim))


@triton.jit
def load_first(pointers, COUNT: tl.constexpr, other: tl.constexpr = 0.0):
    """Load the first COUNT values of the last axis; without predicates if these are all."""
    SIZE: tl.constexpr = pointers.shape[-1]
    if COUNT == SIZE:
        return tl.load(pointers)
    return tl.load(pointers, mask=tl.arange(0, SIZE) < COUNT, other=other)


@triton.jit
def store_first(pointers, values, COUNT: tl.constexpr):
    """Store the first COUNT values of the last axis in the dtype of the target."""
    SIZE: tl.constexpr = pointers.shape[-1]
    values = values.to(pointers.dtype.element_ty)
    if COUNT == SIZE:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=tl.arange(0, SIZE) < COUNT)


@triton.jit
def load_head(
    row, head, column, bias, part_stride, DIM: tl.constexpr, PARTS: tl.constexpr, COUNT: tl.constexpr, factor=None
):
    """Load the first COUNT of `column` of a head as float32: the sum of PARTS partial products, `part_stride` apart,
    times the factor of their row, and the bias."""
    x = load_first(row + head * DIM + column, COUNT).to(tl.float32)
    for s in tl.static_range(1, PARTS):
        x += load_first(row + s * part_stride + head * DIM + column, COUNT).to(tl.float32)
    if factor is not None:
        x *= factor
    if bias is not None:
        x += load_first(bias + head * DIM + column, COUNT)
    return x


@triton.jit
def load_cos_sin(cos, sin, position, DIM: tl.constexpr, HALF: tl.constexpr):
    """Load the factors of a value and of its pair at a position: 1 and 0 where nothing is rotated."""
    i = tl.arange(0, padded_dim(DIM))
    cosines = load_first(cos + position * HALF + i % HALF, 2 * HALF, 1.0)
    sines = load_first(sin + position * HALF + i % HALF, 2 * HALF) * tl.where(i < HALF, -1.0, 1.0)
    return cosines, sines


@triton.jit
def load_rotated(
    row, head, cosines, sines, bias, norm, eps, part_stride,
    DIM: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr, EXACT: tl.constexpr = False, factor=None,
):  # fmt: skip
    """Load a head (or a column of heads), apply its norm if there is one, and rotate: value i pairs with i + HALF."""
    i = tl.arange(0, padded_dim(DIM))
    j = (i + HALF) % (2 * HALF) if 2 * HALF == padded_dim(DIM) else tl.where(i < HALF, i + HALF, i - HALF)
    x = load_head(row, head, i, bias, part_stride, DIM, PARTS, DIM, factor)
    y = load_head(row, head, j, bias, part_stride, DIM, PARTS, 2 * HALF, factor)
    if norm is not None:
        factor = tl.rsqrt(sum_squares(x, EXACT) / DIM + eps)
        x = x * factor * load_first(norm + i, DIM)
        y = y * factor * load_first(norm + j, 2 * HALF)
    return x * cosines + y * sines


@triton.jit
def load_value(
    row,
    head,
    bias,
    eps,
    part_stride,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    V_NORM: tl.constexpr,
    EXACT: tl.constexpr = False,
    factor=None,
):
    """Load a head of values (or a column of heads), with V_NORM by its norm without a weight."""
    x = load_head(row, head, tl.arange(0, padded_dim(DIM)), bias, part_stride, DIM, PARTS, DIM, factor)
    if V_NORM:
        x = x * tl.rsqrt(sum_squares(x, EXACT) / DIM + eps)
    return x


@triton.jit
def new_kv(
    row, kv_head, cosines, sines, bias, k_norm, eps, part_stride, k_cache, v_cache, table, position, stores,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr,
    PARTS: tl.constexpr, V_NORM: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Return the key and the value of a token in the cache's type, made from its row and, if `stores`, stored in the
    cache; SHARED: those that another layer has stored there."""
    KV_TYPE: tl.constexpr = k_cache.dtype.element_ty
    if SHARED:
        at = cache_offset(table, position, kv_head, KV_HEADS, DIM, P)
        k, v = load_first(k_cache + at, DIM), load_first(v_cache + at, DIM)
    else:
        k = load_rotated(row, HEADS + kv_head, cosines, sines, bias, k_norm, eps, part_stride, DIM, HALF, PARTS)
        k = k.to(KV_TYPE)
        v = load_value(row, HEADS + KV_HEADS + kv_head, bias, eps, part_stride, DIM, PARTS, V_NORM).to(KV_TYPE)
        if stores:
            at = cache_offset(table, position, kv_head, KV_HEADS, DIM, P)
            store_first(k_cache + at, k, DIM)
            store_first(v_cache + at, v, DIM)
    return k, v


@triton.jit
def cache_offset(table, position, kv_head, KV_HEADS: tl.constexpr, DIM: tl.constexpr, P: tl.constexpr):
    """Return where the cache has the values of a head of the token at a position."""
    block = tl.load(table + position // P).to(tl.int64)
    return ((block * KV_HEADS + kv_head) * P + position % P) * DIM + tl.arange(0, padded_dim(DIM))


@triton.jit(do_not_specialize=["tokens"])
def rope_store_qkv(
    qkv, cos, sin, positions, slot_mapping, q_out, k_cache, v_cache,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr,
    bias=None, q_norm=None, k_norm=None, eps=0.0, tokens=0, PARTS: tl.constexpr = 1,
    HEADS_PER_PROGRAM: tl.constexpr = 1, EXACT: tl.constexpr = False, q_scale=None, V_NORM: tl.constexpr = False,
    row_factors=None, GROUPS: tl.constexpr = 1, PDL: tl.constexpr = False,
):  # fmt: skip
    """Rotate queries of qkv (PARTS, tokens, ...) into q_out (tokens, HEADS, DIM) and keys into their slot, and copy
    values there.

    Program token * GROUPS + heads; HEADS_PER_PROGRAM divides both numbers of heads. A negative slot is padding. Without
    KV heads nothing is stored. `row_factors` multiply the rows of qkv."""
    first = tl.program_id(0) % GROUPS * HEADS_PER_PROGRAM
    head = first + tl.arange(0, HEADS_PER_PROGRAM)[:, None]
    t = tl.program_id(0) // GROUPS
    i = tl.arange(0, padded_dim(DIM))
    launch_next(PDL)
    slot = tl.load(slot_mapping + t).to(tl.int64)
    wait_for_previous(PDL)
    if slot < 0:
        return
    factor = row_factors
    if row_factors is not None:
        factor = tl.load(row_factors + t)
    row = qkv + t.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM)
    part_stride = tokens * ((HEADS + 2 * KV_HEADS) * DIM)
    cosines, sines = load_cos_sin(cos, sin, tl.load(positions + t), DIM, HALF)
    if first < HEADS:
        x = load_rotated(row, head, cosines, sines, bias, q_norm, eps, part_stride, DIM, HALF, PARTS, EXACT, factor)
        if q_scale is not None:
            x *= tl.load(q_scale + tl.load(positions + t))
        store_first(q_out + (t.to(tl.int64) * HEADS + head) * DIM + i, x, DIM)
    elif KV_HEADS > 0:
        kv_head = (head - HEADS) % KV_HEADS
        target = ((slot // P * KV_HEADS + kv_head) * P + slot % P) * DIM + i
        if first < HEADS + KV_HEADS:
            x = load_rotated(row, head, cosines, sines, bias, k_norm, eps, part_stride, DIM, HALF, PARTS, EXACT, factor)
            store_first(k_cache + target, x, DIM)
        else:
            x = load_value(row, head, bias, eps, part_stride, DIM, PARTS, V_NORM, EXACT, factor)
            store_first(v_cache + target, x, DIM)


def launch_rope_store(
    qkv: torch.Tensor, kv: KVLayer, rope: CosSin, positions: torch.Tensor, slots: torch.Tensor, out: torch.Tensor,
    bias: Any = None, q_norm: Any = None, k_norm: Any = None, eps: float = 0.0, *, exact: bool = False,
    v_norm: bool = False, factors: torch.Tensor | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """Rotate queries of qkv (parts, tokens, rows) to out (tokens, heads, dim), keys to the cache; copy values there.
    `exact`: sums of squares of the norms depend on no order. `factors` multiply the rows of qkv."""
    if is_interpreted() and kv.k.dtype == E4M3:  # which the interpreter rounds wrongly (1.99 -> 1)
        wide = KVLayer(kv.k.float(), kv.v.float())
        norms = bias, q_norm, k_norm, eps
        flags: Any = {"exact": exact, "v_norm": v_norm, "factors": factors}
        launch_rope_store(qkv, wide, rope, positions, slots, out, *norms, **flags)
        for cache, values in zip(kv, wide, strict=True):
            cache.copy_(values.clamp(-E4M3_MAX, E4M3_MAX))
        return
    (tokens, heads, dim), block_size = out.shape, kv.k.shape[2]
    kv_heads = (qkv.shape[2] // dim - heads) // 2  # 0: the layer reads the keys and values of another one
    each = gcd(heads, kv_heads, 8)  # heads of a program
    groups = (heads + 2 * kv_heads) // each
    rope_store_qkv[(groups * tokens,)](
        qkv, rope.cos, rope.sin, positions, slots, out, kv.k, kv.v, heads, kv_heads, dim, rope.cos.shape[1], block_size,
        bias, q_norm, k_norm, eps, qkv.shape[1], qkv.shape[0], each, exact, rope.q_scale, v_norm, factors, groups,
        pdl, num_warps=max(1, each // 2), enable_fp_fusion=False, **pdl_options(pdl),
    )  # fmt: skip
