"""Every type becomes planes or dense values that hold the same values: exactly, or with scales rounded once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llm_worker_rbee.backends.cuda import device, packed_weight, repack
from llm_worker_rbee.backends.cuda.kernels.compact_kinds import COMPACT_KINDS
from llm_worker_rbee.backends.cuda.unpack_blocks import REPACK_RULES
from llm_worker_rbee.weights import Tensor
from llm_worker_rbee.weights.quants import ALL_TYPES, BLOCK_TYPES
from tests.helpers.random_tensors import random_tensor

DEVICE = device.open_device(0)
ROUNDED = (
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q8_K",
    "INT4",
    "INT4_ZP",
    "INT8",
    "FP8",
    "NVFP4_F32",
)  # their scale becomes one float16
QUANTIZED = [name for name in ALL_TYPES if name in REPACK_RULES]


def values(*tensors: Tensor) -> np.ndarray:
    found = [packed_weight.dequantize(part) for part in repack.pack_weight(tensors, DEVICE).parts]
    return torch.cat(found).cpu().numpy()


@pytest.mark.parametrize("name", [*BLOCK_TYPES, *QUANTIZED[-5:]])
def test_pack_weight_keeps_values(name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several slabs, the last of them shorter; the product of a scale is off by at most 2**-11."""
    monkeypatch.setattr(repack, "SLAB_CODES", 512 * 3)
    tensor = random_tensor(name, 7, 512, rng)
    wanted = tensor.dequantize()
    if name not in ROUNDED:
        np.testing.assert_array_equal(values(tensor), wanted)
        return
    found = values(tensor)
    has_minima = name in ("Q4_K", "Q5_K", "INT4_ZP")  # also rounded, and a small value may be a difference
    assert 0 < np.abs(found - wanted).max() <= (2**-10 if has_minima else 2**-11) * np.abs(wanted).max()
    if not has_minima:
        np.testing.assert_allclose(found, wanted, rtol=2**-11)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K", "Q2_K", "Q3_K", "IQ2_XS", "IQ4_XS"])
@pytest.mark.parametrize("size", [2.0**-14, 3000.0])
def test_pack_weight_extreme_scales(name: str, size: float, rng: np.random.Generator) -> None:
    tensor = random_tensor(name, 3, 256, rng, size)
    wanted = tensor.dequantize()
    assert np.abs(values(tensor) - wanted).max() <= 2**-10 * np.abs(wanted).max()


@pytest.mark.parametrize("name", QUANTIZED)
def test_pack_weight_single_block(name: str, rng: np.random.Generator) -> None:
    """Axes of length one have odd strides."""
    tensor = random_tensor(name, 1, max(32, ALL_TYPES[name].block_size), rng)
    np.testing.assert_allclose(values(tensor), tensor.dequantize(), rtol=2**-10, atol=2**-10 * 64)


def test_pack_weight_constant_is_all_minimum() -> None:
    """Q4_1 of a constant: a scale of zero beside a minimum that must not overflow."""
    block = np.zeros(20, np.uint8)
    block[2:4] = np.array([3000.0], np.float16).view(np.uint8)
    tensor = Tensor("w", BLOCK_TYPES["Q4_1"], (1, 32), block)
    np.testing.assert_array_equal(values(tensor), np.full((1, 32), 3000.0))


def test_pack_weight_zeros(rng: np.random.Generator) -> None:
    tensor = random_tensor("Q6_K", 2, 256, rng)
    raw = tensor.rows.copy()
    raw[:, 208:] = 0
    np.testing.assert_array_equal(values(Tensor("w", tensor.kind, tensor.shape, raw.reshape(-1))), 0)


def test_pack_weight_joins_neighbours_of_one_kind(rng: np.random.Generator) -> None:
    names = ["Q4_K", "Q4_1", "Q6_K", "F16", "F16", "BF16"]
    tensors = [random_tensor(name, rows, 256, rng) for rows, name in enumerate(names, 2)]
    made = repack.pack_weight(tensors, DEVICE)
    assert [(part.kind, part.rows) for part in made.parts] == [
        ("q4m", 5), ("q6", 4), ("dense", 11), ("dense", 7)
    ]  # fmt: skip
    assert (made.rows, made.columns) == (27, 256)
    wanted = np.concatenate([t.dequantize() for t in tensors])
    np.testing.assert_allclose(values(*tensors), wanted, atol=2**-11 * np.abs(wanted).max())


@pytest.mark.parametrize("name", [name for name in BLOCK_TYPES if name not in ("I8", "I16")])
def test_packed_size_is_near_size_in_file(name: str, rng: np.random.Generator) -> None:
    """At most 1.15 times; I8 and I16, which no weights have, become float32."""
    tensor = random_tensor(name, 2, 256, rng)
    packed = repack.pack_weight([tensor], DEVICE)
    assert packed.nbytes <= 1.15 * tensor.nbytes
    if packed.parts[0].kind in COMPACT_KINDS:
        assert packed.nbytes * 8 == COMPACT_KINDS[packed.parts[0].kind].bits * 512


@pytest.mark.gpu
@pytest.mark.skipif(device.is_interpreted(), reason="needs a GPU")
def test_upload_through_pinned_buffers(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repack, "UPLOAD_CHUNK_BYTES", 1000)
    tensor = random_tensor("Q4_0", 64, 512, rng)
    np.testing.assert_array_equal(values(tensor), tensor.dequantize())
