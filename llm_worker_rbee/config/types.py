"""What a line of models has in common, and how rotary frequencies are stretched: two records of plain data;
and what keys and values may be kept as.

`Family` rows are in models/architectures.py; `RopeScaling` is a part of `ModelConfig`. Import all from `config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KV_VALUE_BYTES = {
    "float32": 4,
    "float16": 2,
    "int8": 1,
    "bfloat16": 2,
    "float8": 1,
}  # by `--kv-type`; int8 has a float32 scale per position and head
KV_ON_CPU, KV_ON_CUDA = ("float32", "float16", "int8"), ("bfloat16", "float16", "float32", "float8")
KV_AUTO = "auto"
KV_CUDA = "bfloat16"  # what `auto` is on a GPU
KV_DEFAULT = "float16"  # what `auto` is for kernels: half the memory and half the reading; the reference rounds nothing


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
    # what a GGUF leaves unsaid
    default_window: int = 0
    default_local_base: float = 0.0  # rope base of the layers with a window, where it differs
    default_attention_cap: float = 0.0
    default_final_cap: float = 0.0
    # what a config.json leaves unsaid: keys that are absent, not those that are null
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)


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
