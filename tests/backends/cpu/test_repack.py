"""PackedMatrix weights: every block type in its place, bit by bit, within the error that pack.py states."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llm_worker_rbee.backends.cpu import repack as repack_module
from llm_worker_rbee.backends.cpu.linear import dequantize_rows
from llm_worker_rbee.backends.cpu.packed_weight import LAYOUT_BY_TYPE, LAYOUTS
from llm_worker_rbee.backends.cpu.repack import (
    BLOCK_BYTES,
    HUGE_ARRAY_BYTES,
    MIN_BYTES_PER_THREAD,
    PackedMatrix,
    WeightMemory,
    repack,
)
from llm_worker_rbee.errors import ModelFileError, UnsupportedModelError
from llm_worker_rbee.weights import Tensor
from llm_worker_rbee.weights.checkpoint import map_file
from llm_worker_rbee.weights.quants import ALL_TYPES
from tests.helpers.synthetic import random_tensor

THREADS = 2
QUANTIZED = [name for name, layout in LAYOUT_BY_TYPE.items() if not layout.float_type]
NUMBERS = [name for name, layout in LAYOUT_BY_TYPE.items() if not layout.columns_per_scale]
# Their scales are in the file as they are in memory, or are powers of two, or small.
EXACT = {
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "IQ4_NL", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0", "Q1_0",
    "Q2_0",
}  # fmt: skip
ROUNDING = 2.0**-11  # of a scale or a minimum, relative
Floats = NDArray[np.float64]


def pack(tensors: list[Tensor], **options: int) -> PackedMatrix:
    return repack(tensors, THREADS, **options)


def random(name: str, rows: int, columns: int | None = None, seed: int = 7) -> Tensor:
    """By default the fewest columns with a last chunk of 256 that is not full, where the block type allows it."""
    kind = ALL_TYPES[name]
    return random_tensor(
        kind, (rows, columns or max(288, 2 * kind.block_size) // kind.block_size * kind.block_size), seed
    )


def code_by_hand(w: PackedMatrix, row: int, column: int) -> int:
    """The code of one weight, read from the planes one by one."""
    group, lane, block, quad, byte = row // 16, row % 16, column // 32, column % 32 // 4, column % 4
    planes = w.layout.planes
    lines_before = {8: 8, 4: 4, 2: 2, 1: 1}
    line = (group * (w.columns // 32) + block) * sum(lines_before[p] for p in planes)
    code = place = 0
    for bits in planes:
        if bits == 8:
            here, shift = line + quad, 0
        elif bits == 4:
            here, shift = line + quad % 4, 4 * (quad // 4)
        elif bits == 2:
            here, shift = line + quad % 2, 2 * (quad // 2)
        else:
            here, shift = line, quad
        code |= (int(w.packed[here * 64 + lane * 4 + byte]) >> shift & ((1 << bits) - 1)) << place
        line, place = line + lines_before[bits], place + bits
    return code


def half_at(array: NDArray[np.uint16], index: int) -> float:
    return float(array[index : index + 1].view(np.float16)[0])


def parts_by_hand(w: PackedMatrix, row: int, column: int) -> tuple[float, float]:
    """scale * (value - offset) and the minimum of one weight."""
    layout, group, lane = w.layout, row // 16, row % 16
    code = code_by_hand(w, row, column)
    value = code if layout.table is None else layout.table[code]
    if layout.planes == (8,):
        value = (code - w.bias + 128) % 256 - 128
    if layout.columns_per_scale == 16:
        index = ((group * (w.columns // 32) + column // 32) * 2 + column % 32 // 16) * 16 + lane
    else:
        index = (group * (w.columns // layout.columns_per_scale) + column // layout.columns_per_scale) * 16 + lane
    d, m = half_at(w.scales, index), half_at(w.minima, index) if layout.has_minimum else 0.0
    if w.nibble_scales is not None:
        small = int(w.nibble_scales[(group * (w.columns // 16) + column // 16) * 16 + lane])
        d, m = d * (small & 15), m * (small >> 4)
    return d * w.unit * (value - layout.offset), m * w.unit


def by_hand(w: PackedMatrix) -> tuple[Floats, Floats]:
    """Both parts of all weights."""
    parts = np.array([parts_by_hand(w, row, column) for row in range(w.rows) for column in range(w.columns)])
    return parts[:, 0].reshape(w.rows, w.columns), parts[:, 1].reshape(w.rows, w.columns)


def assert_close(name: str, got: NDArray[np.float32], want: NDArray[np.float32]) -> None:
    """Twice the stated error of a scale and of a minimum, as the sum of two such parts may be smaller than both."""
    if name in EXACT:
        np.testing.assert_array_equal(got, want)
    else:
        assert np.abs(got - want).max() <= ROUNDING * np.abs(want).max() * 3


@pytest.mark.parametrize("name", QUANTIZED)
def test_repack_puts_each_weight_where_the_layout_says(name: str) -> None:
    tensor = random(name, 17)
    w, want = pack([tensor]), tensor.dequantize()
    product, minimum = by_hand(w)
    error = np.abs(product + minimum - want)
    slack = 2.0**-22 * np.abs(want)  # float32 sums in the decoder
    assert (error <= ROUNDING * (np.abs(product) + np.abs(minimum)) + slack).all()
    if name in EXACT:
        np.testing.assert_array_equal((product + minimum).astype(np.float32), want)
    np.testing.assert_allclose(dequantize_rows(w), product + minimum, rtol=1e-6, atol=2.0**-22 * np.abs(want).max())


@pytest.mark.parametrize("rows", [1, 7, 16, 33])
@pytest.mark.parametrize("name", list(LAYOUT_BY_TYPE))
def test_repack_keeps_the_values_of_the_file(name: str, rows: int) -> None:
    tensor = random(name, rows)
    w = pack([tensor])
    assert (w.rows, w.columns) == tensor.shape
    if name in NUMBERS:
        np.testing.assert_array_equal(dequantize_rows(w), tensor.dequantize())
    else:
        assert_close(name, dequantize_rows(w), tensor.dequantize())


@pytest.mark.parametrize("name", NUMBERS)
def test_repack_of_floats_interleaves_16_rows(name: str) -> None:
    tensor = random(name, 18, 5)
    w = pack([tensor])
    values = tensor.data.view(w.packed.dtype).reshape(18, 5)
    for row in range(18):
        for column in range(5):
            assert w.packed[(row // 16 * 5 + column) * 16 + row % 16] == values[row, column]


@pytest.mark.parametrize("name", ["F32", "BF16", "Q8_0"])
def test_repack_copies(name: str) -> None:
    """A synthetic checkpoint relies on it: its matrices share bytes, and kernels must not find them in a cache."""
    tensor = random(name, 32, 512)
    packed = pack([tensor])
    assert not any(np.shares_memory(array, tensor.data) for array in (packed.packed, packed.scales))


@pytest.mark.parametrize("name", list(LAYOUT_BY_TYPE))
def test_repack_pads_rows_with_zero_scales(name: str) -> None:
    w = pack([random(name, 18)])
    scales = w.packed if name in NUMBERS else w.scales
    assert not scales.reshape(2, -1, 16)[1, :, 2:].any()
    if w.layout.has_minimum:
        assert not w.minima.reshape(2, -1, 16)[1, :, 2:].any()


@pytest.mark.parametrize(
    "names",
    [
        ("Q4_0",) * 3,
        ("Q4_1", "Q4_K", "Q4_1"),
        ("IQ4_NL", "IQ4_XS", "IQ4_NL"),
        ("Q2_K",) * 3,
        ("BF16",) * 3,
        ("Q4_1", "INT4_ZP", "Q4_1"),
    ],
)
def test_repack_stacks_tensors_of_one_layout(names: tuple[str, ...]) -> None:
    """None of them begins at a group of 16 but the first."""
    columns = 512 if "K" in "".join(names) or "XS" in "".join(names) else 96
    tensors = [random(name, rows, columns, seed=rows) for name, rows in zip(names, (7, 30, 1), strict=True)]
    w, at = pack(tensors), 0
    for name, tensor in zip(names, tensors, strict=True):
        end = at + tensor.shape[0]
        got = dequantize_rows(w, np.arange(at, end))
        if name in EXACT or name in NUMBERS:
            np.testing.assert_array_equal(got, tensor.dequantize())
        else:
            assert_close(name, got, tensor.dequantize())
        at = end
    assert w.rows == at == 38


def test_repack_of_two_layouts_raises() -> None:
    with pytest.raises(AssertionError, match="one layout"):
        pack([random("Q4_0", 16, 256), random("Q4_1", 16, 256)])


@pytest.mark.parametrize("name", list(LAYOUT_BY_TYPE))
def test_packed_size_stays_near_that_of_the_file(name: str) -> None:
    tensor = random(name, 64, 1024)
    most = 2.5 if name.startswith(("IQ1", "IQ2", "IQ3")) else 1.25
    assert pack([tensor]).nbytes <= most * tensor.nbytes


@pytest.mark.parametrize("name", list(LAYOUT_BY_TYPE))
def test_dequantize_rows_with_index_returns_those_rows(name: str) -> None:
    w = pack([random(name, 33)])
    index = np.array([32, 0, 17, 17])
    np.testing.assert_array_equal(dequantize_rows(w, index), dequantize_rows(w)[index])


def test_repack_copies_and_aligns_to_cache_lines() -> None:
    for name in LAYOUT_BY_TYPE:
        tensor = random(name, 20)
        w = pack([tensor])
        before = dequantize_rows(w)
        tensor.data[:] = 0
        np.testing.assert_array_equal(dequantize_rows(w), before)
        assert all(array.ctypes.data % 64 == 0 for array in (w.packed, w.scales, w.minima) if array.size)


@pytest.mark.parametrize("name", ["F32", "F16", "Q4_0", "Q6_K", "MXFP4", "IQ2_XS"])
def test_repack_of_unaligned_read_only_bytes_is_equal(name: str) -> None:
    tensor = random(name, 17)
    moved = np.empty(tensor.nbytes + 1, np.uint8)[1:]
    moved[:] = tensor.data
    moved.flags.writeable = False
    np.testing.assert_array_equal(dequantize_rows(pack([replace(tensor, data=moved)])), dequantize_rows(pack([tensor])))


@pytest.mark.parametrize("name", ["F16", "Q8_0", "Q6_K"])
def test_repack_of_large_tensor_with_threads_is_equal(name: str) -> None:
    tensor = random(name, 1700, 1024)
    assert tensor.nbytes > MIN_BYTES_PER_THREAD
    w = pack([random(name, 5, 1024), tensor])
    got, want = dequantize_rows(w, np.arange(5, 1705)), tensor.dequantize()
    np.testing.assert_allclose(got, want, rtol=0 if name != "Q6_K" else ROUNDING, atol=0)


@pytest.mark.parametrize("name", ["Q8_0", "Q8_1", "Q8_K"])
def test_repack_of_int8_adds_the_weight_bias(name: str) -> None:
    tensor = random(name, 3)
    plain, moved = pack([tensor], bias=0), pack([tensor], bias=128)
    rows = (slice(None), slice(0, 3))  # what lies in the rows of padding is multiplied by zero
    lines = [w.packed.reshape(-1, 16, 4)[rows] for w in (plain, moved)]
    np.testing.assert_array_equal(lines[0] ^ 128, lines[1])
    np.testing.assert_array_equal(dequantize_rows(plain), dequantize_rows(moved))


@pytest.mark.parametrize("name", [name for name in QUANTIZED if name != "Q2_K"])
def test_repack_unit_brings_the_largest_scale_to_the_float16_range(name: str) -> None:
    w = pack([random(name, 33)])
    largest = max(np.abs(a.view(np.float16)).max(initial=0) for a in (w.scales, w.minima))
    least = 2**14 // 32 if name in ("Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS") else 2**14  # random small integers
    assert least <= largest <= 2**15
    assert np.frexp(w.unit)[0] == 0.5, "the unit is a power of two"


def test_repack_of_wide_scale_range_zeroes_negligible_scales() -> None:
    """Powers of two from 2**-128 to 2**122: exact down to 2**-38 of the largest, then zero."""
    tensor = random("MXFP4", 1, 32 * 251)
    tensor.data.reshape(-1, 17)[:, 0] = np.arange(251)
    for most in (251, 64, 1):
        part = replace(tensor, shape=(1, 32 * most), data=tensor.data[: 17 * most])
        got, want = dequantize_rows(pack([part])), part.dequantize()
        kept = np.repeat(np.arange(most) >= most - 39, 32)
        np.testing.assert_array_equal(got[:, kept], want[:, kept])
        assert not got[:, ~kept].any()


def test_repack_rounds_small_scales_to_a_fraction_of_the_largest() -> None:
    tensor = random("Q8_K", 1, 256 * 30)
    d = np.float32(0.7) ** np.arange(0, 90, 3)
    tensor.data.reshape(-1, 292)[:, :4] = d.astype("<f4").view(np.uint8).reshape(-1, 4)
    w = pack([tensor])
    stored = w.scales.reshape(30, 16)[:, 0].view(np.float16).astype(np.float64) * w.unit
    error = np.abs(stored - d)
    normal = d >= 2.0**-14 * w.unit
    assert (error[normal] <= ROUNDING * d[normal]).all()
    assert (error <= np.maximum(ROUNDING * d, 2.0**-25 * w.unit)).all()
    assert not normal.all()


def test_repack_of_zeros_is_zero() -> None:
    for name in QUANTIZED:
        kind = ALL_TYPES[name]
        w = pack([Tensor("zeros", kind, (2, 256), np.zeros(2 * kind.row_bytes(256), np.uint8))])
        np.testing.assert_allclose(dequantize_rows(w), 0, atol=2.0**-127)  # MXFP4's smallest scale is not zero


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q6_K", "Q8_K", "IQ3_S"])
def test_repack_with_nan_scale_raises_with_tensor_name(name: str) -> None:
    tensor = random(name, 20, 512)
    tensor.data[:] = 0xFF  # every float of 16 or 32 bits is then NaN
    with pytest.raises(ModelFileError, match=r"'random'.*NaN"):
        pack([tensor])


def test_repack_of_integer_type_raises_with_tensor_name() -> None:
    for name in ALL_TYPES.keys() - LAYOUT_BY_TYPE.keys():
        tensor = Tensor("blk.0.odd", ALL_TYPES[name], (1, 32), np.zeros(ALL_TYPES[name].row_bytes(32), np.uint8))
        with pytest.raises(UnsupportedModelError, match=rf"'blk\.0\.odd': {name} weights"):
            pack([tensor])


def test_equivalent_block_types_share_a_layout() -> None:
    assert LAYOUT_BY_TYPE["Q4_1"] == LAYOUT_BY_TYPE["Q4_K"]
    assert LAYOUT_BY_TYPE["IQ4_NL"] == LAYOUT_BY_TYPE["IQ4_XS"]
    assert len(set(LAYOUTS)) == len(LAYOUTS) < len(LAYOUT_BY_TYPE)
    assert set(ALL_TYPES) - set(LAYOUT_BY_TYPE) == {"I8", "I16", "I32", "I64", "F64"}


@pytest.mark.parametrize("name", ["Q4_K", "BF16"])
def test_repack_of_a_mapped_file_in_slices_has_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tensors, of which the second starts in the middle of a group of rows and is released slice by slice."""
    tensors = [random(name, 24, 512), random(name, 200, 512, seed=8)]
    whole = pack(tensors)
    file = tmp_path / "weights"
    file.write_bytes(b"".join(tensor.data.tobytes() for tensor in tensors))
    mapped = np.frombuffer(map_file(file, 1), np.uint8)
    in_file = [
        replace(tensors[0], data=mapped[: tensors[0].nbytes]),
        replace(tensors[1], data=mapped[tensors[0].nbytes :]),
    ]
    monkeypatch.setattr(repack_module, "MAX_SLICE_BYTES", tensors[1].nbytes // 5)
    in_slices = pack(in_file)
    for array in ("packed", "scales", "minima"):
        np.testing.assert_array_equal(getattr(in_slices, array), getattr(whole, array))
    assert in_slices.unit == whole.unit


def test_small_arrays_share_a_block_until_the_last_is_freed() -> None:
    memory = WeightMemory()
    arrays = [memory.zeros(size, np.uint8) for size in (1_000, 3_000)]
    assert arrays[0].base is arrays[1].base
    assert not np.shares_memory(*arrays)
    block = weakref.ref(arrays[0].base)
    arrays[0][:] = 255
    assert not arrays.pop().any()
    assert block() is not None
    arrays.clear()
    assert block() is None
    assert not memory.zeros(1_000, np.uint8).any(), "zeros again, in a block of its own"


def test_full_block_is_followed_by_another_and_large_arrays_have_their_own() -> None:
    memory, size = WeightMemory(), HUGE_ARRAY_BYTES - 1
    arrays = [memory.zeros(size, np.uint8) for _ in range(BLOCK_BYTES // size + 1)]
    assert [array.base is arrays[0].base for array in arrays] == [True] * (len(arrays) - 1) + [False]
    large = memory.zeros(HUGE_ARRAY_BYTES, np.uint8)
    assert large.base is None
    assert not any(np.shares_memory(large, array) for array in arrays)
