"""Snapshots of states: where they are taken, found, shared, thinned and evicted. test_scheduler_state_machine.py and
test_engine_same_answer.py let anything happen to them."""

from __future__ import annotations

import pytest

from llm_worker_rbee.engine.request import Request
from llm_worker_rbee.engine.state_pool import SLOTS_PER_REQUEST, StatePool, default_slots
from llm_worker_rbee.errors import InvalidRequestError
from tests.helpers.paper_scheduler import PaperPipeline, PaperScheduler

SIZE = 4


def paper(n_slots: int = 32, **options: int) -> PaperScheduler:
    return PaperScheduler(block_size=SIZE, n_slots=n_slots, **options)


def snapshots(scheduler: PaperScheduler, request: Request) -> list[int]:
    """The tokens after which the request's prefix has snapshots."""
    states = scheduler.scheduler.states
    assert states is not None
    return [SIZE * (i + 1) for i, known in enumerate(request.hashes) if states._pool.is_cached(known)]


def test_prompts_are_cut_at_full_blocks_and_leave_snapshots() -> None:
    made = paper()
    request = made.request([0, 1, 2] * 7, 1)  # 21 tokens
    made.step(10)
    assert request.num_computed_tokens == 8  # not 10
    made.run(10)
    made.require_answers(request)
    assert snapshots(made, request) == [8, 16]


def test_last_full_block_of_a_prompt_is_a_snapshot_that_others_start_from() -> None:
    made = paper()
    prompt = [0, 1, 2] * 7
    requests = [made.request(prompt, 3) for _ in range(4)]  # as `n` does
    made.run()
    made.require_answers(*requests)
    assert [request.num_cached_tokens for request in requests] == [0, 20, 20, 20]
    assert made.computed == 20 + 4 * 1 + 4 * 2  # the prompt once, its last token and the answers each


def test_short_gain_is_not_worth_a_step() -> None:
    made = paper()
    request = made.request([0, 1, 2, 0, 1, 2, 0], 1)
    made.step()
    assert made.finished[request] == "length"


def test_answers_leave_their_last_full_block_alone() -> None:
    made = paper()
    request = made.request([0] * 9, 14)
    made.run()
    assert snapshots(made, request) == [8, 20]
    again = made.request([*request.ids[:22], 1], 2)
    made.run()
    assert again.num_cached_tokens == 20


def test_preempted_request_goes_on_from_a_snapshot() -> None:
    made = paper()
    request = made.request([0, 1] * 5, 12)
    made.run_until(lambda: len(request.tokens) == 8)
    made.scheduler._preempt(request)
    made.scheduler.check()
    made.step()
    assert request.num_shared_tokens == 16
    made.run()
    made.require_answers()


def test_aborted_prefill_leaves_its_snapshots() -> None:
    made = paper()
    prompt = [0, 1, 2] * 10
    made.scheduler.remove(_started(made, prompt))
    again = made.request(prompt, 2)
    made.run()
    assert again.num_cached_tokens == 8
    made.require_answers(again)


def test_failed_request_leaves_no_snapshot() -> None:
    made = paper()
    _started(made, [0, 1, 2] * 10)
    made.step(8, failing=True)
    states = made.scheduler.states
    assert states is not None
    assert (states.num_snapshots, states.num_used) == (0, 0)


def _started(made: PaperScheduler, prompt: list[int]) -> Request:
    request = made.request(prompt, 2)
    made.step(8)
    return request


def test_fewer_requests_run_where_slots_are_few() -> None:
    made = paper(2 * SLOTS_PER_REQUEST + 1)
    requests = [made.request([i % 3, 1, 2], 3) for i in range(4)]
    made.step()
    assert len(made.scheduler.running) == 2
    made.run()
    made.require_answers(*requests)


def test_drafts_of_all_requests_share_the_slots_that_are_left() -> None:
    made = paper(14, max_batch=4)
    requests = [made.request([i % 3, 1, 2], 9) for i in range(4)]
    made.step()
    for request in made.scheduler.running:
        request.drafts = [0, 1, 2]
    made.run()
    made.require_answers(*requests)


def test_prompts_with_the_same_beginning_leave_a_snapshot_where_they_differ() -> None:
    made = paper()
    shared, found = [0, 1, 2] * 4, []
    for end in range(3):
        found.append(made.request([*shared, *[end] * 9], 1))
        made.run()
    made.require_answers(*found)
    assert [request.num_cached_tokens for request in found] == [0, 0, 12]


def test_without_a_prefix_cache_chunks_are_not_cut() -> None:
    made = paper(prefix_cache=False)
    request = made.request([0, 1, 2] * 7, 1)
    made.step(10)
    assert request.num_computed_tokens == 10


def test_steps_launched_ahead_write_states_of_their_own() -> None:
    made = PaperPipeline(block_size=SIZE, n_slots=3 * SLOTS_PER_REQUEST, max_batch=3)
    requests = [made.request([i % 3, 1, 2] * 4, 9, end=i == 1) for i in range(5)]
    made.run(7)
    made.require_answers(*requests)
    assert made.num_ahead


def test_slots() -> None:
    assert default_slots(2, draft_tokens=4) - default_slots(1, draft_tokens=4) == SLOTS_PER_REQUEST + 4
    with pytest.raises(InvalidRequestError, match="n_slots is 2: a request needs 3"):
        StatePool(2, 1, SIZE)
