"""Parts of ops on the GPU, and the whole suite of micro-benchmarks with them, against the reference."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from llm_worker_bench.backends import op_parts, prepare_calls
from llm_worker_bench.micro import Case, suite, suite_cases, timing
from llm_worker_rbee.backends.cuda import CudaBackend
from llm_worker_rbee.backends.ops import RopeTable
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.layers.rope import inverse_frequencies

cuda = CudaBackend()
reference = op_parts(ReferenceBackend())


def test_rope_rotates_queries_and_stores_keys() -> None:
    q, k = np.random.default_rng(1).standard_normal((2, 20, 4, 32), np.float32)
    positions, table = np.arange(5, 25), RopeTable(inverse_frequencies(10000.0, 32), 1.0)
    wanted = reference.rope(q, k, positions, table)()
    queries, keys = op_parts(cuda).rope(*map(cuda.prepare_vector, (q, k)), positions, table)()
    np.testing.assert_allclose(queries.cpu(), wanted[0], atol=1e-5)
    np.testing.assert_allclose(keys.transpose(1, 2).reshape(-1, 4, 32)[:20].cpu(), wanted[1], atol=1e-5)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("HEADS", 2), ("HEAD_DIM", 16), ("HIDDEN", 32)):
        monkeypatch.setattr(suite, name, value)
    monkeypatch.setattr(timing, "TRIAL_CALLS", 2)
    monkeypatch.setattr(timing, "GRAPH_S", 0.0)
    suite._qkv_weight.cache_clear()
    yield
    suite._qkv_weight.cache_clear()


@pytest.mark.parametrize("case", list(suite_cases()), ids=lambda c: c.name)
@pytest.mark.usefixtures("small")
def test_suite_equals_the_reference(case: Case) -> None:
    wanted, found = case.make(ReferenceBackend())(), case.make(cuda)()
    if isinstance(found, tuple):  # queries; the test above has the keys
        wanted, found = wanted[0], found[0]  # type: ignore[index]
    assert isinstance(found, torch.Tensor)
    np.testing.assert_allclose(found.cpu(), np.asarray(wanted), atol=1e-5)


@pytest.mark.usefixtures("small")
def test_case_is_prepared_as_repeated_calls() -> None:
    calls = []
    case = Case("one/1", lambda ops: lambda: calls.append(1), suite.Work(1.0))
    prepared = case.prepare(cuda)
    assert isinstance(prepared, timing.RepeatedCalls)
    assert prepared.count == 1
    prepared()
    assert calls


@pytest.mark.skipif(cuda.torch_device.type == "cpu", reason="needs a GPU")
def test_prepared_calls_are_replayed_and_waited_for() -> None:
    total, host = torch.zeros(1, device=cuda.torch_device), []

    def add() -> None:
        host.append(1)
        total.add_(1)

    replay = prepare_calls(cuda, add, 7)
    made, before = len(host), int(total)
    replay()
    assert int(total) == before + 7
    assert len(host) == made  # a graph makes no call
