"""Mixture of experts: routing, products grouped by expert, and the weighted sum.

A (token, slot) pair becomes a row; rows of one expert are adjacent, so that a product is one of several tokens with one
expert's matrix. Rows stay in this order from the first product to the sum. Experts with enough rows for products from
unpacked weights come first and begin at whole panels; experts with one row come last: they read their token's
activations in place, all others read a copy. A row has the same bits in any group. Adjacent entries of the step
(`GroupEntry`) hold the grouping: the pair of each row, the row of each pair, the products to compute, and how many rows
there are, how many lie in panels or are copied, and how many products.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...ops import RouteParams
from ..jit import TaskKernel, kernel
from . import simd as f
from .elementwise import TOKENS_PER_PIECE
from .matmul.linear import UNPACK_MIN_TOKENS
from .matmul.packed import LinearArg
from .pointers import atomic_store, call_task, f32, f64, i8, i32, i64, scratch, stack_floats, u8
from .program import Step, Task, pack_args, pack_floats
from .quantize_activations import PANEL_BYTES, PANEL_TOKENS, PANELS, store_in_panel

Floats = NDArray[np.float32]
SCORINGS = ("softmax", "sigmoid")
ROWS_PER_UNIT = 128  # of a product that one piece computes: whole panels
UNIT_NUMBERS = 3  # expert, first row, rows
COMBINE_COLUMNS = 512  # per piece of the weighted sum
GroupEntry = IntEnum("GroupEntry", "PAIRS PLACES UNITS ROWS PANEL_ROWS COPIED_ROWS NUM_UNITS", start=0)
NUM_LISTS = GroupEntry.ROWS  # of the entries, those that are addresses
RouteArg = IntEnum("RouteArg", "LOGITS EXPERTS WEIGHTS COUNT K SCORING RENORMALIZE BIAS SCALE SCALES", start=0)
GroupArg = IntEnum("GroupArg", "EXPERTS GROUPS COUNT K", start=0)
GatherArg = IntEnum("GatherArg", "GROUPS K COLUMNS FLOATS FLOATS_OUT QUANTIZED QUANTIZED_OUT", start=0)
# KERNEL: the product's; SOURCE: entry of the tokens' activations, or 0; INPUT: of the rows'; BIAS: of all
# experts, or 0; STRIDES: bytes of an expert in its four arrays; then the arguments of the product of expert 0.
GroupedArg = IntEnum(
    "GroupedArg", "KERNEL GROUPS SOURCE INPUT OUTPUT PIECES K TOKENS_PER_CALL IS_FLOAT BIAS STRIDES", start=0
)
LINEAR_AT = GroupedArg.STRIDES + 4
LINEAR_ARGS = len(LinearArg)
# PLACES, SHARED and GATE are optional: entries of the row of each pair, of a summand, of a logit of its factor.
CombineArg = IntEnum("CombineArg", "X WEIGHTS PLACES SHARED GATE OUT WIDTH K", start=0)


def rows_per_token(k: int) -> int:
    """Return for how many rows a token has room, with the padding of panels."""
    return k + (-(-k * (PANEL_TOKENS - 1) // UNPACK_MIN_TOKENS) if UNPACK_MIN_TOKENS else 0)


def group_layout(k: int) -> tuple[tuple[int, Any], ...]:
    """Return (elements per token, type) of the entries of a grouping."""
    numbers = ((0, np.int64),) * (len(GroupEntry) - NUM_LISTS)
    return (rows_per_token(k), np.int64), (k, np.int64), (UNIT_NUMBERS * k, np.int64), *numbers


@kernel
def score_experts(logits, at, count, is_sigmoid, scores):
    """Write the softmax or the sigmoids of some logits."""
    top, total = logits[at], np.float32(0)
    for e in range(count):
        top = max(top, logits[at + e])
    for e in range(count):
        if is_sigmoid:
            scores[e] = np.float32(1) / (np.float32(1) + np.float32(math.exp(-logits[at + e])))
        else:
            scores[e] = np.float32(math.exp(logits[at + e] - top))
            total += scores[e]
    if not is_sigmoid:
        for e in range(count):
            scores[e] /= total


def route(args, step, piece):
    """Choose and weigh the experts of some tokens, best first, the lower number first of equal ones."""
    a, s = i64(args), i64(step)
    count, k, bias = a[RouteArg.COUNT], a[RouteArg.K], f32(a[RouteArg.BIAS])
    experts, weights = i64(s[a[RouteArg.EXPERTS]]), f32(s[a[RouteArg.WEIGHTS]])
    scores, scale = scratch(2 * count), np.float32(f64(args)[RouteArg.SCALE])
    for t in range(piece * TOKENS_PER_PIECE, min(s[Step.TOKENS], piece * TOKENS_PER_PIECE + TOKENS_PER_PIECE)):
        score_experts(f32(s[a[RouteArg.LOGITS]]), t * count, count, a[RouteArg.SCORING] == 1, scores)
        for e in range(count):
            scores[count + e] = scores[e] + bias[e] if a[RouteArg.BIAS] else scores[e]
        total = np.float32(0)
        for i in range(t * k, t * k + k):
            best = -1
            for e in range(count):
                is_free = True
                if best >= 0 and not scores[count + e] > scores[count + best]:
                    continue
                for j in range(t * k, i):
                    is_free = is_free and experts[j] != e
                if is_free:
                    best = e
            experts[i], weights[i] = best, scores[best]
            total += scores[best]
        for i in range(t * k, t * k + k):
            if a[RouteArg.RENORMALIZE]:
                weights[i] /= total + np.float32(1e-20)
            weights[i] *= scale
            if a[RouteArg.SCALES]:
                weights[i] *= f32(a[RouteArg.SCALES])[experts[i]]


def group(args, step, piece):
    """Sort the pairs by expert, and list the products."""
    a, s = i64(args), i64(step)
    k, count, entry, chosen = a[GroupArg.K], a[GroupArg.COUNT], a[GroupArg.GROUPS], i64(s[a[GroupArg.EXPERTS]])
    pairs, places = i64(s[entry + GroupEntry.PAIRS]), i64(s[entry + GroupEntry.PLACES])
    units, number, row = i64(s[entry + GroupEntry.UNITS]), 0, 0
    lengths, next_row = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for i in range(s[Step.TOKENS] * k):
        lengths[chosen[i]] += 1
    for kind in range(3):  # experts with many rows, with several, with one
        for e in range(count):
            length = lengths[e]
            own = 0 if UNPACK_MIN_TOKENS > 0 and length >= UNPACK_MIN_TOKENS else 1 if length > 1 else 2
            if length == 0 or own != kind:
                continue
            next_row[e] = row
            parts, panels = (length + ROWS_PER_UNIT - 1) // ROWS_PER_UNIT, (length + PANEL_TOKENS - 1) // PANEL_TOKENS
            for part in range(parts):  # of one size: each has enough rows for unpacked weights
                at, first = number * UNIT_NUMBERS, part * panels // parts * PANEL_TOKENS
                last = min(length, (part + 1) * panels // parts * PANEL_TOKENS)
                units[at], units[at + 1], units[at + 2] = e, row + first, last - first
                number += 1
            row += length
            while kind == 0 and row % PANEL_TOKENS:
                pairs[row] = -1
                row += 1
        if kind == 0:
            s[entry + GroupEntry.PANEL_ROWS] = row
        elif kind == 1:
            s[entry + GroupEntry.COPIED_ROWS] = row
    for i in range(s[Step.TOKENS] * k):
        to = next_row[chosen[i]]
        pairs[to], places[i] = i, to
        next_row[chosen[i]] = to + 1
    s[entry + GroupEntry.ROWS] = row
    atomic_store(step + 8 * (entry + GroupEntry.NUM_UNITS), number)  # late threads may load it


@kernel
def gather_blocks(s, source, out, token, row, n, in_panels):
    """Copy a token's quantized activations to a row: into a panel, or as they are."""
    q, scale, scaled, scaled16 = i8(s[source]), f32(s[source + 1]), f32(s[source + 4]), f32(s[source + 5])
    if UNPACK_MIN_TOKENS and in_panels:
        panels, to = u8(s[out + PANELS]), row // PANEL_TOKENS * n * PANEL_BYTES
        for b in range(n):
            store_in_panel(panels, to, row % PANEL_TOKENS, q, scale, scaled, scaled16, token * n + b)
            to += PANEL_BYTES
        return
    q_out, scale_out, scaled_out, scaled16_out = i8(s[out]), f32(s[out + 1]), f32(s[out + 4]), f32(s[out + 5])
    for i in range(n * 32):
        q_out[row * n * 32 + i] = q[token * n * 32 + i]
    sums, sums_out, sums16, sums16_out = i32(s[source + 2]), i32(s[out + 2]), i32(s[source + 3]), i32(s[out + 3])
    for b in range(n):
        scale_out[row * n + b], sums_out[row * n + b] = scale[token * n + b], sums[token * n + b]
        scaled_out[row * n + b] = scaled[token * n + b]
    for b in range(2 * n):
        sums16_out[2 * row * n + b], scaled16_out[2 * row * n + b] = (
            sums16[2 * token * n + b],
            scaled16[2 * token * n + b],
        )


def gather(args, step, piece):
    """Copy the activations of some rows' tokens."""
    a, s = i64(args), i64(step)
    columns, entry = a[GatherArg.COLUMNS], a[GatherArg.GROUPS]
    pairs, rows = i64(s[entry + GroupEntry.PAIRS]), s[entry + GroupEntry.COPIED_ROWS]
    for row in range(piece * TOKENS_PER_PIECE, min(rows, piece * TOKENS_PER_PIECE + TOKENS_PER_PIECE)):
        token = pairs[row] // a[GatherArg.K]
        if pairs[row] < 0:
            continue
        if a[GatherArg.FLOATS_OUT]:
            x, out = f32(s[a[GatherArg.FLOATS]]), f32(s[a[GatherArg.FLOATS_OUT]])
            for i in range(columns):
                out[row * columns + i] = x[token * columns + i]
        if a[GatherArg.QUANTIZED_OUT]:
            in_panels = row < s[entry + GroupEntry.PANEL_ROWS]
            gather_blocks(s, a[GatherArg.QUANTIZED], a[GatherArg.QUANTIZED_OUT], token, row, columns // 32, in_panels)


@kernel
def add_expert_bias(a, s, expert, first, rows, part):
    """Add an expert's bias to what a piece has computed."""
    begin = part * a[LINEAR_AT + LinearArg.GROUPS_PER_PIECE] * 16
    end = min(a[LINEAR_AT + LinearArg.ROWS], begin + a[LINEAR_AT + LinearArg.GROUPS_PER_PIECE] * 16)
    stride, column = a[LINEAR_AT + LinearArg.STRIDE], a[LINEAR_AT + LinearArg.FIRST]
    bias, out = f32(a[GroupedArg.BIAS]), f32(s[a[GroupedArg.OUTPUT]])
    for row in range(first, first + rows):
        for i in range(column + begin, column + end):
            out[row * stride + i] += bias[expert * stride + i]


def grouped_matmul(args, step, piece):
    """Compute some rows of one expert's matrix: a product with arguments and a step of its own."""
    a, s = i64(args), i64(step)
    unit, part = piece // a[GroupedArg.PIECES], piece % a[GroupedArg.PIECES]
    entry, memory = a[GroupedArg.GROUPS], stack_floats(64)
    units, own, table = i64(s[entry + GroupEntry.UNITS]), i64(memory), i64(memory + 128)
    expert, first, rows = units[unit * UNIT_NUMBERS], units[unit * UNIT_NUMBERS + 1], units[unit * UNIT_NUMBERS + 2]
    for i in range(LINEAR_ARGS):
        own[i] = a[LINEAR_AT + i]
    for i in range(4):
        own[LinearArg.PACKED + i] += expert * a[GroupedArg.STRIDES + i]
    own[LinearArg.COUNT], own[LinearArg.OUTPUT], own[LinearArg.INPUT] = 0, 1, 2
    table[0] = rows
    table[1] = s[a[GroupedArg.OUTPUT]] + 4 * first * own[LinearArg.STRIDE]
    source, row, columns = a[GroupedArg.INPUT], first, own[LinearArg.COLUMNS]
    if rows == 1 and a[GroupedArg.SOURCE]:
        source, row = a[GroupedArg.SOURCE], i64(s[entry + GroupEntry.PAIRS])[first] // a[GroupedArg.K]
    if a[GroupedArg.IS_FLOAT]:
        table[2] = s[source] + 4 * row * columns
    else:
        blocks = row * (columns // 32)
        table[2], table[3], table[4] = s[source] + 32 * blocks, s[source + 1] + 4 * blocks, s[source + 2] + 4 * blocks
        table[5], table[6], table[7] = (
            s[source + 3] + 8 * blocks,
            s[source + 4] + 4 * blocks,
            s[source + 5] + 8 * blocks,
        )
        table[8] = s[source + PANELS] + row // PANEL_TOKENS * (columns // 32) * PANEL_BYTES
    calls = (rows + a[GroupedArg.TOKENS_PER_CALL] - 1) // a[GroupedArg.TOKENS_PER_CALL]
    for i in range(part * calls, (part + 1) * calls):
        call_task(a[GroupedArg.KERNEL], memory, memory + 128, i)
    if a[GroupedArg.BIAS]:
        add_expert_bias(a, s, expert, first, rows, part)


def combine(args, step, piece):
    """Add some columns of a token's rows, each times its weight, and of the shared expert."""
    a, s = i64(args), i64(step)
    width, k = a[CombineArg.WIDTH], a[CombineArg.K]
    parts = (width + COMBINE_COLUMNS - 1) // COMBINE_COLUMNS
    t, first = piece // parts, piece % parts * COMBINE_COLUMNS
    last = min(width, first + COMBINE_COLUMNS)
    x, weights, out = f32(s[a[CombineArg.X]]), f32(s[a[CombineArg.WEIGHTS]]), f32(s[a[CombineArg.OUT]])
    whole = last - (last - first) % 16
    for i in range(k):
        row = i64(s[a[CombineArg.PLACES]])[t * k + i] if a[CombineArg.PLACES] else t * k + i
        add_times(x, row * width, weights[t * k + i], out, t * width, first, whole, last, i == 0)
    if a[CombineArg.SHARED]:
        factor = np.float32(1)
        if a[CombineArg.GATE]:
            factor = np.float32(1) / (np.float32(1) + np.float32(math.exp(-f32(s[a[CombineArg.GATE]])[t])))
        add_times(f32(s[a[CombineArg.SHARED]]), t * width, factor, out, t * width, first, whole, last, False)


@kernel
def add_times(x, at, factor, out, to, first, whole, last, is_first):
    """Add columns first .. last - 1 of a row times a factor to a sum, or begin it."""
    factors = f.splat(factor)
    for i in range(first, whole, 16):
        value = f.mul(f.load(x, at + i), factors)
        f.store(out, to + i, value if is_first else f.add(f.load(out, to + i), value))
    for i in range(whole, last):
        value = x[at + i] * factor
        out[to + i] = value if is_first else out[to + i] + value


ROUTE, GROUP, GATHER, GROUPED, COMBINE = map(TaskKernel, (route, group, gather, grouped_matmul, combine))


def route_task(
    logits: int, experts: int, weights: int, count: int, params: RouteParams, bias: Any, scales: Any
) -> Task:
    """Return the task that chooses experts; the first arguments are entries, the last two arrays or None."""
    chosen = params.k, SCORINGS.index(params.scoring), params.renormalize
    arrays = (0 if array is None else array for array in (bias, 0, scales))
    args = pack_args(logits, experts, weights, count, *chosen, *arrays)
    return Task(ROUTE, pack_floats(args, RouteArg.SCALE, [params.scale]), 1, Step.TOKENS, TOKENS_PER_PIECE)


def group_task(experts: int, groups: int, count: int, k: int) -> Task:
    """Return the task that groups pairs: one piece, of however many tokens."""
    return Task(GROUP, pack_args(experts, groups, count, k), 1, Step.TOKENS, 1 << 40)


def gather_task(groups: int, k: int, columns: int, floats: tuple[int, int], quantized: tuple[int, int]) -> Task:
    """Return the task that copies activations: entries of the source and of the copy, or zeros."""
    args = pack_args(groups, k, columns, *floats, *quantized)
    return Task(GATHER, args, 1, groups + GroupEntry.COPIED_ROWS, TOKENS_PER_PIECE)


def combine_task(x: int, weights: int, places: int, shared: tuple[int, int], out: int, width: int, k: int) -> Task:
    """Return the weighted sum of each token's rows; all but the last two arguments are entries."""
    args = pack_args(x, weights, places, *shared, out, width, k)
    return Task(COMBINE, args, -(-width // COMBINE_COLUMNS), Step.TOKENS, 1)
