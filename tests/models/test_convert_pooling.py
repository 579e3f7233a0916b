"""Conversion of embedding models and rerankers to GGUF: same rows and same tokens, or an error that names why."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from llm_worker_rbee.errors import UnsupportedModelError
from llm_worker_rbee.models.convert import convert
from llm_worker_rbee.tokenizer import tokenizer_from_gguf, tokenizer_from_hf
from llm_worker_rbee.weights import open_checkpoint
from tests.helpers import pooling_zoo
from tests.helpers.tokenizer_metadata import data
from tests.tokenizer.test_encoders import SPECIAL, train_unigram, unigram_library

ROWS = 420
REFUSED = {
    "bert-cls": "hidden_act cannot be expressed in a GGUF of architecture 'bert'",
    "bert-dense": "an activation after one, cannot be expressed",
}


def template(begin: str, end: str, ids: tuple[int, int]) -> Any:
    pair = f"{begin} $A {end} $B:1 {end}:1"
    return processors.TemplateProcessing(
        single=f"{begin} $A {end}".strip(), pair=pair.strip(), special_tokens=[(begin or end, ids[0]), (end, ids[1])]
    )


def word_piece() -> Library:
    library = Library(models.WordPiece(unk_token="[UNK]"))
    library.normalizer, library.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=ROWS, special_tokens=SPECIAL, show_progress=False, limit_alphabet=80)
    library.train_from_iterator(data("texts.json"), trainer)
    library.decoder, library.post_processor = decoders.WordPiece(), template("[CLS]", "[SEP]", (2, 3))
    return library


def byte_level(begin: str) -> Library:
    """Return a byte-level vocabulary with the special tokens of ModernBERT, or the EOS of Qwen."""
    special = ["[PAD]", "[CLS]", "[SEP]"] if begin else ["<|im_end|>", "<|endoftext|>"]
    texts = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    library = Library(models.BPE({text: i for i, text in enumerate(texts)}, [("h", "e")]))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.add_special_tokens(special)
    library.post_processor = template(begin, special[-1], (1, len(special) - 1))
    return library


def characters() -> Library:
    """Return BPE over characters as Gemma has it."""
    texts = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "▁",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"abcdefh",
        "he",
        "▁he",
    ]
    merges = [("h", "e"), ("▁", "he")]
    vocab = {text: i for i, text in enumerate(texts)}
    library = Library(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens(texts[:4])
    library.post_processor = template("<bos>", "<eos>", (2, 1))
    return library


LIBRARIES = {
    "bert": word_piece, "nomic_bert": word_piece, "xlm-roberta": lambda: unigram_library(train_unigram()),
    "gemma3_text": characters,
    "modernbert": lambda: byte_level("[CLS]"), "roberta": lambda: byte_level("[CLS]"), "qwen3": lambda: byte_level(""),
}  # fmt: skip
library_of = cache(lambda model_type: LIBRARIES[model_type]())


def make_folder(name: str, folder: Path) -> tuple[pooling_zoo.Variant, Any]:
    known = pooling_zoo.POOLING_ZOO[name]
    variant = replace(known, settings={**known.settings, "vocab_size": ROWS})
    model = pooling_zoo.make_hf(variant)
    pooling_zoo.save_folder(variant, model, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    library_of(variant.model_type).save(str(folder / "tokenizer.json"))
    return variant, model


@pytest.mark.parametrize("name", [name for name in pooling_zoo.POOLING_ZOO if name not in REFUSED])
def test_converted_file_equals_transformers(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    variant, model = make_folder(name, folder)
    rows = pooling_zoo.sequences()
    expected = pooling_zoo.expected_rows(variant, model, rows)
    path = convert(open_checkpoint(folder), tmp_path / "f32.gguf", "F32").path
    ours = pooling_zoo.load(path)
    assert np.abs(ours.run(rows) - expected).max() < 1e-4 * max(1.0, float(np.abs(expected).max()))
    theirs, made = tokenizer_from_hf(folder), tokenizer_from_gguf(open_checkpoint(path).metadata)
    texts = [*filter(str.isascii, data("texts.json")[:20]), ""]
    assert made.encode_batch(texts) == theirs.encode_batch(texts)
    if made.pair is not None:
        assert made.encode_pair("he the", "a b")[0] == theirs.encode_pair("he the", "a b")[0]
    small = convert(open_checkpoint(path), tmp_path / "q8_0.gguf", "Q8_0").path
    near = pooling_zoo.load(small).run(rows)
    assert 0 < np.abs(near - expected).max() < 0.2 * np.abs(expected).max()
    kinds = {tensor.name: tensor.kind.name for tensor in open_checkpoint(small).tensors.values()}
    assert kinds["blk.0.ffn_down.weight"] == "Q8_0"
    assert {kinds.get("position_embd.weight", "F32"), kinds.get("token_types.weight", "F32")} == {"F32"}


@pytest.mark.parametrize("name", REFUSED)
def test_pooling_that_a_gguf_cannot_express_is_refused(name: str, tmp_path: Path) -> None:
    make_folder(name, tmp_path / "hf")
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
        convert(open_checkpoint(tmp_path / "hf"), tmp_path / "out.gguf", "F32")
    assert not (tmp_path / "out.gguf").exists()


def test_what_a_gguf_has_no_keys_for_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_folder("bert", tmp_path)
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "q: "}}))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32}))
    convert(open_checkpoint(tmp_path), tmp_path / "out.gguf", "F32")
    assert "no keys for prompts, the length of a text (32 tokens): left out" in caplog.text
