"""A tiny BERT with a WordPiece vocabulary, as a folder, that embeds or ranks; and engines of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from llm_worker_rbee.config import PoolingOptions
from llm_worker_rbee.server.pooling import TASKS, Kind, PoolingService, open_text_side
from llm_worker_rbee.token_engine.pooling_supervisor import SupervisedPooling
from llm_worker_rbee.token_engine.protocol import Load

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
WIDTH, D_FF, LAYERS, MAX_LENGTH = 32, 64, 2, 64
NAMES: dict[Kind, str] = {"embedding": "tiny-embedder", "rerank": "tiny-ranker"}


def require_same(found: Any, expected: Any) -> None:
    """Require equal values but for rounding: the bits of the reference's products, by BLAS, depend on the batch on some
    CPUs."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def write_bert(folder: Path, kind: Kind = "embedding", *, is_broken: bool = False) -> Path:
    """Write the model; a broken one gives NaN."""
    folder.mkdir()
    rng = np.random.default_rng(5)

    def matrix(rows: int, columns: int = WIDTH) -> np.ndarray[Any, Any]:
        return (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    def norm(name: str) -> dict[str, Any]:
        return {f"{name}.weight": np.ones(WIDTH, np.float32), f"{name}.bias": np.zeros(WIDTH, np.float32)}

    def linear(name: str, rows: int = WIDTH, columns: int = WIDTH) -> dict[str, Any]:
        return {f"{name}.weight": matrix(rows, columns), f"{name}.bias": matrix(1, rows)[0]}

    tensors = {
        "embeddings.word_embeddings.weight": matrix(len(WORDS)) * 6,
        "embeddings.position_embeddings.weight": matrix(MAX_LENGTH),
        "embeddings.token_type_embeddings.weight": matrix(2) * 3,
        **norm("embeddings.LayerNorm"),
    }
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            tensors |= linear(f"{layer}.attention.self.{part}")
        tensors |= linear(f"{layer}.attention.output.dense") | norm(f"{layer}.attention.output.LayerNorm")
        tensors |= linear(f"{layer}.intermediate.dense", D_FF) | linear(f"{layer}.output.dense", WIDTH, D_FF)
        tensors |= norm(f"{layer}.output.LayerNorm")
    if is_broken:
        tensors["encoder.layer.1.output.LayerNorm.bias"][:] = np.nan
    architecture = "BertModel"
    if kind == "rerank":
        architecture = "BertForSequenceClassification"
        tensors = {f"bert.{name}": value for name, value in (tensors | linear("pooler.dense")).items()}
        tensors |= linear("classifier", 1)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": [architecture], "model_type": "bert", "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2, "intermediate_size": D_FF, "hidden_act": "gelu", "vocab_size": len(WORDS),
        "max_position_embeddings": MAX_LENGTH, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0,
        **({"id2label": {"0": "LABEL_0"}} if kind == "rerank" else {}),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(WORDS[:5])
    made.save(str(folder / "tokenizer.json"))
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    settings = {"tokenizer_class": "BertTokenizer", "model_max_length": MAX_LENGTH, "do_lower_case": True, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def load_of(folder: Path, kind: Kind = "embedding") -> Load:
    """What an engine of the model loads; the reference backend needs no kernels."""
    options = PoolingOptions(model=str(folder), device="cpu", backend="reference", task=TASKS[kind])
    return Load(pooling=options)


def pooling_models(folder: Path, embedder: str = NAMES["embedding"]) -> dict[str, PoolingService]:
    """Return an embedder and a ranker, each in a process of its own; the folder gets their files."""
    services = {}
    names: dict[Kind, str] = {**NAMES, "embedding": embedder}
    for kind, name in names.items():
        path = write_bert(folder / name, kind)
        engine = SupervisedPooling(load_of(path, kind), max_restarts=100)
        services[name] = PoolingService(
            name, kind, engine, lambda info, path=path, kind=kind: open_text_side(path, kind)
        )
    return services
