"""Small random BERTs with a WordPiece vocabulary, as folders: an embedding model, a reranker."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WIDTH, FEED_FORWARD, LAYERS, POSITIONS, MAX_LENGTH = 64, 96, 2, 40, 32
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    "the", "cat", "dog", "bird", "sat", "ran", "on", "under", "mat", "rug", "sky", "is", "blue", "green", "who",
    "where", "query", "passage", ":", ".", "?",
]  # fmt: skip
VOCAB = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"), *WORDS]
PROMPTS = {"query": "query : ", "document": "passage : "}


def write_encoder(folder: Path, *, is_reranker: bool = False, has_prompts: bool = False, seed: int = 0) -> Path:
    """Write the folder of a model whose inputs have at most `MAX_LENGTH` tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = "BertForSequenceClassification" if is_reranker else "BertModel"
    config = {
        "architectures": [kind], "model_type": "bert", "vocab_size": len(VOCAB), "hidden_size": WIDTH,
        "intermediate_size": FEED_FORWARD, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "hidden_act": "gelu",
        "max_position_embeddings": POSITIONS if not is_reranker else MAX_LENGTH, "type_vocab_size": 2,
        "layer_norm_eps": 1e-12, "pad_token_id": 0,
    }  # fmt: skip
    if is_reranker:
        config |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}}
    _write_json(folder / "config.json", config)
    _tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    save_file(_tensors(np.random.default_rng(seed), config, is_reranker), folder / "model.safetensors")
    if not is_reranker:
        _write_modules(folder, has_prompts)
    return folder


def _write_modules(folder: Path, has_prompts: bool) -> None:
    names = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    kinds = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in names.items()]
    _write_json(folder / "modules.json", kinds)
    _write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_LENGTH, "do_lower_case": False})
    settings = {"prompts": PROMPTS, "default_prompt_name": "document"} if has_prompts else {}
    _write_json(folder / "config_sentence_transformers.json", settings)


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def _tokenizer() -> Tokenizer:
    ids = {token: i for i, token in enumerate(VOCAB)}
    tokenizer = Tokenizer(models.WordPiece(vocab=ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )  # fmt: skip
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def _tensors(rng: np.random.Generator, config: dict[str, object], is_reranker: bool) -> dict[str, NDArray[np.float32]]:
    def matrix(rows: int, columns: int, scale: float = 1.5) -> NDArray[np.float32]:
        return rng.standard_normal((rows, columns), np.float32) * np.float32(scale / columns**0.5)

    made: dict[str, NDArray[np.float32]] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        made[f"{name}.weight"] = matrix(rows, columns)
        made[f"{name}.bias"] = rng.standard_normal(rows, np.float32) * np.float32(0.3)

    def norm(name: str) -> None:
        made[f"{name}.weight"] = (rng.random(WIDTH) + 0.5).astype(np.float32)
        made[f"{name}.bias"] = rng.standard_normal(WIDTH, np.float32) * np.float32(0.3)

    rows = {"word": len(VOCAB), "position": int(str(config["max_position_embeddings"])), "token_type": 2}
    for name, count in rows.items():
        made[f"embeddings.{name}_embeddings.weight"] = matrix(count, WIDTH, 8.0)
    norm("embeddings.LayerNorm")
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}"
        for name in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{name}", WIDTH, WIDTH)
        linear(f"{layer}.attention.output.dense", WIDTH, WIDTH)
        norm(f"{layer}.attention.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", FEED_FORWARD, WIDTH)
        linear(f"{layer}.output.dense", WIDTH, FEED_FORWARD)
        norm(f"{layer}.output.LayerNorm")
    linear("pooler.dense", WIDTH, WIDTH)
    if not is_reranker:
        return made
    made = {f"bert.{name}": value for name, value in made.items()}
    linear("classifier", 1, WIDTH)
    return made
