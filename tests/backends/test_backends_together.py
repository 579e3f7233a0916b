"""Two CPU backends with different thread counts and the reference in one process, called from two Python threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from llm_worker_rbee import machine
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.ops import Backend, SampleRow
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.weights.quants import BLOCK_TYPES
from tests.helpers.synthetic import random_tensor

ROUNDS = 12
TENSOR = random_tensor(BLOCK_TYPES["Q4_0"], (96, 256))
X = np.random.default_rng(1).standard_normal((5, 256), np.float32)
NORM = np.ones(256, np.float32)
ROWS = [SampleRow(seed=seed, top_p=0.9) for seed in range(len(X))]


def compute(backend: Backend, weight: Any) -> tuple[np.ndarray, list[int]]:
    logits = backend.linear(backend.rms_norm(X, NORM, 1e-5), weight)
    return logits, backend.sample(logits, ROWS).tolist()


@pytest.mark.skipif(machine.usable_cores() < 2, reason="two threads need two cores")
def test_backends_of_different_thread_counts_interleaved_give_the_same_results() -> None:
    backends: list[Backend] = [CpuBackend(1), CpuBackend(2), ReferenceBackend()]
    assert [backend.threads for backend in backends] == [1, 2, None]
    weights = [backend.prepare([TENSOR]) for backend in backends]
    expected = [compute(backend, weight) for backend, weight in zip(backends, weights, strict=True)]
    np.testing.assert_array_equal(expected[0][0], expected[1][0])
    assert expected[0][1] == expected[1][1]
    np.testing.assert_allclose(expected[0][0], expected[2][0], atol=0.03 * np.abs(expected[2][0]).max())
    failures: list[BaseException] = []

    def interleave(first: int) -> None:
        try:
            for turn in range(ROUNDS):
                number = (first + turn) % len(backends)
                logits, tokens = compute(backends[number], weights[number])
                np.testing.assert_array_equal(logits, expected[number][0])
                assert tokens == expected[number][1]
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=interleave, args=(first,)) for first in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
