"""Norms, activations, rotary embedding, embedding rows: everything between the matrix products.

Rows are independent: a token has the same bits alone and in a batch. Few tokens are worked on by one thread (a parallel
region would cost more than the work), many are shared out.
"""

from __future__ import annotations

import math

import numba as nb
import numpy as np

from . import floats as f
from .compile import kernel, parallel

FEW = 4


@kernel
def norm_row(x, residual, weight, eps, out, stream, row, width, joined):
    """One row: stream = x + residual (where joined), out = stream / sqrt(mean of squares + eps) * weight."""
    at = row * width
    squares = f.splat(np.float32(0))
    whole = width - width % 16
    for i in range(0, whole, 16):
        v = f.get(x, at + i)
        if joined:
            v = f.add(v, f.get(residual, at + i))
            f.put(stream, at + i, v)
        squares = f.fma(v, v, squares)
    mean = f.total(squares)
    for i in range(whole, width):
        v = x[at + i]
        if joined:
            v = v + residual[at + i]
            stream[at + i] = v
        mean += v * v
    scale = np.float32(1) / np.float32(math.sqrt(mean / np.float32(width) + eps))
    source = stream if joined else x
    factor = f.splat(scale)
    for i in range(0, whole, 16):
        f.put(out, at + i, f.mul(f.mul(f.get(source, at + i), factor), f.get(weight, i)))
    for i in range(whole, width):
        out[at + i] = source[at + i] * scale * weight[i]


@kernel
def norm_few(x, residual, weight, eps, out, stream, rows, width, joined):
    """By one thread."""
    for row in range(rows):
        norm_row(x, residual, weight, eps, out, stream, row, width, joined)


@parallel
def norm_many(x, residual, weight, eps, out, stream, rows, width, joined):
    """Shared out among the threads."""
    for row in nb.prange(rows):
        norm_row(x, residual, weight, eps, out, stream, row, width, joined)


@kernel
def gated_row(gate_up, out, row, half, gelu):
    """act(gate) * up; SiLU is x * sigmoid(x), GELU its tanh form, tanh(y) = 1 - 2 / (1 + e^2y)."""
    gate, up, to = row * 2 * half, row * 2 * half + half, row * half
    one = f.splat(np.float32(1))
    whole = half - half % 16
    for i in range(0, whole, 16):
        g = f.get(gate_up, gate + i)
        if gelu:
            inner = f.mul(f.splat(np.float32(0.044715)), f.mul(g, f.mul(g, g)))
            y = f.mul(f.splat(np.float32(1.5957691216057308)), f.add(g, inner))
        else:
            y = g
        act = f.div(g, f.add(one, f.exp(f.mul(y, f.splat(np.float32(-1))))))
        f.put(out, to + i, f.mul(act, f.get(gate_up, up + i)))
    for i in range(whole, half):
        g = gate_up[gate + i]
        y = np.float32(1.5957691216057308) * (g + np.float32(0.044715) * g * g * g) if gelu else g
        out[to + i] = g / (np.float32(1) + np.float32(math.exp(-y))) * gate_up[up + i]


@kernel
def gated_few(gate_up, out, rows, half, gelu):
    """By one thread."""
    for row in range(rows):
        gated_row(gate_up, out, row, half, gelu)


@parallel
def gated_many(gate_up, out, rows, half, gelu):
    """Shared out among the threads."""
    for row in nb.prange(rows):
        gated_row(gate_up, out, row, half, gelu)
