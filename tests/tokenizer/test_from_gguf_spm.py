"""SentencePiece-style vocabularies from GGUF metadata: ids equal `sentencepiece`, spaces, byte fallback."""

import random
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given

from llm_worker_rbee.errors import TokenizerError
from llm_worker_rbee.tokenizer import Tokenizer, encoders, tokenizer_from_gguf
from llm_worker_rbee.weights.gguf import open_gguf
from llm_worker_rbee.weights.gguf_writer import write_gguf
from tests.helpers.tokenizer_metadata import data, seeded, spm_metadata, unicode_text

LETTERS = list("▁abcdefghijklmnopqrstuvwxyzHW,.!?")


def train(**options: object) -> sentencepiece.SentencePieceProcessor:
    rng = random.Random(3)
    words = [word for text in data("texts.json") for word in text.split()] + ["the", "of", "return", "12", "  "] * 9
    lines = [" ".join(rng.choice(words) for _ in range(rng.randint(1, 12))) for _ in range(800)]
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for line in lines if "\x00" not in line),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        normalization_rule_name="identity",
        character_coverage=0.98,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"byte_fallback": True, "remove_extra_whitespaces": False, **options},
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def metadata_of(processor: sentencepiece.SentencePieceProcessor, **more: object) -> dict[str, object]:
    """Return the GGUF metadata of a SentencePiece model."""
    size = processor.get_piece_size()
    token_types = np.ones(size, np.int32)
    for index in range(size):
        piece = processor.id_to_piece(index)
        checks = (processor.is_unknown, processor.is_control, processor.is_byte, processor.is_unused)
        found = [kind for kind, check in zip((2, 3, 6, 5), checks, strict=True) if check(index)]
        token_types[index] = found[0] if found else (4 if piece.startswith("<user") else 1)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(index) for index in range(size)],
        "tokenizer.ggml.scores": np.array([processor.get_score(index) for index in range(size)], np.float32),
        "tokenizer.ggml.token_type": token_types,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


VARIANTS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "byte_fallback": ({}, {}),
    "no_space_prefix": ({"add_dummy_prefix": False}, {"add_space_prefix": False}),
    "user_defined": ({"user_defined_symbols": ["<user>", "<user1>", "<user>x"]}, {}),
    "unknown": ({"byte_fallback": False}, {}),
    "squeezed": ({"remove_extra_whitespaces": True}, {"remove_extra_whitespaces": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_encode_equals_sentencepiece(variant: str, tmp_path: Path) -> None:
    training, keys = VARIANTS[variant]
    processor = train(**training)
    write_gguf(tmp_path / "spm.gguf", metadata_of(processor, **keys))
    tokenizer = tokenizer_from_gguf(open_gguf(tmp_path / "spm.gguf").metadata)
    extra = ["<user>", "a<user>b", "<user1><user>x <user", " <user> ", "x  y   z ", "▁", " ▁ ", "▁x ▁ ▁ "]

    def check(text: str) -> None:
        text = text.replace("\x00", "")  # sentencepiece reserves it
        ids = tokenizer.encode(text, add_special=False)
        assert ids == processor.encode(text), text
        if variant in ("byte_fallback", "no_space_prefix", "user_defined") and "▁" not in text:
            assert tokenizer.decode(ids) == text

    for text in [*data("texts.json"), *extra]:
        check(text)
    seeded(given(unicode_text)(check))()
    tokenizer.prepare()  # the library's model in the place of merges without a table
    for text in [*data("texts.json"), *extra]:
        check(text)


def test_long_text_equals_its_parts_merged_without_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text makes the library's model, with the same ids; words do not merge with one another here."""
    tokenizer = tokenizer_from_gguf(spm_metadata(["lo", "el", "Hel", "▁w", *LETTERS], add_space_prefix=False))
    words = ["Hello", " world", " wel", " 你好"] * 40
    single = [tokenizer.encode(word, add_special=False) for word in words]
    monkeypatch.setattr(encoders, "MAX_DIRECT_LENGTH", 32)
    assert tokenizer.encode("".join(words), add_special=False) == [index for ids in single for index in ids]


def test_gemma4_vocabulary_with_merges_equals_the_one_with_scores() -> None:
    processor = train(add_dummy_prefix=False)
    scored = metadata_of(processor, add_space_prefix=False)
    tokens, scores = scored["tokenizer.ggml.tokens"], scored["tokenizer.ggml.scores"]
    assert isinstance(tokens, list)
    assert isinstance(scores, np.ndarray)
    plain = {text: i for i, text in enumerate(tokens) if i > 258}
    merges = [" ".join(pair) for pair in encoders.derive_merges(plain, scores.tolist())]
    changed = {"model": "gemma4", "merges": merges, "bos_token_id": 1, "unknown_token_id": 0, "add_bos_token": False}
    tokenizer = tokenizer_from_gguf({**scored, **{f"tokenizer.ggml.{key}": value for key, value in changed.items()}})
    for text in data("texts.json"):
        if "\x00" not in text:
            assert tokenizer.encode(text) == [1, *processor.encode(text)], text
    with pytest.raises(TokenizerError, match="merges is missing: a 'gemma4' tokenizer needs it"):
        tokenizer_from_gguf({**scored, "tokenizer.ggml.model": "gemma4"})


def merge_by_hand(text: str, ids: dict[str, int], scores: list[float]) -> list[str]:
    """Reference: repeatedly merge the pair that forms the token with the best score; the leftmost of equals."""
    parts = list(text)
    while True:
        made = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not made:
            return parts
        index = -max(made)[1]
        parts[index : index + 2] = [parts[index] + parts[index + 1]]


def test_derive_merges_orders_by_score() -> None:
    rng = random.Random(0)
    for _ in range(150):
        letters = "abc"[: rng.randint(1, 3)]
        words = list(letters[1:])  # the first letter occurs within tokens only
        for _ in range(rng.randint(3, 14)):
            made = rng.choice([*words, letters[0]]) + rng.choice([*words, letters[0]])
            if made not in words and len(made) < 8:
                words.append(made)
        scores = [-float(index) for index in range(len(words))]
        rng.shuffle(scores)
        tokenizer = tokenizer_from_gguf(spm_metadata(words, scores, add_space_prefix=False))
        ids = {word: index for index, word in enumerate(words)}
        for _ in range(8):
            text = "".join(rng.choice(letters) for _ in range(rng.randint(1, 25)))
            pieces = [tokenizer.piece(index) for index in tokenizer.encode(text, add_special=False)]
            assert pieces == merge_by_hand(text, ids, scores), (words, scores, text)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_from_gguf(spm_metadata(["▁H", "el", "lo", "Hel", "▁w", "▁▁", *LETTERS]))


def test_detokenizer_token_by_token_keeps_spaces(tokenizer: Tokenizer) -> None:
    """Regression: decoding one token at a time lost spaces, or showed the raw U+2581."""
    ids = tokenizer.encode("Hello world", add_special=False)
    pieces = [tokenizer.piece(token_id) for token_id in ids]
    assert "".join(pieces) == " Hello world"
    assert tokenizer.decode(ids) == "Hello world"
    assert tokenizer.decode(ids, continuation=True) == " Hello world"


@pytest.mark.parametrize("text", ["", " ", "  x", "x  ", "a b", "é\n\t\x00", "?", "\n"])
def test_decode_removes_only_the_added_space(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == 1
    assert tokenizer.decode(ids) == text


def test_encode_unknown_character_uses_byte_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é", add_special=False)
    assert [tokenizer.token_bytes(index) for index in ids[1:]] == [b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids[:-1]) == "�"


def test_encode_after_control_token_adds_space_prefix(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<s>Hello</s> Hello", parse_special=True)
    assert ids.count(1) == 1
    assert tokenizer.decode(ids, skip_special=False) == "<s>Hello</s> Hello"
    typed = tokenizer.encode("<s>Hello</s>", add_special=False)
    assert not {1, 2} & set(typed)
    assert tokenizer.decode(typed) == "<s>Hello</s>"


def test_is_continuation_keeps_first_space(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Hello")
    whole = tokenizer.encode("Hello world")
    assert whole[: len(prompt)] == prompt
    output = whole[len(prompt) :]
    assert tokenizer.is_continuation(prompt)
    assert tokenizer.decode(prompt) + tokenizer.decode(output, continuation=True) == "Hello world"
    assert not tokenizer.is_continuation([1])
    assert not tokenizer.is_continuation([])


def test_missing_types_and_ids_use_defaults() -> None:
    tokenizer = tokenizer_from_gguf(spm_metadata(LETTERS, token_type=None))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (1, 2, {2})
    assert tokenizer.decode(tokenizer.encode("é x")) == "é x"
    assert tokenizer.is_special(2)


def test_phi3_special_tokens_strip_following_space() -> None:
    metadata = spm_metadata([*LETTERS, "<|end|>"])
    metadata["tokenizer.ggml.token_type"] = [2, 3, 3] + [6] * 256 + [1] * len(LETTERS) + [3]
    plain = tokenizer_from_gguf(metadata)
    phi3 = tokenizer_from_gguf({**metadata, "general.name": "Phi-3 mini"})
    end = phi3.token_id("<|end|>")
    for made, rest in ((phi3, "a"), (plain, "\n\na")):
        ids = made.encode("<|end|>\n\na", add_special=False, parse_special=True)
        assert ids == [end, *made.encode(rest, add_special=False)]
    assert end in phi3.eos_ids


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scores": None}, "scores is missing"),
        ({"scores": [0.0] * 5}, "scores has 5 entries"),
        ({"scores": [float("nan")] * 400}, "scores"),
        ({"token_type": [1]}, "token_type has 1 entries"),
        ({"eos_token_id": 99999}, "eos_token_id"),
    ],
)
def test_tokenizer_malformed_input_is_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(TokenizerError, match=named):
        tokenizer_from_gguf(spm_metadata(LETTERS, **change))


def test_invalid_byte_token_is_named() -> None:
    metadata = spm_metadata(LETTERS)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokens[10] = "<0xZZ>"
    with pytest.raises(TokenizerError, match="<0xZZ>"):
        tokenizer_from_gguf(metadata)
