"""Which tokens are computed in the next step, and what a step changed. There are no phases: a request has `num_tokens`
and `num_computed_tokens`, and every step lets the one catch up with the other.

Who answers goes first, then who reads a prompt, then who waits: by priority, then by arrival. A request that is
admitted gets the blocks of all its tokens at once; one that grows and finds no block takes those of the last in the
order, which then waits and is computed anew. No arrays here.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice

from ..config import EngineConfig
from ..errors import DeadlineError, WorkerError
from .block_pool import BlockPool, InFlight, extend_hashes
from .request import (
    FinishReason,
    Request,
    SamplerOutput,
    ScheduledTokens,
    SchedulerStats,
    StepOutput,
    TokenLogprob,
    copy_error,
)

MIN_PREFILL_TOKENS = 16  # of prompts in a step, however slow it is and whoever else is in it: they must get on


class Scheduler:
    """The requests of an engine: those that wait and those that run."""

    def __init__(self, config: EngineConfig, counts: SchedulerStats | None = None) -> None:
        self.config = config
        self.pool = BlockPool(config.n_blocks, config.block_size, caching=config.prefix_cache)
        self.waiting: list[Request] = []  # the last one goes first
        self.running: list[Request] = []  # the first one goes first
        self.stats = counts or SchedulerStats()
        self._free_slots = list(range(config.max_batch))
        self._in_flight = InFlight()
        self._deadlines = Deadlines()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """It waits for its turn."""
        request.is_finished = False
        if self.pool.caching:
            size = self.config.block_size
            extend_hashes(request.hashes, request.ids, (len(request.ids) - 1) // size, size)
        insort(self.waiting, request, key=_reverse_schedule_order)
        self._deadlines.add(request, len(self.waiting) + len(self.running))

    def remove(self, request: Request, *, keep: bool = True) -> bool:
        """Forget a request wherever it is; whether it was here. What it held is free at once, and kept for others."""
        if request.is_finished:
            return False
        request.is_finished = True
        if request.batch_slot < 0:
            self.waiting.remove(request)
            return True
        self.running.remove(request)
        if not keep:
            self.pool.unpublish(request.blocks)
        self._release(request)
        return True

    @property
    def next_batch_is_unchanged(self) -> bool:
        """Whether the next step is of those who run: nobody waits, or all rows are taken and nobody who waits is more
        urgent than the last one who runs."""
        return not (self.waiting and (self._free_slots or self.waiting[-1].priority < self.running[-1].priority))

    def expire(self, now: float) -> list[StepOutput]:
        """End those whose time is over."""
        ended = [request for request in self._deadlines.over(now) if self.remove(request)]
        told = "the request was not answered in time: {} tokens of its answer were made"
        return [StepOutput(r, -1, None, "error", DeadlineError(told.format(len(r.tokens)))) for r in ended]

    def schedule(self, tokens: int) -> list[ScheduledTokens]:
        """The next step: every request that answers, and prompts with what is left of so many tokens, or a few."""
        self._preempt_for_urgent()
        spans: list[ScheduledTokens] = []
        reading: list[Request] = []
        size = self.config.block_size
        guessing: list[Request] = []
        for request in self.running[:]:
            start, known = request.num_computed_tokens, len(request.ids)
            if known - start > 1:
                reading.append(request)
            elif known <= len(request.blocks) * size or self._ensure_block(request):
                if request.drafts:
                    guessing.append(request)
                else:
                    spans.append(ScheduledTokens(request, start, known, start))
        spans += [self._with_guesses(request) for request in guessing]
        if not (reading or self.waiting):
            return spans
        fewest = min(MIN_PREFILL_TOKENS, self.config.max_step_tokens)
        budget = max(fewest, tokens - sum(span.stop - span.start for span in spans))
        readers = self._prefill_order([request for request in reading if request.batch_slot >= 0])
        return spans + [next_chunk(request, count) for request, count in split_prefill_budget(readers, budget)]

    def update(self, spans: Sequence[ScheduledTokens], sampled: SamplerOutput) -> list[StepOutput]:
        """Take in what a step computed; the tokens that came out, in the order of the spans."""
        outputs: list[StepOutput] = []
        tokens, size = iter(sampled.tokens), self.config.block_size
        failed, logprobs = sampled.failed, sampled.logprobs
        for request, _, stop, _ in spans:
            ids = request.ids
            if failed and request in failed:
                self.remove(request, keep=False)
                outputs.append(StepOutput(request, -1, None, "error", failed[request]))
            elif stop < len(ids):
                request.num_computed_tokens = stop
                self._publish(request)
            elif stop > len(ids) or len(ids) + 1 >= request.max_total_tokens or logprobs:
                outputs += self._accept(request, list(islice(tokens, stop - len(ids) + 1)), logprobs.get(request))
            elif (token := next(tokens)) in request.stop_ids:
                outputs += self._accept(request, [token], None)
            else:  # one token more, as nearly always: what `_accept` would do
                ids.append(token)
                request.num_computed_tokens = stop
                outputs.append(StepOutput(request, token))
                if stop // size > request.num_hashed_blocks:
                    self._publish(request)
        return outputs

    def fail(self, spans: Sequence[ScheduledTokens], error: WorkerError) -> list[StepOutput]:
        """A step came to nothing: its requests end, and what they were computing is not kept."""
        for span in spans:
            self.remove(span.request, keep=False)
        return [StepOutput(span.request, -1, None, "error", copy_error(error)) for span in spans]

    def _accept(self, request: Request, tokens: list[int], logprobs: list[TokenLogprob] | None) -> list[StepOutput]:
        """It goes on with these tokens, or ends with them."""
        outputs = accept_tokens(request, tokens, logprobs, self.stats)
        self._publish(request)
        if outputs[-1].finish_reason is not None:
            self.remove(request)
        return outputs

    def _publish(self, request: Request) -> None:
        """Blocks that are full now can be found by others."""
        size, first = self.config.block_size, request.num_hashed_blocks
        full = request.num_computed_tokens // size
        if full == first:
            return
        request.num_hashed_blocks = full
        if not self.pool.caching:
            return
        extend_hashes(request.hashes, request.ids, full, size)
        for i in range(first, full):
            self.pool.publish(request.blocks[i], request.hashes[i])
        self._in_flight.end(request.hashes[first:full], request)

    def _ensure_block(self, request: Request) -> bool:
        """Give it blocks for its next token; False if it had to give up its own."""
        if request.batch_slot < 0:  # preempted in this very step
            return False
        while self.reserve(request, len(request.ids)) < len(request.ids):
            if not self._take_back_guesses():
                last = self.running[-1]
                self._preempt(last)
                if last is request:
                    return False
        return True

    def _take_back_guesses(self) -> bool:
        """Blocks that hold nothing but guesses are free again: nobody is sent away for a guess. Were there any?"""
        found = False
        for request in self.running:
            needed = self.pool.blocks_for(len(request.ids))
            if len(request.blocks) > needed:
                self.pool.release(request.blocks[needed:])
                del request.blocks[needed:]
                request.num_blocks_in_table = min(request.num_blocks_in_table, needed)
                request.drafts, found = [], True
        return found

    def _with_guesses(self, request: Request) -> ScheduledTokens:
        """Its next token, and as many guesses as there are blocks for."""
        start, known = request.num_computed_tokens, len(request.ids)
        room = self.reserve(request, known + len(request.drafts)) - known
        request.drafts = request.drafts[:room]
        return ScheduledTokens(request, start, known + room, start)

    def _prefill_order(self, reading: Sequence[Request]) -> Iterator[Request]:
        """Those who read and those who may begin to, in their order."""
        admitted = self._admit_waiting()
        for request in reading:
            while self.waiting and _schedule_order(self.waiting[-1]) < _schedule_order(request):
                more_urgent = next(admitted, None)
                if more_urgent is None:
                    break
                yield more_urgent
            yield request
        yield from admitted

    def reserve(self, request: Request, tokens: int) -> int:
        """Blocks for so many tokens of a running request, if they are free; for how many tokens it has room then."""
        while len(request.blocks) * self.config.block_size < tokens:
            block = self.pool.one_more()
            if block is None:
                break
            request.blocks.append(block)
        return min(tokens, len(request.blocks) * self.config.block_size)

    def _preempt_for_urgent(self) -> None:
        """Where a request waits that is more urgent than the last one running, and there is no room, that one goes."""
        while self.waiting and self.running and self.waiting[-1].priority < self.running[-1].priority:
            first = self.waiting[-1]
            shared = self.pool.match(self._cacheable_hashes(first))
            if self._prefix_in_flight(first) or (self._free_slots and self._has_room(first, shared)):
                return
            lost = [request for request in self.running if request.priority > first.priority]
            needed = self.pool.blocks_for(len(first.ids)) - len(shared) + len(self.running) - len(lost)
            if not self.pool.can_acquire(shared, needed - sum(len(request.blocks) for request in lost)):
                return  # it would not help
            self._preempt(self.running[-1])

    def _preempt(self, request: Request) -> None:
        """Back to those who wait, ahead of all who came later; what it loses is computed again."""
        self.running.remove(request)
        self._release(request)
        insort(self.waiting, request, key=_reverse_schedule_order)
        request.num_preemptions += 1
        self.stats.num_preemptions += 1

    def _admit_waiting(self) -> Iterator[Request]:
        """Let requests in, one after the other, while there is room; nobody overtakes one that lacks blocks."""
        for i in range(len(self.waiting) - 1, -1, -1):
            request = self.waiting[i]
            if not self._free_slots:
                return
            if self._prefix_in_flight(request):
                continue
            shared = self.pool.match(self._cacheable_hashes(request))
            if not self._has_room(request, shared):
                return
            del self.waiting[i]
            self._start(request, shared)
            yield request

    def _start(self, request: Request, shared: list[int]) -> None:
        blocks = self.pool.acquire(shared, self.pool.blocks_for(len(request.ids)) - len(shared))
        assert blocks is not None
        request.blocks, request.batch_slot = blocks, self._free_slots.pop()
        request.num_hashed_blocks = len(shared)
        request.num_computed_tokens = request.num_shared_tokens = len(shared) * self.config.block_size
        self._in_flight.begin(self._cacheable_hashes(request)[len(shared) :], request)
        if request.num_cached_tokens < 0:  # not one that comes back
            request.num_cached_tokens, request.first_scheduled_time = request.num_computed_tokens, time.perf_counter()
            self.stats.num_queried_tokens += request.num_prompt_tokens
            self.stats.num_hit_tokens += request.num_computed_tokens
        insort(self.running, request, key=_schedule_order)

    def _has_room(self, request: Request, shared: Sequence[int]) -> bool:
        """Blocks for all its tokens, and one for each that is running, so that the next step sends nobody away."""
        return self.pool.can_acquire(shared, self.pool.blocks_for(len(request.ids)) - len(shared) + len(self.running))

    def _cacheable_hashes(self, request: Request) -> list[bytes]:
        """The blocks of a waiting request that it may find: its last token is computed in any case."""
        if not self.pool.caching or request.num_unscored_tokens:
            return []
        return request.hashes[: (len(request.ids) - 1) // self.config.block_size]

    def _prefix_in_flight(self, request: Request) -> bool:
        """Whether the first block that is not here is being computed by somebody as urgent: it is worth waiting for."""
        if not self._in_flight:
            return False
        missing = next((known_as for known_as in self._cacheable_hashes(request) if not self.pool.has(known_as)), None)
        return self._in_flight.is_worth_waiting(missing, request)

    def _release(self, request: Request) -> None:
        self._in_flight.end(request.hashes[request.num_hashed_blocks :], request)
        self.pool.release(request.blocks)
        self._free_slots.append(request.batch_slot)
        request.blocks, request.drafts, request.batch_slot = [], [], -1
        request.num_computed_tokens = request.num_hashed_blocks = request.num_blocks_in_table = 0

    def check(self) -> None:
        """The books are right, or an AssertionError."""
        self.pool.check([request.blocks for request in self.running])
        self._in_flight.check(self.running)
        assert self.running == sorted(self.running, key=_schedule_order)
        assert self.waiting == sorted(self.waiting, key=_reverse_schedule_order)
        check_places(self.running, self.waiting, self._free_slots, self.config)


def _schedule_order(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival


def _reverse_schedule_order(request: Request) -> tuple[int, int]:
    return -request.priority, -request.arrival


MAX_SCORED_TOKENS = 64  # tokens a step of prompts whose log-probabilities are wanted: bounds the memory of the logits


def split_prefill_budget(readers: Iterator[Request], budget: int) -> list[tuple[Request, int]]:
    """Who reads how many tokens: each at most half of what is left, so that a short prompt does not wait for a long one
    before it; what nobody wants goes to the first."""
    counts: list[tuple[Request, int]] = []
    scored = MAX_SCORED_TOKENS
    while budget > 0 and (request := next(readers, None)) is not None:
        count = min(len(request.ids) - request.num_computed_tokens, max(budget // 2, 1))
        if request.num_unscored_tokens:
            count = min(count, scored)
            scored -= count
        if count:
            counts.append((request, count))
            budget -= count
    for i, (request, count) in enumerate(counts):
        more = min(budget, len(request.ids) - request.num_computed_tokens - count)
        if request.num_unscored_tokens:
            more = min(more, scored)
            scored -= more
        counts[i] = request, count + more
        budget -= more
    return counts


def next_chunk(request: Request, count: int) -> ScheduledTokens:
    """The next tokens of a request; logits where it catches up, and where its prompt is scored."""
    start, known = request.num_computed_tokens, len(request.ids)
    stop = start + count
    wanted = known - 1 if stop >= known else stop
    if request.num_unscored_tokens:
        assert request.prompt_logprobs is not None
        wanted = min(wanted, max(start, len(request.prompt_logprobs) - 1))
    return ScheduledTokens(request, start, stop, wanted)


def accept_tokens(
    request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None, counts: SchedulerStats
) -> list[StepOutput]:
    """Append the tokens up to the first that was guessed wrong: that one is right, those behind it are not."""
    drafts, ids = request.drafts, request.ids
    finish: FinishReason | None = None
    outputs: list[StepOutput] = []
    for i, token in enumerate(tokens):
        if token in request.stop_ids:
            finish = "stop"
        else:
            ids.append(token)
            finish = "length" if len(ids) >= request.max_total_tokens else None
        outputs.append(StepOutput(request, token, logprobs[i] if logprobs and finish != "stop" else None, finish))
        if finish or (i < len(drafts) and drafts[i] != token):
            break
    counts.num_drafted_tokens += len(drafts)
    counts.num_accepted_tokens += len(outputs) - 1
    request.drafts = []
    request.num_computed_tokens = len(ids) - (finish != "stop")
    return outputs


class Deadlines:
    """Requests that must end by some time. Those that ended in time are forgotten now and then, not at once."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def add(self, request: Request, others: int) -> None:
        """One more, beside so many other requests; each look through all of them takes as long as there are."""
        if request.deadline is not None:
            heappush(self._heap, (request.deadline, request.arrival, request))
            if len(self._heap) > 2 * others + 64:
                self._heap = [one for one in self._heap if not one[2].is_finished]
                heapify(self._heap)

    def over(self, now: float) -> list[Request]:
        """Those whose time is over, ended or not; they are not told of again."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            found.append(heappop(self._heap)[2])
        return found


def check_places(
    running: Sequence[Request], waiting: Sequence[Request], free_rows: Sequence[int], config: EngineConfig
) -> None:
    """Every request is in one place, with what belongs to it there and nothing else; no row is lost or given twice."""
    assert not set(running) & set(waiting)
    assert not any(request.is_finished for request in (*running, *waiting))
    rows = [request.batch_slot for request in running]
    assert sorted([*rows, *free_rows]) == list(range(config.max_batch)), "a row is lost or given twice"
    for request in waiting:
        assert (request.batch_slot, request.num_computed_tokens, request.blocks, request.drafts) == (-1, 0, [], [])
    for request in running:
        assert request.num_computed_tokens < len(request.ids)
        assert request.num_computed_tokens <= len(request.blocks) * config.block_size
        assert request.num_blocks_in_table <= len(request.blocks)
