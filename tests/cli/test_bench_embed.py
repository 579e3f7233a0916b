"""`bench embed` and `bench accuracy --embedding`: a small BERT beside programs that answer as the peers do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from llm_worker_bench.embedding import accuracy, suite
from llm_worker_bench.embedding.retrieval import RetrievalSet
from tests.bench.peers.test_programs import program
from tests.bench.peers.test_servers import notes, server
from tests.helpers.tiny_encoders import WIDTH, write_encoder

from .conftest import Run

OURS, TOKENIZED, THEIRS = "llm-worker-rbee", "llm-worker-rbee tokenized", "sentence-transformers"
SENTENCE_TRANSFORMERS = f"""
import numpy as np
__version__ = "0.0.test"
print("a library may print to standard output")
class SentenceTransformer:
    def __init__(self, path, device):
        assert device == "cpu"
    def float(self):
        return self
    def encode(self, texts, batch_size, show_progress_bar):
        assert batch_size == 32 and not show_progress_bar
        return np.array([np.cos(np.arange({WIDTH}) * len(text)) for text in texts], np.float32)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("bench") / "tiny-bert")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    (folder / "sentence_transformers.py").write_text(SENTENCE_TRANSFORMERS)
    (folder / "torch.py").write_text("__version__ = '0'\ndef set_num_threads(n): assert n > 0\n")
    return program(folder / "python", f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')


@pytest.fixture
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RetrievalSet.read()
    part = RetrievalSet(whole.queries[:3], whole.passages[:9], (frozenset({1}), frozenset({2, 5}), frozenset({8})))
    monkeypatch.setattr(RetrievalSet, "read", lambda: part)
    monkeypatch.setattr(accuracy, "PIECES", 4)


def test_embed_measures_all_programs_on_the_same_texts(
    cli: Run, model: Path, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "MIN_TOKENS", 32)
    peers = ("--peer-python", python, "--llama-server", server(tmp_path))
    options = ("--types", "f32", "--lengths", "8", "--batch", "4", "--texts", "6", "-r", "2", "--backend", "reference")
    saved = tmp_path / "run.json"
    done = cli("bench", "embed", model, *options, *peers, "--files", tmp_path / "files", "--save", saved)
    assert done.returncode == 0, done.stderr
    run = json.loads(saved.read_text())
    found = {result["name"]: result for result in run["results"]}
    names = (OURS, TOKENIZED, THEIRS, "llama-server")
    assert set(found) == {f"F32 {task}/{name}" for task in ("len8 b4", "mixed6") for name in names}
    ours, theirs = found[f"F32 mixed6/{OURS}"], found[f"F32 mixed6/{THEIRS}"]
    assert ours["ours_over_peer"] == 1.0
    assert theirs["ours_over_peer"] == pytest.approx(np.mean(np.divide(ours["samples"], theirs["samples"])))
    assert (theirs["texts"], theirs["version"]) == (6, "0.0.test (torch 0)")
    assert 6 * 20 <= theirs["tokens"] <= 6 * 32
    assert run["details"]["inputs"]["len8 b4"] == {"inputs": 4, "tokens": 32}
    assert run["details"]["models"]["F32"]["name"].endswith("-F32.gguf")
    started, *requests = notes(tmp_path)
    assert started["options"]["-ub"] == "512"
    assert {(request["path"], request["encoding_format"]) for request in requests} == {("/v1/embeddings", "base64")}
    assert {len(request["input"]) for request in requests} == {4, 6}
    lines = done.stdout.decode().splitlines()
    assert lines[2].split()[:3] == ["PROGRAM", "TOKENS/S", "95%"]
    assert len(lines) == 3 + len(found)


def test_embed_of_a_synthetic_model_takes_token_ids(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(suite, "MIN_TOKENS", 16)
    options = ("--tokenized", "--lengths", "8", "--batch", "2", "--texts", "0", "-r", "1", "--backend", "reference")
    done = cli("bench", "embed", "--synthetic", "minilm:Q8_0:1", *options, "--llama-server", "/nonexistent", "--json")
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    assert [result["name"] for result in run["results"]] == [f"len8 b2/{TOKENIZED}"]
    assert run["details"]["left_out"] == {
        THEIRS: "it takes texts, not token ids",
        "llama-server": "/nonexistent is not a program: --llama-server PATH names one",
    }


def test_embed_names_what_is_wrong(cli: Run, model: Path) -> None:
    alone = ("--backend", "reference", "--texts", "0", "-r", "1")
    for options, status, message in (
        (("--peer", "ollama"), 1, "unknown peer 'ollama': use some of sentence-transformers, llama-server"),
        (("--lengths", "0", "--texts", "0"), 1, "nothing to measure"),
        (("--lengths", "33", *alone), 1, "texts of 33 tokens are too long: the model takes 32"),
        (("--synthetic", "minilm:F16"), 2, "choose one"),
    ):
        done = cli("bench", "embed", model, *options)
        assert (done.returncode, done.stdout) == (status, b"")
        assert message in " ".join(done.stderr.decode().replace("│", " ").split())


@pytest.mark.usefixtures("few_texts")
def test_accuracy_of_the_reference_is_exact(cli: Run, model: Path) -> None:
    done = cli("bench", "accuracy", model, "--embedding", "--backend", "reference", "--json")
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    found = {result["name"]: result["estimate"] for result in run["results"]}
    assert [found[f"cosine/{name}"] for name in ("mean", "p1", "min")] == pytest.approx([1.0] * 3, abs=1e-6)
    for name in ("ndcg@10", "recall@1", "recall@3", "mrr"):
        assert 0 <= found[name] == found[f"{name}/truth"] <= 1, name
    assert (run["kind"], run["settings"]["embedding"], len(run["details"]["cosines"])) == ("accuracy", True, 16)


@pytest.mark.usefixtures("few_texts")
def test_accuracy_against_sentence_transformers(cli: Run, model: Path, python: Path) -> None:
    options = ("--embedding", "--backend", "reference", "--against", THEIRS, "--peer-python", python)
    done = cli("bench", "accuracy", model, *options)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode()
    assert "truth: sentence-transformers 0.0.test (torch 0), float32" in text
    (smallest,) = [line for line in text.splitlines() if line.startswith("cosine to the truth, smallest")]
    assert -1 <= float(smallest.split()[-1]) < 0.9
    done = cli("bench", "accuracy", model, "--embedding", "--against", "transformers")
    assert done.returncode == 2
    assert b"reference, sentence-transformers" in done.stderr
