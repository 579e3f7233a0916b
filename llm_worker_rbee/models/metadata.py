"""Checkpoint metadata -> `ModelConfig`, for both formats: the keys of a GGUF file and a config.json of transformers.

Every failure names the key and what it must be; a rope scaling that is not implemented is refused. Bounds are generous:
they exist so that nothing is computed or allocated from a number that cannot be true, and so that float32 neither
overflows nor divides by zero later. No tensor is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    MIN_ROPE_FACTOR,
    SWIGLU_OAI_ALPHA,
    SWIGLU_OAI_LIMIT,
    ExpertConfig,
    Family,
    LinearAttentionConfig,
    ModelConfig,
    RopeScaling,
)
from ..errors import UnsupportedModelError
from ..layers.rope import yarn_mscale
from .encoder_config import encoder_keys
from .layer_shapes import gguf_layer_shapes, hf_layer_shapes
from .metadata_reader import MetadataReader

GGUF_SCALINGS = ("none", "linear", "yarn", "longrope")
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
HF_SCALINGS = ("default", "linear", "llama3", "yarn", "longrope", "su", "proportional")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ENCODER_ACTIVATIONS = {
    **ACTIVATIONS,
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "tanh": "tanh",
}
# By value of `expert_gating_func`; softmax over the chosen alone is softmax over all, with weights that sum up to 1.
SOFTMAX_OF_CHOSEN = 3
GGUF_SCORINGS = {0: "", 1: "softmax", 2: "sigmoid", SOFTMAX_OF_CHOSEN: "softmax"}
HF_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
LAYER_TYPES = ("full_attention", "sliding_attention")
STATE_LAYER_TYPES = {"conv": "short_conv"}  # the others have attention
# Sampling parameters: their names in generation_config.json, and the keys of a GGUF.
HF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
GGUF_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
    "repeat_last_n": "general.sampling.penalty_last_n",
}
MIN_ROPE_BASE = 1.0 + 1e-6


def layer_windows(window: int, full_every: int, n_layers: int, *, full_first: bool = False) -> tuple[int, ...]:
    """Return the window of each layer; every `full_every`-th has none: the last of so many, or the first."""
    number = 0 if full_first else 1
    return tuple(0 if full_every and (i + number) % full_every == 0 else window for i in range(n_layers))


def model_config_from_gguf(metadata: Mapping[str, Any], family: Family, vocab_size: int | None = None) -> ModelConfig:
    """Read the `<architecture>.*` keys; `vocab_size` (the rows of the embedding) wins over the metadata."""
    keys = MetadataReader(metadata, f"{metadata['general.architecture']}.")
    has_nextn = family.experts is not None or family.mixer == "gated_delta"
    nextn = keys.integer("nextn_predict_layers", 0, maximum=MAX_LAYERS) if has_nextn else 0
    n_layers = keys.integer("block_count", minimum=1 + nextn, maximum=MAX_LAYERS) - nextn
    windows = _gguf_windows(keys, family, n_layers)
    keys, shapes = gguf_layer_shapes(keys, windows) if family.layer_shapes else (keys, {})
    d_model = keys.integer("embedding_length", minimum=1, maximum=MAX_WIDTH)
    n_heads = keys.integer("attention.head_count", minimum=1, maximum=MAX_WIDTH)
    head_dim = keys.integer("attention.key_length", max(d_model // n_heads, 1), 1, MAX_WIDTH)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{keys.describe_key('attention.value_length')} differs from the length of keys: not supported"
        )
    n_kv_heads, kinds = _gguf_kv_heads(keys, family, n_layers, n_heads)
    if n_heads % n_kv_heads:
        raise keys.error("attention.head_count_kv", f"is {n_kv_heads}: {n_heads} heads cannot share them evenly")
    rope_dim = keys.integer("rope.dimension_count", head_dim, 1, head_dim)
    if rope_dim % 2:
        raise keys.error("rope.dimension_count", f"is {rope_dim}, an odd number")
    return ModelConfig(
        family=family,
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        d_ff=keys.integer("feed_forward_length", keys.integer("expert_feed_forward_length", 0) or None, 1, MAX_WIDTH),
        vocab_size=vocab_size or _vocab_size(keys),
        context_length=keys.integer("context_length", minimum=1, maximum=MAX_CONTEXT),
        norm_eps=keys.positive(f"attention.layer_norm_{'' if family.norms.layer else 'rms_'}epsilon"),
        rope_dim=rope_dim,
        rope_base=keys.positive("rope.freq_base", 10000.0, MIN_ROPE_BASE),
        rope_scaling=_gguf_rope_scaling(keys, family),
        rope_sections=_sections(keys.array("rope.dimension_sections"), family, rope_dim // 2, keys),
        rope_local_base=_gguf_local_base(keys, family),
        nope_layers=_gguf_nope_layers(keys, family, n_layers),
        temperature_beta=keys.number("attention.temperature_scale", 0.0),
        windows=windows,
        attention_scale=_attention_scale(keys, family, n_layers, d_model / n_heads, head_dim),
        attention_cap=keys.cap("attn_logit_softcapping", family.attention.cap),
        final_cap=keys.cap("final_logit_softcapping", family.final_cap),
        embedding_scale=keys.positive("embedding_scale", 1.0),
        residual_scale=keys.positive("residual_scale", 1.0),
        logit_scale=keys.positive("logit_scale", 1.0),
        activation=_gguf_activation(keys, family),
        experts=_gguf_experts(keys, family),
        nextn_layers=nextn,
        layer_kinds=kinds,
        conv_kernel=keys.integer("shortconv.l_cache", 0) if "short_conv" in kinds else 0,
        linear=_gguf_linear(keys, family),
        causal=keys.get("attention.causal", bool, not family.is_encoder),
        **shapes,
    )


def _gguf_activation(keys: MetadataReader, family: Family) -> str:
    if not family.is_encoder or not keys.has("hidden_activation"):
        return family.activation
    if (name := keys.get("hidden_activation", str)) not in ENCODER_ACTIVATIONS:
        raise UnsupportedModelError(f"{keys.describe_key('hidden_activation')}: {name!r} is not supported")
    return ENCODER_ACTIVATIONS[name]


def _gguf_kv_heads(keys: MetadataReader, family: Family, n_layers: int, n_heads: int) -> tuple[int, tuple[str, ...]]:
    """Return the KV heads of a layer with attention, and the kinds of layers: a short convolution has 0 of them."""
    key = "attention.head_count_kv"
    if family.mixer == "gated_delta":
        return keys.integer(key, n_heads, 1, n_heads), _gguf_linear_kinds(keys, n_layers)
    counts = keys.array(key)
    if counts is None or family.mixer != "short_conv" or 0 not in counts:
        return keys.integer(key, n_heads, 1, n_heads), ()
    if len(counts) != n_layers:
        raise keys.error(key, f"must have a number for each of {n_layers} layers, not {len(counts)}")
    of_attention = replace(keys, values={**keys.values, keys.prefix + key: [n for n in counts if n != 0]})
    return of_attention.integer(key, None, 1, n_heads), tuple("attention" if n else "short_conv" for n in counts)


def _gguf_experts(keys: MetadataReader, family: Family) -> ExpertConfig | None:
    count = keys.integer("expert_count", 0, maximum=MAX_EXPERTS)
    if not count:
        return None
    if (usual := family.experts) is None:
        raise UnsupportedModelError(f"{family.name}: a mixture of experts is not supported in this architecture")
    if keys.integer("expert_group_count", 0) > 1:
        raise UnsupportedModelError(f"{keys.describe_key('expert_group_count')}: groups of experts are not supported")
    scoring = keys.integer("expert_gating_func", 0)
    if scoring not in GGUF_SCORINGS:
        raise UnsupportedModelError(f"{keys.describe_key('expert_gating_func')} is {scoring}: not supported")
    d_ff = keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length", 0), 1, MAX_WIDTH)
    shared = keys.integer("expert_shared_count", 0, maximum=MAX_EXPERTS) * d_ff
    return ExpertConfig(
        count=count,
        used=keys.integer("expert_used_count", minimum=1, maximum=count),
        d_ff=d_ff,
        shared_d_ff=keys.integer("expert_shared_feed_forward_length", shared, maximum=MAX_WIDTH),
        spec=usual._replace(
            scoring=GGUF_SCORINGS[scoring] or usual.scoring,
            renormalize=scoring == SOFTMAX_OF_CHOSEN or keys.get("expert_weights_norm", bool, usual.renormalize),
        ),
        scale=keys.number("expert_weights_scale", 0.0) or 1.0,
        dense_layers=frozenset(range(keys.integer("leading_dense_block_count", 0, maximum=MAX_LAYERS))),
    )


def _gguf_linear(keys: MetadataReader, family: Family) -> LinearAttentionConfig | None:
    if family.mixer != "gated_delta":
        return None
    v_heads, dim = (
        keys.integer(f"ssm.{key}", minimum=1, maximum=MAX_WIDTH) for key in ("time_step_rank", "state_size")
    )
    inner = keys.integer("ssm.inner_size", v_heads * dim, 1, MAX_WIDTH)
    if inner % v_heads:
        raise keys.error("ssm.inner_size", f"is {inner}: {v_heads} heads cannot share it evenly")
    k_heads = keys.integer("ssm.group_count", minimum=1, maximum=MAX_WIDTH)
    return LinearAttentionConfig(keys.integer("ssm.conv_kernel"), k_heads, v_heads, dim, inner // v_heads)


def _gguf_linear_kinds(keys: MetadataReader, n_layers: int) -> tuple[str, ...]:
    """Return the kinds of layers: as an array says, or every n-th has attention."""
    key = "attention.recurrent_layers"
    flags = keys.array(key)
    if flags is None:
        return linear_kinds(keys.integer("full_attention_interval", 4, 1), n_layers)
    if len(flags) < n_layers or not all(isinstance(flag, int) for flag in flags):
        raise keys.error(key, f"must have a bool for each of {n_layers} layers, not {len(flags)} values")
    return tuple("gated_delta" if flag else "attention" for flag in flags[:n_layers])


def linear_kinds(interval: int, n_layers: int) -> tuple[str, ...]:
    """Return the kinds of layers of which every n-th has attention."""
    return tuple("gated_delta" if (i + 1) % interval else "attention" for i in range(n_layers))


def _hf_linear(keys: MetadataReader, family: Family) -> LinearAttentionConfig | None:
    if family.mixer != "gated_delta":
        return None
    names = ("conv_kernel_dim", "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    return LinearAttentionConfig(*(keys.integer(f"linear_{name}", minimum=1, maximum=MAX_WIDTH) for name in names))


def _hf_linear_kinds(keys: MetadataReader, n_layers: int) -> tuple[str, ...]:
    if not keys.has("layer_types"):
        return linear_kinds(keys.integer("full_attention_interval", 4, 1), n_layers)
    kinds = {"linear_attention": "gated_delta", "full_attention": "attention"}
    named = keys.get("layer_types", list)
    if len(named) != n_layers or any(kind not in tuple(kinds) for kind in named):
        raise keys.error("layer_types", f"must name {' or '.join(kinds)} for each of {n_layers} layers")
    return tuple(kinds[kind] for kind in named)


def _vocab_size(keys: MetadataReader) -> int:
    tokens = keys.values.get("tokenizer.ggml.tokens")
    return keys.integer("vocab_size", len(tokens) if isinstance(tokens, list) else None, 1, MAX_VOCABULARY)


def _gguf_local_base(keys: MetadataReader, family: Family) -> float:
    if keys.has("rope.freq_base_swa"):
        return keys.positive("rope.freq_base_swa", minimum=MIN_ROPE_BASE)
    if family.rope.unscaled_windows and keys.has("attention.sliding_window"):
        return keys.positive("rope.freq_base", 10000.0, MIN_ROPE_BASE)
    return family.rope.local_base


def _gguf_nope_layers(keys: MetadataReader, family: Family, n_layers: int) -> tuple[int, ...]:
    if any(keys.array("rope.dimension_sections") or ()) and not family.rope.sections:  # M-RoPE of text is a plain RoPE
        raise UnsupportedModelError(f"{keys.describe_key('rope.dimension_sections')} (M-RoPE) is not supported")
    if family.learned_positions:
        return tuple(range(n_layers))
    if family.multipliers and not keys.get("rope.scaling.finetuned", bool, True):  # how Granite's files state it
        return tuple(range(n_layers))
    return every_nth(family.rope.nope_every, n_layers)


def _sections(stated: Any, family: Family, pairs: int, keys: MetadataReader) -> tuple[int, ...]:
    """Return the sections of M-RoPE, the family's where a model names none."""
    usual = family.rope.sections
    if not usual or not stated:
        return usual
    if not isinstance(stated, list) or len(stated) < 3 or any(type(n) is not int or n < 0 for n in stated):
        raise keys.error("rope.dimension_sections", "must be at least three numbers of pairs")
    first = tuple(stated[:3])
    if not any(first):
        return usual
    if not family.rope.alternates and sum(first) != pairs:
        raise keys.error("rope.dimension_sections", f"is {stated}: {pairs} pairs are to be divided")
    return first


def every_nth(n: int, n_layers: int) -> tuple[int, ...]:
    """Return the indices of every n-th layer; 0: of none."""
    return tuple(range(n - 1, n_layers, n)) if n else ()


def _attention_scale(
    keys: MetadataReader, family: Family, n_layers: int, width_per_head: float, head_dim: int
) -> float:
    """Return the scale of scores; the 27B Gemmas, known by their number of layers, scale by width over heads."""
    usual = width_per_head if n_layers == LAYERS_OF_27B.get(family.name) else head_dim
    return keys.positive("attention.scale", family.attention.scale or usual**-0.5)


def _gguf_windows(keys: MetadataReader, family: Family, n_layers: int) -> tuple[int, ...]:
    key, usual = "attention.sliding_window_pattern", family.attention
    window = keys.integer("attention.sliding_window", usual.window, maximum=MAX_CONTEXT)
    pattern = keys.array(key)
    if pattern is None:
        return layer_windows(window, keys.integer(key, usual.full_every), n_layers, full_first=usual.full_first)
    if len(pattern) != n_layers or not all(isinstance(sliding, int) for sliding in pattern):
        raise keys.error(key, f"must have a bool for each of {n_layers} layers, not {len(pattern)} values")
    return tuple(window if sliding else 0 for sliding in pattern)


def _gguf_rope_scaling(keys: MetadataReader, family: Family) -> RopeScaling:
    linear = keys.positive("rope.scale_linear", 1.0)
    kind = keys.get("rope.scaling.type", str, "linear" if linear != 1.0 or keys.has("rope.scaling.factor") else "none")
    if kind not in GGUF_SCALINGS:
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported (supported: {', '.join(GGUF_SCALINGS)})")
    attention = keys.number("rope.scaling.attn_factor", 0.0) or keys.number("rope.scaling.yarn_attn_factor", 0.0)
    log_multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    factor = keys.positive("rope.scaling.factor", linear, MIN_ROPE_FACTOR)
    if kind == "yarn" and attention:  # the file's factor multiplies the formula's
        attention *= yarn_mscale(factor, 1.0) / yarn_mscale(factor, log_multiplier)
    context = keys.integer("context_length", minimum=1, maximum=MAX_CONTEXT)
    minimum = 2 if kind in ("yarn", "longrope") else 0  # these take its logarithm
    if keys.number("attention.temperature_scale", 0.0):
        minimum = max(minimum, 1)  # positions are divided by it
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_context=keys.integer("rope.scaling.original_context_length", context, minimum, MAX_CONTEXT),
        attention_factor=attention or None,
        beta_fast=keys.positive("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.positive("rope.scaling.yarn_beta_slow", 1.0),
        mscale=1.0 if log_multiplier else 0.0,
        mscale_all_dim=log_multiplier,
        truncate=family.rope.yarn_truncate,
    )


def model_config_from_hf(config: Mapping[str, Any], family: Family, vocab_size: int | None = None) -> ModelConfig:
    """Read a config.json of the transformers library; `vocab_size` as above."""
    defaults = dict(family.hf_defaults)
    if "rope_theta" in config or "rope_scaling" in config:  # the older form
        defaults.pop("rope_parameters", None)
    keys = MetadataReader({**defaults, **encoder_keys(config, family)}, source="config.json: ")
    n_layers = keys.integer("num_hidden_layers", minimum=1, maximum=MAX_LAYERS)
    windows, shapes = _hf_windows(keys, family, n_layers), dict[str, Any]()
    if family.layer_shapes:
        windows = (*windows[:-1], 0)  # the last one always sees everything
        local_fraction = _hf_rope(keys, "sliding_attention").number("partial_rotary_factor", 1.0, maximum=1.0)
        keys, shapes = hf_layer_shapes(keys, windows, local_fraction)
    d_model, n_heads = (
        keys.integer(key, minimum=1, maximum=MAX_WIDTH) for key in ("hidden_size", "num_attention_heads")
    )
    head_dim = keys.integer("head_dim", max(d_model // n_heads, 1), 1, MAX_WIDTH)
    rope = _hf_rope(keys, "full_attention")
    scaling = _hf_rope_scaling(rope, keys, family)
    rotary_fraction = rope.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0), maximum=1.0)
    kinds = _hf_layer_kinds(keys, family, n_layers)
    return ModelConfig(
        family=family,
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=keys.integer("num_key_value_heads", n_heads, 1, n_heads),
        head_dim=head_dim,
        d_ff=_hf_d_ff(keys),
        vocab_size=vocab_size or keys.integer("vocab_size", minimum=1, maximum=MAX_VOCABULARY),
        context_length=keys.integer("max_position_embeddings", minimum=1, maximum=MAX_CONTEXT),
        norm_eps=_hf_norm_eps(keys, family),
        rope_dim=head_dim if scaling.kind == "proportional" else int(head_dim * rotary_fraction),
        rope_base=rope.positive("rope_theta", 10000.0, MIN_ROPE_BASE),
        rope_scaling=scaling,
        rope_sections=_sections(rope.values.get("mrope_section"), family, int(head_dim * rotary_fraction) // 2, keys),
        rope_local_base=_hf_local_base(keys, family, rope),
        nope_layers=_hf_nope_layers(keys, family, n_layers),
        temperature_beta=rope.number("llama_4_scaling_beta", 0.0),
        windows=windows,
        attention_scale=_hf_attention_scale(keys, family, head_dim),
        attention_cap=keys.cap("attn_logit_softcapping", 0.0),
        final_cap=keys.cap("final_logit_softcapping", 0.0),
        embedding_scale=keys.positive("embedding_multiplier", 1.0),
        residual_scale=keys.positive("residual_multiplier", 1.0),
        logit_scale=keys.positive("logits_scaling", 1.0),
        activation=_activation(keys, family),
        experts=_hf_experts(keys, family, n_layers),
        nextn_layers=_hf_nextn_layers(keys, family),
        layer_kinds=kinds,
        conv_kernel=keys.integer("conv_L_cache") if "short_conv" in kinds else 0,
        linear=_hf_linear(keys, family),
        causal=not (family.is_encoder or keys.values.get("use_bidirectional_attention") in (True, "all")),
        **shapes,
    )


def _hf_nextn_layers(keys: MetadataReader, family: Family) -> int:
    """Return the layers for multi-token prediction."""
    if family.mixer == "gated_delta":
        return keys.integer("mtp_num_hidden_layers", 0, maximum=MAX_LAYERS)
    return keys.integer("num_nextn_predict_layers", 0, maximum=MAX_LAYERS) if family.experts else 0


def _hf_d_ff(keys: MetadataReader) -> int:
    """Return the width of the MLP; LFM2 states the width without a gate, from which it is computed."""
    key = "block_ff_dim" if keys.has("block_ff_dim") else "intermediate_size"
    size = keys.integer(key, minimum=1, maximum=MAX_WIDTH)
    if not keys.get("block_auto_adjust_ff_dim", bool, False):
        return size
    size = 2 * size // 3
    if not keys.has("block_ffn_dim_multiplier"):
        return size
    step = keys.integer("block_multiple_of", 256, 1, MAX_WIDTH)
    return -(-int(keys.positive("block_ffn_dim_multiplier") * size) // step) * step


def _hf_layer_kinds(keys: MetadataReader, family: Family, n_layers: int) -> tuple[str, ...]:
    """Return the kind of each layer; none if all have attention."""
    if family.mixer == "gated_delta":
        return _hf_linear_kinds(keys, n_layers)
    types = keys.values.get("layer_types")
    if family.mixer == "short_conv" and types is None and keys.has("full_attn_idxs"):
        full = keys.get("full_attn_idxs", list)
        types = ["full_attention" if i in full else "conv" for i in range(n_layers)]
    kinds = tuple(STATE_LAYER_TYPES.get(kind, "attention") for kind in types or () if isinstance(kind, str))
    return kinds if set(kinds) - {"attention"} else ()


def _hf_experts(keys: MetadataReader, family: Family, n_layers: int) -> ExpertConfig | None:
    named = next((key for key in HF_EXPERT_COUNTS if keys.has(key)), None)
    if family.experts is None or named is None or not keys.get("enable_moe_block", bool, True):
        return None
    if keys.integer("n_group", 1) > 1:
        raise UnsupportedModelError(f"{keys.describe_key('n_group')}: groups of experts are not supported")
    if keys.has("clip_qkv"):
        raise UnsupportedModelError(f"{keys.describe_key('clip_qkv')}: clipped projections are not supported")
    count = keys.integer(named, minimum=1, maximum=MAX_EXPERTS)
    used = "top_k_experts" if family.experts.parallel else "num_experts_per_tok"
    d_ff = keys.integer("moe_intermediate_size", keys.integer("intermediate_size"), 1, MAX_WIDTH)
    shared = keys.integer("n_shared_experts", 0, maximum=MAX_EXPERTS) * d_ff
    if family.experts.shared_gate:
        shared = keys.integer("shared_expert_intermediate_size", 0, maximum=MAX_WIDTH)
    step, dense = keys.integer("decoder_sparse_step", 1, 1), keys.get("mlp_only_layers", list, [])
    first = keys.integer("first_k_dense_replace", keys.integer("num_dense_layers", 0), maximum=MAX_LAYERS)
    return ExpertConfig(
        count=count,
        used=keys.integer(used, minimum=1, maximum=count),
        d_ff=d_ff,
        spec=family.experts._replace(renormalize=keys.get("norm_topk_prob", bool, family.experts.renormalize)),
        shared_d_ff=shared,
        scale=keys.positive("routed_scaling_factor", 1.0),
        dense_layers=frozenset(i for i in range(n_layers) if i < first or i in dense or (i + 1) % step),
    )


def _hf_norm_eps(keys: MetadataReader, family: Family) -> float:
    if family.norms.layer:
        return keys.positive("layer_norm_eps", keys.positive("norm_eps", 1e-12))
    return keys.positive("rms_norm_eps", keys.positive("norm_eps", 1e-6))


def _hf_attention_scale(keys: MetadataReader, family: Family, head_dim: int) -> float:
    if family.attention.scale:
        return family.attention.scale
    usual = keys.positive("query_pre_attn_scalar", float(head_dim)) ** -0.5
    return keys.positive("attention_multiplier", usual)


def _hf_nope_layers(keys: MetadataReader, family: Family, n_layers: int) -> tuple[int, ...]:
    """Return the layers whose entry in `no_rope_layers` is 0, or every n-th."""
    if family.learned_positions:
        return tuple(range(n_layers))
    flags = keys.get("no_rope_layers", list, [])
    if not flags:
        return every_nth(keys.integer("no_rope_layer_interval", family.rope.nope_every), n_layers)
    if len(flags) < n_layers or any(flag not in (0, 1) for flag in flags):
        raise keys.error("no_rope_layers", f"must have a 0 or 1 for each of {n_layers} layers")
    return tuple(i for i, flag in enumerate(flags[:n_layers]) if not flag)


def _activation(keys: MetadataReader, family: Family) -> str:
    name = keys.get("hidden_activation", str, keys.get("hidden_act", str, "gelu" if family.is_encoder else "silu"))
    if family.is_encoder:
        if name not in ENCODER_ACTIVATIONS:
            raise UnsupportedModelError(f"config.json: activation {name!r} is not supported")
        return ENCODER_ACTIVATIONS[name]
    if family.activation == "swiglu_oai":
        for key, value in (("swiglu_alpha", SWIGLU_OAI_ALPHA), ("swiglu_limit", SWIGLU_OAI_LIMIT)):
            if (stated := keys.number(key, value)) != value:
                raise UnsupportedModelError(f"{keys.describe_key(key)} is {stated}: only {value} is supported")
        return family.activation
    if name not in (*ACTIVATIONS, family.activation) and not (family.activation == "gelu_tanh" and name == "gelu"):
        raise UnsupportedModelError(f"config.json: activation {name!r} is not supported")
    return ACTIVATIONS.get(name, family.activation)


def _hf_windows(keys: MetadataReader, family: Family, n_layers: int) -> tuple[int, ...]:
    window = keys.integer("sliding_window", 0, maximum=MAX_CONTEXT)
    if not keys.get("use_sliding_window", bool, True):
        window = 0
    kinds = keys.values.get("layer_types")
    if kinds is not None and family.mixer != "gated_delta":
        types = (*LAYER_TYPES, *(("conv",) if family.mixer == "short_conv" else ()))
        if not isinstance(kinds, list) or len(kinds) != n_layers or any(kind not in types for kind in kinds):
            raise UnsupportedModelError(
                f"{keys.describe_key('layer_types')} must name {' or '.join(types)} for each of {n_layers} layers"
            )
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if keys.has("max_window_layers") and window:
        first = keys.integer("max_window_layers")
        return tuple(window if i >= first else 0 for i in range(n_layers))
    return layer_windows(window, keys.integer("sliding_window_pattern", family.attention.full_every), n_layers)


def _hf_rope(keys: MetadataReader, layer_kind: str) -> MetadataReader:
    """Return the rope settings of one layer type: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    if parameters := keys.get("rope_parameters", dict, {}):
        rope = MetadataReader(parameters, source=f"{keys.source}rope_parameters: ")
        return MetadataReader(rope.get(layer_kind, dict), source=rope.source) if layer_kind in parameters else rope
    older = {"rope_theta": keys.number("rope_theta", 10000.0), **keys.get("rope_scaling", dict, {})}
    return MetadataReader(older, source=f"{keys.source}rope_scaling: ")


def _hf_local_base(keys: MetadataReader, family: Family, rope: MetadataReader) -> float:
    if "sliding_attention" in keys.get("rope_parameters", dict, {}):
        local = _hf_rope(keys, "sliding_attention")
        if local.get("rope_type", str, "default") != "default":
            raise UnsupportedModelError("rope scaling of the layers with a sliding window is not supported")
        return local.positive("rope_theta", 10000.0, MIN_ROPE_BASE)
    if family.rope.unscaled_windows and keys.has("sliding_window"):
        return rope.positive("rope_theta", 10000.0, MIN_ROPE_BASE)
    return keys.positive("rope_local_base_freq", minimum=MIN_ROPE_BASE) if keys.has("rope_local_base_freq") else 0.0


def _hf_rope_scaling(rope: MetadataReader, keys: MetadataReader, family: Family) -> RopeScaling:
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    kind = "default" if kind == "mrope" and family.rope.sections else kind
    if kind not in HF_SCALINGS:
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported (supported: {', '.join(HF_SCALINGS)})")
    key = "original_max_position_embeddings"
    context = keys.integer("max_position_embeddings", minimum=1, maximum=MAX_CONTEXT)
    minimum = 2 if kind in ("yarn", "longrope", "su") else 1  # these take its logarithm
    original = rope.integer(key, keys.integer(key, context, 1, MAX_CONTEXT), minimum, MAX_CONTEXT)
    low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
    if high <= low:
        raise rope.error("high_freq_factor", f"is {high}, not above low_freq_factor ({low})")
    return RopeScaling(
        kind={"default": "none", "su": "longrope"}.get(kind, kind),
        factor=rope.positive("factor", context / original, MIN_ROPE_FACTOR),
        original_context=original,
        attention_factor=rope.positive("attention_factor") if rope.has("attention_factor") else None,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=rope.positive("beta_fast", 32.0),
        beta_slow=rope.positive("beta_slow", 1.0),
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        truncate=rope.get("truncate", bool, family.rope.yarn_truncate),
        short_factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
        rotary_fraction=rope.number("partial_rotary_factor", 1.0, maximum=1.0) if kind == "proportional" else 1.0,
    )


def sampling_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that a GGUF recommends, as they stand in the file: not validated."""
    return {name: metadata[key] for name, key in GGUF_SAMPLING.items() if metadata.get(key) is not None}


def sampling_from_hf(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a generation_config.json; `do_sample: false` is temperature 0: greedy."""
    stated = {name: generation_config[name] for name in HF_SAMPLING if generation_config.get(name) is not None}
    return {**stated, "temperature": 0.0} if generation_config.get("do_sample") is False else stated
