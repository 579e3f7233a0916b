"""gpt-oss as it is published: experts in MXFP4 beside float weights, which stay packed; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.errors import ModelFileError, UnsupportedModelError
from llm_worker_rbee.layers.mlp import MoE
from llm_worker_rbee.models import load_model, read_model_config
from llm_worker_rbee.weights import open_checkpoint
from tests.helpers import model_runs, model_zoo

VARIANT = replace(model_zoo.ZOO["gpt-oss"], settings={**model_zoo.ZOO["gpt-oss"].settings, "num_hidden_layers": 2})
FIRST = "model.layers.0.mlp.experts.gate_up_proj"


def pack_experts(model: Any, folder: Path) -> Path:
    """Replace the experts of a model by random ones in MXFP4, and write it as it is published."""
    model_zoo.save_hf(model, folder)
    tensors, state = load_file(folder / "model.safetensors"), model.state_dict()
    random = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(122, 126, (count, rows, columns // 32), generator=random, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, folder / "model.safetensors")
    return change_config(folder, quantization_config={"quant_method": "mxfp4"})


def change_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = model_zoo.make_hf(VARIANT)
    return model, pack_experts(model, tmp_path_factory.mktemp("gpt-oss") / "hf")


def test_packed_experts_equal_transformers(published: tuple[Any, Path]) -> None:
    model, folder = published
    ours, ids = model_runs.load(folder), model_zoo.prompt_ids(VARIANT)
    mlp = ours.blocks[0].mlp
    assert isinstance(mlp, MoE)
    for product in (mlp.gate_up, mlp.down):
        assert {part.kind.name for matrix in product.weight.matrices for part in matrix.parts} == {"MXFP4"}
    expected = model_zoo.hf_logits(model, ids)
    assert np.abs(model_runs.compute_logits(ours, ids) - expected).max() < 1e-3
    assert model_runs.greedy(ours, ids, 6) == model_zoo.hf_greedy(model, ids, 6)


def test_tensors_of_a_folder_have_the_names_and_types_of_a_gguf(published: tuple[Any, Path]) -> None:
    model, folder = published
    tensors, wanted = open_checkpoint(folder).tensors, model_zoo.gguf_tensors(VARIANT, model)
    assert tensors.keys() == {name.replace("post_attention_norm", "ffn_norm") for name in wanted}
    for role in ("gate", "up", "down"):
        name = f"blk.1.ffn_{role}_exps"
        assert tensors[f"{name}.weight"].kind.name == "MXFP4"
        for part in ("weight", "bias"):
            np.testing.assert_array_equal(tensors[f"{name}.{part}"].dequantize(), wanted[f"{name}.{part}"])
    stored = load_file(folder / "model.safetensors").values()
    assert sum(tensor.nbytes for tensor in tensors.values()) == sum(tensor.nbytes for tensor in stored)


def test_packed_experts_on_the_cpu_have_the_same_bits_however_a_prompt_is_cut(published: tuple[Any, Path]) -> None:
    _, folder = published
    checkpoint, ids = open_checkpoint(folder), model_zoo.prompt_ids(VARIANT)
    model = load_model(checkpoint, CpuBackend(), read_model_config(checkpoint))
    mlp = model.blocks[0].mlp
    assert isinstance(mlp, MoE)
    assert mlp.down.weight.nbytes < 5 * 64 * 96  # of one byte each
    whole = model_runs.step_logits(model, ids, [len(ids)], fused=True)
    np.testing.assert_array_equal(model_runs.step_logits(model, ids, [1, 9, 3, len(ids) - 13], fused=True), whole)
    expected = model_runs.compute_logits(model_runs.load(folder), ids)
    assert np.abs(whole - expected).max() < 0.1 * np.abs(expected).max()


def damage(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


BAD: list[tuple[Callable[[Path], object], str]] = [
    (damage(lambda t: t.pop(f"{FIRST}_scales")), r"blk\.0\.ffn_gate_exps\.weight' is missing"),
    (damage(lambda t: t.pop(f"{FIRST}_bias")), r"blk\.0\.ffn_gate_exps\.weight' is missing"),
    (damage(lambda t: t[f"{FIRST}_scales"][1, 2].fill_(255)), r"ffn_gate_exps\.weight' holds a NaN"),
    (
        damage(lambda t: t.update({f"{FIRST}_scales": t[f"{FIRST}_scales"][:, :-1].contiguous()})),
        "no MXFP4 blocks and scales",
    ),
    (lambda folder: change_config(folder, intermediate_size=64), "the metadata says"),
    (lambda folder: change_config(folder, swiglu_limit=5.0), "swiglu_limit' is 5.0: only 7.0 is supported"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD)
def test_damaged_files_are_refused(
    spoil: Callable[[Path], object], message: str, published: tuple[Any, Path], tmp_path: Path
) -> None:
    _, folder = published
    copy = tmp_path / "hf"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    spoil(copy)
    with pytest.raises((ModelFileError, UnsupportedModelError), match=message):
        model_runs.load(copy)
