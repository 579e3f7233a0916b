"""How checkpoints pool: sentence-transformers folders and GGUF keys, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llm_worker_rbee.config import PoolingConfig
from llm_worker_rbee.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from llm_worker_rbee.models.families import read_model_config
from llm_worker_rbee.models.pooling_config import YES_NO_TEMPLATE, pooling_kind, read_pooling_config
from llm_worker_rbee.weights import open_checkpoint
from tests.helpers import pooling_zoo

NAMES = "sentence_transformers.models."
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a member of the zoo, made once."""
    cache: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in cache:
            variant = pooling_zoo.POOLING_ZOO[name]
            cache[name] = tmp_path_factory.mktemp(name) / name
            pooling_zoo.save_folder(variant, pooling_zoo.make_hf(variant), cache[name])
        return cache[name]

    return make


def copy(folder: Path, target: Path) -> Path:
    for path in folder.rglob("*"):
        if path.is_file():
            (target / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(folder)).write_bytes(path.read_bytes())
    return target


def read(path: Path, task: str = "") -> PoolingConfig:
    checkpoint = open_checkpoint(path)
    return read_pooling_config(checkpoint, read_model_config(checkpoint), task)


def edit(path: Path, **values: Any) -> None:
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**found, **values}))


def modules(*kinds: str) -> Change:
    def write(folder: Path) -> None:
        listed = [
            {"type": NAMES + kind, "path": "" if kind == "Transformer" else f"{i}_{kind}"}
            for i, kind in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))

    return write


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["cls"]}, "cls"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({}, "mean"),
    ],
)
def test_pooling_modes(config: dict[str, Any], kind: str) -> None:
    assert pooling_kind(config) == kind


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pooling_mode": "max"}, "pooling mode 'max' is not supported"),
        ({"pooling_mode_weightedmean_tokens": True}, "pooling mode 'weightedmean' is not supported"),
        ({"pooling_mode": ["cls", "mean"]}, r"pooling modes \['cls', 'mean'\] together"),
        ({"pooling_mode": 3}, "pooling modes 3"),
        ({"pooling_mode": [["mean"]]}, r"pooling mode \['mean'\]"),
        ({"pooling_mode": "mean", "include_prompt": False}, "without the prompt"),
    ],
)
def test_pooling_modes_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        pooling_kind(config)


def test_settings_of_a_folder(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(zoo("bert"), tmp_path)
    prompts = {"query": "query: ", "document": "passage: "}
    edit(
        folder / "config_sentence_transformers.json", prompts=prompts, default_prompt_name="document",
        similarity_fn_name="dot",
    )  # fmt: skip
    edit(folder / "tokenizer_config.json", model_max_length=30)
    assert read(folder).max_length == 30
    edit(folder / "tokenizer_config.json", model_max_length=10**30)  # how transformers writes that there is no limit
    assert read(folder).max_length == 0
    edit(folder / "sentence_bert_config.json", max_seq_length=20, do_lower_case=True)
    found = read(folder)
    assert found == PoolingConfig(
        kind="mean", prompts=prompts, default_prompt="document", similarity="dot", max_length=20, lower_case=True
    )
    assert pooling_zoo.load(folder).max_length == 20


def test_folder_without_modules_pools_as_its_family_does(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    for name, kind in (("bert-cls", "mean"), ("qwen3", "last"), ("gemma", "mean")):
        folder = copy(zoo(name), tmp_path / name)
        (folder / "modules.json").unlink()
        found = read(folder)
        assert found.kind == kind
        assert found.notes == (f"{name} has no modules.json: pooling {kind} is used",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (modules("Transformer", "Pooling", "LSTM"), "models.LSTM is not supported"),
        (modules("Transformer", "Normalize", "Pooling"), "the order Transformer, Normalize, Pooling"),
        (modules("Transformer"), "the order Transformer is not supported"),
        (lambda folder: edit(folder / "config_sentence_transformers.json", prompts={"a": 3}), "object of strings"),
        (lambda folder: edit(folder / "config_sentence_transformers.json", default_prompt_name="q"), "none of the"),
        (lambda folder: edit(folder / "config_sentence_transformers.json", similarity_fn_name="x"), "'x' is not"),
        (lambda folder: edit(folder / "sentence_bert_config.json", max_seq_length="many"), "max_seq_length"),
        (lambda folder: edit(folder / "2_Dense" / "config.json", activation_function="torch.nn.Mish"), "'Mish'"),
        (lambda folder: edit(folder / "2_Dense" / "config.json", use_residual=True), "use_residual"),
        (lambda folder: edit(folder / "2_Dense" / "config.json", module_input_name="token_embeddings"), "token_emb"),
        (lambda folder: edit(folder / "2_Dense" / "config.json", in_features=0), "in_features"),
        (lambda folder: (folder / "modules.json").write_text("{}"), "a list"),
        (lambda folder: (folder / "modules.json").write_text('[{"type": "a.Pooling", "path": "../x"}]'), "a list"),
        (lambda folder: (folder / "modules.json").write_text('[{"type": "a.Pooling", "path": "../"}]'), "a list"),
        (lambda folder: (folder / "1_Pooling" / "config.json").unlink(), "it says how the model pools"),
        (
            lambda folder: (folder / "modules.json").write_text(
                '[{"type": "a.Transformer", "path": "0_Transformer"}, {"type": "a.Pooling", "path": "1_Pooling"}]'
            ),
            "a transformer in '0_Transformer'",
        ),
        (lambda folder: edit(folder / "config.json", position_embedding_type="alibi"), "'alibi': not supported"),
        (lambda folder: (folder / "2_Dense" / "model.safetensors").unlink(), "names a dense layer"),
        (
            lambda folder: (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin"),
            "pickled weights",
        ),
    ],
)
def test_folder_refused_by_name(change: Change, message: str, zoo: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(zoo("bert-dense"), tmp_path)
    change(folder)
    with pytest.raises((UnsupportedModelError, ModelFileError), match=message):
        read(folder)


def test_tasks(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    assert read(zoo("bert-rank"), "rank").score == "sigmoid"
    with pytest.raises(InvalidRequestError, match="bert-rank is a reranker, not an embedding model"):
        read(zoo("bert-rank"), "embed")
    with pytest.raises(InvalidRequestError, match="bert is an embedding model, not a reranker"):
        read(zoo("bert"), "rank")
    folder = copy(zoo("qwen3-rank"), tmp_path)
    assert read(folder).label_tokens == (pooling_zoo.YES, pooling_zoo.NO)
    (folder / "modules.json").unlink()  # as the folder of a chat model: it ranks if it is asked to
    found = read(folder, "rank")
    assert (found.label_words, found.score, found.kind) == (("yes", "no"), "softmax", "last")
    assert found.pair_template == YES_NO_TEMPLATE
    assert not read(folder, "embed").is_ranker


def test_scores_of_cross_encoders(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(zoo("bert-rank"), tmp_path)
    edit(folder / "config.json", sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    assert read(folder).score == "identity"
    edit(folder / "config.json", sentence_transformers={"activation_fn": "torch.nn.modules.activation.ELU"})
    with pytest.raises(UnsupportedModelError, match="'ELU' of a reranker"):
        read(folder)
    (folder / "modules.json").write_text('[{"type": "a.Transformer", "path": ""}]')  # as newer versions write it
    edit(folder / "config_sentence_transformers.json", activation_fn="torch.nn.modules.activation.Sigmoid")
    assert read(folder).score == "sigmoid"
    edit(folder / "config.json", architectures=["BertForTokenClassification"])
    with pytest.raises(UnsupportedModelError, match="BertForTokenClassification is not a classifier of sequences"):
        read(folder)


def test_classifier_of_several_labels_is_no_reranker(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(zoo("bert-rank"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["classifier.weight"] = np.repeat(tensors["classifier.weight"], 3, axis=0)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="classifies into 3 labels"):
        read(folder)


@pytest.mark.parametrize(("number", "message"), [(0, "pooling 'none'"), (9, "pooling 'unknown'")])
def test_gguf_pooling_refused(number: int, message: str, zoo: Callable[[str], Path], tmp_path: Path) -> None:
    variant = pooling_zoo.POOLING_ZOO["bert"]
    path = pooling_zoo.save_gguf(variant, zoo("bert"), tmp_path / "a.gguf", {"bert.pooling_type": number})
    with pytest.raises(UnsupportedModelError, match=message):
        read(path)


def test_gguf_reranker_has_the_template_of_its_file(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    variant = pooling_zoo.POOLING_ZOO["qwen3-rank"]
    template = "<|x|>{query} {document}<|y|>"
    for extra, expected in (({}, YES_NO_TEMPLATE), ({"tokenizer.chat_template.rerank": template}, template)):
        found = read(pooling_zoo.save_gguf(variant, zoo("qwen3-rank"), tmp_path / "a.gguf", extra))
        assert (found.pair_template, found.score, found.label_words) == (expected, "softmax", ())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("encoder.layer.1.output.LayerNorm.weight", np.full(64, np.nan, np.float32), "layer_output_norm.weight' holds"),
        ("encoder.layer.0.output.dense.weight", np.full((64, 96), np.inf, np.float32), "ffn_down.weight' holds a NaN"),
        ("embeddings.word_embeddings.weight", None, "token_embd.weight' is missing"),
        ("encoder.layer.1.attention.self.key.bias", None, "attn_k.bias' is missing"),
        ("encoder.layer.1.attention.output.dense.weight", None, "the metadata says 2 layers"),
        ("encoder.layer.1.extra.weight", np.ones(3, np.float32), "extra.weight' is not part of a bert model"),
        ("intermediate.weight", np.ones(3, np.float32), "intermediate.weight' is not part of a bert model"),
    ],
)
def test_damaged_weights_are_named(
    name: str, value: Any, message: str, zoo: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy(zoo("bert"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors if value is None else {**tensors, name: value}, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=message):
        pooling_zoo.load(folder)


def test_names_and_keys_beside_nomics_weights(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(zoo("nomic"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    older = {}
    for name, value in tensors.items():
        for new, old in (
            ("embeddings.LayerNorm", "emb_ln"), ("self_attn.o_proj", "attn.out_proj"), ("mlp.up_proj", "mlp.fc11"),
            ("mlp.gate_proj", "mlp.fc12"), ("mlp.down_proj", "mlp.fc2"), ("post_attention_layernorm", "norm1"),
            ("post_mlp_layernorm", "norm2"),
        ):  # fmt: skip
            name = name.replace(new, old)
        name = name if "encoder.layers" in name else name.replace("layers.", "encoder.layers.")
        older[name] = value
    for i in range(2):
        prefix = f"encoder.layers.{i}."
        if f"{prefix}self_attn.q_proj.weight" in older:
            parts = [older.pop(f"{prefix}self_attn.{x}_proj.weight") for x in "qkv"]
            older[f"{prefix}attn.Wqkv.weight"] = np.concatenate(parts)
    save_file(older, folder / "model.safetensors")
    keys = {
        "model_type": "nomic_bert", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_inner": 96, "n_positions": 8192,
        "max_trained_positions": 2048, "rotary_emb_base": 1000, "layer_norm_epsilon": 1e-12, "vocab_size": 96,
        "activation_function": "swiglu", "prenorm": False, "rotary_emb_fraction": 1.0, "rotary_scaling_factor": None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(keys))
    rows = pooling_zoo.sequences()
    ours = pooling_zoo.load(folder)
    assert ours.config.context_length == 2048
    assert np.array_equal(ours.run(rows), pooling_zoo.load(zoo("nomic")).run(rows))
    edit(folder / "config.json", moe_every_n_layers=2)
    with pytest.raises(UnsupportedModelError, match="'moe_every_n_layers' is 2"):
        pooling_zoo.load(folder)


def test_older_keys_of_modernbert(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy(zoo("modernbert"), tmp_path)
    values = json.loads((folder / "config.json").read_text())
    for key in ("layer_types", "rope_parameters"):
        values.pop(key)
    values |= {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(values))
    found = read_model_config(open_checkpoint(folder))
    assert found == read_model_config(open_checkpoint(zoo("modernbert")))
    assert found.windows == (0, 8, 8, 0)
    edit(folder / "config.json", layer_types=None, global_attn_every_n_layers=0)
    with pytest.raises(ModelFileError, match="'global_attn_every_n_layers' is 0"):
        read(folder)
