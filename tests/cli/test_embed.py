"""`embed` and `rerank`: files in, arrays and JSON Lines out, errors that name the line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_worker_rbee import Embedder, Reranker
from llm_worker_rbee.cli import embed as embed_module
from tests.helpers.process import spawn as spawn_process
from tests.helpers.tiny_encoders import MAX_LENGTH, WIDTH, write_encoder
from tests.helpers.tiny_pooling import require_same

from .conftest import Run, environment

TEXTS = ["the cat sat", "", "where is the blue bird ?", "A DOG", "sky"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("embed") / "tiny-bert", has_prompts=True)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("rerank") / "tiny-reranker", is_reranker=True)


@pytest.fixture(scope="module")
def expected(model: Path) -> Any:
    return Embedder(model, backend="reference").embed(TEXTS)


def options(model: Path) -> list[str]:
    return ["-m", str(model), "--backend", "reference"]


def test_embed_lines_to_array(cli: Run, model: Path, tmp_path: Path, expected: Any) -> None:
    (tmp_path / "in.txt").write_text("\r\n".join(TEXTS))
    out = tmp_path / "out.npy"
    done = cli("embed", tmp_path / "in.txt", "--output", out, *options(model))
    assert (done.returncode, done.stdout.decode()) == (0, f"{out}\n"), done.stderr
    rows = np.load(out)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, expected)
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith("5 texts · ")
    assert last.endswith(f"tokens/s · {WIDTH} values each")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.npy"]


def test_embed_writes_chunk_by_chunk(
    cli: Run, model: Path, tmp_path: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed_module, "MAX_CHUNK_TEXTS", 2)
    (tmp_path / "in.txt").write_text("\n".join(TEXTS * 3) + "\n")
    assert cli("embed", tmp_path / "in.txt", "-o", tmp_path / "out.npy", *options(model)).returncode == 0
    require_same(np.load(tmp_path / "out.npy"), np.tile(expected, (3, 1)))


def test_embed_json_lines_keeps_ids(cli: Run, model: Path, tmp_path: Path, expected: Any) -> None:
    lines = [{"id": i, "text": text} for i, text in enumerate(TEXTS[:3])]
    texts = "\n".join([*map(json.dumps, lines), "", json.dumps(TEXTS[3]), json.dumps({"text": TEXTS[4]})])
    (tmp_path / "in.jsonl").write_text(texts)
    done = cli("embed", tmp_path / "in.jsonl", "-o", "-", "-q", *options(model))
    assert (done.returncode, done.stderr) == (0, b"")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["index"] for line in found] == [0, 1, 2, 3, 4]
    assert [line.get("id") for line in found] == [0, 1, 2, None, None]
    require_same(np.array([line["embedding"] for line in found], np.float32), expected)
    piped = cli("embed", "-o", tmp_path / "out.jsonl", "--input-format", "jsonl", *options(model), stdin=texts.encode())
    assert piped.returncode == 0
    assert (tmp_path / "out.jsonl").read_bytes() == done.stdout


def test_embed_dimensions_dtype_and_prompts(cli: Run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npy"
    stdin = "\n".join(TEXTS).encode()
    more = ["--dimensions", "8", "--dtype", "float16", "--prompt-name", "query"]
    assert cli("embed", "-", "-o", out, *more, *options(model), stdin=stdin).returncode == 0
    embedder = Embedder(model, backend="reference")
    cut = embedder.embed(TEXTS, dimensions=8, prompt_name="query")
    np.testing.assert_array_equal(np.load(out), cut.astype(np.float16))
    again = ["--no-normalize", "--prompt", "", "--force"]
    assert cli("embed", "-", "-o", out, *again, *options(model), stdin=stdin).returncode == 0
    np.testing.assert_array_equal(np.load(out), embedder.embed(TEXTS, prompt="", normalize=False))


def test_embed_no_texts_gives_an_empty_array(cli: Run, model: Path, tmp_path: Path) -> None:
    assert cli("embed", "-", "-o", tmp_path / "out.npy", *options(model)).returncode == 0
    assert np.load(tmp_path / "out.npy").shape == (0, WIDTH)


def test_embed_long_text_names_its_line_or_is_cut(cli: Run, model: Path, tmp_path: Path) -> None:
    stdin = b"sky\n" + b"cat " * 50 + b"\nsky"
    done = cli("embed", "-", "-o", tmp_path / "out.npy", *options(model), stdin=stdin)
    assert done.returncode == 1
    assert done.stderr.decode() == (
        f"error: line 2 has 54 tokens, the model takes {MAX_LENGTH}: shorten it, or give --truncate\n"
    )
    assert list(tmp_path.iterdir()) == []
    assert cli("embed", "-", "-o", tmp_path / "out.npy", "--truncate", *options(model), stdin=stdin).returncode == 0
    assert np.load(tmp_path / "out.npy").shape == (3, WIDTH)


@pytest.mark.parametrize(
    ("args", "stdin", "status", "message"),
    [
        (["-o", "out.csv"], b"", 2, "give a name that ends in .npy or .jsonl, or -"),
        ([], b"", 2, "Missing option '--output'"),
        (["-o", "no/out.npy"], b"", 1, "the folder no does not exist"),
        (["-o", "out.npy", "--dtype", "int8"], b"", 2, "use float32 or float16"),
        (["-o", "out.npy", "--input-format", "csv"], b"", 2, "use one of auto, lines, jsonl"),
        (["-o", "out.npy", "--prompt", "a", "--prompt-name", "query"], b"", 2, "exclude each other"),
        (["-o", "out.npy", "--prompt-name", "none"], b"sky", 1, "unknown --prompt-name 'none'"),
        (["-o", "out.npy", "--dimensions", "65"], b"sky", 1, "dimensions is 65: the model gives 1 to 64"),
        (["-o", "out.npy", "--max-length", "99"], b"sky", 1, "--max-length is 99"),
        (["-o", "out.npy"], b"a\n\xff", 1, "line 2 is not UTF-8 text: byte 0 is 0xFF"),
        (["-o", "out.npy", "--input-format", "jsonl"], b'{"text": "a"}\n{', 1, "line 2 is not JSON"),
        (["-o", "out.npy", "--input-format", "jsonl"], b"5", 1, "line 1 is neither a JSON object nor"),
        (["-o", "out.npy", "--input-format", "jsonl"], b'{"body": "a"}', 1, "line 1 has no text in the field 'text'"),
    ],
)
def test_embed_errors(
    cli: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], stdin: bytes, status: int,
    message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    done = cli("embed", "-", *args, *options(model), stdin=stdin)
    assert (done.returncode, done.stdout) == (status, b"")
    assert message in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_embed_protects_existing_files(cli: Run, model: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.npy"
    file.write_text('"sky"')
    out.write_text("old")
    assert b"exists: give another name, or --force" in cli("embed", file, "-o", out, *options(model)).stderr
    assert b"is the input itself" in cli("embed", file, "-o", file, "--force", *options(model)).stderr
    assert (file.read_text(), out.read_text()) == ('"sky"', "old")
    assert cli("embed", file, "-o", out, "--force", *options(model)).returncode == 0
    assert b"cannot read" in cli("embed", tmp_path / "absent", "-o", tmp_path / "b.npy", *options(model)).stderr


def test_embed_interrupted_leaves_no_file(model: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out.npy")
    command = [sys.executable, "-m", "llm_worker_rbee", "embed", "-", "-o", out, *options(model)]
    with spawn_process(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()) as child:
        assert child.stdin is not None
        child.stdin.write(b"sky\n")
        child.stdin.flush()
        watch = tmp_path / "out.npy.part"
        while not watch.exists():  # the model is loaded, and the rest of the input is awaited
            assert child.poll() is None
            os.sched_yield()
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 130
    assert list(tmp_path.iterdir()) == []


def test_rerank_prints_the_best_first(cli: Run, reranker: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    args = ["rerank", tmp_path / "in.txt", "--query", "where is the bird", *options(reranker)]
    documents = [text for text in TEXTS if text]
    expected = Reranker(reranker, backend="reference").rank("where is the bird", documents)
    report = json.loads(cli(*args, "--json").stdout)
    assert [(r["index"], r["document"]) for r in report["results"]] == [(r.index, r.document) for r in expected]
    assert [r["score"] for r in report["results"]] == pytest.approx([r.score for r in expected])
    assert [TEXTS[r["line"] - 1] for r in report["results"]] == [r.document for r in expected]
    lines = cli(*args, "--top-n", "2").stdout.decode().splitlines()
    assert lines[0].split() == ["SCORE", "LINE", "TEXT"]
    assert [line.split(maxsplit=2)[2] for line in lines[1:]] == [r.document for r in expected[:2]]


def test_rerank_errors(cli: Run, model: Path, reranker: Path) -> None:
    args = ["rerank", "-", "--query", "sky"]
    assert b"no reranker is built in" in cli(*args, stdin=b"a").stderr
    assert b"tiny-bert is an embedding model, not a reranker" in cli(*args, *options(model), stdin=b"a").stderr
    assert b"tiny-reranker is a reranker" in cli("embed", "-", "-o", "-", *options(reranker), stdin=b"a").stderr
    assert b"there is no text in -" in cli(*args, *options(reranker)).stderr
    long = cli(*args, *options(reranker), stdin=b"a\n\n" + b"cat " * 50)
    assert b"line 3 has 54 tokens" in long.stderr
    assert b"--truncate" in long.stderr


def test_commands_for_text_refuse_an_embedding_model(cli: Run, model: Path) -> None:
    done = cli("run", "hello", *options(model))
    assert done.returncode == 1
    assert b"tiny-bert is an embedding model (bert) and generates no text: use `embed`" in done.stderr


def test_inspect_and_tokenize_of_an_embedding_model(cli: Run, model: Path, reranker: Path) -> None:
    report = json.loads(cli("inspect", model, "--json").stdout)
    assert report["pooling"] | {"notes": []} == {
        "kind": "mean", "normalize": True, "score": None, "dimension": WIDTH, "similarity": "cosine",
        "max_length": MAX_LENGTH, "prompts": {"query": "query : ", "document": "passage : "},
        "default_prompt": "document", "notes": [],
    }  # fmt: skip
    assert report["fits"] is None
    shown = cli("inspect", model).stdout.decode()
    assert "mean, embeddings, normalized" in shown
    assert "query 'query : ', document 'passage : '; default document" in shown
    assert "no KV cache" in shown
    assert "scores of pairs (sigmoid): a reranker" in cli("inspect", reranker).stdout.decode()
    pieces = json.loads(cli("tokenize", model, "--text", "The cat", "--json").stdout)["pieces"]
    assert [piece.strip() for piece in pieces] == ["[CLS]", "the", "cat", "[SEP]"]
