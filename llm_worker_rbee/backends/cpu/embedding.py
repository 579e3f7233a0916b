"""Rows of a packed matrix as floats: the embedding kernel, one for every layout, and its NumPy twin.

A row is one lane of its group: four bytes of every line, one float16 of every 16 scales (layouts.py has the picture).
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .jit import TaskKernel, kernel
from .layouts import GROUP_ROWS, Layout
from .pointers import f32, f64, i8, i64, u8, u16
from .program import Step, Task, pack_args, pack_floats
from .repack import PackedMatrix
from .simd import load_one_f16

Floats = NDArray[np.float32]
Index = NDArray[np.int64]
FLOAT_TYPES = ("", "F32", "F16", "BF16")


# Arguments of `embed`; MINIMA, NIBBLE_SCALES and TABLE (the value of each code) are optional.
EmbedArg = IntEnum(
    "EmbedArg",
    "COLUMNS PACKED SCALES MINIMA NIBBLE_SCALES FIRST_BITS SECOND_BITS COLUMNS_PER_SCALE OFFSET BIAS "
    "TABLE FLOAT_TYPE UNIT FACTOR",
    start=0,
)


@kernel
def load_float(packed, float_type, at):
    """Return one float of a float matrix."""
    if float_type == 1:
        return f32(packed)[at]
    if float_type == 2:
        return load_one_f16(u16(packed), at, False)
    return load_one_f16(u16(packed), at, True)


@kernel
def dequantize_row(a, row, unit, out, to):
    """Write a row of codes with scales as floats, 16 columns at a time."""
    columns, first, second = a[EmbedArg.COLUMNS], a[EmbedArg.FIRST_BITS], a[EmbedArg.SECOND_BITS]
    packed, scales, minima = u8(a[EmbedArg.PACKED]), u16(a[EmbedArg.SCALES]), u16(a[EmbedArg.MINIMA])
    nibbles, table, columns_per_scale = (
        u8(a[EmbedArg.NIBBLE_SCALES]),
        i8(a[EmbedArg.TABLE]),
        a[EmbedArg.COLUMNS_PER_SCALE],
    )
    group, lane, n_scales = row // 16, row % 16, columns // columns_per_scale
    m = np.float32(0)
    for part in range(columns // 16):
        s = (group * n_scales + part * 16 // columns_per_scale) * 16 + lane
        d = load_one_f16(scales, s, False) * unit
        if a[EmbedArg.MINIMA]:
            m = load_one_f16(minima, s, False) * unit
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
    columns, row, out = a[EmbedArg.COLUMNS], i64(s[Step.TOKEN_IDS])[piece], f32(s[Step.RESIDUAL])
    to, factor = piece * columns, np.float32(f64(args)[EmbedArg.FACTOR])
    if a[EmbedArg.FLOAT_TYPE]:
        for column in range(columns):
            at = (row // 16 * columns + column) * 16 + row % 16
            out[to + column] = load_float(a[EmbedArg.PACKED], a[EmbedArg.FLOAT_TYPE], at)
    else:
        dequantize_row(a, row, np.float32(f64(args)[EmbedArg.UNIT]), out, to)
    if factor != np.float32(1):
        for column in range(columns):
            out[to + column] *= factor


EMBED = TaskKernel(embed)


@cache
def _code_values(layout: Layout) -> NDArray[np.int8]:
    return np.array(layout.table, np.int8)


def embed_task(w: PackedMatrix, factor: float) -> Task:
    """Return the task that starts the residual stream with rows of this matrix, times a factor."""
    layout = w.layout
    first, second = (*layout.planes, 0)[:2]
    nibbles, minima = 0 if w.nibble_scales is None else w.nibble_scales, w.minima if layout.has_minimum else 0
    table, float_type = 0 if layout.table is None else _code_values(layout), FLOAT_TYPES.index(layout.float_type)
    arrays, planes = (w.packed, w.scales, minima, nibbles), (first, second, layout.columns_per_scale, layout.offset)
    args = pack_args(w.columns, *arrays, *planes, w.bias, table, float_type, 0, 0)
    return Task(EMBED, pack_floats(args, EmbedArg.UNIT, [w.unit, factor]), 1, Step.TOKENS, 1)


def dequantize_rows(w: PackedMatrix, index: Index | None = None) -> Floats:
    """Return some rows of the matrix, or all of them, as floats: (n, columns). NumPy only."""
    rows = np.arange(w.rows) if index is None else np.asarray(index)
    if w.layout.float_type:
        return _as_float32(_items_of_rows(w.packed, rows, w.columns), w.layout.float_type)
    values = _values(w, rows)
    d, m = _scales(w, rows)
    out = values.reshape(*d.shape, -1) * d[..., None]
    if m is not None:
        out += m[..., None]
    return out.reshape(len(rows), w.columns)


def _items_of_rows(array: NDArray[Any], rows: Index, count: int, width: int = 1) -> NDArray[Any]:
    """Return what an array holds for these rows: `count` items of `width` elements each, 16 rows side by side."""
    items = array.reshape(-1, count, GROUP_ROWS, width)[rows // GROUP_ROWS, :, rows % GROUP_ROWS]
    return items if width > 1 else items[..., 0]


def _as_float32(items: NDArray[Any], float_type: str) -> Floats:
    if float_type == "BF16":
        return (items.astype(np.uint32) << 16).view(np.float32)
    return items.view(np.float16).astype(np.float32) if float_type == "F16" else items


def _values(w: PackedMatrix, rows: Index) -> Floats:
    """Return values less the offset: (n, columns)."""
    layout, blocks, n_lines = w.layout, w.columns // 32, w.layout.lines_per_block
    end = w.packed.size - (0 if w.nibble_scales is None else w.nibble_scales.size)
    lines = _items_of_rows(w.packed[:end], rows, blocks * n_lines, 4).reshape(len(rows), blocks, n_lines, 4)
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


def _scales(w: PackedMatrix, rows: Index) -> tuple[Floats, Floats | None]:
    """Return scales and minima: (n, scales per row)."""
    per_row, unit = w.columns // w.layout.columns_per_scale, np.float32(w.unit)
    d, m = (
        _items_of_rows(a, rows, per_row).view(np.float16).astype(np.float32) * unit if a.size else None
        for a in (w.scales, w.minima)
    )
    assert d is not None
    if w.nibble_scales is None:
        return d, m
    nibbles = _items_of_rows(w.nibble_scales, rows, w.columns // 16)
    wide = [np.repeat(x, 16, axis=1) for x in (d, m) if x is not None]
    return wide[0] * (nibbles & np.uint8(15)), wide[1] * (nibbles >> np.uint8(4))
