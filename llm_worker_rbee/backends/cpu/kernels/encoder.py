"""What encoders have between products: layer norms, activations without a gate, rows of a step that are taken or added.

Vision towers join or average groups of adjacent patches, interpolate positions of a table, and turn pairs of
values by the row or by the column of a patch. A decoder puts rows of encoded images in the place of tokens.

Rows are independent: a sequence has the same bits alone and in a batch. Where the next product needs int8, a task
quantizes its rows while they are in the nearest cache.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import numpy as np

from ...ops import ROPE_AXES, RopeTable
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
AxesArg = IntEnum("AxesArg", "COS INV_FREQ AXES PAIRS SCALE", start=0)
PoolArg = IntEnum("PoolArg", "SOURCE OUT WIDTH COUNT", start=0)
JoinArg = IntEnum("JoinArg", "X Y OUT X_WIDTH Y_WIDTH", start=0)
ClampArg = IntEnum("ClampArg", "X OUT LOW HIGH WIDTH", start=0)
InterpolateArg = IntEnum("InterpolateArg", "TABLE PLACES OUT ROWS COLUMNS WIDTH", start=0)
PlaceArg = IntEnum("PlaceArg", "X IMAGES WIDTH IMAGE_WIDTH FIRST ADDS", start=0)


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


def axes_angles(args, step, piece):
    """Write cos and sin of some tokens, each pair's of the position on its own axis: (tokens, pairs)."""
    a, s = i64(args), i64(step)
    pairs, scale, axes = a[AxesArg.PAIRS], np.float32(f64(args)[AxesArg.SCALE]), i64(a[AxesArg.AXES])
    inv_freq, cos, sin = f32(a[AxesArg.INV_FREQ]), f32(s[a[AxesArg.COS]]), f32(s[a[AxesArg.COS] + 1])
    for t in range(piece * TOKENS_PER_PIECE, min(s[Step.TOKENS], (piece + 1) * TOKENS_PER_PIECE)):
        for i in range(pairs):
            position = i64(s[Step.ROPE_POSITIONS])[t * ROPE_AXES + axes[i]]
            angle = np.float32(position) * inv_freq[i]
            cos[t * pairs + i] = scale * np.float32(math.cos(angle))
            sin[t * pairs + i] = scale * np.float32(math.sin(angle))


def pool_rows(args, step, piece):
    """Write the mean of a group of adjacent rows, added in their order."""
    a, s = i64(args), i64(step)
    width, count, x, out = a[PoolArg.WIDTH], a[PoolArg.COUNT], f32(s[a[PoolArg.SOURCE]]), f32(s[a[PoolArg.OUT]])
    first = i64(s[Step.LOGITS_INDEX])[piece] * count
    for i in range(width):
        total = x[first * width + i]
        for row in range(first + 1, first + count):
            total += x[row * width + i]
        out[piece * width + i] = total / np.float32(count)


def join_rows(args, step, piece):
    """Write a row of x, and the row of y behind it."""
    a, s = i64(args), i64(step)
    x, y, out = f32(s[a[JoinArg.X]]), f32(s[a[JoinArg.Y]]), f32(s[a[JoinArg.OUT]])
    left, right = a[JoinArg.X_WIDTH], a[JoinArg.Y_WIDTH]
    to = piece * (left + right)
    for i in range(left):
        out[to + i] = x[piece * left + i]
    for i in range(right):
        out[to + left + i] = y[piece * right + i]


def clamp_rows(args, step, piece):
    """Write a row of x, each column between its limits."""
    a, s = i64(args), i64(step)
    x, out, low, high = f32(s[a[ClampArg.X]]), f32(s[a[ClampArg.OUT]]), f32(a[ClampArg.LOW]), f32(a[ClampArg.HIGH])
    at = piece * a[ClampArg.WIDTH]
    for i in range(a[ClampArg.WIDTH]):
        out[at + i] = min(max(x[at + i], low[i]), high[i])


def interpolate(args, step, piece):
    """Write the vector at the place of a patch between four of a table."""
    a, s = i64(args), i64(step)
    table, places, out = f32(a[InterpolateArg.TABLE]), f32(s[a[InterpolateArg.PLACES]]), f32(s[a[InterpolateArg.OUT]])
    rows, columns, width = a[InterpolateArg.ROWS], a[InterpolateArg.COLUMNS], a[InterpolateArg.WIDTH]
    row, column = math.floor(places[2 * piece]), math.floor(places[2 * piece + 1])
    down, right = places[2 * piece] - np.float32(row), places[2 * piece + 1] - np.float32(column)
    up, left = np.float32(1) - down, np.float32(1) - right
    next_row, next_column = min(row + 1, rows - 1), min(column + 1, columns - 1)
    a_at, b_at = (row * columns + column) * width, (row * columns + next_column) * width
    c_at, d_at = (next_row * columns + column) * width, (next_row * columns + next_column) * width
    for i in range(width):
        above = table[a_at + i] * left + table[b_at + i] * right
        below = table[c_at + i] * left + table[d_at + i] * right
        out[piece * width + i] = above * up + below * down


def place_images(args, step, piece):
    """Write, or add, some columns of an image's row over the row of its token."""
    a, s = i64(args), i64(step)
    row, width = i64(s[Step.IMAGE_ROWS])[piece], a[PlaceArg.WIDTH]
    if row < 0:
        return
    x, images = f32(s[a[PlaceArg.X]]), f32(s[a[PlaceArg.IMAGES]])
    at, to = row * a[PlaceArg.IMAGE_WIDTH] + a[PlaceArg.FIRST], piece * width
    for i in range(width):
        x[to + i] = images[at + i] + (x[to + i] if a[PlaceArg.ADDS] else np.float32(0))


LAYER_NORM, ACTIVATE, MEAN_ROWS, TAKE_ROWS = map(TaskKernel, (layer_norm, activate, mean_rows, take_rows))
AXES_ANGLES, POOL_ROWS, JOIN_ROWS = map(TaskKernel, (axes_angles, pool_rows, join_rows))
CLAMP_ROWS, INTERPOLATE, PLACE_IMAGES = map(TaskKernel, (clamp_rows, interpolate, place_images))


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


def axes_angles_task(rope: RopeTable, cos: int) -> Task:
    """Return the task that writes the angles of all tokens: cosines to the entry `cos`, sines to the next."""
    assert rope.axes is not None
    args = pack_args(cos, rope.inv_freq, rope.axes, len(rope.inv_freq), 0)
    return Task(AXES_ANGLES, pack_floats(args, AxesArg.SCALE, [rope.scale]), 1, Step.TOKENS, TOKENS_PER_PIECE)


def merge_task(source: int, out: int, width: int, count: int) -> Task:
    """Return the copy of groups of `count` rows, by the numbers of groups in LOGITS_INDEX."""
    return Task(TAKE_ROWS, pack_args(source, out, width * count), 1, Step.NUM_LOGITS, 1)


def pool_task(source: int, out: int, width: int, count: int) -> Task:
    """Return the means of groups of `count` rows, by the numbers of groups in LOGITS_INDEX."""
    return Task(POOL_ROWS, pack_args(source, out, width, count), 1, Step.NUM_LOGITS, 1)


def join_task(count: int, x: int, y: int, out: int, widths: tuple[int, int]) -> Task:
    """Return the task that joins the rows of two entries."""
    return Task(JOIN_ROWS, pack_args(x, y, out, *widths), 1, count, 1)


def clamp_task(count: int, x: int, out: int, low: Any, high: Any) -> Task:
    """Return the task that keeps the columns of an entry between limits."""
    return Task(CLAMP_ROWS, pack_args(x, out, low, high, len(low)), 1, count, 1)


def interpolate_task(table: Any, places: int, out: int) -> Task:
    """Return the lookup of the places of all tokens in a table, (rows, columns, width)."""
    return Task(INTERPOLATE, pack_args(table, places, out, *table.shape), 1, Step.TOKENS, 1)


def place_task(x: int, images: int, width: int, image_width: int, part: int, *, adds: bool) -> Task:
    """Return the task that changes the rows of x, in place."""
    args = pack_args(x, images, width, image_width, part * width, adds)
    return Task(PLACE_IMAGES, args, 1, Step.TOKENS, 1)


MERGE_TASKS = {"merge": merge_task, "pool": pool_task}
