"""Activations as signed bytes: blocks of 32 columns, each with its scale and its sums.

x = q * scale, scale = largest |x| / 127 (0 for a block of zeros). Kernels need the sums of q over 32 and over 16
columns, for weights that are stored with an offset or a minimum.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from . import floats as f
from .compile import kernel, parallel


@kernel
def quantize_row(x, row, columns, q, scale, sums, sums16, scaled, scaled16):
    """One token."""
    for block in range(columns // 32):
        at, b = row * columns + block * 32, row * (columns // 32) + block
        low, high = f.get(x, at), f.get(x, at + 16)
        top = f.highest(f.largest(f.absolute(low), f.absolute(high)))
        d = top / np.float32(127)
        inverse = f.splat(np.float32(127) / top if top > 0 else np.float32(0))
        low, high = f.rounded(f.mul(low, inverse)), f.rounded(f.mul(high, inverse))
        f.put_bytes(q, at, low)
        f.put_bytes(q, at + 16, high)
        first, second = f.total(low), f.total(high)
        scale[b] = d + np.float32(0) * (first + second)  # NaN where a NaN came in: it must not vanish here
        sums16[2 * b], sums16[2 * b + 1] = np.int32(first), np.int32(second)
        scaled16[2 * b], scaled16[2 * b + 1] = d * first, d * second
        sums[b] = np.int32(first + second)
        scaled[b] = d * (first + second)


@kernel
def quantize_few(x, rows, columns, q, scale, sums, sums16, scaled, scaled16):
    """By one thread."""
    for row in range(rows):
        quantize_row(x, row, columns, q, scale, sums, sums16, scaled, scaled16)


@parallel
def quantize_many(x, rows, columns, q, scale, sums, sums16, scaled, scaled16):
    """Shared out among the threads."""
    for row in nb.prange(rows):
        quantize_row(x, row, columns, q, scale, sums, sums16, scaled, scaled16)
