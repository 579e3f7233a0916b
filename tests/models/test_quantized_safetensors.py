"""Models of quantized safetensors: every format against transformers with the weights that the format stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.errors import UnsupportedModelError
from llm_worker_rbee.models import load_model, read_model_config
from llm_worker_rbee.models.convert import find_type_mix, plan_file, quantize_checkpoint
from llm_worker_rbee.models.convert.expert_stacks import stack_experts
from llm_worker_rbee.models.convert.linear_attention import gguf_linear_attention
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.gguf_writer import write_quantized_gguf
from tests.helpers import model_runs, model_zoo
from tests.helpers.linear_attention import tile_heads
from tests.helpers.quantized_hf import FORMATS, save_quantized_hf
from tests.helpers.random_tensors import relative_error

VARIANT = model_zoo.ZOO["llama"]
IDS = model_zoo.prompt_ids(VARIANT)
# a format of each type that is read
BY_TYPE = {made.type: name for name, made in FORMATS.items()}


@pytest.mark.parametrize("name", FORMATS)
def test_model_of_each_format_equals_transformers(tmp_path: Path, name: str) -> None:
    theirs = model_zoo.make_hf(VARIANT)
    ours = model_runs.load(save_quantized_hf(theirs, tmp_path, name))
    assert np.abs(model_runs.compute_logits(ours, IDS) - model_zoo.hf_logits(theirs, IDS)).max() < 1e-3
    assert model_runs.greedy(ours, IDS, 8) == model_zoo.hf_greedy(theirs, IDS, 8)


@pytest.mark.parametrize("name", [*BY_TYPE.values(), "gptq-order"])
def test_cpu_keeps_weights_packed_and_agrees_with_reference(tmp_path: Path, name: str) -> None:
    folder = save_quantized_hf(model_zoo.make_hf(VARIANT), tmp_path, name)
    checkpoint = open_checkpoint(folder)
    ours = load_model(checkpoint, CpuBackend(1), read_model_config(checkpoint))
    logits = model_runs.compute_logits(ours, IDS)
    wanted = model_runs.compute_logits(model_runs.load(folder), IDS)
    assert relative_error(logits, wanted) < 0.04
    assert ours.blocks[0].mlp.down.weight.nbytes < 96 * 64 * 1.2  # bytes: less than float16


def test_columns_in_any_order_have_the_same_bits_fused_and_op_by_op(tmp_path: Path) -> None:
    """Of the output head, too."""
    checkpoint = open_checkpoint(save_quantized_hf(model_zoo.make_hf(VARIANT), tmp_path, "gptq-order"))
    head, order = checkpoint.tensors["output.weight"], np.random.default_rng(2).permutation(64)
    data = np.ascontiguousarray(head.dequantize()[:, order]).reshape(-1).view(np.uint8)
    tensors = {**checkpoint.tensors, head.name: replace(head, data=data, order=order)}
    ours = load_model(replace(checkpoint, tensors=tensors), CpuBackend(1), read_model_config(checkpoint))
    assert ours.blocks[0].mlp.down.weight.order is not None
    fused, single = (model_runs.compute_logits(model, IDS, 7) for model in (ours, replace(ours, fused=None)))
    assert np.array_equal(fused, single)
    assert relative_error(fused, model_runs.compute_logits(model_runs.load(tmp_path), IDS)) < 0.04


def test_columns_in_different_orders_are_refused(tmp_path: Path) -> None:
    """Where tensors share their activations; the reference multiplies them."""
    checkpoint = open_checkpoint(save_quantized_hf(model_zoo.make_hf(VARIANT), tmp_path, "gptq-order"))
    name = "blk.1.attn_k.weight"
    other = replace(checkpoint.tensors[name], order=np.roll(checkpoint.tensors[name].order, 1))
    changed = replace(checkpoint, tensors={**checkpoint.tensors, name: other})
    load_model(changed, ReferenceBackend(), read_model_config(changed))
    with pytest.raises(UnsupportedModelError, match=r"blk.1.attn_q.weight' and 'blk.1.attn_k.weight': their columns"):
        load_model(changed, CpuBackend(1), read_model_config(changed))


@pytest.mark.parametrize(
    ("name", "kind", "error"),
    [
        ("gptq", "Q4_0", 0), ("gptq-zeros", "Q4_1", 2**-10), ("pack", "Q4_0", 0), ("int8", "Q8_0", 0),
        ("fp8", "F32", 0), ("nvfp4", "F32", 0), ("mxfp4-pack", "F16", 0), ("gptq-order", "F32", 0),
        ("fp8-blocks", "Q8_0", 2**-6),
    ],
)  # fmt: skip
def test_convert_keeps_codes_where_a_type_holds_them(tmp_path: Path, name: str, kind: str, error: float) -> None:
    folder = save_quantized_hf(model_zoo.make_hf(VARIANT), tmp_path / "hf", name)
    source = open_checkpoint(folder)
    work = plan_file(source, read_model_config(source), find_type_mix(kind), {})
    path = write_quantized_gguf(tmp_path / "m.gguf", {}, work)
    made = open_checkpoint(path)
    for ours in ("blk.0.attn_v.weight", "blk.2.ffn_down.weight"):
        wanted = source.tensors[ours].dequantize()
        assert made.tensors[ours].kind.name == kind
        assert np.abs(made.tensors[ours].dequantize() - wanted).max() <= error * np.abs(wanted).max()


def test_quantize_while_loading_runs_columns_in_any_order(tmp_path: Path) -> None:
    folder = save_quantized_hf(model_zoo.make_hf(VARIANT), tmp_path, "gptq-order")
    made = quantize_checkpoint(open_checkpoint(folder), "Q8_0")
    ours = load_model(made, CpuBackend(1), read_model_config(made))
    wanted = model_runs.compute_logits(model_runs.load(folder), IDS)
    assert relative_error(model_runs.compute_logits(ours, IDS), wanted) < 0.1  # the embedding is quantized, too


def test_convert_moves_quantized_heads_of_linear_attention(tmp_path: Path) -> None:
    """The columns of the output projection are moved by blocks."""
    theirs = model_zoo.make_hf(model_zoo.ZOO["qwen3_5"])
    source = open_checkpoint(save_quantized_hf(theirs, tmp_path, "fp8-blocks"))
    name = "blk.0.ssm_out.weight"
    found = gguf_linear_attention(source.tensors, read_model_config(source))[name]
    assert found.kind.name == "FP8"
    weight = theirs.state_dict()["model.layers.0.linear_attn.out_proj.weight"].numpy()
    np.testing.assert_allclose(found.dequantize(), tile_heads(weight, 2, 4, axis=1), rtol=3e-7)
    ordered = replace(source.tensors[name], order=np.arange(weight.shape[1])[::-1])
    found = gguf_linear_attention({name: ordered}, read_model_config(source))[name]
    assert found.kind.name == "F32", "heads are not whole blocks"
    np.testing.assert_array_equal(found.dequantize(), tile_heads(ordered.dequantize(), 2, 4, axis=1))


EXPERTS = replace(
    model_zoo.ZOO["qwen3moe"], settings={**model_zoo.ZOO["qwen3moe"].settings, "moe_intermediate_size": 64}
)
EXPERT_FORMATS = {
    "gptq": "INT4", "pack": "INT4", "awq": "INT4_ZP", "fp8-blocks": "FP8", "fp8-stack": "FP8", "nvfp4": "NVFP4_F32",
}  # fmt: skip


@pytest.fixture(scope="module")
def quantized_experts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Return a folder with quantized experts, and the model of transformers; both are made once."""

    @cache
    def make(name: str) -> tuple[Path, Any]:
        theirs, folder = model_zoo.make_hf(EXPERTS), tmp_path_factory.mktemp(name)
        made = save_quantized_hf(theirs, folder, name.replace("stack", "blocks"), stacked=name == "fp8-stack")
        return made, theirs

    return make


@pytest.mark.parametrize("name", EXPERT_FORMATS)
def test_quantized_experts_equal_transformers(quantized_experts: Callable[[str], tuple[Path, Any]], name: str) -> None:
    """Each has tensors of its own, or all are in one; the router, which is not quantized, stays as it is."""
    folder, theirs = quantized_experts(name)
    checkpoint, ids = open_checkpoint(folder), model_zoo.prompt_ids(EXPERTS)
    of_expert = {t.kind.name for t in checkpoint.expert_tensors.values()}
    assert of_expert == {EXPERT_FORMATS[name]}
    assert checkpoint.tensors["blk.1.ffn_gate_inp.weight"].kind.name == "F32"
    wanted = model_runs.compute_logits(model_runs.load(folder), ids)
    assert np.abs(wanted - model_zoo.hf_logits(theirs, ids)).max() < 1e-3
    ours = load_model(checkpoint, CpuBackend(1), read_model_config(checkpoint))
    assert relative_error(model_runs.compute_logits(ours, ids), wanted) < 0.1  # another expert may be chosen
    down = ours.blocks[0].mlp.down.weight
    assert down.nbytes < down.count * 64 * 64 * 1.2  # less than float16


@pytest.mark.parametrize(
    ("name", "kind", "error"),
    [
        ("gptq", "Q4_0", 0), ("pack", "Q4_0", 0), ("awq", "Q4_1", 2**-10), ("fp8-blocks", "F32", 0),
        ("fp8-stack", "F32", 0), ("gptq-order", "F32", 0),
    ],
)  # fmt: skip
def test_convert_quantized_experts(
    quantized_experts: Callable[[str], tuple[Path, Any]], tmp_path: Path, name: str, kind: str, error: float
) -> None:
    """The file has a stack for each role, with the codes of the folder where its type holds them."""
    folder, theirs = quantized_experts(name)
    source = open_checkpoint(folder)
    config = read_model_config(source)
    stacked = replace(source, tensors=stack_experts(source, config))
    path = write_quantized_gguf(tmp_path / "m.gguf", {}, plan_file(stacked, config, find_type_mix(kind), {}))
    made, weights = open_checkpoint(path), theirs.state_dict()
    for i, role in enumerate(("gate", "up")):
        wanted = weights["model.layers.1.mlp.experts.gate_up_proj"].numpy()[:, 64 * i : 64 * i + 64]
        tensor = made.tensors[f"blk.1.ffn_{role}_exps.weight"]
        assert tensor.kind.name == kind
        assert np.abs(tensor.dequantize() - wanted).max() <= error * np.abs(wanted).max() + 1e-7


def test_experts_with_columns_in_any_order_are_refused(quantized_experts: Callable[[str], tuple[Path, Any]]) -> None:
    checkpoint = open_checkpoint(quantized_experts("gptq-order")[0])
    with pytest.raises(UnsupportedModelError, match=r"blk.0.ffn_gate.0.weight': experts and embeddings with columns"):
        load_model(checkpoint, CpuBackend(1), read_model_config(checkpoint))
