"""Embedding rows, norms, gated activations, quantization: everything between the products except attention.

Rows are independent: a token has the same bits alone and in a batch. Where the next product needs int8, a task
quantizes its rows while they are in the nearest cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....config import SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT
from ..jit import TaskKernel, kernel
from ..packed_weight import LAYOUTS, PackedMatrix
from . import simd as f
from .pointers import f16_from_bits, f32, f64, i8, i64, scratch, u8, u16
from .program import Step, Task, pack_args, pack_floats
from .quantize_activations import quantize_blocks, quantize_two_term

Floats = NDArray[np.float32]
TOKENS_PER_PIECE = 4
GATE_COLUMNS = 512  # columns per piece of the gated activation
ACTIVATIONS = ("silu", "gelu_tanh", "swiglu_oai", "gelu")
FLOAT_TYPES = ("", "F32", "F16", "BF16", "FP8")


# Arguments of each task. Entries of the step are named after what they hold; 0 stands for "none" where optional.
# NormArg: OUT, ACTIVATIONS (quantize the rows), INDEX (rows of the residual stream) and POST_WEIGHT (norm of the delta
# before it is added) are optional. COUNT is the entry of the number of rows, SCALE a factor of the sum.
NormArg = IntEnum(
    "NormArg",
    "COUNT DELTA RESIDUAL OUT ACTIVATIONS INDEX WIDTH WEIGHT POST_WEIGHT ADD_DELTA EPS TWO_TERM SCALE",
    start=0,
)
# GatedArg: rows from the number at PANEL_ROWS on are not stored in panels. For `gated`, GATES has gate and up of each
# row and ACTIVATION is the number of the activation; for `sigmoid_gate`, GATES has gates alone and X is the entry of
# the rows that they multiply.
GatedArg = IntEnum("GatedArg", "COUNT PANEL_ROWS GATES OUT ACTIVATIONS WIDTH ACTIVATION X", start=0)
QuantizeArg = IntEnum("QuantizeArg", "COUNT SOURCE OUT ACTIVATIONS HEADS DIM PADDED TWO_TERM ORDER", start=0)
# Weights are optional. Q_GROUP and K_GROUP are the heads that one norm covers: 1, or all.
HeadNormArg = IntEnum(
    "HeadNormArg", "COUNT QKV HEADS KV_HEADS DIM Q_WEIGHT K_WEIGHT V_WEIGHT EPS Q_GROUP K_GROUP", start=0
)
# Arguments of `embed`; MINIMA, NIBBLE_SCALES and TABLE (the value of each code) are optional.
EmbedArg = IntEnum(
    "EmbedArg",
    "COLUMNS PACKED SCALES MINIMA NIBBLE_SCALES FIRST_BITS SECOND_BITS COLUMNS_PER_SCALE OFFSET BIAS "
    "TABLE FLOAT_TYPE UNIT FACTOR OUT INDEX",
    start=0,
)


@kernel
def norm_row(x, at, weight, eps, out, to, width):
    """Write x / sqrt(mean of squares + eps) * weight; x and out may be the same."""
    squares = f.splat(np.float32(0))
    whole = width - width % 16
    for i in range(0, whole, 16):
        v = f.load(x, at + i)
        squares = f.fma(v, v, squares)
    mean = f.hsum(squares)
    for i in range(whole, width):
        mean += x[at + i] * x[at + i]
    scale = np.float32(1) / np.float32(math.sqrt(mean / np.float32(width) + eps))
    factor = f.splat(scale)
    for i in range(0, whole, 16):
        f.store(out, to + i, f.mul(f.mul(f.load(x, at + i), factor), f.load(weight, i)))
    for i in range(whole, width):
        out[to + i] = x[at + i] * scale * weight[i]


@kernel
def add_row(x, residual, at, width, scale):
    """Add a row to the residual stream, and multiply the sum."""
    whole = width - width % 16
    for i in range(0, whole, 16):
        f.store(residual, at + i, f.mul(f.add(f.load(x, at + i), f.load(residual, at + i)), f.splat(scale)))
    for i in range(whole, width):
        residual[at + i] = (x[at + i] + residual[at + i]) * scale


@kernel
def norm_copied_row(x, residual, row, post, has_post, weight, eps, out, to, width, scale):
    """Add and norm one row of the residual stream, which stays as it is."""
    total = scratch(width)
    for i in range(width):
        total[i] = x[row + i]
    if has_post:
        norm_row(total, 0, post, eps, total, 0, width)
    for i in range(width):
        total[i] = (total[i] + residual[row + i]) * scale
    norm_row(total, 0, weight, eps, out, to, width)


@kernel
def quantize_row(x, at, s, entry, token, width, two_term, count):
    """Quantize the row at x[at:] as token `token` of `count`."""
    if two_term:
        quantize_two_term(x, at, s, entry, token, width, count)
    else:
        n = width // 32
        quantize_blocks(x, at, s, entry, token * n, (token + 1) * n, n, count)


def norm(args, step, piece):
    """For each token: the norm of the delta (POST_WEIGHT), the addition (ADD_DELTA), the norm, the quantization."""
    a, s = i64(args), i64(step)
    width, eps, tokens = a[NormArg.WIDTH], np.float32(f64(args)[NormArg.EPS]), s[a[NormArg.COUNT]]
    x, residual = f32(s[a[NormArg.DELTA]]), f32(s[a[NormArg.RESIDUAL]])
    out, index = f32(s[a[NormArg.OUT]]), i64(s[a[NormArg.INDEX]])
    weight, post, has_post = f32(a[NormArg.WEIGHT]), f32(a[NormArg.POST_WEIGHT]), a[NormArg.POST_WEIGHT] != 0
    scale = np.float32(f64(args)[NormArg.SCALE])
    own = scratch(width)  # floats that only the quantization reads stay in the nearest cache
    for t in range(piece * TOKENS_PER_PIECE, min(tokens, piece * TOKENS_PER_PIECE + TOKENS_PER_PIECE)):
        to, at = (out, t * width) if a[NormArg.OUT] else (own, 0)
        if a[NormArg.INDEX]:  # a row may be indexed twice: the delta is added to a copy
            norm_copied_row(x, residual, index[t] * width, post, has_post, weight, eps, to, at, width, scale)
        else:
            if has_post:
                norm_row(x, t * width, post, eps, x, t * width, width)
            if a[NormArg.ADD_DELTA]:
                add_row(x, residual, t * width, width, scale)
            norm_row(residual, t * width, weight, eps, to, at, width)
        if a[NormArg.ACTIVATIONS]:
            quantize_row(to, at, s, a[NormArg.ACTIVATIONS], t, width, a[NormArg.TWO_TERM], tokens)


def add_rows(args, step, piece):
    """For each token: the norm of the delta (POST_WEIGHT), the addition, the quantization."""
    a, s = i64(args), i64(step)
    width, eps, tokens = a[NormArg.WIDTH], np.float32(f64(args)[NormArg.EPS]), s[a[NormArg.COUNT]]
    x, residual = f32(s[a[NormArg.DELTA]]), f32(s[a[NormArg.RESIDUAL]])
    for t in range(piece * TOKENS_PER_PIECE, min(tokens, piece * TOKENS_PER_PIECE + TOKENS_PER_PIECE)):
        if a[NormArg.POST_WEIGHT]:
            norm_row(x, t * width, f32(a[NormArg.POST_WEIGHT]), eps, x, t * width, width)
        add_row(x, residual, t * width, width, np.float32(f64(args)[NormArg.SCALE]))
        if a[NormArg.ACTIVATIONS]:
            quantize_row(residual, t * width, s, a[NormArg.ACTIVATIONS], t, width, a[NormArg.TWO_TERM], tokens)


@kernel
def gate_row(gate, at, up, up_at, out, to, count, gelu):
    """Write act(gate) * up; SiLU is x * sigmoid(x), GELU its tanh form, tanh(y) = 1 - 2 / (1 + e^2y)."""
    one = f.splat(np.float32(1))
    whole = count - count % 16
    for i in range(0, whole, 16):
        g = f.load(gate, at + i)
        if gelu:
            inner = f.mul(f.splat(np.float32(0.044715)), f.mul(g, f.mul(g, g)))
            y = f.mul(f.splat(np.float32(1.5957691216057308)), f.add(g, inner))
        else:
            y = g
        act = f.div(g, f.add(one, f.exp(f.mul(y, f.splat(np.float32(-1))))))
        f.store(out, to + i, f.mul(act, f.load(up, up_at + i)))
    for i in range(whole, count):
        g = gate[at + i]
        y = np.float32(1.5957691216057308) * (g + np.float32(0.044715) * g * g * g) if gelu else g
        out[to + i] = g / (np.float32(1) + np.float32(math.exp(-y))) * up[up_at + i]


@kernel
def gate_row_gelu(gate_up, at, half, out, to, count):
    """Write gelu(gate) * up, in its exact form."""
    whole = count - count % 16
    for i in range(0, whole, 16):
        f.store(out, to + i, f.mul(f.gelu(f.load(gate_up, at + i)), f.load(gate_up, at + half + i)))
    for i in range(whole, count):
        out[to + i] = f.hmax(f.gelu(f.splat(gate_up[at + i]))) * gate_up[at + half + i]


@kernel
def gate_row_oai(gate_up, at, half, out, to, count):
    """Write gate * sigmoid(alpha * gate) * (up + 1), both clamped; a NaN stays."""
    one, minus = f.splat(np.float32(1)), f.splat(np.float32(-1))
    low, alpha = f.splat(np.float32(-SWIGLU_OAI_LIMIT)), f.splat(np.float32(-SWIGLU_OAI_ALPHA))
    whole = count - count % 16
    for i in range(0, whole, 16):
        g = f.mul(minus, f.max_nan_second(low, f.mul(minus, f.load(gate_up, at + i))))
        u = f.mul(minus, f.max_nan_second(low, f.mul(minus, f.load(gate_up, at + half + i))))
        u = f.add(f.max_nan_second(low, u), one)
        f.store(out, to + i, f.mul(f.div(g, f.add(one, f.exp(f.mul(alpha, g)))), u))
    for i in range(whole, count):
        g, u = gate_up[at + i], gate_up[at + half + i]
        g = np.float32(SWIGLU_OAI_LIMIT) if g > np.float32(SWIGLU_OAI_LIMIT) else g
        u = np.float32(SWIGLU_OAI_LIMIT) if u > np.float32(SWIGLU_OAI_LIMIT) else u
        u = (np.float32(-SWIGLU_OAI_LIMIT) if u < np.float32(-SWIGLU_OAI_LIMIT) else u) + np.float32(1)
        out[to + i] = g / (np.float32(1) + np.float32(math.exp(np.float32(-SWIGLU_OAI_ALPHA) * g))) * u


@kernel
def quantize_columns(x, at, a, s, t, first, count):
    """Quantize some columns of a gated row, if ACTIVATIONS says so."""
    if a[GatedArg.ACTIVATIONS]:
        row_blocks, in_panels = a[GatedArg.WIDTH] // 32, s[a[GatedArg.PANEL_ROWS]]
        block, rows = t * row_blocks + first // 32, in_panels if t < in_panels else 0
        quantize_blocks(x, at, s, a[GatedArg.ACTIVATIONS], block, block + count // 32, row_blocks, rows)


@kernel
def gate_bounds(a, s, piece):
    """Return the first column of a piece, how many it has, its first token and the end of its tokens."""
    width = a[GatedArg.WIDTH]
    parts = (width + GATE_COLUMNS - 1) // GATE_COLUMNS
    first, token = piece % parts * GATE_COLUMNS, piece // parts * TOKENS_PER_PIECE
    return first, min(GATE_COLUMNS, width - first), token, min(s[a[GatedArg.COUNT]], token + TOKENS_PER_PIECE)


def gated(args, step, piece):
    """Gate some columns of some tokens, and quantize them."""
    a, s = i64(args), i64(step)
    first, count, token, end = gate_bounds(a, s, piece)
    half, own = a[GatedArg.WIDTH], scratch(count)
    for t in range(token, end):
        to, at = (f32(s[a[GatedArg.OUT]]), t * half + first) if a[GatedArg.OUT] else (own, 0)
        gate_up, source, activation = f32(s[a[GatedArg.GATES]]), t * 2 * half + first, a[GatedArg.ACTIVATION]
        if activation == 2:
            gate_row_oai(gate_up, source, half, to, at, count)
        elif activation == 3:
            gate_row_gelu(gate_up, source, half, to, at, count)
        else:
            gate_row(gate_up, source, gate_up, source + half, to, at, count, activation == 1)
        quantize_columns(to, at, a, s, t, first, count)


@kernel
def sigmoid_row(x, at, gate, from_, out, to, count):
    """Write x * sigmoid(gate)."""
    one, minus = f.splat(np.float32(1)), f.splat(np.float32(-1))
    whole = count - count % 16
    for i in range(0, whole, 16):
        below = f.add(one, f.exp(f.mul(f.load(gate, from_ + i), minus)))
        f.store(out, to + i, f.div(f.load(x, at + i), below))
    for i in range(whole, count):
        out[to + i] = x[at + i] / (np.float32(1) + np.float32(math.exp(-gate[from_ + i])))


def sigmoid_gate(args, step, piece):
    """Multiply some columns of some tokens by the sigmoid of their gate, and quantize them."""
    a, s = i64(args), i64(step)
    first, count, token, end = gate_bounds(a, s, piece)
    width, own = a[GatedArg.WIDTH], scratch(count)
    x, gate = f32(s[a[GatedArg.X]]), f32(s[a[GatedArg.GATES]])
    for t in range(token, end):
        to, at = (f32(s[a[GatedArg.OUT]]), t * width + first) if a[GatedArg.OUT] else (own, 0)
        sigmoid_row(x, t * width + first, gate, t * width + first, to, at, count)
        quantize_columns(to, at, a, s, t, first, count)


def quantize_rows(args, step, piece):
    """Copy rows of floats to OUT, without the padding of their heads or with their columns in ORDER, and quantize them
    (ACTIVATIONS)."""
    a, s = i64(args), i64(step)
    heads, dim, padded = a[QuantizeArg.HEADS], a[QuantizeArg.DIM], a[QuantizeArg.PADDED]
    x, width, tokens = f32(s[a[QuantizeArg.SOURCE]]), heads * dim, s[a[QuantizeArg.COUNT]]
    for t in range(piece * TOKENS_PER_PIECE, min(tokens, piece * TOKENS_PER_PIECE + TOKENS_PER_PIECE)):
        if a[QuantizeArg.ORDER]:
            out, order = f32(s[a[QuantizeArg.OUT]]), i64(a[QuantizeArg.ORDER])
            for i in range(width):
                out[t * width + i] = x[t * width + order[i]]
        elif a[QuantizeArg.OUT]:
            out = f32(s[a[QuantizeArg.OUT]])
            for h in range(heads):
                for i in range(dim):
                    out[t * width + h * dim + i] = x[(t * heads + h) * padded + i]
        if a[QuantizeArg.ACTIVATIONS]:
            source = f32(s[a[QuantizeArg.OUT]]) if a[QuantizeArg.OUT] else x
            quantize_row(source, t * width, s, a[QuantizeArg.ACTIVATIONS], t, width, a[QuantizeArg.TWO_TERM], tokens)


def head_norms(args, step, piece):
    """Norm q, k and v in place, by head or all heads together; a row holds q heads, k heads, v heads of one size."""
    a, s = i64(args), i64(step)
    x, dim, eps = f32(s[a[HeadNormArg.QKV]]), a[HeadNormArg.DIM], np.float32(f64(args)[HeadNormArg.EPS])
    heads, kv_heads, first = a[HeadNormArg.HEADS], a[HeadNormArg.KV_HEADS], piece * TOKENS_PER_PIECE
    for t in range(first, min(s[a[HeadNormArg.COUNT]], first + TOKENS_PER_PIECE)):
        h = 0
        while h < heads + 2 * kv_heads:
            at, weight, group = (t * (heads + 2 * kv_heads) + h) * dim, a[HeadNormArg.V_WEIGHT], 1
            if h < heads:
                weight, group = a[HeadNormArg.Q_WEIGHT], a[HeadNormArg.Q_GROUP]
            elif h < heads + kv_heads:
                weight, group = a[HeadNormArg.K_WEIGHT], a[HeadNormArg.K_GROUP]
            if weight:
                norm_row(x, at, f32(weight), eps, x, at, group * dim)
            h += group


@kernel
def load_float(packed, float_type, at):
    """Return one float of a float matrix."""
    if float_type == 1:
        return f32(packed)[at]
    if float_type == 2:
        return f.load_one_f16(u16(packed), at, False)
    return f.load_one_f16(u16(packed), at, True)


@kernel
def dequantize_fp8_row(a, row, unit, out, to):
    """Write a row of e4m3 numbers with scales of 32 columns as floats."""
    columns, packed, scales = a[EmbedArg.COLUMNS], u8(a[EmbedArg.PACKED]), u16(a[EmbedArg.SCALES])
    group, lane = row // 16, row % 16
    for column in range(columns):
        code = np.int64(packed[(group * columns + column) * 16 + lane])
        scale = f.load_one_f16(scales, (group * (columns // 32) + column // 32) * 16 + lane, False) * unit
        out[to + column] = f16_from_bits((code & 128) << 8 | (code & 127) << 7) * scale


@kernel
def dequantize_row(a, row, unit, out, to):
    """Write a row of codes with scales as floats, 16 columns at a time."""
    columns, first, second = a[EmbedArg.COLUMNS], a[EmbedArg.FIRST_BITS], a[EmbedArg.SECOND_BITS]
    packed, scales, minima = u8(a[EmbedArg.PACKED]), u16(a[EmbedArg.SCALES]), u16(a[EmbedArg.MINIMA])
    nibbles, table = u8(a[EmbedArg.NIBBLE_SCALES]), i8(a[EmbedArg.TABLE])
    columns_per_scale = a[EmbedArg.COLUMNS_PER_SCALE]
    group, lane, n_scales = row // 16, row % 16, columns // columns_per_scale
    m = np.float32(0)
    for part in range(columns // 16):
        s = (group * n_scales + part * 16 // columns_per_scale) * 16 + lane
        d = f.load_one_f16(scales, s, False) * unit
        if a[EmbedArg.MINIMA]:
            m = f.load_one_f16(minima, s, False) * unit
        if a[EmbedArg.NIBBLE_SCALES]:
            both = nibbles[(group * (columns // 16) + part) * 16 + lane]
            d, m = d * np.float32(both & 15), m * np.float32(both >> 4)
        line = (group * (columns // 32) + part // 2) * (first + second) * 64 + 4 * lane
        for quad in range(part % 2 * 4, part % 2 * 4 + 4):
            low, low_shift = line + 64 * (quad % first), first * (quad // first)
            high, high_shift = line, 0
            if second:
                high, high_shift = line + 64 * (first + quad % second), second * (quad // second)
            for byte in range(4):
                code = np.int64(packed[low + byte]) >> low_shift & ((1 << first) - 1)
                code |= (np.int64(packed[high + byte]) >> high_shift & ((1 << second) - 1)) << first
                if first == 8:
                    code = np.int64(np.int8(code - a[EmbedArg.BIAS]))
                elif a[EmbedArg.TABLE]:
                    code = np.int64(table[code])
                out[to + part * 16 + quad % 4 * 4 + byte] = np.float32(code - a[EmbedArg.OFFSET]) * d + m


def embed(args, step, piece):
    """Write the embedding of one token to the residual stream."""
    a, s = i64(args), i64(step)
    columns, row, out = a[EmbedArg.COLUMNS], i64(s[a[EmbedArg.INDEX]])[piece], f32(s[a[EmbedArg.OUT]])
    to, factor = piece * columns, np.float32(f64(args)[EmbedArg.FACTOR])
    if a[EmbedArg.FLOAT_TYPE] == 4:
        dequantize_fp8_row(a, row, np.float32(f64(args)[EmbedArg.UNIT]), out, to)
    elif a[EmbedArg.FLOAT_TYPE]:
        for column in range(columns):
            at = (row // 16 * columns + column) * 16 + row % 16
            out[to + column] = load_float(a[EmbedArg.PACKED], a[EmbedArg.FLOAT_TYPE], at)
    else:
        dequantize_row(a, row, np.float32(f64(args)[EmbedArg.UNIT]), out, to)
    if factor != np.float32(1):
        for column in range(columns):
            out[to + column] *= factor


NORM, GATED, QUANTIZE_ROWS, HEAD_NORMS = map(TaskKernel, (norm, gated, quantize_rows, head_norms))
EMBED, ADD_ROWS, SIGMOID_GATE = map(TaskKernel, (embed, add_rows, sigmoid_gate))
CODE_VALUES = {layout: np.array(layout.table, np.int8) for layout in LAYOUTS if layout.table}  # kept alive for kernels


def norm_task(
    count: int,
    delta: int,
    residual: int,
    outputs: tuple[int, int, int],
    weights: tuple[Any, Any],
    width: int,
    eps: float,
    *,
    add_delta: bool,
    two_term: bool = False,
    scale: float = 1.0,
) -> Task:
    """Return the norm: entries of its inputs and of OUT, ACTIVATIONS and INDEX; its weight and the delta's."""
    args = pack_args(count, delta, residual, *outputs, width, *weights, add_delta, 0, two_term, 0)
    pack_floats(args, NormArg.SCALE, [scale])
    return Task(NORM, pack_floats(args, NormArg.EPS, [eps]), 1, count, TOKENS_PER_PIECE)


def add_task(
    count: int, delta: int, residual: int, activations: int, post: Any, width: int, eps: float, *, two_term: bool
) -> Task:
    """Return the residual add: entries of its operands and of its activations, the weight of the delta's norm or 0."""
    args = pack_args(count, delta, residual, 0, activations, 0, width, 0, post, True, 0, two_term, 0)
    pack_floats(args, NormArg.SCALE, [1.0])
    return Task(ADD_ROWS, pack_floats(args, NormArg.EPS, [eps]), 1, count, TOKENS_PER_PIECE)


def head_norms_task(qkv: int, heads: tuple[int, int], dim: int, weights: Sequence[Floats | None], eps: float) -> Task:
    """Return the norms of q, k and v, where there is a weight; one of (heads, dim) covers all of them."""
    groups = [1 if weight is None or weight.ndim == 1 else len(weight) for weight in weights[:2]]
    given = (0 if weight is None else weight for weight in weights)
    args = pack_args(Step.TOKENS, qkv, *heads, dim, *given, 0, *groups)
    return Task(HEAD_NORMS, pack_floats(args, HeadNormArg.EPS, [eps]), 1, Step.TOKENS, TOKENS_PER_PIECE)


def gated_task(
    gate_up: int,
    out: int,
    activations: int,
    width: int,
    activation: str,
    count: int = Step.TOKENS,
    panel_rows: int = Step.TOKENS,
) -> Task:
    """Return the gated activation of all rows; the arguments are entries, but for the width and the activation."""
    args = pack_args(count, panel_rows, gate_up, out, activations, width, ACTIVATIONS.index(activation), 0)
    return Task(GATED, args, -(-width // GATE_COLUMNS), count, TOKENS_PER_PIECE)


def sigmoid_gate_task(x: int, gate: int, out: int, activations: int, width: int) -> Task:
    """Return the task that multiplies rows by the sigmoid of a gate; the arguments are entries and the width."""
    args = pack_args(Step.TOKENS, Step.TOKENS, gate, out, activations, width, 0, x)
    return Task(SIGMOID_GATE, args, -(-width // GATE_COLUMNS), Step.TOKENS, TOKENS_PER_PIECE)


def quantize_task(count: int, source: int, activations: int, width: int, *, two_term: bool) -> Task:
    """Return the task that quantizes rows; the arguments are entries and the width."""
    args = pack_args(count, source, 0, activations, 1, width, width, two_term, 0)
    return Task(QUANTIZE_ROWS, args, 1, count, TOKENS_PER_PIECE)


def copy_task(count: int, source: int, out: int, heads: int, dim: int, padded: int) -> Task:
    """Return the task that copies rows of heads from one entry to another, without their padding."""
    args = pack_args(count, source, out, 0, heads, dim, padded, 0, 0)
    return Task(QUANTIZE_ROWS, args, 1, count, TOKENS_PER_PIECE)


def take_columns_task(count: int, source: int, out: int, order: NDArray[np.int64]) -> Task:
    """Return the task that copies rows from one entry to another, their columns in an order."""
    args = pack_args(count, source, out, 0, 1, len(order), len(order), 0, order)
    return Task(QUANTIZE_ROWS, args, 1, count, TOKENS_PER_PIECE)


def embed_task(w: PackedMatrix, factor: float, out: int, index: int = Step.TOKEN_IDS) -> Task:
    """Return the task that writes the rows of a matrix that the entry `index` names, times a factor, to `out`."""
    layout = w.layout
    first, second = (*layout.planes, 0)[:2]
    nibbles, minima = 0 if w.nibble_scales is None else w.nibble_scales, w.minima if layout.has_minimum else 0
    table, float_type = CODE_VALUES.get(layout, 0), FLOAT_TYPES.index(layout.float_type)
    arrays, planes = (w.packed, w.scales, minima, nibbles), (first, second, layout.columns_per_scale, layout.offset)
    args = pack_args(w.columns, *arrays, *planes, w.bias, table, float_type, 0, 0, out, index)
    return Task(EMBED, pack_floats(args, EmbedArg.UNIT, [w.unit, factor]), 1, Step.TOKENS, 1)
