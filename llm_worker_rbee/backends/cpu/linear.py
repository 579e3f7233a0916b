"""A weight as the CPU backend holds it, and its product with activations.

Tensors that share a layout are packed into one matrix; a stack of several layouts (a Q4_K_M file has q and k in Q4_K, v
in Q6_K) is as many matrices, each of which writes its own columns of the result.

Matrix products straight from packed weights: 16 rows side by side, one or several tokens at once.

A block is 16 rows x 32 columns. Columns come in eight quads of four; a line of 64 bytes holds one quad of all 16 rows
(each 32-bit lane is a row), and narrower weights share a line between quads (layouts.py). For each group of columns the
dot product is exact in integers; then one float32 step adds it, scaled, to the sum. That order does not depend on the
tile: a row has the same bits alone, in a batch, and however the pieces are dealt out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...weights import Tensor
from ...weights.checkpoint import release_pages
from ..isa import TABLE
from ..ops import Ints
from . import elementwise, quantize_activations, threads
from . import simd_f32 as f
from .dot_int8 import BIAS, NAME, dot_half
from .embedding import unpack
from .jit import Task, kernel, variant
from .layouts import COLUMNS, LAYOUTS, LINE, Layout, layout_of
from .layouts import ROWS as GROUP_ROWS
from .pointers import f32, f64, i8, i32, i64, prefetch, scratch, u8, u16
from .program import Instruction, Program, Step, doubles, new_step, table_of
from .repack import Packed, pack
from .simd import added, load_halves, nibble_times, no_floats, scaled, shifted, start, store_rows, times, wide

Floats = NDArray[np.float32]
PIECES = 8  # of a matrix, for each thread


# What is lost where attention's values are made costs most: of the error of a whole model's log-probabilities half came
# from there, with 3% of the arithmetic (docs/decisions.md). The head's product is made finely too, whatever its name.
FINE_TENSORS = ("attn_v.weight",)


@dataclass(frozen=True, eq=False)
class Weight:
    """One or several packed matrices, stacked by rows."""

    parts: tuple[Packed, ...]
    fine: tuple[bool, ...]  # which of them want each token as two rows of bytes

    @property
    def rows(self) -> int:
        """Rows of the whole stack."""
        return sum(part.rows for part in self.parts)

    @property
    def columns(self) -> int:
        """Columns, the same in every part."""
        return self.parts[0].columns

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(part.nbytes for part in self.parts)

    @property
    def wants_bytes(self) -> bool:
        """Whether some part multiplies activations as bytes."""
        return not all(part.layout.numbers for part in self.parts)

    @property
    def wants_floats(self) -> bool:
        """Whether some part multiplies them as they are."""
        return any(part.layout.numbers for part in self.parts)

    def finely(self) -> Weight:
        """The same, all of it made finely."""
        return Weight(self.parts, tuple(not part.layout.numbers for part in self.parts))

    def rows_at(self, ids: Ints) -> Floats:
        """Some rows, as floats."""
        (part,) = self.parts
        return unpack(part, ids)

    @cached_property
    def _program(self) -> Program:
        width, fine = self.columns, any(self.fine)
        made = to_bytes(Step.TOKENS, Step.DELTA, 1, width, width, self.wants_bytes, fine=fine)
        return Program(made + products(self, Step.TOKENS, Step.DELTA, Step.QKV))

    def times(self, x: Floats) -> Floats:
        """x @ self.T: (T, columns) -> (T, rows)."""
        x, tokens = np.ascontiguousarray(x, np.float32), x.shape[0]
        out, step = np.empty((tokens, self.rows), np.float32), new_step()
        step[Step.TOKENS], step[Step.DELTA], step[Step.QKV] = tokens, x.ctypes.data, out.ctypes.data
        room: tuple[NDArray[Any], ...] = quantize_activations.room(2 * tokens, self.columns)
        for entry, array in enumerate(room, Step.ACTIVATIONS):
            step[entry] = array.ctypes.data
        self._program.run(step)
        return out


def prepare(tensors: Sequence[Tensor]) -> Weight:
    """Pack tensors, those that stand beside each other and share a layout as one."""
    grouped = [(key, list(same)) for key, same in groupby(tensors, lambda t: (layout_of(t), _is_fine(t)))]
    parts = tuple(pack(same) for _, same in grouped)
    for tensor in tensors:
        release_pages(tensor.data)
    return Weight(parts, tuple(fine for (_, fine), _ in grouped))


def _is_fine(tensor: Tensor) -> bool:
    return tensor.name.endswith(FINE_TENSORS) and not layout_of(tensor).numbers


def products(w: Weight, count: int, source: int, output: int) -> list[Instruction]:
    """The instructions of a product; `source` holds floats, whose bytes (if wanted) are in the activations already."""
    made, first = [], 0
    for part, fine in zip(w.parts, w.fine, strict=True):
        made.append(_product(part, count, source, output, w.rows, first, fine))
        first += part.rows
    return made


def _product(part: Packed, count: int, source: int, output: int, stride: int, first: int, fine: bool) -> Instruction:
    groups = -(-part.rows // GROUP_ROWS)
    chunk = max(1, groups // (PIECES * threads.count()))
    entry, small = source if part.layout.numbers else Step.ACTIVATIONS, 0 if part.small is None else part.small
    args = table_of(
        count, entry, output, stride, first, part.rows, part.columns, chunk, part.packed, part.scales, part.minima,
        small, 0, fine,
    )  # fmt: skip
    doubles(args, UNIT, [part.unit])
    return Instruction(task_for(part.layout), args, ceil(groups / chunk), count, TOGETHER)


def to_bytes(
    count: int, source: int, heads: int, dim: int, padded: int, quantized: bool, *, fine: bool = False
) -> list[Instruction]:
    """The instruction that turns rows of heads into bytes, or moves padded heads together, or both."""
    if padded == dim and not quantized:
        return []
    bytes_at = Step.ACTIVATIONS if quantized else 0
    args = table_of(count, source, 0, Step.COMPACT, bytes_at, 0, heads, dim, padded, fine)
    return [Instruction(elementwise.TO_BYTES, args, 1, count, elementwise.FEW)]


MOST = TABLE[NAME].tokens  # of a tile
FEWER = 12  # where a block has more than registers hold beside so many tokens
MIDDLE = 4 if MOST > 4 else MOST // 2  # for what is left, and for a few requests at once
TOGETHER = 144 if MOST > 4 else 12 * MOST  # tokens of a piece: their activations stay in the second-level cache
# Two shorter chains of dot products wait less for each other, where there are registers for both.
SPLIT = MOST > 4
NEAR = 4  # groups of rows that each tile of tokens meets in turn: they stay in the first-level cache
AHEAD = 4096  # bytes that are asked for before they are needed, where few tokens wait for memory
# Arguments of a product. `input` and `output` are entries of the step: the activations (activations.py), the results.
COUNT, INPUT, OUTPUT, STRIDE, FIRST, ROWS, COLS, CHUNK, PACKED, SCALES, MINIMA, SMALL, UNIT, FINE = range(14)
# set for each variant
TILE = TOKENS = LAYOUT = SIZE = HALVES = MINIMUM = SHIFT = OFFSET = BFLOAT = NARROW = HALVED = ROWS_TILE = None
ROWS_MIDDLE = ROWS_ONE = None


def rows(packed, scales, minima, xq, xd, xs, xi, out, place, group, token, columns, stride, small, unit):
    """16 rows of the product for TOKENS tokens; xs and xi are sums of the activations, scaled and as integers."""
    n = columns // 32
    n_scales = (n * HALVES) >> SHIFT
    total = no_floats(TOKENS)
    for block in range(n):
        line = (group * n + block) * SIZE
        at = token * columns + block * 32
        if token < TOKENS:  # the tiles that follow find the weights near
            prefetch(packed, line + AHEAD, SIZE)
        if HALVES == 1:
            b, s = token * n + block, (group * n_scales + (block >> SHIFT)) * 16
            acc = start(TOKENS, xi, b, n, OFFSET)
            if SPLIT:
                acc = dot_half(acc, LAYOUT, 0, packed, line, xq, at, columns)
                two = start(TOKENS, xi, b, n, 0)
                acc = added(acc, dot_half(two, LAYOUT, 1, packed, line, xq, at, columns))
            else:
                acc = dot_half(acc, LAYOUT, 2, packed, line, xq, at, columns)
            total = scaled(total, acc, xd, b, n, load_halves(scales, s))
            if MINIMUM:
                total = shifted(total, xs, b, n, load_halves(minima, s))
        else:
            b, s = token * n + block, (group * n_scales + block * 2) * 16
            acc = start(TOKENS, xi, 2 * b, 2 * n, OFFSET)
            acc = dot_half(acc, LAYOUT, 0, packed, line, xq, at, columns)
            total = scaled(total, acc, xd, b, n, load_halves(scales, s))
            acc = start(TOKENS, xi, 2 * b + 1, 2 * n, OFFSET)
            acc = dot_half(acc, LAYOUT, 1, packed, line, xq, at, columns)
            total = scaled(total, acc, xd, b, n, load_halves(scales, s + 16))
    store_rows(out, place, stride, total, unit)


def small_rows(packed, scales, minima, xq, xd, xs, xi, out, place, group, token, columns, stride, small, unit):
    """The same where 16 columns share a byte of scale and minimum, and 256 columns what these are multiplied by."""
    n = columns // 32
    coarse = columns // 256
    total = no_floats(TOKENS)
    for block in range(n):
        line = (group * n + block) * SIZE
        at, b = token * columns + block * 32, token * n + block
        s = (group * coarse + (block >> 3)) * 16
        d, m = load_halves(scales, s), load_halves(minima, s)
        bytes_at = (group * n + block) * 32
        acc = start(TOKENS, xi, 0, 0, 0)
        acc = dot_half(acc, LAYOUT, 0, packed, line, xq, at, columns)
        total = scaled(total, acc, xd, b, n, nibble_times(small, bytes_at, 0, d))
        total = shifted(total, xs, 2 * b, 2 * n, nibble_times(small, bytes_at, 1, m))
        acc = start(TOKENS, xi, 0, 0, 0)
        acc = dot_half(acc, LAYOUT, 1, packed, line, xq, at, columns)
        total = scaled(total, acc, xd, b, n, nibble_times(small, bytes_at + 16, 0, d))
        total = shifted(total, xs, 2 * b + 1, 2 * n, nibble_times(small, bytes_at + 16, 1, m))
    store_rows(out, place, stride, total, unit)


def float_rows(weights, x, out, place, group, token, columns, stride):
    """16 rows of float weights: one column after the other, so that a sum has one order."""
    total = no_floats(TOKENS)
    for column in range(columns):
        w = wide(weights, (group * columns + column) * 16, BFLOAT)
        total = times(total, w, x, token * columns + column, columns)
    store_rows(out, place, stride, total, np.float32(1))


@kernel
def share(a, tokens, piece):
    """(first group, last, first token, last) of a piece: so many groups of rows, so many tokens."""
    parts = (tokens + TOGETHER - 1) // TOGETHER
    group, token = piece // parts * a[CHUNK], piece % parts * TOGETHER
    return group, min((a[ROWS] + 15) // 16, group + a[CHUNK]), token, min(tokens, token + TOGETHER)


@kernel
def tile(left, most):
    """How many tokens the next tile has."""
    return most if left >= most else MIDDLE if left >= MIDDLE else 1


@kernel
def keep(some, out, place, stride, count, tokens):
    """Of 16 results of each token the first `count`: the last group of a matrix may be short."""
    for t in range(tokens):
        for i in range(count):
            out[place + t * stride + i] = some[t * 16 + i]


@kernel
def sum_up(some, tokens, out, place, stride, count):
    """Tokens that are two rows each: 16 results of all first rows lie in `some`, then those of all second ones."""
    for t in range(tokens):
        one, two, to = 16 * t, 16 * (tokens + t), place + t * stride
        if count >= 16:
            f.put(out, to, f.add(f.get(some, one), f.get(some, two)))
        else:
            for i in range(count):
                out[to + i] = some[one + i] + some[two + i]


def product(args, step, piece):
    """Some rows for some tokens; where it is made finely, a token's second row of activations lies behind all first."""
    a, s = i64(args), i64(step)
    x, columns, unit, fine, tokens = a[INPUT], a[COLS], np.float32(f64(args)[UNIT]), a[FINE], s[a[COUNT]]
    packed, scales, minima, small = u8(a[PACKED]), u16(a[SCALES]), u16(a[MINIMA]), u8(a[SMALL])
    xq, xd, out = i8(s[x]), f32(s[x + 1]), f32(s[a[OUTPUT]])
    xi, xs = i32(s[x + 2 + HALVED]), f32(s[x + 4 + HALVED])
    begin, end, first, stop = share(a, tokens, piece)
    length = stop - first
    n, near = (2 * length, 1) if fine else (length, NEAR)
    row, some = 0, scratch(16 * max(TILE, n if fine else 0))
    while begin < end:
        again = row >= length
        token = row - length + tokens + first if again else row + first
        count, last = tile((n if again or length == tokens else length) - row, TILE), min(end, begin + near)
        for group in range(begin, last):
            left = a[ROWS] - group * 16
            place = a[FIRST] + group * 16 + token * a[STRIDE]
            direct = left >= 16 and not fine
            to, at, apart = (out, place, a[STRIDE]) if direct else (some, 16 * row if fine else 0, 16)
            if count == TILE:
                ROWS_TILE(packed, scales, minima, xq, xd, xs, xi, to, at, group, token, columns, apart, small, unit)
            elif count == MIDDLE:
                ROWS_MIDDLE(packed, scales, minima, xq, xd, xs, xi, to, at, group, token, columns, apart, small, unit)
            else:
                ROWS_ONE(packed, scales, minima, xq, xd, xs, xi, to, at, group, token, columns, apart, small, unit)
            if left < 16 and not fine:
                keep(some, out, place, a[STRIDE], left, count)
        row += count
        if row == n:
            if fine:
                place = a[FIRST] + begin * 16 + first * a[STRIDE]
                sum_up(some, length, out, place, a[STRIDE], a[ROWS] - begin * 16)
            begin, row = last, 0


def float_product(args, step, piece):
    """The same for float weights."""
    a, s = i64(args), i64(step)
    columns, weights = a[COLS], u16(a[PACKED]) if NARROW else f32(a[PACKED])
    x, out = f32(s[a[INPUT]]), f32(s[a[OUTPUT]])
    begin, end, token, stop = share(a, s[a[COUNT]], piece)
    first, some = token, np.empty(16 * TILE, np.float32) if a[ROWS] % 16 else out
    while begin < end:
        count, last = tile(stop - token, TILE), min(end, begin + NEAR)
        for group in range(begin, last):
            left = a[ROWS] - group * 16
            place = a[FIRST] + group * 16 + token * a[STRIDE]
            to, at, apart = (out, place, a[STRIDE]) if left >= 16 else (some, 0, 16)
            if count == TILE:
                ROWS_TILE(weights, x, to, at, group, token, columns, apart)
            elif count == MIDDLE:
                ROWS_MIDDLE(weights, x, to, at, group, token, columns, apart)
            else:
                ROWS_ONE(weights, x, to, at, group, token, columns, apart)
            if left < 16:
                keep(some, out, place, a[STRIDE], left, count)
        token += count
        if token == stop:
            begin, token = last, first


@cache
def task_for(layout: Layout) -> Task:
    """The product of a layout."""
    number = LAYOUTS.index(layout)
    if layout.numbers:
        ones = _tiles(float_rows, number, FEWER, BFLOAT=layout.numbers == "BF16")
        return Task(float_product, layout.numbers, NARROW=layout.numbers != "F32", **ones)
    wide_groups = max(layout.columns // COLUMNS, 1)
    values = {
        "LAYOUT": number,
        "SIZE": layout.lines * LINE,
        "HALVES": 2 if layout.columns == 16 else 1,
        "SHIFT": wide_groups.bit_length() - 1,
        "MINIMUM": layout.minimum,
        "OFFSET": BIAS if layout.table or layout.planes == (8,) else layout.offset,
    }
    roomy = layout.columns > 16 and not layout.small and layout.planes != (8,)
    ones = _tiles(small_rows if layout.small else rows, number, MOST if roomy else FEWER, **values)
    return Task(product, layout.name, HALVED=int(layout.columns == 16 or layout.small), **ones)


def _tiles(template: Any, number: int, most: int, **values: Any) -> dict[str, Any]:
    """The rows of a product for each size of tile, the largest of so many tokens."""
    most = min(most, MOST)
    made = {t: kernel(variant(template, f"{number}x{t}", TOKENS=t, **values)) for t in sorted({most, MIDDLE, 1})}
    return {"TILE": most, "ROWS_TILE": made[most], "ROWS_MIDDLE": made[MIDDLE], "ROWS_ONE": made[1]}
