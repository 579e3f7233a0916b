"""Byte-level BPE from GGUF metadata: ids equal llama.cpp's, special tokens, errors of malformed metadata."""

import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from llm_worker_rbee.errors import InvalidRequestError, TokenizerError
from llm_worker_rbee.tokenizer import Tokenizer, tokenizer_from_gguf
from llm_worker_rbee.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from llm_worker_rbee.weights.gguf import open_gguf
from llm_worker_rbee.weights.gguf_writer import write_gguf
from tests.helpers.tokenizer_metadata import bpe_metadata, data, seeded, unicode_text

PROMISED = {
    "default", "llama-bpe", "smollm", "qwen2", "gpt-2", "starcoder", "refact", "falcon", "mpt", "deepseek-llm",
    "deepseek-coder", "command-r", "tekken", "gpt-4o", "phi-2", "stablelm2", "olmo", "dbrx",
}  # fmt: skip


@pytest.fixture(scope="module")
def default_tokenizer(default_model: Path) -> Tokenizer:
    return tokenizer_from_gguf(open_gguf(default_model).metadata)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_from_gguf(bpe_metadata())


def table_texts() -> list[str]:
    """Return the texts of llama.cpp's id table: hard texts, and mixtures from all of Unicode."""
    return [*data("texts.json"), *data("unicode_texts.json")]


def test_expected_ids_cover_every_pre_tokenizer() -> None:
    assert set(data("llama_cpp_ids.json")["pre"]) == set(PRE_TOKENIZERS)
    assert set(PRE_TOKENIZERS) >= PROMISED


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_encode_equals_llama_cpp(pre: str) -> None:
    table = data("llama_cpp_ids.json")
    tokenizer = tokenizer_from_gguf(bpe_metadata(pre))
    for text, row in zip(table_texts(), table["pre"][pre], strict=True):
        ids = tokenizer.encode(text, add_special=False)
        assert ids == table["pool"][row], text
        assert tokenizer.decode(ids) == text


def test_expected_ids_distinguish_pre_tokenizers() -> None:
    distinct = ["default", "gpt-2", "falcon", "smollm", "llama-bpe", "dbrx", "qwen2", "gpt-4o", "tekken"]
    rows = data("llama_cpp_ids.json")["pre"]
    assert len({tuple(rows[pre]) for pre in [*distinct, "deepseek-llm", "deepseek-coder"]}) == len(distinct) + 2


def test_encode_default_model_equals_llama_cpp(default_tokenizer: Tokenizer) -> None:
    for text, ids in zip(table_texts(), data("llama_cpp_ids.json")["default_model"], strict=True):
        assert default_tokenizer.encode(text, add_special=False) == ids, text


@pytest.mark.parametrize("pre", ["default", "llama-bpe", "gpt-4o", "deepseek-llm"])
def test_decode_inverts_encode(pre: str) -> None:
    tokenizer = tokenizer_from_gguf(bpe_metadata(pre))

    @seeded
    @given(unicode_text)
    def check(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text

    check()


@seeded
@given(unicode_text)
def test_decode_default_model_inverts_encode(default_tokenizer: Tokenizer, text: str) -> None:
    missing = bytes(default_tokenizer._encoder._missing.values())  # type: ignore[attr-defined]
    kept = "".join(char for char in text if not set(char.encode()) & set(missing))
    assert default_tokenizer.decode(default_tokenizer.encode(kept)) == kept


def test_default_model_tokenizer_properties(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.kind == "gpt2 (BPE, smollm)"
    assert default_tokenizer.vocab_size == 49152
    assert (default_tokenizer.bos_id, default_tokenizer.eos_id, default_tokenizer.add_bos) == (1, 2, False)
    assert default_tokenizer.eos_ids == {0, 2}
    assert default_tokenizer.encode("") == []
    assert default_tokenizer.encode("?") != []


def test_encode_missing_byte_is_dropped_with_warning(caplog: pytest.LogCaptureFixture) -> None:
    metadata = bpe_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokens[tokens.index("Q")] = "[gone]"
    metadata["tokenizer.ggml.merges"] = []
    tokenizer = tokenizer_from_gguf(metadata)
    with caplog.at_level(logging.WARNING):
        assert tokenizer.decode(tokenizer.encode("aQb")) == "ab"
    assert "0x51" in caplog.text


def test_missing_pre_key_uses_default_with_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = tokenizer_from_gguf(bpe_metadata(None))
    assert "tokenizer.ggml.pre is missing" in caplog.text
    assert tokenizer.kind == "gpt2 (BPE, default)"
    text = "In 1234567 days, don't!"
    assert tokenizer.encode(text) == tokenizer_from_gguf(bpe_metadata("default")).encode(text)


def test_encode_control_tokens_are_text_unless_parse_special(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>hi<|im_end|>"
    typed = tokenizer.encode(text)
    assert not {0, 1, 2} & set(typed)
    assert tokenizer.decode(typed) == text
    parsed = tokenizer.encode(text, parse_special=True)
    assert (parsed[0], parsed[-1]) == (1, 2)
    assert tokenizer.decode(parsed) == "hi"
    assert tokenizer.decode(parsed, skip_special=False) == text


def test_encode_merges_never_form_a_control_token() -> None:
    metadata = bpe_metadata()
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    metadata["tokenizer.ggml.tokens"] = [*tokens, "<e", "<e>"]
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], [1, 3]).astype(np.int32)
    metadata["tokenizer.ggml.merges"] = ["< e", "<e >", *merges]
    tokenizer = tokenizer_from_gguf(metadata)
    control = tokenizer.token_id("<e>")
    assert control not in tokenizer.encode("<e>")
    assert tokenizer.encode("<e>", add_special=False, parse_special=True) == [control]


def test_encode_user_defined_tokens_are_always_parsed() -> None:
    metadata = bpe_metadata()
    tokens, token_types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    metadata["tokenizer.ggml.tokens"] = [*tokens, "<tool>", "<tool><x>"]
    metadata["tokenizer.ggml.token_type"] = np.append(token_types, [4, 4]).astype(np.int32)
    tokenizer = tokenizer_from_gguf(metadata)
    tool = tokenizer.token_id("<tool>")
    assert tokenizer.encode("<tool>", add_special=False) == [tool]
    assert tokenizer.encode("<tool><tool><x>", add_special=False) == [tool, tokenizer.token_id("<tool><x>")]
    assert tokenizer.decode(tokenizer.encode("a <tool> b")) == "a <tool> b"


def test_encode_does_not_add_second_bos() -> None:
    tokenizer = tokenizer_from_gguf(bpe_metadata(add_bos_token=True, add_eos_token=True))
    assert tokenizer.encode("hi")[0] == 1
    assert tokenizer.encode("hi")[-1] == 0
    assert tokenizer.encode("<|im_start|>hi", parse_special=True).count(1) == 1
    assert tokenizer.encode("hi<|endoftext|>", parse_special=True).count(0) == 1
    assert tokenizer.encode("") == [1, 0]
    assert tokenizer.encode("", add_special=False) == []


def test_llama_bpe_without_key_adds_bos() -> None:
    assert tokenizer_from_gguf(bpe_metadata("llama-bpe")).add_bos
    assert not tokenizer_from_gguf(bpe_metadata("llama-bpe", add_bos_token=False)).add_bos
    assert not tokenizer_from_gguf(bpe_metadata("qwen2")).add_bos


def test_eos_ids_hold_several_end_tokens() -> None:
    tokenizer = tokenizer_from_gguf(bpe_metadata(eos_token_id=[300, 301], eot_token_id=302, eom_token_id=303))
    assert tokenizer.eos_id == 300
    assert tokenizer.eos_ids == {300, 301, 302, 303} | {0, 2}  # the last two by name


def test_piece_and_token_id_are_inverse(tokenizer: Tokenizer) -> None:
    for token_id in range(tokenizer.vocab_size):
        assert tokenizer.piece(token_id) == tokenizer.token_bytes(token_id).decode(errors="replace")
    assert tokenizer.token_id("<|im_end|>") == 2
    assert tokenizer.token_id("not a token") is None
    assert tokenizer.is_special(2)
    assert not tokenizer.is_special(100)


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_decode_id_outside_vocabulary_raises(tokenizer: Tokenizer, token_id: int) -> None:
    with pytest.raises(InvalidRequestError, match=str(token_id)):
        tokenizer.decode([token_id])


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff"])
def test_encode_lone_surrogate_raises(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode(text)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": "rwkv"}, "'rwkv'"),
        ({"model": 7}, "7"),
        ({"pre": "no-such-pre"}, "'no-such-pre'"),
        ({"pre": 3}, "3"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokens": []}, "tokenizer.ggml.tokens"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens"),
        ({"tokens": ["a", "\udc80"]}, "token 1"),
        ({"merges": None}, "merges is missing"),
        ({"merges": "a b"}, "tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, "entry 0"),
        ({"merges": ["a nosuchtoken"]}, "nosuchtoken"),
        ({"token_type": np.ones(5, np.int32)}, "token_type has 5 entries"),
        ({"token_type": "x"}, "token_type"),
        ({"eos_token_id": 10**6}, "eos_token_id = 1000000"),
        ({"eos_token_id": [0, -1]}, "eos_token_id = -1"),
        ({"bos_token_id": "x"}, "bos_token_id"),
        ({"eot_token_id": 4294967295}, "eot_token_id"),
        ({"add_bos_token": 3}, "add_bos_token"),
    ],
)
def test_tokenizer_malformed_input_is_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        tokenizer_from_gguf(bpe_metadata(**change))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_chat_template_of_wrong_type_raises() -> None:
    with pytest.raises(TokenizerError, match="chat_template"):
        tokenizer_from_gguf({**bpe_metadata(), "tokenizer.chat_template": 7})


def test_tokenizer_from_written_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "vocabulary.gguf", bpe_metadata("qwen2"))
    tokenizer = tokenizer_from_gguf(open_gguf(tmp_path / "vocabulary.gguf").metadata)
    table = data("llama_cpp_ids.json")
    got = [tokenizer.encode(text, add_special=False) for text in table_texts()]
    assert got == [table["pool"][row] for row in table["pre"]["qwen2"]]


@pytest.mark.parametrize("text", [" " * 300_000, "\n" * 300_000, "abcab" * 60_000, "12345" * 20_000])
def test_encode_long_runs_end_in_time(default_tokenizer: Tokenizer, text: str) -> None:
    assert default_tokenizer.decode(default_tokenizer.encode(text)) == text
