"""Matrix products straight from packed weights: 16 rows side by side, one or several tokens at once.

A block is 16 rows x 32 columns. Columns come in eight quads of four; a line of 64 bytes holds one quad of all 16 rows
(each 32-bit lane is a row), and narrower weights share a line between quads (layouts.py). For each group of columns the
dot product is exact in integers; then one float32 step adds it, scaled, to the sum. That order does not depend on the
tile: a row has the same bits alone, in a batch, and in any partition of the threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba as nb
import numpy as np

from ..isa import TABLE
from .compile import kernel, parallel, variant
from .intrinsics import NAME, dot_half
from .layouts import COLUMNS, LAYOUTS, LINE, Layout
from .vectors import load_halves, nibble_times, no_floats, scaled, shifted, start, store_rows, times, wide

TILE = TABLE[NAME].tokens
TOKENS = LAYOUT = SIZE = HALVES = MINIMUM = SHIFT = BFLOAT = ROWS_TILE = ROWS_ONE = None  # set for each variant


def rows(packed, scales, minima, xq, xd, xs, xi, out, group, token, columns, first, stride, offset, unit):
    """16 rows of the product for TOKENS tokens; xs and xi are sums of the activations, scaled and as integers."""
    n = columns // 32
    n_scales = (n * HALVES) >> SHIFT
    total = no_floats(TOKENS)
    for block in range(n):
        line = (group * n + block) * SIZE
        at = token * columns + block * 32
        if HALVES == 1:
            b, s = token * n + block, (group * n_scales + (block >> SHIFT)) * 16
            acc = start(TOKENS, xi, b, n, offset)
            acc = dot_half(acc, LAYOUT, 0, packed, line, xq, at, columns)
            acc = dot_half(acc, LAYOUT, 1, packed, line, xq, at, columns)
            total = scaled(total, acc, xd, b, n, load_halves(scales, s))
            if MINIMUM:
                total = shifted(total, xs, b, n, load_halves(minima, s))
        else:
            b, s = token * n + block, (group * n_scales + block * 2) * 16
            acc = start(TOKENS, xi, 2 * b, 2 * n, offset)
            acc = dot_half(acc, LAYOUT, 0, packed, line, xq, at, columns)
            total = scaled(total, acc, xd, b, n, load_halves(scales, s))
            acc = start(TOKENS, xi, 2 * b + 1, 2 * n, offset)
            acc = dot_half(acc, LAYOUT, 1, packed, line, xq, at, columns)
            total = scaled(total, acc, xd, b, n, load_halves(scales, s + 16))
    store_rows(out, token * stride + first + group * 16, stride, total, unit)


def small_rows(packed, scales, minima, xq, xd, xs, xi, out, group, token, columns, first, stride, offset, unit):
    """The same where 16 columns share a byte of scale and minimum, and 256 columns what these are multiplied by.

    The bytes lie behind the codes, from `offset` on.
    """
    n = columns // 32
    coarse = columns // 256
    total = no_floats(TOKENS)
    for block in range(n):
        line = (group * n + block) * SIZE
        at, b = token * columns + block * 32, token * n + block
        s = (group * coarse + (block >> 3)) * 16
        d, m = load_halves(scales, s), load_halves(minima, s)
        bytes_at = offset + (group * n + block) * 32
        acc = start(TOKENS, xi, 0, 0, 0)
        acc = dot_half(acc, LAYOUT, 0, packed, line, xq, at, columns)
        total = scaled(total, acc, xd, b, n, nibble_times(packed, bytes_at, 0, d))
        total = shifted(total, xs, 2 * b, 2 * n, nibble_times(packed, bytes_at, 1, m))
        acc = start(TOKENS, xi, 0, 0, 0)
        acc = dot_half(acc, LAYOUT, 1, packed, line, xq, at, columns)
        total = scaled(total, acc, xd, b, n, nibble_times(packed, bytes_at + 16, 0, d))
        total = shifted(total, xs, 2 * b + 1, 2 * n, nibble_times(packed, bytes_at + 16, 1, m))
    store_rows(out, token * stride + first + group * 16, stride, total, unit)


def float_rows(weights, x, out, group, token, columns, first, stride):
    """16 rows of float weights: one column after the other, so that a sum has one order."""
    total = no_floats(TOKENS)
    for column in range(columns):
        w = wide(weights, (group * columns + column) * 16, BFLOAT)
        total = times(total, w, x, token * columns + column, columns)
    store_rows(out, token * stride + first + group * 16, stride, total, np.float32(1))


def product(packed, scales, minima, xq, xd, xs, xi, out, tokens, columns, first, groups, stride, offset, unit):
    """All rows for all tokens: groups of 16 rows are shared out among the threads."""
    full = tokens - tokens % TILE
    for group in nb.prange(groups):
        for token in range(0, full, TILE):
            ROWS_TILE(packed, scales, minima, xq, xd, xs, xi, out, group, token, columns, first, stride, offset, unit)
        for token in range(full, tokens):
            ROWS_ONE(packed, scales, minima, xq, xd, xs, xi, out, group, token, columns, first, stride, offset, unit)


def float_product(weights, x, out, tokens, columns, first, groups, stride):
    """The same for float weights."""
    full = tokens - tokens % TILE
    for group in nb.prange(groups):
        for token in range(0, full, TILE):
            ROWS_TILE(weights, x, out, group, token, columns, first, stride)
        for token in range(full, tokens):
            ROWS_ONE(weights, x, out, group, token, columns, first, stride)


@cache
def kernel_for(layout: Layout) -> Any:
    """The compiled product for a layout: compiled when it is first called, then kept on disk."""
    number = LAYOUTS.index(layout)
    if layout.numbers:
        ones = _pair(float_rows, number, BFLOAT=layout.numbers == "BF16")
        return parallel(variant(float_product, str(number), **ones))
    wide_groups = max(layout.columns // COLUMNS, 1)
    values = {
        "LAYOUT": number,
        "SIZE": layout.lines * LINE,
        "HALVES": 2 if layout.columns == 16 else 1,
        "SHIFT": wide_groups.bit_length() - 1,
        "MINIMUM": layout.minimum,
    }
    ones = _pair(small_rows if layout.small else rows, number, **values)
    return parallel(variant(product, str(number), **ones))


def _pair(template: Any, number: int, **values: Any) -> dict[str, Any]:
    """The rows of a product for a full tile of tokens, and for one token."""
    return {
        name: kernel(variant(template, f"{number}x{tokens}", TOKENS=tokens, **values))
        for name, tokens in (("ROWS_TILE", TILE), ("ROWS_ONE", 1))
    }
