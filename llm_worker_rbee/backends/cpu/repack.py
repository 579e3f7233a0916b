"""Tensors of a file -> weights as the CPU kernels want them. The copy is complete: the file is not needed afterwards.

Scales and minima are float16 times one power of two for the whole matrix, the unit: the largest is 2**14 to 2**15 of it
(in a K type it would be, if its small integer were as large as it can be). A scale that is a float16 in the file stays
exact; a product (a K type's float16 times its small integer) is rounded once, by at most 2**-11 of itself. What is
under 2**-14 units loses more, as it becomes a multiple of 2**-24 units: where scales have a wild range (MXFP4, Q8_K),
the negligible become 0.

The kernels that repack weights: 16 rows at a time, 256 columns of a row at a time. layouts.py has the picture.

What comes from a file is unpacked to words of codes, scales and minima; the codes are placed into the planes of the
layout, scales and minima rounded to float16. Two variants, for types of plain bits and for types with a codebook. They
work on a range of groups and are serial: threads share out the groups, and a prange would double the compile time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from math import frexp, isfinite, ldexp
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelFileError
from ...weights import Tensor
from ...weights.quants import BLOCK_TYPES
from ...weights.quants.codebooks import GRIDS, grid
from . import threads
from .dot_int8 import BIAS
from .gguf_blocks import (
    BOOK_RULES,
    BOUNDS,
    BYTES,
    FIELDS,
    HALVES,
    HALVES_RULE,
    ONES,
    RULES,
    basic_planes,
    basic_scales,
    book_planes,
    book_scales,
)
from .jit import kernel, variant
from .layouts import COLUMNS, LINE, ROWS, Layout, layout_of
from .pointers import byte, inlined, put_byte, put_half, put_short, put_word, short, single, word

NUMBERS: dict[str, Any] = {"F32": np.float32, "F16": np.uint16, "BF16": np.uint16}
LEAST_UNIT = -126  # its inverse is still a float32
SMALL = 1 << 20  # bytes that a thread of its own is worth


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A matrix for the kernels. Arrays have one dimension; scales and minima hold the bits of float16.

    Scale i of a row, one for each `layout.columns` columns, is at (group * scales a row + i) * 16 + row % 16.
    """

    packed: NDArray[Any]  # uint8 lines, behind them what `small` shows; plain numbers: uint16 or float32
    scales: NDArray[np.uint16]
    minima: NDArray[np.uint16]  # empty where the layout has none
    small: NDArray[np.uint8] | None  # a view: byte i of a row, one for each 16 columns, is placed as scales are
    rows: int
    columns: int
    layout: Layout
    unit: float  # what every scale and minimum is multiplied by
    bias: int  # what is added to signed bytes

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.packed.nbytes + self.scales.nbytes + self.minima.nbytes


class Source(NamedTuple):
    """What the kernels are told about a block type and a tensor's rows; tables by their address."""

    rule: int
    quads: int  # of columns, in a block of the file
    size: int  # bytes of that block
    fields: int
    n_fields: int
    d_at: int
    d_factor: np.float32
    m_at: int
    m_factor: np.float32
    table: int
    row_bytes: int = 0
    blocks: int = 0  # of 32 columns, in a row


class Target(NamedTuple):
    """Where the kernels write, by address; 0 for what there is not, or while the largest scale is looked for."""

    columns: int  # that share a scale
    first: int  # bits of the first plane
    second: int
    minimum: int
    flip: int = 0  # bits of a word of signed bytes to turn
    inverse: np.float32 = np.float32(1)  # of the unit
    packed: int = 0
    scales: int = 0
    minima: int = 0
    small: int = 0


def pack(tensors: Sequence[Tensor], bias: int = BIAS) -> Packed:
    """Tensors of one layout, stacked by rows; rows are padded to a multiple of 16 with scales of zero."""
    layout, columns = layout_of(tensors[0]), tensors[0].shape[-1]
    assert all(layout_of(t) == layout and t.shape[-1] == columns for t in tensors), "a stack has one layout and width"
    if layout.numbers:
        return _pack_numbers(tensors, layout)
    unit = _unit(max(_run(t, first, _nowhere(layout)) for t, first in _placed(tensors)))
    out = _room(layout, sum(t.size // columns for t in tensors), columns, unit, bias)
    target = _target(out)
    for tensor, first in _placed(tensors):
        _run(tensor, first, target)
    return out


def _unit(largest: float) -> float:
    """The power of two that brings the largest scale to 2**14 .. 2**15."""
    return ldexp(1.0, max(frexp(largest)[1] - 15, LEAST_UNIT)) if largest else 1.0


def _placed(tensors: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """Each tensor with the row of the matrix at which it begins."""
    counts = [t.size // t.shape[-1] for t in tensors]
    return [(t, sum(counts[:i])) for i, t in enumerate(tensors)]


def _room(layout: Layout, rows: int, columns: int, unit: float = 1.0, bias: int = 0) -> Packed:
    """A matrix to be filled; what no row will be written to is zero."""
    groups = -(-rows // ROWS)
    lines = groups * (columns // COLUMNS) * layout.lines * LINE
    tail = groups * columns if layout.small else 0  # a byte for 16 columns of each of 16 rows
    packed = _aligned(lines + tail, np.uint8)
    scales = _aligned(groups * (columns // layout.columns) * ROWS, np.uint16)
    minima = _aligned(scales.size if layout.minimum else 0, np.uint16)
    small = packed[lines:] if layout.small else None
    for array in (packed[:lines], packed[lines:], scales, minima):
        _clear_padding(array, rows)
    return Packed(packed, scales, minima, small, rows, columns, layout, unit, bias)


def _clear_padding(array: NDArray[Any], rows: int) -> None:
    """Where the last group is not full, it begins as zeros."""
    if rows % ROWS:
        array[array.size // (rows // ROWS + 1) * (rows // ROWS) :] = 0


def _aligned(count: int, dtype: Any) -> NDArray[Any]:
    """An array that begins on a line of 64 bytes: a vector that straddles two costs twice."""
    size = count * np.dtype(dtype).itemsize
    raw = np.empty(size + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    return raw[start : start + size].view(dtype)


def _nowhere(layout: Layout) -> Target:
    first, second = (*layout.planes, 0)[:2]
    return Target(layout.columns, first, second, int(layout.minimum))


def _target(out: Packed) -> Target:
    return _nowhere(out.layout)._replace(
        flip=out.bias * ONES if out.layout.planes == (8,) else 0,
        inverse=np.float32(1 / out.unit),
        packed=_address(out.packed),
        scales=_address(out.scales),
        minima=_address(out.minima),
        small=0 if out.small is None else _address(out.small),
    )


def _address(array: NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


def _run(tensor: Tensor, first: int, target: Target) -> float:
    """Pack a tensor, or look for its largest scale."""
    name, data = tensor.kind.name, np.ascontiguousarray(tensor.data)
    rows, row_bytes = tensor.rows.shape
    source = (_source(name) if target.packed else _scanned(name))._replace(
        row_bytes=row_bytes, blocks=tensor.shape[-1] // COLUMNS
    )
    work = pack_book if name in BOOK_RULES else pack_basic

    def run(start: int, stop: int) -> int:
        scratch = np.zeros(SCRATCH, np.uint8)
        return int(work(source, _address(data), first, rows, start, stop, target, _address(scratch)))

    top = float(np.uint32(max(_share_out(run, first, rows, tensor.nbytes))).view(np.float32))
    if not isfinite(top):
        raise ModelFileError(f"tensor {tensor.name!r}: a scale is NaN or infinite, the file is damaged")
    return top


def _share_out(run: Callable[[int, int], int], first: int, rows: int, size: int) -> list[int]:
    """Run on all groups that hold these rows: neighbours on one thread, and few threads for a small tensor."""
    start, stop = first // ROWS, -(-(first + rows) // ROWS)
    parts = min(threads.count(), stop - start, 1 + size // SMALL)
    if parts <= 1:
        return [run(start, stop)]
    edges = [start + (stop - start) * i // parts for i in range(parts + 1)]
    with ThreadPoolExecutor(parts) as pool:
        return list(pool.map(run, edges[:-1], edges[1:]))


@cache
def _tables(name: str) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Where the fields of bits lie, each with its number of runs; and what bytes or indices stand for."""
    values = BLOCK_TYPES[name].block_size
    fields = [(*field, values // 4 * field[2] // (8 * field[1] or 1)) for field in FIELDS.get(name, ())]
    table = BYTES[name][1]() if name in BYTES else _book("IQ1_S" if name == "IQ1_M" else name)
    return np.array(fields, np.int64), table


@cache
def _source(name: str) -> Source:
    kind, (fields, table) = BLOCK_TYPES[name], _tables(name)
    d_at, d_factor, m_at, m_factor = HALVES.get(name, (0, 0, 0, 0))
    return Source(
        rule=BOOK_RULES[name] if name in BOOK_RULES else RULES.get(name, HALVES_RULE),
        quads=kind.block_size // 4,
        size=kind.block_bytes,
        fields=_address(fields),
        n_fields=len(fields),
        d_at=BYTES[name][0] if name in BYTES else d_at,
        d_factor=np.float32(d_factor),
        m_at=m_at,
        m_factor=np.float32(m_factor),
        table=_address(table),
    )


@cache
def _scanned(name: str) -> Source:
    """For a look at the scales alone."""
    if name not in BOUNDS:
        return _source(name)
    d_at, d_most, m_at, m_most = BOUNDS[name]
    source = _source(name)._replace(rule=HALVES_RULE, d_at=d_at, m_at=m_at)
    return source._replace(d_factor=np.float32(d_most), m_factor=np.float32(m_most))


def _book(name: str) -> NDArray[np.uint8]:
    """A codebook with each value as the number of its level."""
    if name not in GRIDS:
        return np.zeros(0, np.uint8)
    return np.searchsorted(np.array(GRIDS[name].levels), grid(name)).astype(np.uint8)


def _pack_numbers(tensors: Sequence[Tensor], layout: Layout) -> Packed:
    columns, rows = tensors[0].shape[-1], sum(t.size for t in tensors) // tensors[0].shape[-1]
    out = _aligned(-(-rows // ROWS) * ROWS * columns, NUMBERS[layout.numbers])
    _clear_padding(out, rows)
    for tensor, first in _placed(tensors):
        data, count = np.ascontiguousarray(tensor.data), tensor.size // columns
        run = partial(_interleave, out, (_address(data), out.itemsize, first, count, columns))
        _share_out(run, first, count, data.nbytes)
    none = np.zeros(0, np.uint16)
    return Packed(out, none, none, None, rows, columns, layout, 1.0, 0)


def _interleave(out: NDArray[Any], about: tuple[int, ...], start: int, stop: int) -> int:
    interleave(*about, start, stop, _address(out))
    return 0


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
