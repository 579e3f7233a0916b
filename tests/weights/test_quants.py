"""Every block type against the gguf package, or against a scalar decoder written from the format's definition."""

import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from llm_worker_rbee.errors import ModelFileError
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.quants import BLOCK_TYPES, BY_ID, REMOVED_TYPES, BlockType, dequantize
from llm_worker_rbee.weights.quants import codebooks as codebooks

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# Where the float16 (float32 for Q8_K) scales of a block lie. IQ1_M scatters its scale, see `finite`.
SCALES = {
    "F16": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q8_1": [0], "Q2_K": [80, 82],
    "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ3_XXS": [0],
    "IQ1_S": [0], "IQ4_NL": [0], "IQ3_S": [0], "IQ2_S": [0], "IQ4_XS": [0], "TQ1_0": [52], "TQ2_0": [64], "Q1_0": [0],
    "Q2_0": [0], "BF16": [0], "Q8_K": [2], "F32": [2], "F64": [6],
}  # fmt: skip


def random_blocks(kind: BlockType, blocks: int, seed: int = 0) -> Bytes:
    return np.random.default_rng([seed, kind.id]).integers(0, 256, (blocks, kind.block_bytes), dtype=np.uint8)


def finite(kind: BlockType, blocks: Bytes) -> Bytes:
    """Clear an exponent bit of each scale, so that neither it nor a value is Inf or NaN."""
    for start in SCALES.get(kind.name, []):
        blocks[:, start + 1] &= 0xBF if kind.name not in ("BF16", "Q8_K", "F32", "F64") else 0xCF
    if kind.name == "IQ1_M":
        blocks[:, 55] &= 0xBF
    if kind.name == "MXFP4":
        blocks[:, 0] &= 0xBF
    return blocks


def as_bits(values: Floats) -> NDArray[np.uint32]:
    assert values.dtype == np.float32
    return np.ascontiguousarray(values).view(np.uint32)


def in_gguf(name: str) -> bool:
    try:
        kind = gguf.GGMLQuantizationType[name]
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (KeyError, NotImplementedError):
        return False
    return True


KNOWN = [name for name in BLOCK_TYPES if in_gguf(name)]


def f16(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def scalar_q8_1(block: bytes) -> Iterator[float]:
    for i in range(32):
        yield f16(block, 0) * struct.unpack_from("<b", block, 4 + i)[0]


def scalar_q8_k(block: bytes) -> Iterator[float]:
    for i in range(256):
        yield struct.unpack_from("<f", block)[0] * struct.unpack_from("<b", block, 4 + i)[0]


def scalar_q1_0(block: bytes) -> Iterator[float]:
    for i in range(128):
        yield f16(block, 0) if block[2 + i // 8] >> i % 8 & 1 else -f16(block, 0)


def scalar_q2_0(block: bytes) -> Iterator[float]:
    for i in range(64):
        yield f16(block, 0) * ((block[2 + i // 4] >> 2 * (i % 4) & 3) - 1)


def scalar_nvfp4(block: bytes) -> Iterator[float]:
    magnitudes = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    for i in range(64):
        group, place = divmod(i, 16)
        exponent, mantissa = block[group] >> 3 & 15, block[group] & 7
        scale = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else mantissa * 2.0**-9
        nibble = block[4 + 8 * group + place % 8] >> (4 if place >= 8 else 0) & 15
        value = magnitudes[nibble & 7] * (1 - 2 * (nibble >> 3))
        yield 0.0 if block[group] == 0x7F else scale * value


def scalar_mxfp4(block: bytes) -> Iterator[float]:
    magnitudes = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    for i in range(32):
        nibble = block[1 + i % 16] >> (4 if i >= 16 else 0) & 15
        yield 2.0 ** (block[0] - 127) * magnitudes[nibble & 7] * (1 - 2 * (nibble >> 3))


def number(form: str) -> Callable[[bytes], Iterator[float]]:
    return lambda block: iter([float(struct.unpack(form, block)[0])])


SCALAR = {
    "Q8_1": scalar_q8_1,
    "Q8_K": scalar_q8_k,
    "Q1_0": scalar_q1_0,
    "Q2_0": scalar_q2_0,
    "NVFP4": scalar_nvfp4,
    "MXFP4": scalar_mxfp4,
    "I8": number("<b"),
    "I16": number("<h"),
    "I32": number("<i"),
    "I64": number("<q"),
    "F64": number("<d"),
}


def test_block_types_all_have_an_oracle() -> None:
    assert set(KNOWN) | set(SCALAR) == set(BLOCK_TYPES)


@pytest.mark.parametrize("name", KNOWN)
def test_dequantize_equals_gguf_package_bitwise(name: str) -> None:
    kind, theirs = BLOCK_TYPES[name], gguf.GGMLQuantizationType[name]
    assert (kind.id, kind.block_size, kind.block_bytes) == (theirs.value, *gguf.GGML_QUANT_SIZES[theirs])
    data = finite(kind, random_blocks(kind, 35 * 3)).reshape(35, 3 * kind.block_bytes)
    expected = gguf.quants.dequantize(data, theirs)
    assert np.isfinite(expected).all()
    assert len(np.unique(expected)) > 2
    ours = dequantize(kind, data, (5, 7, 3 * kind.block_size))
    np.testing.assert_array_equal(as_bits(ours), as_bits(expected.reshape(ours.shape)))


@pytest.mark.parametrize("name", KNOWN)
def test_dequantize_non_finite_scale_equals_gguf_without_warning(name: str) -> None:
    kind = BLOCK_TYPES[name]
    data = random_blocks(kind, 64)
    for start in SCALES.get(name, []):
        data[:32, start + 1] |= 0x7C  # float16: Inf or NaN
        data[:8, start] = 0
        data[:8, start + 1] = 0xFC
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = kind.decode(data)
    np.testing.assert_array_equal(ours, expected.reshape(ours.shape))


@pytest.mark.parametrize("name", SCALAR)
def test_dequantize_equals_scalar_definition(name: str) -> None:
    kind = BLOCK_TYPES[name]
    data = finite(kind, random_blocks(kind, 40))
    if name == "NVFP4":
        data[0, :4] = [0, 0x7F, 0x01, 0x7E]
    if name == "MXFP4":
        data[:4, 0] = [0, 1, 2, 253]
        data[4:, 0] &= 0x7F
    with np.errstate(over="ignore"):  # float64 may exceed float32's range
        expected = np.array([list(SCALAR[name](block.tobytes())) for block in data]).astype(np.float32)
    assert expected.shape == (40, kind.block_size)
    np.testing.assert_array_equal(kind.decode(data), expected)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_dequantize_one_block_no_block_and_unaligned_view(name: str) -> None:
    kind = BLOCK_TYPES[name]
    data = finite(kind, random_blocks(kind, 2))
    whole = kind.decode(data)
    assert whole.shape == (2, kind.block_size)
    assert whole.dtype == np.float32
    mapped = np.frombuffer(b"x" + data.tobytes(), np.uint8)[1:]  # read-only, at an odd address
    again = dequantize(kind, mapped, (2 * kind.block_size,))
    assert again.flags.aligned
    np.testing.assert_array_equal(as_bits(again), as_bits(whole.reshape(-1)))
    np.testing.assert_array_equal(as_bits(kind.decode(data[1:])), as_bits(whole[1:]))
    assert dequantize(kind, data[:0], (0, kind.block_size)).shape == (0, kind.block_size)
    assert dequantize(kind, data[:0], (4, 0)).shape == (4, 0)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_dequantize_does_not_write_its_input(name: str) -> None:
    kind = BLOCK_TYPES[name]
    data = random_blocks(kind, 3)
    before = data.copy()
    kind.decode(data)
    np.testing.assert_array_equal(data, before)


def test_dequantize_strided_input_and_scalar_shape() -> None:
    kind = BLOCK_TYPES["Q4_K"]
    data = finite(kind, random_blocks(kind, 8))
    np.testing.assert_array_equal(dequantize(kind, data[::2], (4, 256)), kind.decode(data)[::2])
    number = np.frombuffer(struct.pack("<f", 1.5), np.uint8)
    assert dequantize(BLOCK_TYPES["F32"], number, ()) == np.float32(1.5)


def test_dequantize_f32_returns_a_view() -> None:
    data = np.zeros(16, np.uint8)
    assert np.shares_memory(dequantize(BLOCK_TYPES["F32"], data, (2, 2)), data)


@pytest.mark.parametrize(("bytes_given", "shape"), [(17, (32,)), (19, (32,)), (0, (32,)), (18, (33,)), (36, (2, 16))])
def test_dequantize_wrong_size_raises(bytes_given: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelFileError, match="Q4_0"):
        dequantize(BLOCK_TYPES["Q4_0"], np.zeros(bytes_given, np.uint8), shape)


def test_row_bytes_of_whole_blocks() -> None:
    assert BLOCK_TYPES["Q4_K"].row_bytes(512) == 288
    assert BLOCK_TYPES["F16"].row_bytes(7) == 14
    assert BLOCK_TYPES["Q6_K"].row_bytes(0) == 0
    with pytest.raises(ModelFileError, match=r"300.*Q6_K.*256"):
        BLOCK_TYPES["Q6_K"].row_bytes(300)


def test_block_type_ids_are_complete() -> None:
    assert sorted([*BY_ID, *REMOVED_TYPES]) == list(range(43))
    assert all(BY_ID[kind.id] is kind and name == kind.name for name, kind in BLOCK_TYPES.items())
    assert REMOVED_TYPES[4] == "Q4_2"
    assert REMOVED_TYPES[33] == "Q4_0_8_8"
    assert REMOVED_TYPES[36] == "IQ4_NL_4_4"
    live = {kind.name: kind.value for kind in gguf.GGMLQuantizationType}
    assert all(live[name] == kind.id for name, kind in BLOCK_TYPES.items() if name in live)


@pytest.mark.parametrize("name", codebooks.GRIDS)
def test_grids_equal_gguf_package(name: str) -> None:
    theirs = getattr(gguf.quants, name)
    theirs.init_grid()
    np.testing.assert_array_equal(codebooks.grid(name), theirs.grid.reshape(theirs.grid_shape))


def test_small_tables_equal_gguf_package() -> None:
    every = np.arange(256, dtype=np.uint8)
    ksigns = np.frombuffer(gguf.quants.IQ2_XXS.ksigns, np.uint8)
    np.testing.assert_array_equal(codebooks.even_sign_rows(), codebooks.sign_rows()[ksigns])
    assert gguf.quants.IQ4_NL.kvalues == codebooks.IQ4_VALUES
    assert gguf.quants.MXFP4.kvalues == codebooks.FP4_VALUES
    np.testing.assert_array_equal(codebooks.e8m0_halves(), gguf.quants.MXFP4.e8m0_to_fp32_half(every))


@pytest.mark.parametrize("table", [codebooks.sign_rows, codebooks.even_sign_rows, lambda: codebooks.grid("IQ3_S")])
def test_shared_tables_are_read_only(table: Callable[[], Floats]) -> None:
    with pytest.raises(ValueError, match="read-only"):
        table()[0, 0] = 5


def test_dequantize_tensor_of_default_model(default_model: Path) -> None:
    """Decode a whole quantized tensor of the default model from the mapped file."""
    tensor = open_checkpoint(default_model).tensors["blk.0.attn_q.weight"]
    pack_bits = tensor.data.reshape(tensor.shape[0], tensor.kind.row_bytes(tensor.shape[1]))
    expected = gguf.quants.dequantize(pack_bits, gguf.GGMLQuantizationType[tensor.kind.name])
    ours = dequantize(tensor.kind, tensor.data, tensor.shape)
    np.testing.assert_array_equal(as_bits(ours), as_bits(expected))
    assert 0 < np.abs(ours).max() < 100
