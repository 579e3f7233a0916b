"""The rotary embedding and the cache write, in one pass over the heads of a step.

Value i of a head pairs with value i + half. Heads are written padded to a multiple of 16 values, the padding zero;
kv.py has the places of keys and values. An index counts elements from the start of an array's memory.

Rotary embedding with the cache write, and attention, as tasks of a program: which piece is what, and where it lies.

The arithmetic of one piece is in rotary.py and py. What the cache holds (float32, float16, int8 with scales)
is known when a task is compiled.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from ..ops import RopeTable
from . import simd_f32 as f
from .jit import Task, kernel
from .kv_layout import is_bytes, peek, poke
from .pointers import f32, f64, i8, i64, scratch, u16
from .program import Instruction, Step, Table, doubles, table_of

LANES = 16
STEPS = np.float32(127)
FEW = 4  # tokens of a piece of the rotation
S_TOKENS, S_REQUESTS, S_TILES, S_SINGLES, S_POSITIONS, S_SLOTS = map(
    int, (Step.TOKENS, Step.REQUESTS, Step.TILES, Step.SINGLES, Step.POSITIONS, Step.SLOTS)
)
S_QUERY_START, S_TABLE, S_WIDTH, S_SIZE, S_KV, S_WORK = map(
    int, (Step.QUERY_START, Step.BLOCK_TABLE, Step.TABLE_WIDTH, Step.BLOCK_SIZE, Step.KV, Step.WORK)
)
S_QKV, S_QUERIES, S_MIXED = map(int, (Step.QKV, Step.QUERIES, Step.MIXED))
ANGLES, FREQUENCIES, PAIRS, ANGLE_SCALE = range(4)
LAYER, ROPE, HALF, HEADS, KV_HEADS, DIM, PADDED, WINDOW, SCALE, CAP, BYTES = range(11)
PLACES = 4  # addresses a layer has in the table of the cache: keys, values, their scales
HELD: dict[str, Any] = {"float32": f32, "float16": u16, "int8": i8}  # how a task sees what the cache holds
CACHED = None  # set for each variant


@kernel
def write_angles(positions, count, inv_freq, half, scale, cos, sin):
    """cos and sin of every position and pair: (count, half)."""
    for t in range(count):
        for i in range(half):
            angle = np.float32(positions[t]) * inv_freq[i]
            cos[t * half + i] = scale * np.float32(math.cos(angle))
            sin[t * half + i] = scale * np.float32(math.sin(angle))


@kernel
def copied(x, at, first, dim, padded, out, to):
    """Values first .. dim - 1 of a head as they are, then zeros."""
    whole = first + (dim - first) // LANES * LANES
    for i in range(first, whole, LANES):
        f.put(out, to + i, f.get(x, at + i))
    for i in range(whole, dim):
        out[to + i] = peek(x, at + i)
    for i in range(dim, padded):
        out[to + i] = np.float32(0)


@kernel
def turned(x, at, cos, sin, angle, half, dim, padded, out, to):
    """The head at x[at:], rotated by the angles from `angle` on, to out[to:]."""
    whole = half - half % LANES
    minus = f.splat(np.float32(-1))
    for i in range(0, whole, LANES):
        low, high = f.get(x, at + i), f.get(x, at + half + i)
        c, s = f.get(cos, angle + i), f.get(sin, angle + i)
        f.put(out, to + i, f.add(f.mul(low, c), f.mul(f.mul(high, s), minus)))
        f.put(out, to + half + i, f.add(f.mul(high, c), f.mul(low, s)))
    for i in range(whole, half):
        low, high = peek(x, at + i), peek(x, at + half + i)
        c, s = peek(cos, angle + i), peek(sin, angle + i)
        out[to + i] = low * c - high * s
        out[to + half + i] = high * c + low * s
    copied(x, at, 2 * half, dim, padded, out, to)


@kernel
def to_steps(head, padded):
    """A head in place as whole numbers, 127 steps of max|x|; gives the scale, which is no number where x holds none."""
    top, sums = f.splat(np.float32(0)), f.splat(np.float32(0))
    for i in range(0, padded, LANES):
        x = f.get(head, i)
        top = f.above(f.absolute(x), top)
        sums = f.add(sums, f.mul(x, f.splat(np.float32(0))))  # 0, or no number
    scale = f.highest(top) / STEPS + f.total(sums)
    usable = scale > 0 and scale < np.inf
    by = f.splat(scale if usable else np.float32(np.inf))
    for i in range(0, padded, LANES):
        x = f.get(head, i) if usable else f.splat(np.float32(0))
        x = f.above(f.rounded(f.div(x, by)), f.splat(-STEPS))
        f.put(head, i, f.mul(f.above(f.mul(x, f.splat(np.float32(-1))), f.splat(-STEPS)), f.splat(np.float32(-1))))
    return scale


@kernel
def store_key(head, padded, keys, k_scales, row, size):
    """A rotated key to its place: row = (block * kv_heads + head) * size + offset."""
    if is_bytes(keys):
        k_scales[row] = to_steps(head, padded)
    line, lane = row // LANES, row % LANES
    for i in range(padded):
        poke(keys, (line * padded + i) * LANES + lane, head[i])


@kernel
def store_value(head, padded, values, v_scales, row):
    """A value to its place."""
    if is_bytes(values):
        v_scales[row] = to_steps(head, padded)
    for i in range(0, padded, LANES):
        if is_bytes(values):
            f.put_bytes(values, row * padded + i, f.get(head, i))
        else:
            f.put(values, row * padded + i, f.get(head, i))


@kernel
def one_token(
    q, q_at, k, k_at, v, v_at, cos, sin, angle, half, heads, kv_heads, dim, padded, keys, values, k_scales, v_scales,
    slot, size, head, out, out_at,
):  # fmt: skip
    """All heads of one token: q rotated to out[out_at:], k rotated and v to their slot; `head` is scratch, one head.

    A token's heads lie one after the other from q_at, k_at and v_at on; its angles from `angle` on.
    """
    for h in range(heads):
        turned(q, q_at + h * dim, cos, sin, angle, half, dim, padded, out, out_at + h * padded)
    for h in range(kv_heads):
        row = (slot // size * kv_heads + h) * size + slot % size
        turned(k, k_at + h * dim, cos, sin, angle, half, dim, padded, head, 0)
        store_key(head, padded, keys, k_scales, row, size)
        copied(v, v_at + h * dim, 0, dim, padded, head, 0)
        store_value(head, padded, values, v_scales, row)


def angles(args, step, piece):
    """cos and sin of some tokens' positions: (tokens, pairs)."""
    a, s = i64(args), i64(step)
    half, scale, first = a[PAIRS], np.float32(f64(args)[ANGLE_SCALE]), piece * FEW
    count = min(s[S_TOKENS] - first, FEW)
    write_angles(
        i64(s[S_POSITIONS] + first * 8), count, f32(a[FREQUENCIES]), half, scale,
        f32(s[a[ANGLES]] + first * half * 4), f32(s[a[ANGLES] + 1] + first * half * 4),
    )  # fmt: skip


def rope_store(args, step, piece):
    """Some tokens: q, k and v of one lie one after the other."""
    a, s = i64(args), i64(step)
    heads, kv_heads, dim, padded, half = a[HEADS], a[KV_HEADS], a[DIM], a[PADDED], a[HALF]
    kv, at = i64(s[S_KV]), PLACES * a[LAYER]
    keys, values, k_scales, v_scales = CACHED(kv[at]), CACHED(kv[at + 1]), f32(kv[at + 2]), f32(kv[at + 3])
    x, cos, sin, head = f32(s[S_QKV]), f32(s[a[ROPE]]), f32(s[a[ROPE] + 1]), scratch(padded)
    for t in range(piece * FEW, min(s[S_TOKENS], piece * FEW + FEW)):
        q = t * (heads + 2 * kv_heads) * dim
        k = q + heads * dim
        one_token(
            x, q, x, k, x, k + kv_heads * dim, cos, sin, t * half, half, heads, kv_heads, dim, padded, keys, values,
            k_scales, v_scales, i64(s[S_SLOTS])[t], s[S_SIZE], head, f32(s[S_QUERIES]), t * heads * padded,
        )  # fmt: skip


ANGLES_TASK = Task(angles)


@cache
def store_for(kind: str) -> Task:
    """Rotation and cache write, for what the cache holds."""
    return Task(rope_store, kind, CACHED=HELD[kind])


def padded(dim: int) -> int:
    """Values of a head in the cache."""
    return -(-dim // LANES) * LANES


def angle_instruction(rope: RopeTable, number: int) -> Instruction:
    """The angles of all tokens, for the rotary table of this number."""
    args = table_of(Step.ANGLES + 2 * number, rope.inv_freq, len(rope.inv_freq), 0)
    return Instruction(ANGLES_TASK, doubles(args, ANGLE_SCALE, [rope.scale]), 1, Step.TOKENS, FEW)


def store_instruction(args: Table, kind: str) -> Instruction:
    """Rotation and cache write of all tokens."""
    return Instruction(store_for(kind), args, 1, Step.TOKENS, FEW)
