"""What encoders have between products: layer norms, activations without a gate, rows of a step that are taken or added.

Rows are independent: a sequence has the same bits alone and in a batch. Where the next product needs int8, a task
quantizes its rows while they are in the nearest cache.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import numpy as np

from ..jit import TaskKernel, kernel
from . import simd as f
from .elementwise import (
    GATE_COLUMNS,
    TOKENS_PER_PIECE,
    GatedArg,
    add_row,
    gate_bounds,
    quantize_columns,
    quantize_row,
)
from .pointers import f32, f64, i64, scratch
from .program import Step, Task, pack_args, pack_floats

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu", "tanh")
GELU, GELU_TANH, RELU, TANH = (ACTIVATIONS.index(name) for name in ("gelu", "gelu_tanh", "relu", "tanh"))

# Arguments of each task. OUT, ACTIVATIONS (quantize the rows), BIAS and DELTA (rows that are added first) are optional.
LayerNormArg = IntEnum("LayerNormArg", "COUNT DELTA RESIDUAL OUT ACTIVATIONS WIDTH WEIGHT BIAS EPS TWO_TERM", start=0)
RowsArg = IntEnum("RowsArg", "SOURCE OUT WIDTH", start=0)


@kernel
def layer_norm_row(x, at, weight, bias, has_bias, eps, out, to, width):
    """Write (x - mean) / sqrt(variance + eps) * weight + bias; x and out may be the same."""
    sums, squares, whole = f.splat(np.float32(0)), f.splat(np.float32(0)), width - width % 16
    for i in range(0, whole, 16):
        sums = f.add(sums, f.load(x, at + i))
    mean = f.hsum(sums)
    for i in range(whole, width):
        mean += x[at + i]
    mean /= np.float32(width)
    less = f.splat(-mean)
    for i in range(0, whole, 16):
        v = f.add(f.load(x, at + i), less)
        squares = f.fma(v, v, squares)
    variance = f.hsum(squares)
    for i in range(whole, width):
        variance += (x[at + i] - mean) * (x[at + i] - mean)
    scale = np.float32(1) / np.float32(math.sqrt(variance / np.float32(width) + eps))
    factor = f.splat(scale)
    for i in range(0, whole, 16):
        v = f.mul(f.mul(f.add(f.load(x, at + i), less), factor), f.load(weight, i))
        f.store(out, to + i, f.add(v, f.load(bias, i)) if has_bias else v)
    for i in range(whole, width):
        value = (x[at + i] - mean) * scale * weight[i]
        out[to + i] = value + bias[i] if has_bias else value


def layer_norm(args, step, piece):
    """For each token: the addition (DELTA), the norm, the quantization."""
    a, s = i64(args), i64(step)
    width, eps, tokens = a[LayerNormArg.WIDTH], np.float32(f64(args)[LayerNormArg.EPS]), s[a[LayerNormArg.COUNT]]
    x, residual, out = f32(s[a[LayerNormArg.DELTA]]), f32(s[a[LayerNormArg.RESIDUAL]]), f32(s[a[LayerNormArg.OUT]])
    weight, bias, has_bias = f32(a[LayerNormArg.WEIGHT]), f32(a[LayerNormArg.BIAS]), a[LayerNormArg.BIAS] != 0
    own = scratch(width)  # floats that only the quantization reads stay in the nearest cache
    for t in range(piece * TOKENS_PER_PIECE, min(tokens, piece * TOKENS_PER_PIECE + TOKENS_PER_PIECE)):
        to, at = (out, t * width) if a[LayerNormArg.OUT] else (own, 0)
        if a[LayerNormArg.DELTA]:
            add_row(x, residual, t * width, width, np.float32(1))
        layer_norm_row(residual, t * width, weight, bias, has_bias, eps, to, at, width)
        if a[LayerNormArg.ACTIVATIONS]:
            quantize_row(to, at, s, a[LayerNormArg.ACTIVATIONS], t, width, a[LayerNormArg.TWO_TERM], tokens)


@kernel
def activate_row(x, at, out, to, count, activation):
    """Write act(x) of `count` columns, a multiple of 16; tanh(y) = 1 - 2 / (1 + e^2y)."""
    one, minus = f.splat(np.float32(1)), f.splat(np.float32(-1))
    for i in range(0, count, 16):
        v = f.load(x, at + i)
        if activation == GELU:
            y = f.gelu(v)
        elif activation == RELU:
            y = f.relu(v)
        elif activation == TANH:
            below = f.add(one, f.exp(f.mul(v, f.splat(np.float32(2)))))
            y = f.add(one, f.div(f.splat(np.float32(-2)), below))
        else:
            y = v
            if activation == GELU_TANH:
                inner = f.mul(f.splat(np.float32(0.044715)), f.mul(v, f.mul(v, v)))
                y = f.mul(f.splat(np.float32(1.5957691216057308)), f.add(v, inner))
            y = f.div(v, f.add(one, f.exp(f.mul(y, minus))))
        f.store(out, to + i, y)


def activate(args, step, piece):
    """Activate some columns of some tokens, and quantize them."""
    a, s = i64(args), i64(step)
    first, count, token, end = gate_bounds(a, s, piece)
    width, own, x, activation = a[GatedArg.WIDTH], scratch(count + 16), f32(s[a[GatedArg.X]]), a[GatedArg.ACTIVATION]
    whole = count - count % 16
    for t in range(token, end):
        source = t * width + first
        to, at = (f32(s[a[GatedArg.OUT]]), source) if a[GatedArg.OUT] else (own, 0)
        activate_row(x, source, to, at, whole, activation)
        if whole < count:
            for i in range(whole, count):
                own[i] = x[source + i]
            activate_row(own, whole, own, whole, 16, activation)
            for i in range(whole, count):
                to[at + i] = own[i]
        quantize_columns(to, at, a, s, t, first, count)


def mean_rows(args, step, piece):
    """Write the mean of a request's rows, added in their order."""
    a, s = i64(args), i64(step)
    width, x, out = a[RowsArg.WIDTH], f32(s[a[RowsArg.SOURCE]]), f32(s[a[RowsArg.OUT]])
    begin, end = i64(s[Step.QUERY_START])[piece], i64(s[Step.QUERY_START])[piece + 1]
    for i in range(width):
        out[piece * width + i] = x[begin * width + i]
    for t in range(begin + 1, end):
        for i in range(width):
            out[piece * width + i] += x[t * width + i]
    for i in range(width):
        out[piece * width + i] /= np.float32(end - begin)


def take_rows(args, step, piece):
    """Copy the row of a token of LOGITS_INDEX."""
    a, s = i64(args), i64(step)
    width, x, out = a[RowsArg.WIDTH], f32(s[a[RowsArg.SOURCE]]), f32(s[a[RowsArg.OUT]])
    row = i64(s[Step.LOGITS_INDEX])[piece]
    for i in range(width):
        out[piece * width + i] = x[row * width + i]


LAYER_NORM, ACTIVATE, MEAN_ROWS, TAKE_ROWS = map(TaskKernel, (layer_norm, activate, mean_rows, take_rows))


def layer_norm_task(
    count: int,
    delta: int,
    residual: int,
    outputs: tuple[int, int],
    weights: tuple[Any, Any],
    eps: float,
    *,
    two_term: bool = False,
) -> Task:
    """Return the norm: entries of its inputs (the first may be 0) and of OUT and ACTIVATIONS; its weight and bias."""
    weight, bias = weights
    args = pack_args(count, delta, residual, *outputs, len(weight), weight, 0 if bias is None else bias, 0, two_term)
    return Task(LAYER_NORM, pack_floats(args, LayerNormArg.EPS, [eps]), 1, count, TOKENS_PER_PIECE)


def activate_task(count: int, x: int, out: int, activations: int, width: int, activation: str) -> Task:
    """Return the activation of all rows; the arguments are entries, but for the width and the activation."""
    args = pack_args(count, count, 0, out, activations, width, ACTIVATIONS.index(activation), x)
    return Task(ACTIVATE, args, -(-width // GATE_COLUMNS), count, TOKENS_PER_PIECE)


def mean_rows_task(source: int, out: int, width: int) -> Task:
    """Return the means of each request's rows; the arguments are entries and the width."""
    return Task(MEAN_ROWS, pack_args(source, out, width), 1, Step.REQUESTS, 1)


def take_rows_task(source: int, out: int, width: int) -> Task:
    """Return the copy of the rows of LOGITS_INDEX; the arguments are entries and the width."""
    return Task(TAKE_ROWS, pack_args(source, out, width), 1, Step.NUM_LOGITS, 1)
