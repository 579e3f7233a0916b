"""Peers: real processes that answer, crash, hang or print something else."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from llm_worker_bench.engine_harness import EngineHarness, TimedRun
from llm_worker_bench.peers.programs import LibraryPeer, LlamaBench, PeerError, Task, load_worker
from llm_worker_rbee import __version__
from tests.cli.conftest import write_model

# One row as llama-bench prints it (llama.cpp of 2026-08), the fields that vary filled in.
FAKE = """#!{python}
import json, sys
if "--help" in sys.argv:
    sys.exit(print("  --no-warmup  skip warmup runs"))
warms_up = "--no-warmup" not in sys.argv
options = [one for one in sys.argv[1:] if one != "--no-warmup"]
given = dict(zip(options[::2], options[1::2]))
n_prompt, n_gen = int(given["-p"]), int(given["-n"])
print(json.dumps([{{
    "build_commit": "0c1e570", "build_number": 7031, "cpu_info": "A CPU", "gpu_info": "", "backends": "CPU",
    "model_filename": given["-m"], "n_threads": int(given["-t"]), "n_gpu_layers": int(given["-ngl"]),
    "n_prompt": n_prompt, "n_gen": n_gen, "n_depth": 0, "avg_ns": 4471942087, "stddev_ns": 0,
    "avg_ts": 1000.0 * int(given["-r"]) * warms_up + 0.25 * int(given["-t"]) + n_prompt + n_gen / 1000,
    "stddev_ts": 0.0,
}}], indent=2))
"""


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("peers") / "tiny.gguf")


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(program(tmp_path_factory.mktemp("bin") / "llama-bench", FAKE.format(python=sys.executable)))


def test_llama_bench_output_is_parsed(fake: str) -> None:
    bench = LlamaBench(fake, "model.gguf", 2, 30)
    bench.start()
    assert bench.version == "build 7031 (0c1e570)"
    assert bench.measure_rate(Task("pp", 64)) == 1064.5
    assert bench.measure_rate(Task("tg", 16)) == 1000.516
    assert bench.measure_rate(Task("pp", 4096)) == 4096.5  # a long prompt is not run twice
    assert (bench.name, bench.settings["n_gpu_layers"]) == ("llama-bench", 0)


def test_llama_bench_of_a_fork_without_an_option(tmp_path: Path) -> None:
    fork = FAKE.format(python=sys.executable).replace("--no-warmup  skip", "-w 0  skip")
    bench = LlamaBench(str(program(tmp_path / "llama-bench", fork)), "model.gguf", 2, 30, name="fork")
    bench.start()
    assert (bench.name, bench.measure_rate(Task("pp", 4096))) == ("fork", 5096.5)


def test_llama_bench_takes_the_median_of_its_repetitions(tmp_path: Path) -> None:
    row = {"build_number": 1, "build_commit": "a", "n_prompt": 8, "n_gen": 0, "avg_ts": 5.0, "samples_ts": [1, 7, 7]}
    path = program(tmp_path / "llama-bench", f"#!/bin/sh\necho '{json.dumps([row])}'\n")
    assert LlamaBench(str(path), "model.gguf", 1, 30, on_gpu=True).measure_rate(Task("pp", 8)) == 7.0


def test_llama_bench_on_the_gpu_and_with_more_options(fake: str) -> None:
    bench = LlamaBench(fake, "model.gguf", 2, 30, on_gpu=True, options="-fa off -t 1")
    assert bench.measure_rate(Task("pp", 64)) == 5064.25  # of five repetitions; the last -t counts
    assert bench.name == "llama-bench -fa off -t 1"
    assert bench.settings == {"backends": "CPU", "n_threads": 1, "n_gpu_layers": 999}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo 'cannot load' >&2; exit 3", "llama-bench ended with exit status 3: cannot load"),
        ("kill -ILL $$", "llama-bench was ended by SIGILL"),
        ("echo hello", "llama-bench printed no JSON of the known form: b'hello"),
        ("echo '[]'", "llama-bench printed no JSON"),
        ("exec tail -f /dev/null", "llama-bench did not end within 0.2 s"),
    ],
)
def test_llama_bench_failure_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = program(tmp_path / "llama-bench", f"#!/bin/sh\n{text}\n")
    with pytest.raises(PeerError) as caught:
        LlamaBench(str(path), "model.gguf", 1, 0.2 if "tail" in text else 30).measure_rate(Task("pp", 8))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('no such library')", "the peer ended with exit status 1: no such library"),
        ("raise ValueError('bad')", "the peer ended with exit status 1: ValueError: bad"),
        ("import os; os.abort()", "the peer was ended by SIGABRT"),
        ("print('hello', flush=True); input()", "the peer answered b'hello', which has no version"),
        ("input()", "the peer did not answer within 0.2 s"),
    ],
)
def test_library_peer_start_failure_is_one_line(program: str, message: str) -> None:
    child = LibraryPeer("the peer", [sys.executable, "-c", program], os.environ, 0.2 if program == "input()" else 30)
    with pytest.raises(PeerError) as caught:
        child.start()
    child.close()
    assert str(caught.value).startswith(message)


def test_library_peer_end_between_requests_raises() -> None:
    text = (
        "import json; print(json.dumps({'version': '1'}), flush=True); input(); print('{\"seconds\": 0.5}', flush=True)"
    )
    child = LibraryPeer("the peer", [sys.executable, "-c", text], os.environ, 30)
    child.start()
    assert child.version == "1"
    assert child.measure_rate(Task("pp", 8)) == 16.0
    with pytest.raises(PeerError, match="the peer ended with exit status 0"):
        child.measure_rate(Task("pp", 8))
    child.close()
    child.close()


def test_load_worker_runs_prefill_and_decode(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def note(name: str, *given: Any) -> TimedRun:
        calls.append((name, *given))
        return TimedRun(0.5, 7, 1, [])

    for name in ("prefill", "decode"):
        monkeypatch.setattr(EngineHarness, name, lambda self, *given, name=name: note(name, *given))
    version, used, measure = load_worker({"model": str(tiny), "context": 16, "device": "auto", "backend": "auto"})
    assert measure("pp", 16) == measure("tg", 5) == {"seconds": 0.5, "tokens": 7}
    assert version == __version__
    assert used["backend"] in ("cpu", "cuda")
    assert calls == [("prefill", 0, 16, 1), ("decode", 0, 5, 1)]
