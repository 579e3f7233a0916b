"""The kernels that repack weights: 16 rows at a time, 256 columns of a row at a time. layouts.py has the picture.

What comes from a file is unpacked to words of codes, scales and minima; the codes are placed into the planes of the
layout, scales and minima rounded to float16. Two variants, for types of plain bits and for types with a codebook. They
work on a range of groups and are serial: threads share out the groups, and a prange would double the compile time.
"""

from __future__ import annotations

from .compile import kernel, variant
from .unpack_basic import basic_planes
from .unpack_iq import book_planes, book_scales
from .unpack_k import basic_scales
from .words import byte, inlined, put_byte, put_half, put_short, put_word, short, single, word

CODES_AT, D_AT, M_AT, SCRATCH = 0, 256, 320, 384  # bytes: the room that a kernel needs for itself
PLANES = SCALES = None  # set for each variant


@inlined
def _largest(values, count, top):
    """The largest magnitude, as its bits: those of positive floats are in order, with infinity and NaN on top."""
    for i in range(count):
        top = max(top, word(values + 4 * i) & 0x7FFFFFFF)
    return top


@inlined
def _round(values, count, inverse, out):
    """Scales or minima of one row."""
    for i in range(count):
        put_half(out + 32 * i, single(values + 4 * i) * inverse)


def pack_groups(source, data, first, rows, start, stop, target, scratch):
    """The rows of one tensor that lie in some groups; where there is no target, only their largest scale is found."""
    codes, d, m = scratch + CODES_AT, scratch + D_AT, scratch + M_AT
    top, n, columns, lines = 0, source.blocks, target.columns, target.first + target.second
    for group in range(start, stop):
        low, high = max(first, 16 * group), min(first + rows, 16 * group + 16)
        for chunk in range(0, n, 8):
            blocks = min(8, n - chunk)
            count, held, begin = blocks * 32 // columns, blocks * 8 // source.quads, chunk * 8 // source.quads
            scale = (group * (n * 32 // columns) + chunk * 32 // columns) * 32
            line = 64 * lines * (group * n + chunk)
            for row in range(low, high):
                at, lane = data + (row - first) * source.row_bytes + begin * source.size, row & 15
                SCALES(source, at, held, d, m)
                if target.packed == 0:
                    top = _largest(d, count, top)
                    if target.minimum:
                        top = _largest(m, count, top)
                    continue
                PLANES(source, target.flip, at, held, codes, target.packed + line + 4 * lane, 64 * lines)
                _round(d, count, target.inverse, target.scales + scale + 2 * lane)
                if target.minimum:
                    _round(m, count, target.inverse, target.minima + scale + 2 * lane)
                if target.small:
                    for i in range(16):
                        put_byte(target.small + ((group * n + chunk) * 2 + i) * 16 + lane, byte(at + i))
    return top


pack_basic = kernel(variant(pack_groups, "basic", PLANES=basic_planes, SCALES=basic_scales))
pack_book = kernel(variant(pack_groups, "book", PLANES=book_planes, SCALES=book_scales))


@kernel
def interleave(data, size, first, rows, columns, start, stop, out):
    """Plain numbers of 2 or 4 bytes: 16 rows side by side, one column after the other."""
    for group in range(start, stop):
        low, high = max(first, 16 * group), min(first + rows, 16 * group + 16)
        for chunk in range(0, columns, 64):
            for row in range(low, high):
                at, to = data + (row - first) * columns * size, out + (group * columns * 16 + (row & 15)) * size
                if size == 4:
                    for column in range(chunk, min(chunk + 64, columns)):
                        put_word(to + 64 * column, word(at + 4 * column))
                else:
                    for column in range(chunk, min(chunk + 64, columns)):
                        put_short(to + 32 * column, short(at + 2 * column))
