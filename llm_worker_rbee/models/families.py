"""The supported families as a table: what differs between their decoders is data. A new family is a new row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import Family, ModelConfig
from ..errors import ModelFileError, UnsupportedModelError
from ..weights import Checkpoint
from .metadata import model_config_from_gguf, model_config_from_hf

QWEN_DEFAULTS = {
    "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
GEMMA_DEFAULTS = {
    "head_dim": 256, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096, "tie_word_embeddings": True,
}  # fmt: skip

FAMILIES = (
    Family("llama", gguf=("llama",), hf=("llama",), rope_interleaved=True),
    # GGUF files of Mistral have the architecture llama
    Family("mistral", gguf=(), hf=("mistral",), hf_defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    Family("qwen2", gguf=("qwen2",), hf=("qwen2",), qkv_bias=True, hf_defaults=QWEN_DEFAULTS),
    Family("qwen3", gguf=("qwen3",), hf=("qwen3",), qk_norm=True, hf_defaults={**QWEN_DEFAULTS, "head_dim": 128}),
    Family("phi3", gguf=("phi3",), hf=("phi3",), fused=True, hf_defaults={"rms_norm_eps": 1e-5}),
    Family(
        "gemma2", gguf=("gemma2",), hf=("gemma2",), activation="gelu_tanh", post_norms=True, scaled_embedding=True,
        norm_plus_one=True, full_every=2, default_window=4096, default_attention_cap=50.0, default_final_cap=30.0,
        hf_defaults={**GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    Family(
        "gemma3", gguf=("gemma3",), hf=("gemma3_text",), activation="gelu_tanh", qk_norm=True, post_norms=True,
        scaled_embedding=True, norm_plus_one=True, full_every=6, default_local_base=10000.0,
        hf_defaults={**GEMMA_DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    ),
)  # fmt: skip
BY_GGUF = {name: family for family in FAMILIES for name in family.gguf}
BY_HF = {name: family for family in FAMILIES for name in family.hf}


def register_family(family: Family) -> None:
    """Add a family, so that files which name it can be loaded."""
    for names, table in ((family.gguf, BY_GGUF), (family.hf, BY_HF)):
        for name in names:
            if name in table:
                raise ValueError(f"the architecture {name!r} is already that of {table[name].name}")
            table[name] = family


def read_model_config(checkpoint: Checkpoint) -> ModelConfig:
    """Detect the family of a checkpoint and read its configuration."""
    family = detect_family(checkpoint)
    embedding = checkpoint.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None and len(embedding.shape) == 2 else None
    if checkpoint.format == "gguf":
        return model_config_from_gguf(checkpoint.metadata, family, rows)
    return model_config_from_hf(checkpoint.metadata["config"], family, rows)


def gguf_architecture(config: ModelConfig) -> str:
    """Return the GGUF architecture of the family; Mistral is `llama`."""
    return config.family.gguf[0] if config.family.gguf else "llama"


def detect_family(checkpoint: Checkpoint) -> Family:
    """Return the family by general.architecture or model_type (or the class in `architectures`)."""
    table = BY_GGUF if checkpoint.format == "gguf" else BY_HF
    name = checkpoint.architecture
    if not name and checkpoint.format != "gguf":
        name = _from_class_name(checkpoint.metadata["config"])
    if not name:
        key = "general.architecture" if checkpoint.format == "gguf" else "model_type"
        raise ModelFileError(f"{checkpoint.path.name}: {key!r} is missing, so the architecture is unknown")
    if name not in table:
        raise UnsupportedModelError(f"architecture {name!r} is not supported (supported: {', '.join(table)})")
    return table[name]


def _from_class_name(config: Mapping[str, Any]) -> str | None:
    """Return `llama` for `LlamaForCausalLM`, for a config.json without model_type."""
    names = config.get("architectures") or [""]
    name = str(names[0]).removesuffix("ForCausalLM").lower() if isinstance(names, list) else ""
    return {"gemma3": "gemma3_text"}.get(name, name) or None
