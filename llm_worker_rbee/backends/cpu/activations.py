"""Activations as signed bytes: blocks of 32 columns, each with its scale and its sums.

x = q * scale, scale = largest |x| / 127 (0 for a block of zeros). Kernels need the sums of q over 32 and over 16
columns, for weights that are stored with an offset or a minimum. Six neighbouring entries of a step hold their
addresses: q, scale, sums, sums16, scaled, scaled16.

Where more is wanted (`finely`), a token is two rows: its bytes, and the bytes of what these leave over. Their products
are added; what is then lost is a 254th of what was.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import floats as f
from .compile import kernel
from .memory import f32, i8, i32, scratch
from .pairs import quantize_pair

Floats = NDArray[np.float32]


class Quantized(NamedTuple):
    """Room for so many tokens."""

    q: NDArray[np.int8]
    scale: Floats
    sums: NDArray[np.int32]
    sums16: NDArray[np.int32]
    scaled: Floats
    scaled16: Floats


def room(tokens: int, columns: int) -> Quantized:
    """Room for `tokens` rows of up to so many columns."""
    blocks = tokens * -(-columns // 32)
    return Quantized(
        np.empty(32 * blocks, np.int8),
        np.empty(blocks, np.float32),
        np.empty(blocks, np.int32),
        np.empty(2 * blocks, np.int32),
        np.empty(blocks, np.float32),
        np.empty(2 * blocks, np.float32),
    )


@kernel
def quantize(x, at, s, entry, first, last):
    """Blocks first .. last - 1 of the activations; the values of block `first` begin at x[at]. Two at a time."""
    q, scale, sums, sums16 = i8(s[entry]), f32(s[entry + 1]), i32(s[entry + 2]), i32(s[entry + 3])
    scaled, scaled16 = f32(s[entry + 4]), f32(s[entry + 5])
    b = first
    while b + 2 <= last:
        quantize_pair(x, at + (b - first) * 32, q, scale, sums, sums16, scaled, scaled16, b)
        b += 2
    if b < last:
        quantize_last(x, at + (b - first) * 32, q, scale, sums, sums16, scaled, scaled16, b)


@kernel
def quantize_last(x, at, q, scale, sums, sums16, scaled, scaled16, block):
    """A block that has no neighbour: with one of zeros, of which nothing is kept."""
    pair, bytes2 = np.zeros(64, np.float32), np.empty(64, np.int8)
    two, four = np.empty(2, np.float32), np.empty(4, np.float32)
    scale2, sums2, sums4 = np.empty(2, np.float32), np.empty(2, np.int32), np.empty(4, np.int32)
    for i in range(32):
        pair[i] = x[at + i]
    quantize_pair(pair, 0, bytes2, scale2, sums2, sums4, two, four, 0)
    for i in range(32):
        q[block * 32 + i] = bytes2[i]
    scale[block], sums[block], scaled[block] = scale2[0], sums2[0], two[0]
    for i in range(2):
        sums16[2 * block + i], scaled16[2 * block + i] = sums4[i], four[i]


@kernel
def quantize_finely(x, at, s, entry, token, columns, count):
    """A token as two rows: its bytes in row `token`, those of the rest in row count + token."""
    n, rest = columns // 32, scratch(columns)
    quantize(x, at, s, entry, token * n, (token + 1) * n)
    q, scale = i8(s[entry]), f32(s[entry + 1])
    for b in range(n):
        less = f.splat(-scale[token * n + b])
        for i in range(b * 32, b * 32 + 32, 16):
            f.put(rest, i, f.add(f.get(x, at + i), f.mul(less, f.get(q, token * columns + i))))
    quantize(rest, 0, s, entry, (count + token) * n, (count + token + 1) * n)
