"""GGUF names of the tensors of encoders and classifiers in safetensors: BERT, RoBERTa, Nomic BERT, ModernBERT.

A classifier is named `cls` (dense layer), `cls.norm` and `cls.output`. Heads of training objectives keep their names:
`is_training_head` tells them, and a model is built without them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import ModelFileError
from .checkpoint import Tensor

BERT_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
BERT_CLASSIFIER = {"pooler.dense": "cls", "classifier": "cls.output"}
ROBERTA_CLASSIFIER = {"classifier.dense": "cls", "classifier.out_proj": "cls.output"}
# As transformers names them, and as nomic-ai's own code does.
NOMIC_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "emb_ln": "token_embd_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "post_attention_layernorm": "attn_output_norm",
    "norm1": "attn_output_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.fc12": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.fc11": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.fc2": "ffn_down",
    "post_mlp_layernorm": "layer_output_norm",
    "norm2": "layer_output_norm",
}
MODERN_NAMES = {
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.norm": "token_embd_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
    "final_norm": "output_norm",
}
MODERN_CLASSIFIER = {"head.dense": "cls", "head.norm": "cls.norm", "classifier": "cls.output"}
# By model_type: names of the encoder, and of its classifier.
ENCODER_NAMES: dict[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "bert": (BERT_NAMES, BERT_CLASSIFIER),
    "camembert": (BERT_NAMES, ROBERTA_CLASSIFIER),
    "roberta": (BERT_NAMES, ROBERTA_CLASSIFIER),
    "xlm-roberta": (BERT_NAMES, ROBERTA_CLASSIFIER),
    "nomic_bert": (NOMIC_NAMES, {}),
    "modernbert": (MODERN_NAMES, MODERN_CLASSIFIER),
}
ROBERTA_TYPES = ("camembert", "roberta", "xlm-roberta")  # their first positions are of padding
ENCODER_PREFIX = re.compile(r"^(bert|roberta|xlm_roberta|nomic_bert|model)\.")
ENCODER_LAYER = re.compile(r"^(?:encoder\.)?layers?\.([0-9]{1,6})\.(.+)$")
OLD_SUFFIXES = {"gamma": "weight", "beta": "bias"}
TRAINING_HEADS = ("cls.predictions.", "cls.seq_relationship.", "lm_head.", "decoder.", "pooler.", "head.")
POSITION_IDS = "embeddings.position_ids"


def is_training_head(name: str) -> bool:
    """Return whether a tensor belongs to a training objective, or is a table of numbers: no part of an encoder."""
    return name.startswith(TRAINING_HEADS) or name == POSITION_IDS


def rename_encoder(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of an encoder's folder by their GGUF names; positions of padding are left out."""
    model_type = config["model_type"]
    is_classifier = has_classifier(tensors)
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new_name = encoder_name(name, model_type, is_classifier=is_classifier)
        if new_name in out:
            raise ModelFileError(f"tensors {name!r} and {out[new_name].name!r} both map to {new_name!r}")
        out[new_name] = tensor
    positions = out.get("position_embd.weight")
    if positions is not None and model_type in ROBERTA_TYPES:
        out["position_embd.weight"] = positions.take_rows(slice(position_offset(config), None))
    return {name: replace(tensor, name=name) for name, tensor in out.items()}


def position_offset(config: Mapping[str, Any]) -> int:
    """Return the row of the first token's position in the table of a RoBERTa: the row after padding's."""
    padding = config.get("pad_token_id", 1)
    if type(padding) is not int or not 0 <= padding <= 1 << 20:
        raise ModelFileError(f"config.json: 'pad_token_id' is {padding!r}, not the number of a token")
    return padding + 1


def has_classifier(names: Iterable[str]) -> bool:
    """Return whether a folder has a classifier's head; rerankers have one."""
    return any(name.startswith("classifier.") for name in names)


def encoder_name(name: str, model_type: str, *, is_classifier: bool) -> str:
    """Return the GGUF name of one tensor; an unknown name is returned without its prefix."""
    common, classifier = ENCODER_NAMES[model_type]
    bare = ENCODER_PREFIX.sub("", name)
    layer = ENCODER_LAYER.match(bare)
    part, _, suffix = (layer[2] if layer else bare).rpartition(".")
    suffix = OLD_SUFFIXES.get(suffix, suffix)
    names = {**common, **classifier} if is_classifier else common
    if part not in names or suffix not in ("weight", "bias"):
        return bare
    return f"blk.{int(layer[1])}.{names[part]}.{suffix}" if layer else f"{names[part]}.{suffix}"
