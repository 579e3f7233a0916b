"""Rows of a packed matrix as floats: how embeddings are read. One text for every layout; unpack.py is its twin.

A row is one lane of its group: four bytes of every line, one half of every 16 scales (layouts.py has the picture).

Packed weights -> float32 rows in plain NumPy: the twin of the kernels, and how embedding rows are read.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .jit import Task, kernel
from .layouts import ROWS, Layout
from .pointers import f32, f64, i8, i64, u8, u16
from .program import Instruction, Step, Table, doubles, table_of
from .repack import Packed
from .simd import half_at

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


Floats = NDArray[np.float32]
Index = NDArray[np.int64]


def unpack(w: Packed, index: Index | None = None) -> Floats:
    """Some rows of the matrix, or all of them: (n, columns)."""
    rows = np.arange(w.rows) if index is None else np.asarray(index)
    if w.layout.numbers:
        return _numbers(_of_rows(w.packed, rows, w.columns), w.layout.numbers)
    values = _values(w, rows)
    d, m = _scales(w, rows)
    out = values.reshape(*d.shape, -1) * d[..., None]
    if m is not None:
        out += m[..., None]
    return out.reshape(len(rows), w.columns)


def _of_rows(array: NDArray[Any], rows: Index, count: int, width: int = 1) -> NDArray[Any]:
    """What lies in an array for these rows: `count` items of `width` elements each, 16 rows side by side."""
    items = array.reshape(-1, count, ROWS, width)[rows // ROWS, :, rows % ROWS]
    return items if width > 1 else items[..., 0]


def _numbers(items: NDArray[Any], kind: str) -> Floats:
    if kind == "BF16":
        return (items.astype(np.uint32) << 16).view(np.float32)
    return items.view(np.float16).astype(np.float32) if kind == "F16" else items


def _values(w: Packed, rows: Index) -> Floats:
    """Values less the offset: (n, columns)."""
    layout, blocks = w.layout, w.columns // 32
    end = w.packed.size - (0 if w.small is None else w.small.size)
    lines = _of_rows(w.packed[:end], rows, blocks * layout.lines, 4).reshape(len(rows), blocks, layout.lines, 4)
    codes = np.zeros((len(rows), blocks, 8, 4), np.uint8)
    first = place = 0
    for bits in layout.planes:
        for j in range(8 // bits):
            part = lines[:, :, first : first + bits] >> np.uint8(bits * j) & np.uint8((1 << bits) - 1)
            codes[:, :, bits * j : bits * (j + 1)] |= part << np.uint8(place)
        first, place = first + bits, place + bits
    if layout.planes == (8,):
        return (codes - np.uint8(w.bias)).view(np.int8).astype(np.float32)
    table = np.arange(256) if layout.table is None else np.array(layout.table)
    return (table - layout.offset).astype(np.float32).take(codes)


def _scales(w: Packed, rows: Index) -> tuple[Floats, Floats | None]:
    """Scales and minima as they are: (n, scales a row)."""
    per_row, unit = w.columns // w.layout.columns, np.float32(w.unit)
    d, m = (
        _of_rows(a, rows, per_row).view(np.float16).astype(np.float32) * unit if a.size else None
        for a in (w.scales, w.minima)
    )
    assert d is not None
    if w.small is None:
        return d, m
    small = _of_rows(w.small, rows, w.columns // 16)
    wide = [np.repeat(x, 16, axis=1) for x in (d, m) if x is not None]
    return wide[0] * (small & np.uint8(15)), wide[1] * (small >> np.uint8(4))
