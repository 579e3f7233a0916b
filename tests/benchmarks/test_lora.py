"""`benchmarks.lora` on a small model: a real server, adapters that it reads and one that it loads beside streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import batch, lora
from llm_worker_bench.results import Run
from tests.cli.conftest import write_model
from tests.conftest import DEVICE, with_kernels

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests the command")


def test_rates_and_loading_are_measured_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MAX_TOKEN", 200)
    monkeypatch.setattr(lora, "ALONE_S", 0.2)
    monkeypatch.setattr(lora, "RATE_OF_STREAM", 20_000)
    model, saved = with_kernels(write_model(tmp_path / "tiny.gguf", context=1 << 16)), tmp_path / "run.json.gz"
    counts = ["--adapters", "2", "--requests", "4", "--streams", "2", "--tokens", "400", "-r", "1"]
    assert lora.main([str(model), *counts, "--serve-args", "--kv-memory 64M", "--save", str(saved)]) == 0
    names = [f"{row}/{part}" for row in ("one", "many") for part in ("without", "with", "ratio")]
    gaps = [f"gap@p99/{part}" for part in ("before", "meanwhile", "ratio")]
    assert [result.name for result in Run.load(saved).results] == [*names, "load", *gaps]
