"""The supported families as a table: what differs between their decoders is data. A new family is a new row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from ..config import Family, ModelConfig
from ..errors import ModelFileError, UnsupportedModelError
from ..weights import Checkpoint
from .metadata import model_config_from_gguf, model_config_from_hf
from .pooling_config import is_pooling_model

QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
GEMMA_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
MINISTRAL_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
OLMO: dict[str, Any] = {
    "pre_norms": False,
    "post_norms": True,
    "qk_norm": True,
    "wide_qk_norm": True,
    "full_every": 4,
    "unscaled_windows": True,
}
LFM2_DEFAULTS = {
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "conv_L_cache": 3,
    "tie_word_embeddings": True,
    "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
}
GPT_OSS_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
    },
}
GEMMA4: dict[str, Any] = {
    "activation": "gelu_tanh",
    "qk_norm": True,
    "v_norm": True,
    "optional_v": True,
    "post_norms": True,
    "scaled_embedding": True,
    "full_every": 6,
    "layer_shapes": True,
    "default_attention_scale": 1.0,
    "default_local_base": 10000.0,
    "default_final_cap": 30.0,
    "moe": True,
    "parallel_experts": True,
}
GEMMA4_DEFAULTS = {
    **{key: GEMMA_DEFAULTS[key] for key in ("head_dim", "num_key_value_heads", "hidden_activation")},
    "tie_word_embeddings": True,
    "global_head_dim": 512,
    "enable_moe_block": False,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GLM4_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5}
QWEN_LINEAR_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
QWEN_LINEAR: dict[str, Any] = {
    "qk_norm": True,
    "gated_attention": True,
    "linear_attention": True,
    "norm_plus_one": True,
    "gguf_mlp_norm": "post_attention_norm",
}
GEMMA3: dict[str, Any] = {
    "activation": "gelu_tanh",
    "qk_norm": True,
    "post_norms": True,
    "scaled_embedding": True,
    "norm_plus_one": True,
    "full_every": 6,
    "default_local_base": 10000.0,
}
BERT: dict[str, Any] = {
    "is_encoder": True,
    "layer_norm": True,
    "stream_norms": True,
    "learned_positions": True,
    "gated_mlp": False,
    "pre_norms": False,
    "qkv_bias": True,
    "output_bias": True,
}

FAMILIES = (
    Family("llama", gguf=("llama",), hf=("llama",), rope_interleaved=True, moe=True),
    # GGUF files of Mistral have the architecture llama
    Family("mistral", gguf=(), hf=("mistral",), hf_defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    Family(  # its GGUF files, too
        "mixtral", gguf=(), hf=("mixtral",), moe=True,
        hf_defaults={
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    Family("qwen2", gguf=("qwen2",), hf=("qwen2",), qkv_bias=True, hf_defaults=QWEN_DEFAULTS),
    Family("qwen3", gguf=("qwen3",), hf=("qwen3",), qk_norm=True, hf_defaults={**QWEN_DEFAULTS, "head_dim": 128}),
    Family(
        "qwen2moe", gguf=("qwen2moe",), hf=("qwen2_moe",), qkv_bias=True, moe=True, expert_norm=False,
        shared_expert_gate=True,
        hf_defaults={
            **QWEN_DEFAULTS, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "norm_topk_prob": False,
        },
    ),
    Family(
        "qwen3moe", gguf=("qwen3moe",), hf=("qwen3_moe",), qk_norm=True, moe=True,
        hf_defaults={
            "num_key_value_heads": 4, "use_sliding_window": False, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "norm_topk_prob": False,
        },
    ),
    Family(
        "qwen35", gguf=("qwen35",), hf=("qwen3_5_text", "qwen3_5"), **QWEN_LINEAR, gguf_tiled_heads=True,
        hf_defaults={**QWEN_LINEAR_DEFAULTS, "num_key_value_heads": 4},
    ),
    Family(
        "qwen35moe", gguf=("qwen35moe",), hf=("qwen3_5_moe_text", "qwen3_5_moe"), **QWEN_LINEAR, gguf_tiled_heads=True,
        moe=True, shared_expert_gate=True,
        hf_defaults={
            **QWEN_LINEAR_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "intermediate_size": 512,
        },
    ),
    Family(
        "qwen3next", gguf=("qwen3next",), hf=("qwen3_next",), **QWEN_LINEAR, moe=True, shared_expert_gate=True,
        hf_defaults={
            **QWEN_LINEAR_DEFAULTS, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    Family(
        "phi3", gguf=("phi3",), hf=("phi3",), fused_qkv=True, fused_gate_up=True, hf_defaults={"rms_norm_eps": 1e-5}
    ),
    Family(
        "gemma2", gguf=("gemma2",), hf=("gemma2",), activation="gelu_tanh", post_norms=True, scaled_embedding=True,
        norm_plus_one=True, full_every=2, default_window=4096, default_attention_cap=50.0, default_final_cap=30.0,
        hf_defaults={**GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    Family(
        "gemma3", gguf=("gemma3",), hf=("gemma3_text",), **GEMMA3,
        hf_defaults={**GEMMA_DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    ),
    Family(
        "gemma4", gguf=("gemma4",), hf=("gemma4_text",), **GEMMA4,
        hf_defaults={**GEMMA4_DEFAULTS, "hidden_size_per_layer_input": 256, "sliding_window": 512},
    ),
    Family(  # its GGUF files have the architecture gemma4
        "gemma4_unified", gguf=(), hf=("gemma4_unified_text",), **GEMMA4,
        hf_defaults={**GEMMA4_DEFAULTS, "sliding_window": 1024},
    ),
    Family(
        "granite", gguf=("granite",), hf=("granite",), rope_interleaved=True, multipliers=True,
        hf_defaults={"attention_multiplier": 1.0},
    ),
    Family(
        "smollm3", gguf=("smollm3",), hf=("smollm3",), rope_interleaved=True, nope_every=4,
        hf_defaults={
            "num_key_value_heads": 4, "rope_theta": 2e6, "use_sliding_window": False, "tie_word_embeddings": True
        },
    ),
    Family(
        "mistral3", gguf=("mistral3",), hf=("ministral3",), rope_interleaved=True, hf_defaults=MINISTRAL_DEFAULTS
    ),
    Family("olmo2", gguf=("olmo2",), hf=("olmo2",), **OLMO, hf_defaults={"rms_norm_eps": 1e-5}),
    # GGUF files of OLMo 3 have the architecture olmo2
    Family(
        "olmo3", gguf=(), hf=("olmo3",), **OLMO,
        hf_defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
    ),
    Family(
        "glm4", gguf=("glm4",), hf=("glm4",), rope_interleaved=True, hf_rope_interleaved=True, post_norms=True,
        fused_gate_up=True, hf_defaults=GLM4_DEFAULTS,
    ),
    Family(
        "olmoe", gguf=("olmoe",), hf=("olmoe",), qk_norm=True, wide_qk_norm=True, moe=True, expert_norm=False,
        hf_defaults={
            "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False
        },
    ),
    Family(
        "granitemoe", gguf=("granitemoe",), hf=("granitemoe",), rope_interleaved=True, multipliers=True, moe=True,
        hf_defaults={"attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    Family(
        "glm4moe", gguf=("glm4moe",), hf=("glm4_moe",), qk_norm=True, optional_qk_norm=True,
        gguf_mlp_norm="post_attention_norm", moe=True, expert_scoring="sigmoid",
        hf_defaults={
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "n_routed_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
        },
    ),
    Family(
        "lfm2", gguf=("lfm2",), hf=("lfm2",), qk_norm=True, short_conv=True, output_norm="token_embd_norm",
        hf_defaults=LFM2_DEFAULTS,
    ),
    Family(
        "lfm2moe", gguf=("lfm2moe",), hf=("lfm2_moe",), qk_norm=True, short_conv=True, output_norm="token_embd_norm",
        moe=True, expert_scoring="sigmoid",
        hf_defaults={
            **LFM2_DEFAULTS, "block_auto_adjust_ff_dim": False, "num_experts": 32, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792, "num_dense_layers": 2,
        },
    ),
    Family(
        "gpt-oss", gguf=("gpt-oss",), hf=("gpt_oss",), activation="swiglu_oai", qkv_bias=True, output_bias=True,
        attention_sinks=True, full_every=2, yarn_truncate=False, gguf_mlp_norm="post_attention_norm", moe=True,
        expert_bias=True, hf_defaults=GPT_OSS_DEFAULTS,
    ),
    Family(
        "bert", gguf=("bert",), hf=("bert",), **BERT, activation="gelu",
        hf_defaults={"max_position_embeddings": 512, "type_vocab_size": 2},
    ),
    # GGUF files of RoBERTa and XLM-RoBERTa have the architecture bert
    Family(
        "roberta", gguf=(), hf=("roberta", "xlm-roberta", "camembert"), **BERT, activation="gelu",
        hf_defaults={"max_position_embeddings": 512, "type_vocab_size": 2},
    ),
    Family(
        "nomic-bert", gguf=("nomic-bert",), hf=("nomic_bert",), is_encoder=True, layer_norm=True, stream_norms=True,
        pre_norms=False, hf_defaults={"max_position_embeddings": 2048, "rope_theta": 1000.0},
    ),
    Family(
        "modernbert", gguf=("modern-bert",), hf=("modernbert",), is_encoder=True, layer_norm=True, fused_qkv=True,
        fused_gate_up=True, activation="gelu", full_every=3, full_first=True, default_local_base=10000.0,
        classifier_pooling="mean", classifier_activation="gelu", hf_defaults={"max_position_embeddings": 8192},
    ),
    Family(  # its folders have the model_type gemma3_text, with bidirectional attention
        "gemma-embedding", gguf=("gemma-embedding",), hf=(), **GEMMA3, is_encoder=True,
    ),
)  # fmt: skip
GGUF_OF = {
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "gemma4_unified": "gemma4",
    "roberta": "bert",
}  # families without an architecture of their own
BY_GGUF = {name: family for family in FAMILIES for name in family.gguf}
BY_HF = {name: family for family in FAMILIES for name in family.hf}
CLASS_SUFFIX = re.compile(r"For(CausalLM|ConditionalGeneration)$")


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
        return _with_tables(model_config_from_gguf(checkpoint.metadata, family, rows), checkpoint)
    config = _with_tables(model_config_from_hf(checkpoint.metadata["config"], family, rows), checkpoint)
    if not config.nextn_layers and f"blk.{config.n_layers}.nextn.eh_proj.weight" in checkpoint.tensors:
        return replace(config, nextn_layers=1)  # config.json of Qwen3-Next does not say so
    return config


def require_decoder(checkpoint: Checkpoint) -> None:
    """Raise if a checkpoint is of an encoder, which generates no text."""
    config = read_model_config(checkpoint)
    if is_pooling_model(checkpoint, config):
        raise UnsupportedModelError(
            f"{checkpoint.path.name} is an embedding model ({config.family.name}) and generates no text: use `embed`, "
            "Embedder, or serve --embedding-model"
        )


def _with_tables(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Return the configuration of an encoder with the sizes of its tables of positions and segments."""
    if not config.family.is_encoder:
        return config
    tables = (checkpoint.tensors.get(f"{name}.weight") for name in ("position_embd", "token_types"))
    positions, types = (0 if table is None or len(table.shape) != 2 else table.shape[0] for table in tables)
    return replace(config, context_length=positions or config.context_length, token_types=types)


def gguf_architecture(config: ModelConfig) -> str:
    """Return the GGUF architecture of the family; Mistral is `llama`."""
    if config.family.name == "gemma3" and not config.causal:
        return "gemma-embedding"
    return config.family.gguf[0] if config.family.gguf else GGUF_OF[config.family.name]


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
        nearest = get_close_matches(name, table, n=3, cutoff=0.4)
        known = f"nearest of the {len(table)} that are: {', '.join(nearest)}" if nearest else f"are: {', '.join(table)}"
        raise UnsupportedModelError(f"architecture {name!r} is not supported ({known})")
    return table[name]


def _from_class_name(config: Mapping[str, Any]) -> str | None:
    """Return `llama` for `LlamaForCausalLM`, for a config.json without model_type."""
    names = config.get("architectures") or [""]
    name = CLASS_SUFFIX.sub("", str(names[0])).lower().replace("_", "") if isinstance(names, list) else ""
    by_class = {kind.replace("_", ""): kind for kind in BY_HF}
    return {
        "gemma3": "gemma3_text",
        "gemma4": "gemma4_text",
        "gemma4unified": "gemma4_unified_text",
        "mistral3": "mistral",
    }.get(name, by_class.get(name, name)) or None
