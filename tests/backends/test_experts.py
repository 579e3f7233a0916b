"""Mixture of experts: routing against PyTorch, grouped products of the reference and of the CPU, whole models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llm_worker_rbee.backends import reference
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.ops import RouteParams
from llm_worker_rbee.errors import ModelFileError, UnsupportedModelError
from llm_worker_rbee.models import load_model, read_model_config
from llm_worker_rbee.models.convert import quantize_checkpoint
from llm_worker_rbee.weights import Tensor, open_checkpoint
from llm_worker_rbee.weights.gguf_writer import write_gguf
from llm_worker_rbee.weights.quants import BLOCK_TYPES
from tests.helpers.model_runs import load, step_logits
from tests.helpers.model_zoo import ZOO, gguf_metadata, gguf_tensors, make_hf, prompt_ids, save_quantized
from tests.helpers.synthetic import random_tensor

cpu = CpuBackend()
COUNT, WIDTH, ROWS = 6, 256, 48


def random(*shape: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stacked(kind: str, rows: int = ROWS) -> list[list[Tensor]]:
    """Return the matrices of each expert: two, as gate and up."""
    roles = [random_tensor(BLOCK_TYPES[kind], (COUNT, rows // 2, WIDTH), seed).matrices() for seed in (3, 4)]
    return [list(tensors) for tensors in zip(*roles, strict=True)]


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_route_equals_torch(scoring: str, renormalize: bool, has_bias: bool) -> None:
    logits, bias = 2 * random(31, 16), random(16, seed=2) if has_bias else None
    experts, weights = reference.route(logits, RouteParams(4, scoring, renormalize, 2.5), bias)
    scores = getattr(torch, scoring)(torch.tensor(logits), *([-1] if scoring == "softmax" else []))
    expected = torch.topk(scores if bias is None else scores + torch.tensor(bias), 4).indices
    chosen = scores.gather(1, expected)
    if renormalize:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    np.testing.assert_array_equal(experts, expected.numpy())
    np.testing.assert_allclose(weights, 2.5 * chosen.numpy(), rtol=1e-5)


def test_route_takes_the_lowest_of_equal_experts() -> None:
    logits = np.array([[0, 1, 1, 1, 0], [2, 2, 2, 2, 2]], np.float32)
    np.testing.assert_array_equal(reference.route(logits, RouteParams(2))[0], [[1, 2], [0, 1]])
    np.testing.assert_array_equal(cpu.route(logits, RouteParams(2))[0], [[1, 2], [0, 1]])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_cpu_route_and_combine_are_near_the_reference(scoring: str, has_bias: bool) -> None:
    logits, bias = 2 * random(9, 20), random(20, seed=2) if has_bias else None
    params = RouteParams(3, scoring, has_bias, 1.5)
    (experts, weights), (chosen, expected) = cpu.route(logits, params, bias), reference.route(logits, params, bias)
    np.testing.assert_array_equal(experts, chosen)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    made, shared, gate = random(9, 3, 75), random(9, 75, seed=4), random(9, 1, seed=5)
    for more in ((), (shared,), (shared, gate)):
        found = cpu.combine(made, weights, *more)
        np.testing.assert_allclose(found, reference.combine(made, weights, *more), rtol=1e-4, atol=1e-5)
        alone = np.concatenate([cpu.combine(*(x[i : i + 1] for x in (made, weights, *more))) for i in range(9)])
        np.testing.assert_array_equal(found, alone)


def test_cpu_route_of_nan_chooses_experts_that_differ() -> None:
    experts, _ = cpu.route(np.full((2, 5), np.nan, np.float32), RouteParams(3))
    assert all(len(set(row)) == 3 and set(row) <= set(range(5)) for row in experts.tolist())


@pytest.mark.parametrize(("kind", "rows"), [("F32", 48), ("F16", 44), ("Q8_0", 48), ("Q4_K", 44), ("Q6_K", 6)])
@pytest.mark.parametrize("tokens", [1, 2, 7, 70, 270])
def test_cpu_grouped_linear_is_near_the_reference(kind: str, rows: int, tokens: int) -> None:
    """Expert 0 gets all tokens and expert 3 none."""
    others = np.random.default_rng(5).choice([1, 2, 4, 5], tokens)
    experts, tensors = np.stack([np.zeros(tokens, np.int64), others], axis=1), stacked(kind, rows)
    fast, slow, bias = cpu.prepare_experts(tensors), reference.prepare_experts(tensors), 9 * random(COUNT, rows)
    for x in (random(tokens, WIDTH), random(tokens, 2, WIDTH)):
        found, expected = cpu.grouped_linear(x, fast, experts), reference.grouped_linear(x, slow, experts)
        assert found.shape == (tokens, 2, rows)
        assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()
        np.testing.assert_array_equal(cpu.grouped_linear(x, fast, experts, bias), found + bias[experts])
        some = range(0, tokens, 9)
        alone = np.concatenate([cpu.grouped_linear(x[i : i + 1], fast, experts[i : i + 1]) for i in some])
        np.testing.assert_array_equal(found[some], alone)  # whoever else is in the batch


def test_reference_grouped_linear_and_combine_are_dense_products() -> None:
    tensors, experts, bias = stacked("F32"), np.array([[5, 1], [2, 5]]), random(COUNT, ROWS)
    x, weights, shared, gate = random(2, WIDTH), random(2, 2), random(2, ROWS, seed=8), random(2, 1, seed=9)
    made = reference.grouped_linear(x, reference.prepare_experts(tensors), experts, bias)
    dense = np.stack([np.concatenate([t.dequantize() for t in parts]) for parts in tensors])  # (experts, rows, width)
    expected = np.einsum("tkrw,tw->tkr", dense[experts], x) + bias[experts]
    np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-5)
    total = np.einsum("tkr,tk->tr", expected, weights) + shared / (1 + np.exp(-gate))
    np.testing.assert_allclose(reference.combine(made, weights, shared, gate), total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "kind"), [
    ("mixtral", "F32"), ("mixtral", "Q4_0"), ("qwen2moe", "F32"), ("qwen2moe", "Q8_0"), ("glm4moe", "Q4_0")
])  # fmt: skip
def test_model_on_the_cpu_is_one_program_with_the_same_bits_however_a_prompt_is_cut(
    tmp_path: Path, name: str, kind: str
) -> None:
    variant = ZOO[name]
    path = save_quantized(variant, make_hf(variant), tmp_path / "m.gguf", kind)
    checkpoint, ids = open_checkpoint(path), prompt_ids(variant)
    assert checkpoint.tensors["blk.1.ffn_up_exps.weight"].kind.name == kind
    model = load_model(checkpoint, cpu, read_model_config(checkpoint))
    assert not any("reference" in line.runs for _, lines in model.program("float32") for line in lines)
    whole = step_logits(model, ids, [len(ids)], fused=True)
    np.testing.assert_array_equal(step_logits(model, ids, [len(ids)], fused=False), whole)
    np.testing.assert_array_equal(step_logits(model, ids, [1, 9, 3, len(ids) - 13], fused=True), whole)
    if kind == "F32":
        expected = step_logits(load(path), ids, [len(ids)], fused=False)
        assert np.abs(whole - expected).max() < 1e-5 * np.abs(expected).max()


def test_damaged_and_missing_experts_are_named_and_fp8_is_refused(tmp_path: Path) -> None:
    variant = ZOO["mixtral"]
    model = make_hf(variant)
    metadata, tensors = gguf_metadata(variant, model), gguf_tensors(variant, model)
    name = "blk.1.ffn_up_exps.weight"
    damaged = np.array(tensors[name])
    damaged[2, 3, 4] = np.nan
    with pytest.raises(ModelFileError, match=rf"{name}.*NaN or infinite"):
        load(write_gguf(tmp_path / "damaged.gguf", metadata, {**tensors, name: damaged}))
    left = {key: value for key, value in tensors.items() if key != name}
    with pytest.raises(ModelFileError, match=f"tensor '{name}' is missing"):
        load(write_gguf(tmp_path / "missing.gguf", metadata, left))
    sound = open_checkpoint(write_gguf(tmp_path / "sound.gguf", metadata, tensors))
    with pytest.raises(UnsupportedModelError, match="experts have no FP8 products"):
        quantize_checkpoint(sound, "fp8")
