"""`benchmarks.batch` on a small model: a batch and an engine without a server, a chat alone and beside a batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import batch
from llm_worker_bench.results import Run
from tests.cli.conftest import write_model
from tests.conftest import DEVICE, with_kernels

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests the command")


def test_rates_and_gaps_are_measured_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROMPT": 8, "ANSWER": 4, "CHAT_PROMPT": 8, "CHAT_ANSWER": 600, "SETTLE_S": 0.1}.items():
        monkeypatch.setattr(batch, name, value)
    monkeypatch.setattr(batch, "MAX_TOKEN", 200)
    model, saved = with_kernels(write_model(tmp_path / "tiny.gguf", context=1 << 14)), tmp_path / "run.json.gz"
    counts = ["--lines", "20", "--pairs", "1", "--chats", "1", "--serve-args", "--kv-memory 64M"]
    assert batch.main([str(model), *counts, "--save", str(saved)]) == 0
    names = [f"{row}/{side}" for row in ("gap_p95", "first_token") for side in ("alone", "beside")]
    found = {result.name for result in Run.load(saved).results}
    assert found == {*names, "gap_p95/ratio", "first_token/later", "output/batch", "output/engine", "output/ratio"}
