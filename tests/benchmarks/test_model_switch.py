"""`benchmarks.model_switch` on two small models: real servers; what is saved and shown of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import model_switch
from llm_worker_bench.results import Run
from tests.cli.conftest import Run as RunCommand
from tests.cli.conftest import cli as cli
from tests.cli.conftest import write_model
from tests.conftest import ON_CPU, with_kernels

pytestmark = ON_CPU
COUNTS = ("--tokens", "40", "--switches", "8", "--clients", "2", "--cycles", "2", "--repetitions", "2")
NAMES = [
    *("switch/large", "loaded/large", "switch/small", "loaded/small", "wake"),
    *("gap@p95/alone", "gap@p95/loading", "gap@p95/ratio", "switches", "switches/seconds", "left"),
]


def test_switches_gaps_and_memory_are_measured_and_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cli: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_switch, "ALONE_S", 0.1)
    names = ("small", "large", "third")
    models = [str(with_kernels(write_model(tmp_path / f"{name}.gguf", context=4096))) for name in names]
    saved = tmp_path / "run.json.gz"
    args = [*models, *COUNTS, "--serve-args", "--kv-memory 64M", "--save", str(saved)]
    assert model_switch.main(args) == 0
    run = Run.load(saved)
    assert [result.name for result in run.results] == NAMES
    assert all(result.estimate > 0 for result in run.results)
    counts = next(result.fields for result in run.results if result.name == "switches")
    assert (counts["requests"], counts["failed"]) == (8, 0)
    assert run.command.startswith("python -m benchmarks.model_switch small.gguf large.gguf third.gguf --tokens 40 ")
    assert str(tmp_path) not in json.dumps(run.as_json())
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == NAMES
    page = tmp_path / "report.html"
    assert cli("bench", "report", saved, "-o", page).returncode == 0
    assert "Several models on one port" in page.read_text()


def test_unknown_model_is_one_line() -> None:
    with pytest.raises(SystemExit, match=r"error: no such model: 'nothing'"):
        model_switch.main(["nothing", "nothing"])
