"""Graphs whose capture fails; captured ones need a GPU (test_gpu.py)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from llm_worker_rbee.backends.cuda.cuda_graphs import CudaGraphs  # noqa: E402


def test_step_that_cannot_be_captured_runs_uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, attempts = CudaGraphs(torch.device("cuda", 0)), []

    def fail(key: object, step: object) -> None:
        attempts.append(key)
        raise torch.OutOfMemoryError("no memory for a graph")

    monkeypatch.setattr(graphs, "capture", fail)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 31))
    result = torch.ones(2)
    for _ in range(4):
        assert graphs.run(8, lambda: result) is result
    assert attempts == [8]
    graphs.clear()
    for _ in range(3):
        assert graphs.run(8, lambda: result) is result
    assert attempts == [8, 8]
