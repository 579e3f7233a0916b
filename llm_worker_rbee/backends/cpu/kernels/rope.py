"""RoPE and the write into the KV cache, in one pass over the heads of a step.

Value i of a head pairs with value i + half. Heads are written padded to a multiple of 16 values, the padding zero;
kv_layout.py has the places of keys and values. An index counts elements from the start of an array's memory. The KV
type (float32, float16, int8 with scales) is known when a kernel is compiled.
"""

from __future__ import annotations

import math
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np

from ...ops import RopeTable, rotated_values
from ..jit import TaskKernel, ir, kernel
from . import simd as f
from .kv_layout import ADDRESSES_PER_LAYER, ARRAY_OF_TYPE, is_int8, padded_dim, store_one
from .pointers import f32, f64, i64, scratch
from .program import Step, Task, pack_args, pack_floats
from .simd import LANES, emits, f32x16

INT8_MAX = np.float32(127)
TOKENS_PER_PIECE = 4
CACHED = None  # set for each variant: address -> array of the KV type


# COS is the entry of cos; the entry of sin follows.
AnglesArg = IntEnum("AnglesArg", "COS INV_FREQ PAIRS SCALE", start=0)
# TEMPERATURE_BETA is 0 where queries have no factor by position.
StoreArg = IntEnum(
    "StoreArg",
    "LAYER COS PAIRS HEADS KV_HEADS DIM PADDED QKV QUERIES TEMPERATURE_LENGTH TEMPERATURE_BETA MIXED",
    start=0,
)


@kernel
def copy_padded(x, at, first, dim, padded, out, to):
    """Copy values first .. dim - 1 of a head, then zeros."""
    whole = first + (dim - first) // LANES * LANES
    for i in range(first, whole, LANES):
        f.store(out, to + i, f.load(x, at + i))
    for i in range(whole, dim):
        out[to + i] = x[at + i]
    for i in range(dim, padded):
        out[to + i] = np.float32(0)


@kernel
def rotate_head(x, at, cos, sin, angle, half, dim, padded, out, to):
    """Rotate the head at x[at:] by the angles from `angle` on, to out[to:]."""
    whole = half - half % LANES
    minus = f.splat(np.float32(-1))
    for i in range(0, whole, LANES):
        low, high = f.load(x, at + i), f.load(x, at + half + i)
        c, s = f.load(cos, angle + i), f.load(sin, angle + i)
        f.store(out, to + i, f.add(f.mul(low, c), f.mul(f.mul(high, s), minus)))
        f.store(out, to + half + i, f.add(f.mul(high, c), f.mul(low, s)))
    for i in range(whole, half):
        low, high, c, s = x[at + i], x[at + half + i], cos[angle + i], sin[angle + i]
        out[to + i] = low * c - high * s
        out[to + half + i] = high * c + low * s
    copy_padded(x, at, 2 * half, dim, padded, out, to)


@emits(f32x16(f32x16))
def mix_lanes(b: Any, x: Any) -> Any:
    """Multiply the lanes by a Hadamard matrix."""
    undefined, index = ir.Constant(x.type, ir.Undefined), ir.VectorType(ir.IntType(32), LANES)
    for half in (1, 2, 4, 8):
        partner = b.shuffle_vector(x, undefined, ir.Constant(index, [lane ^ half for lane in range(LANES)]))
        signs = ir.Constant(x.type, [-1.0 if lane & half else 1.0 for lane in range(LANES)])
        x = b.fadd(partner, b.fmul(x, signs))
    return x


@kernel
def mix_head(head, at, dim, size):
    """Rotate a head in place by a Hadamard matrix of `size` values (`reference.hadamard`)."""
    if size == 1:
        return
    for i in range(at, at + dim, LANES):
        f.store(head, i, mix_lanes(f.load(head, i)))
    half = LANES
    while half < size:
        for i in range(0, dim, LANES):
            if not i & half:
                low, high = f.load(head, at + i), f.load(head, at + i + half)
                f.store(head, at + i, f.add(low, high))
                f.store(head, at + i + half, f.add(low, f.mul(high, f.splat(np.float32(-1)))))
        half *= 2
    factor = f.splat(np.float32(1 / math.sqrt(size)))
    for i in range(at, at + dim, LANES):
        f.store(head, i, f.mul(f.load(head, i), factor))


@kernel
def quantize_head(head, padded):
    """Round a head in place to whole numbers, 127 steps of max|x|; return the scale, NaN if a value is not finite."""
    top, sums = f.splat(np.float32(0)), f.splat(np.float32(0))
    for i in range(0, padded, LANES):
        x = f.load(head, i)
        top = f.max_nan_second(f.fabs(x), top)
        sums = f.add(sums, f.mul(x, f.splat(np.float32(0))))  # 0, or NaN
    scale = f.hmax(top) / INT8_MAX + f.hsum(sums)
    usable = scale > 0 and scale < np.inf
    by, low, minus = f.splat(scale if usable else np.float32(np.inf)), f.splat(-INT8_MAX), f.splat(np.float32(-1))
    for i in range(0, padded, LANES):
        x = f.load(head, i) if usable else f.splat(np.float32(0))
        x = f.max_nan_second(f.rint(f.div(x, by)), low)
        f.store(head, i, f.mul(f.max_nan_second(f.mul(x, minus), low), minus))
    return scale


@kernel
def store_key(head, padded, keys, k_scales, row):
    """Write a rotated key: row = (block * kv_heads + head) * size + offset."""
    if is_int8(keys):
        k_scales[row] = quantize_head(head, padded)
    chunk, lane = row // LANES, row % LANES
    for i in range(padded):
        store_one(keys, (chunk * padded + i) * LANES + lane, head[i])


@kernel
def store_value(head, padded, values, v_scales, row):
    """Write a value."""
    if is_int8(values):
        v_scales[row] = quantize_head(head, padded)
    for i in range(0, padded, LANES):
        f.store(values, row * padded + i, f.load(head, i))


@kernel
def scale_queries(args, position, out, at, count):
    """Multiply the queries of a token by 1 + beta * ln(1 + position // length)."""
    steps = math.log1p(np.float64(position // i64(args)[StoreArg.TEMPERATURE_LENGTH]))
    factor = f.splat(np.float32(1 + f64(args)[StoreArg.TEMPERATURE_BETA] * steps))
    for i in range(at, at + count, LANES):
        f.store(out, i, f.mul(f.load(out, i), factor))


def rope_angles(args, step, piece):
    """Write cos and sin of some tokens' positions: (tokens, pairs)."""
    a, s = i64(args), i64(step)
    pairs, scale, first = a[AnglesArg.PAIRS], np.float32(f64(args)[AnglesArg.SCALE]), piece * TOKENS_PER_PIECE
    inv_freq, cos, sin = f32(a[AnglesArg.INV_FREQ]), f32(s[a[AnglesArg.COS]]), f32(s[a[AnglesArg.COS] + 1])
    for t in range(first, min(s[Step.TOKENS], first + TOKENS_PER_PIECE)):
        for i in range(pairs):
            angle = np.float32(i64(s[Step.POSITIONS])[t]) * inv_freq[i]
            cos[t * pairs + i] = scale * np.float32(math.cos(angle))
            sin[t * pairs + i] = scale * np.float32(math.sin(angle))


def rope_store(args, step, piece):
    """Rotate and store some tokens: q, k and v of a token lie one after the other."""
    a, s = i64(args), i64(step)
    heads, kv_heads, pairs = a[StoreArg.HEADS], a[StoreArg.KV_HEADS], a[StoreArg.PAIRS]
    dim, padded, size = a[StoreArg.DIM], a[StoreArg.PADDED], s[Step.BLOCK_SIZE]
    cache = i64(s[Step.KV] + 8 * ADDRESSES_PER_LAYER * a[StoreArg.LAYER])
    keys, values, k_scales, v_scales = CACHED(cache[0]), CACHED(cache[1]), f32(cache[2]), f32(cache[3])
    x, cos, sin = f32(s[a[StoreArg.QKV]]), f32(s[a[StoreArg.COS]]), f32(s[a[StoreArg.COS] + 1])
    out, head, first = f32(s[a[StoreArg.QUERIES]]), scratch(padded), piece * TOKENS_PER_PIECE
    for t in range(first, min(s[Step.TOKENS], first + TOKENS_PER_PIECE)):
        q, slot = t * (heads + 2 * kv_heads) * dim, i64(s[Step.SLOT_MAPPING])[t]
        for h in range(heads):
            rotate_head(x, q + h * dim, cos, sin, t * pairs, pairs, dim, padded, out, (t * heads + h) * padded)
        if a[StoreArg.TEMPERATURE_BETA]:
            position = i64(s[Step.POSITIONS])[t]
            scale_queries(args, position, out, t * heads * padded, heads * padded)
        if is_int8(keys):
            for h in range(heads):
                mix_head(out, (t * heads + h) * padded, dim, a[StoreArg.MIXED])
        for h in range(kv_heads):
            row, k = (slot // size * kv_heads + h) * size + slot % size, q + (heads + h) * dim
            rotate_head(x, k, cos, sin, t * pairs, pairs, dim, padded, head, 0)
            if is_int8(keys):
                mix_head(head, 0, dim, a[StoreArg.MIXED])
            store_key(head, padded, keys, k_scales, row)
            copy_padded(x, k + kv_heads * dim, 0, dim, padded, head, 0)
            store_value(head, padded, values, v_scales, row)


ROPE_ANGLES = TaskKernel(rope_angles)


@cache
def rope_store_kernel(kv_type: str) -> TaskKernel:
    """Return the kernel for a KV type."""
    return TaskKernel(rope_store, kv_type, CACHED=ARRAY_OF_TYPE[kv_type])


def angles_task(rope: RopeTable, cos: int) -> Task:
    """Return the task that writes the angles of all tokens: cosines to the entry `cos`, sines to the next."""
    args = pack_args(cos, rope.inv_freq, len(rope.inv_freq), 0)
    return Task(ROPE_ANGLES, pack_floats(args, AnglesArg.SCALE, [rope.scale]), 1, Step.TOKENS, TOKENS_PER_PIECE)


def rope_store_task(
    layer: int,
    cos: int,
    pairs: int,
    heads: int,
    kv_heads: int,
    dim: int,
    kv_type: str,
    qkv: int,
    queries: int,
    temperature: tuple[float, int] = (0.0, 1),
) -> Task:
    """Return the task that rotates and stores all tokens of a layer; `cos`, `qkv` and `queries` are entries."""
    beta, length = temperature
    args = pack_args(
        layer, cos, pairs, heads, kv_heads, dim, padded_dim(dim), qkv, queries, length, 0, rotated_values(dim)
    )
    pack_floats(args, StoreArg.TEMPERATURE_BETA, [beta])
    return Task(rope_store_kernel(kv_type), args, 1, Step.TOKENS, TOKENS_PER_PIECE)


def temperature_of(rope: RopeTable) -> tuple[float, int]:
    """Return beta and length of the factor of queries by position."""
    return rope.temperature_beta, rope.temperature_length
