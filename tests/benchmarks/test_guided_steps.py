"""The benchmark of guided steps on a tiny model: every way is measured, and a loss that is too large is an error."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee.engine import async_scheduling
from llm_worker_rbee.engine.async_scheduling import StepPipeline, forced_drafts_pay
from tests.cli.conftest import ROOT
from tests.conftest import DEVICE


@pytest.mark.parametrize(("max_loss", "status"), [("0.999999", 0), ("-1000", 1)])
def test_benchmark_of_guided_steps(
    tiny_file: Path, max_loss: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import guided_steps

    monkeypatch.setattr(async_scheduling, "forced_drafts_pay", forced_drafts_pay)  # restored by this
    monkeypatch.setattr(StepPipeline, "_masked_rows", StepPipeline._masked_rows)
    options = ["--batch", "3", "--tokens", "6", "--rounds", "1", "--device", DEVICE, "--max-loss", max_loss]
    monkeypatch.setattr(sys, "argv", ["guided_steps", str(tiny_file), *options])
    with pytest.raises(SystemExit) as ended:
        guided_steps.main()
    assert ended.value.code == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(found[way]["tokens_per_s"] > 0 and found[way]["tokens_per_step"] >= 1 for way in guided_steps.WAYS)
