"""Batch work beside other requests: which steps it joins, what makes room for it, and that nothing waits for ever."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_worker_rbee.engine.request import BATCH_PRIORITY, Request, ScheduledTokens
from llm_worker_rbee.engine.scheduler import MAX_WAIT_S
from llm_worker_rbee.engine.step_time import (
    LONG_STEP_S,
    MAX_GROWTH,
    QUIET_S,
    TURN_S,
    StepTimeCoefficients,
    step_size,
)
from llm_worker_rbee.engine.step_time import MAX_BATCH_STEP_S as MAX_STEP_S
from llm_worker_rbee.models import Transformer
from tests.helpers.engine_runs import (
    LFM2,
    SMALL,
    Listener,
    Question,
    alone,
    engine,
    load,
    require_idle,
    run,
    small_file,
)
from tests.helpers.paper_scheduler import PaperScheduler

CPU = StepTimeCoefficients(0.010, 0.002, 0.002, 1e-7)  # a row more takes a fifth of a step
GPU = StepTimeCoefficients(0.010, 0.002, 2e-5, 1e-9)


def seconds(paper: PaperScheduler, step: list[ScheduledTokens]) -> float:
    predicted = paper.share.step_time.predict(step_size(step, 1))
    assert predicted is not None
    return predicted


def batch_rows(step: list[ScheduledTokens]) -> list[Request]:
    return [item.request for item in step if item.request.priority >= BATCH_PRIORITY]


def decoding(coefficients: StepTimeCoefficients, num_batch: int = 6) -> PaperScheduler:
    """A scheduler in which a chat and batch rows decode."""
    paper = PaperScheduler(n_blocks=512, max_batch=16)
    paper.share.step_time.coefficients = coefficients
    rows = [paper.request([i, 7, 8, i], 200, priority=BATCH_PRIORITY) for i in range(num_batch)]
    paper.run_until(lambda: all(row.num_tokens > 6 for row in rows))
    chat = paper.request([9, 9, 9, 9, 9], 100)
    paper.run_until(lambda: chat.num_tokens > 6)
    return paper


def test_batch_rows_wait_beside_a_chat_where_they_would_be_felt() -> None:
    paper = decoding(CPU)
    for _ in range(50):
        assert not batch_rows(paper.step())
    assert len(paper.scheduler.running) == 7, "none was preempted"
    paper.run()
    paper.require_answers()


def test_batch_rows_join_a_step_while_it_grows_by_a_twentieth() -> None:
    paper = decoding(GPU)
    for _ in range(20):
        step = paper.step()
        rows = batch_rows(step)
        others = [item for item in step if item.request not in rows]
        assert len(rows) == 6
        assert seconds(paper, step) <= (1 + MAX_GROWTH) * seconds(paper, others)


def test_batch_gets_a_step_now_and_then() -> None:
    paper = decoding(CPU)
    assert not batch_rows(paper.step())
    paper.now += TURN_S
    assert batch_rows(step := paper.step())
    assert seconds(paper, step) <= seconds(paper, step[:1]) + MAX_STEP_S
    assert not batch_rows(paper.step())


@settings(deadline=None, max_examples=60)
@given(
    constant=st.floats(1e-4, 0.05),
    per_token=st.floats(1e-6, 0.02),
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=12),
)
def test_step_of_batch_work_alone_is_short(constant: float, per_token: float, lengths: list[int]) -> None:
    """A request that arrives waits for it."""
    paper = PaperScheduler(n_blocks=4096, max_batch=16, max_step_tokens=512)
    paper.share.step_time.coefficients = StepTimeCoefficients(constant, constant / 4, per_token, per_token / 1000)
    for i, length in enumerate(lengths):
        paper.request([(i + k) % 251 for k in range(length)], 20, priority=BATCH_PRIORITY)
    while paper.scheduler.has_work:
        step = paper.step()
        chunks = [item for item in step if item.stop - item.start > 1]
        decodes = [item for item in step if item not in chunks]
        shortest = decodes[:1] + [item._replace(stop=item.start + min(16, item.stop - item.start)) for item in chunks]
        assert seconds(paper, step) <= 1.001 * max(MAX_STEP_S, seconds(paper, shortest)) + 16 * per_token * 1.5
    paper.require_answers()


def test_long_steps_once_no_request_came_for_a_while() -> None:
    """Where a step can be given up; a request that comes makes them short again."""
    paper = PaperScheduler(n_blocks=4096, max_batch=16, max_step_tokens=512)
    paper.share.step_time.coefficients = CPU
    rows = [paper.request([i] * 400, 100, priority=BATCH_PRIORITY) for i in range(8)]
    assert seconds(paper, paper.step()) <= MAX_STEP_S
    paper.share.max_step_s /= 2  # as with two steps under way
    assert seconds(paper, paper.step()) <= 0.6 * MAX_STEP_S  # at least 16 tokens of a prompt
    paper.share.max_step_s *= 2
    paper.share.long_step_s = LONG_STEP_S
    assert MAX_STEP_S < seconds(paper, paper.step()) <= LONG_STEP_S
    assert paper.share.is_long
    chat = paper.request([99] * 5, 2)
    paper.run_until(lambda: chat in paper.finished)
    assert seconds(paper, paper.step()) <= MAX_STEP_S
    assert not paper.share.is_long
    paper.now += QUIET_S
    assert seconds(paper, paper.step()) > MAX_STEP_S
    assert not any(row in paper.finished for row in rows)


def test_steps_are_short_after_a_request_that_had_no_batch_work_beside_it() -> None:
    paper = PaperScheduler(n_blocks=4096, max_batch=16, max_step_tokens=512)
    paper.share.step_time.coefficients, paper.share.long_step_s = CPU, LONG_STEP_S
    chat = paper.request([99] * 5, 300)
    while chat not in paper.finished:
        paper.step()
        paper.now += 0.1
    assert paper.now > QUIET_S
    for i in range(8):
        paper.request([i] * 400, 100, priority=BATCH_PRIORITY)
    assert seconds(paper, paper.step()) <= MAX_STEP_S
    paper.now += QUIET_S
    assert seconds(paper, paper.step()) > MAX_STEP_S


def test_chat_takes_blocks_and_places_of_batch_rows() -> None:
    paper = PaperScheduler(n_blocks=16, max_batch=4)
    rows = [paper.request([i] * 9, 3, priority=BATCH_PRIORITY) for i in range(4)]
    paper.step()
    chats = [paper.request([50 + i] * 15, 2) for i in range(3)]
    paper.run_until(lambda: all(chat.num_tokens > 15 for chat in chats))
    assert not any(row.num_tokens > 10 for row in rows), "a batch row went on beside a chat"
    assert sum(row.num_preemptions for row in rows) >= 2
    paper.run()
    paper.require_answers()


@pytest.mark.parametrize("priority", [5, BATCH_PRIORITY])
def test_request_behind_more_urgent_ones_gets_a_place_in_the_end(priority: int) -> None:
    paper = PaperScheduler(max_batch=2)
    for _ in range(2):
        paper.request([1, 2, 3], 5)
    waiting = paper.request([7, 7], 3, priority=priority)
    for _ in range(200):
        paper.request([1, 2, 3], 5)
        paper.step()
        paper.now += 1.0
        if waiting in paper.finished:
            break
    assert MAX_WAIT_S <= paper.now <= MAX_WAIT_S + 15
    paper.run()
    paper.require_answers()


@pytest.fixture(scope="module", params=["llama", "lfm2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    variant = {"llama": SMALL, "lfm2": LFM2}[request.param]
    return load(small_file(tmp_path_factory.mktemp("batch-share") / "small.gguf", "Q4_1", variant=variant))


def test_steps_that_are_given_up_change_no_answer(model: Transformer) -> None:
    """Stopped at random places of random steps, with other requests between them."""
    rng, requests, num_stops = random.Random(3), [], 0
    questions = [
        Question(tuple(rng.randint(3, 140) for _ in range(length)), 8, {"temperature": 1.2, "seed": length})
        for length in (3, 40, 90, 17, 64)
    ]

    def has_urgent() -> bool:
        nonlocal num_stops
        is_urgent = rng.random() < 0.25
        num_stops += is_urgent
        return is_urgent

    serving, listener = engine(model, max_step_tokens=32), Listener()
    serving.stop_for(has_urgent)
    for question in questions:
        requests.append(question.request(priority=BATCH_PRIORITY))
        serving.add(requests[-1])
    while serving.has_work:
        before, serving.share._last_other = num_stops, -math.inf  # as if much time had passed
        outputs = serving.step()
        assert not (outputs and num_stops > before), "a step that was given up had outputs"
        listener.take(outputs)
        if num_stops > before and rng.random() < 0.3:
            questions.append(questions[0])
            requests.append(questions[0].request())
            serving.add(requests[-1])
    require_idle(serving)
    assert num_stops > 5
    assert [listener.answer(request) for request in requests] == [alone(model, question) for question in questions]


def test_steps_are_short_after_one_that_was_given_up(model: Transformer) -> None:
    """The request that came may wait for its grammar, and is not in the scheduler yet."""
    serving, num_asked = engine(model), 0

    def has_urgent() -> bool:
        nonlocal num_asked
        num_asked += 1
        return True

    serving.stop_for(has_urgent)
    row = Question(tuple(range(5, 60)), 3, {"temperature": 0.0})
    listener = run(serving, request := row.request(priority=BATCH_PRIORITY))
    assert num_asked == 1
    assert listener.answer(request) == alone(model, row)


def test_a_step_with_other_requests_is_not_given_up(model: Transformer) -> None:
    serving = engine(model)
    serving.stop_for(lambda: True)
    chat = Question((5, 6, 7), 4, {"temperature": 0.0})
    listener = run(serving, request := chat.request())
    assert listener.answer(request) == alone(model, chat)
