"""Models of quantized safetensors: every format against transformers with the weights that the format stands for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.errors import UnsupportedModelError
from llm_worker_rbee.models import load_model, read_model_config
from llm_worker_rbee.models.convert import find_type_mix, plan_file, quantize_checkpoint
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.gguf_writer import write_quantized_gguf
from tests.helpers import model_runs, model_zoo
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


@pytest.mark.parametrize("kind", [kind for kind in BY_TYPE if kind != "ACT_ORDER"])
def test_cpu_keeps_weights_packed_and_agrees_with_reference(tmp_path: Path, kind: str) -> None:
    folder = save_quantized_hf(model_zoo.make_hf(VARIANT), tmp_path, BY_TYPE[kind])
    checkpoint = open_checkpoint(folder)
    ours = load_model(checkpoint, CpuBackend(1), read_model_config(checkpoint))
    logits = model_runs.compute_logits(ours, IDS)
    wanted = model_runs.compute_logits(model_runs.load(folder), IDS)
    assert relative_error(logits, wanted) < 0.04
    assert ours.blocks[0].mlp.down.weight.nbytes < 96 * 64 * 1.2  # bytes: less than float16


def test_cpu_refuses_columns_in_any_order(tmp_path: Path) -> None:
    folder = save_quantized_hf(model_zoo.make_hf(VARIANT), tmp_path, "gptq-order")
    checkpoint = open_checkpoint(folder)
    with pytest.raises(
        UnsupportedModelError, match=r"attn_q\.weight': ACT_ORDER weights cannot be multiplied, convert"
    ):
        load_model(checkpoint, CpuBackend(1), read_model_config(checkpoint))


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


def test_experts_that_are_quantized_each(tmp_path: Path) -> None:
    """Experts have tensors of their own; the router, which is not quantized, stays as it is."""
    variant = replace(
        model_zoo.ZOO["qwen3moe"], settings={**model_zoo.ZOO["qwen3moe"].settings, "moe_intermediate_size": 64}
    )
    theirs = model_zoo.make_hf(variant)
    folder = save_quantized_hf(theirs, tmp_path, "awq")
    checkpoint, ids = open_checkpoint(folder), model_zoo.prompt_ids(variant)
    assert checkpoint.tensors["blk.1.ffn_up.3.weight"].kind.name == "INT4_ZP"
    wanted = model_runs.compute_logits(model_runs.load(folder), ids)
    assert np.abs(wanted - model_zoo.hf_logits(theirs, ids)).max() < 1e-3
    ours = load_model(checkpoint, CpuBackend(1), read_model_config(checkpoint))
    assert relative_error(model_runs.compute_logits(ours, ids), wanted) < 0.1  # another expert may be chosen
