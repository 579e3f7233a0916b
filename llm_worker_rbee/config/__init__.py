"""What a model is, as numbers: read once from a file's metadata, then frozen.

`Family` is what a whole line of models has in common (the table is in models/architectures.py); `ModelConfig` is one
model. Both metadata dialects, GGUF's (gguf.py) and transformers' (hf.py), end in the same record; a key
that is missing or of the wrong type is an error that names it, and a rope scaling we do not implement is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ModelFileError
from .engine import DEVICE_SPARE, EngineConfig
from .gguf import gguf_shape
from .hf import hf_shape
from .keys import MAX_CONTEXT, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH, Keys
from .types import KV_AUTO, KV_CUDA, KV_DEFAULT, KV_ON_CPU, KV_ON_CUDA, KV_VALUE_BYTES, Family, RopeScaling

__all__ = [
    "DEVICE_SPARE", "KV_AUTO", "KV_CUDA", "KV_DEFAULT", "KV_ON_CPU", "KV_ON_CUDA", "KV_VALUE_BYTES", "EngineConfig",
    "Family", "ModelConfig", "RopeScaling",
]  # fmt: skip

LIMITS = {
    "n_layers": MAX_LAYERS,
    "d_model": MAX_WIDTH,
    "n_heads": MAX_WIDTH,
    "n_kv_heads": MAX_WIDTH,
    "head_dim": MAX_WIDTH,
    "d_ff": MAX_WIDTH,
    "vocab_size": MAX_VOCABULARY,
    "context_length": MAX_CONTEXT,
}


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
    attention_scale: float
    windows: tuple[int, ...]  # per layer; 0 sees everything
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rope_local_base: float = 0.0  # 0: layers with a window use rope_base and rope_scaling like the others
    attention_cap: float = 0.0  # soft cap of the scores; 0: none
    final_cap: float = 0.0  # soft cap of the logits; 0: none
    activation: str = "silu"

    def __post_init__(self) -> None:
        for name, top in LIMITS.items():
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

    def kv_bytes(self, tokens: int, kv_type: str = "float32") -> int:
        """Memory that the keys and values of so many tokens take."""
        scale = 4 if kv_type == "int8" else 0  # a float32 for each position and head
        head = self.head_dim * KV_VALUE_BYTES[kv_type] + scale
        return 2 * self.n_layers * self.n_kv_heads * head * tokens

    @staticmethod
    def from_gguf(metadata: Mapping[str, Any], family: Family, vocab_size: int | None = None) -> ModelConfig:
        """Read the `<architecture>.*` keys; `vocab_size` (the rows of the embedding) wins over the metadata."""
        keys = Keys(metadata, f"{metadata['general.architecture']}.")
        return ModelConfig(family=family, **gguf_shape(keys, family, vocab_size))

    @staticmethod
    def from_hf(config: Mapping[str, Any], family: Family, vocab_size: int | None = None) -> ModelConfig:
        """Read a config.json of the transformers library."""
        keys = Keys({**family.hf_defaults, **config}, source="config.json: ")
        return ModelConfig(family=family, **hf_shape(keys, family, vocab_size))
