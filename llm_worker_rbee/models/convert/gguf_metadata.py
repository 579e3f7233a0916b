"""Metadata of a converted file: a GGUF keeps its own; config.json is translated to the keys of llama.cpp's converter.

No key is invented that other readers would ignore. The keys are read back, and a difference to config.json is an error
that names it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...backends.ops import RopeTable
from ...config import LinearAttentionConfig, ModelConfig, PoolingConfig
from ...errors import UnsupportedModelError
from ...layers.rope import inverse_frequencies, rope_table, scaled_table, yarn_mscale
from ...weights import Checkpoint, Tensor
from ...weights.gguf_writer import Typed
from ...weights.quants import BLOCK_TYPES
from ..families import BY_GGUF, gguf_architecture
from ..metadata import GGUF_SAMPLING, GGUF_SCORINGS, linear_kinds, model_config_from_gguf, sampling_from_hf
from .pooling_keys import encoder_keys, pooling_keys
from .tokenizer_export import tokenizer_keys

_log = logging.getLogger("llm_worker_rbee")
QUANTIZATION_VERSION = 2  # of ggml's block layouts
MAX_INT32 = 1 << 31
STILL = 1e30  # divisor of the frequency of a pair that is not rotated
# Keys of one file (split set, alignment), not of the model.
DROPPED_KEYS = ("split.no", "split.count", "split.tensors.count", "general.alignment")
# Names in config.json of fields of ModelConfig.
CONFIG_NAMES = {
    "windows": "sliding_window in some of the layers",
    "attention_scale": "query_pre_attn_scalar",
    "attention_cap": "attn_logit_softcapping",
    "final_cap": "final_logit_softcapping",
    "activation": "hidden_act",
    "rope_local_base": "rope_local_base_freq",
    "nope_layers": "no_rope_layers",
    "temperature_beta": "llama_4_scaling_beta",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "experts": "experts in some of the layers",
}
COMPARED_BY_EFFECT = ("family", "rope_scaling", "token_types")  # compared by the tables they give, or in tensors


def gguf_metadata(
    checkpoint: Checkpoint, config: ModelConfig, file_type: int, pooling: PoolingConfig | None = None
) -> dict[str, Any]:
    """Return every key of the file to write; `pooling` is the configuration of a pooling model."""
    own = {
        "general.file_type": Typed("uint32", file_type),
        "general.quantization_version": Typed("uint32", QUANTIZATION_VERSION),
    }
    if checkpoint.format == "gguf":
        kept = {key: value for key, value in checkpoint.metadata.items() if key not in DROPPED_KEYS}
        return {key: _typed(value, checkpoint.value_types.get(key)) for key, value in kept.items()} | own
    arch = gguf_architecture(config)
    stated = encoder_keys(config) if config.family.norms.layer else _architecture_keys(config)
    stated |= {} if pooling is None else pooling_keys(config, pooling)
    stated |= _image_keys(checkpoint, config)
    keys = {f"{arch}.{key}": value for key, value in stated.items()}
    name = _model_name(checkpoint)
    general = {"general.architecture": arch, "general.type": "model", "general.name": name, **own}
    _check_round_trip(config, {"general.architecture": arch, **keys})
    if any(config.windows) and not config.family.attention.full_every:
        _log.warning("llama.cpp ignores the sliding window of %s files: its results differ for long texts", arch)
    tokenizer = tokenizer_keys(checkpoint.path, config.vocab_size, name)
    if config.token_types:
        tokenizer["tokenizer.ggml.token_type_count"] = Typed("uint32", config.token_types)
    if pooling is not None and pooling.pair_template:
        tokenizer["tokenizer.chat_template.rerank"] = pooling.pair_template
    return {**general, **_sampling_keys(checkpoint), **keys, **tokenizer}


def _typed(value: Any, kind: str | None) -> Any:
    return value if kind is None else Typed(kind.removeprefix("array of "), value)


def _model_name(checkpoint: Checkpoint) -> str:
    named = checkpoint.metadata["config"].get("_name_or_path")
    return Path(named).name if isinstance(named, str) and Path(named).name else checkpoint.path.resolve().name


def _sampling_keys(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the sampling parameters of generation_config.json that are numbers and have a key."""
    stated = sampling_from_hf(checkpoint.metadata.get("generation_config", {}))
    numbers = {name: value for name, value in stated.items() if type(value) in (int, float) and abs(value) < MAX_INT32}
    return {
        key: Typed("int32", int(numbers[name])) if name == "top_k" else Typed("float32", float(numbers[name]))
        for name, key in GGUF_SAMPLING.items()
        if name in numbers
    }


def _architecture_keys(c: ModelConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "context_length": c.context_length,
        "embedding_length": c.d_model,
        "block_count": c.n_layers + c.nextn_layers,
        "feed_forward_length": c.d_ff,
        "attention.head_count": c.n_heads,
        "attention.head_count_kv": c.n_kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.norm_eps,
        "rope.dimension_count": c.rope_dim,
        "rope.freq_base": c.rope_base,
        "vocab_size": c.vocab_size,
    }
    optional = {
        "attention.sliding_window": max(c.windows),
        "rope.freq_base_swa": c.rope_local_base,
        "attn_logit_softcapping": c.attention_cap,
        "final_logit_softcapping": c.final_cap,
        "attention.temperature_scale": c.temperature_beta,
        "nextn_predict_layers": c.nextn_layers,
    }
    if "short_conv" in c.layer_kinds:
        keys["attention.head_count_kv"] = [c.n_kv_heads if kind == "attention" else 0 for kind in c.layer_kinds]
        keys["shortconv.l_cache"] = c.conv_kernel
    if c.linear is not None:
        keys |= _linear_keys(c, c.linear)
    if c.family.rope.unscaled_windows and any(c.windows):
        keys["attention.sliding_window_pattern"] = [window > 0 for window in c.windows]
    if c.family.layer_shapes:
        keys |= _layer_keys(c)
    if c.family.multipliers:
        keys |= {
            "attention.scale": c.attention_scale,
            "embedding_scale": c.embedding_scale,
            "residual_scale": c.residual_scale,
            "logit_scale": c.logit_scale,
        }
    return keys | {key: value for key, value in optional.items() if value} | _scaling_keys(c) | _expert_keys(c)


def _expert_keys(c: ModelConfig) -> dict[str, Any]:
    """Return the keys of the experts; dense layers are expressed where they come first."""
    e, usual = c.experts, c.family.experts
    if e is None or usual is None:
        return {}
    keys: dict[str, Any] = {"expert_count": e.count, "expert_used_count": e.used, "expert_feed_forward_length": e.d_ff}
    if e.shared_d_ff and e.shared_d_ff % e.d_ff == 0 and not e.spec.shared_gate:
        keys["expert_shared_count"] = e.shared_d_ff // e.d_ff
    elif e.shared_d_ff:
        keys["expert_shared_feed_forward_length"] = e.shared_d_ff
    if e.spec.scoring == "sigmoid":
        keys["expert_gating_func"] = next(number for number, name in GGUF_SCORINGS.items() if name == e.spec.scoring)
    if e.spec.scoring == "sigmoid" or e.spec.renormalize != usual.renormalize:
        keys["expert_weights_norm"] = e.spec.renormalize
    scale, dense = 0.0 if e.scale == 1.0 else e.scale, len(e.dense_layers)
    optional = {"expert_weights_scale": scale, "leading_dense_block_count": dense}
    return keys | {key: value for key, value in optional.items() if value}


def _linear_keys(c: ModelConfig, n: LinearAttentionConfig) -> dict[str, Any]:
    """Return the keys of linear attention; its layers are all but every n-th, or listed."""
    keys: dict[str, Any] = {
        "ssm.conv_kernel": n.kernel,
        "ssm.state_size": n.k_dim,
        "ssm.group_count": n.k_heads,
        "ssm.time_step_rank": n.v_heads,
        "ssm.inner_size": n.v_heads * n.v_dim,
    }
    interval = (*c.layer_kinds, "attention").index("attention") + 1
    if c.layer_kinds == linear_kinds(interval, c.n_layers):
        return keys | {"full_attention_interval": interval}
    flags = [kind == "gated_delta" for kind in c.layer_kinds]
    return keys | {"attention.recurrent_layers": flags + [False] * c.nextn_layers}


def _image_keys(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Any]:
    """Return the sections of M-RoPE, and the number of layers to which rows of images are added; text needs neither."""
    if not config.rope_sections:
        return {}
    layers = (checkpoint.metadata.get("vision") or {}).get("deepstack_visual_indexes") or []
    keys = {"rope.dimension_sections": Typed("int32", [*config.rope_sections, 0])}
    return keys | ({"n_deepstack_layers": len(layers)} if layers else {})


def _layer_keys(c: ModelConfig) -> dict[str, Any]:
    """Return the keys of layers of different shapes."""
    layers, window_dim = range(c.n_layers), c.window_head_dim or c.head_dim
    return {
        "attention.sliding_window_pattern": [window > 0 for window in c.windows],
        "attention.head_count_kv": [c.kv_shape(i)[0] for i in layers],
        "feed_forward_length": [c.d_ff_of(i) for i in layers],
        "attention.key_length_swa": window_dim,
        "attention.value_length_swa": window_dim,
        "rope.dimension_count_swa": c.window_rope_dim or c.rope_dim,
        "attention.shared_kv_layers": c.shared_kv_layers,
        "embedding_length_per_layer_input": c.layer_input_dim,
        "final_logit_softcapping": c.final_cap,  # even 0: without the key it is 30
    }


def _scaling_keys(c: ModelConfig) -> dict[str, Any]:
    """Return the keys of the RoPE scaling; llama3 and the factors of longrope are tensors instead."""
    s = c.rope_scaling
    factor = {"rope.scaling.type": s.kind, "rope.scaling.factor": s.factor}
    original = {"rope.scaling.original_context_length": s.original_context}
    scale = rope_table(c, local=False, max_context=c.context_length).scale
    if s.kind == "linear":
        return factor
    if s.kind == "yarn":
        usual, attention = yarn_mscale(s.factor, 1.0), dict[str, float]()
        if s.mscale == 1.0 and s.mscale_all_dim and s.attention_factor is None:
            attention["rope.scaling.yarn_log_multiplier"] = s.mscale_all_dim
        elif not math.isclose(scale, usual, rel_tol=1e-6):
            attention["rope.scaling.attn_factor"] = scale / usual
        betas = {"rope.scaling.yarn_beta_fast": s.beta_fast, "rope.scaling.yarn_beta_slow": s.beta_slow}
        return factor | original | attention | ({} if (s.beta_fast, s.beta_slow) == (32.0, 1.0) else betas)
    return original | {"rope.scaling.attn_factor": scale} if s.kind == "longrope" else {}


def rope_tensors(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Tensor]:
    """Return RoPE scalings that GGUF stores as tensors, for a model that is not a GGUF."""
    s = config.rope_scaling
    if checkpoint.format == "gguf":
        return {}
    if s.kind == "longrope":
        lists = {"rope_factors_long.weight": s.long_factors, "rope_factors_short.weight": s.short_factors}
    elif s.kind == "proportional":
        table = rope_table(config, local=False, max_context=config.context_length)
        lists = {"rope_freqs.weight": tuple(s.factor if turns else STILL for turns in table.inv_freq > 0)}
    elif s.kind == "llama3":
        plain = inverse_frequencies(config.rope_base, config.rope_dim)
        scaled = scaled_table(plain, config.rope_base, s, config.context_length).inv_freq
        lists = {"rope_freqs.weight": tuple((plain / scaled).tolist())}
    else:
        return {}
    arrays = {name: np.array(values, "<f4") for name, values in lists.items()}
    return {n: Tensor(n, BLOCK_TYPES["F32"], a.shape, a.view(np.uint8)) for n, a in arrays.items()}


def _check_round_trip(config: ModelConfig, metadata: Mapping[str, Any]) -> None:
    """Raise if the keys, read back, give another configuration."""
    arch = metadata["general.architecture"]
    plain = {key: value.value if isinstance(value, Typed) else value for key, value in metadata.items()}
    read = model_config_from_gguf(plain, BY_GGUF[arch], config.vocab_size)
    for field in fields(ModelConfig):
        expected, actual = getattr(config, field.name), getattr(read, field.name)
        if field.name not in COMPARED_BY_EFFECT and expected != actual:
            raise _inexpressible(CONFIG_NAMES.get(field.name, field.name), arch)
    contexts = (config.context_length, config.rope_scaling.original_context or 1)
    for context in contexts:
        for local in (False, True):
            if not _same_table(_table(config, config, local, context), _table(read, config, local, context)):
                raise _inexpressible(f"rope scaling {config.rope_scaling.kind!r} with its settings", arch)


def _inexpressible(what: str, arch: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"config.json: {what} cannot be expressed in a GGUF of architecture {arch!r}")


def _table(config: ModelConfig, source: ModelConfig, local: bool, context: int) -> RopeTable:
    """Return the RoPE table as the loader builds it, with the factor tensors."""
    s, scaling = source.rope_scaling, config.rope_scaling
    if s.kind == "longrope":
        scaling = replace(scaling, kind=s.kind, short_factors=s.short_factors, long_factors=s.long_factors)
    elif s.kind in ("llama3", "proportional"):
        scaling = s
    return rope_table(replace(config, rope_scaling=scaling), local=local, max_context=context)


def _same_table(table: RopeTable, other: RopeTable) -> bool:
    are_close = np.allclose(table.inv_freq, other.inv_freq, rtol=1e-5)
    return are_close and math.isclose(table.scale, other.scale, rel_tol=1e-5) and table[2:] == other[2:]
