"""Packed weights -> float32 rows in plain NumPy: the twin of the kernels, and how embedding rows are read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .layouts import ROWS
from .pack import Packed

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
