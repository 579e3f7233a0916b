"""Readers of GGUF metadata and config.json: defaults, old spellings, each key alone."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from llm_worker_rbee.config import ModelConfig, RopeScaling
from llm_worker_rbee.errors import ModelFileError, UnsupportedModelError
from llm_worker_rbee.layers.rope import rope_table
from llm_worker_rbee.models import families
from llm_worker_rbee.models.families import BY_GGUF, BY_HF, read_model_config
from llm_worker_rbee.models.metadata import model_config_from_gguf, model_config_from_hf
from llm_worker_rbee.weights import open_checkpoint
from tests.helpers import model_runs, model_zoo

SHAPE = {"vocab_size": 99, "hidden_size": 512, "intermediate_size": 96, "num_hidden_layers": 14,
         "num_attention_heads": 32, "max_position_embeddings": 8192}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip


def from_hf(kind: str, **config: Any) -> ModelConfig:
    return model_config_from_hf({"model_type": kind, **SHAPE, **config}, BY_HF[kind])


def as_transformers_reads_it(kind: str, **config: Any) -> ModelConfig:
    """Return the config after transformers has resolved defaults and old spellings."""
    whole = transformers.AutoConfig.for_model(kind, **SHAPE, **config)
    return model_config_from_hf(whole.to_dict(), BY_HF[kind])


def same(ours: ModelConfig, theirs: ModelConfig) -> bool:
    """Assert equality, except for unused numbers of a missing scaling."""
    plain = [replace(c, rope_scaling=RopeScaling()) if c.rope_scaling.kind == "none" else c for c in (ours, theirs)]
    return plain[0] == plain[1]


@pytest.mark.parametrize("kind", BY_HF)
def test_hf_config_defaults_equal_transformers(kind: str) -> None:
    assert same(from_hf(kind), as_transformers_reads_it(kind))


WINDOWED = {"sliding_window": 64, "max_window_layers": 5}
VARIATIONS: list[tuple[str, dict[str, Any]]] = [
    ("gemma2", {"final_logit_softcapping": None, "attn_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 144, "head_dim": 24}),
    ("gemma3_text", {"query_pre_attn_scalar": 168, "sliding_window": 99}),
    ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"] * 7}),
    ("mistral", {"sliding_window": None, "num_key_value_heads": 4}),
    ("qwen2", WINDOWED),
    ("qwen2", {**WINDOWED, "use_sliding_window": True}),
    ("qwen3", {**WINDOWED, "use_sliding_window": False}),
    ("qwen3", {**WINDOWED, "use_sliding_window": True, "head_dim": 24}),
    ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("phi3", {"sliding_window": 33, "rms_norm_eps": 1e-4}),
    ("granite", {"residual_multiplier": 0.22, "embedding_multiplier": 12, "logits_scaling": 8.0}),
    ("smollm3", {"no_rope_layers": [1, 0] * 7}),
    ("smollm3", {"no_rope_layer_interval": 3}),
    ("olmo3", {"rope_theta": 5e5, "rope_scaling": {**model_zoo.YARN, "rope_theta": 5e5}}),
    ("glm4", {"partial_rotary_factor": 0.25}),
]


@pytest.mark.parametrize(("kind", "settings"), VARIATIONS)
def test_hf_config_settings_equal_transformers(kind: str, settings: dict[str, Any]) -> None:
    assert same(from_hf(kind, **settings), as_transformers_reads_it(kind, **settings))


def test_hf_config_older_gemma3_spellings_are_read() -> None:
    old = from_hf("gemma3_text", rope_theta=2e6, rope_local_base_freq=3e4, sliding_window=64, sliding_window_pattern=3)
    assert (old.rope_base, old.rope_local_base) == (2e6, 3e4)
    assert old.windows == (64, 64, 0) * 4 + (64, 64)


def gguf(arch: str, n_layers: int = 4, **keys: Any) -> ModelConfig:
    shape = {"block_count": n_layers, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4,
             "context_length": 128, "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": 99}  # fmt: skip
    named = {key.replace("__", "."): value for key, value in keys.items()}
    values = {f"{arch}.{key}": value for key, value in {**shape, **named}.items()}
    return model_config_from_gguf({"general.architecture": arch, **values}, BY_GGUF[arch])


def test_gemma_27b_attention_scale_is_width_over_heads() -> None:
    """llama.cpp recognises them by their depth; GGUF has no key."""
    for arch, depth in (("gemma2", 46), ("gemma3", 62)):
        assert gguf(arch, depth, attention__key_length=24).attention_scale == pytest.approx((64 / 4) ** -0.5)
        assert gguf(arch, depth - 1, attention__key_length=24).attention_scale == pytest.approx(24**-0.5)


def test_gguf_config_defaults() -> None:
    gemma2, gemma3, llama = gguf("gemma2"), gguf("gemma3", 12, attention__sliding_window=7), gguf("llama")
    assert (gemma2.attention_cap, gemma2.final_cap, gemma2.windows) == (50.0, 30.0, (4096, 0, 4096, 0))
    assert (gemma3.rope_local_base, gemma3.windows) == (10000.0, (7, 7, 7, 7, 7, 0) * 2)
    assert (gguf("gemma3").windows, llama.windows, llama.rope_base) == ((0,) * 4, (0,) * 4, 10000.0)
    assert (llama.n_kv_heads, llama.head_dim, llama.rope_dim, llama.attention_scale) == (4, 16, 16, 0.25)


def test_gguf_config_single_keys_are_read() -> None:
    assert gguf("llama", attention__scale=0.5).attention_scale == 0.5
    assert gguf("gemma2", attention__sliding_window_pattern=3).windows == (4096, 4096, 0, 4096)
    pattern = np.array([False, True, True, False])
    assert gguf("gemma2", attention__sliding_window_pattern=pattern).windows == (0, 4096, 4096, 0)
    assert gguf("llama", attention__head_count_kv=np.array([2, 2, 2, 2])).n_kv_heads == 2
    assert gguf("gemma3", attention__sliding_window=7, rope__freq_base_swa=5e4).rope_local_base == 5e4


def test_gguf_config_keys_of_dense_families_are_read() -> None:
    assert gguf("smollm3", 9).nope_layers == (3, 7)
    assert gguf("granite", rope__scaling__finetuned=False).nope_layers == (0, 1, 2, 3)
    scales = gguf("granite", embedding_scale=12.0, residual_scale=0.25, logit_scale=8.0)
    assert (scales.embedding_scale, scales.residual_scale, scales.logit_scale) == (12.0, 0.25, 8.0)
    olmo3 = gguf("olmo2", attention__sliding_window=7, rope__freq_base=5e5)
    assert (olmo3.windows, olmo3.rope_local_base, gguf("olmo2").rope_local_base) == ((7, 7, 7, 0), 5e5, 0.0)


def test_gguf_config_rope_scaling_is_read() -> None:
    plain = rope_table(gguf("llama"), local=False, max_context=128)
    halved = rope_table(gguf("llama", rope__scale_linear=2.0), local=False, max_context=128)
    np.testing.assert_allclose(halved.inv_freq, plain.inv_freq / 2)
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32}
    usual = rope_table(gguf("llama", **yarn), local=False, max_context=128).scale
    assert usual == pytest.approx(1 + 0.1 * np.log(4.0))
    doubled = rope_table(gguf("llama", **yarn, rope__scaling__attn_factor=2.0), local=False, max_context=128)
    assert doubled.scale == pytest.approx(2 * usual)
    cancelled = gguf("mistral3", **yarn, rope__scaling__yarn_log_multiplier=1.0, attention__temperature_scale=0.1)
    table = rope_table(cancelled, local=False, max_context=128)
    assert (table.scale, table.temperature_beta, table.temperature_length) == (pytest.approx(1.0), 0.1, 32)


@pytest.mark.parametrize("name", ["llama", "gemma3", "smollm3", "ministral3"])
def test_detect_family_without_model_type_uses_class_name(name: str, tmp_path: Path) -> None:
    variant = model_zoo.ZOO[name]
    folder = model_zoo.save_hf(model_zoo.make_hf(variant), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    family = read_model_config(open_checkpoint(folder)).family
    assert config.pop("model_type") == variant.family
    assert config["architectures"][0].endswith("ForCausalLM")
    (folder / "config.json").write_text(json.dumps(config))
    assert read_model_config(open_checkpoint(folder)).family is family


@pytest.mark.parametrize("name", ["Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "GptOssForCausalLM"])
def test_names_of_classes_with_underscores_are_known(name: str) -> None:
    assert families._from_class_name({"architectures": [name]}) in families.BY_HF


@pytest.mark.parametrize("value", [True, "all"])
def test_bidirectional_attention_generates_no_text(value: object, tmp_path: Path) -> None:
    folder = model_zoo.save_hf(model_zoo.make_hf(model_zoo.ZOO["gemma3"]), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "use_bidirectional_attention": value}))
    assert not read_model_config(open_checkpoint(folder)).causal
    with pytest.raises(UnsupportedModelError, match="is an embedding model"):
        families.require_decoder(open_checkpoint(folder))


@pytest.mark.parametrize("said", [{"tie_word_embeddings": False}, {}])
def test_load_model_missing_untied_head_raises(said: dict[str, Any], tmp_path: Path) -> None:
    """Without the setting a llama has its own head, a Gemma a tied one."""
    for name, missed in (("llama-tied", True), ("gemma2", said != {})):
        folder = model_zoo.save_hf(model_zoo.make_hf(model_zoo.ZOO[name]), tmp_path / name)
        assert "output.weight" not in open_checkpoint(folder).tensors
        model_runs.load(folder)
        config = json.loads((folder / "config.json").read_text())
        del config["tie_word_embeddings"]
        (folder / "config.json").write_text(json.dumps({**config, **said}))
        with pytest.raises(ModelFileError, match=r"lm_head\.weight") if missed else nullcontext():
            model_runs.load(folder)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_text_part_of_a_model_with_images_is_loaded(
    prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Mistral-3 folders have them, now and formerly: with a tower, which is named and left out."""
    variant = model_zoo.ZOO["ministral3"]
    alone = model_zoo.save_hf(model_zoo.make_hf(variant), tmp_path / "alone")
    tensors = {
        re.sub(r"^model\.", prefix, name): tensor for name, tensor in load_file(alone / "model.safetensors").items()
    }
    tower = {"vision_tower.patch_conv.weight": np.ones((2, 2), np.float32)}
    tower["multi_modal_projector.linear_1.weight"] = np.ones((2, 2), np.float32)
    text = json.loads((alone / "config.json").read_text())
    whole = {"model_type": "mistral3", "text_config": text, "vision_config": {"model_type": "pixtral"}}
    folder = tmp_path / "whole"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole))
    save_file({**tensors, **tower}, folder / "model.safetensors")
    found, wanted = (model_runs.load(path) for path in (folder, alone))
    assert found.config == wanted.config
    ids = model_zoo.prompt_ids(variant)
    np.testing.assert_array_equal(*(model_runs.compute_logits(model, ids) for model in (found, wanted)))
    assert [r.message for r in caplog.records] == [
        "whole takes text alone: multi_modal_projector, vision_tower left out"
    ]
    extra = {"other.weight": tower["vision_tower.patch_conv.weight"]}
    for stored, message in (
        ({**tensors, **tower, **extra}, "tensor 'other.weight' is not part of a mistral3 model"),
        (dict(list(tensors.items())[1:]), "is missing"),
    ):
        save_file(stored, folder / "model.safetensors")
        with pytest.raises(ModelFileError, match=message):
            model_runs.load(folder)
