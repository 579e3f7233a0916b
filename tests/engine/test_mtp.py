"""Drafts of a head for multi-token prediction: they never change an answer, and a good head saves steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_worker_rbee.backends import select_backend
from llm_worker_rbee.config import EngineConfig
from llm_worker_rbee.engine import mtp
from llm_worker_rbee.engine.engine import Engine
from llm_worker_rbee.engine.model_runner import SingleSequence
from llm_worker_rbee.errors import InferenceError, InvalidRequestError
from llm_worker_rbee.models import MtpHead, Transformer
from llm_worker_rbee.models.kv_cache import KVCache
from tests.helpers import engine_runs, mtp_models
from tests.helpers.engine_runs import Question

Loaded = tuple[Transformer, MtpHead]


def load(folder: Path, name: str, *, predicts_well: bool) -> Loaded:
    path = mtp_models.make(name, predicts_well=predicts_well).save_gguf(folder / f"{name}.gguf")
    return mtp_models.load(path, select_backend("cpu"))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model whose head predicts the same token as the model itself."""
    return load(tmp_path_factory.mktemp("good"), "qwen3_5", predicts_well=True)


@pytest.fixture(scope="module")
def random_heads(tmp_path_factory: pytest.TempPathFactory) -> list[Loaded]:
    folder = tmp_path_factory.mktemp("random")
    return [load(folder, name, predicts_well=False) for name in ("qwen3_5", "glm4moe")]


def check_answers(loaded: Loaded, questions: list[Question], *, batches: int = 1, **options: Any) -> Engine:
    """Ask in batches; every answer is that of the model alone."""
    model, head = loaded
    made = mtp_models.engine(model, head, **options)
    for i in range(batches):
        asked = questions[i::batches]
        requests = [question.request() for question in asked]
        answers = engine_runs.run(made, *requests)
        for question, request in zip(asked, requests, strict=True):
            expected = engine_runs.alone(model, question)
            assert answers.answer(request).tokens == expected.tokens, question
    assert made.drafter is not None
    return made


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}])
def test_head_that_predicts_well_is_accepted(good: Loaded, options: dict[str, Any]) -> None:
    """The head samples with the draws of the request."""
    questions = [Question((5, 7 + i, 9), 40, options) for i in range(3)]
    made = check_answers(good, questions)
    stats = made.scheduler.stats
    assert stats.num_accepted_tokens / stats.num_drafted_tokens > 0.9
    assert made.num_steps <= 1 + 40 // 4


def test_answers_are_the_same_in_batches_with_chunks_and_prefix_hits(random_heads: list[Loaded]) -> None:
    """Prefixes hit within a batch and from the batch before; a step has few tokens, so prompts come in chunks."""
    for loaded in random_heads:
        questions = engine_runs.some_questions(8, 160, (20, 50))
        made = check_answers(loaded, questions, batches=2, max_step_tokens=24, draft_tokens=3)
        assert made.scheduler.stats.num_hit_tokens > 0
        assert made.scheduler.stats.num_drafted_tokens > 0


def test_preempted_requests_get_the_same_answers(good: Loaded, random_heads: list[Loaded]) -> None:
    for loaded in (good, random_heads[1]):
        questions = [Question(tuple(range(5 + i, 25 + i)), 50, {"temperature": 0.0}) for i in range(4)]
        made = check_answers(loaded, questions, n_blocks=12, prefix_cache=False)
        assert made.scheduler.stats.num_preemptions > 0
    assert made.scheduler.stats.num_drafted_tokens > 0


def test_prefix_hit_does_not_end_drafting(good: Loaded) -> None:
    question = Question(tuple(range(5, 60)), 30, {"temperature": 0.0})
    made = check_answers(good, [question] * 2, batches=2)
    stats = made.scheduler.stats
    assert stats.num_hit_tokens >= 32
    assert stats.num_accepted_tokens / stats.num_drafted_tokens > 0.9


def test_long_steps_are_followed_in_several_passes(random_heads: list[Loaded], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same drafts come of them."""
    questions = engine_runs.some_questions(5, 160, (20, 50))

    def drafts() -> list[list[list[int]]]:
        made = mtp_models.engine(*random_heads[0])
        requests = [question.request() for question in questions]
        for request in requests:
            made.add(request)
        found = []
        while made.has_work:
            made.step()
            found.append([list(request.drafts) for request in requests])
        return found

    whole = drafts()
    monkeypatch.setattr(mtp, "MAX_TOKENS", 7)
    assert drafts() == whole


def test_drafting_with_a_head_is_not_paused(good: Loaded) -> None:
    """Hidden states of plain steps would be lost."""
    made = mtp_models.engine(*good)
    for _ in range(400):
        made.draft_control.observe(1, 1, 1.0)
    assert made.is_drafting


def test_request_that_missed_a_step_gets_no_drafts(good: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of the batch go on with theirs."""
    model, head = good
    made = mtp_models.engine(model, head)
    first, second = (Question((5, 7 + i, 9), 40, {"temperature": 0.0}).request() for i in range(2))
    made.add(first)
    made.step()

    def fail(*arguments: object) -> None:
        raise InferenceError("no hidden states")

    with monkeypatch.context() as patch:
        patch.setattr(MtpHead, "forward", fail)
        made.step()
    made.add(second)
    made.step()
    assert (len(first.drafts), len(second.drafts)) == (0, 4)
    while made.has_work:
        made.step()
    assert first.tokens == engine_runs.alone(model, Question((5, 7, 9), 40, {"temperature": 0.0})).tokens


def test_engine_without_the_head_refuses_mtp(good: Loaded) -> None:
    with pytest.raises(InvalidRequestError, match="speculative mtp needs the head of the model"):
        Engine(good[0], EngineConfig(max_context=64, n_blocks=4, speculative="mtp"))


def test_warm_up_runs_the_head(good: Loaded) -> None:
    made = mtp_models.engine(*good)
    assert made.warm_up().compiled == 0


def head_drafts(loaded: Loaded, ids: list[int], count: int) -> list[int]:
    """Return the drafts of a head that reads a whole sequence at once."""
    model, head = loaded
    sequence = SingleSequence(model, len(ids) + count)
    cache = KVCache(head.ops, head.config, sequence.cache.n_blocks)
    batch = sequence.batch(ids, 0, all_logits=True)
    _, hidden = model.forward_hidden(batch, sequence.cache)
    rows, drafts = np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]]), list[int]()
    while True:
        logits, last = head.forward(replace(batch, hidden=rows), cache)
        drafts.append(int(logits[-1].argmax()))
        if len(drafts) == count:
            return drafts
        batch, rows = sequence.batch(drafts[-1:], len(ids) + len(drafts) - 1, all_logits=True), last[-1:]


def test_drafts_are_those_of_a_head_that_reads_the_whole_sequence(random_heads: list[Loaded]) -> None:
    """In batches and chunks, and after rejected drafts."""
    for loaded in random_heads:
        made = mtp_models.engine(*loaded, max_step_tokens=24, prefix_cache=False)
        prompts = [tuple(range(5 + i, 25 + 7 * i)) for i in range(3)]
        requests = [Question(prompt, 8, {"temperature": 0.0}).request() for prompt in prompts]
        for request in requests:
            made.add(request)
        while made.has_work:
            made.step()
            for request in requests:
                assert not request.drafts or request.drafts == head_drafts(loaded, request.ids, len(request.drafts))
        assert made.scheduler.stats.num_drafted_tokens > 0
