"""GGUF names of encoders' tensors."""

from __future__ import annotations

import gguf
import pytest

from llm_worker_rbee.errors import ModelFileError
from llm_worker_rbee.weights.encoder_names import ENCODER_NAMES, encoder_name, is_training_head, position_offset


@pytest.mark.parametrize(
    ("model_type", "name", "expected"),
    [
        ("bert", "bert.encoder.layer.11.attention.output.LayerNorm.gamma", "blk.11.attn_output_norm.weight"),
        ("bert", "embeddings.LayerNorm.beta", "token_embd_norm.bias"),
        ("bert", "pooler.dense.weight", "pooler.dense.weight"),
        ("xlm-roberta", "roberta.encoder.layer.0.intermediate.dense.bias", "blk.0.ffn_up.bias"),
        ("nomic_bert", "encoder.layers.3.mlp.fc12.weight", "blk.3.ffn_gate.weight"),
        ("nomic_bert", "layers.3.mlp.gate_proj.weight", "blk.3.ffn_gate.weight"),
        ("modernbert", "model.layers.2.mlp.Wi.weight", "blk.2.ffn_up.weight"),
        ("modernbert", "model.final_norm.weight", "output_norm.weight"),
        ("bert", "encoder.layer.0.unknown.weight", "encoder.layer.0.unknown.weight"),
    ],
)
def test_names_of_encoders(model_type: str, name: str, expected: str) -> None:
    assert encoder_name(name, model_type, is_classifier=False) == expected


@pytest.mark.parametrize(
    ("model_type", "name", "expected"),
    [
        ("bert", "bert.pooler.dense.weight", "cls.weight"),
        ("bert", "classifier.bias", "cls.output.bias"),
        ("xlm-roberta", "classifier.out_proj.weight", "cls.output.weight"),
        ("modernbert", "head.norm.weight", "cls.norm.weight"),
    ],
)
def test_names_of_classifiers(model_type: str, name: str, expected: str) -> None:
    assert encoder_name(name, model_type, is_classifier=True) == expected


def test_names_are_those_of_gguf() -> None:
    known = {name.format(bid=0).removeprefix("blk.0.") for name in gguf.TENSOR_NAMES.values()}
    for names, classifier in ENCODER_NAMES.values():
        assert {*names.values(), *classifier.values()} <= known


def test_heads_of_training_are_told_from_parts_of_an_encoder() -> None:
    heads = ("cls.predictions.bias", "lm_head.dense.weight", "pooler.dense.bias", "embeddings.position_ids")
    assert all(map(is_training_head, heads))
    assert not any(map(is_training_head, ("cls.weight", "cls.output.weight", "token_embd.weight", "blk.0.ffn_up.bias")))


def test_position_offset() -> None:
    assert position_offset({"pad_token_id": 1}) == position_offset({}) == 2
    for padding in (-1, None, "1", 1 << 40):
        with pytest.raises(ModelFileError, match="'pad_token_id' is"):
            position_offset({"pad_token_id": padding})
