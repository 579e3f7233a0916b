"""Mixture of experts: rows grouped by expert, so that each product is one of several tokens with one expert's matrix.

A (token, slot) pair becomes a row; rows of one expert are adjacent. Experts with enough rows for products from unpacked
weights come first and begin at whole panels. A row has the same bits in any group. Five adjacent entries of the step
(`GroupEntry`) hold the grouping: the pair of each row, the row of each pair, the products to compute, and two numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import UnsupportedModelError
from ...weights import Tensor
from ...weights.checkpoint import release_pages
from ..ops import Ints
from . import quantize_activations
from .elementwise import TOKENS_PER_PIECE, quantize_task
from .jit import TaskKernel, kernel, variant
from .linear import PIECES_PER_THREAD, can_unpack, matmul
from .matmul.packed import TOKENS_PER_PIECE as PACKED_TOKENS_PER_PIECE
from .matmul.packed import LinearArg, packed_kernel
from .matmul.unpacked import TOKENS_PER_PIECE as UNPACKED_TOKENS_PER_PIECE
from .matmul.unpacked import UNPACK_MIN_TOKENS, unpacked_kernel
from .packed_weight import GROUP_ROWS, Layout, PackedMatrices, layout_of_tensor
from .pointers import f32, i8, i32, i64, stack_floats, u8
from .program import Program, Step, Task, pack_args, pack_floats, run_step
from .quantize_activations import PANEL_BYTES, PANEL_TOKENS, PANELS, store_in_panel
from .repack import repack

Floats = NDArray[np.float32]
ROWS_PER_UNIT = 128  # of a product that one piece computes: whole panels
UNIT_NUMBERS = 3  # expert, first row, rows
MATMUL = IS_FLOAT = TOKENS_PER_CALL = None  # set for each variant
GroupEntry = IntEnum("GroupEntry", "PAIRS PLACES UNITS ROWS NUM_UNITS", start=0)
GroupArg = IntEnum("GroupArg", "EXPERTS GROUPS COUNT K", start=0)
GatherArg = IntEnum("GatherArg", "GROUPS K COLUMNS FLOATS FLOATS_OUT QUANTIZED QUANTIZED_OUT", start=0)
# LINEAR: arguments of the product of expert 0; STRIDES: bytes of an expert in its four arrays
GroupedArg = IntEnum("GroupedArg", "GROUPS INPUT OUTPUT PIECES STRIDES", start=0)
LINEAR_AT = GroupedArg.STRIDES + 4
LINEAR_ARGS = len(LinearArg)


def rows_per_token(k: int) -> int:
    """Return for how many rows a token has room, with the padding of panels."""
    return k + (-(-k * (PANEL_TOKENS - 1) // UNPACK_MIN_TOKENS) if UNPACK_MIN_TOKENS else 0)


@dataclass(frozen=True, eq=False)
class PackedExperts(PackedMatrices):
    """Matrices that hold the rows of all experts, one after the other."""

    count: int

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts) // self.count


def pack_experts(experts: Sequence[Sequence[Tensor]], threads: int) -> PackedExperts:
    """Pack the matrices of all experts; those of one layout become one matrix."""
    numbers = range(len(experts[0]))
    grouped = [list(same) for _, same in groupby(numbers, lambda i: layout_of_tensor(experts[0][i]))]
    for first, *others in zip(*experts, strict=True):
        if any(layout_of_tensor(other) != layout_of_tensor(first) for other in others):
            raise UnsupportedModelError(f"tensor {first.name!r}: experts have different types")
    for same in grouped:
        rows = sum(experts[0][i].shape[0] for i in same)
        if rows % GROUP_ROWS:
            raise UnsupportedModelError(
                f"tensor {experts[0][same[0]].name!r}: experts of {rows} rows, which is no multiple of {GROUP_ROWS}, "
                "have no kernel: use backend reference"
            )
    parts = tuple(repack([tensors[i] for tensors in experts for i in same], threads) for same in grouped)
    for tensor in (tensor for tensors in experts for tensor in tensors):
        release_pages(tensor.data)
    return PackedExperts(parts, len(experts))


def group(args, step, piece):
    """Sort the pairs by expert, and list the products."""
    a, s = i64(args), i64(step)
    k, count, entry, chosen = a[GroupArg.K], a[GroupArg.COUNT], a[GroupArg.GROUPS], i64(s[a[GroupArg.EXPERTS]])
    pairs, places = i64(s[entry + GroupEntry.PAIRS]), i64(s[entry + GroupEntry.PLACES])
    units, number, row = i64(s[entry + GroupEntry.UNITS]), 0, 0
    lengths, next_row = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for i in range(s[Step.TOKENS] * k):
        lengths[chosen[i]] += 1
    for few in range(2):
        for e in range(count):
            length = lengths[e]
            is_few = UNPACK_MIN_TOKENS == 0 or length < UNPACK_MIN_TOKENS
            if length == 0 or is_few != (few == 1):
                continue
            next_row[e] = row
            for first in range(0, length, ROWS_PER_UNIT):
                at = number * UNIT_NUMBERS
                units[at], units[at + 1], units[at + 2] = e, row + first, min(ROWS_PER_UNIT, length - first)
                number += 1
            row += length
            while not is_few and row % PANEL_TOKENS:
                pairs[row] = -1
                row += 1
    for i in range(s[Step.TOKENS] * k):
        to = next_row[chosen[i]]
        pairs[to], places[i] = i, to
        next_row[chosen[i]] = to + 1
    s[entry + GroupEntry.ROWS], s[entry + GroupEntry.NUM_UNITS] = row, number


@kernel
def gather_blocks(s, source, out, token, row, n, in_panels):
    """Copy a token's quantized activations to a row."""
    q, q_out = i8(s[source]), i8(s[out])
    for i in range(0, n * 32):
        q_out[row * n * 32 + i] = q[token * n * 32 + i]
    scale, scale_out, scaled, scaled_out = f32(s[source + 1]), f32(s[out + 1]), f32(s[source + 4]), f32(s[out + 4])
    sums, sums_out, scaled16, scaled16_out = i32(s[source + 2]), i32(s[out + 2]), f32(s[source + 5]), f32(s[out + 5])
    sums16, sums16_out = i32(s[source + 3]), i32(s[out + 3])
    for b in range(n):
        scale_out[row * n + b], sums_out[row * n + b] = scale[token * n + b], sums[token * n + b]
        scaled_out[row * n + b] = scaled[token * n + b]
        for i in range(2):
            sums16_out[2 * (row * n + b) + i] = sums16[2 * (token * n + b) + i]
            scaled16_out[2 * (row * n + b) + i] = scaled16[2 * (token * n + b) + i]
    if in_panels:
        to = row // PANEL_TOKENS * n * PANEL_BYTES
        for b in range(n):
            panels = u8(s[out + PANELS])
            store_in_panel(panels, to, row % PANEL_TOKENS, q_out, scale_out, scaled_out, scaled16_out, row * n + b)
            to += PANEL_BYTES


def gather(args, step, piece):
    """Copy the activations of some rows' tokens."""
    a, s = i64(args), i64(step)
    columns, entry = a[GatherArg.COLUMNS], a[GatherArg.GROUPS]
    pairs, rows = i64(s[entry + GroupEntry.PAIRS]), s[entry + GroupEntry.ROWS]
    for row in range(piece * TOKENS_PER_PIECE, min(rows, piece * TOKENS_PER_PIECE + TOKENS_PER_PIECE)):
        token = pairs[row] // a[GatherArg.K]
        if pairs[row] < 0:
            continue
        if a[GatherArg.FLOATS_OUT]:
            x, out = f32(s[a[GatherArg.FLOATS]]), f32(s[a[GatherArg.FLOATS_OUT]])
            for i in range(columns):
                out[row * columns + i] = x[token * columns + i]
        if a[GatherArg.QUANTIZED_OUT]:
            in_panels = UNPACK_MIN_TOKENS > 0 and rows >= UNPACK_MIN_TOKENS
            gather_blocks(s, a[GatherArg.QUANTIZED], a[GatherArg.QUANTIZED_OUT], token, row, columns // 32, in_panels)


def grouped_matmul(args, step, piece):
    """Compute some rows of one expert's matrix: a product with arguments and a step of its own."""
    a, s = i64(args), i64(step)
    unit, part = piece // a[GroupedArg.PIECES], piece % a[GroupedArg.PIECES]
    units, memory = i64(s[a[GroupedArg.GROUPS] + GroupEntry.UNITS]), stack_floats(64)
    own, table = i64(memory), i64(memory + 128)
    expert, first = units[unit * UNIT_NUMBERS], units[unit * UNIT_NUMBERS + 1]
    for i in range(LINEAR_ARGS):
        own[i] = a[LINEAR_AT + i]
    for i in range(4):
        own[LinearArg.PACKED + i] += expert * a[GroupedArg.STRIDES + i]
    own[LinearArg.COUNT], own[LinearArg.OUTPUT], own[LinearArg.INPUT] = 0, 1, 2
    table[0] = units[unit * UNIT_NUMBERS + 2]
    table[1] = s[a[GroupedArg.OUTPUT]] + 4 * first * own[LinearArg.STRIDE]
    source, columns = a[GroupedArg.INPUT], own[LinearArg.COLUMNS]
    if IS_FLOAT:
        table[2] = s[source] + 4 * first * columns
    else:
        blocks = first * (columns // 32)
        table[2], table[3], table[4] = s[source] + 32 * blocks, s[source + 1] + 4 * blocks, s[source + 2] + 4 * blocks
        table[5], table[6], table[7] = (
            s[source + 3] + 8 * blocks, s[source + 4] + 4 * blocks, s[source + 5] + 8 * blocks,
        )  # fmt: skip
        table[8] = s[source + PANELS] + first // PANEL_TOKENS * (columns // 32) * PANEL_BYTES
    calls = (table[0] + TOKENS_PER_CALL - 1) // TOKENS_PER_CALL
    for i in range(part * calls, (part + 1) * calls):
        MATMUL(memory, memory + 128, i)


GROUP, GATHER = TaskKernel(group), TaskKernel(gather)


@cache
def grouped_kernel(layout: Layout) -> TaskKernel:
    """Return the grouped product of a layout."""
    packed = packed_kernel(layout)
    unpacked = unpacked_kernel(layout) if can_unpack(layout) else packed
    least = UNPACK_MIN_TOKENS if can_unpack(layout) else 0
    product = kernel(variant(matmul, f"grouped {layout.name}", MIN_TOKENS=least, PACKED=packed, UNPACKED=unpacked))
    tokens = UNPACKED_TOKENS_PER_PIECE if can_unpack(layout) else PACKED_TOKENS_PER_PIECE
    is_float = bool(layout.float_type)
    return TaskKernel(grouped_matmul, layout.name, MATMUL=product, IS_FLOAT=is_float, TOKENS_PER_CALL=tokens)


def group_task(experts: int, groups: int, count: int, k: int) -> Task:
    """Return the task that groups pairs: one piece, of however many tokens."""
    return Task(GROUP, pack_args(experts, groups, count, k), 1, Step.TOKENS, 1 << 40)


def gather_task(groups: int, k: int, columns: int, floats: tuple[int, int], quantized: tuple[int, int]) -> Task:
    """Return the task that copies activations: entries of the source and of the copy, or zeros."""
    args = pack_args(groups, k, columns, *floats, *quantized)
    return Task(GATHER, args, 1, groups + GroupEntry.ROWS, TOKENS_PER_PIECE)


def grouped_tasks(
    w: PackedExperts, groups: int, k: int, floats: int, quantized: int, output: int, threads: int
) -> list[Task]:
    """Return the tasks of a grouped product: entries of the rows, as floats and quantized, and of the output."""
    tasks, first = [], 0
    for part in w.parts:
        rows = part.rows // w.count
        row_groups = rows // GROUP_ROWS
        per_piece = min(row_groups, max(1, k * row_groups // (PIECES_PER_THREAD * threads)))
        pieces = -(-row_groups // per_piece)
        nibbles = part.nibble_scales
        lines = part.packed if nibbles is None else part.packed[: part.packed.size - nibbles.size]
        arrays = lines, part.scales, part.minima, nibbles
        strides = [0 if array is None else array.nbytes // w.count for array in arrays]
        shape = w.rows, first, rows, part.columns, per_piece
        linear = pack_args(0, 0, 0, *shape, *(0 if array is None else array for array in arrays), 0, 0)
        pack_floats(linear, LinearArg.UNIT, [part.unit])
        source = floats if part.layout.float_type else quantized
        args = np.concatenate([pack_args(groups, source, output, pieces, *strides), linear])
        tasks.append(Task(grouped_kernel(part.layout), args, pieces, groups + GroupEntry.NUM_UNITS, 1))
        first += rows
    return tasks


def grouped_linear(x: Floats, w: PackedExperts, experts: Ints, threads: int) -> Floats:
    """Multiply each token by the matrices of its experts: (T, columns) or (T, k, columns) -> (T, k, rows)."""
    chosen = np.ascontiguousarray(experts if x.ndim == 2 else experts.reshape(-1, 1), np.int64)
    tokens, k = chosen.shape
    rows = quantize_activations.pad_to_panels(tokens) * rows_per_token(k)
    places, out = np.empty(tokens * k, np.int64), np.empty((rows, w.rows), np.float32)
    whole = np.ascontiguousarray(x.reshape(tokens, -1), np.float32)
    lists = np.empty(rows, np.int64), places, np.empty(tokens * k * UNIT_NUMBERS, np.int64)
    entries: dict[int, Any] = dict(enumerate((chosen, *lists), Step.END))
    experts_at, groups = Step.END, Step.END + 1
    floats, floats_out, output, source = range(groups + len(GroupEntry), groups + len(GroupEntry) + 4)
    target = source + PANELS + 1
    entries |= {floats: whole, floats_out: np.empty((rows, w.columns), np.float32), output: out}
    entries |= dict(enumerate(quantize_activations.allocate(tokens, w.columns), source))
    entries |= dict(enumerate(quantize_activations.allocate(rows, w.columns), target))
    tasks = [group_task(experts_at, groups, w.count, k)]
    pairs = (source, target) if w.needs_int8 else (0, 0)
    if w.needs_int8:
        tasks.append(quantize_task(Step.TOKENS, floats, source, w.columns, two_term=False))
    tasks.append(gather_task(groups, k, w.columns, (floats, floats_out) if w.needs_floats else (0, 0), pairs))
    tasks += grouped_tasks(w, groups, k, floats_out, target, output, threads)
    run_step(Program(tasks), entries, {Step.TOKENS: tokens}, threads)
    return out[places].reshape(*experts.shape, w.rows)
