"""Detokenizer: joined deltas are the whole text, characters stay whole, stop strings are never returned."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.tokenizer import Detokenizer, Tokenizer, tokenizer_from_gguf
from tests.helpers.tokenizer_metadata import bpe_metadata, data, seeded, spm_metadata, unicode_text

BPE = tokenizer_from_gguf(bpe_metadata())
SPM = tokenizer_from_gguf(spm_metadata(["▁the", "the", "th", "▁t", "▁▁", "▁", *"the lo?ab"]))
TOKENIZERS = {"bpe": BPE, "spm": SPM}


def stream(tokenizer: Tokenizer, ids: list[int], stop: list[str], **options: bool) -> tuple[list[str], Detokenizer]:
    decoder = Detokenizer(tokenizer, stop, **options)
    return [*(decoder.push(token_id) for token_id in ids), decoder.finish()], decoder


def cut(tokenizer: Tokenizer, ids: list[int], stop: list[str]) -> tuple[str, str | None]:
    """Reference: decode everything at each token; stop at the first token that completes a stop string."""
    texts = [tokenizer.decode(ids[:count], continuation=True).rstrip("�") for count in range(len(ids) + 1)]
    for text in [*texts, tokenizer.decode(ids, continuation=True)]:
        found = [(text.find(s), -len(s), s) for s in stop if s in text]
        if found:
            start, _, matched = min(found)
            return text[:start], matched
    return tokenizer.decode(ids, continuation=True), None


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("continuation", [True, False])
@pytest.mark.parametrize("skip_special", [True, False])
def test_detokenizer_joined_deltas_equal_decode(name: str, continuation: bool, skip_special: bool) -> None:
    tokenizer = TOKENIZERS[name]
    any_ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30)  # mostly invalid UTF-8
    options = {"skip_special": skip_special, "continuation": continuation}

    @seeded
    @given(st.one_of(unicode_text.map(tokenizer.encode), any_ids))
    def check(ids: list[int]) -> None:
        deltas, _ = stream(tokenizer, ids, [], **options)
        assert "".join(deltas) == tokenizer.decode(ids, **options)

    check()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_detokenizer_deltas_hold_whole_characters(name: str) -> None:
    """Regression: a multi-byte character split over tokens raised an error."""
    tokenizer = TOKENIZERS[name]
    for text in data("texts.json"):
        if "�" in text or "▁" in text:
            continue
        ids = tokenizer.encode(text, add_special=False)
        deltas, _ = stream(tokenizer, ids, [], continuation=False)
        assert all("�" not in delta for delta in deltas)
        assert "".join(deltas) == text
    astronaut = tokenizer.encode("🧑🏿‍🚀", add_special=False)
    decoder = Detokenizer(tokenizer)
    assert "" in [decoder.push(token_id) for token_id in astronaut]


def test_detokenizer_finish_returns_unfinished_character() -> None:
    ids = SPM.encode("é", add_special=False)
    deltas, _ = stream(SPM, ids[:-1], [], continuation=False)
    assert deltas == ["", "", "�"]


stops = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


@seeded
@given(st.text("ab\n ", max_size=40), stops)
def test_detokenizer_stop_strings_equal_definition(text: str, stop: list[str]) -> None:
    for tokenizer in TOKENIZERS.values():
        ids = tokenizer.encode(text, add_special=False)
        deltas, decoder = stream(tokenizer, ids, stop)
        expected, matched = cut(tokenizer, ids, stop)
        assert "".join(deltas) == expected
        assert decoder.stop_matched == matched


@seeded
@given(unicode_text, st.data())
def test_detokenizer_never_returns_a_stop_string(text: str, draw: st.DataObject) -> None:
    ids = BPE.encode(text, add_special=False)
    start = draw.draw(st.integers(0, len(text)))
    stop = text[start : start + draw.draw(st.integers(1, 8))]
    if not stop:
        return
    deltas, decoder = stream(BPE, ids, [stop])
    assert decoder.stop_matched == stop
    assert "".join(deltas) == text[: text.index(stop)]


def test_detokenizer_held_text_is_returned_on_mismatch() -> None:
    decoder = Detokenizer(SPM, ["the other", "hello"])
    shown = "".join(decoder.push(token_id) for token_id in SPM.encode("the oth", add_special=False))
    assert shown == " "
    assert decoder.finish() == "the oth"
    assert decoder.stop_matched is None


def test_detokenizer_holds_back_longest_prefix() -> None:
    decoder = Detokenizer(SPM, ["abab?", "b?"])
    ids = [SPM.token_id(char) for char in "aabab"]
    assert "".join(decoder.push(token_id) for token_id in ids if token_id is not None) == "a"
    assert decoder.finish() == "abab"


def test_detokenizer_after_stop_string_returns_nothing() -> None:
    ids = SPM.encode("a the b", add_special=False)
    decoder = Detokenizer(SPM, ["th"])
    assert "".join(decoder.push(token_id) for token_id in ids) == " a "
    assert decoder.stop_matched == "th"
    assert decoder.push(ids[0]) == ""
    assert decoder.finish() == ""


def test_detokenizer_long_stop_string_takes_linear_time() -> None:
    """Work per token does not grow: 20,000 tokens with a stop string that always nearly matches."""
    letter = SPM.token_id("a")
    assert letter is not None
    decoder = Detokenizer(SPM, ["a" * 5000 + "b"])
    count = sum(len(decoder.push(letter)) for _ in range(20_000))
    assert count == 15_000
    assert decoder.finish() == "a" * 5000


@pytest.mark.parametrize("stop", [[""], "text", ["a", 3], [None]])
def test_detokenizer_invalid_stop_strings_raise(stop: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Detokenizer(SPM, stop)
    assert caught.value.field == "stop"


def test_detokenizer_random_splits_equal_decode() -> None:
    rng = random.Random(5)
    for text in data("texts.json"):
        if len(text) < 3:
            continue
        ids = BPE.encode(text, add_special=False)
        stop = [text[i : i + rng.randint(1, 6)] for i in (rng.randrange(len(text)) for _ in range(3))]
        deltas, _ = stream(BPE, ids, stop)
        assert "".join(deltas) == cut(BPE, ids, stop)[0]
