"""RoPE tables of every scaling against transformers; unknown scalings raise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from llm_worker_rbee.errors import ModelFileError, UnsupportedModelError
from llm_worker_rbee.layers.rope import rope_table
from llm_worker_rbee.models.families import BY_HF
from llm_worker_rbee.models.metadata import model_config_from_gguf, model_config_from_hf
from tests.helpers.layer_inputs import hf_model_config

HALF = 32
FACTORS = {"short_factor": np.linspace(1, 1.5, HALF).tolist(), "long_factor": np.linspace(1, 40, HALF).tolist()}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096, **FACTORS}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "default, far base": {"rope_type": "default", "rope_theta": 1000000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "llama3": LLAMA3,
    "llama3.2": {**LLAMA3, "factor": 32.0, "low_freq_factor": 1.5},
    "yarn": YARN,
    "yarn, betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, attention factor": {**YARN, "attention_factor": 0.7},
    "yarn, mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn, only mscale": {**YARN, "mscale": 0.8},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, factor below one": {**YARN, "factor": 0.5},
    "longrope": LONG,
    "longrope, attention factor": {**LONG, "attention_factor": 1.5},
    "longrope, factor": {**LONG, "factor": 16.0},
}


def llama(rope: dict[str, Any]) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=2 * HALF,
        max_position_embeddings=131072,
        rope_parameters=dict(rope),
    )


@pytest.mark.parametrize("context", [1024, 131072])
@pytest.mark.parametrize("kind", KINDS)
def test_rope_table_equals_transformers(kind: str, context: int) -> None:
    rope = KINDS[kind]
    theirs = llama(rope)
    if rope["rope_type"] == "default":
        inv_freq, scale = LlamaRotaryEmbedding.compute_default_rope_parameters(theirs)
    else:
        inv_freq, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, seq_len=context)
    ours = rope_table(hf_model_config(llama(rope)), local=False, max_context=context)
    assert ours.inv_freq.dtype == np.float32
    assert np.abs(ours.inv_freq / inv_freq.numpy() - 1).max() < 1e-6
    assert ours.scale == pytest.approx(scale, abs=1e-7)


@pytest.mark.parametrize("kind", [k for k in KINDS if not k.startswith("default")])
def test_rope_table_scaling_changes_it(kind: str) -> None:
    """Guards the comparison above against being vacuous."""
    plain = rope_table(
        hf_model_config(llama({"rope_type": "default", "rope_theta": KINDS[kind]["rope_theta"]})),
        local=False,
        max_context=4096,
    )
    scaled = rope_table(hf_model_config(llama(KINDS[kind])), local=False, max_context=131072)
    assert np.abs(scaled.inv_freq / plain.inv_freq - 1).max() > 1e-2


def test_rope_scaling_older_spelling_is_read() -> None:
    old = {
        **llama({"rope_type": "default", "rope_theta": 1.0}).to_dict(),
        "rope_parameters": None,
        "rope_theta": 500000.0,
        "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"},
    }
    ours = rope_table(model_config_from_hf(old, BY_HF["llama"]), local=False, max_context=4096)
    assert np.array_equal(
        ours.inv_freq, rope_table(hf_model_config(llama(LLAMA3)), local=False, max_context=4096).inv_freq
    )


def test_longrope_up_to_original_context_uses_short_factors() -> None:
    config = hf_model_config(llama(LONG))
    tables = [rope_table(config, local=False, max_context=n).inv_freq for n in (1, 4096, 4097)]
    assert np.array_equal(tables[0], tables[1])
    assert not np.array_equal(tables[1], tables[2])


@pytest.mark.parametrize("kind", ["dynamic", "ntk", "made-up"])
def test_rope_scaling_unknown_raises(kind: str) -> None:
    raw = {
        **llama({"rope_type": "default", "rope_theta": 1e4}).to_dict(),
        "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0},
    }
    with pytest.raises(UnsupportedModelError, match=f"'{kind}'.*supported: "):
        model_config_from_hf(raw, BY_HF["llama"])


@pytest.mark.parametrize("kind", ["dynamic", "llama3", "made-up"])
def test_rope_scaling_unknown_in_gguf_raises(kind: str) -> None:
    keys = {
        "block_count": 1,
        "embedding_length": 8,
        "attention.head_count": 1,
        "feed_forward_length": 8,
        "context_length": 64,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.scaling.type": kind,
        "rope.scaling.factor": 2.0,
    }
    metadata = {"general.architecture": "llama", **{f"llama.{k}": v for k, v in keys.items()}}
    with pytest.raises(UnsupportedModelError, match=f"'{kind}'"):
        model_config_from_gguf(metadata, BY_HF["llama"], 10)


def test_rope_table_freq_factors_divide_frequencies() -> None:
    config = hf_model_config(llama(KINDS["default"]))
    factors = np.linspace(1, 8, HALF).astype(np.float32)
    plain = rope_table(config, local=False, max_context=64)
    assert np.allclose(
        rope_table(config, local=False, max_context=64, freq_factors=factors).inv_freq * factors, plain.inv_freq
    )


@pytest.mark.parametrize(
    "factors", [np.ones(3), np.zeros(HALF), -np.ones(HALF), np.full(HALF, np.nan), np.full(HALF, np.inf)]
)
def test_rope_table_invalid_freq_factors_raise(factors: Any) -> None:
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight"):
        rope_table(
            hf_model_config(llama(KINDS["default"])),
            local=False,
            max_context=64,
            freq_factors=factors.astype(np.float32),
        )


def test_longrope_without_factors_raises() -> None:
    config = hf_model_config(llama(LONG))
    broken = replace(config, rope_scaling=replace(config.rope_scaling, long_factors=()))
    with pytest.raises(ModelFileError, match="longrope"):
        rope_table(broken, local=False, max_context=131072)


def test_rope_table_local_layer_uses_local_base() -> None:
    config = replace(hf_model_config(llama(KINDS["linear"])), rope_local_base=123.0)
    local, full = (rope_table(config, local=local, max_context=64) for local in (True, False))
    assert local.inv_freq[1] == pytest.approx(123.0 ** (-1 / HALF))
    assert full.inv_freq[0] == pytest.approx(1 / 2.5)
