"""Anything may happen in any order: requests come and go, steps fail, drafts are right or wrong, the cache is tiny.

After every rule the scheduler's state is consistent and no request reads blocks of another (paper_scheduler.py checks
both); from any state the scheduler comes to an end, and every request that was not aborted has the right output.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from llm_worker_rbee.engine import scheduler
from llm_worker_rbee.engine.request import BATCH_PRIORITY, Request
from llm_worker_rbee.engine.step_time import StepTimeCoefficients
from tests.helpers.engine_runs import clear_prefix_cache
from tests.helpers.paper_scheduler import ALPHABET, END, PaperScheduler, answer_of, some_drafts

BLOCKS, SIZE = 6, 3
LONGEST = BLOCKS * SIZE + 1  # what fits: keys and values of the last token are never needed
Prompts = st.lists(st.sampled_from(ALPHABET[:2]), min_size=1, max_size=LONGEST - 1)


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler in trouble."""

    @initialize(batch=st.integers(1, 4), caching=st.booleans(), slots=st.sampled_from((0, 3, 8, 14)))
    def start(self, batch: int, caching: bool, slots: int) -> None:
        """With slots the model has states beside keys and values."""
        self.paper = PaperScheduler(
            n_blocks=BLOCKS, block_size=SIZE, max_batch=batch, prefix_cache=caching, n_slots=slots
        )
        self.ended: set[Request] = set()  # from outside
        self.last_prompt = [0]

    @rule(
        prompt=Prompts,
        answer=st.integers(1, LONGEST),
        priority=st.sampled_from((0, 0, 0, 1, -1, BATCH_PRIORITY, BATCH_PRIORITY)),
        scored=st.booleans(),
        end=st.booleans(),
        like_the_last=st.integers(0, LONGEST - 1),
        deadline=st.sampled_from((None, None, 1.0, 2.0)),
    )
    def add(self, prompt: list[int], answer: int, like_the_last: int, **options: Any) -> None:
        prompt = (self.last_prompt[:like_the_last] + prompt)[: LONGEST - 1]
        self.last_prompt = prompt
        self.paper.request(prompt, min(answer, LONGEST - len(prompt)), **options)

    @precondition(lambda self: self.paper.answers)
    @rule(which=st.integers(0, 30), more=Prompts)
    def go_on(self, which: int, more: list[int]) -> None:
        """Ask with all that was said until now, as a conversation does."""
        before = list(self.paper.answers)[which % len(self.paper.answers)]
        prompt = (before.ids + more)[: LONGEST - 1]
        self.paper.request(prompt, LONGEST - len(prompt))

    @rule(budget=st.integers(0, 12), luck=st.randoms(use_true_random=False))
    def step(self, budget: int, luck: random.Random) -> None:
        had_work = self.paper.scheduler.has_work
        assert bool(self.paper.step(budget)) == had_work
        for request in self.paper.scheduler.running:
            if luck.random() < 0.2:  # as a draft model does
                room = self.paper.scheduler.reserve(request, request.num_tokens + 3)
                assert room <= len(request.blocks) * SIZE
            request.drafts = some_drafts(luck, request, 5)

    @precondition(lambda self: self.paper.scheduler.has_work)
    @rule(budget=st.integers(0, 12))
    def failing_step(self, budget: int) -> None:
        self.ended |= {span.request for span in self.paper.step(budget, failing=True)}

    @precondition(lambda self: self.paper.scheduler.running)
    @rule(which=st.integers(0, 9), budget=st.integers(0, 12))
    def step_that_breaks_one(self, which: int, budget: int) -> None:
        running = self.paper.scheduler.running
        broken = running[which % len(running)]
        self.paper.step(budget, broken=[broken])
        if self.paper.finished.get(broken) == "error":
            self.ended.add(broken)

    @precondition(lambda self: self.paper.scheduler.has_work)
    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        scheduler = self.paper.scheduler
        requests = scheduler.running + scheduler.waiting
        request = requests[which % len(requests)]
        assert scheduler.remove(request)
        assert not request.blocks
        self.ended.add(request)

    @rule(now=st.sampled_from((0.5, 1.0, 2.0)))
    def time_passes(self, now: float) -> None:
        outputs = self.paper.scheduler.expire(now)
        self.paper.take(outputs)
        self.ended |= {output.request for output in outputs}

    @rule(seconds=st.sampled_from((1.0, 6.0, 61.0)))
    def requests_wait(self, seconds: float) -> None:
        self.paper.now += seconds

    @rule(coefficients=st.sampled_from((None, (1.0, 0.5, 0.1, 0.0), (0.01, 0.0, 1e-4, 1e-6), (1e-3, 1e-3, 1.0, 0.1))))
    def steps_take(self, coefficients: tuple[float, float, float, float] | None) -> None:
        known = None if coefficients is None else StepTimeCoefficients(*coefficients)
        self.paper.share.step_time.coefficients = known

    @rule()
    def evict(self) -> None:
        clear_prefix_cache(self.paper.scheduler.pool)

    @precondition(lambda self: self.paper.scheduler.states is not None)
    @rule()
    def evict_states(self) -> None:
        states = self.paper.scheduler.states
        assert states is not None
        clear_prefix_cache(states._pool)

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "paper"):
            return
        scheduler = self.paper.scheduler
        scheduler.check()
        assert len(scheduler.running) <= self.paper.config.max_batch
        present = [*scheduler.running, *scheduler.waiting]
        gone = self.ended | set(self.paper.finished)
        assert set(present) == set(self.paper.answers) - gone, "a request is lost, or is here although it has ended"
        for request, said in self.paper.answers.items():
            expected = answer_of(request).tokens
            assert said == request.tokens == expected[: len(said)]
            assert END not in said or not request.eos_ids

    def teardown(self) -> None:
        if not hasattr(self, "paper"):
            return
        # Each step brings the first in the order at least one token further, and no request comes before it any more.
        most = sum(len(r.prompt) + r.max_tokens for r in self.paper.answers if r not in self.paper.finished)
        self.paper.run(1, most=most + 1)
        for request in set(self.paper.answers) - self.ended:
            self.paper.require_answers(request)


def test_scheduler_state_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        scheduler, "max_scored_tokens", lambda _: 4
    )  # so that short prompts are scored in several steps
    steps = settings(max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(SchedulerMachine, settings=steps)
