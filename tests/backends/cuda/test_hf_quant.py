"""Models of quantized safetensors on CUDA, which keeps them packed."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_worker_rbee.backends.cuda import CudaBackend
from llm_worker_rbee.models import load_model, read_model_config
from llm_worker_rbee.weights import open_checkpoint
from tests.helpers import model_runs, model_zoo
from tests.helpers.quantized_hf import FORMATS, save_quantized_hf
from tests.helpers.random_tensors import relative_error

cuda = CudaBackend()
VARIANT = model_zoo.Variant("llama", {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1})
KINDS = {
    "gptq": {"q4"},
    "gptq-order": {"q4"},
    "awq": {"q4m"},
    "int8": {"q8"},
    "nvfp4": {"nvfp4"},
    "mxfp4-pack": {"mxfp4"},
    "fp8-blocks": {"e4m3"},
}


@pytest.mark.parametrize("name", KINDS)
def test_cuda_keeps_weights_packed_and_agrees_with_reference(tmp_path: Path, name: str) -> None:
    checkpoint = open_checkpoint(save_quantized_hf(model_zoo.make_hf(VARIANT), tmp_path, name))
    ours = load_model(checkpoint, cuda, read_model_config(checkpoint))
    assert {part.kind for part in ours.blocks[0].attention.qkv.weight.parts} == KINDS[name]
    ids = model_zoo.prompt_ids(VARIANT)[:8]
    wanted = model_runs.compute_logits(model_runs.load(tmp_path), ids)
    assert relative_error(model_runs.compute_logits(ours, ids, 7, "float16"), wanted) < 0.05


def test_cuda_keeps_a_stack_of_fp8_experts_packed(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "moe_intermediate_size": 64, "head_dim": 32, "num_local_experts": 4}
    variant = model_zoo.Variant("qwen3_moe", {**model_zoo.ZOO["qwen3moe"].settings, **sizes, "num_experts_per_tok": 2})
    folder = save_quantized_hf(model_zoo.make_hf(variant), tmp_path, "fp8-blocks", stacked=True)
    checkpoint, ids = open_checkpoint(folder), model_zoo.prompt_ids(variant)[:8]
    ours = load_model(checkpoint, cuda, read_model_config(checkpoint))
    assert [part.kind for part in ours.blocks[0].mlp.down.weight.parts] == ["e4m3"]
    wanted = model_runs.compute_logits(model_runs.load(folder), ids)
    assert relative_error(model_runs.compute_logits(ours, ids, 7, "float16"), wanted) < 0.1


def test_formats_have_the_types_that_are_tested() -> None:
    assert {FORMATS[name].type for name in KINDS} == {made.type for made in FORMATS.values()}
