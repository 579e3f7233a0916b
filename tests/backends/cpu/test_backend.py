"""The CPU kernels against the reference: every op, every weight type, odd sizes; the same bits alone and in a batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llm_worker_rbee.backends import OPS, cpu_info, reference, select_backend
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.cpu.packed_weight import LAYOUT_BY_TYPE
from llm_worker_rbee.backends.ops import AttentionParams, Batch, KVLayer, RopeTable
from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.weights.quants import ALL_TYPES
from tests.helpers.synthetic import random_tensor

cpu = CpuBackend()

ROOT = Path(__file__).parents[3]
FLOAT_TYPES = ("F32", "F16", "BF16")
Floats = NDArray[np.float32]


def normal(*shape: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def difference(found: Floats, wanted: Floats) -> float:
    """Of the largest value that was wanted."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def quantize_dequantize(x: Floats) -> Floats:
    """What the kernels make of activations: 127 steps a block of 32 columns."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    return (np.rint(blocks / scale) * scale).reshape(x.shape)


def test_cpu_backend_has_every_op_and_is_selected_by_name() -> None:
    assert isinstance(select_backend("cpu", "cpu"), CpuBackend)
    assert all(callable(getattr(cpu, name)) for name in OPS)


@pytest.mark.parametrize("name", LAYOUT_BY_TYPE)
def test_linear_of_every_type_agrees_with_reference(name: str) -> None:
    """33 rows fill no group of 16; 11 tokens are a full tile and a rest."""
    tensor = random_tensor(ALL_TYPES[name], (33, 512))
    weight, x = cpu.prepare([tensor]), normal(11, 512)
    found = cpu.linear(x, weight)
    truth = (x if name in (*FLOAT_TYPES, "FP8") else quantize_dequantize(x)) @ tensor.dequantize().T
    assert difference(found, truth) < (1e-5 if name in FLOAT_TYPES else 1e-3)
    assert difference(found, reference.linear(x, reference.prepare([tensor]))) < 2e-2
    alone = np.concatenate([cpu.linear(x[i : i + 1], weight) for i in range(11)])
    pairs = np.concatenate([cpu.linear(x[i : i + 3], weight) for i in range(0, 11, 3)])
    np.testing.assert_array_equal(alone, found)
    np.testing.assert_array_equal(pairs, found)


def test_linear_of_stacked_types_with_bias_equals_single_products() -> None:
    kinds = {"Q4_K": 48, "Q6_K": 32, "F16": 16}
    tensors = [random_tensor(ALL_TYPES[kind], (rows, 256), seed) for seed, (kind, rows) in enumerate(kinds.items())]
    x, bias = normal(5, 256), normal(96)
    found = cpu.linear(x, cpu.prepare(tensors), bias)
    apart = [cpu.linear(x, cpu.prepare([tensor])) for tensor in tensors]
    np.testing.assert_array_equal(found, np.concatenate(apart, axis=1) + bias)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q6_K", "F16"])
def test_embed_returns_scaled_rows(name: str) -> None:
    tensor, ids = random_tensor(ALL_TYPES[name], (40, 256)), np.array([0, 39, 7, 7])
    found = cpu.embed(cpu.prepare([tensor]), ids, 2.0)
    np.testing.assert_allclose(found, 2 * tensor.dequantize()[ids], rtol=1e-3, atol=1e-7)


def test_prepare_copies_the_tensor() -> None:
    tensor, x = random_tensor(ALL_TYPES["Q4_0"], (16, 64)), normal(1, 64)
    weight = cpu.prepare([tensor])
    before = cpu.linear(x, weight)
    tensor.data[:] = 0
    np.testing.assert_array_equal(cpu.linear(x, weight), before)


def test_linear_of_nan_or_infinity_is_not_finite() -> None:
    weight = cpu.prepare([random_tensor(ALL_TYPES["Q4_0"], (16, 64))])
    for bad in (np.nan, np.inf):
        x = normal(1, 64)
        x[0, 5] = bad
        assert not np.isfinite(cpu.linear(x, weight)).any()


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 100), (9, 576), (2, 7)])
def test_norms_agree_with_reference(rows: int, width: int) -> None:
    x, residual, weight = normal(rows, width), normal(rows, width, seed=2), normal(width, seed=3)
    np.testing.assert_allclose(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), rtol=2e-6, atol=1e-6)
    for found, wanted in zip(
        cpu.add_rms_norm(x, residual, weight, 1e-5), reference.add_rms_norm(x, residual, weight, 1e-5), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
@pytest.mark.parametrize(("rows", "half"), [(1, 48), (7, 50)])
def test_gated_agrees_with_reference(activation: str, rows: int, half: int) -> None:
    x = 4 * normal(rows, 2 * half)
    x[0, :3] = (-200, 200, 0)
    found, wanted = cpu.gated(x, activation), reference.gated(x, activation)
    # the reference adds 1 to a tanh near -1, which leaves few digits
    np.testing.assert_allclose(found, wanted, rtol=3e-6, atol=1e-6 if activation == "silu" else 2e-5)


def step(lengths: list[int], contexts: list[int], block: int = 16) -> tuple[Batch, int]:
    """Requests whose blocks lie mixed up in the cache."""
    counts = [-(-context // block) for context in contexts]
    order = np.random.default_rng(4).permutation(sum(counts))
    table = np.zeros((len(lengths), max(counts)), np.int64)
    first, positions, slots = 0, [], []
    for r, (length, context, count) in enumerate(zip(lengths, contexts, counts, strict=True)):
        table[r, :count] = order[first : first + count]
        first += count
        place = np.arange(context - length, context)
        positions.append(place)
        slots.append(table[r, place // block] * block + place % block)
    flat = np.concatenate(positions)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return (
        Batch(flat, flat, np.concatenate(slots), starts, np.array(contexts), table, starts[1:] - 1),
        sum(counts),
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "params"),
    [
        (4, 2, 64, AttentionParams(0.125)),
        (3, 3, 24, AttentionParams(0.3, window=5)),
        (8, 1, 128, AttentionParams(0.1, soft_cap=20.0)),
        (2, 2, 80, AttentionParams(0.2)),
    ],
)
def test_rope_store_and_attention_agree_with_reference(
    heads: int, kv_heads: int, dim: int, params: AttentionParams
) -> None:
    inv_freq = (1 / 10000 ** (np.arange(0, dim, 4, dtype=np.float32) / dim)).astype(np.float32)
    table = RopeTable(inv_freq, 1.2, 0.3 if params.window else 0.0, 8)
    whole, blocks = step([21, 40, 1], [21, 40, 1])
    last, _ = step([5, 1, 1], [21, 40, 1])
    outs: dict[str, list[Floats]] = {}
    for name, ops in (("cpu", cpu), ("reference", reference)):
        kv: KVLayer = ops.empty_kv(blocks, 16, kv_heads, dim)
        for batch in (whole, last):
            tokens = batch.ids.size
            q = normal(tokens, heads, dim, seed=tokens)
            k, v = normal(2, tokens, kv_heads, dim, seed=tokens + 1)
            turned = ops.rope_store(q, k, v, batch.positions, table, kv, batch.slot_mapping)
            outs.setdefault(name, []).extend([np.array(turned), ops.attention(turned, kv, batch, params)])
    for found, wanted in zip(outs["cpu"], outs["reference"], strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5)


def test_isa_current_with_unknown_name_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_info.ISA_VARIABLE, "abacus")
    with pytest.raises(InvalidRequestError, match="'abacus' is unknown: use one of"):
        cpu_info.current_isa()
    monkeypatch.setenv(cpu_info.ISA_VARIABLE, "portable")
    assert cpu_info.current_isa() == "portable"


FORCED = """
import numpy as np
from llm_worker_rbee.backends.cpu import CpuBackend
cpu = CpuBackend()
from llm_worker_rbee.backends.cpu.kernels.dot_int8 import ISA
from tests.helpers.synthetic import random_tensor
from llm_worker_rbee.weights.quants import ALL_TYPES
x = np.random.default_rng(1).standard_normal((11, 256), np.float32)
weights = [cpu.prepare([random_tensor(ALL_TYPES[k], (16, 256))]) for k in ("Q4_0", "IQ4_NL", "Q2_K", "Q6_K")]
sums = [np.concatenate([cpu.linear(x[:3], w), cpu.linear(x, w)]) for w in weights]
print(ISA, np.stack(sums).astype(np.float64).tobytes().hex())
"""


def test_linear_has_the_same_bits_on_every_instruction_set() -> None:
    """Integer products are exact and the order of the sums is the same, so no bit may differ."""
    found = {}
    for name in cpu_info.available_isas():
        env = {**os.environ, cpu_info.ISA_VARIABLE: name, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", FORCED], env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        used, found[name] = done.stdout.split()
        assert used == name
    assert len(set(found.values())) == 1
    assert "portable" in found
