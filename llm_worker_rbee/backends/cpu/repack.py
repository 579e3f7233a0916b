"""Tensors of a file -> packed weights in the layouts of packed_weight.py. The copy is complete: the file can be closed.

Scales and minima are float16 times one power of two per matrix, the unit: the largest is 2**14 to 2**15 units (for a K
type, as if its small integer were the largest possible). A scale that is a float16 in the file stays exact; a product
(a K type's float16 times its small integer) is rounded once, by at most 2**-11 of itself. Below 2**-14 units a scale
becomes a multiple of 2**-24 units: where scales span a wide range (MXFP4, Q8_K), negligible ones become 0.

The kernels work on 16 rows and 256 columns of a row at a time: kernels/repack.py reads a block into codes, scales and
minima and writes the codes into bit planes. They are serial over a range of row groups, and Python threads share out
the groups: a prange would double the compile time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from math import frexp, isfinite, ldexp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelFileError
from ...weights import Tensor
from ...weights.checkpoint import release_pages
from ...weights.quants import ALL_TYPES
from ...weights.quants.codebooks import GRIDS, grid
from ...weights.quants.decoders import read_f32
from .jit import NativeKernel
from .kernels import repack as kernels
from .kernels.dot_int8 import WEIGHT_BIAS
from .kernels.pointers import aligned
from .kernels.repack import Source, Target
from .packed_weight import BLOCK_COLUMNS, GROUP_ROWS, Layout, PackedMatrix, layout_of_tensor

FLOAT_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.uint16, "BF16": np.uint16}
MIN_UNIT_EXPONENT = -126  # the unit's inverse is still a float32
FP8_FACTOR = 2.0**-8
MIN_BYTES_PER_THREAD = 1 << 20  # of a tensor
MAX_SLICE_BYTES = 8 << 20  # of a tensor: what is packed of the file is not kept in memory
HUGE_ARRAY_BYTES = 4 << 20  # from this size on NumPy asks for huge pages
BLOCK_BYTES = 32 << 20  # of memory that smaller arrays share


class WeightMemory:
    """Memory in huge pages: with small ones, a step of a small model spends a twentieth of its time on page tables."""

    def __init__(self) -> None:
        self._block: Callable[[], NDArray[np.uint8] | None] = lambda: None  # a weak reference: its arrays keep it
        self._used = 0
        self._lock = threading.Lock()  # layers are packed at the same time

    def zeros(self, size: int, dtype: Any) -> NDArray[Any]:
        if size >= HUGE_ARRAY_BYTES:
            return np.zeros(size, dtype)
        with self._lock:
            block = self._block()
            if block is None or self._used + size > BLOCK_BYTES:
                block, self._used = np.zeros(BLOCK_BYTES, np.uint8), 0
                self._block = weakref.ref(block)
            first, self._used = self._used, self._used + size
        return block[first : first + size].view(dtype)


_memory = WeightMemory()


def repack(tensors: Sequence[Tensor], threads: int, bias: int = WEIGHT_BIAS, stack: int | None = None) -> PackedMatrix:
    """Pack tensors of one layout, stacked by rows; rows are padded to a multiple of 16 with scales of zero.

    `stack`: after so many tensors, too.
    """
    layout, columns = layout_of_tensor(tensors[0]), tensors[0].shape[-1]
    same = all(layout_of_tensor(t) == layout and t.shape[-1] == columns for t in tensors)
    assert same, "a stack has one layout and width"
    if layout.float_type == "FP8":
        return _repack_fp8(tensors, layout, threads, stack)
    if layout.float_type:
        return _repack_floats(tensors, layout, threads, stack)
    scan, (placed, rows) = scan_target(layout), _place_rows(tensors, stack)
    unit = _choose_unit(max(_run_kernel(t, first, scan, threads) for t, first in placed))
    out = _allocate(layout, rows, columns, unit, bias)
    target = _write_target(out)
    for tensor, first in placed:
        _run_kernel(tensor, first, target, threads)
    return out


def _choose_unit(largest: float) -> float:
    """Return the power of two that brings the largest scale to 2**14 .. 2**15."""
    return ldexp(1.0, max(frexp(largest)[1] - 15, MIN_UNIT_EXPONENT)) if largest else 1.0


def _place_rows(tensors: Sequence[Tensor], stack: int | None) -> tuple[list[tuple[Tensor, int]], int]:
    """Return each tensor with its first row, and the number of rows; every `stack` tensors begin a group of rows."""
    placed, row = list[tuple[Tensor, int]](), 0
    for i, tensor in enumerate(tensors):
        if stack is not None and i % stack == 0:
            row = -(-row // GROUP_ROWS) * GROUP_ROWS
        placed.append((tensor, row))
        row += tensor.size // tensor.shape[-1]
    return placed, row if stack is None else -(-row // GROUP_ROWS) * GROUP_ROWS


def _allocate(layout: Layout, rows: int, columns: int, unit: float, bias: int) -> PackedMatrix:
    """Return a matrix to be filled; rows of padding at its end are zero."""
    groups = -(-rows // GROUP_ROWS)
    lines = groups * (columns // BLOCK_COLUMNS) * layout.block_bytes
    tail = groups * columns if layout.nibble_scales else 0  # one byte for 16 columns of each of 16 rows
    packed = aligned(_memory.zeros, lines + tail, np.uint8)
    scales = aligned(_memory.zeros, groups * (columns // layout.columns_per_scale) * GROUP_ROWS, np.uint16)
    minima = aligned(_memory.zeros, scales.size if layout.has_minimum else 0, np.uint16)
    nibbles = packed[lines:] if layout.nibble_scales else None
    return PackedMatrix(packed, scales, minima, nibbles, rows, columns, layout, unit, bias)


def scan_target(layout: Layout) -> Target:
    """Return a target without addresses."""
    first, second = (*layout.planes, 0)[:2]
    return Target(layout.columns_per_scale, first, second, int(layout.has_minimum), 0, 0, 0, 0, 0, 1.0)


def _write_target(out: PackedMatrix) -> Target:
    return scan_target(out.layout)._replace(
        flip=out.bias * kernels.ONES if out.layout.planes == (8,) else 0,
        inverse=1 / out.unit,
        packed=_address(out.packed),
        scales=_address(out.scales),
        minima=_address(out.minima),
        nibble_scales=0 if out.nibble_scales is None else _address(out.nibble_scales),
    )


def _address(array: NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


def _run_kernel(tensor: Tensor, first: int, target: Target, threads: int) -> float:
    """Pack a tensor (if the target has addresses) and return a bound of its largest scale."""
    name, data = tensor.kind.name, np.ascontiguousarray(tensor.data)
    rows, row_bytes = tensor.rows.shape
    source = (describe_source(name) if target.packed else _describe_scales(name))._replace(
        row_bytes=row_bytes, blocks=tensor.shape[-1] // BLOCK_COLUMNS
    )
    run_kernel, tables = kernel_for(name), (_table(source, 2), _table(target, 1))

    def run(start: int, stop: int) -> int:
        scratch, (described, place) = np.zeros(kernels.SCRATCH, np.uint8), map(_address, tables)
        return int(run_kernel(described, _address(data), first, rows, start, stop, place, _address(scratch)))

    top = float(np.uint32(max(_run_in_slices(run, data, first, rows, threads))).view(np.float32))
    if not isfinite(top):
        raise ModelFileError(f"tensor {tensor.name!r}: a scale is NaN or infinite, the file is damaged")
    return top


def _table(record: Source | Target, num_floats: int) -> NDArray[np.int64]:
    """Return a record as eight bytes for each field; the floats are last."""
    split = len(record) - num_floats
    return np.concatenate((np.array(record[:split], np.int64), np.array(record[split:], np.float64).view(np.int64)))


def _run_in_slices(
    run: Callable[[int, int], int], data: NDArray[np.uint8], first: int, rows: int, threads: int
) -> list[int]:
    """Run on all groups that hold these rows; pages of a mapped file are released as they have been read."""
    start, stop = first // GROUP_ROWS, -(-(first + rows) // GROUP_ROWS)
    group_bytes = max(1, GROUP_ROWS * data.nbytes // max(1, rows))
    step, results = max(1, MAX_SLICE_BYTES // group_bytes), []
    for at in range(start, max(start + 1, stop), step):
        end = min(at + step, stop)
        results += _run_in_threads(run, at, end, (end - at) * group_bytes, threads)
        if step < stop - start:
            release_pages(data[max(0, at - start - 1) * group_bytes : (end - start) * group_bytes])
    return results


def _run_in_threads(run: Callable[[int, int], int], start: int, stop: int, size: int, threads: int) -> list[int]:
    """Run on a range of groups: adjacent groups on one thread, fewer threads for few bytes."""
    parts = min(threads, stop - start, 1 + size // MIN_BYTES_PER_THREAD)
    if parts <= 1:
        return [run(start, stop)]
    edges = [start + (stop - start) * i // parts for i in range(parts + 1)]
    with ThreadPoolExecutor(parts) as pool:
        return list(pool.map(run, edges[:-1], edges[1:]))


@cache
def _tables(name: str) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the bit fields, each with its number of runs, and the scale or codebook table."""
    values = ALL_TYPES[name].block_size
    fields = [(*field, values // 4 * field[2] // (8 * field[1] or 1)) for field in kernels.BIT_FIELDS.get(name, ())]
    table = (
        kernels.BYTE_SCALES[name][1]()
        if name in kernels.BYTE_SCALES
        else _codebook("IQ1_S" if name == "IQ1_M" else name)
    )
    return np.array(fields, np.int64), table


@cache
def describe_source(name: str) -> Source:
    """Describe a block type to the kernels."""
    kind, (fields, table) = ALL_TYPES[name], _tables(name)
    d_at, d_factor, m_at, m_factor = kernels.F16_SCALES.get(name, (0, 1, 0, 0))
    if name in kernels.F32_SCALES:
        d_at, m_at = kernels.F32_SCALES[name]
    rule = (
        kernels.CODEBOOK_RULES[name]
        if name in kernels.CODEBOOK_RULES
        else kernels.SCALE_RULES.get(name, kernels.RULE_F16)
    )
    return Source(
        rule,
        kind.block_size // 4,
        kind.block_bytes,
        _address(fields),
        len(fields),
        d_at=kernels.BYTE_SCALES[name][0] if name in kernels.BYTE_SCALES else d_at,
        m_at=m_at,
        table=_address(table),
        row_bytes=0,
        blocks=0,
        d_factor=d_factor,
        m_factor=m_factor,
    )


@cache
def _describe_scales(name: str) -> Source:
    """Describe the source for a scan that reads float16 factors only and bounds the small integers."""
    if name not in kernels.SCALE_BOUNDS:
        return describe_source(name)
    d_at, max_d, m_at, max_m = kernels.SCALE_BOUNDS[name]
    source = describe_source(name)._replace(rule=kernels.RULE_F16, d_at=d_at, m_at=m_at)
    return source._replace(d_factor=max_d, m_factor=max_m)


def _codebook(name: str) -> NDArray[np.uint8]:
    """Return a codebook with each value as the index of its level."""
    if name not in GRIDS:
        return np.zeros(0, np.uint8)
    return np.searchsorted(np.array(GRIDS[name].levels), grid(name)).astype(np.uint8)


def _repack_floats(tensors: Sequence[Tensor], layout: Layout, threads: int, stack: int | None) -> PackedMatrix:
    columns, (placed, rows) = tensors[0].shape[-1], _place_rows(tensors, stack)
    out = aligned(_memory.zeros, -(-rows // GROUP_ROWS) * GROUP_ROWS * columns, FLOAT_DTYPES[layout.float_type])
    for tensor, first in placed:
        data, count = np.ascontiguousarray(tensor.data), tensor.size // columns
        run = partial(kernels.INTERLEAVE_FLOATS, _address(data), out.itemsize, first, count, columns, _address(out))
        _run_in_slices(run, data, first, count, threads)
    none = np.zeros(0, np.uint16)
    return PackedMatrix(out, none, none, None, rows, columns, layout, 1.0, 0)


def _repack_fp8(tensors: Sequence[Tensor], layout: Layout, threads: int, stack: int | None) -> PackedMatrix:
    """Pack e4m3 numbers, which kernels read as float16 of 2**-8 times the value: the unit makes up for it."""
    columns, (placed, rows) = tensors[0].shape[-1], _place_rows(tensors, stack)
    scales = [read_f32(t.data.reshape(-1, t.kind.block_bytes), 0) for t in tensors]
    unit = _choose_unit(max(float(np.abs(x).max(initial=0)) for x in scales))
    out = _allocate(layout, rows, columns, unit / FP8_FACTOR, 0)
    for tensor, first in placed:
        data, count = np.ascontiguousarray(tensor.data), tensor.size // columns
        place = first, count, columns, 1 / unit, _address(out.packed), _address(out.scales)
        _run_in_slices(partial(kernels.INTERLEAVE_FP8, _address(data), *place), data, first, count, threads)
    return out


def kernel_for(name: str) -> NativeKernel:
    """Return the kernel that packs a block type."""
    if name == "FP8":
        return kernels.INTERLEAVE_FP8
    if name in FLOAT_DTYPES:
        return kernels.INTERLEAVE_FLOATS
    return kernels.REPACK_CODEBOOK if name in kernels.CODEBOOK_RULES else kernels.REPACK_BASIC
