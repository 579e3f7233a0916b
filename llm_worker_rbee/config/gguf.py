"""The `<architecture>.*` keys of a GGUF file -> the fields of `ModelConfig`. No tensor is looked at."""

from __future__ import annotations

import math
from typing import Any

from ..errors import UnsupportedModelError
from .keys import LEAST_FACTOR, MAX_CONTEXT, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH, Keys, layer_windows
from .types import Family, RopeScaling

SCALINGS = ("none", "linear", "yarn", "longrope")
DEPTH_OF_27B = {"gemma2": 46, "gemma3": 62}


def gguf_shape(keys: Keys, family: Family, vocab_size: int | None) -> dict[str, Any]:
    """Every field of ModelConfig but `family`; `vocab_size` (the rows of the embedding) wins over the metadata."""
    if keys.integer("expert_count", 0) > 0:
        raise UnsupportedModelError(f"{family.name}: mixture-of-experts models are not supported")
    n_layers = keys.integer("block_count", least=1, most=MAX_LAYERS)
    d_model = keys.integer("embedding_length", least=1, most=MAX_WIDTH)
    n_heads = keys.integer("attention.head_count", least=1, most=MAX_WIDTH)
    head_dim = keys.integer("attention.key_length", max(d_model // n_heads, 1), 1, MAX_WIDTH)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{keys.named('attention.value_length')} differs from the length of keys: not supported"
        )
    rope_dim = keys.integer("rope.dimension_count", head_dim, 1, head_dim)
    if rope_dim % 2:
        raise keys.fail("rope.dimension_count", f"is {rope_dim}, an odd number")
    return {
        "n_layers": n_layers,
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": _kv_heads(keys, n_heads),
        "head_dim": head_dim,
        "d_ff": keys.integer("feed_forward_length", least=1, most=MAX_WIDTH),
        "vocab_size": vocab_size or _vocab_size(keys),
        "context_length": keys.integer("context_length", least=1, most=MAX_CONTEXT),
        "norm_eps": keys.positive("attention.layer_norm_rms_epsilon"),
        "rope_dim": rope_dim,
        "rope_base": keys.positive("rope.freq_base", 10000.0, 1.0 + 1e-6),
        "rope_scaling": _scaling(keys),
        "rope_local_base": _local_base(keys, family),
        "windows": _windows(keys, family, n_layers),
        "attention_scale": _attention_scale(keys, family, n_layers, d_model / n_heads, head_dim),
        "attention_cap": keys.cap("attn_logit_softcapping", family.default_attention_cap),
        "final_cap": keys.cap("final_logit_softcapping", family.default_final_cap),
        "activation": family.activation,
    }


def _kv_heads(keys: Keys, n_heads: int) -> int:
    kv_heads = keys.integer("attention.head_count_kv", n_heads, 1, n_heads)
    if n_heads % kv_heads:
        raise keys.fail("attention.head_count_kv", f"is {kv_heads}: {n_heads} heads cannot share them evenly")
    return kv_heads


def _vocab_size(keys: Keys) -> int:
    tokens = keys.values.get("tokenizer.ggml.tokens")
    return keys.integer("vocab_size", len(tokens) if isinstance(tokens, list) else None, 1, MAX_VOCABULARY)


def _local_base(keys: Keys, family: Family) -> float:
    if not keys.has("rope.freq_base_swa"):
        return family.default_local_base
    return keys.positive("rope.freq_base_swa", least=1.0 + 1e-6)


def _attention_scale(keys: Keys, family: Family, n_layers: int, width_per_head: float, head_dim: int) -> float:
    """GGUF has no key for it: the 27B Gemmas scale by width over heads, which only their depth gives away."""
    usual = width_per_head if n_layers == DEPTH_OF_27B.get(family.name) else head_dim
    return keys.positive("attention.scale", usual**-0.5)


def _windows(keys: Keys, family: Family, n_layers: int) -> tuple[int, ...]:
    key = "attention.sliding_window_pattern"
    window = keys.integer("attention.sliding_window", family.default_window, most=MAX_CONTEXT)
    pattern = keys.array(key)
    if pattern is None:
        return layer_windows(window, keys.integer(key, family.full_every), n_layers)
    if len(pattern) != n_layers or not all(isinstance(sliding, int) for sliding in pattern):
        raise keys.fail(key, f"must have a bool for each of {n_layers} layers, not {len(pattern)} values")
    return tuple(window if sliding else 0 for sliding in pattern)


def _scaling(keys: Keys) -> RopeScaling:
    linear = keys.positive("rope.scale_linear", 1.0)
    kind = keys.get("rope.scaling.type", str, "linear" if linear != 1.0 or keys.has("rope.scaling.factor") else "none")
    if kind not in SCALINGS:
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported (supported: {', '.join(SCALINGS)})")
    attention = keys.number("rope.scaling.attn_factor", 0.0) or keys.number("rope.scaling.yarn_attn_factor", 0.0)
    if keys.number("rope.scaling.yarn_log_multiplier", 0.0, -math.inf, math.inf):
        raise UnsupportedModelError("rope scaling with yarn_log_multiplier is not supported")
    factor = keys.positive("rope.scaling.factor", linear, LEAST_FACTOR)
    if kind == "yarn" and attention:
        attention *= 1.0 + 0.1 * math.log(factor)  # the file's figure multiplies the formula's
    context = keys.integer("context_length", least=1, most=MAX_CONTEXT)
    least = 2 if kind in ("yarn", "longrope") else 0  # these take its logarithm
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_context=keys.integer("rope.scaling.original_context_length", context, least, MAX_CONTEXT),
        attention_factor=attention or None,
        beta_fast=keys.positive("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.positive("rope.scaling.yarn_beta_slow", 1.0),
    )
