"""The product of a linear layer: of few tokens straight from packed codes (packed.py), of many from unpacked ones.

Unpacked weights lie in a buffer and are multiplied with panels of activations: tile_kernel.py tells why, and how an
instruction set takes part. A piece is some groups of 16 rows x some panels. Its columns are cut into runs: the weights
of a run stay in the first-level cache while all panels pass by, and totals of a few groups are kept beside them until
the last run.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ....cpu_info import INSTRUCTION_SETS
from ...jit import TaskKernel, kernel, variant
from ...packed_weight import LAYOUTS, Layout
from .. import simd
from ..dot_int8 import ISA, TILE_KERNELS, WEIGHT_BIAS, unpack_block
from ..pointers import f32, f64, i64, stack_floats, u8, u16
from ..quantize_activations import PANELS
from .packed import LinearArg, packed_kernel

UNPACK_MIN_TOKENS = INSTRUCTION_SETS[ISA].unpack_min_tokens
TILES: Any = TILE_KERNELS.get(ISA) if UNPACK_MIN_TOKENS else None
PANEL_TOKENS, PANEL_BYTES = (TILES.panel_tokens, TILES.panel_bytes) if TILES else (1, 1)
TOKENS_PER_PIECE = 128  # unpacking is 3% of the work then
RUN_BLOCKS = 48  # of a run of columns: 24 KB of weights
MAX_TOTALS = 1024  # vectors of 16 floats
# floats of a task's buffer: weights, scales, minima, totals
SCALES_AT = RUN_BLOCKS * 128
MINIMA_AT = SCALES_AT + RUN_BLOCKS * 32
TOTALS_AT = MINIMA_AT + RUN_BLOCKS * 32
BUFFER_FLOATS = TOTALS_AT + MAX_TOTALS * 16
# set for each variant
LAYOUT = BLOCK_BYTES = SCALES_PER_BLOCK = SCALE_SHIFT = HAS_MINIMUM = NIBBLE_SCALES = IN_PLACE = None
UNPACK = MULTIPLY = BEGIN = END = MIN_TOKENS = PACKED = UNPACKED = None


def unpack_run(a, group, n, first, blocks, weights, scales, minima):
    """Unpack blocks first .. first + blocks - 1 of a group of rows."""
    packed, all_scales, all_minima = u8(a[LinearArg.PACKED]), u16(a[LinearArg.SCALES]), u16(a[LinearArg.MINIMA])
    nibbles, n_scales = u8(a[LinearArg.NIBBLE_SCALES]), (n if NIBBLE_SCALES else n * SCALES_PER_BLOCK) >> SCALE_SHIFT
    for b in range(blocks):
        block = group * n + first + b
        if not IN_PLACE:
            unpack_block(LAYOUT, packed, block * BLOCK_BYTES, weights, b * 512)
        for half in range(SCALES_PER_BLOCK):
            to = (b * SCALES_PER_BLOCK + half) * 16
            place = first + b if NIBBLE_SCALES else (first + b) * SCALES_PER_BLOCK + half
            s = (group * n_scales + (place >> SCALE_SHIFT)) * 16
            d, byte = simd.load(all_scales, s), (block * 2 + half) * 16
            simd.store(scales, to, simd.nibbles_times(nibbles, byte, 0, d) if NIBBLE_SCALES else d)
            if HAS_MINIMUM:
                m = simd.load(all_minima, s)
                simd.store(minima, to, simd.nibbles_times(nibbles, byte, 1, m) if NIBBLE_SCALES else m)


@kernel
def write_totals(totals, tokens, terms, groups, unit, out, to, stride, rows, bias, column):
    """Write the results of some groups times `unit`: of each token, or of its two terms, which are added; plus the
    bias, if there is one, of the columns from `column` on."""
    added = f32(bias)
    for t in range(tokens):
        for group in range(groups):
            at, place = (t * groups + group) * 16, to + t * stride + group * 16
            value = simd.mul(simd.load(totals, at), simd.splat(unit))
            if terms == 2:
                second = (tokens + PANEL_TOKENS - 1) // PANEL_TOKENS * PANEL_TOKENS * groups * 16
                value = simd.add(value, simd.mul(simd.load(totals, at + second), simd.splat(unit)))
            if rows - group * 16 >= 16:
                first = column + group * 16
                simd.store(out, place, simd.add(value, simd.load(added, first)) if bias else value)
            else:
                simd.store(totals, at, value)
                for i in range(rows - group * 16):
                    out[place + i] = totals[at + i] + added[column + group * 16 + i] if bias else totals[at + i]


def unpacked_matmul(args, step, piece):
    """Compute some rows for some panels of tokens."""
    a, s = i64(args), i64(step)
    tokens, n, stride = s[a[LinearArg.COUNT]], a[LinearArg.COLUMNS] // 32, a[LinearArg.STRIDE]
    panels, out = u8(s[a[LinearArg.INPUT] + PANELS]), f32(s[a[LinearArg.OUTPUT]])
    parts, all_panels = (tokens + TOKENS_PER_PIECE - 1) // TOKENS_PER_PIECE, (tokens + PANEL_TOKENS - 1) // PANEL_TOKENS
    group, part = piece // parts * a[LinearArg.GROUPS_PER_PIECE], piece % parts
    end = min((a[LinearArg.ROWS] + 15) // 16, group + a[LinearArg.GROUPS_PER_PIECE])
    first, last = part * all_panels // parts, (part + 1) * all_panels // parts
    count, terms = last - first, 1 + a[LinearArg.TWO_TERM]
    run = (n + RUN_BLOCKS - 1) // RUN_BLOCKS
    run = (n + run - 1) // run
    buffer = stack_floats(BUFFER_FLOATS)
    unpacked, scales, minima = u8(buffer), f32(buffer + 4 * SCALES_AT), f32(buffer + 4 * MINIMA_AT)
    totals, max_groups = f32(buffer + 4 * TOTALS_AT), MAX_TOTALS // (terms * count * PANEL_TOKENS)
    if BEGIN is not None:
        BEGIN(SCALES_PER_BLOCK)
    while group < end:
        groups = min(end - group, max_groups)
        for i in range(0, terms * count * PANEL_TOKENS * groups * 16, 16):
            simd.store(totals, i, simd.splat(np.float32(0)))
        for block in range(0, n, run):
            blocks = min(run, n - block)
            for g in range(groups):
                UNPACK(a, group + g, n, block, blocks, unpacked, scales, minima)
                weights = u8(a[LinearArg.PACKED]) if IN_PLACE else unpacked
                line = ((group + g) * n + block) * BLOCK_BYTES if IN_PLACE else 0
                for p in range(terms * count):  # panels of second terms lie behind all panels of first terms
                    panel = (first + p if p < count else all_panels + first + p - count) * n + block
                    to = (p * PANEL_TOKENS * groups + g) * 16
                    MULTIPLY(
                        weights, line, scales, minima, panels, panel * PANEL_BYTES, blocks, totals, to, groups * 16
                    )
        place = a[LinearArg.FIRST] + group * 16 + first * PANEL_TOKENS * stride
        length, unit = min(tokens, last * PANEL_TOKENS) - first * PANEL_TOKENS, np.float32(f64(args)[LinearArg.UNIT])
        rows, column = a[LinearArg.ROWS] - group * 16, a[LinearArg.FIRST] + group * 16
        write_totals(totals, length, terms, groups, unit, out, place, stride, rows, a[LinearArg.BIAS], column)
        group += groups
    if END is not None:
        END()


def unpacked_kernel(layout: Layout) -> Any:
    """Return the product of a layout as a part of a task kernel."""
    sums_of_16 = layout.columns_per_scale == 16 or layout.nibble_scales
    shape = {"SCALES_PER_BLOCK": 2 if sums_of_16 else 1, "HAS_MINIMUM": layout.has_minimum}
    values = {
        "LAYOUT": LAYOUTS.index(layout),
        "BLOCK_BYTES": layout.block_bytes,
        "SCALE_SHIFT": max(layout.columns_per_scale // 32, 1).bit_length() - 1,
        "NIBBLE_SCALES": layout.nibble_scales,
        "IN_PLACE": layout.planes == (8,) and not WEIGHT_BIAS and TILES.emit_weight_order is None,
        **shape,
    }
    name = f"{values['LAYOUT']}"
    unpack = kernel(variant(unpack_run, name, **values))
    multiply = kernel(variant(TILES.multiply, f"{shape['SCALES_PER_BLOCK']}{layout.has_minimum}", **shape))
    return kernel(
        variant(unpacked_matmul, name, UNPACK=unpack, MULTIPLY=multiply, BEGIN=TILES.begin, END=TILES.end, **values)
    )


def matmul(args, step, piece):
    """Compute some rows for some tokens: of MIN_TOKENS and more from unpacked weights."""
    if MIN_TOKENS and i64(step)[i64(args)[LinearArg.COUNT]] >= MIN_TOKENS:
        UNPACKED(args, step, piece)
    else:
        PACKED(args, step, piece)


def can_unpack(layout: Layout) -> bool:
    """Return whether products of many tokens unpack the weights first."""
    return UNPACK_MIN_TOKENS > 0 and not layout.float_type


@cache
def linear_kernel(layout: Layout) -> TaskKernel:
    """Return the product of a layout."""
    packed = packed_kernel(layout)
    if not can_unpack(layout):
        return TaskKernel(matmul, layout.name, MIN_TOKENS=0, PACKED=packed, UNPACKED=packed)
    unpacked = unpacked_kernel(layout)
    return TaskKernel(matmul, layout.name, MIN_TOKENS=UNPACK_MIN_TOKENS, PACKED=packed, UNPACKED=unpacked)
