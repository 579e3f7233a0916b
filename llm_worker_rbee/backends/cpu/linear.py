"""Linear layers: a packed weight, and its products straight from packed codes, 16 rows side by side.

Tensors that share a layout are packed into one matrix; a stack of several layouts (a Q4_K_M file has q and k in Q4_K, v
in Q6_K) is several matrices, each of which writes its own columns of the result.

A block is 16 rows x 32 columns. Columns come in eight quads of four; a line of 64 bytes holds one quad of all 16 rows
(each 32-bit lane is a row), and narrower codes share a line between quads (packed_weight.py). For each group of columns
the dot product is exact in integers; then one float32 step adds it, scaled, to the sum. That order does not depend on
the tile: a row has the same bits alone, in a batch, and however the pieces are split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from itertools import groupby
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...weights import Tensor
from ...weights.checkpoint import release_pages
from ..cpu_info import INSTRUCTION_SETS
from ..ops import StackedWeight
from . import quantize_activations, simd
from .dot_int8 import ISA, WEIGHT_BIAS, dot_block
from .elementwise import quantize_task
from .jit import TaskKernel, kernel, variant
from .packed_weight import GROUP_ROWS, LAYOUTS, Layout, PackedMatrix, layout_of_tensor
from .pointers import f32, f64, i8, i32, i64, prefetch, scratch, u8, u16
from .program import Program, Step, Task, new_step, pack_args, pack_floats
from .repack import repack

Floats = NDArray[np.float32]
PIECES_PER_THREAD = 8  # of a matrix
# The values of attention are the most sensitive: half of the error of a model's log-probabilities came from there, with
# 3% of the arithmetic (docs/decisions.md). The output head uses two-term activations too, whatever its name.
HIGH_PRECISION_TENSORS = ("attn_v.weight",)

MAX_TILE_TOKENS = INSTRUCTION_SETS[ISA].tile_tokens
WIDE_BLOCK_TILE_TOKENS = 12  # for layouts whose blocks leave fewer registers
MID_TILE_TOKENS = 4 if MAX_TILE_TOKENS > 4 else MAX_TILE_TOKENS // 2  # for the rest, and for a few requests at once
# tokens of a piece: their activations stay in the second-level cache
TOKENS_PER_PIECE = 144 if MAX_TILE_TOKENS > 4 else 12 * MAX_TILE_TOKENS
TWO_CHAINS = MAX_TILE_TOKENS > 4  # two shorter chains of dot products hide latency, if registers hold both
GROUPS_IN_L1 = 4  # row groups that each tile of tokens meets in turn: they stay in the first-level cache
PREFETCH_BYTES = 4096
# set for each variant
TILE = TOKENS = LAYOUT = BLOCK_BYTES = SCALES_PER_BLOCK = HAS_MINIMUM = SCALE_SHIFT = OFFSET = None
NIBBLE_SCALES = SUMS_OF_16 = BFLOAT = NARROW = OPERANDS = ROWS_TILE = ROWS_MID = ROWS_ONE = None


# Arguments of a product: COUNT, INPUT and OUTPUT are entries of the step, FIRST is the first column in the output.
LinearArg = IntEnum(
    "LinearArg",
    "COUNT INPUT OUTPUT STRIDE FIRST ROWS COLUMNS GROUPS_PER_PIECE PACKED SCALES MINIMA NIBBLE_SCALES UNIT TWO_TERM",
    start=0,
)


def int8_operands(a, s):
    """Return the packed weights, then activations: values, scales, and sums as `dot_rows` needs them."""
    weights = u8(a[LinearArg.PACKED]), u16(a[LinearArg.SCALES]), u16(a[LinearArg.MINIMA])
    at, sums = s[a[LinearArg.INPUT] :], SUMS_OF_16
    return weights, u8(a[LinearArg.NIBBLE_SCALES]), i8(at[0]), f32(at[1]), f32(at[4 + sums]), i32(at[2 + sums])


def dot_rows(operands, out, place, group, token, columns, stride, unit):
    """Compute 16 rows for TOKENS tokens; xs and xi are sums of the activations, scaled and as integers.

    With NIBBLE_SCALES, 16 columns share a byte of scale and minimum, and 256 columns the factors of these.
    """
    (packed, scales, minima), nibbles, xq, xd, xs, xi = operands
    n = columns // 32
    n_scales = (n * SCALES_PER_BLOCK) >> SCALE_SHIFT
    total = simd.zero_floats(TOKENS)
    for block in range(n):
        line = (group * n + block) * BLOCK_BYTES
        at, b = token * columns + block * 32, token * n + block
        if token < TOKENS and not NIBBLE_SCALES:  # the tiles that follow find the weights in the cache
            prefetch(packed, line + PREFETCH_BYTES, BLOCK_BYTES)
        if SUMS_OF_16:
            if NIBBLE_SCALES:
                s, byte = (group * n_scales + (block >> 3)) * 16, (group * n + block) * 32
                d, m = simd.load(scales, s), simd.load(minima, s)
                first, second = simd.nibbles_times(nibbles, byte, 0, d), simd.nibbles_times(nibbles, byte + 16, 0, d)
            else:
                s = (group * n_scales + block * 2) * 16
                first, second = simd.load(scales, s), simd.load(scales, s + 16)
            acc = simd.init_dot(TOKENS, xi, 2 * b, 2 * n, OFFSET)
            acc = dot_block(acc, LAYOUT, 0, packed, line, xq, at, columns)
            total = simd.add_scaled_dot(total, acc, xd, b, n, first)
            if NIBBLE_SCALES:
                total = simd.fma_broadcast(total, simd.nibbles_times(nibbles, byte, 1, m), xs, 2 * b, 2 * n)
            acc = simd.init_dot(TOKENS, xi, 2 * b + 1, 2 * n, OFFSET)
            acc = dot_block(acc, LAYOUT, 1, packed, line, xq, at, columns)
            total = simd.add_scaled_dot(total, acc, xd, b, n, second)
            if NIBBLE_SCALES:
                total = simd.fma_broadcast(total, simd.nibbles_times(nibbles, byte + 16, 1, m), xs, 2 * b + 1, 2 * n)
        else:
            s = (group * n_scales + (block >> SCALE_SHIFT)) * 16
            acc = simd.init_dot(TOKENS, xi, b, n, OFFSET)
            if TWO_CHAINS:
                acc = dot_block(acc, LAYOUT, 0, packed, line, xq, at, columns)
                two = simd.init_dot(TOKENS, xi, b, n, 0)
                acc = simd.add_tiles(acc, dot_block(two, LAYOUT, 1, packed, line, xq, at, columns))
            else:
                acc = dot_block(acc, LAYOUT, 2, packed, line, xq, at, columns)
            total = simd.add_scaled_dot(total, acc, xd, b, n, simd.load(scales, s))
            if HAS_MINIMUM:
                total = simd.fma_broadcast(total, simd.load(minima, s), xs, b, n)
    simd.store_tile(out, place, stride, total, unit)


def float_operands(a, s):
    """Return the weights and the activations."""
    return u16(a[LinearArg.PACKED]) if NARROW else f32(a[LinearArg.PACKED]), f32(s[a[LinearArg.INPUT]])


def float_rows(operands, out, place, group, token, columns, stride, unit):
    """Compute 16 rows of float weights for TOKENS tokens: column by column, so that a sum has one order."""
    weights, x = operands
    total = simd.zero_floats(TOKENS)
    for column in range(columns):
        w = simd.load_as_f32(weights, (group * columns + column) * 16, BFLOAT)
        total = simd.fma_broadcast(total, w, x, token * columns + column, columns)
    simd.store_tile(out, place, stride, total, unit)


@kernel
def piece_bounds(a, tokens, piece):
    """Return (first group, last, first token, last) of a piece."""
    parts = (tokens + TOKENS_PER_PIECE - 1) // TOKENS_PER_PIECE
    group, token = piece // parts * a[LinearArg.GROUPS_PER_PIECE], piece % parts * TOKENS_PER_PIECE
    last_group = min((a[LinearArg.ROWS] + 15) // 16, group + a[LinearArg.GROUPS_PER_PIECE])
    return group, last_group, token, min(tokens, token + TOKENS_PER_PIECE)


@kernel
def next_tile_tokens(left, largest):
    """Return how many tokens the next tile has."""
    return largest if left >= largest else MID_TILE_TOKENS if left >= MID_TILE_TOKENS else 1


@kernel
def copy_partial_group(some, out, place, stride, count, tokens):
    """Copy the first `count` of 16 results of each token: the last group of a matrix may be short."""
    for t in range(tokens):
        for i in range(count):
            out[place + t * stride + i] = some[t * 16 + i]


@kernel
def add_two_terms(some, tokens, out, place, stride, count):
    """Add the two rows of each token: 16 results of all first rows lie in `some`, then those of all second ones."""
    for t in range(tokens):
        one, two, to = 16 * t, 16 * (tokens + t), place + t * stride
        if count >= 16:
            simd.store(out, to, simd.add(simd.load(some, one), simd.load(some, two)))
        else:
            for i in range(count):
                out[to + i] = some[one + i] + some[two + i]


def matmul(args, step, piece):
    """Compute some rows for some tokens; second rows of two-term activations lie behind all first ones."""
    a, s = i64(args), i64(step)
    columns, unit, operands = a[LinearArg.COLUMNS], np.float32(f64(args)[LinearArg.UNIT]), OPERANDS(a, s)
    two_term, tokens = a[LinearArg.TWO_TERM], s[a[LinearArg.COUNT]]
    rows, stride, out = a[LinearArg.ROWS], a[LinearArg.STRIDE], f32(s[a[LinearArg.OUTPUT]])
    begin, end, first, stop = piece_bounds(a, tokens, piece)
    length = stop - first
    n, near = (2 * length, 1) if two_term else (length, GROUPS_IN_L1)
    row, some = 0, scratch(16 * max(TILE, n if two_term else 0))
    while begin < end:
        again = row >= length
        token = row - length + tokens + first if again else row + first
        count = next_tile_tokens((n if again or length == tokens else length) - row, TILE)
        last = min(end, begin + near)
        for group in range(begin, last):
            left = rows - group * 16
            place = a[LinearArg.FIRST] + group * 16 + token * stride
            direct = left >= 16 and not two_term
            to, at, apart = (out, place, stride) if direct else (some, 16 * row if two_term else 0, 16)
            if count == TILE:
                ROWS_TILE(operands, to, at, group, token, columns, apart, unit)
            elif count == MID_TILE_TOKENS:
                ROWS_MID(operands, to, at, group, token, columns, apart, unit)
            else:
                ROWS_ONE(operands, to, at, group, token, columns, apart, unit)
            if left < 16 and not two_term:
                copy_partial_group(some, out, place, stride, left, count)
        row += count
        if row == n:
            if two_term:
                place = a[LinearArg.FIRST] + begin * 16 + first * stride
                add_two_terms(some, length, out, place, stride, rows - begin * 16)
            begin, row = last, 0


@cache
def linear_kernel(layout: Layout) -> TaskKernel:
    """Return the product of a layout."""
    number = LAYOUTS.index(layout)
    if layout.float_type:
        operands = variant(float_operands, layout.float_type, NARROW=layout.float_type != "F32")
        tiles = _tile_kernels(float_rows, number, WIDE_BLOCK_TILE_TOKENS, BFLOAT=layout.float_type == "BF16")
        return TaskKernel(matmul, layout.name, OPERANDS=kernel(operands), **tiles)
    sums_of_16 = int(layout.columns_per_scale == 16 or layout.nibble_scales)
    values = {
        "LAYOUT": number,
        "BLOCK_BYTES": layout.block_bytes,
        "SCALES_PER_BLOCK": 2 if layout.columns_per_scale == 16 else 1,
        "SCALE_SHIFT": max(layout.columns_per_scale // 32, 1).bit_length() - 1,
        "HAS_MINIMUM": layout.has_minimum,
        "NIBBLE_SCALES": layout.nibble_scales,
        "SUMS_OF_16": sums_of_16,
        "OFFSET": WEIGHT_BIAS if layout.table or layout.planes == (8,) else layout.offset,
    }
    is_narrow = not sums_of_16 and layout.planes != (8,)
    tiles = _tile_kernels(dot_rows, number, MAX_TILE_TOKENS if is_narrow else WIDE_BLOCK_TILE_TOKENS, **values)
    operands = variant(int8_operands, str(sums_of_16), SUMS_OF_16=sums_of_16)
    return TaskKernel(matmul, layout.name, OPERANDS=kernel(operands), **tiles)


def _tile_kernels(template: Any, number: int, max_tokens: int, **values: Any) -> dict[str, Any]:
    """Return the rows of a product for each size of tile, the largest of `max_tokens` tokens."""
    largest = min(max_tokens, MAX_TILE_TOKENS)
    sizes = sorted({largest, MID_TILE_TOKENS, 1})
    made = {t: kernel(variant(template, f"{number}x{t}", TOKENS=t, **values)) for t in sizes}
    return {"TILE": largest, "ROWS_TILE": made[largest], "ROWS_MID": made[MID_TILE_TOKENS], "ROWS_ONE": made[1]}


@dataclass(frozen=True, eq=False)
class PackedWeight(StackedWeight):
    """Packed matrices, and which of them multiply two-term activations."""

    parts: tuple[PackedMatrix, ...]
    residual_activations: tuple[bool, ...]
    _programs: dict[int, Program] = field(default_factory=dict, init=False, repr=False)  # by number of threads

    @property
    def needs_int8(self) -> bool:
        """Whether a part multiplies quantized activations."""
        return not all(part.layout.float_type for part in self.parts)

    @property
    def needs_floats(self) -> bool:
        """Whether a part multiplies float activations."""
        return any(part.layout.float_type for part in self.parts)

    def two_term(self) -> PackedWeight:
        """Return the same weight with two-term activations in all parts."""
        return PackedWeight(self.parts, tuple(not part.layout.float_type for part in self.parts))

    def matmul(self, x: Floats, threads: int) -> Floats:
        """Return x @ self.T: (T, columns) -> (T, rows)."""
        if threads not in self._programs:
            self._programs[threads] = self._matmul_program(threads)
        x, tokens = np.ascontiguousarray(x, np.float32), x.shape[0]
        out = np.empty((tokens, self.rows), np.float32)
        arrays = x, out, *quantize_activations.allocate(2 * tokens, self.columns)
        step = new_step(Step.END + len(arrays))
        step[Step.TOKENS], step[Step.END :] = tokens, [array.ctypes.data for array in arrays]
        self._programs[threads].run(step, threads)
        return out

    def _matmul_program(self, threads: int) -> Program:
        x, out, activations = range(Step.END, Step.END + 3)
        tasks = linear_tasks(self, Step.TOKENS, x, activations, out, threads)
        if self.needs_int8:
            two_term = any(self.residual_activations)
            tasks.insert(0, quantize_task(Step.TOKENS, x, activations, self.columns, two_term=two_term))
        return Program(tasks)


def pack_weight(tensors: Sequence[Tensor], threads: int) -> PackedWeight:
    """Pack tensors; adjacent ones that share a layout become one matrix."""
    grouped = [(key, list(same)) for key, same in groupby(tensors, lambda t: (layout_of_tensor(t), _is_sensitive(t)))]
    parts = tuple(repack(same, threads) for _, same in grouped)
    for tensor in tensors:
        release_pages(tensor.data)
    return PackedWeight(parts, tuple(is_sensitive for (_, is_sensitive), _ in grouped))


def _is_sensitive(tensor: Tensor) -> bool:
    return tensor.name.endswith(HIGH_PRECISION_TENSORS) and not layout_of_tensor(tensor).float_type


def linear_tasks(w: PackedWeight, count: int, floats: int, quantized: int, output: int, threads: int) -> list[Task]:
    """Return the tasks of a product: entries of its input, as floats and quantized, as parts need it, and output."""
    tasks, first = [], 0
    for part, two_term in zip(w.parts, w.residual_activations, strict=True):
        groups = -(-part.rows // GROUP_ROWS)
        groups_per_piece = max(1, groups // (PIECES_PER_THREAD * threads))
        entry, nibbles = floats if part.layout.float_type else quantized, part.nibble_scales
        arrays = part.packed, part.scales, part.minima, 0 if nibbles is None else nibbles
        shape = w.rows, first, part.rows, part.columns, groups_per_piece
        args = pack_args(count, entry, output, *shape, *arrays, 0, two_term)
        pack_floats(args, LinearArg.UNIT, [part.unit])
        tasks.append(Task(linear_kernel(part.layout), args, ceil(groups / groups_per_piece), count, TOKENS_PER_PIECE))
        first += part.rows
    return tasks
