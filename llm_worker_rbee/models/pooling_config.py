"""How a checkpoint pools: the keys of a GGUF file, and the folders of sentence-transformers."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig, PoolingConfig
from ..errors import UnsupportedModelError
from ..weights import Checkpoint
from ..weights.safetensors import read_json

GGUF_KINDS = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}


def read_pooling_config(checkpoint: Checkpoint, config: ModelConfig) -> PoolingConfig:
    """Return how a checkpoint pools; a folder without modules.json has the mean."""
    if checkpoint.format == "gguf":
        return _from_gguf(checkpoint.metadata, checkpoint.architecture)
    folder = checkpoint.path
    fields: dict[str, Any] = {"kind": "mean" if config.family.is_encoder else "last"}
    pooling = folder / "1_Pooling" / "config.json"
    if pooling.exists():
        fields["kind"] = "cls" if read_json(pooling).get("pooling_mode_cls_token") else "mean"
    lengths = folder / "sentence_bert_config.json"
    if lengths.exists():
        fields["max_length"] = read_json(lengths).get("max_seq_length") or 0
    return PoolingConfig(**fields)


def _from_gguf(metadata: Any, architecture: str | None) -> PoolingConfig:
    kind = GGUF_KINDS.get(metadata.get(f"{architecture}.pooling_type", 1), "unknown")
    if kind == "rank":
        return PoolingConfig(kind="cls", score="sigmoid", normalize=False)
    if kind not in ("mean", "cls", "last"):
        raise UnsupportedModelError(f"metadata key '{architecture}.pooling_type': pooling {kind!r} is not supported")
    return PoolingConfig(kind=kind)
