"""LoRA adapters against `peft`, in every family: PEFT folders on safetensors and on a GGUF of the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from llm_worker_rbee.backends import select_backend
from llm_worker_rbee.errors import InvalidRequestError, UnsupportedModelError, WorkerError
from llm_worker_rbee.models import load_model, read_model_config
from llm_worker_rbee.models.convert import merge_adapters, write_adapter
from llm_worker_rbee.models.lora import file_adapters
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.lora import Adapter, LowRank, read_adapter
from tests.helpers import lora_zoo, model_runs, model_zoo

TOLERANCE = 1e-4
# PEFT names their experts as parameters; those of a GGUF are in another order of rows
LINEAR_ATTENTION = {"qwen3_5", "qwen3_5_moe", "qwen3_next"}
ONLY_ATTENTION = {"glm4moe", "qwen3_next"}

Made = tuple[model_zoo.Variant, Path, Path, Path, list[int], Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Return a zoo model and a random adapter of all its linear modules, embedding and head, made once: both files of
    the model, the adapter's folder, a prompt and the logits that PEFT gives."""
    cache: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in cache:
            folder = tmp_path_factory.mktemp(name)
            variant = model_zoo.ZOO[name]
            model = model_zoo.make_hf(variant)
            hf, gguf = model_zoo.save_hf(model, folder / "hf"), folder / "model.gguf"
            if name not in model_zoo.NO_GGUF_KEY:
                model_zoo.save_gguf(variant, model, gguf)
            ids = model_zoo.prompt_ids(variant)
            without = lora_zoo.logits_of(model, ids)
            names = lora_zoo.linear_names(model, with_head=not getattr(model.config, "final_logit_softcapping", None))
            if name in ONLY_ATTENTION:
                names = [one for one in names if one not in ("gate_proj", "up_proj", "down_proj")]
            wrapped = lora_zoo.add_adapter(model, target_modules=names)
            adapter, expected = lora_zoo.save_adapter(wrapped, folder / "adapter"), lora_zoo.logits_of(wrapped, ids)
            assert np.abs(expected - without).max() > 1, "the check would be vacuous"
            cache[name] = variant, hf, gguf, adapter, ids, expected
        return cache[name]

    return make


@pytest.mark.parametrize("name", model_zoo.ZOO)
def test_adapter_equals_peft(name: str, made: Callable[[str], Made]) -> None:
    variant, hf, _, adapter, ids, expected = made(name)
    ours = lora_zoo.compute_logits(hf, adapter, ids, variant.max_context)
    assert np.abs(ours - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", [n for n in model_zoo.ZOO if n not in model_zoo.NO_GGUF_KEY | LINEAR_ATTENTION])
def test_peft_adapter_on_gguf_equals_peft(name: str, made: Callable[[str], Made]) -> None:
    variant, _, gguf, adapter, ids, expected = made(name)
    ours = lora_zoo.compute_logits(gguf, adapter, ids, variant.max_context)
    assert np.abs(ours - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", [n for n in model_zoo.ZOO if n not in LINEAR_ATTENTION])
def test_adapter_equals_peft_on_the_cpu_backend(name: str, made: Callable[[str], Made]) -> None:
    variant, hf, _, adapter, ids, expected = made(name)
    ours = lora_zoo.compute_logits(hf, adapter, ids, variant.max_context, "cpu")
    assert np.abs(ours - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "mistral", "mixtral", "qwen2moe", "phi3", "glm4", "granite", "gemma3"])
def test_written_gguf_adapter_equals_peft_on_both_formats(
    name: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    variant, hf, gguf, adapter, ids, expected = made(name)
    written = tmp_path / "adapter.gguf"
    assert write_adapter(read_adapter(adapter), open_checkpoint(gguf), written, "F32") > 0
    for base in (hf, gguf):
        ours = lora_zoo.compute_logits(base, written, ids, variant.max_context)
        assert np.abs(ours - expected).max() < TOLERANCE, base


@pytest.mark.parametrize("name", ["llama", "mistral", "mixtral", "qwen2moe", "phi3", "glm4", "granite"])
def test_merged_adapter_equals_peft(name: str, made: Callable[[str], Made]) -> None:
    variant, hf, gguf, adapter, ids, expected = made(name)
    for base in (hf, gguf):
        checkpoint = open_checkpoint(base)
        if "output.weight" not in checkpoint.tensors:
            with pytest.raises(UnsupportedModelError, match="one matrix in the base"):
                merge_adapters(checkpoint, [(read_adapter(adapter), 1.0)])
            continue
        merged = merge_adapters(checkpoint, [(read_adapter(adapter), 1.0)])
        model = load_model(merged, select_backend(backend="reference"), read_model_config(merged), variant.max_context)
        assert np.abs(model_runs.compute_logits(model, ids) - expected).max() < TOLERANCE, base


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3moe", "granitemoe", "gpt-oss", "glm4moe", "gemma4-moe"])
def test_adapter_of_experts_equals_the_merged_model(
    name: str, backend: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    """A GGUF adapter has stacks of pairs; two experts have none, and each has its own rows of a token."""
    variant, _, gguf, _, ids, _ = made(name)
    checkpoint, random = open_checkpoint(gguf), np.random.default_rng(1)
    tensors: dict[str, Any] = {}
    for tensor_name, tensor in checkpoint.tensors.items():
        if "_exps.weight" in tensor_name:
            count, rows, columns = tensor.shape
            a = random.standard_normal((count, 3, columns), np.float32) / np.float32(columns**0.5)
            b = random.standard_normal((count, rows, 3), np.float32) * np.float32(0.3)
            b[:2] = 0
            tensors |= {f"{tensor_name}.lora_a": a, f"{tensor_name}.lora_b": b}
    adapter = lora_zoo.write_gguf_adapter(tmp_path / "adapter.gguf", checkpoint, tensors, alpha=6.0)
    merged = merge_adapters(checkpoint, [(read_adapter(adapter), 1.0)])
    model = load_model(merged, select_backend(backend="reference"), read_model_config(merged), variant.max_context)
    expected = model_runs.compute_logits(model, ids)
    model = lora_zoo.load_with(gguf, [adapter], variant.max_context, backend)
    whole = lora_zoo.run(model, ids, 0)
    assert np.abs(whole - expected).max() < TOLERANCE
    assert np.abs(lora_zoo.run(model, ids, -1) - expected).max() > 0.1, "the check would be vacuous"
    if backend == "cpu":
        assert np.array_equal(lora_zoo.run(model, ids, 0, chunk=5), whole)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16", "Q5_1"])
def test_adapter_on_a_quantized_base(kind: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    """The CPU's products have int8 activations: with an adapter they differ by no more than without."""
    variant, model = model_zoo.ZOO["llama"], model_zoo.make_hf(model_zoo.ZOO["llama"])
    _, _, _, adapter, ids, _ = made("llama")
    quantized = model_zoo.save_quantized(variant, model, tmp_path / "model.gguf", kind)
    reference = lora_zoo.load_with(quantized, [adapter], backend="reference")
    ours = lora_zoo.load_with(quantized, [adapter], backend="cpu")
    plain = np.abs(lora_zoo.run(ours, ids, -1) - lora_zoo.run(reference, ids, -1)).max()
    changed = np.abs(lora_zoo.run(ours, ids, 0) - lora_zoo.run(reference, ids, 0)).max()
    assert changed < 3 * plain + 0.02
    assert np.array_equal(lora_zoo.run(ours, ids, 0, chunk=5), lora_zoo.run(ours, ids, 0))


def test_settings_of_peft_change_the_scale(tmp_path: Path) -> None:
    """Ranks and alphas by pattern, rsLoRA, a pattern of modules, some layers."""
    variant = model_zoo.ZOO["qwen2"]
    hf, ids = model_zoo.save_hf(model_zoo.make_hf(variant), tmp_path / "hf"), model_zoo.prompt_ids(variant)
    settings: dict[str, dict[str, Any]] = {
        "patterns": {"rank_pattern": {"q_proj": 7, r"layers\.1\.self_attn\.v_proj": 2}, "alpha_pattern": {"q_proj": 3}},
        "rslora": {"use_rslora": True},
        "regex": {"target_modules": r".*\.self_attn\.(q|v)_proj"},
        "layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2]},
    }  # fmt: skip
    for name, chosen in settings.items():
        wrapped = lora_zoo.add_adapter(model_zoo.make_hf(variant), seed=3, **chosen)
        adapter = lora_zoo.save_adapter(wrapped, tmp_path / name)
        ours = lora_zoo.compute_logits(hf, adapter, ids)
        assert np.abs(ours - lora_zoo.logits_of(wrapped, ids)).max() < TOLERANCE, name


def test_adapter_that_does_not_fit_is_refused_with_both_sides(made: Callable[[str], Made], tmp_path: Path) -> None:
    _, _, llama, adapter, _, _ = made("llama")
    _, _, qwen, _, _, _ = made("qwen2")
    _, _, gemma, _, _, _ = made("gemma2")
    checkpoint = open_checkpoint(llama)
    shapes = {"blk.0.attn_q.weight.lora_a": (2, 96), "blk.0.attn_q.weight.lora_b": (64, 2)}
    wide = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    deep = {name.replace("blk.0", "blk.7"): value[:, :64] for name, value in wide.items()}
    cases = {
        "64 x 96, and the base has 64 x 64": (llama, lora_zoo.write_gguf_adapter(tmp_path / "a", checkpoint, wide)),
        "'blk.7.attn_q.weight', which no matrix of model.gguf": (
            llama, lora_zoo.write_gguf_adapter(tmp_path / "b", checkpoint, deep),
        ),
        "architecture 'llama', and this one is 'qwen2'": (qwen, tmp_path / "b"),
        "changes output.weight, whose logits this base caps": (gemma, _head_of(adapter, tmp_path / "c")),
    }  # fmt: skip
    for message, (base, path) in cases.items():
        with pytest.raises(WorkerError, match=message):
            lora_zoo.load_with(base, [path])


def _head_of(adapter: Path, folder: Path) -> Path:
    """Write the pair of the head of an adapter as one of its own."""
    folder.mkdir()
    halves = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    safetensors.numpy.save_file(
        {name: value for name, value in halves.items() if "lm_head" in name}, folder / "adapter_model.safetensors"
    )
    (folder / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    return folder


def test_heads_for_more_tokens_are_left_alone(tmp_path: Path, made: Callable[[str], Made]) -> None:
    _, _, llama, _, ids, _ = made("llama")
    checkpoint = open_checkpoint(llama)
    config = replace(read_model_config(checkpoint), nextn_layers=1)
    pairs = {
        f"blk.{i}.attn_q.weight": LowRank(np.ones((1, 64), np.float32), np.ones((64, 1), np.float32)) for i in (0, 3)
    }
    adapter = Adapter(tmp_path, "gguf", "llama", pairs)
    assert len(file_adapters(checkpoint, config, 4).pairs(adapter)) == 1
    with pytest.raises(InvalidRequestError, match=r"blk\.3"):
        file_adapters(checkpoint, replace(config, nextn_layers=0), 4).pairs(adapter)
    assert ids
