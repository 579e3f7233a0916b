"""WordPiece and unigram vocabularies from GGUF and tokenizer.json: ids equal transformers and sentencepiece."""

import random
import unicodedata
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from llm_worker_rbee.errors import InvalidRequestError, TokenizerError
from llm_worker_rbee.tokenizer import Tokenizer, tokenizer_from_gguf, tokenizer_from_hf
from tests.helpers.tokenizer_metadata import bpe_metadata, data, spm_metadata

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
NASTY = [
    "",
    " ",
    "x" * 101,
    "a" * 100,
    "[CLS] [SEP] <s></s>",
    "Ünïted\u00a0Stätes",
    "日本語 text",
    "a\x00b\u200dc",
    "\t\n x ",
]


def texts() -> list[str]:
    return [*data("texts.json"), *data("unicode_texts.json"), *NASTY]


def lines() -> list[str]:
    rng = random.Random(5)
    words = [word for text in data("texts.json") for word in text.split() if not set("\x00▁") & set(word)]
    return [" ".join(rng.choice(words) for _ in range(rng.randint(1, 12))) for _ in range(600)]


def word_piece_library(*, lowercase: bool = True) -> Library:
    library = Library(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=SPECIAL, show_progress=False)
    library.train_from_iterator(lines(), trainer)
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return library


def word_piece_metadata(library: Library, **more: object) -> dict[str, object]:
    vocab = library.get_vocab()
    tokens = sorted(vocab, key=lambda text: vocab[text])
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [t if t in SPECIAL else t[2:] if t[:2] == "##" else f"▁{t}" for t in tokens],
        "tokenizer.ggml.token_type": [3 if t in SPECIAL else 1 for t in tokens],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.unknown_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def from_hf(library: Library, folder: Path) -> Tokenizer:
    library.save(str(folder / "tokenizer.json"))
    return tokenizer_from_hf(folder)


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_piece_ids_equal_transformers(lowercase: bool, tmp_path: Path) -> None:
    library = word_piece_library(lowercase=lowercase)
    oracle = PreTrainedTokenizerFast(tokenizer_object=library)
    more = {} if lowercase else {"normalizer.lowercase": False}
    for tokenizer in (from_hf(library, tmp_path), tokenizer_from_gguf(word_piece_metadata(library, **more))):
        assert tokenizer.encode_batch(NASTY) == [tokenizer.encode(text) for text in NASTY]
        for text in texts():
            plain = text.replace("[", "(")  # transformers parses special tokens in a text
            assert tokenizer.encode(plain) == oracle(plain)["input_ids"], plain
        assert not set(range(5)) & set(tokenizer.encode("[CLS]", add_special=False)) - {1}
        assert tokenizer.encode("[CLS]", add_special=False, parse_special=True) == [2]
        assert tokenizer.num_special == 2
        assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


def test_word_piece_pairs_equal_transformers(tmp_path: Path) -> None:
    library = word_piece_library()
    oracle = PreTrainedTokenizerFast(tokenizer_object=library)
    query, documents = "which word?", ["The first, of 12 words", *filter(None, data("texts.json")[:20])]
    for tokenizer in (from_hf(library, tmp_path), tokenizer_from_gguf(word_piece_metadata(library))):
        least = len(tokenizer.encode(query)) + 1
        for limit in (least + 1, least + 3, 4096):
            pairs = tokenizer.encode_pairs(query, documents, max_tokens=limit)
            for document, (ids, types) in zip(documents, pairs, strict=True):
                found = oracle(query, document, max_length=limit, truncation="only_second", return_token_type_ids=True)
                assert (ids, types) == (found["input_ids"], found["token_type_ids"])
        assert tokenizer.encode_pair(query, "x", max_tokens=least) == tokenizer.encode_pair(query, "")
        with pytest.raises(InvalidRequestError, match="the query has"):
            tokenizer.encode_pair(query, "x", max_tokens=least - 1)


def test_max_tokens_keeps_special_tokens(tmp_path: Path) -> None:
    tokenizer = from_hf(word_piece_library(), tmp_path)
    whole = tokenizer.encode("one two three four")
    assert tokenizer.encode_batch(["one two three four"], max_tokens=4) == [[*whole[:3], whole[-1]]]
    assert tokenizer.encode_batch(["one", ""], max_tokens=2) == [[2, 3], [2, 3]]
    with pytest.raises(InvalidRequestError, match="no room for the 2 special tokens"):
        tokenizer.encode_batch(["one"], max_tokens=1)
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        tokenizer.encode_batch(["one", "\ud800"])


def test_batch_of_other_vocabularies_equals_encode() -> None:
    for metadata in (bpe_metadata(add_eos_token=True), spm_metadata(["▁", "a", "b", "▁a"])):
        tokenizer = tokenizer_from_gguf(metadata)
        assert tokenizer.encode_batch(["", "a b", "ab  a"]) == [tokenizer.encode(t) for t in ("", "a b", "ab  a")]
        with pytest.raises(TokenizerError, match="no template for pairs of texts"):
            tokenizer.encode_pair("a", "b")


def train_unigram(**options: object) -> sentencepiece.SentencePieceProcessor:
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines()), model_writer=model, model_type="unigram", vocab_size=400,
        hard_vocab_limit=False, minloglevel=2, character_coverage=0.98, **options,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def characters_of(processor: sentencepiece.SentencePieceProcessor) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(processor.serialized_model_proto())
    found: bytes = model.normalizer_spec.precompiled_charsmap
    return found


def unigram_metadata(processor: sentencepiece.SentencePieceProcessor, **more: object) -> dict[str, object]:
    ids = range(processor.get_piece_size())
    kinds = [2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 1 for i in ids]
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": np.array([processor.get_score(i) for i in ids], np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.precompiled_charsmap": np.frombuffer(characters_of(processor), np.int8),
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def joins(char: str) -> bool:
    return unicodedata.category(char) in ("Mn", "Mc", "Me") or char in "\uff9e\uff9f"


def test_unigram_ids_equal_sentencepiece() -> None:
    processor = train_unigram()
    tokenizer = tokenizer_from_gguf(unigram_metadata(processor))
    # sentencepiece reserves U+0000; the library drops marks that combine with a character of the map
    checked = [t for t in texts() if "\x00" not in t and not any(map(joins, t)) and "aaaa" not in t]
    assert len(checked) > 300
    expected = [processor.encode(text) for text in checked]
    found = tokenizer.encode_batch(checked)
    assert [ids[1:-1] for ids in found] == expected
    assert tokenizer.encode_pair("a", "b") == ([1, *processor.encode("a"), 2, 2, *processor.encode("b"), 2], [0] * 6)
    assert tokenizer.decode(tokenizer.encode("Hello world")) == processor.decode(processor.encode("Hello world"))


def unigram_library(processor: sentencepiece.SentencePieceProcessor) -> Library:
    """Return the same vocabulary as XLM-R's tokenizer.json has it."""
    pieces = [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]
    library = Library(models.Unigram(pieces, 0, False))
    library.normalizer = normalizers.Precompiled(characters_of(processor))
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(["<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return library


def test_unigram_tokenizer_json_equals_gguf(tmp_path: Path) -> None:
    processor = train_unigram()
    ours, theirs = tokenizer_from_gguf(unigram_metadata(processor)), from_hf(unigram_library(processor), tmp_path)
    for text in texts():
        if "\x85" not in text:  # tokenizer.json takes U+0085 for a space
            assert ours.encode(text) == theirs.encode(text), text
    assert ours.encode_pair("a", "b c") == theirs.encode_pair("a", "b c")
    assert theirs.encode("</s>", add_special=False, parse_special=True) == [2]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"precompiled_charsmap": "x"}, "precompiled_charsmap must be an array of bytes"),
        ({"precompiled_charsmap": [1, 300]}, "precompiled_charsmap must be an array of bytes"),
        ({"precompiled_charsmap": [1, 2, 3]}, "precompiled_charsmap"),
        ({"scores": None}, "scores must be an array of numbers"),
        ({"unknown_token_id": 10**6}, "unknown_token_id = 1000000 is not an id"),
    ],
)
def test_malformed_unigram_metadata_is_named(change: dict[str, Any], named: str) -> None:
    metadata = {
        "tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": ["<unk>", "</s>", "▁a"],
        "tokenizer.ggml.scores": [0.0, 0.0, -1.0], "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in change.items()},
    }  # fmt: skip
    with pytest.raises(TokenizerError, match=named):
        tokenizer_from_gguf(metadata)


def test_word_piece_without_special_tokens_is_refused() -> None:
    with pytest.raises(TokenizerError, match="seperator_token_id is missing: a 'bert' tokenizer needs it"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"],
                             "tokenizer.ggml.bos_token_id": 0})  # fmt: skip


def is_alike(text: str) -> bool:
    """Return whether llama.cpp normalizes a text as BERT does; it keeps Hangul whole, and takes marks for accents."""
    kinds = {unicodedata.category(char) for char in text}
    is_hangul = any("\uac00" <= char <= "\ud7ff" for char in text)
    return (
        not kinds & {"Mc", "Me", "Zl", "Zp", "Co", "Cn"} and not is_hangul and not set("\x0b\x0c\x1c\x85▁") & set(text)
    )


@pytest.mark.parametrize("model", ["bert", "t5"])
def test_ids_equal_llama_cpp(model: str) -> None:
    table = data("encoder_vocabularies.json")[model]
    tokenizer = tokenizer_from_gguf({f"tokenizer.ggml.{key}": value for key, value in table["keys"].items()})
    pairs = [(text, ids) for text, ids in zip(data("texts.json"), table["ids"], strict=True) if is_alike(text)]
    assert len(pairs) > 80
    for text, ids in pairs:
        assert tokenizer.encode(text, add_special=False) == ids, text
