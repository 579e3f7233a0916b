"""Graphs whose capture fails; captured ones need a GPU (test_gpu.py)."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from llm_worker_rbee.backends.cuda.cuda_graphs import CudaGraphs  # noqa: E402


def test_step_that_cannot_be_captured_runs_uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver without memory for a graph is asked once, and again after `clear`."""
    driver = {"Stream", "CUDAGraph", "graph_pool_handle", "current_stream", "empty_cache"}
    parts = {name: mock.Mock(name=name) for name in driver}
    begin = parts["CUDAGraph"].return_value.capture_begin
    begin.side_effect = torch.OutOfMemoryError("no memory for a graph")
    for name, part in parts.items():
        monkeypatch.setattr(torch.cuda, name, part)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 31))
    graphs, result = CudaGraphs(torch.device("cuda", 0)), torch.ones(2)
    for _ in range(4):
        assert graphs.run(8, lambda: result) is result
    assert begin.call_count == 1
    graphs.clear()
    for _ in range(3):
        assert graphs.run(8, lambda: result) is result
    assert begin.call_count == 2
    assert len(graphs) == graphs.num_captures == 0
