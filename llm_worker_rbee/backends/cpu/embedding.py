"""Rows of a packed matrix as floats: how embeddings are read. One text for every layout; unpack.py is its twin.

A row is one lane of its group: four bytes of every line, one half of every 16 scales (layouts.py has the picture).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from .compile import Task, kernel
from .layouts import Layout
from .memory import f32, f64, i8, i64, u8, u16
from .pack import Packed
from .program import Instruction, doubles, table_of
from .step import Step, Table
from .vectors import half_at

# Arguments. SHARE: columns that share a scale; TABLE: what codes stand for (0: themselves); KIND: of plain numbers.
COLS, PACKED, SCALES, MINIMA, SMALL, FIRST, SECOND, SHARE, OFFSET, BIAS, TABLE, KIND, UNIT, FACTOR = range(14)
KINDS = ("", "F32", "F16", "BF16")
S_TOKENS, S_IDS, S_STREAM = int(Step.TOKENS), int(Step.IDS), int(Step.STREAM)


@kernel
def number(a, kind, at):
    """A plain number."""
    if kind == 1:
        return f32(a[PACKED])[at]
    if kind == 2:
        return half_at(u16(a[PACKED]), at, False)
    return half_at(u16(a[PACKED]), at, True)


@kernel
def coded_row(a, row, unit, out, to):
    """A row of codes with scales, 16 columns at a time."""
    columns, first, second, share = a[COLS], a[FIRST], a[SECOND], a[SHARE]
    packed, scales, minima, small, table = u8(a[PACKED]), u16(a[SCALES]), u16(a[MINIMA]), u8(a[SMALL]), i8(a[TABLE])
    group, lane, n_scales = row // 16, row % 16, columns // share
    m = np.float32(0)
    for part in range(columns // 16):
        s = (group * n_scales + part * 16 // share) * 16 + lane
        d = half_at(scales, s, False) * unit
        if a[MINIMA]:
            m = half_at(minima, s, False) * unit
        if a[SMALL]:
            both = small[(group * (columns // 16) + part) * 16 + lane]
            d, m = d * np.float32(both & 15), m * np.float32(both >> 4)
        line = (group * (columns // 32) + part // 2) * (first + second) * 64 + 4 * lane
        for quad in range(part % 2 * 4, part % 2 * 4 + 4):
            low, shift = line + 64 * (quad % first), first * (quad // first)
            high, above = line, 0
            if second:
                high, above = line + 64 * (first + quad % second), second * (quad // second)
            for byte in range(4):
                code = np.int64(packed[low + byte]) >> shift & ((1 << first) - 1)
                code |= (np.int64(packed[high + byte]) >> above & ((1 << second) - 1)) << first
                if first == 8:
                    code = np.int64(np.int8(code - a[BIAS]))
                elif a[TABLE]:
                    code = np.int64(table[code])
                out[to + part * 16 + quad % 4 * 4 + byte] = np.float32(code - a[OFFSET]) * d + m


def embed(args, step, piece):
    """One token."""
    a, s = i64(args), i64(step)
    columns, row, out = a[COLS], i64(s[S_IDS])[piece], f32(s[S_STREAM])
    to, factor = piece * columns, np.float32(f64(args)[FACTOR])
    if a[KIND]:
        for column in range(columns):
            out[to + column] = number(a, a[KIND], (row // 16 * columns + column) * 16 + row % 16)
    else:
        coded_row(a, row, np.float32(f64(args)[UNIT]), out, to)
    if factor != np.float32(1):
        for column in range(columns):
            out[to + column] *= factor


EMBED = Task(embed)


@cache
def _table(layout: Layout) -> NDArray[np.int8]:
    return np.array(layout.table, np.int8)


def embed_rows(w: Packed, factor: float) -> Instruction:
    """The stream begins as rows of this matrix, times a factor."""
    return Instruction(EMBED, _arguments(w, factor), 1, Step.TOKENS, 1)


def _arguments(w: Packed, factor: float) -> Table:
    layout = w.layout
    first, second = (*layout.planes, 0)[:2]
    table = 0 if layout.table is None else _table(layout)
    small, minima = 0 if w.small is None else w.small, w.minima if layout.minimum else 0
    args = table_of(
        w.columns, w.packed, w.scales, minima, small, first, second, layout.columns, layout.offset, w.bias, table,
        KINDS.index(layout.numbers), 0, 0,
    )  # fmt: skip
    return doubles(args, UNIT, [w.unit, factor])
