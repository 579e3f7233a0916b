"""`tokenize`: ids and pieces, for people and for programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from llm_worker_rbee.llm import open_tokenizer
from llm_worker_rbee.tokenizer import Tokenizer
from llm_worker_rbee.weights import open_checkpoint

from .conftest import Run, environment, write_model


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return open_tokenizer(open_checkpoint(tiny))


def test_tokenize_prints_ids_and_visible_pieces(cli: Run, tiny: Path, tokenizer: Tokenizer) -> None:
    done = cli("tokenize", tiny, "--text", "he \né")
    assert (done.returncode, done.stderr) == (0, b"")
    rows = [line.split(maxsplit=1) for line in done.stdout.decode().splitlines()]
    assert [int(token) for token, _ in rows] == tokenizer.encode("he \né")
    assert [piece for _, piece in rows] == ["'he'", "' '", "'\\n'", "b'\\xc3'", "b'\\xa9'"]


def test_text_from_option_file_and_stdin(cli: Run, tiny: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(b"he\r\n\n")
    for args, stdin, text in (
        (["--text", "he\n"], b"", "he\n"),
        (["--file", str(file)], b"", "he\r\n\n"),
        ([], b"he\n\n", "he\n"),
        (["--text", "-"], b"he", "he"),
    ):
        done = cli("tokenize", tiny, "--json", *args, stdin=stdin)
        assert json.loads(done.stdout) == {
            "tokens": tokenizer.encode(text),
            "pieces": [tokenizer.piece(token) for token in tokenizer.encode(text)],
        }
    assert cli("tokenize", tiny, "--text", "a", "--file", file).returncode == 2


def test_special_tokens_bos_and_empty_text(cli: Run, tiny: Path, tmp_path: Path) -> None:
    with_bos = write_model(tmp_path / "bos.gguf", {"tokenizer.ggml.add_bos_token": True})

    def tokens(*args: str | Path) -> list[int]:
        return list(json.loads(cli("tokenize", *args, "--json").stdout)["tokens"])

    assert tokens(tiny, "--text", "") == []
    assert tokens(with_bos, "--text", "") == [1]
    assert tokens(with_bos, "--text", "", "--no-bos") == []
    assert tokens(with_bos, "--text", "<|im_end|>", "--special") == [1, 2]
    assert len(tokens(tiny, "--text", "<|im_end|>")) == len("<|im_end|>")


def test_jsonl_prints_ids_of_each_line(cli: Run, tiny: Path, tokenizer: Tokenizer) -> None:
    texts = ["he", "", "a\nb", "é 🙂", "\u2028"]
    stdin = "".join(json.dumps(text) + "\n" for text in texts).encode() + json.dumps("日", ensure_ascii=False).encode()
    done = cli("tokenize", tiny, "--jsonl", stdin=stdin)
    assert (done.returncode, done.stderr) == (0, b"")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        tokenizer.encode(text) for text in [*texts, "日"]
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"he", "line 2: not a JSON string"),
        (b"", "line 2: not a JSON string"),
        (b"[1]", "line 2: not a JSON string, but an array"),
        (b"null", "line 2: not a JSON string, but null"),
        (b'"\\ud800"', "line 2: the text is not valid Unicode"),
        (b'"\xff"', "line 2: it is not UTF-8"),
        (b"[" * 100_000, "line 2: not a JSON string"),
    ],
)
def test_jsonl_invalid_line_is_named(cli: Run, tiny: Path, line: bytes, expected: str) -> None:
    done = cli("tokenize", tiny, "--jsonl", stdin=b'"a"\n' + line + b"\n")
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1  # what was good before it
    (message,) = done.stderr.decode().splitlines()
    assert message.startswith(f"error: {expected}")


def test_jsonl_answers_each_line_at_once(tiny: Path, tokenizer: Tokenizer) -> None:
    command = [sys.executable, "-m", "llm_worker_rbee", "tokenize", str(tiny), "--jsonl"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment())
    assert child.stdin is not None
    assert child.stdout is not None
    for text in ("he", "llo"):
        child.stdin.write(json.dumps(text).encode() + b"\n")
        child.stdin.flush()
        assert json.loads(child.stdout.readline()) == tokenizer.encode(text)  # the input is still open
    assert child.communicate(timeout=30) == (b"", None)
    assert child.returncode == 0


def test_tokenize_folder_without_weights(cli: Run, tmp_path: Path) -> None:
    """A tokenizer alone, and beside a config of an unknown architecture."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    library.decoder = tokenizers.decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    for config in (None, '{"model_type": "made-up"}'):
        if config:
            (tmp_path / "config.json").write_text(config)
        done = cli("tokenize", tmp_path, "--text", "abb", "--json")
        assert (done.returncode, done.stderr) == (0, b"")
        assert json.loads(done.stdout)["tokens"] == [2, 1]
        assert cli("inspect", tmp_path).returncode == 0
