"""The gated delta rule, token by token in every phase: the bits of a token do not depend on how a prompt is cut.

A piece is one value head of one request. Its state, k_dim rows of v_dim floats, is read twice for each token: once for
what it holds at the key, once to update it and to read it at the query. Tokens are taken in runs, columns in strips
that stay in the nearest cache for a run; a strip of the state is a sum over rows in their order. The norm of the head
times silu(z) and the quantization for the next product follow while its values are near.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from ...ops import GatedDeltaParams, GatedDeltaWeights
from ..jit import TaskKernel, kernel, types
from . import simd as f
from .dot_int8 import ISA
from .elementwise import norm_row
from .kv_layout import ADDRESSES_PER_LAYER, zero_tile
from .pointers import f32, f64, i64, scratch
from .program import Step, Task, pack_args, pack_floats
from .quantize_activations import quantize_blocks
from .simd import LANES, emit_fma, emit_load, emit_splat, emit_store, emits, f32x16, map_tile, offset_index

RUN = 16  # tokens whose keys and queries are prepared together
STRIP_VECTORS = 4 if "avx512" in ISA else 2  # columns of a state that are updated together: what fits the registers
STRIP = STRIP_VECTORS * LANES
L2_EPS = np.float32(1e-6)

# QKV, Z, GATES, OUT and ACTIVATIONS (optional) are entries of the step.
DeltaArg = IntEnum(
    "DeltaArg",
    "LAYER QKV Z GATES OUT ACTIVATIONS Z_WIDTH K_HEADS V_HEADS K_DIM V_DIM IS_TILED A DT_BIAS NORM EPS",
    start=0,
)


@kernel
def normalize(x, at, width, factor, out, to):
    """Write x divided by its length, times a factor."""
    squares, whole = f.splat(np.float32(0)), width - width % LANES
    for i in range(0, whole, LANES):
        v = f.load(x, at + i)
        squares = f.fma(v, v, squares)
    total = f.hsum(squares)
    for i in range(whole, width):
        total += x[at + i] * x[at + i]
    scale = factor / np.float32(math.sqrt(total + L2_EPS))
    by = f.splat(scale)
    for i in range(0, whole, LANES):
        f.store(out, to + i, f.mul(f.load(x, at + i), by))
    for i in range(whole, width):
        out[to + i] = x[at + i] * scale


@emits(lambda array, index, like: like(array, types.intp, like))
def load_tile(b: Any, array: Any, index: Any, like: Any) -> Any:
    """Load as many vectors as another tile has."""
    return map_tile(b, like.type.count, lambda v: emit_load(b, array, offset_index(b, index, LANES * v), f32x16.ir))


@emits(lambda array, index, tile: types.void(array, types.intp, tile))
def store_tile(b: Any, array: Any, index: Any, tile: Any) -> None:
    """Write the vectors of a tile one after the other."""
    for v in range(tile.type.count):
        emit_store(b, array, offset_index(b, index, LANES * v), b.extract_value(tile, v))


@emits(lambda tile, factor, more: tile(tile, types.float32, more))
def fma_tile(b: Any, tile: Any, factor: Any, more: Any) -> Any:
    """Return tile * factor + more."""
    by = emit_splat(b, factor, f32x16.ir)
    return map_tile(b, tile.type.count, lambda v: emit_fma(b, b.extract_value(tile, v), by, b.extract_value(more, v)))


@emits(lambda tile, factor: tile(tile, types.float32))
def scale_tile(b: Any, tile: Any, factor: Any) -> Any:
    """Return tile * factor."""
    by = emit_splat(b, factor, f32x16.ir)
    return map_tile(b, tile.type.count, lambda v: b.fmul(b.extract_value(tile, v), by))


@kernel
def update_strip(m, at, stride, k_dim, near, k, q, v, v_at, decay, beta, out, to, zeros):
    """Update the columns of a tile in a state by one token, and write what they hold at the query."""
    held, read = zeros, zeros
    for i in range(k_dim):
        held = fma_tile(load_tile(m, at + i * stride, zeros), near[k + i], held)
    delta = scale_tile(fma_tile(held, -decay, load_tile(v, v_at, zeros)), beta)
    for i in range(k_dim):
        row = at + i * stride
        new = fma_tile(delta, near[k + i], scale_tile(load_tile(m, row, zeros), decay))
        store_tile(m, row, new)
        read = fma_tile(new, near[q + i], read)
    store_tile(out, to, read)


@kernel
def gate_head(out, at, z, z_at, count):
    """Multiply by silu(z)."""
    one, minus = f.splat(np.float32(1)), f.splat(np.float32(-1))
    for i in range(0, count, LANES):
        g = f.load(z, z_at + i)
        act = f.div(g, f.add(one, f.exp(f.mul(g, minus))))
        f.store(out, at + i, f.mul(f.load(out, at + i), act))


@kernel
def softplus(x):
    """Return ln(1 + e^x)."""
    return x if x > 30.0 else math.log1p(math.exp(x))


@kernel
def prepare_tokens(args, s, first, count, head, near):
    """Write normalized keys of some tokens for a value head, then queries, then their factors: decay and beta."""
    a = i64(args)
    qkv, gates = f32(s[a[DeltaArg.QKV]]), f32(s[a[DeltaArg.GATES]])
    k_heads, v_heads, dim = a[DeltaArg.K_HEADS], a[DeltaArg.V_HEADS], a[DeltaArg.K_DIM]
    from_head = head % k_heads if a[DeltaArg.IS_TILED] else head // (v_heads // k_heads)
    width, decay = 2 * k_heads * dim + v_heads * a[DeltaArg.V_DIM], np.float64(f32(a[DeltaArg.A])[head])
    for i in range(count):
        t, factors = first + i, 2 * RUN * dim + 2 * i
        at = t * width + from_head * dim
        normalize(qkv, at + k_heads * dim, dim, np.float32(1), near, i * dim)
        normalize(qkv, at, dim, np.float32(1 / math.sqrt(dim)), near, (RUN + i) * dim)
        alpha = np.float64(gates[t * 2 * v_heads + v_heads + head]) + np.float64(f32(a[DeltaArg.DT_BIAS])[head])
        near[factors] = np.float32(math.exp(decay * softplus(alpha)))
        near[factors + 1] = np.float32(1 / (1 + math.exp(-np.float64(gates[t * 2 * v_heads + head]))))


@kernel
def copy_strip(source, at, target, to, stride, rows, count):
    """Copy `count` columns of a state."""
    for i in range(rows):
        for c in range(0, count, LANES):
            f.store(target, to + i * stride + c, f.load(source, at + i * stride + c))


@kernel
def update_columns(args, s, first, count, head, column, matrices, m, at, last, near):
    """Take a strip of columns through some tokens; the state after a token is stored where `state_out` says."""
    a = i64(args)
    k_dim, v_dim, v_heads = a[DeltaArg.K_DIM], a[DeltaArg.V_DIM], a[DeltaArg.V_HEADS]
    qkv, out, state_out = f32(s[a[DeltaArg.QKV]]), f32(s[a[DeltaArg.OUT]]), i64(s[Step.STATE_OUT])
    before = 2 * a[DeltaArg.K_HEADS] * k_dim
    is_wide = column + STRIP <= v_dim
    for i in range(count):
        t = first + i
        v_at = t * (before + v_heads * v_dim) + before + head * v_dim + column
        to = (t * v_heads + head) * v_dim + column
        k, q, factors = i * k_dim, (RUN + i) * k_dim, 2 * RUN * k_dim + 2 * i
        decay, beta = near[factors], near[factors + 1]
        if is_wide:
            update_strip(
                m, at + column, v_dim, k_dim, near, k, q, qkv, v_at, decay, beta, out, to, zero_tile(STRIP_VECTORS)
            )
        else:
            update_strip(m, at + column, v_dim, k_dim, near, k, q, qkv, v_at, decay, beta, out, to, zero_tile(1))
        if state_out[t] >= 0 and state_out[t] != last:
            place = (state_out[t] * v_heads + head) * k_dim * v_dim
            copy_strip(m, at + column, matrices, place + column, v_dim, k_dim, STRIP if is_wide else LANES)
    return STRIP if is_wide else LANES


@kernel
def finish_tokens(args, s, first, count, head):
    """Norm the results of some tokens, gate them, and quantize them."""
    a = i64(args)
    v_dim, v_heads, eps = a[DeltaArg.V_DIM], a[DeltaArg.V_HEADS], np.float32(f64(args)[DeltaArg.EPS])
    out, z, width = f32(s[a[DeltaArg.OUT]]), f32(s[a[DeltaArg.Z]]), a[DeltaArg.Z_WIDTH]
    for t in range(first, first + count):
        at = (t * v_heads + head) * v_dim
        norm_row(out, at, f32(a[DeltaArg.NORM]), eps, out, at, v_dim)
        gate_head(out, at, z, (t + 1) * width - (v_heads - head) * v_dim, v_dim)
        if a[DeltaArg.ACTIVATIONS]:
            row_blocks = v_heads * v_dim // 32
            quantize_blocks(
                out, at, s, a[DeltaArg.ACTIVATIONS], at // 32, (at + v_dim) // 32, row_blocks, s[Step.TOKENS]
            )


def gated_delta(args, step, piece):
    """Take the tokens of one request through one value head."""
    a, s = i64(args), i64(step)
    v_heads, k_dim, v_dim = a[DeltaArg.V_HEADS], a[DeltaArg.K_DIM], a[DeltaArg.V_DIM]
    request, head, size = piece // v_heads, piece % v_heads, k_dim * v_dim
    matrices = f32(i64(s[Step.KV] + 8 * ADDRESSES_PER_LAYER * a[DeltaArg.LAYER])[1])
    first, end = i64(s[Step.QUERY_START])[request], i64(s[Step.QUERY_START])[request + 1]
    slot, last = i64(s[Step.STATE_IN])[request], i64(s[Step.STATE_OUT])[end - 1]
    m = matrices if last >= 0 else scratch(size)  # the state changes where it will be stored
    at = (last * v_heads + head) * size if last >= 0 else 0
    if slot < 0:
        for i in range(size):
            m[at + i] = np.float32(0)
    elif slot != last:
        copy_strip(matrices, (slot * v_heads + head) * size, m, at, v_dim, k_dim, v_dim)
    near = scratch(RUN * (2 * k_dim + 2))
    for t in range(first, end, RUN):
        count = min(RUN, end - t)
        prepare_tokens(args, s, t, count, head, near)
        column = 0
        while column < v_dim:
            column += update_columns(args, s, t, count, head, column, matrices, m, at, last, near)
        finish_tokens(args, s, t, count, head)


GATED_DELTA = TaskKernel(gated_delta)


def has_kernel(params: GatedDeltaParams) -> bool:
    """Return whether values of a head are whole vectors."""
    return params.v_dim % LANES == 0


def can_quantize(params: GatedDeltaParams) -> bool:
    """Return whether a head is whole blocks of 32 values."""
    return params.v_dim % 32 == 0


def gated_delta_task(
    layer: int,
    entries: Sequence[int],
    z_width: int,
    outputs: tuple[int, int],
    params: GatedDeltaParams,
    weights: GatedDeltaWeights,
) -> Task:
    """Return the task of a layer: entries of qkv, z and gates, and of the result and its activations, or 0."""
    p: Any = params
    shape = p.k_heads, p.v_heads, p.k_dim, p.v_dim, p.is_tiled
    args = pack_args(layer, *entries, *outputs, z_width, *shape, *weights, 0)
    return Task(GATED_DELTA, pack_floats(args, DeltaArg.EPS, [p.eps]), p.v_heads, Step.REQUESTS)
