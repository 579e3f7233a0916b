"""What a model is, as numbers: read once from a file's metadata, then frozen.

`Family` is what a whole line of models has in common (the table is in models/architectures.py); `ModelConfig` is one
model. Both metadata dialects, GGUF's and transformers', end in the same `ModelConfig`; a key that is missing or of the
wrong type is an error that names it, and a rope scaling we do not implement is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ModelFileError, UnsupportedModelError

MAX_LAYERS = 4096
MAX_WIDTH = 1 << 20
HF_SCALINGS = ("default", "linear", "llama3", "yarn", "longrope", "su")
GGUF_SCALINGS = ("none", "linear", "yarn", "longrope")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between families of decoders, as data."""

    name: str
    gguf: tuple[str, ...]  # values of general.architecture
    hf: tuple[str, ...]  # values of model_type
    activation: str = "silu"
    rope_interleaved: bool = False  # GGUF stores q/k rows for rope over neighbouring pairs
    qkv_bias: bool = False  # bias tensors are expected beside q, k and v
    qk_norm: bool = False
    fused: bool = False  # q, k, v in one tensor, gate and up in one tensor
    post_norms: bool = False  # a norm after attention and after the MLP, before the residual
    scaled_embedding: bool = False  # embeddings times sqrt(width)
    norm_plus_one: bool = False  # safetensors hold weight - 1 (GGUF holds the weight)
    full_every: int = 0  # with a window: every n-th layer looks at everything (0: none does)
    default_window: int = 0
    default_local_base: float = 0.0  # rope base of the layers with a window, where it differs
    default_attention_cap: float = 0.0
    default_final_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context a model was first trained on."""

    kind: str = "none"  # none, linear, llama3, yarn, longrope
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float | None = None  # None: the kind's own formula
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one model and every number its forward pass needs."""

    family: Family
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_dim: int
    rope_base: float
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rope_local_base: float = 0.0  # 0: layers with a window use rope_base and rope_scaling like the others
    windows: tuple[int, ...] = ()  # per layer; 0 sees everything
    attention_scale: float = 0.0
    attention_cap: float = 0.0  # soft cap of the scores; 0: none
    final_cap: float = 0.0  # soft cap of the logits; 0: none
    activation: str = "silu"

    def __post_init__(self) -> None:
        for name, top in (("n_layers", MAX_LAYERS), ("d_model", MAX_WIDTH), ("n_heads", MAX_WIDTH),
                          ("n_kv_heads", MAX_WIDTH), ("head_dim", MAX_WIDTH), ("d_ff", MAX_WIDTH),
                          ("vocab_size", 1 << 24), ("context_length", 1 << 40)):
            if not 1 <= getattr(self, name) <= top:
                raise ModelFileError(f"model shape: {name} is {getattr(self, name)}, outside 1..{top}")
        if self.n_heads % self.n_kv_heads:
            raise ModelFileError(f"model shape: {self.n_heads} heads cannot share {self.n_kv_heads} KV heads evenly")
        if self.rope_dim % 2 or not 0 < self.rope_dim <= self.head_dim:
            raise ModelFileError(f"model shape: rope over {self.rope_dim} of {self.head_dim} values a head")
        for name in ("norm_eps", "rope_base", "attention_scale"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ModelFileError(f"model shape: {name} is {value}, not a positive number")

    def kv_bytes(self, tokens: int, value_bytes: int = 4) -> int:
        """Memory that the keys and values of so many tokens take."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * value_bytes * tokens

    @staticmethod
    def from_gguf(metadata: Mapping[str, Any], family: Family, vocab_size: int | None = None) -> ModelConfig:
        """Read the `<architecture>.*` keys; `vocab_size` (the rows of the embedding) wins over the metadata."""
        return _from_gguf(Keys(metadata, f"{metadata['general.architecture']}."), family, vocab_size)

    @staticmethod
    def from_hf(config: Mapping[str, Any], family: Family, vocab_size: int | None = None) -> ModelConfig:
        """Read a config.json of the transformers library."""
        return _from_hf(Keys(config), family, vocab_size)


class Keys:
    """Typed look-ups in a metadata mapping; every failure names the key."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(self.prefix + key) is not None

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value, of the given type; a missing one without a default is an error."""
        value = self.values.get(self.prefix + key)
        if value is None:
            if default is None:
                raise ModelFileError(f"metadata key {self.prefix + key!r} is missing")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise ModelFileError(f"metadata key {self.prefix + key!r} must be {wanted}, not {type(value).__name__}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; an array of one repeated number counts as that number."""
        value = self.values.get(self.prefix + key)
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, list):
            if not value or any(v != value[0] for v in value):
                raise UnsupportedModelError(f"metadata key {self.prefix + key!r} differs from layer to layer: not supported")
            return Keys({key: value[0]}).integer(key)
        return int(self.get(key, int, default))

    def number(self, key: str, default: float | None = None) -> float:
        """A number, whole or not."""
        return float(self.get(key, (int, float), default))

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers, empty where the key is missing."""
        values = self.get(key, list, [])
        if not all(isinstance(v, (int, float)) for v in values):
            raise ModelFileError(f"metadata key {self.prefix + key!r} must be a list of numbers")
        return tuple(float(v) for v in values)


def _from_gguf(keys: Keys, family: Family, vocab_size: int | None) -> ModelConfig:
    if keys.integer("expert_count", 0) > 0:
        raise UnsupportedModelError(f"{family.name}: mixture-of-experts models are not supported")
    n_layers, d_model, n_heads = keys.integer("block_count"), keys.integer("embedding_length"), keys.integer("attention.head_count")
    if n_heads < 1:
        raise ModelFileError(f"metadata key {keys.prefix + 'attention.head_count'!r} is {n_heads}")
    head_dim = keys.integer("attention.key_length", d_model // n_heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError("keys and values of different length are not supported")
    window = keys.integer("attention.sliding_window", family.default_window)
    tokens = keys.values.get("tokenizer.ggml.tokens")
    from_tokens = len(tokens) if isinstance(tokens, list) else None
    return ModelConfig(
        family=family,
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=keys.integer("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        d_ff=keys.integer("feed_forward_length"),
        vocab_size=vocab_size or keys.integer("vocab_size", from_tokens),
        context_length=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_dim=keys.integer("rope.dimension_count", head_dim),
        rope_base=keys.number("rope.freq_base", 10000.0),
        rope_scaling=_gguf_scaling(keys),
        rope_local_base=keys.number("rope.freq_base_swa", family.default_local_base),
        windows=_gguf_windows(keys, family, window, n_layers),
        attention_scale=_gguf_attention_scale(keys, family, n_layers, d_model, n_heads, head_dim),
        attention_cap=keys.number("attn_logit_softcapping", family.default_attention_cap),
        final_cap=keys.number("final_logit_softcapping", family.default_final_cap),
        activation=family.activation,
    )


def _gguf_attention_scale(keys: Keys, family: Family, n_layers: int, d_model: int, n_heads: int, head_dim: int) -> float:
    """GGUF has no key for it: the 27B Gemmas scale by width over heads, which only their depth gives away."""
    depth_of_27b = {"gemma2": 46, "gemma3": 62}.get(family.name)
    usual = (d_model / n_heads) ** -0.5 if n_layers == depth_of_27b else head_dim**-0.5
    return keys.number("attention.scale", usual)


def _gguf_windows(keys: Keys, family: Family, window: int, n_layers: int) -> tuple[int, ...]:
    pattern = keys.values.get(keys.prefix + "attention.sliding_window_pattern")
    if pattern is not None and hasattr(pattern, "tolist"):
        pattern = pattern.tolist()
    if isinstance(pattern, list) and window:
        if len(pattern) != n_layers:
            raise ModelFileError(f"metadata key {keys.prefix + 'attention.sliding_window_pattern'!r} has {len(pattern)} "
                                 f"entries for {n_layers} layers")
        return tuple(window if sliding else 0 for sliding in pattern)
    every = pattern if isinstance(pattern, int) and not isinstance(pattern, bool) else family.full_every
    return layer_windows(window, every, n_layers)


def layer_windows(window: int, full_every: int, n_layers: int) -> tuple[int, ...]:
    """The window of each layer: every `full_every`-th one sees everything."""
    if not 0 < n_layers <= MAX_LAYERS or window < 0:
        raise ModelFileError(f"model shape: {n_layers} layers with a window of {window}")
    return tuple(0 if full_every and (i + 1) % full_every == 0 else window for i in range(n_layers))


def _gguf_scaling(keys: Keys) -> RopeScaling:
    linear = keys.number("rope.scale_linear", 1.0)
    kind = keys.get("rope.scaling.type", str, "linear" if linear != 1.0 or keys.has("rope.scaling.factor") else "none")
    if kind not in GGUF_SCALINGS:
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported (supported: {', '.join(GGUF_SCALINGS)})")
    attention = keys.number("rope.scaling.attn_factor", 0.0) or keys.number("rope.scaling.yarn_attn_factor", 0.0)
    if keys.number("rope.scaling.yarn_log_multiplier", 0.0):
        raise UnsupportedModelError("rope scaling with yarn_log_multiplier is not supported")
    factor = keys.number("rope.scaling.factor", linear)
    if factor <= 0:
        raise ModelFileError(f"metadata key {keys.prefix + 'rope.scaling.factor'!r} is {factor}, not a positive number")
    if kind == "yarn" and attention:
        attention *= 1.0 + 0.1 * math.log(factor)  # the file's figure multiplies the formula's
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_context=keys.integer("rope.scaling.original_context_length", keys.integer("context_length")),
        attention_factor=attention or None,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _from_hf(keys: Keys, family: Family, vocab_size: int | None) -> ModelConfig:
    n_layers, d_model = keys.integer("num_hidden_layers"), keys.integer("hidden_size")
    n_heads = keys.integer("num_attention_heads")
    if n_heads < 1:
        raise ModelFileError(f"config.json: num_attention_heads is {n_heads}")
    head_dim = keys.integer("head_dim", d_model // n_heads)
    scale_by = keys.number("query_pre_attn_scalar", head_dim)
    rope = _hf_rope(keys, "full_attention")
    base = rope.number("rope_theta", 10000.0)
    act = keys.get("hidden_activation", str, keys.get("hidden_act", str, "silu"))
    if act not in ACTIVATIONS and not (family.activation == "gelu_tanh" and act == "gelu"):
        raise UnsupportedModelError(f"config.json: activation {act!r} is not supported")
    return ModelConfig(
        family=family,
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=keys.integer("num_key_value_heads", n_heads),
        head_dim=head_dim,
        d_ff=keys.integer("intermediate_size"),
        vocab_size=vocab_size or keys.integer("vocab_size"),
        context_length=keys.integer("max_position_embeddings"),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope_dim=int(head_dim * rope.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))),
        rope_base=base,
        rope_scaling=_hf_scaling(rope, keys),
        rope_local_base=_hf_local_base(keys, family),
        windows=_hf_windows(keys, family, n_layers),
        attention_scale=scale_by**-0.5 if scale_by > 0 else 0.0,
        attention_cap=keys.number("attn_logit_softcapping", 0.0),
        final_cap=keys.number("final_logit_softcapping", 0.0),
        activation=ACTIVATIONS.get(act, family.activation),
    )


def _hf_windows(keys: Keys, family: Family, n_layers: int) -> tuple[int, ...]:
    window = keys.integer("sliding_window", 0)
    if keys.values.get("use_sliding_window") is False:
        window = 0
    kinds = keys.values.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != n_layers or set(kinds) - {"full_attention", "sliding_attention"}:
            raise UnsupportedModelError("config.json: layer_types must name full_attention or sliding_attention for each layer")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if keys.has("max_window_layers") and window:
        first = keys.integer("max_window_layers")
        return tuple(window if i >= first else 0 for i in range(n_layers))
    return layer_windows(window, keys.integer("sliding_window_pattern", family.full_every), n_layers)


def _hf_rope(keys: Keys, layer_kind: str) -> Keys:
    """The rope settings of one kind of layer: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    new = keys.get("rope_parameters", dict, {})
    if layer_kind in new:
        return Keys(keys.get("rope_parameters", dict)[layer_kind])
    if new:
        return Keys(new)
    old = keys.get("rope_scaling", dict, {})
    return Keys({"rope_theta": keys.number("rope_theta", 10000.0), **old})


def _hf_local_base(keys: Keys, family: Family) -> float:
    if "sliding_attention" not in keys.get("rope_parameters", dict, {}):
        return keys.number("rope_local_base_freq", family.default_local_base)
    local = _hf_rope(keys, "sliding_attention")
    if local.get("rope_type", str, "default") != "default":
        raise UnsupportedModelError("rope scaling of the layers with a sliding window is not supported")
    return local.number("rope_theta", 10000.0)


def _hf_scaling(rope: Keys, keys: Keys) -> RopeScaling:
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    if kind not in HF_SCALINGS:
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported (supported: {', '.join(HF_SCALINGS)})")
    context = keys.integer("max_position_embeddings")
    original = rope.integer("original_max_position_embeddings", keys.integer("original_max_position_embeddings", context))
    factor = rope.number("factor", context / original if original > 0 else 0.0)
    if factor <= 0 or original <= 0:
        raise ModelFileError(f"config.json: rope scaling by {factor} from a context of {original}")
    return RopeScaling(
        kind={"default": "none", "su": "longrope"}.get(kind, kind),
        factor=factor,
        original_context=original,
        attention_factor=rope.number("attention_factor") if rope.has("attention_factor") else None,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        truncate=rope.get("truncate", bool, True),
        short_factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
    )
