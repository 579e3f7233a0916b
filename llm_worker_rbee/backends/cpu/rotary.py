"""The rotary embedding and the cache write, in one pass over the heads of a step.

Value i of a head pairs with value i + half. Heads are written padded to a multiple of 16 values, the padding zero;
kv.py has the places of keys and values. An index counts elements from the start of an array's memory.
"""

from __future__ import annotations

import math

import numpy as np

from . import floats as f
from .compile import kernel
from .kv import is_bytes, peek, poke

LANES = 16
STEPS = np.float32(127)


@kernel
def angles(positions, count, inv_freq, half, scale, cos, sin):
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
