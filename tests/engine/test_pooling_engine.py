"""Packing of sequences into steps, and what becomes of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from llm_worker_rbee.backends.ops import Ints
from llm_worker_rbee.engine.pooling_engine import (
    BLOCK_SIZE,
    MAX_STEP_SEQUENCES,
    Floats,
    PoolingEngine,
    finish_embeddings,
    finish_scores,
)
from llm_worker_rbee.errors import InferenceError, InvalidRequestError

RNG = np.random.default_rng(0)


class HashModel:
    """A row for each sequence that depends on its ids and types alone; id 99 gives NaN."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def run(self, sequences: Sequence[Ints], token_types: Sequence[Ints] | None = None) -> Floats:
        self.steps.append([len(ids) for ids in sequences])
        types = token_types or [np.zeros_like(ids) for ids in sequences]
        return np.array([row(ids, kinds) for ids, kinds in zip(sequences, types, strict=True)], np.float32)


def row(ids: Ints, kinds: Ints) -> list[float]:
    if 99 in ids:
        return [np.nan] * 3
    return [len(ids), float(ids @ np.arange(1, len(ids) + 1)), float(kinds.sum())]


def texts(count: int, longest: int = 200) -> list[Ints]:
    lengths = RNG.integers(1, longest + 1, count)
    return [RNG.integers(0, 90, n).astype(np.int64) for n in lengths]


def drain(engine: PoolingEngine, sizes: dict[int, int]) -> dict[int, Floats]:
    """Return the rows of all requests; each row comes once."""
    found = {request_id: np.full((size, 3), np.nan, np.float32) for request_id, size in sizes.items()}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            assert np.isnan(found[output.id][output.indices]).all()
            found[output.id][output.indices] = output.rows
    return found


@pytest.mark.parametrize("budget", [1, 64, 300, 4096])
def test_every_sequence_is_computed_once_within_the_budget(budget: int) -> None:
    requests = {1: texts(40), 2: texts(1), 3: texts(17, 400)}
    model = HashModel()
    engine = PoolingEngine(model, budget)
    for request_id, sequences in requests.items():
        engine.add(request_id, sequences)
    found = drain(engine, {request_id: len(sequences) for request_id, sequences in requests.items()})
    for request_id, sequences in requests.items():
        np.testing.assert_array_equal(found[request_id], [row(ids, np.zeros_like(ids)) for ids in sequences])
    for lengths in model.steps:
        assert lengths == sorted(lengths)
        blocks = sum(-(-length // BLOCK_SIZE) for length in lengths)
        assert len(lengths) == 1 or blocks * BLOCK_SIZE <= max(budget, BLOCK_SIZE)
    assert (engine.num_sequences, engine.num_steps) == (58, len(model.steps))


def test_short_request_does_not_wait_for_a_long_one() -> None:
    engine = PoolingEngine(HashModel(), 512)
    engine.add(1, texts(1000))
    engine.step()
    engine.add(2, texts(1))
    steps = 0
    while 2 not in {output.id for output in engine.step()}:
        steps += 1
    assert steps <= 1
    assert engine.has_work


def test_long_sequence_does_not_wait_for_short_ones() -> None:
    engine = PoolingEngine(HashModel(), 256)
    for request_id in range(20):
        engine.add(request_id, texts(50, 100))
    engine.add(99, [np.zeros(1000, np.int64)])
    for _ in range(22):
        if 99 in {output.id for output in engine.step()}:
            return
    raise AssertionError("the long sequence was never computed")


def test_step_has_a_bounded_number_of_sequences() -> None:
    model = HashModel()
    engine = PoolingEngine(model, 1 << 20)
    engine.add(1, [np.ones(1, np.int64)] * (MAX_STEP_SEQUENCES + 1))
    engine.step()
    assert len(model.steps[0]) == MAX_STEP_SEQUENCES


def test_token_types_of_some_requests() -> None:
    engine = PoolingEngine(HashModel(), 512)
    engine.add(1, [np.array([1, 2, 3], np.int64)], [np.array([0, 1, 1], np.int64)])
    engine.add(2, [np.array([1, 2, 3], np.int64)])
    found = drain(engine, {1: 1, 2: 1})
    assert (found[1][0, 2], found[2][0, 2]) == (2, 0)


def test_cancelled_request_is_not_computed() -> None:
    engine = PoolingEngine(HashModel(), 64)
    engine.add(1, texts(20))
    engine.add(2, texts(3))
    engine.cancel(1)
    engine.cancel(7)
    assert {output.id for output in engine.step()} == {2}
    engine.cancel(2)
    assert not engine.has_work


def test_values_that_are_not_numbers_end_their_request_only() -> None:
    engine = PoolingEngine(HashModel(), 4096, "tiny.gguf")
    engine.add(1, [np.array([99], np.int64), *texts(2000)])
    engine.add(2, texts(2))
    outputs: dict[int, object] = {}
    while engine.has_work:
        outputs |= {output.id: output.error for output in engine.step()}
    assert outputs[2] is None
    assert isinstance(outputs[1], InferenceError)
    assert "tiny.gguf" in str(outputs[1])


@pytest.mark.parametrize("sequences", [[], [np.zeros(0, np.int64)]])
def test_empty_request_is_refused(sequences: list[Ints]) -> None:
    with pytest.raises(InvalidRequestError, match="one token or more"):
        PoolingEngine(HashModel(), 64).add(1, sequences)


def test_embeddings_are_cut_then_normalized() -> None:
    rows = RNG.standard_normal((5, 8)).astype(np.float32)
    cut = finish_embeddings(rows, 3)
    np.testing.assert_allclose(cut, rows[:, :3] / np.linalg.norm(rows[:, :3], axis=1, keepdims=True), rtol=1e-6)
    np.testing.assert_array_equal(finish_embeddings(rows, normalize=False), rows)
    np.testing.assert_array_equal(finish_embeddings(np.zeros((1, 4), np.float32)), np.zeros((1, 4)))
    for wrong in (0, 9, -1):
        with pytest.raises(InvalidRequestError, match="1 to 8"):
            finish_embeddings(rows, wrong)


def test_same_embedding_alone_and_among_others() -> None:
    rows = RNG.standard_normal((50, 384)).astype(np.float32)
    together = finish_embeddings(rows, 200)
    for i in range(50):
        assert finish_embeddings(rows[i : i + 1], 200).tobytes() == together[i].tobytes()


def test_scores() -> None:
    rows = np.array([[0.0, 2.0], [-800.0, 800.0], [3.0, -1.0]], np.float32)
    np.testing.assert_allclose(finish_scores(rows), np.exp(-np.logaddexp(0, -rows[:, 0])), rtol=1e-5)
    np.testing.assert_array_equal(finish_scores(rows, "identity"), rows[:, 0])
    expected = np.exp(rows[:, 0] - np.logaddexp(rows[:, 0], rows[:, 1]))
    np.testing.assert_allclose(finish_scores(rows, "softmax"), expected, rtol=1e-5)
    assert np.isfinite(finish_scores(rows, "softmax")).all()
