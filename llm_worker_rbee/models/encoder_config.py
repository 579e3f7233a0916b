"""Keys of encoders' config.json under the names that decoders have: Nomic BERT, ModernBERT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import MAX_LAYERS, Family
from ..errors import UnsupportedModelError
from .metadata_reader import MetadataReader

# As in the configuration file of nomic-ai's weights.
NOMIC_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
# Settings of that configuration with another value are not implemented.
NOMIC_SETTINGS: dict[str, tuple[Any, ...]] = {
    "activation_function": ("swiglu", "silu"),
    "prenorm": (False,),
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "rotary_scaling_factor": (None,),
    "moe_every_n_layers": (0, None),
    "use_rms_norm": (False, None),
    "parallel_block": (False, None),
}
NOMIC_POSITIONS = 2048  # that v1 and v1.5 are trained with: more need another base of RoPE


def encoder_keys(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return a config.json with the keys that `model_config_from_hf` reads."""
    if family.name == "nomic-bert":
        return _nomic_keys(config)
    if family.name == "modernbert":
        return _modern_keys(config)
    if family.learned_positions and (kind := config.get("position_embedding_type", "absolute")) != "absolute":
        raise UnsupportedModelError(f"config.json: 'position_embedding_type' is {kind!r}: not supported")
    return dict(config)


def _nomic_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    if "n_embd" not in config:
        return {"hidden_act": "silu", **config}
    for key, values in NOMIC_SETTINGS.items():
        if key in config and config[key] not in values:
            raise UnsupportedModelError(f"config.json: {key!r} is {config[key]!r}: not supported")
    renamed = {NOMIC_KEYS.get(key, key): value for key, value in config.items()}
    limit = renamed.get("max_trained_positions", NOMIC_POSITIONS)
    positions = renamed.get("max_position_embeddings")
    if type(limit) is int and type(positions) is int:
        renamed["max_position_embeddings"] = min(limit, positions)
    return {**renamed, "hidden_act": "silu"}


def _modern_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of ModernBERT: the first of every n layers sees everything, the others a window."""
    keys = MetadataReader(config, source="config.json: ")
    values = {
        "hidden_activation": "gelu",
        "norm_eps": 1e-5,
        **config,
        "sliding_window": keys.integer("local_attention", 128),
    }
    if not keys.has("layer_types"):
        every, count = (
            keys.integer("global_attn_every_n_layers", 3, 1),
            keys.integer("num_hidden_layers", 0, 0, MAX_LAYERS),
        )
        values["layer_types"] = ["sliding_attention" if i % every else "full_attention" for i in range(count)]
    if not keys.has("rope_parameters"):
        values["rope_theta"] = keys.number("global_rope_theta", 160000.0)
        values["rope_local_base_freq"] = keys.number("local_rope_theta", 10000.0)
    return values
