"""Keys of pooling models in a GGUF: keys of encoders, and how the hidden states of a sequence become one row.

A GGUF has no keys for other settings of a sentence-transformers folder (prompts, the length of a text, no
normalization): a warning names them. A pooling that readers would do differently is an error.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from ...backends.ops import Backend
from ...config import ModelConfig, PoolingConfig
from ...errors import UnsupportedModelError
from ...weights import Checkpoint, Tensor
from ...weights.gguf_writer import Typed
from ..pooling_config import CLASSIFIER, GGUF_KINDS, read_pooling_config
from ..pooling_loader import load_pooling_model

_log = logging.getLogger("llm_worker_rbee")
KIND_NUMBERS = {name: number for number, name in GGUF_KINDS.items()}
TABLES = ("position_embd.weight", "token_types.weight")  # readers expect them in F32
HF_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}  # by the name in a configuration, where it is another


def check_pooling_model(checkpoint: Checkpoint, config: ModelConfig) -> PoolingConfig:
    """Return how a checkpoint pools; raise for what the loader refuses."""
    pooling = read_pooling_config(checkpoint, config)
    load_pooling_model(checkpoint, cast(Backend, CHECK_ONLY_BACKEND), config, pooling, "float32")
    return pooling


def _packed(tensors: list[Tensor]) -> SimpleNamespace:
    return SimpleNamespace(rows=sum(tensor.shape[0] for tensor in tensors))


# Packs nothing, so that the loader only checks every tensor.
CHECK_ONLY_BACKEND = SimpleNamespace(
    has_device_memory=False,
    threads=1,
    prepare=_packed,
    **dict.fromkeys(("prepare_experts", "prepare_vector", "fuse", "load_kernels"), lambda *_: None),
)


def encoder_keys(c: ModelConfig) -> dict[str, Any]:
    """Return the keys of an encoder with layer norms, which name no heads of keys and no rotation if it has none."""
    keys: dict[str, Any] = {
        "context_length": c.context_length,
        "embedding_length": c.d_model,
        "block_count": c.n_layers,
        "feed_forward_length": c.d_ff,
        "attention.head_count": c.n_heads,
        "attention.layer_norm_epsilon": c.norm_eps,
        "attention.causal": False,
    }
    if not c.family.learned_positions:
        keys |= {"rope.freq_base": c.rope_base, "vocab_size": c.vocab_size}
    if any(c.windows):
        keys |= {"attention.sliding_window": max(c.windows), "rope.freq_base_swa": c.rope_local_base}
    if c.family.gated_mlp and c.activation != c.family.activation:
        keys["hidden_activation"] = HF_ACTIVATIONS.get(c.activation, c.activation)
    return keys


def _period(c: ModelConfig) -> int:
    """Return the layers from one without a window to the next."""
    first = c.windows.index(0) if 0 in c.windows else 0
    return (*c.windows[first + 1 :], 0).index(0) + 1


def pooling_keys(c: ModelConfig, pooling: PoolingConfig) -> dict[str, Any]:
    """Return the keys of the pooling; raise if a GGUF cannot express it."""
    keys: dict[str, Any] = {"pooling_type": Typed("uint32", KIND_NUMBERS["rank" if pooling.score else pooling.kind])}
    if pooling.score and pooling.kind != c.family.classifier_pooling and c.family.is_encoder:
        raise UnsupportedModelError(f"pooling {pooling.kind!r} before a classifier cannot be expressed in a GGUF")
    if pooling.score not in ("", "sigmoid", "softmax"):
        raise UnsupportedModelError(f"a reranker with the score {pooling.score!r} cannot be expressed in a GGUF")
    if pooling.label_tokens:
        keys["classifier.output_labels"] = list(pooling.label_words)
    if len(pooling.dense) > 2 or any(layer.activation for layer in pooling.dense):
        raise UnsupportedModelError(
            "modules.json: more than two dense layers, or an activation after one, cannot be expressed in a GGUF"
        )
    for layer in pooling.dense:
        keys |= {f"{layer.name}_feat_in": layer.columns, f"{layer.name}_feat_out": layer.rows}
    if not c.causal:
        keys["attention.causal"] = False
    if any(c.windows) and 0 in c.windows and not c.causal and _period(c) != c.family.attention.full_every:
        keys["attention.sliding_window_pattern"] = Typed("uint32", _period(c))
    _warn_of_losses(c, pooling)
    return keys


def label_rows(checkpoint: Checkpoint, pooling: PoolingConfig | None) -> dict[str, Tensor]:
    """Return the classifier of a reranker whose labels are tokens: their rows of the output head."""
    if pooling is None or not pooling.label_tokens or CLASSIFIER in checkpoint.tensors:
        return {}
    head = checkpoint.tensors.get("output.weight", checkpoint.tensors["token_embd.weight"])
    return {CLASSIFIER: replace(head.take_rows(np.array(pooling.label_tokens, np.intp)), name=CLASSIFIER)}


def _warn_of_losses(c: ModelConfig, pooling: PoolingConfig) -> None:
    lost = {
        "prompts": bool(pooling.prompts),
        f"the length of a text ({pooling.max_length} tokens)": 0 < pooling.max_length < c.context_length,
        "that embeddings are not normalized": not pooling.normalize and not pooling.score,
    }
    if any(lost.values()):
        _log.warning(
            "a GGUF has no keys for %s: left out", ", ".join(what for what, is_lost in lost.items() if is_lost)
        )
