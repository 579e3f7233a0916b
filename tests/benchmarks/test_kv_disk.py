"""`benchmarks.kv_disk` on a small model: real servers, killed and started again; what is saved and shown of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import kv_disk
from llm_worker_bench.results import Run
from tests.cli.conftest import ROOT, write_model
from tests.cli.conftest import Run as RunCommand
from tests.cli.conftest import cli as cli
from tests.conftest import DEVICE, with_kernels

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="without --deterministic a GPU gives other bits")
SMALL = ("--tokens", "40", "--batch", "2", "--pairs", "2", "--repetitions", "2", "--streams", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random llama with a byte-level vocabulary, and a context that streams do not fill."""
    return with_kernels(write_model(tmp_path_factory.mktemp("kv") / "tiny.gguf", context=1 << 16))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "DECODE_PROMPT": 20,
        "DECODE": 2_000,
        "STREAM_PROMPT": 20,
        "STREAM": 60_000,
        "SETTLE_S": 0.1,
    }.items():
        monkeypatch.setattr(kv_disk, name, value)


@pytest.mark.usefixtures("short")
def test_conversation_decoding_and_pause_are_measured_and_saved(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], cli: RunCommand
) -> None:
    saved = tmp_path / "run.json.gz"
    assert kv_disk.main([str(model), *SMALL, "--serve-args", "--kv-memory 64M", "--save", str(saved)]) == 0
    run = Run.load(saved)
    names = [
        f"{name}/{part}" for name in ("first_token", "decode@b2", "pause") for part in ("kv_dir", "without", "ratio")
    ]
    assert [result.name for result in run.results] == names
    for result in run.results:
        assert len(result.samples) == 2
        assert result.estimate > 0
    first = run.results[0].fields
    assert first["same_answers"] == 1
    assert (
        first["prompt_tokens"] - 2 * 16 <= first["cached_tokens"] + 24 * 12
    )  # words of the last message have 12 bytes
    assert run.kind == "kv"
    assert run.command.startswith("python -m benchmarks.kv_disk tiny.gguf --tokens 40 ")
    assert str(tmp_path) not in json.dumps(run.as_json())
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[1:]] == names
    assert "100% same answers" in shown[1]
    page = tmp_path / "report.html"
    assert cli("bench", "report", saved, "-o", page).returncode == 0
    assert "Keys and values on disk" in page.read_text()


@pytest.mark.usefixtures("short")
def test_conversation_that_was_computed_again_is_an_error(model: Path) -> None:
    with pytest.raises(SystemExit, match="error: the conversation was computed again, not read"):
        kv_disk.main([str(model), *SMALL, "--serve-args", "--kv-disk 1"])


def test_wrong_usage_is_one_line(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for words, reason in (("--batch x", "--batch is 'x'"), (f"{tmp_path}/none.gguf", "none.gguf")):
        command = [sys.executable, "-m", "benchmarks.kv_disk", *words.split()]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=60)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ")
        assert reason in line
