"""The supported families as a table: what differs between their decoders is data. A new family is a new row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from ..config import AttentionSpec, ExpertSpec, Family, ModelConfig, NormSpec, RopeSpec, TensorLayout
from ..errors import ModelFileError, UnsupportedModelError
from ..weights import Checkpoint
from .metadata import model_config_from_gguf, model_config_from_hf
from .pooling_config import is_pooling_model

FAMILIES = (
    Family("llama", gguf=("llama",), hf=("llama",), rope=RopeSpec(interleaved=("gguf",)), experts=ExpertSpec()),
    # GGUF files of Mistral and Mixtral have the architecture llama
    Family("mistral", gguf=(), hf=("mistral",), hf_defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    Family(
        "mixtral", gguf=(), hf=("mixtral",), experts=ExpertSpec(),
        hf_defaults={
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    qwen2 := Family(
        "qwen2", gguf=("qwen2",), hf=("qwen2",), attention=AttentionSpec(qkv_bias=True),
        hf_defaults={
            "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
        },
    ),
    # text sides of models that see images
    replace(
        qwen2, name="qwen2vl", gguf=("qwen2vl",), hf=("qwen2_5_vl_text",), rope=RopeSpec(sections=(16, 24, 24)),
        hf_defaults={**qwen2.hf_defaults, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    ),
    qwen3 := Family(
        "qwen3", gguf=("qwen3",), hf=("qwen3",), attention=AttentionSpec(qk_norm="head"),
        hf_defaults={**qwen2.hf_defaults, "head_dim": 128},
    ),
    replace(
        qwen3, name="qwen3vl", gguf=("qwen3vl",), hf=("qwen3_vl_text",),
        rope=RopeSpec(sections=(24, 20, 20), alternates=True), hf_defaults={**qwen3.hf_defaults, "rope_theta": 5e5},
    ),
    replace(
        qwen2, name="qwen2moe", gguf=("qwen2moe",), hf=("qwen2_moe",),
        experts=ExpertSpec(renormalize=False, shared_gate=True),
        hf_defaults={
            **qwen2.hf_defaults, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "norm_topk_prob": False,
        },
    ),
    qwen3moe := Family(
        "qwen3moe", gguf=("qwen3moe",), hf=("qwen3_moe",), attention=AttentionSpec(qk_norm="head"),
        experts=ExpertSpec(),
        hf_defaults={
            "num_key_value_heads": 4, "use_sliding_window": False, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "norm_topk_prob": False,
        },
    ),
    replace(
        qwen3moe, name="qwen3vlmoe", gguf=("qwen3vlmoe",), hf=("qwen3_vl_moe_text",),
        rope=RopeSpec(sections=(24, 20, 20), alternates=True),
        hf_defaults={
            **qwen3moe.hf_defaults, "rope_theta": 5e5, "num_key_value_heads": 16, "num_experts": 60,
            "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        },
    ),
    qwen35 := Family(
        "qwen35", gguf=("qwen35",), hf=("qwen3_5_text", "qwen3_5"), mixer="gated_delta",
        rope=RopeSpec(sections=(11, 11, 10), alternates=True),
        attention=AttentionSpec(qk_norm="head", gated=True),
        tensors=TensorLayout(norm_plus_one=True, gguf_mlp_norm="post_attention_norm", gguf_tiled_heads=True),
        hf_defaults={
            "num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        },
    ),
    replace(
        qwen35, name="qwen35moe", gguf=("qwen35moe",), hf=("qwen3_5_moe_text", "qwen3_5_moe"),
        experts=ExpertSpec(shared_gate=True),
        hf_defaults={
            **qwen35.hf_defaults, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "intermediate_size": 512,
        },
    ),
    replace(
        qwen35, name="qwen3next", gguf=("qwen3next",), hf=("qwen3_next",), experts=ExpertSpec(shared_gate=True),
        tensors=TensorLayout(norm_plus_one=True, gguf_mlp_norm="post_attention_norm"),
        hf_defaults={
            **qwen35.hf_defaults, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        },
    ),
    Family(
        "phi3", gguf=("phi3",), hf=("phi3",), tensors=TensorLayout(fused_qkv=True, fused_gate_up=True),
        hf_defaults={"rms_norm_eps": 1e-5},
    ),
    Family(
        "gemma2", gguf=("gemma2",), hf=("gemma2",), activation="gelu_tanh", scaled_embedding=True, final_cap=30.0,
        attention=AttentionSpec(window=4096, full_every=2, cap=50.0), norms=NormSpec(post=True),
        tensors=TensorLayout(norm_plus_one=True),
        hf_defaults={
            "head_dim": 256, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
    ),
    gemma3 := Family(
        "gemma3", gguf=("gemma3",), hf=("gemma3_text",), activation="gelu_tanh", scaled_embedding=True,
        attention=AttentionSpec(qk_norm="head", full_every=6, image_spans="all"), rope=RopeSpec(local_base=10000.0),
        norms=NormSpec(post=True), tensors=TensorLayout(norm_plus_one=True),
        hf_defaults={
            "head_dim": 256, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
            "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        },
    ),
    gemma4 := Family(
        "gemma4", gguf=("gemma4",), hf=("gemma4_text",), activation="gelu_tanh", scaled_embedding=True, final_cap=30.0,
        attention=AttentionSpec(
            qk_norm="head", v_norm=True, keys_as_values=True, full_every=6, scale=1.0, image_spans="window"
        ),
        rope=RopeSpec(local_base=10000.0), norms=NormSpec(post=True), experts=ExpertSpec(parallel=True),
        layer_shapes=True,
        hf_defaults={
            "head_dim": 256, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True, "global_head_dim": 512, "enable_moe_block": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "hidden_size_per_layer_input": 256, "sliding_window": 512,
        },
    ),
    # GGUF files of the unified models have the architecture gemma4
    replace(
        gemma4, name="gemma4_unified", gguf=(), hf=("gemma4_unified_text",),
        hf_defaults={**gemma4.hf_defaults, "hidden_size_per_layer_input": 0, "sliding_window": 1024},
    ),
    granite := Family(
        "granite", gguf=("granite",), hf=("granite",), rope=RopeSpec(interleaved=("gguf",)), multipliers=True,
        hf_defaults={"attention_multiplier": 1.0},
    ),
    Family(
        "smollm3", gguf=("smollm3",), hf=("smollm3",), rope=RopeSpec(interleaved=("gguf",), nope_every=4),
        hf_defaults={
            "num_key_value_heads": 4, "rope_theta": 2e6, "use_sliding_window": False, "tie_word_embeddings": True,
        },
    ),
    Family(
        "mistral3", gguf=("mistral3",), hf=("ministral3",), rope=RopeSpec(interleaved=("gguf",)),
        hf_defaults={
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
                "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    olmo2 := Family(
        "olmo2", gguf=("olmo2",), hf=("olmo2",), attention=AttentionSpec(qk_norm="wide", full_every=4),
        rope=RopeSpec(unscaled_windows=True), norms=NormSpec(pre=False, post=True), hf_defaults={"rms_norm_eps": 1e-5},
    ),
    # GGUF files of OLMo 3 have the architecture olmo2
    replace(
        olmo2, name="olmo3", gguf=(), hf=("olmo3",),
        hf_defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
    ),
    Family(
        "glm4", gguf=("glm4",), hf=("glm4",), rope=RopeSpec(interleaved=("gguf", "safetensors")),
        norms=NormSpec(post=True), tensors=TensorLayout(fused_gate_up=True),
        hf_defaults={
            "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5,
        },
    ),
    Family(
        "olmoe", gguf=("olmoe",), hf=("olmoe",), attention=AttentionSpec(qk_norm="wide"),
        experts=ExpertSpec(renormalize=False),
        hf_defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    ),
    replace(
        granite, name="granitemoe", gguf=("granitemoe",), hf=("granitemoe",), experts=ExpertSpec(),
        hf_defaults={"attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    Family(
        "glm4moe", gguf=("glm4moe",), hf=("glm4_moe",), attention=AttentionSpec(qk_norm="optional"),
        experts=ExpertSpec(scoring="sigmoid"), tensors=TensorLayout(gguf_mlp_norm="post_attention_norm"),
        hf_defaults={
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "n_routed_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
        },
    ),
    lfm2 := Family(
        "lfm2", gguf=("lfm2",), hf=("lfm2",), mixer="short_conv", attention=AttentionSpec(qk_norm="head"),
        tensors=TensorLayout(output_norm="token_embd_norm"),
        hf_defaults={
            "num_key_value_heads": 8, "norm_eps": 1e-5, "rope_theta": 1e6, "conv_L_cache": 3,
            "tie_word_embeddings": True, "block_auto_adjust_ff_dim": True, "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
        },
    ),
    replace(
        lfm2, name="lfm2moe", gguf=("lfm2moe",), hf=("lfm2_moe",), experts=ExpertSpec(scoring="sigmoid"),
        hf_defaults={
            **lfm2.hf_defaults, "block_auto_adjust_ff_dim": False, "num_experts": 32, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792, "num_dense_layers": 2,
        },
    ),
    Family(
        "gpt-oss", gguf=("gpt-oss",), hf=("gpt_oss",), activation="swiglu_oai",
        attention=AttentionSpec(qkv_bias=True, output_bias=True, sinks=True, full_every=2),
        rope=RopeSpec(yarn_truncate=False), experts=ExpertSpec(bias=True),
        tensors=TensorLayout(gguf_mlp_norm="post_attention_norm"),
        hf_defaults={
            "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "num_local_experts": 128,
            "num_experts_per_tok": 4, "sliding_window": 128,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            },
        },
    ),
    bert := Family(
        "bert", gguf=("bert",), hf=("bert",), is_encoder=True, learned_positions=True, activation="gelu",
        gated_mlp=False, attention=AttentionSpec(qkv_bias=True, output_bias=True),
        norms=NormSpec(pre=False, stream=True, layer=True),
        hf_defaults={"max_position_embeddings": 512, "type_vocab_size": 2},
    ),
    # GGUF files of RoBERTa and XLM-RoBERTa have the architecture bert
    replace(bert, name="roberta", gguf=(), hf=("roberta", "xlm-roberta", "camembert")),
    Family(
        "nomic-bert", gguf=("nomic-bert",), hf=("nomic_bert",), is_encoder=True,
        norms=NormSpec(pre=False, stream=True, layer=True),
        hf_defaults={"max_position_embeddings": 2048, "rope_theta": 1000.0},
    ),
    Family(
        "modernbert", gguf=("modern-bert",), hf=("modernbert",), is_encoder=True, activation="gelu",
        attention=AttentionSpec(full_every=3, full_first=True), rope=RopeSpec(local_base=10000.0),
        norms=NormSpec(layer=True), tensors=TensorLayout(fused_qkv=True, fused_gate_up=True),
        classifier_pooling="mean", classifier_activation="gelu", hf_defaults={"max_position_embeddings": 8192},
    ),
    # its folders have the model_type gemma3_text, with bidirectional attention
    replace(gemma3, name="gemma-embedding", gguf=("gemma-embedding",), hf=(), is_encoder=True, hf_defaults={}),
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
                raise ValueError(f"the architecture {name!r} already belongs to {table[name].name}")
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
