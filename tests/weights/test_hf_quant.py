"""Quantized safetensors: every format against its own formula, and refusals."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llm_worker_rbee.errors import ModelFileError, UnsupportedModelError, WorkerError
from llm_worker_rbee.weights import open_checkpoint

from ..helpers import model_runs
from ..helpers.model_zoo import ZOO, make_hf
from ..helpers.quantized_hf import FORMATS, save_quantized_hf

Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize("name", FORMATS)
def test_open_hf_reads_the_values_of_each_format(tmp_path: Path, name: str) -> None:
    model = make_hf(ZOO["llama"])
    checkpoint = open_checkpoint(save_quantized_hf(model, tmp_path, name))
    names = {"attn_q": "self_attn.q_proj", "ffn_down": "mlp.down_proj"}
    for ours, theirs in names.items():
        tensor, wanted = (
            checkpoint.tensors[f"blk.1.{ours}.weight"],
            model.state_dict()[f"model.layers.1.{theirs}.weight"],
        )
        assert tensor.kind.name == FORMATS[name].type
        assert tensor.shape == tuple(wanted.shape)
        np.testing.assert_allclose(tensor.dequantize(), wanted.numpy(), rtol=3e-7)


def change(
    folder: Path, settings: dict[str, Any], tensors: Callable[[dict[str, Any]], Any] = lambda found: None
) -> Path:
    """Change what config.json says of the quantization, and the tensors."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    found = load_file(folder / "model.safetensors")
    tensors(found)
    save_file(found, folder / "model.safetensors")
    return folder


def damage(suffix: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a change of one tensor: another one, or without it (None)."""

    def apply(found: dict[str, Any]) -> None:
        old = found.pop(Q + suffix)
        if value is not None:
            found[Q + suffix] = value(old)

    return apply


def with_nan(scales: torch.Tensor) -> torch.Tensor:
    made = scales.clone()
    made[1, 0] = float("nan")
    return made


ERRORS: dict[str, tuple[str, dict[str, Any], Any, type[WorkerError], str]] = {
    "method": ("gptq", {"quant_method": "aqlm"}, None, UnsupportedModelError,
               "quantized by 'aqlm' cannot be read: supported are gptq, awq, fp8, fbgemm_fp8, compressed-tensors"),
    "format": ("gptq", {"checkpoint_format": "marlin"}, None, UnsupportedModelError,
               "gptq weights with checkpoint_format 'marlin' cannot be read: supported are gptq, gptq_v2"),
    "gemv": ("awq", {"version": "gemv"}, None, UnsupportedModelError, "version 'gemv' cannot be read"),
    "rotated": ("pack", {"transform_config": {"u": 1}}, None, UnsupportedModelError, "need rotated activations"),
    "sparse": ("pack", {"sparsity_config": {"format": "bitmask"}}, None, UnsupportedModelError, "sparsity 'bitmask'"),
    "bits": ("gptq", {"bits": 3}, None, UnsupportedModelError, "of 3 bits cannot be read: supported are 4 and 8"),
    "nan": ("gptq", {}, damage("scales", with_nan), ModelFileError, r"q_proj\.weight': a scale is NaN or infinite"),
    "missing": ("pack", {}, damage("weight_scale", None), ModelFileError, r"q_proj\.weight_scale' is missing"),
    "shape": ("awq", {}, damage("scales", lambda x: x[:, :-1].contiguous()), ModelFileError,
              r"q_proj\.scales' has shape \(2, 63\), the weight needs \(2, 64\)"),
    "columns": ("fp8-rows", {}, damage("weight_scale", lambda x: x[:-1].contiguous()), ModelFileError,
                r"scales of shape \(63, 1\) do not fit a weight of 64 x 64"),
    "small groups": ("pack", {}, damage("weight_scale", lambda x: x.repeat_interleave(2, 1)), UnsupportedModelError,
                     "groups of 16 columns cannot be read"),
    "weight": ("fp8", {}, damage("weight", lambda x: (x.float() * float("nan")).to(x.dtype)), ModelFileError,
               "a weight is NaN"),
    "zeros of bytes": ("gptq-8", {}, damage("qzeros", lambda x: x + 1), UnsupportedModelError, "with zero points"),
    "global scale": ("nvfp4", {}, damage("weight_scale_2", lambda x: x * 0), ModelFileError, "not one positive number"),
    "order": ("gptq-order", {}, damage("g_idx", lambda x: x + 7), ModelFileError, "does not name a group of 2"),
    "short order": ("gptq-order", {}, damage("g_idx", lambda x: x[:-1].contiguous()), ModelFileError,
                    "does not name a group of 2"),
    "uneven order": ("gptq-order", {}, damage("g_idx", lambda x: x * 0 + (torch.arange(64) > 30)),
                     UnsupportedModelError, "groups of columns of different sizes"),
    "blocks": ("fp8-blocks", {}, damage("weight_scale_inv", lambda x: torch.ones(4, 1 + x.shape[1])), ModelFileError,
               "do not fit a weight of 64 x 64"),
    "groups": ("pack", {"config_groups": {"g": "x"}}, None, ModelFileError, "'config_groups'"),
    "block size": ("fp8-blocks", {"weight_block_size": [0, 0]}, None, ModelFileError, "'weight_block_size' must be"),
    "weight shape": ("pack", {}, damage("weight_shape", lambda x: x[:1].contiguous()), ModelFileError,
                     r"weight_shape' has shape \(1,\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_unreadable_weights_raise_by_name(tmp_path: Path, case: str) -> None:
    name, settings, tensors, error, text = ERRORS[case]
    folder = save_quantized_hf(make_hf(ZOO["llama"]), tmp_path, name)
    change(folder, settings, tensors or (lambda found: None))
    with pytest.raises(error, match=text):
        model_runs.load(folder)


def test_scales_of_a_kv_cache_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def add_scales(found: dict[str, Any]) -> None:
        for i in range(3):
            found |= {f"model.layers.{i}.self_attn.{x}_scale": torch.ones(1) for x in "kv"}

    folder = change(save_quantized_hf(make_hf(ZOO["llama"]), tmp_path, "fp8"), {}, add_scales)
    with caplog.at_level(logging.WARNING):
        model_runs.load(folder)
    assert "6 scales of a quantized KV cache are not used" in caplog.text


EXPERTS = "model.layers.0.mlp.experts."


def save_stacks(folder: Path, per_tensor: bool = False) -> Path:
    """Write a model with the FP8 experts of a layer in one tensor, with scales of blocks, or of gate, up and down."""
    variant = replace(ZOO["qwen3moe"], settings={**ZOO["qwen3moe"].settings, "moe_intermediate_size": 64})
    folder = save_quantized_hf(make_hf(variant), folder, "fp8-blocks", stacked=True)
    scales = {f"{EXPERTS}{role}_proj_scale_inv": n for role, n in (("gate_up", 2), ("down", 1))}

    def change_scales(found: dict[str, Any]) -> None:
        found |= {name: torch.arange(1, 8 * n + 1).float().reshape(8, n, 1) for name, n in scales.items()}

    return change(folder, {}, change_scales) if per_tensor else folder


def test_experts_of_one_tensor_may_have_a_scale_each(tmp_path: Path) -> None:
    """Gate and up, too: then the scales are (experts, 2, 1)."""
    checkpoint = open_checkpoint(save_stacks(tmp_path, per_tensor=True))
    codes = load_file(tmp_path / "model.safetensors")[f"{EXPERTS}gate_up_proj"].float().numpy()
    found = checkpoint.tensors["blk.0.ffn_gate_up_exps.weight"]
    half = codes.shape[1] // 2
    assert (found.kind.name, found.shape) == ("FP8", codes.shape)
    np.testing.assert_array_equal(found.dequantize()[3, :half], codes[3, :half] * 7)
    np.testing.assert_array_equal(found.dequantize()[3, half:], codes[3, half:] * 8)


@pytest.mark.parametrize("role", ["gate_up", "down"])
def test_experts_of_one_tensor_need_their_scales(tmp_path: Path, role: str) -> None:
    folder = change(save_stacks(tmp_path), {}, lambda found: found.pop(f"{EXPERTS}{role}_proj_scale_inv"))
    with pytest.raises(UnsupportedModelError, match=f"ffn_{role}_exps.weight' has unsupported type 'F8_E4M3'"):
        model_runs.load(folder)
    folder = change(folder, {}, lambda found: found.update({f"{EXPERTS}{role}_proj_scale_inv": torch.ones(8)}))
    with pytest.raises(ModelFileError, match=rf"{role}_proj_scale_inv' is \(8,\): quantized experts need"):
        model_runs.load(folder)


def test_settings_of_modelopt_may_have_their_own_file(tmp_path: Path) -> None:
    folder = save_quantized_hf(make_hf(ZOO["llama"]), tmp_path, "nvfp4")
    config = json.loads((folder / "config.json").read_text())
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors["blk.0.attn_q.weight"].kind.name == "NVFP4_F32"
    assert {key: checkpoint.metadata["quantization"][key] for key in ("method", "format", "bits", "group_size")} == {
        "method": "modelopt", "format": "NVFP4", "bits": 4, "group_size": 16,
    }  # fmt: skip


def test_deferred_tensors_count_the_bytes_of_the_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_quantized_hf(make_hf(ZOO["llama"]), tmp_path, "awq"))
    data = (tmp_path / "model.safetensors").read_bytes()
    assert checkpoint.nbytes == len(data) - 8 - int.from_bytes(data[:8], "little")
