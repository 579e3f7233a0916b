"""What differs from layer to layer: KV heads, sizes of heads, MLPs, shared keys and values, masks of images.

Both readers return the metadata with one number instead of each list, and fields of `ModelConfig`. Fields are left out
where all layers are alike, so that both formats give the same configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config import MAX_WIDTH, ModelConfig
from ..errors import UnsupportedModelError
from ..weights import Checkpoint
from .metadata_reader import MetadataReader


def gguf_layer_shapes(keys: MetadataReader, windows: Sequence[int]) -> tuple[MetadataReader, dict[str, Any]]:
    """Read the keys of a GGUF; keys for layers with a window end with `_swa`."""
    n_layers = len(windows)
    kv_heads, d_ff = (keys.per_layer(key, n_layers) for key in ("attention.head_count_kv", "feed_forward_length"))
    head_dim = keys.integer("attention.key_length", minimum=1, maximum=MAX_WIDTH)
    window_dim = keys.integer("attention.key_length_swa", head_dim, 1, MAX_WIDTH)
    if keys.integer("attention.value_length_swa", window_dim) != window_dim:
        raise UnsupportedModelError(
            f"{keys.describe_key('attention.value_length_swa')} differs from the length of keys: not supported"
        )
    fields = {
        **_fields(kv_heads, d_ff, windows, head_dim, window_dim),
        "shared_kv_layers": keys.integer("attention.shared_kv_layers", 0, maximum=n_layers),
        "layer_input_dim": keys.integer("embedding_length_per_layer_input", 0, maximum=MAX_WIDTH),
    }
    if "window_head_dim" in fields:
        fields["window_rope_dim"] = keys.integer("rope.dimension_count_swa", window_dim, 1, window_dim)
    return _with_numbers(keys, {"attention.head_count_kv": kv_heads, "feed_forward_length": d_ff}), fields


def hf_layer_shapes(
    keys: MetadataReader, windows: Sequence[int], local_rotary_fraction: float
) -> tuple[MetadataReader, dict[str, Any]]:
    """Read a config.json; older files have keys for the layers without a window instead of `per_layer_config`."""
    n_layers = len(windows)
    window_dim = keys.integer("head_dim", minimum=1, maximum=MAX_WIDTH)
    usual = keys.integer("num_key_value_heads", minimum=1, maximum=MAX_WIDTH)
    is_global = keys.get("attention_k_eq_v", bool, False)
    of_full = {
        "head_dim": keys.integer("global_head_dim", window_dim, 1, MAX_WIDTH),
        "num_key_value_heads": keys.integer("num_global_key_value_heads", usual) if is_global else usual,
    }
    own = {str(layer).lstrip("0") or "0": values for layer, values in keys.get("per_layer_config", dict, {}).items()}
    layers = [own.get(str(i), {}) if own else {} if window else of_full for i, window in enumerate(windows)]
    if not all(isinstance(layer, Mapping) and all(type(n) is int for n in layer.values()) for layer in layers):
        raise keys.error("per_layer_config", "must have an object of numbers for each layer that it names")
    if other := sorted({key for layer in layers for key in layer} - {"head_dim", "num_key_value_heads"}):
        raise UnsupportedModelError(f"{keys.describe_key('per_layer_config')}: {other[0]!r} is not supported")
    dims = [layer.get("head_dim", window_dim) for layer in layers]
    kinds = {bool(window): dim for window, dim in zip(windows, dims, strict=True)}
    if [kinds[bool(window)] for window in windows] != dims:
        raise UnsupportedModelError(f"{keys.describe_key('per_layer_config')}: head_dim differs among layers of a kind")
    shared = keys.integer("num_kv_shared_layers", 0, maximum=n_layers)
    wide = 2 if keys.get("use_double_wide_mlp", bool, False) else 1
    d_ff = keys.integer("intermediate_size", minimum=1, maximum=MAX_WIDTH)
    kv_heads = tuple(layer.get("num_key_value_heads", usual) for layer in layers)
    widths = tuple(d_ff * wide if i >= n_layers - shared else d_ff for i in range(n_layers))
    head_dim = kinds.get(False, window_dim)
    fields = {
        **_fields(kv_heads, widths, windows, head_dim, kinds.get(True, head_dim)),
        "shared_kv_layers": shared,
        "layer_input_dim": keys.integer("hidden_size_per_layer_input", 0, maximum=MAX_WIDTH),
    }
    if "window_head_dim" in fields:
        fields["window_rope_dim"] = int(fields["window_head_dim"] * local_rotary_fraction)
    shape = _with_numbers(keys, {"num_key_value_heads": kv_heads, "intermediate_size": widths, "head_dim": (head_dim,)})
    return shape, fields


def has_image_spans(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> bool:
    """Return whether tokens of an image see each other in a layer. A GGUF of Gemma 4 does not say so: they do in the
    models without per-layer embeddings."""
    layers = config.family.attention.image_spans
    if layers != "window" or not config.windows[layer]:
        return layers == "all"
    if checkpoint.format == "gguf":
        return not config.layer_input_dim
    return bool(checkpoint.metadata["config"].get("use_bidirectional_attention") == "vision")


def _fields(
    kv_heads: tuple[int, ...], d_ff: tuple[int, ...], windows: Sequence[int], head_dim: int, window_dim: int
) -> dict[str, Any]:
    lists = {"layer_kv_heads": kv_heads, "layer_d_ff": d_ff}
    fields: dict[str, Any] = {name: values for name, values in lists.items() if len(set(values)) > 1}
    return fields | ({"window_head_dim": window_dim} if any(windows) and window_dim != head_dim else {})


def _with_numbers(keys: MetadataReader, lists: Mapping[str, tuple[int, ...]]) -> MetadataReader:
    """Return the metadata with the largest number of each list."""
    numbers = {keys.prefix + key: max(values) for key, values in lists.items() if values}
    return replace(keys, values={**keys.values, **numbers})
