"""Norms, activations, biases: everything between the matrix products but attention.

Rows are independent: a token has the same bits alone and in a batch. Where the next product wants bytes, a task turns
its rows into bytes while they are in the nearest cache.
"""

from __future__ import annotations

import math

import numpy as np

from . import simd_f32 as f
from .jit import Task, kernel
from .pointers import f32, f64, i64, scratch
from .quantize_activations import quantize, quantize_finely

FEW = 4  # tokens of a piece
WIDE = 512  # columns of a piece of the gate
# Arguments. Entries of the step are named after what they hold; 0 stands for "none" where there may be none.
COUNT, SOURCE, STREAM, OUT, ACTIVATIONS, INDEX, WIDTH, WEIGHT, POST, JOINED, EPS, FINE = range(12)
GATE_HALF, GATE_KIND = 6, 7
HEADS, DIM, PADDED, BYTES_FINE = 6, 7, 8, 9


@kernel
def norm_row(x, at, weight, eps, out, to, width):
    """out = x / sqrt(mean of squares + eps) * weight; x and out may be the same."""
    squares = f.splat(np.float32(0))
    whole = width - width % 16
    for i in range(0, whole, 16):
        v = f.get(x, at + i)
        squares = f.fma(v, v, squares)
    mean = f.total(squares)
    for i in range(whole, width):
        mean += x[at + i] * x[at + i]
    scale = np.float32(1) / np.float32(math.sqrt(mean / np.float32(width) + eps))
    factor = f.splat(scale)
    for i in range(0, whole, 16):
        f.put(out, to + i, f.mul(f.mul(f.get(x, at + i), factor), f.get(weight, i)))
    for i in range(whole, width):
        out[to + i] = x[at + i] * scale * weight[i]


@kernel
def add_row(x, stream, at, width):
    """stream += x."""
    whole = width - width % 16
    for i in range(0, whole, 16):
        f.put(stream, at + i, f.add(f.get(x, at + i), f.get(stream, at + i)))
    for i in range(whole, width):
        stream[at + i] = x[at + i] + stream[at + i]


@kernel
def one_row(x, stream, row, post, has_post, weight, eps, out, to, width):
    """The same of one row of the stream, which stays as it is."""
    whole = scratch(width)
    for i in range(width):
        whole[i] = x[row + i]
    if has_post:
        norm_row(whole, 0, post, eps, whole, 0, width)
    for i in range(width):
        whole[i] = whole[i] + stream[row + i]
    norm_row(whole, 0, weight, eps, out, to, width)


@kernel
def row_to_bytes(x, at, s, entry, token, width, fine, count):
    """The row at x[at:] as the bytes of a token, one of `count`."""
    if fine:
        quantize_finely(x, at, s, entry, token, width, count)
    else:
        quantize(x, at, s, entry, token * (width // 32), (token + 1) * (width // 32))


def norm(args, step, piece):
    """For each token: its own norm of what is added (POST), the addition (JOINED), the norm, the bytes."""
    a, s = i64(args), i64(step)
    width, eps = a[WIDTH], np.float32(f64(args)[EPS])
    x, stream, out, index = f32(s[a[SOURCE]]), f32(s[a[STREAM]]), f32(s[a[OUT]]), i64(s[a[INDEX]])
    own = scratch(width)  # floats that nobody else wants stay in the nearest cache
    for t in range(piece * FEW, min(s[a[COUNT]], piece * FEW + FEW)):
        to, at = (out, t * width) if a[OUT] else (own, 0)
        if a[INDEX]:  # a token may be wanted twice: what is added is added to a copy
            one_row(x, stream, index[t] * width, f32(a[POST]), a[POST] != 0, f32(a[WEIGHT]), eps, to, at, width)
        else:
            if a[POST]:
                norm_row(x, t * width, f32(a[POST]), eps, x, t * width, width)
            if a[JOINED]:
                add_row(x, stream, t * width, width)
            norm_row(stream, t * width, f32(a[WEIGHT]), eps, to, at, width)
        if a[ACTIVATIONS]:
            row_to_bytes(to, at, s, a[ACTIVATIONS], t, width, a[FINE], s[a[COUNT]])


@kernel
def gate(gate_up, at, half, out, to, count, gelu):
    """act(gate) * up; SiLU is x * sigmoid(x), GELU its tanh form, tanh(y) = 1 - 2 / (1 + e^2y)."""
    one = f.splat(np.float32(1))
    whole = count - count % 16
    for i in range(0, whole, 16):
        g = f.get(gate_up, at + i)
        if gelu:
            inner = f.mul(f.splat(np.float32(0.044715)), f.mul(g, f.mul(g, g)))
            y = f.mul(f.splat(np.float32(1.5957691216057308)), f.add(g, inner))
        else:
            y = g
        act = f.div(g, f.add(one, f.exp(f.mul(y, f.splat(np.float32(-1))))))
        f.put(out, to + i, f.mul(act, f.get(gate_up, at + half + i)))
    for i in range(whole, count):
        g = gate_up[at + i]
        y = np.float32(1.5957691216057308) * (g + np.float32(0.044715) * g * g * g) if gelu else g
        out[to + i] = g / (np.float32(1) + np.float32(math.exp(-y))) * gate_up[at + half + i]


def gated(args, step, piece):
    """Some columns of some tokens, and their bytes."""
    a, s = i64(args), i64(step)
    half = a[GATE_HALF]
    parts = (half + WIDE - 1) // WIDE
    first, tokens = piece % parts * WIDE, piece // parts * FEW
    count = min(WIDE, half - first)
    own = scratch(count)
    for t in range(tokens, min(s[a[COUNT]], tokens + FEW)):
        to, at = (f32(s[a[OUT]]), t * half + first) if a[OUT] else (own, 0)
        gate(f32(s[a[SOURCE]]), t * 2 * half + first, half, to, at, count, a[GATE_KIND] == 1)
        if a[ACTIVATIONS]:
            block = (t * half + first) // 32
            quantize(to, at, s, a[ACTIVATIONS], block, block + count // 32)


def to_bytes(args, step, piece):
    """Rows of floats as bytes; heads that are padded are first moved together."""
    a, s = i64(args), i64(step)
    heads, dim, padded = a[HEADS], a[DIM], a[PADDED]
    x, width = f32(s[a[SOURCE]]), heads * dim
    for t in range(piece * FEW, min(s[a[COUNT]], piece * FEW + FEW)):
        if padded != dim:
            out = f32(s[a[OUT]])
            for h in range(heads):
                for i in range(dim):
                    out[t * width + h * dim + i] = x[(t * heads + h) * padded + i]
        if a[ACTIVATIONS]:
            source = x if padded == dim else f32(s[a[OUT]])
            row_to_bytes(source, t * width, s, a[ACTIVATIONS], t, width, a[BYTES_FINE], s[a[COUNT]])


def add_bias(args, step, piece):
    """Rows plus one and the same vector."""
    a, s = i64(args), i64(step)
    x, width, bias = f32(s[a[SOURCE]]), a[WIDTH], f32(a[WEIGHT])
    for t in range(piece * FEW, min(s[a[COUNT]], piece * FEW + FEW)):
        for i in range(width):
            x[t * width + i] += bias[i]


def head_norms(args, step, piece):
    """The norms of q and k heads, in place; a row holds q heads, k heads, v heads of one width."""
    a, s = i64(args), i64(step)
    x, dim, eps = f32(s[a[SOURCE]]), a[WIDTH], np.float32(f64(args)[EPS])
    q_heads, k_heads = a[INDEX], a[JOINED]
    for t in range(piece * FEW, min(s[a[COUNT]], piece * FEW + FEW)):
        for h in range(q_heads + k_heads):
            at = (t * (q_heads + 2 * k_heads) + h) * dim
            norm_row(x, at, f32(a[WEIGHT]) if h < q_heads else f32(a[POST]), eps, x, at, dim)


TASKS = norm, gated, to_bytes, add_bias, head_norms
NORM, GATED, TO_BYTES, ADD_BIAS, HEAD_NORMS = map(Task, TASKS)
