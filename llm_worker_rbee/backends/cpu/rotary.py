"""The rotary embedding and the cache write, in one pass over the heads of a step.

Value i of a head pairs with value i + half. Heads are written padded to a multiple of 16 values, the padding zero.
"""

from __future__ import annotations

import math

import numba as nb
import numpy as np

from ..types import Ints, KVLayer, RopeTable
from .compile import kernel, parallel

FEW = 8
_last: list = [None, None, None]  # positions, table, (cos, sin): all layers of a step ask for the same


@kernel
def angles(positions, inv_freq, scale, cos, sin):
    """cos and sin of every position and pair: (tokens, half)."""
    for t in range(positions.shape[0]):
        for i in range(inv_freq.shape[0]):
            angle = np.float32(positions[t]) * inv_freq[i]
            cos[t, i] = scale * np.float32(math.cos(angle))
            sin[t, i] = scale * np.float32(math.sin(angle))


@kernel
def turn(x, t, h, cos, sin, out, at, apart):
    """Head h of token t, rotated, to out[at:], its values `apart` from each other."""
    half, dim = cos.shape[1], x.shape[2]
    for i in range(half):
        low, high = x[t, h, i], x[t, h, half + i]
        out[at + i * apart] = low * cos[t, i] - high * sin[t, i]
        out[at + (half + i) * apart] = high * cos[t, i] + low * sin[t, i]
    for i in range(2 * half, dim):
        out[at + i * apart] = x[t, h, i]


@kernel
def one_token(q, k, v, t, cos, sin, keys, values, slots, out, padded, size):
    """All heads of one token; attention.py has the places of keys and values."""
    heads, kv_heads, chunks = q.shape[1], k.shape[1], -(-size // 16)
    block, offset = slots[t] // size, slots[t] % size
    for h in range(heads):
        turn(q, t, h, cos, sin, out, (t * heads + h) * padded, 1)
    for h in range(kv_heads):
        group = block * kv_heads + h
        turn(k, t, h, cos, sin, keys, (group * chunks + offset // 16) * padded * 16 + offset % 16, 16)
        at = (group * size + offset) * padded
        for i in range(v.shape[2]):
            values[at + i] = v[t, h, i]


@kernel
def few_tokens(q, k, v, cos, sin, keys, values, slots, out, padded, size):
    """By one thread."""
    for t in range(q.shape[0]):
        one_token(q, k, v, t, cos, sin, keys, values, slots, out, padded, size)


@parallel
def many_tokens(q, k, v, cos, sin, keys, values, slots, out, padded, size):
    """Shared out among the threads."""
    for t in nb.prange(q.shape[0]):
        one_token(q, k, v, t, cos, sin, keys, values, slots, out, padded, size)


def rope_store(q, k, v, positions: Ints, table: RopeTable, kv: KVLayer, slot_mapping: Ints):
    """Rotate q and k, write k and v into the cache, give back q: (T, heads, head_dim), a view of padded heads."""
    cos, sin = _angles(positions, table)
    tokens, heads, dim = q.shape
    size, padded = kv.v.shape[2:]
    out = np.zeros((tokens, heads, padded), np.float32)
    work = few_tokens if tokens <= FEW else many_tokens
    work(q, k, v, cos, sin, kv.k.reshape(-1), kv.v.reshape(-1), slot_mapping, out.reshape(-1), padded, size)
    return out[:, :, :dim]


def _angles(positions: Ints, table: RopeTable):
    if _last[0] is not positions or _last[1] is not table:
        shape = (positions.shape[0], table.inv_freq.shape[0])
        made = np.empty(shape, np.float32), np.empty(shape, np.float32)
        angles(positions, table.inv_freq, np.float32(table.scale), *made)
        _last[:] = positions, table, made
    return _last[2]
