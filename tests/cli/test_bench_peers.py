"""`bench peers` as a person or a program calls it, beside a program that prints what llama-bench prints."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.bench.peers.test_programs import FAKE, program
from tests.bench.peers.test_servers import server

from .conftest import Run


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program(tmp_path_factory.mktemp("bin") / "llama-bench", FAKE.format(python=sys.executable))


def test_peers_prints_a_table(cli: Run, tiny: Path, fake: Path) -> None:
    options = ("--pp", "8", "--tg", "2", "-r", "2", "--llama-bench", fake, "--peer", "llama-bench")
    done = cli("bench", "peers", tiny, *options, "--peer", "llama-cpp-python", "--peer", f"fork={fake}")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.decode().splitlines()]
    assert lines[2][:3] == ["PEER", "RESULT", "95%"]
    rows = [(line[0], line[1]) for line in lines[3:]]
    assert rows == [(t, p) for t in ("pp8", "tg2") for p in ("llm-worker-rbee", "llama-bench", "fork")]
    assert done.stdout.decode().splitlines()[4].endswith("build 7031 (0c1e570)")
    notes = done.stderr.decode()
    assert "llama-bench does not sample" in notes
    assert "left out: llama-cpp-python: llama_cpp not installed" in notes


def test_peers_json_of_a_synthetic_model(cli: Run, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    options = ("--pp", "2", "--tg", "0", "-r", "1", "--llama-bench", fake, "--peer", "llama-bench", "--json")
    done = cli("bench", "peers", "--synthetic", "smollm2-135m:Q4_0:1", *options)
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    found = {one["name"]: one for one in run["results"]}
    assert set(found) == {"pp2/llm-worker-rbee", "pp2/llama-bench"}
    ours, theirs = found["pp2/llm-worker-rbee"], found["pp2/llama-bench"]
    assert theirs["ours_over_peer"] == pytest.approx(ours["estimate"] / theirs["estimate"])
    assert run["model"]["name"] == "smollm2-135m-Q4_0-1.gguf"


def test_peers_suite_says_how_long_it_takes_and_writes_markdown(
    cli: Run, tiny: Path, fake: Path, tmp_path: Path
) -> None:
    options = ("--suite", "cpu", "--rows", "^(default|q8_0)$", "--pp", "8", "--tg", "2", "-r", "1")
    listed = cli("bench", "peers", tiny, *options, "--list").stdout.decode().splitlines()
    assert [line.split()[:3] for line in listed[1:3]] == [["default", "pp8", "tg2"], ["q8_0", "pp8", "tg2"]]
    more = ("--llama-bench", fake, "--peer", "llama-bench", "--files", tmp_path / "files")
    more += ("--save", tmp_path / "run.json", "--markdown", tmp_path / "run.md")
    done = cli("bench", "peers", tiny, *options, *more)
    assert done.returncode == 0, done.stderr
    notes = done.stderr.decode()
    assert "2 rows: about " in notes
    assert "default pp8 " in notes
    rows = [line.split()[:3] for line in done.stdout.decode().splitlines()[3:]]
    tests = [(row, test) for row in ("default", "q8_0") for test in ("pp8", "tg2")]
    assert rows == [[*test, peer] for test in tests for peer in ("llm-worker-rbee", "llama-bench")]
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["settings"]["rows"] == ["default", "q8_0"]
    assert saved["settings"]["llama_bench"] == "llama-bench"  # not where it is
    assert len(saved["details"]["busy_cores"]["q8_0"]) == 2
    assert "| q8_0 tg2 | llama-bench, build 7031 (0c1e570) |" in (tmp_path / "run.md").read_text()
    (made,) = (tmp_path / "files").iterdir()
    assert re.fullmatch(r"tiny-[0-9a-f]{8}-as-Q8_0\.gguf", made.name)


def test_peers_list_does_not_fetch_the_default_model(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for options, row in ((("--suite", "cpu", "--rows", "default"), "default"), ((), "smollm2")):
        done = cli("bench", "peers", *options, "--list")
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode().splitlines()[1].split()[:3] == [row, "pp512", "tg128"]
    assert not list(tmp_path.rglob("*.gguf"))


def test_peers_install_of_another_peer_fails(cli: Run, tiny: Path) -> None:
    done = cli("bench", "peers", tiny, "--install", "vllm")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(
        b"error: --install vllm: only mistral.rs can be installed; install vllm yourself, and"
    )


def test_peers_several_models_are_rows(cli: Run, tiny: Path, fake: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(tiny.read_bytes())
    options = ("--pp", "8", "--tg", "0", "-r", "1", "--llama-bench", fake, "--peer", "llama-bench", "--json")
    done = cli("bench", "peers", tiny, other, *options)
    assert done.returncode == 0, done.stderr
    names = [f"{model.name} pp8/{peer}" for model in (tiny, other) for peer in ("llm-worker-rbee", "llama-bench")]
    assert sorted(one["name"] for one in json.loads(done.stdout)["results"]) == sorted(names)


def test_peers_invalid_options_fail(cli: Run, tiny: Path) -> None:
    for options, message in (
        (("--rows", "long"), "give --suite too"),
        ((tiny, "--synthetic", "llama2-7b:Q4_0"), "choose one"),
        ((tiny, tiny, "--suite", "cpu"), "at most one MODEL"),
        ((tiny, tiny), f"two rows are named '{tiny.name}'"),
    ):
        done = cli("bench", "peers", *options)
        assert (done.returncode, done.stdout) == (2, b"")
        assert message in " ".join(done.stderr.decode().replace("│", " ").split())
    done = cli("bench", "peers", tiny, "--peer", "ollama")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(
        b"error: unknown peer 'ollama': use some of llama-bench, llama-cpp-python, transformers, mistral.rs, vllm, "
    )
    done = cli("bench", "peers", tiny, "--peer", "vllm=/bin/true")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"error: --peer vllm=PATH: give a llama-bench a name of its own")
    assert cli("bench", "peers", tiny, "--suite", "cpu", "--peer", "ollama", "--list").returncode == 1
    done = cli("bench", "peers", tiny, "--suite", "cpu", "--rows", "^(default|q8_0)$", "--pp", "1000", "--tg", "0")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"error: default: pp1000 needs 1000 tokens, the model's context has " in done.stderr
    done = cli("bench", "peers", tiny, "--pp", "8", "--timeout", "0")
    assert done.returncode == 2
    done = cli("bench", "peers", tiny, "--batch", "0")
    assert (done.returncode, done.stdout) == (2, b"")


def test_peers_batch_beside_llama_server(cli: Run, endless: Path, tmp_path: Path) -> None:
    """Answers are long enough for both to be under way at once on a busy machine."""
    options = ("--tg", "1000", "--batch", "2", "-r", "1", "--peer", "llama-server", "--llama-server", server(tmp_path))
    done = cli("bench", "peers", endless, *options)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[:2] for line in done.stdout.decode().splitlines()[3:]]
    assert rows == [["tg1000@b2", "llm-worker-rbee"], ["tg1000@b2", "llama-server"]]
    done = cli("bench", "peers", endless, *options[:-1], tmp_path / "nowhere")
    assert f"left out: llama-server: {tmp_path / 'nowhere'} is not a program" in done.stderr.decode()
