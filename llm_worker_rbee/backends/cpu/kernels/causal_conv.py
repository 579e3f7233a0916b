"""The causal convolution of each channel over the tokens of its request, with the gates around it.

A piece is some channels of one request: it takes the tail from the state, walks through the request's tokens with the
last inputs in the nearest cache, and writes the states that are kept. So a token has the same bits in any chunk, and a
state may be written over the one that was read.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ..jit import TaskKernel, kernel
from . import simd as f
from .kv_layout import ADDRESSES_PER_LAYER
from .pointers import f32, i64, scratch
from .program import Step, Task, pack_args
from .quantize_activations import quantize_blocks

Floats = NDArray[np.float32]
CONV_COLUMNS = 256  # channels per piece: whole blocks of int8 activations

# Entries of the step (X, OUT, ACTIVATIONS; the last two optional) and numbers; WEIGHT is (kernel, channels). A row of X
# has WIDTH values, of which the first ones are read.
ConvArg = IntEnum("ConvArg", "LAYER X WIDTH OUT ACTIVATIONS CHANNELS KERNEL WEIGHT SILU GATED", start=0)


@kernel
def convolve_row(rows, weight, at, size, channels, first, count, silu, out, to):
    """Write act(sum of weight[j] * rows[(at + j) % size]) over the `size` inputs from the oldest on."""
    one, whole = f.splat(np.float32(1)), count - count % 16
    for i in range(0, whole, 16):
        total = f.mul(f.load(weight, first + i), f.load(rows, at * CONV_COLUMNS + i))
        for j in range(1, size):
            row = at + j if at + j < size else at + j - size
            total = f.fma(f.load(weight, j * channels + first + i), f.load(rows, row * CONV_COLUMNS + i), total)
        if silu:
            total = f.div(total, f.add(one, f.exp(f.mul(total, f.splat(np.float32(-1))))))
        f.store(out, to + i, total)
    for i in range(whole, count):
        value = weight[first + i] * rows[at * CONV_COLUMNS + i]
        for j in range(1, size):
            value += weight[j * channels + first + i] * rows[(at + j) % size * CONV_COLUMNS + i]
        if silu:
            value = value / (np.float32(1) + np.float32(np.exp(-value)))
        out[to + i] = value


@kernel
def copy_floats(source, at, out, to, count):
    """Copy part of a row."""
    whole = count - count % 16
    for i in range(0, whole, 16):
        f.store(out, to + i, f.load(source, at + i))
    for i in range(whole, count):
        out[to + i] = source[at + i]


@kernel
def multiply_floats(x, x_at, y, y_at, out, to, count):
    """Multiply parts of two rows."""
    whole = count - count % 16
    for i in range(0, whole, 16):
        f.store(out, to + i, f.mul(f.load(x, x_at + i), f.load(y, y_at + i)))
    for i in range(whole, count):
        out[to + i] = x[x_at + i] * y[y_at + i]


def causal_conv(args, step, piece):
    """Convolve some channels of one request."""
    a, s = i64(args), i64(step)
    channels, size, gated = a[ConvArg.CHANNELS], a[ConvArg.KERNEL], a[ConvArg.GATED]
    parts = (channels + CONV_COLUMNS - 1) // CONV_COLUMNS
    request, first = piece // parts, piece % parts * CONV_COLUMNS
    count = min(CONV_COLUMNS, channels - first)
    begin, end = i64(s[Step.QUERY_START])[request], i64(s[Step.QUERY_START])[request + 1]
    states = f32(i64(s[Step.KV])[a[ConvArg.LAYER] * ADDRESSES_PER_LAYER])
    slot, x, weight = i64(s[Step.STATE_IN])[request], f32(s[a[ConvArg.X]]), f32(a[ConvArg.WEIGHT])
    width = a[ConvArg.WIDTH]
    own = scratch((size + 1) * CONV_COLUMNS)  # a ring of inputs, and a row of outputs
    made = size * CONV_COLUMNS
    for j in range(size - 1):
        if slot >= 0:
            copy_floats(states, (slot * (size - 1) + j) * channels + first, own, j * CONV_COLUMNS, count)
        else:
            for i in range(count):
                own[j * CONV_COLUMNS + i] = np.float32(0)
    for t in range(begin, end):
        newest, oldest = (t - begin + size - 1) % size, (t - begin) % size
        at = t * width + first
        if gated:
            multiply_floats(x, at, x, at + 2 * channels, own, newest * CONV_COLUMNS, count)
        else:
            copy_floats(x, at, own, newest * CONV_COLUMNS, count)
        to, place = (f32(s[a[ConvArg.OUT]]), t * channels + first) if a[ConvArg.OUT] else (own, made)
        convolve_row(own, weight, oldest, size, channels, first, count, a[ConvArg.SILU], to, place)
        if gated:
            multiply_floats(to, place, x, at + channels, to, place, count)
        if a[ConvArg.ACTIVATIONS]:
            block = (t * channels + first) // 32
            entry, tokens = a[ConvArg.ACTIVATIONS], s[Step.TOKENS]
            quantize_blocks(to, place, s, entry, block, block + count // 32, channels // 32, tokens)
        kept = i64(s[Step.STATE_OUT])[t]
        if kept >= 0:
            for j in range(size - 1):
                row = (oldest + 1 + j) % size
                copy_floats(own, row * CONV_COLUMNS, states, (kept * (size - 1) + j) * channels + first, count)


CAUSAL_CONV = TaskKernel(causal_conv)


def causal_conv_task(
    layer: int, x: tuple[int, int], out: int, activations: int, weight: Floats, activation: str, *, gated: bool
) -> Task:
    """Return the convolution of all requests: of the entry X and the width of its rows, to the entries OUT and
    ACTIVATIONS; the weight is (kernel, channels)."""
    size, channels = weight.shape
    args = pack_args(layer, *x, out, activations, channels, size, weight, activation == "silu", gated)
    return Task(CAUSAL_CONV, args, -(-channels // CONV_COLUMNS), Step.REQUESTS, 1)
