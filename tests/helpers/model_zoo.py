"""Small random models of every family, made with transformers, and the same weights written as GGUF.

Logits spread over 5 and more, norms and biases are random, and windows are shorter than the sequences, so that a
missing feature of a family changes the result. torch and transformers are imported by the functions that use them:
it takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from llm_worker_rbee.config import Family
from llm_worker_rbee.layers.rope import inverse_frequencies, scaled_table
from llm_worker_rbee.models.families import BY_GGUF, BY_HF, GGUF_OF
from llm_worker_rbee.models.metadata import model_config_from_hf
from llm_worker_rbee.weights.gguf_writer import Raw, TensorLike, Typed, write_gguf
from llm_worker_rbee.weights.safetensors import gguf_name, names_of_layers
from tests.helpers import linear_attention

VOCAB = 160
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + 0.5 * i for i in range(6)],
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 64}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Variant:
    """One member of the zoo."""

    family: str
    settings: dict[str, Any] = field(default_factory=dict)
    features: tuple[str, ...] = ()  # features whose removal must change the result (see model_runs.py)
    max_context: int | None = None
    length: int = 24


ZOO = {
    "llama": Variant("llama", {"rope_parameters": DEFAULT_ROPE}),
    "llama-tied": Variant(
        "llama", {"rope_parameters": {**DEFAULT_ROPE, "rope_theta": 100000.0}, "tie_word_embeddings": True}
    ),
    "llama-bias": Variant(
        "llama", {"rope_parameters": DEFAULT_ROPE, "attention_bias": True, "mlp_bias": True}, ("bias",)
    ),
    "llama3": Variant("llama", {"rope_parameters": LLAMA3}, ("rope scaling",)),
    "llama-linear": Variant("llama", {"rope_parameters": LINEAR}, ("rope scaling",)),
    "llama-yarn": Variant("llama", {"rope_parameters": YARN}, ("rope scaling",)),
    "mistral": Variant("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": Variant("mistral", {"sliding_window": 7, "head_dim": 16}, ("window",)),
    "qwen2": Variant("qwen2", {"rope_parameters": DEFAULT_ROPE}, ("bias",)),
    "qwen2-window": Variant(
        "qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, ("bias", "window")
    ),
    "qwen3": Variant("qwen3", {"head_dim": 24}, ("q/k norm",)),
    "phi3": Variant(
        "phi3", {"rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 1.0}, "sliding_window": None}
    ),
    "phi3-window": Variant(
        "phi3", {"rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 1.0}, "sliding_window": 7}, ("window",)
    ),
    "phi3-short": Variant(
        "phi3",
        {"rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75}, "original_max_position_embeddings": 32},
        ("rope scaling",),
        max_context=32,
        length=18,
    ),
    "phi3-long": Variant(
        "phi3",
        {"rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75}, "original_max_position_embeddings": 32},
        ("rope scaling",),
        max_context=128,
        length=48,
    ),
    "gemma2": Variant(
        "gemma2",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 24,
            "sliding_window": 7,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 6.0,
        },
        ("score soft cap", "logit soft cap", "window", "post norms", "embedding scale"),
    ),
    "gemma2-scale": Variant("gemma2", {"head_dim": 24, "query_pre_attn_scalar": 6, "tie_word_embeddings": True}),
    "gemma3": Variant(
        "gemma3_text",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 24,
            "sliding_window": 7,
            "tie_word_embeddings": True,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {**LINEAR, "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": DEFAULT_ROPE,
            },
        },
        ("q/k norm", "window", "rope scaling", "local rope base", "post norms", "embedding scale"),
    ),
}
ZOO |= {
    "phi4-mini": Variant(
        "phi3",
        {
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 32,
            "sliding_window": 100,
            "tie_word_embeddings": True,
        },
        ("rope scaling",),
        max_context=128,
        length=40,
    ),
    "granite": Variant(
        "granite",
        {
            "rope_parameters": DEFAULT_ROPE,
            "tie_word_embeddings": True,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.125,
            "logits_scaling": 0.5,
            "rms_norm_eps": 1e-2,
        },
        ("embedding multiplier", "residual multiplier", "attention multiplier", "logits scaling"),
    ),
    "smollm3": Variant(
        "smollm3",
        {"rope_parameters": DEFAULT_ROPE, "num_hidden_layers": 5, "tie_word_embeddings": True},
        ("layers without rope",),
    ),
    "ministral3": Variant(
        "ministral3",
        {
            "head_dim": 24,
            "rope_parameters": {
                **YARN, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 0.5,
                "llama_4_scaling_beta": 0.3, "beta_fast": 16.0, "beta_slow": 1.0,
            },
        },
        ("rope scaling", "log multiplier", "attention temperature"),
    ),
    "olmo2": Variant("olmo2", {"rope_parameters": DEFAULT_ROPE}, ("q/k norm", "wide q/k norm", "post norms")),
    "olmo3": Variant(
        "olmo3",
        {
            "sliding_window": 7,
            "num_hidden_layers": 5,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT_ROPE},
        },
        ("q/k norm", "window", "rope scaling", "local rope base"),
    ),
    "glm4": Variant(
        "glm4",
        {
            "head_dim": 24,
            "rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5},
            "attention_bias": True,
        },
        ("bias", "post norms", "partial rotation"),
    ),
}  # fmt: skip
ZOO |= {
    "mixtral": Variant("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}, ("weights that sum up to 1",)),
    "qwen2moe": Variant(
        "qwen2_moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, **SHARED_EXPERT},
        ("bias", "shared expert", "shared gate"),
    ),
    "qwen2moe-dense": Variant(
        "qwen2_moe",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1],
            "norm_topk_prob": True, **SHARED_EXPERT,
        },
        ("weights that sum up to 1",),
    ),
    "qwen3moe": Variant(
        "qwen3_moe",
        {
            "head_dim": 24, "num_local_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
        ("q/k norm", "weights that sum up to 1"),
    ),
    "olmoe": Variant("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}, ("q/k norm", "wide q/k norm")),
    "granitemoe": Variant(
        "granitemoe",
        {
            "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 64, "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22, "attention_multiplier": 0.125, "logits_scaling": 0.5,
        },
        ("residual multiplier", "weights that sum up to 1"),
    ),
    "glm4moe": Variant(
        "glm4_moe",
        {
            "head_dim": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
            "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "use_qk_norm": True,
            "attention_bias": True, "num_nextn_predict_layers": 0,
        },
        ("bias", "q/k norm", "shared expert", "selection bias", "weights that sum up to 1", "scale of experts"),
    ),
}  # fmt: skip
ZOO |= {
    "lfm2": Variant(
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 32, "tie_word_embeddings": True, "norm_eps": 1e-5,
        },
        ("q/k norm", "short convolution"),
    ),
    "lfm2-wide": Variant(
        "lfm2",
        {
            "layer_types": ["full_attention", "conv", "conv", "full_attention"], "num_hidden_layers": 4,
            "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False, "norm_eps": 1e-5,
        },
    ),
    "lfm2moe": Variant(
        "lfm2_moe",
        {
            "layer_types": ["conv", "conv", "full_attention"], "num_experts": 6, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "num_dense_layers": 1, "norm_eps": 1e-5, "tie_word_embeddings": True,
        },
        ("q/k norm", "short convolution", "selection bias", "weights that sum up to 1"),
    ),
    "gpt-oss": Variant(
        "gpt_oss",
        {
            "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7,
            "rope_parameters": {**YARN, "truncate": False},
        },
        (
            "bias", "output bias", "router bias", "bias of experts", "sinks", "window", "rope scaling",
            "untruncated ramp", "swiglu_oai", "limit of swiglu_oai", "weights that sum up to 1",
        ),
    ),
}  # fmt: skip
QWEN_LINEAR = {
    "head_dim": 32, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.25},
}  # fmt: skip
QWEN_MROPE = {
    **QWEN_LINEAR,
    "rope_parameters": {**QWEN_LINEAR["rope_parameters"], "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, **SHARED_EXPERT}
LINEAR_FEATURES = ("decay", "convolution", "attention gate", "q/k norm", "partial rotation")
ZOO |= {
    "qwen3_5": Variant("qwen3_5_text", QWEN_MROPE, LINEAR_FEATURES),
    "qwen3_5_moe": Variant("qwen3_5_moe_text", {**QWEN_MROPE, **QWEN_EXPERTS}, ("decay", "shared gate")),
    "qwen3_next": Variant(
        "qwen3_next", {**QWEN_LINEAR, **QWEN_EXPERTS}, ("decay", "attention gate", "shared expert", "shared gate")
    ),
}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GEMMA4_SHAPE = {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 7, "tie_word_embeddings": True, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0,
    "rope_parameters": {"full_attention": PROPORTIONAL, "sliding_attention": {**DEFAULT_ROPE, "rope_theta": 100.0}},
}  # fmt: skip
GEMMA4_FEATURES = ("q/k norm", "value norm", "window", "rope scaling", "local rope base", "layer scale")
ZOO |= {
    "gemma4": Variant(
        "gemma4_text",
        {
            **GEMMA4_SHAPE, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 6.0,
        },
        (*GEMMA4_FEATURES, "attention multiplier", "logit soft cap", "post norms", "embedding scale"),
    ),
    "gemma4-e": Variant(
        "gemma4_text",
        {
            **GEMMA4_SHAPE, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB,
            "num_hidden_layers": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
        },
        (*GEMMA4_FEATURES, "per-layer inputs", "per-layer tokens"),
    ),
    "gemma4-moe": Variant(
        "gemma4_text",
        {
            **GEMMA4_SHAPE, "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 32,
        },
        ("parallel experts", "scales of experts"),
    ),
    "gemma4-unified": Variant("gemma4_unified_text", {**GEMMA4_SHAPE, "num_global_key_value_heads": 1}),
}  # fmt: skip
NO_GGUF_KEY = {"qwen2-window", "gemma2-scale", "qwen2moe-dense"}  # features without a GGUF key


def family_of(variant: Variant) -> Family:
    return BY_HF[variant.family]


def architecture_of(variant: Variant) -> str:
    family = family_of(variant)
    return family.gguf[0] if family.gguf else GGUF_OF[family.name]


def make_hf(variant: Variant, seed: int = 0) -> Any:
    """Return a float32 transformers model with random weights."""
    import torch
    import transformers

    settings = {**SHAPE, "tie_word_embeddings": False, **variant.settings}
    config = transformers.AutoConfig.for_model(variant.family, **settings)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    plus_one = family_of(variant).tensors.norm_plus_one
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(torch.rand_like(weight) + 0.5 - (1.0 if plus_one else 0.0))
            elif name.endswith("scale"):  # of a router
                weight.copy_(torch.rand_like(weight) + 0.5)
            elif name.endswith("bias") or "embed_tokens" in name:
                factor = 4 if name.endswith("gate_up_proj_bias") else 1  # some exceed the limit of the activation
                weight.copy_(torch.randn_like(weight) * factor)
            else:
                weight.copy_(torch.randn_like(weight) * 1.5 / weight.shape[-1] ** 0.5)
        for name, values in model.named_buffers():
            if name.endswith("bias"):  # of a router
                values.copy_(torch.rand_like(values))
            if name.endswith("layer_scalar"):
                values.copy_(torch.rand_like(values) + 0.5)
    model.generation_config.eos_token_id = None
    return model


def save_hf(model: Any, folder: Path, shard: str = "50GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def interleave(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Permute rows from RoPE pairs (i, i + half) to neighbours, as in GGUF files of llama."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(variant: Variant, model: Any) -> dict[str, TensorLike]:
    family, c = family_of(variant), model.config
    c.allow_global_per_layer_attribute_access = True  # of layers with shapes of their own
    names = names_of_layers(model.state_dict())
    interleaved = BY_GGUF[architecture_of(variant)].rope.interleaved
    is_permuted = "gguf" in interleaved and "safetensors" not in family.rope.interleaved
    out: dict[str, TensorLike] = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        value = weight.numpy()
        ours = gguf_name(name, names)
        if is_permuted and ".attn_q." in ours:
            value = interleave(value, c.num_attention_heads)
        if is_permuted and ".attn_k." in ours:
            value = interleave(value, c.num_key_value_heads)
        if ".ssm_" in ours or (family.mixer == "gated_delta" and ours.split(".")[-2] in ("attn_qkv", "attn_gate")):
            out |= linear_attention.gguf_tensors(ours, value, c, is_tiled=family.tensors.gguf_tiled_heads)
            continue
        if family.tensors.norm_plus_one and "norm" in ours:
            value = value + np.float32(1)
        ours = ours.replace("ffn_norm", family.tensors.gguf_mlp_norm)
        is_gpt_oss = variant.family == "gpt_oss"
        if is_gpt_oss and "_exps.weight" in ours:
            value = value.transpose(0, 2, 1)
        if "ffn_gate_up_exps." in ours:
            halves = (value[:, 0::2], value[:, 1::2]) if is_gpt_oss else np.split(value, 2, axis=1)
            parts = zip(("gate", "up"), halves, strict=True)
            out |= {ours.replace("gate_up", role): np.ascontiguousarray(part) for role, part in parts}
            continue
        if ".shortconv.conv." in ours:
            value = value[:, 0]
        out[ours] = np.ascontiguousarray(value[0] if "gate_inp_shexp" in ours else value)
    return out | rope_tensors(c)


def rope_tensors(c: Any) -> dict[str, TensorLike]:
    """Return RoPE scalings that GGUF stores as tensors."""
    rope = c.rope_parameters
    if rope.get("full_attention", {}).get("rope_type") == "proportional":
        pairs = c.per_layer_config["full_attention"].head_dim // 2
        turned = int(pairs * rope["full_attention"]["partial_rotary_factor"])
        return {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * (pairs - turned), np.float32)}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in ("short", "long")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    ours = model_config_from_hf(c.to_dict(), BY_HF[c.model_type])
    plain = inverse_frequencies(ours.rope_base, ours.rope_dim)
    scaled = scaled_table(plain, ours.rope_base, ours.rope_scaling, 128).inv_freq
    return {"rope_freqs.weight": np.asarray(plain / scaled, np.float32)}


def gguf_metadata(variant: Variant, model: Any) -> dict[str, Any]:
    """Return the keys that llama.cpp's converter writes."""
    c, family = model.config, family_of(variant)
    c.allow_global_per_layer_attribute_access = True  # of layers with shapes of their own
    arch = architecture_of(variant)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    rope = c.rope_parameters
    full, local = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    keys: dict[str, Any] = {
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "rope.freq_base": float(full["rope_theta"]),
        "rope.dimension_count": int(head_dim * full.get("partial_rotary_factor", 1.0)),
    }
    if full.get("rope_type") in ("linear", "yarn"):
        keys |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": float(full["factor"])}
    if "original_max_position_embeddings" in full:
        keys["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
    if full.get("rope_type") == "longrope":
        factor = c.max_position_embeddings / full["original_max_position_embeddings"]
        keys["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(factor) / np.log(32)))
    if local:
        keys["rope.freq_base_swa"] = float(local["rope_theta"])
    if arch in ("granite", "granitemoe"):
        keys |= {
            "attention.scale": c.attention_multiplier,
            "embedding_scale": c.embedding_multiplier,
            "residual_scale": c.residual_multiplier,
            "logit_scale": c.logits_scaling,
        }
    if arch == "mistral3":
        keys |= {
            "rope.scaling.yarn_log_multiplier": full["mscale_all_dim"],
            "rope.scaling.yarn_beta_fast": full["beta_fast"],
            "rope.scaling.yarn_beta_slow": full["beta_slow"],
            "attention.temperature_scale": full["llama_4_scaling_beta"],
        }
    if arch == "olmo2" and getattr(c, "sliding_window", None):
        keys["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in c.layer_types]
    if getattr(c, "sliding_window", None):
        keys["attention.sliding_window"] = c.sliding_window
    keys |= expert_keys(c) | linear_attention.gguf_keys(c)
    if arch == "gemma4":
        keys |= gemma4_keys(c)
    if "conv" in getattr(c, "layer_types", ()):
        keys |= {
            "attention.head_count_kv": [0 if kind == "conv" else c.num_key_value_heads for kind in c.layer_types],
            "shortconv.l_cache": c.conv_L_cache,
            "feed_forward_length": model.model.layers[0].feed_forward.w1.weight.shape[0],
        }
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(c, cap, None):
            keys[cap] = float(getattr(c, cap))
    named = {f"{arch}.{key}": value for key, value in keys.items()}
    return {
        "general.architecture": arch,
        "general.name": family.name,
        **named,
        f"{arch}.vocab_size": Typed("uint32", c.vocab_size),
    }


def gemma4_keys(c: Any) -> dict[str, Any]:
    """Return the keys of layers of different shapes."""
    full, layers = c.per_layer_config["full_attention"], c.num_hidden_layers
    is_local, first_shared = [kind == "sliding_attention" for kind in c.layer_types], layers - c.num_kv_shared_layers
    wide = 2 if c.use_double_wide_mlp else 1
    return {
        "attention.sliding_window_pattern": is_local,
        "attention.head_count_kv": [c.num_key_value_heads if local else full.num_key_value_heads for local in is_local],
        "feed_forward_length": [c.intermediate_size * (wide if i >= first_shared else 1) for i in range(layers)],
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": c.head_dim,
        "attention.value_length_swa": c.head_dim,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": c.head_dim,
        "attention.shared_kv_layers": c.num_kv_shared_layers,
        "embedding_length_per_layer_input": getattr(c, "hidden_size_per_layer_input", 0),
        "final_logit_softcapping": float(c.final_logit_softcapping or 0.0),
    }


def expert_keys(c: Any) -> dict[str, Any]:
    """Return the keys of a mixture of experts."""
    count = getattr(c, "num_local_experts", None) or getattr(c, "num_experts", None)
    if not count:
        return {}
    used = c.top_k_experts if c.model_type == "gemma4_text" else c.num_experts_per_tok
    keys = {"expert_count": count, "expert_used_count": used}
    if c.model_type == "glm4_moe":
        keys |= {
            "expert_shared_count": c.n_shared_experts, "leading_dense_block_count": c.first_k_dense_replace,
            "expert_weights_scale": c.routed_scaling_factor, "expert_weights_norm": c.norm_topk_prob,
            "expert_gating_func": 2,
        }  # fmt: skip
    if c.model_type == "lfm2_moe":
        keys |= {"leading_dense_block_count": c.num_dense_layers, "expert_gating_func": 2}
    if size := c.intermediate_size if c.model_type == "gpt_oss" else getattr(c, "moe_intermediate_size", None):
        keys["expert_feed_forward_length"] = size
    if size := getattr(c, "shared_expert_intermediate_size", None):
        keys["expert_shared_feed_forward_length"] = size
    return keys


def save_gguf(variant: Variant, model: Any, path: Path) -> Path:
    return write_gguf(path, gguf_metadata(variant, model), gguf_tensors(variant, model))


def save_quantized(variant: Variant, model: Any, path: Path, kind: str) -> Path:
    """Write a GGUF whose matrices (with rows of whole blocks) are quantized by the gguf package."""
    tensors: dict[str, TensorLike] = {}
    for name, value in gguf_tensors(variant, model).items():
        if isinstance(value, np.ndarray) and value.ndim >= 2 and value.shape[-1] % 32 == 0:
            data = gguf.quants.quantize(value, gguf.GGMLQuantizationType[kind])
            tensors[name] = Raw(kind, value.shape, np.ascontiguousarray(data).view(np.uint8).reshape(-1))
        else:
            tensors[name] = value
    return write_gguf(path, gguf_metadata(variant, model), tensors)


def prompt_ids(variant: Variant, seed: int = 7) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, variant.length).tolist()


def hf_logits(model: Any, ids: list[int]) -> NDArray[np.float32]:
    import torch

    with torch.no_grad():
        return np.asarray(model(torch.tensor([ids])).logits[0].float().numpy())


def hf_greedy(model: Any, ids: list[int], n: int) -> list[int]:
    import torch

    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=n, min_new_tokens=n, do_sample=False, eos_token_id=None
        )
    return [int(t) for t in out[0][len(ids) :]]
