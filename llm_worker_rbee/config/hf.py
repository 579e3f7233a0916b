"""A config.json of the transformers library -> the fields of `ModelConfig`. No tensor is looked at."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedModelError
from .keys import LEAST_FACTOR, MAX_CONTEXT, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH, Keys, layer_windows
from .types import Family, RopeScaling

SCALINGS = ("default", "linear", "llama3", "yarn", "longrope", "su")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
LAYER_KINDS = ("full_attention", "sliding_attention")
LEAST_BASE = 1.0 + 1e-6


def hf_shape(keys: Keys, family: Family, vocab_size: int | None) -> dict[str, Any]:
    """Every field of ModelConfig but `family`; `vocab_size` (the rows of the embedding) wins over the metadata."""
    n_layers = keys.integer("num_hidden_layers", least=1, most=MAX_LAYERS)
    d_model, n_heads = (keys.integer(key, least=1, most=MAX_WIDTH) for key in ("hidden_size", "num_attention_heads"))
    head_dim = keys.integer("head_dim", max(d_model // n_heads, 1), 1, MAX_WIDTH)
    rope = _rope(keys, "full_attention")
    turned = rope.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0), most=1.0)
    return {
        "n_layers": n_layers,
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": keys.integer("num_key_value_heads", n_heads, 1, n_heads),
        "head_dim": head_dim,
        "d_ff": keys.integer("intermediate_size", least=1, most=MAX_WIDTH),
        "vocab_size": vocab_size or keys.integer("vocab_size", least=1, most=MAX_VOCABULARY),
        "context_length": keys.integer("max_position_embeddings", least=1, most=MAX_CONTEXT),
        "norm_eps": keys.positive("rms_norm_eps", 1e-6),
        "rope_dim": int(head_dim * turned),
        "rope_base": rope.positive("rope_theta", 10000.0, LEAST_BASE),
        "rope_scaling": _scaling(rope, keys),
        "rope_local_base": _local_base(keys),
        "windows": _windows(keys, family, n_layers),
        "attention_scale": keys.positive("query_pre_attn_scalar", float(head_dim)) ** -0.5,
        "attention_cap": keys.cap("attn_logit_softcapping", 0.0),
        "final_cap": keys.cap("final_logit_softcapping", 0.0),
        "activation": _activation(keys, family),
    }


def _activation(keys: Keys, family: Family) -> str:
    name = keys.get("hidden_activation", str, keys.get("hidden_act", str, "silu"))
    if name not in ACTIVATIONS and not (family.activation == "gelu_tanh" and name == "gelu"):
        raise UnsupportedModelError(f"config.json: activation {name!r} is not supported")
    return ACTIVATIONS.get(name, family.activation)


def _windows(keys: Keys, family: Family, n_layers: int) -> tuple[int, ...]:
    window = keys.integer("sliding_window", 0, most=MAX_CONTEXT)
    if not keys.get("use_sliding_window", bool, True):
        window = 0
    kinds = keys.values.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != n_layers or any(kind not in LAYER_KINDS for kind in kinds):
            raise UnsupportedModelError(
                f"{keys.named('layer_types')} must name full_attention or sliding_attention "
                f"for each of {n_layers} layers"
            )
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if keys.has("max_window_layers") and window:
        first = keys.integer("max_window_layers")
        return tuple(window if i >= first else 0 for i in range(n_layers))
    return layer_windows(window, keys.integer("sliding_window_pattern", family.full_every), n_layers)


def _rope(keys: Keys, layer_kind: str) -> Keys:
    """The rope settings of one kind of layer: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    new = keys.get("rope_parameters", dict, {})
    if layer_kind in new:
        inner = Keys(new, source=f"{keys.source}rope_parameters: ")
        return Keys(inner.get(layer_kind, dict), source=inner.source)
    if new:
        return Keys(new, source=f"{keys.source}rope_parameters: ")
    old = keys.get("rope_scaling", dict, {})
    return Keys({"rope_theta": keys.number("rope_theta", 10000.0), **old}, source=f"{keys.source}rope_scaling: ")


def _local_base(keys: Keys) -> float:
    if "sliding_attention" in keys.get("rope_parameters", dict, {}):
        local = _rope(keys, "sliding_attention")
        if local.get("rope_type", str, "default") != "default":
            raise UnsupportedModelError("rope scaling of the layers with a sliding window is not supported")
        return local.positive("rope_theta", 10000.0, LEAST_BASE)
    return keys.positive("rope_local_base_freq", least=LEAST_BASE) if keys.has("rope_local_base_freq") else 0.0


def _scaling(rope: Keys, keys: Keys) -> RopeScaling:
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    if kind not in SCALINGS:
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported (supported: {', '.join(SCALINGS)})")
    key = "original_max_position_embeddings"
    context = keys.integer("max_position_embeddings", least=1, most=MAX_CONTEXT)
    least = 2 if kind in ("yarn", "longrope", "su") else 1  # these take its logarithm
    original = rope.integer(key, keys.integer(key, context, 1, MAX_CONTEXT), least, MAX_CONTEXT)
    low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
    if high <= low:
        raise rope.fail("high_freq_factor", f"is {high}, not above low_freq_factor ({low})")
    return RopeScaling(
        kind={"default": "none", "su": "longrope"}.get(kind, kind),
        factor=rope.positive("factor", context / original, LEAST_FACTOR),
        original_context=original,
        attention_factor=rope.positive("attention_factor") if rope.has("attention_factor") else None,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=rope.positive("beta_fast", 32.0),
        beta_slow=rope.positive("beta_slow", 1.0),
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        truncate=rope.get("truncate", bool, True),
        short_factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
    )
