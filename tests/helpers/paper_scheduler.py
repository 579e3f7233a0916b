"""A scheduler run on paper: no arrays, no model. Each slot of the cache holds the text that its keys and values would
stand for, so a block that is read before it is written, after it was given away, or by the wrong request is seen."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast
from zlib import crc32

from llm_worker_rbee.config import EngineConfig
from llm_worker_rbee.engine.async_scheduling import InFlightStep, still_running
from llm_worker_rbee.engine.request import Request, SamplerOutput, ScheduledTokens, StepOutput
from llm_worker_rbee.engine.scheduler import PrefillBudget, Scheduler
from llm_worker_rbee.engine.step_time import BatchShare
from llm_worker_rbee.errors import InferenceError
from llm_worker_rbee.sampling_params import SamplingParams, TokenLogprob

END = 3
ALPHABET = (0, 1, 2)
PLENTY = 10_000  # a token budget that is never reached


def next_token(ids: Sequence[int]) -> int:
    """The model: any of the alphabet, or the end, by all that was said."""
    return crc32(bytes(ids)) // 7 % 4


class Answer(NamedTuple):
    """What must come of a request, whatever happens around it."""

    tokens: list[int]
    finish: str


def answer_of(request: Request) -> Answer:
    ids: list[int] = list(request.prompt)
    while len(ids) < len(request.prompt) + request.max_tokens:
        token = next_token(ids)
        if token in request.eos_ids:
            return Answer(ids[len(request.prompt) :], "stop")
        ids.append(token)
    return Answer(ids[len(request.prompt) :], "length")


class PaperScheduler:
    """A scheduler with its paper cache, and what came out for whom."""

    def __init__(self, **options: Any) -> None:
        # max_step_tokens: the fewest tokens of prompts in a step, however small the budget
        settings = {"max_context": 10_000, "n_blocks": 64, "block_size": 4, "max_batch": 8, "max_step_tokens": 1}
        self.config = EngineConfig(**{**settings, **options})
        self.now = 0.0
        self.share = BatchShare(clock=lambda: self.now)
        self.scheduler = Scheduler(self.config, n_slots=self.config.n_slots, share=self.share)
        self.states: list[tuple[int, ...]] = [()] * self.config.n_slots  # what each slot's state stands for
        self.slots: list[list[tuple[int, ...]]] = [[()] * self.config.block_size for _ in range(self.config.n_blocks)]
        self.answers: dict[Request, list[int]] = {}
        self.finished: dict[Request, str] = {}
        self.computed = 0  # tokens, all together
        self._arrivals = 0

    def request(self, prompt: Iterable[int], max_tokens: int = 4, *, end: bool = False, **options: Any) -> Request:
        """Made and added."""
        scored = options.pop("scored", False)
        params = SamplingParams(prompt_logprobs=scored).resolve()
        eos = frozenset({END}) if end else frozenset()
        made = Request(list(prompt), params, max_tokens, 0, eos, arrival=self._arrivals, **options)
        self._arrivals += 1
        self.scheduler.add(made)
        self.answers[made] = []
        return made

    def step(
        self, budget: int | PrefillBudget = PLENTY, *, failing: bool = False, broken: Sequence[Request] = ()
    ) -> list[ScheduledTokens]:
        """One step, its state checked before and after; `failing` as a whole, or giving nothing for the broken ones."""
        spans = self.scheduler.schedule(budget)
        self.scheduler.check()
        assert len({span.request for span in spans}) == len(spans), "a request is twice in a step"
        if failing:
            outputs = self.scheduler.fail(spans, InferenceError("broken"))
        else:
            outputs = self.scheduler.update(spans, self._compute(spans, broken))
        self.scheduler.check()
        self.take(outputs)
        return spans

    def take(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            assert output.request not in self.finished, "something came of a request that had ended"
            if output.finish_reason is not None:
                self.finished[output.request] = output.finish_reason
            if output.finish_reason not in ("stop", "error"):
                self.answers[output.request].append(output.token)

    def run(self, budget: int = PLENTY, *, most: int = 2_000) -> int:
        """To the end; how many steps."""
        for steps in range(most):
            if not self.scheduler.has_work:
                self.require_idle()
                return steps
            assert self.step(budget), "a step with nothing to do although there is work"
        raise AssertionError(f"not at an end after {most} steps")

    def run_until(self, happened: Callable[[], object]) -> None:
        while not happened():
            assert self.scheduler.has_work, "it did not happen"
            self.step()

    def require_idle(self) -> None:
        self.scheduler.check()
        assert self.scheduler.pool.num_free == self.config.n_blocks, "blocks are still owned"
        assert not self.scheduler._in_flight
        assert self.scheduler.states is None or not self.scheduler.states.num_used, "states are still owned"

    def require_answers(self, *requests: Request) -> None:
        for request in requests or tuple(self.answers):
            assert (self.answers[request], self.finished[request]) == answer_of(request)
            assert request.tokens == self.answers[request]
            if request.prompt_logprobs is not None:
                assert [None if x is None else x.token for x in request.prompt_logprobs] == [None, *request.prompt[1:]]

    def tokens_of(self, spans: Sequence[ScheduledTokens]) -> dict[Request, int]:
        return {span.request: span.stop - span.start for span in spans}

    def _compute(self, spans: Sequence[ScheduledTokens], broken: Sequence[Request]) -> SamplerOutput:
        sampled, written = SamplerOutput([]), set[tuple[int, int]]()
        if self.scheduler.states is not None:
            self._compute_states(spans)
        for request, start, stop, wanted_from in spans:
            said = self._said(request)
            assert start == request.num_computed_tokens + request.num_in_flight_tokens < stop <= len(said)
            for at in range(stop):
                block, offset = request.blocks[at // self.config.block_size], at % self.config.block_size
                if at >= start:
                    assert (block, offset) not in written, "two requests write to one place"
                    written.add((block, offset))
                    self.slots[block][offset] = tuple(said[: at + 1])
            self.computed += stop - start
            _score(request, stop, wanted_from)
        for request, start, stop, _ in spans:
            self._require_context(request, start)
            if request in broken:
                sampled.failed[request] = InferenceError("not finite")
            elif stop >= len(known := self._known(request)):
                said = self._said(request)
                sampled.tokens += [next_token(said[:n]) for n in range(len(known), stop + 1)]
        return sampled

    def _compute_states(self, spans: Sequence[ScheduledTokens]) -> None:
        """Go on from the state of each request, and write others, which no other request of the step uses."""
        read = {one.request.states[one.start] for one in spans if one.start}
        written = set[int]()
        for request, start, stop, _ in spans:
            said, known = self._said(request), len(self._known(request))
            if start:
                assert self.states[request.states[start]] == tuple(said[:start]), "a state is not of its request"
            kept = {at: slot for at, slot in request.states.items() if start < at <= stop}
            assert list(kept) == (list(range(start + 1, stop + 1)) if stop > known else [stop])
            assert not (written | read) & set(kept.values()), "a state is written that another one needs"
            written |= set(kept.values())
            for at, slot in kept.items():
                self.states[slot] = tuple(said[:at])

    def _known(self, request: Request) -> list[int]:
        """Its tokens, as the device has them."""
        return request.ids

    def _said(self, request: Request) -> list[int]:
        return self._known(request) + request.drafts

    def _require_context(self, request: Request, length: int) -> None:
        """All before its new tokens is still there, after all requests have written."""
        for at in range(length):
            block, offset = request.blocks[at // self.config.block_size], at % self.config.block_size
            assert self.slots[block][offset] == tuple(self._known(request)[: at + 1]), "it reads what is not its own"


class PaperPipeline(PaperScheduler):
    """A scheduler whose next step is computed, where it can be, before the tokens of the one before are applied."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.num_ahead = 0
        self.in_flight: tuple[InFlightStep, list[int]] | None = None
        self._pending: list[int] = []

    def step(
        self, budget: int = PLENTY, *, failing: bool = False, broken: Sequence[Request] = ()
    ) -> list[ScheduledTokens]:
        assert not failing
        assert not broken
        launched = self.in_flight or self._launch(budget)
        self.in_flight = None
        if launched is None:
            return []
        step, self._pending = launched
        with step.assume_collected():
            if self.scheduler.can_schedule_ahead():
                before = self.scheduler.stats.num_preemptions
                self.in_flight = self._launch(budget)
                assert self.scheduler.stats.num_preemptions == before, "a request of the step in flight lost its blocks"
                self.num_ahead += self.in_flight is not None
        running, tokens = still_running(step.scheduled), zip(step.sampled, self._pending, strict=True)
        assert all(one.start == one.request.num_computed_tokens for one in running)
        kept = SamplerOutput([token for request, token in tokens if not request.is_finished])
        self.take(self.scheduler.update(running, kept))
        self.scheduler.check()
        return step.scheduled

    def _launch(self, budget: int) -> tuple[InFlightStep, list[int]] | None:
        """Compute the next step as the device does, which knows the tokens of the one before."""
        spans = self.scheduler.schedule(budget)
        if not spans:
            return None
        assert not any(span.request.is_finished for span in spans)
        sampled = [span.request for span in spans if span.logits_from < span.stop]
        return InFlightStep(spans, sampled, cast(Any, None)), self._compute(spans, ()).tokens

    def _known(self, request: Request) -> list[int]:
        return request.ids if request.pending_row < 0 else [*request.ids, self._pending[request.pending_row]]


def _score(request: Request, stop: int, wanted_from: int) -> None:
    if not request.num_unscored_tokens:
        known = len(request.ids) + (request.pending_row >= 0)
        assert wanted_from == (known - 1 if stop >= known else stop)
        return
    assert request.prompt_logprobs is not None
    for at in range(wanted_from, min(stop, len(request.prompt) - 1)):
        assert len(request.prompt_logprobs) == at + 1, "a token is scored twice or left out"
        request.prompt_logprobs.append(TokenLogprob(request.prompt[at + 1], 0.0))


def some_drafts(rng: random.Random, request: Request, most: int) -> list[int]:
    """Draft tokens, some of them right, as long as a drafter may make them."""
    room = min(most, request.num_prompt_tokens + request.max_tokens - len(request.ids) - 1)
    if request.num_computed_tokens != len(request.ids) - 1 or room <= 0:
        return []
    said, drafts = list(request.ids), list[int]()
    for _ in range(rng.randint(0, room)):
        token = next_token(said) if rng.random() < 0.8 else rng.choice(ALPHABET)
        drafts.append(token)
        said.append(token)
    return drafts
