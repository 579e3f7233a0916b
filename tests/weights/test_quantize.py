"""Encoders: simple types bytewise equal to the gguf package, K types no worse than llama.cpp's."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llm_worker_rbee.errors import ModelFileError, UnsupportedModelError
from llm_worker_rbee.weights import Tensor, open_checkpoint, quantize
from llm_worker_rbee.weights.quantize import ENCODERS, TensorJob, pack_bits, quantize_in_memory, run_jobs
from llm_worker_rbee.weights.quants import BLOCK_TYPES, dequantize, find_nonfinite_block
from llm_worker_rbee.weights.quants.decoders import unpack_bits

Floats = NDArray[np.float32]
SIMPLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")
REAL = "blk.7.ffn_down.weight"
# The root mean square error of llama.cpp's own quantizer over the standard deviation of the data below. Made with
# `ggml_quantize_chunk` of libggml-base 0.25.3 (llama.cpp of 2026-08), no importance matrix. The weights of the default
# model were of Q4_1, which Q4_K comes close to.
LLAMA_CPP = {
    "normal": {"Q8_0": 0.00534, "Q4_0": 0.08580, "Q4_1": 0.07817, "Q5_0": 0.04267, "Q5_1": 0.03786,
               "Q4_K": 0.07139, "Q5_K": 0.03608, "Q6_K": 0.01772},
    "heavy": {"Q8_0": 0.00853, "Q4_0": 0.12576, "Q4_1": 0.10099, "Q5_0": 0.06512, "Q5_1": 0.04862,
              "Q4_K": 0.09172, "Q5_K": 0.04722, "Q6_K": 0.02553},
    "real": {"Q8_0": 0.00544, "Q4_0": 0.08538, "Q5_0": 0.04336, "Q5_1": 0.04561,
             "Q4_K": 0.01823, "Q5_K": 0.01917, "Q6_K": 0.01762},
}  # fmt: skip
CASES = [(name, kind) for name, kinds in LLAMA_CPP.items() for kind in kinds]


@pytest.fixture(scope="module")
def samples(default_model: Path) -> dict[str, Floats]:
    rng = np.random.default_rng(20240)
    return {
        "normal": (rng.standard_normal((256, 1024)) * 0.02).astype(np.float32),
        "heavy": (rng.standard_t(3, (256, 1024)) * 0.02).astype(np.float32),
        "real": open_checkpoint(default_model).tensors[REAL].dequantize(),
    }


def round_trip(kind: str, values: Floats) -> Floats:
    return dequantize(BLOCK_TYPES[kind], quantize.quantize(BLOCK_TYPES[kind], values), values.shape)


def miss(kind: str, values: Floats) -> float:
    return float(np.sqrt(np.mean(np.square((round_trip(kind, values) - values).astype(np.float64)))))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_quantize_error_is_at_most_llama_cpp_error(name: str, kind: str, samples: dict[str, Floats]) -> None:
    values = samples[name]
    relative = miss(kind, values) / float(values.std())
    assert relative < 1.10 * LLAMA_CPP[name][kind]
    assert relative > 0.5 * LLAMA_CPP[name][kind]  # the figures belong to these data


def hard_values() -> Floats:
    """Return blocks that are zero, constant, of one sign, tied in magnitude, or of wide range."""
    rng = np.random.default_rng(5)
    normal = rng.standard_normal((40, 256)).astype(np.float32)
    tied = np.where(rng.random((8, 256)) < 0.5, -1, 1).astype(np.float32)
    constant = np.repeat(np.array([[0.0], [1.0], [-1.0], [3e-5], [-6e4], [6e4]], np.float32), 256, axis=1)
    powers = (normal * 10.0 ** rng.integers(-4, 4, normal.shape)).astype(np.float32)
    whole = rng.integers(-8, 8, (8, 256)).astype(np.float32)
    one = np.zeros((2, 256), np.float32)
    one[0, 100], one[1, 7] = 5.0, -5.0
    return np.concatenate([normal, np.abs(normal), -np.abs(normal), tied, constant, powers, whole, whole + 0.5, one])


@pytest.mark.parametrize("kind", SIMPLE)
def test_quantize_simple_types_equal_gguf_package(kind: str) -> None:
    values = hard_values()
    with np.errstate(all="ignore"):
        expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    ours = quantize.quantize(BLOCK_TYPES[kind], values)
    assert ours.dtype == np.uint8
    assert np.array_equal(ours, np.ascontiguousarray(expected).view(np.uint8).reshape(-1))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.floats(-1000, 1000, width=32), min_size=32, max_size=32), st.sampled_from(SIMPLE))
def test_quantize_simple_types_any_block_equals_gguf_package(block: list[float], kind: str) -> None:
    values = np.array([block], np.float32)
    values[np.abs(values) < 1e-30] = 0  # scales without a reciprocal: the package warns, this code does not
    with np.errstate(all="ignore"):
        expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    ours = quantize.quantize(BLOCK_TYPES[kind], values)
    assert np.array_equal(ours, np.ascontiguousarray(expected).view(np.uint8).reshape(-1))


# Each group of a K type is at most half a step off: its range over the steps, with some room for scales of 6 or 8 bits.
STEPS = {"Q4_K": (32, 15), "Q5_K": (32, 31), "Q6_K": (16, 31)}


@pytest.mark.parametrize("kind", K_TYPES)
def test_quantize_k_types_hard_blocks_stay_within_error(kind: str) -> None:
    values = hard_values()
    data = quantize.quantize(BLOCK_TYPES[kind], values)
    assert find_nonfinite_block(BLOCK_TYPES[kind], data) is None
    made = dequantize(BLOCK_TYPES[kind], data, values.shape)
    size, steps = STEPS[kind]
    groups, error = values.reshape(-1, size), np.abs(made - values).reshape(-1, size)
    around_zero = np.maximum(groups.max(1), 0) - np.minimum(groups.min(1), 0)
    span = np.abs(groups).max(1) if kind == "Q6_K" else around_zero
    coarsest = np.repeat(span.reshape(len(values), -1).max(1), 256 // size)  # the scale of the whole super-block
    assert (error.max(1) <= 0.75 * span / steps + coarsest / 63 + 1e-6).all()
    zero = ~values.any(1)
    assert zero.any()
    assert (made[zero] == 0).all()


@pytest.mark.parametrize("kind", K_TYPES)
def test_quantize_dequantized_values_changes_little(kind: str, samples: dict[str, Floats]) -> None:
    """Requantizing dequantized values loses a small part of the first loss."""
    once = round_trip(kind, samples["normal"])
    assert miss(kind, once) < 0.35 * miss(kind, samples["normal"])


@pytest.mark.parametrize("kind", ENCODERS)
def test_quantize_block_does_not_depend_on_neighbours(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = hard_values()
    whole = quantize.quantize(BLOCK_TYPES[kind], values)
    rows = [quantize.quantize(BLOCK_TYPES[kind], row[None]) for row in values]
    assert np.array_equal(whole, np.concatenate(rows))
    monkeypatch.setattr(quantize, "SLAB_VALUES", 768)  # a boundary within the matrix
    assert np.array_equal(whole, quantize.quantize(BLOCK_TYPES[kind], values))
    assert np.array_equal(whole, quantize.quantize(BLOCK_TYPES[kind], np.asfortranarray(values)))
    assert quantize.quantize(BLOCK_TYPES[kind], values[:0]).shape == (0,)


@pytest.mark.parametrize(("width", "bits"), [(16, 4), (32, 4), (64, 4), (32, 2), (32, 1), (4, 4)])
def test_pack_bits_inverts_unpack_bits(width: int, bits: int, rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, (7, 2 * width), np.uint8)
    assert np.array_equal(pack_bits(unpack_bits(data, width, bits), width, bits), data)


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantize_non_finite_value_raises(kind: str, bad: float) -> None:
    values = np.ones((2, 256), np.float32)
    values[1, 3] = bad
    with pytest.raises(ModelFileError, match=rf"^a value of {bad:g} does not fit into {kind}$"):
        quantize.quantize(BLOCK_TYPES[kind], values)


def test_quantize_too_large_value_or_unknown_type_raises() -> None:
    values = np.full((1, 256), -7e4, np.float32)
    assert (round_trip("BF16", values) < -6.9e4).all()
    with pytest.raises(ModelFileError, match="a value of -70000 does not fit into Q6_K"):
        quantize.quantize(BLOCK_TYPES["Q6_K"], values)
    with pytest.raises(UnsupportedModelError, match="IQ4_NL can be read but not written: use one of F32, F16"):
        quantize.quantize(BLOCK_TYPES["IQ4_NL"], values)
    with pytest.raises(ModelFileError, match="a row of 32 values is not a multiple of the Q4_K block of 256"):
        quantize.quantize(BLOCK_TYPES["Q4_K"], values[:, :32])


def tensor(kind: str, values: Floats, name: str = "w") -> Tensor:
    return Tensor(name, BLOCK_TYPES[kind], values.shape, quantize.quantize(BLOCK_TYPES[kind], values))


@pytest.mark.parametrize("threads", [1, 3])
def test_run_jobs_any_thread_count_keeps_order(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "PIECE_VALUES", 1000)  # rows of 256: three to a piece
    values = hard_values()
    order = np.random.default_rng(3).permutation(len(values))
    work = [
        TensorJob("plain", tensor("F16", values / 10), BLOCK_TYPES["Q5_K"]),
        TensorJob("turned", tensor("F32", values), BLOCK_TYPES["Q8_0"], order),
        TensorJob("same", tensor("Q8_0", values), BLOCK_TYPES["Q8_0"], order),
        TensorJob("vector", tensor("BF16", values[0]), BLOCK_TYPES["F32"], np.arange(256)[::-1].copy(), offset=1.0),
    ]
    reports: list[tuple[str, int, int | None]] = []
    made = quantize_in_memory(work, threads, lambda *step: reports.append(step))
    assert [t.shape for t in made.values()] == [values.shape, values.shape, values.shape, (256,)]
    halves = (values / 10).astype(np.float16).astype(np.float32)
    assert np.array_equal(made["plain"].data, quantize.quantize(BLOCK_TYPES["Q5_K"], halves))
    assert np.array_equal(made["turned"].data, quantize.quantize(BLOCK_TYPES["Q8_0"], values[order]))
    assert np.array_equal(made["same"].data, made["turned"].data)
    assert np.array_equal(made["vector"].dequantize(), round_trip("BF16", values[0])[::-1] + np.float32(1))
    assert reports[-1] == ("quantizing", sum(job.nbytes for job in work), sum(job.nbytes for job in work))
    assert [done for _, done, _ in reports] == sorted(done for _, done, _ in reports)


def test_run_jobs_error_names_the_tensor() -> None:
    source = tensor("F32", np.full((4, 32), 1e6, np.float32), "blk.0.ffn_up.weight")
    with pytest.raises(ModelFileError, match=r"^tensor 'blk.0.ffn_up.weight': a value of 1e\+06 does not fit into F16"):
        list(run_jobs([TensorJob(source.name, source, BLOCK_TYPES["F16"])], 2))
