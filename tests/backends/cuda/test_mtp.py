"""Multi-token prediction on a GPU: the model runs fused and gives hidden states, the head runs op by op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.cuda import CudaBackend
from llm_worker_rbee.backends.ops import Backend
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.engine.model_runner import SingleSequence
from llm_worker_rbee.models.kv_cache import KVCache
from tests.helpers import mtp_models
from tests.helpers.engine_runs import Question, run
from tests.helpers.model_runs import to_numpy


def test_hidden_states_and_logits_of_the_head_equal_torch(tmp_path: Path) -> None:
    """Where a step has logits of all its tokens, and where of the last one."""
    made, ids = mtp_models.make("qwen3_5"), [5, 9, 11]
    model, head = mtp_models.load(made.save_gguf(tmp_path / "m.gguf"), CudaBackend(deterministic=True))
    assert model.fused is not None
    logits, drafts = made.expected(ids)
    for all_logits in (True, False):
        sequence = SingleSequence(model, 16)
        batch = sequence.batch(ids, 0, all_logits=all_logits)
        found, hidden = model.forward_hidden(batch, sequence.cache)
        rows = head.ops.gather_rows(hidden, np.arange(-1, 2))
        drafted, _ = head.forward(replace(batch, hidden=rows), KVCache(head.ops, head.config, 1))
        for values, expected in ((found, logits), (drafted, drafts)):
            assert np.abs(to_numpy(values) - expected[-len(values) :]).max() < 1e-2


def test_answers_are_those_without_drafts(tmp_path: Path) -> None:
    made = mtp_models.make("qwen3_5", predicts_well=True)
    model, head = mtp_models.load(made.save_gguf(tmp_path / "m.gguf"), CudaBackend(deterministic=True))
    answers, engines = [], []
    for drafts in (None, head):
        engine = mtp_models.engine(model, drafts, draft_tokens=3, max_batch=2, max_step_tokens=16)
        requests = [Question((5, 7 + i), 6, {"temperature": 0.0}).request() for i in range(2)]
        run(engine, *requests)
        answers.append([request.tokens for request in requests])
        engines.append(engine)
    assert answers[0] == answers[1]
    assert engines[1].num_steps < engines[0].num_steps
    stats = engines[1].scheduler.stats
    assert stats.num_accepted_tokens == pytest.approx(stats.num_drafted_tokens, abs=2)


@pytest.mark.parametrize("make", [ReferenceBackend, CpuBackend, CudaBackend])
def test_missing_rows_are_zeros_whatever_another_row_holds(make: Callable[[], Backend]) -> None:
    """Index -1 must not read the last row: that of another request may be NaN."""
    ops = make()
    rows = ops.prepare_vector(np.array([[1.0, 2.0], [np.nan, np.inf]], np.float32))
    found = to_numpy(ops.gather_rows(rows, np.array([-1, 0, -1])))
    np.testing.assert_array_equal(found, [[0, 0], [1, 2], [0, 0]])
