"""Hostile files and texts: long tokens, padded embeddings, panics of the library, wrong types."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from llm_worker_rbee.errors import InvalidRequestError, TokenizerError
from llm_worker_rbee.tokenizer import Detokenizer, Tokenizer, tokenizer_from_gguf, tokenizer_from_hf
from llm_worker_rbee.tokenizer.encoders import tokenizer_errors
from tests.helpers.tokenizer_metadata import SPM_TOKENS, bpe_metadata, data, spm_metadata

MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_from_gguf(bpe_metadata())


def refusal(metadata: dict[str, object], limit: int = 40 * MEGABYTE) -> str:
    """Return the error message; raising it must take little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(TokenizerError) as caught:
            tokenizer_from_gguf(metadata)
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 500
    return str(caught.value)


def with_last_kind(metadata: dict[str, object], text: str, kind: int) -> dict[str, object]:
    """Return the metadata with one more token."""
    tokens, token_types, scores = (
        metadata.get(f"tokenizer.ggml.{key}", []) for key in ("tokens", "token_type", "scores")
    )
    assert isinstance(tokens, list)
    return {
        **metadata,
        "tokenizer.ggml.tokens": [*tokens, text],
        "tokenizer.ggml.token_type": [*map(int, token_types), kind],  # type: ignore[call-overload]
        "tokenizer.ggml.scores": [*scores, 0.0],  # type: ignore[misc]
    }


def test_spm_tokens_too_long_raise() -> None:
    first = len(SPM_TOKENS)
    assert "token 771 has 513 characters" in refusal(spm_metadata(["y" * n for n in range(1, 3000)]))
    assert f"token {first + 1} has 400000 characters; at most 512" in refusal(spm_metadata(["a", "x" * 400_000]))
    assert "at most 256000000" in refusal(spm_metadata([f"{n:0512}" for n in range(1000)]))
    # Merges accumulate until the limit, hence the larger allowance.
    message = refusal(spm_metadata(["y" * n for n in range(1, 513)]), limit=150 * MEGABYTE)
    assert "merges have more than 32000000 characters" in message


def test_spm_long_tokens_within_limits_are_merged() -> None:
    tokenizer = tokenizer_from_gguf(spm_metadata(["▁", *("y" * n for n in range(1, 129)), "z" * 512]))
    ids = tokenizer.encode("y" * 128, add_special=False)
    assert "".join(tokenizer.piece(token_id) for token_id in ids) == " " + "y" * 128
    assert len(ids) < 128


@pytest.mark.parametrize("kind", [2, 3, 4])
@pytest.mark.parametrize("metadata", [bpe_metadata(), spm_metadata(["a"])], ids=["bpe", "spm"])
def test_long_special_token_raises(metadata: dict[str, object], kind: int) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    allowed = tokenizer_from_gguf(with_last_kind(metadata, "x" * 4096, kind))
    # An SPM vocabulary puts its space before a user-defined token.
    assert allowed.encode("x" * 4096, add_special=False, parse_special=True)[-1:] == [len(tokens)]
    message = refusal(with_last_kind(metadata, "x" * 400_000, kind))
    assert message == f"token {len(tokens)} is a special token of 400000 characters; at most 4096"


def test_many_long_special_tokens_raise() -> None:
    metadata = spm_metadata([f"{n:04000}" for n in range(600)], token_type=[2, 3, 3] + [6] * 256 + [4] * 600)
    assert "together; at most 2000000" in refusal(metadata)


def write(folder: Path, library: Library, **changes: object) -> Path:
    """Write a folder with the library's tokenizer.json, with some keys replaced."""
    source = {**json.loads(library.to_str()), **changes}
    (folder / "tokenizer.json").write_text(json.dumps(source), encoding="utf-8")
    return folder


def byte_library(pattern: str = r"\s+|\S+") -> Library:
    vocabulary = data("vocabulary.json")
    ids = {text: index for index, text in enumerate(vocabulary["tokens"])}
    library = Library(models.BPE(vocab=ids, merges=[tuple(merge.split(" ")) for merge in vocabulary["merges"]]))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    library.decoder = decoders.ByteLevel()
    return library


def test_long_added_token_of_folder_raises(tmp_path: Path) -> None:
    library = byte_library()
    library.add_tokens([AddedToken("x" * 5000, normalized=False)])
    with pytest.raises(TokenizerError, match="special token of 5000 characters"):
        tokenizer_from_hf(write(tmp_path, library))


def test_folder_truncation_padding_and_dropout_are_disabled(tmp_path: Path) -> None:
    library = byte_library()
    (tmp_path / "plain").mkdir()
    plain = tokenizer_from_hf(write(tmp_path / "plain", library))
    library.enable_truncation(8)
    library.enable_padding(length=16, pad_id=3)
    model = {**json.loads(library.to_str())["model"], "dropout": 0.9}
    tokenizer = tokenizer_from_hf(write(tmp_path, library, model=model))
    for text in ("a", "The quick brown fox jumps over the lazy dog. " * 9):
        assert tokenizer.encode(text) == plain.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_pad_to_ids_up_to_embedding_rows_are_padding() -> None:
    tokenizer = tokenizer_from_gguf(bpe_metadata())
    size = tokenizer.vocab_size
    with pytest.raises(InvalidRequestError, match=f"token id {size} is outside"):
        tokenizer.decode([size])
    tokenizer.pad_to(size + 64)
    ids = tokenizer.encode("hello")
    padding = size + 63
    assert tokenizer.decode([size, *ids, padding]) == "hello"
    assert (tokenizer.piece(padding), tokenizer.token_bytes(padding)) == ("", b"")
    assert not tokenizer.is_special(padding)
    assert Detokenizer(tokenizer).push(padding) == ""
    with pytest.raises(InvalidRequestError, match=rf"token id {size + 64} is outside .*0 to {padding}"):
        tokenizer.decode([size + 64])


def test_pad_to_fewer_rows_than_tokens_raises(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size
    tokenizer.pad_to(size)
    with pytest.raises(TokenizerError, match=f"has {size} tokens, the model's embedding {size - 1} rows"):
        tokenizer.pad_to(size - 1)


def test_encode_library_panic_is_invalid_request(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_hf(write(tmp_path, byte_library("(x+)+[yz]")))
    with pytest.raises(InvalidRequestError, match=r"the tokenizer failed on this text: .*retry-limit") as caught:
        tokenizer.encode("x" * 40)
    assert caught.value.field == "prompt"
    assert "\n" not in str(caught.value)
    assert tokenizer.decode(tokenizer.encode("fine")) == "fine"


def test_library_error_while_loading_is_tokenizer_error(tmp_path: Path) -> None:
    panics = "((?=a)|(?=.)|(?!b))" * 40 + "(?!a)"  # on the one letter that is tried
    for pattern, reason in ((panics, "retry-limit"), ("(unclosed", "Oniguruma error")):
        source = json.loads(byte_library().to_str())
        source["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}
        (tmp_path / "tokenizer.json").write_text(json.dumps(source), encoding="utf-8")
        with pytest.raises(TokenizerError, match=rf"tokenizer\.json: .*{reason}") as caught:
            tokenizer_from_hf(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError])
def test_tokenizer_errors_other_exceptions_pass(kind: type[BaseException]) -> None:
    with pytest.raises(kind), tokenizer_errors("x"):
        raise kind


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.5])
def test_fractional_token_types_raise(bad: float) -> None:
    token_types = np.array(bpe_metadata()["tokenizer.ggml.token_type"], np.float32)
    assert tokenizer_from_gguf(bpe_metadata(token_type=token_types)).is_special(0)
    token_types[5] = bad
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.token_type: entry 5"):
        tokenizer_from_gguf(bpe_metadata(token_type=token_types))


@pytest.mark.parametrize("entry", ["x", {"template": "t"}, {"name": ["default"], "template": "t"}, {"name": 3}, None])
def test_chat_template_entry_without_name_raises(entry: object, tmp_path: Path) -> None:
    write(tmp_path, byte_library())
    settings = {"chat_template": [{"name": "default", "template": "d"}, entry]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: chat_template"):
        tokenizer_from_hf(tmp_path)


@pytest.mark.parametrize("text", [None, b"x", 3, ["x"]])
def test_encode_wrong_type_raises(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="text must be a string") as caught:
        tokenizer.encode(text)
    assert caught.value.field == "text"


@pytest.mark.parametrize(
    "ids", ["abc", b"abc", None, 5, [1.5], ["5"], [None], [True], [[1]], np.ones(3), np.array(5), np.ones((2, 1), int)]
)
def test_decode_wrong_type_raises(tokenizer: Tokenizer, ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="tokens") as caught:
        tokenizer.decode(ids)
    assert caught.value.field == "tokens"


def test_decode_numpy_ids_are_accepted(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world")
    for kind in (np.int32, np.int64, np.uint16):
        assert tokenizer.decode(np.array(ids, kind)) == "hello world"  # type: ignore[arg-type]
        assert tokenizer.decode([kind(token_id) for token_id in ids]) == "hello world"  # type: ignore[misc]


def test_error_of_long_name_is_short() -> None:
    for change in ({"pre": "x" * 10**6}, {"merges": ["a" * 10**6 + " b"]}, {"merges": ["a" * 10**6]}):
        assert "..." in refusal(bpe_metadata(**change))
