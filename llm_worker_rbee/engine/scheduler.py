"""Decides which tokens the next step computes, and applies the results of a step.

There are no phases: a request has `num_tokens` and `num_computed_tokens`, and every step lets the second catch up with
the first. Decodes go first, then running prefills, then waiting requests: by priority, then by arrival. A request gets
the blocks of all its tokens when it is admitted; one that grows and finds no free block preempts the last in the order,
which then waits and is recomputed. Batch work comes after all others: `BatchShare` says how much of it joins a step.
A request that waits for `MAX_WAIT_S` behind more urgent ones becomes as urgent as these. No arrays here.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from operator import attrgetter

from ..config import EngineConfig
from ..errors import DeadlineError, WorkerError, copy_error
from ..sampling_params import FinishReason, TokenLogprob
from .block_pool import BlockPool, InFlightBlocks, extend_hashes
from .request import (
    BATCH_PRIORITY,
    Request,
    SamplerOutput,
    ScheduledTokens,
    SchedulerStats,
    SchedulingEvent,
    StepOutput,
    error_output,
)
from .state_pool import MIN_SNAPSHOT_BLOCKS, StatePool
from .step_time import BatchShare, Room

# Prompt tokens next to these decodes, the deepest of them after so many computed tokens.
PrefillBudget = Callable[[Sequence[ScheduledTokens], int], int]
MIN_PREFILL_TOKENS = 16  # in a step, however slow it is and however many requests decode: prefills must progress
MAX_SCORED_TOKENS = 512  # in a step, of prompts whose log-probabilities are requested: each needs a row of logits
MIN_SCORED_TOKENS = 64
MAX_WAIT_S = 60.0  # behind more urgent requests, where none of its own priority runs
_priority_of = attrgetter("priority")


def max_scored_tokens(max_step_tokens: int) -> int:
    """Return the limit of a step on prompt tokens with log-probabilities."""
    return min(MAX_SCORED_TOKENS, max(MIN_SCORED_TOKENS, max_step_tokens // 8))


class Scheduler:
    """The waiting and running requests of an engine."""

    def __init__(
        self,
        config: EngineConfig,
        stats: SchedulerStats | None = None,
        n_slots: int = 0,
        share: BatchShare | None = None,
    ) -> None:
        """`n_slots`: of states, for a model that has them; `share` is what batch work gets of a step."""
        self.config = config
        self.share = share or BatchShare()
        self.pool = BlockPool(config.n_blocks, config.block_size, caching=config.prefix_cache)
        self.events: list[tuple[Request, SchedulingEvent]] | None = None  # a list where someone reads and clears it
        self.on_publish: Callable[[bytes, list[int]], None] | None = None  # called with the hash and tokens of a block
        self.on_unpublish: Callable[[list[bytes]], None] | None = None  # with the hashes of failed requests
        self.on_admit: Callable[[Request], None] | None = None  # before a request is admitted; it may be held then
        self.waiting: list[Request] = []  # the last one goes first
        self.running: list[Request] = []  # the first one goes first
        self.num_guided = 0  # of these, requests with a grammar
        self.stats = stats or SchedulerStats()
        self.states: StatePool | None = None
        self.max_running = config.max_batch
        if n_slots:
            size, caching = config.block_size, config.prefix_cache
            self.states = StatePool(n_slots, config.max_batch, size, caching=caching)
            self.max_running = self.states.max_running
        self.keeps_images_whole, self._free_slots = False, list(range(self.max_running))
        self.max_scored_tokens = max_scored_tokens(config.max_step_tokens)
        self._in_flight = InFlightBlocks()
        self._deadlines = Deadlines()
        self._next_promotion = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def is_batch_alone(self) -> bool:
        """Whether there is no request but batch work."""
        is_interactive = self.running and self.running[0].priority < BATCH_PRIORITY
        return not (is_interactive or (self.waiting and self.waiting[-1].priority < BATCH_PRIORITY))

    @property
    def foremost(self) -> list[Request]:
        """The running requests, without batch work beside others: what drafts are for."""
        if not self.running or self.running[-1].priority < BATCH_PRIORITY or self.is_batch_alone:
            return self.running
        return self.running[: bisect_left(self.running, BATCH_PRIORITY, key=_priority_of)]

    def add(self, request: Request) -> None:
        request.is_finished = False
        request.waiting_since, request.num_waited_tokens = self.share.note_request(request.priority), len(request.ids)
        if self.pool.caching:
            size = self.config.block_size
            extend_hashes(request.hashes, request.ids, (len(request.ids) - 1) // size, size, request.extra_keys)
        insort(self.waiting, request, key=_reverse_schedule_order)
        self._deadlines.add(request, len(self.waiting) + len(self.running))

    def remove(self, request: Request, *, keep_cached: bool = True) -> bool:
        """Drop a request and free its blocks; return whether it was here. `keep_cached` leaves them findable."""
        if request.is_finished:
            return False
        request.is_finished = True
        if request.batch_slot < 0:
            self.waiting.remove(request)
            return True
        self.running.remove(request)
        if not keep_cached:
            self.pool.unpublish(request.blocks)
            if self.on_unpublish is not None:
                self.on_unpublish(request.hashes)
            if self.states is not None:
                self.states.unpublish(request)
        self._release(request)
        return True

    def can_schedule_ahead(self) -> bool:
        """Return whether the next step can be scheduled while one is in flight: it would preempt no request."""
        if self.waiting and self.running and self.waiting[-1].priority < self.running[-1].priority:
            return False
        size = self.config.block_size
        for request in self.running:
            known = len(request.ids) + (request.pending_row >= 0)
            if len(request.blocks) * size < known < request.max_total_tokens and self.reserve(request, known) < known:
                return False
        return True

    def expire(self, now: float) -> list[StepOutput]:
        """Finish the requests whose deadline has passed."""
        expired = self._deadlines.pop_expired(now)
        if not expired:
            return []
        ended = [request for request in expired if self.remove(request)]
        message = "the request timed out after {} output tokens"
        return [error_output(request, DeadlineError(message.format(len(request.tokens)))) for request in ended]

    def schedule(self, budget: int | PrefillBudget) -> list[ScheduledTokens]:
        """Return the next step: every decode, and prefills with the rest of the budget (at least a few tokens).

        Where `num_in_flight_tokens` and `pending_row` of requests are set, it is the step after the one in flight.
        """
        if self.waiting:
            self._promote_starved()
            self._preempt_for_urgent()
        running, waiting = self.running, self.waiting
        if not any(request.priority >= BATCH_PRIORITY for request in (*running[-1:], *waiting[:1])):
            self.share.note_request()
            return self._prepare_states(self._schedule_requests(running[:], budget))
        scheduled, is_alone = list[ScheduledTokens](), self.is_batch_alone
        if not is_alone:
            others = running[: bisect_left(running, BATCH_PRIORITY, key=_priority_of)]
            scheduled = self._schedule_requests(others, budget)
        if (room := self.share.room(scheduled, is_alone=is_alone)) is not None:
            joined = self._schedule_batch(room, is_alone=is_alone)
            if joined:
                self.share.end_turn()
            scheduled += joined
        return self._prepare_states(scheduled)

    def _schedule_batch(self, room: Room, *, is_alone: bool) -> list[ScheduledTokens]:
        """Return the tokens of batch work in this step."""
        batch = self.running[bisect_left(self.running, BATCH_PRIORITY, key=_priority_of) :]
        decodes, prefills = list[Request](), list[Request]()
        for request in batch:
            if not request.is_held:
                is_prefill = request.num_unscheduled_tokens + (request.pending_row >= 0) > 1
                (prefills if is_prefill else decodes).append(request)
        joined = self.share.decodes(room, decodes)
        if not is_alone:
            for request in joined:
                request.drafts = []

        def budget(scheduled: Sequence[ScheduledTokens], start: int) -> int:
            return self.share.prefill_tokens(room, scheduled, start, self.config.max_step_tokens)

        return self._schedule_requests([*joined, *prefills], budget, is_batch=True)

    def _schedule_requests(
        self, requests: Sequence[Request], budget: int | PrefillBudget, *, is_batch: bool = False
    ) -> list[ScheduledTokens]:
        """Return the tokens of these running requests, and of requests that are admitted: batch work, or all others."""
        scheduled: list[ScheduledTokens] = []
        prefills: list[Request] = []
        drafted: list[Request] = []
        size = self.config.block_size
        for request in requests:
            if request.is_held:
                continue
            start = request.num_computed_tokens + request.num_in_flight_tokens
            length = len(request.ids) + (request.pending_row >= 0)
            if length - start > 1:
                prefills.append(request)
            elif request.pending_row >= 0 and (length >= request.max_total_tokens or request.has_slow_grammar):
                continue  # the token in flight is its last, or will be consumed outside the steps
            elif length <= len(request.blocks) * size or self._ensure_block(request):
                if request.drafts:
                    drafted.append(request)
                else:
                    scheduled.append(ScheduledTokens(request, start, length, start))
        scheduled += [self._schedule_drafts(request) for request in drafted]
        if prefills:  # not preempted in this very step
            prefills = [request for request in prefills if request.batch_slot >= 0]
        may_admit = self._free_slots and self.waiting and (self.waiting[-1].priority >= BATCH_PRIORITY) == is_batch
        if not (prefills or may_admit):
            return scheduled
        if isinstance(budget, int):
            budget_left = budget - sum(item.stop - item.start for item in scheduled)
        else:
            start = max((request.num_computed_tokens + request.num_in_flight_tokens for request in prefills), default=0)
            budget_left = budget(scheduled, start)
        if not is_batch:
            budget_left = max(budget_left, min(MIN_PREFILL_TOKENS, self.config.max_step_tokens))
        order = self._prefill_order(prefills, is_batch=is_batch)
        chunks = split_prefill_budget(order, budget_left, self.max_scored_tokens)
        return scheduled + [self._next_chunk(request, count) for request, count in chunks]

    def _next_chunk(self, request: Request, count: int) -> ScheduledTokens:
        start = request.num_computed_tokens + request.num_in_flight_tokens
        if self.states is not None:
            count = self.states.chunk_stop(request, start, start + count) - start
        if self.keeps_images_whole and request.images is not None:
            count = request.images.whole_stop(start, start + count) - start
        return next_chunk(request, count)

    def _prepare_states(self, scheduled: list[ScheduledTokens]) -> list[ScheduledTokens]:
        """Give each request the slots that the step writes its states to."""
        if self.states is not None:
            for item in scheduled:
                self.states.prepare(item)
        return scheduled

    def update(self, scheduled: Sequence[ScheduledTokens], sampled: SamplerOutput) -> list[StepOutput]:
        """Apply the results of a step; return its output tokens in the order of `scheduled`."""
        outputs: list[StepOutput] = []
        tokens, size = iter(sampled.tokens), self.config.block_size
        failed, logprobs = sampled.failed, sampled.logprobs
        for request, _, stop, _ in scheduled:
            ids = request.ids
            if failed and request in failed:
                self.remove(request, keep_cached=False)
                outputs.append(error_output(request, failed[request]))
            elif stop < len(ids):
                request.num_computed_tokens = stop
                self._publish(request)
                self._commit(request)
            elif stop > len(ids) or len(ids) + 1 >= request.max_total_tokens or logprobs:
                outputs += self._accept(request, list(islice(tokens, stop - len(ids) + 1)), logprobs.get(request))
            elif (token := next(tokens)) in request.stop_ids:
                outputs += self._accept(request, [token], None)
            else:  # the usual case, one token: what `_accept` would do, faster
                ids.append(token)
                request.num_computed_tokens = stop
                outputs.append(StepOutput(request, token))
                if stop // size > request.num_hashed_blocks:
                    self._publish(request)
                if self.states is not None:
                    self.states.commit(request)
        return outputs

    def fail(self, scheduled: Sequence[ScheduledTokens], error: WorkerError) -> list[StepOutput]:
        """Finish the requests of a failed step with an error; drop their unfinished blocks."""
        for item in scheduled:
            self.remove(item.request, keep_cached=False)
        return [error_output(item.request, copy_error(error)) for item in scheduled]

    def reserve(self, request: Request, tokens: int) -> int:
        """Allocate blocks for `tokens` tokens of a running request while any are free; return the tokens that fit."""
        while len(request.blocks) * self.config.block_size < tokens:
            block = self.pool.allocate_one()
            if block is None:
                break
            request.blocks.append(block)
        return min(tokens, len(request.blocks) * self.config.block_size)

    def _accept(self, request: Request, tokens: list[int], logprobs: list[TokenLogprob] | None) -> list[StepOutput]:
        outputs = accept_tokens(request, tokens, logprobs, self.stats)
        self._publish(request)
        self._commit(request)
        if outputs[-1].finish_reason is not None:
            self.remove(request)
        return outputs

    def _commit(self, request: Request) -> None:
        if self.states is not None:
            self.states.commit(request)

    def _publish(self, request: Request) -> None:
        """Enter blocks that have become full into the prefix cache."""
        size, first = self.config.block_size, request.num_hashed_blocks
        full = request.num_computed_tokens // size
        if full == first:
            return
        request.num_hashed_blocks = full
        if not self.pool.caching:
            return
        extend_hashes(request.hashes, request.ids, full, size, request.extra_keys)
        for i in range(first, full):
            self.pool.publish(request.blocks[i], request.hashes[i])
            if self.on_publish is not None:
                self.on_publish(request.hashes[i], request.ids[i * size : (i + 1) * size])
        if self.states is not None:
            self.states.publish(request)
        self._in_flight.end(request.hashes[first:full], request)

    def _ensure_block(self, request: Request) -> bool:
        """Allocate blocks for the next token; return False if the request itself was preempted for it."""
        if request.batch_slot < 0:  # preempted in this very step
            return False
        while self.reserve(request, len(request.ids)) < len(request.ids):
            if not self._free_draft_blocks():
                last = self.running[-1]
                self._preempt(last)
                if last is request:
                    return False
        return True

    def _free_draft_blocks(self) -> bool:
        """Free blocks that hold only drafts, before any request is preempted; return whether there were any."""
        is_freed = False
        for request in self.running:
            needed = self.pool.blocks_for(len(request.ids))
            if len(request.blocks) > needed:
                self.pool.release(request.blocks[needed:])
                del request.blocks[needed:]
                request.num_blocks_in_table = min(request.num_blocks_in_table, needed)
                request.drafts, is_freed = [], True
        return is_freed

    def _schedule_drafts(self, request: Request) -> ScheduledTokens:
        """Schedule the next token, and as many drafts as there are blocks and slots for."""
        start, length = request.num_computed_tokens, len(request.ids)
        count = len(request.drafts)
        if self.states is not None:
            count = min(count, self.states.draft_room(request, self.running))
        room = self.reserve(request, length + count) - length
        request.drafts = request.drafts[:room]
        scheduled = ScheduledTokens(request, start, length + room, start)
        self._prepare_states([scheduled])  # at once: the next request gets what is left
        return scheduled

    def _prefill_order(self, prefills: Sequence[Request], *, is_batch: bool) -> Iterator[Request]:
        """Yield running prefills and requests that are admitted, in schedule order."""
        admitted = self._admit_waiting(is_batch=is_batch)
        for request in prefills:
            while self.waiting and _schedule_order(self.waiting[-1]) < _schedule_order(request):
                more_urgent = next(admitted, None)
                if more_urgent is None:
                    break
                yield more_urgent
            yield request
        yield from admitted

    def _preempt_for_urgent(self) -> None:
        """Preempt from the end of the order while a more urgent request waits and has no room."""
        while self.waiting and self.running and self.waiting[-1].priority < self.running[-1].priority:
            first = self.waiting[-1]
            if first.is_held:
                return
            shared = self._match(first)
            if self._prefix_in_flight(first) or (self._free_slots and self._has_room(first, shared)):
                return
            lost = [request for request in self.running if request.priority > first.priority]
            needed = self.pool.blocks_for(len(first.ids)) - len(shared) + len(self.running) - len(lost)
            if not self.pool.can_acquire(shared, needed - sum(len(request.blocks) for request in lost)):
                return  # even all of them would not make enough room
            self._preempt(self.running[-1])

    def _promote_starved(self) -> None:
        """Make a request as urgent as the first, if it has waited for long and none like it runs; one at a time."""
        now = self.share.clock()
        if now < self._next_promotion or not self.running:
            return
        self._next_promotion = now + 1.0
        last = self.running[-1].priority
        starved = [item for item in self.waiting if item.priority > last and now - item.waiting_since >= MAX_WAIT_S]
        if starved:
            request = min(starved, key=attrgetter("waiting_since"))
            self.waiting.remove(request)
            request.priority = self.running[0].priority
            insort(self.waiting, request, key=_reverse_schedule_order)
            self._next_promotion = now + MAX_WAIT_S

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        if len(request.ids) > request.num_waited_tokens:
            request.waiting_since, request.num_waited_tokens = self.share.clock(), len(request.ids)
        insort(self.waiting, request, key=_reverse_schedule_order)
        request.num_preemptions += 1
        request.is_looked_up = False
        self.stats.num_preemptions += 1
        self._record(request, "preempted")

    def _admit_waiting(self, *, is_batch: bool) -> Iterator[Request]:
        """Admit waiting requests, batch work or others, while there is room; none overtakes one that lacks blocks."""
        for i in range(len(self.waiting) - 1, -1, -1):
            request = self.waiting[i]
            if not self._free_slots or (request.priority >= BATCH_PRIORITY) != is_batch:
                return
            if request.is_held or self._prefix_in_flight(request):
                continue
            shared = self._match(request)
            if self._has_room(request, shared) and self.on_admit is not None and not request.is_looked_up:
                request.is_looked_up = True
                self.on_admit(request)
                if request.is_held:
                    continue
                shared = self._match(request)
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
        if self.states is not None:
            self.states.start(request, len(shared))
        request.num_computed_tokens = request.num_shared_tokens = len(shared) * self.config.block_size
        computing = self.cacheable_hashes(request)[len(shared) :]
        if self.states is None or len(computing) >= MIN_SNAPSHOT_BLOCKS:  # else it leaves no snapshot to wait for
            self._in_flight.begin(computing, request)
        self._record(request, "admitted" if request.num_cached_tokens < 0 else "resumed")
        if request.num_cached_tokens < 0:  # not after a preemption
            request.num_cached_tokens, request.first_scheduled_time = request.num_computed_tokens, time.perf_counter()
            self.stats.num_queried_tokens += request.num_prompt_tokens
            self.stats.num_hit_tokens += request.num_computed_tokens
            self.stats.num_snapshot_hits += bool(request.states)
        insort(self.running, request, key=_schedule_order)
        self.num_guided += request.constraint is not None

    def _record(self, request: Request, event: SchedulingEvent) -> None:
        if self.events is not None:
            self.events.append((request, event))

    def _has_room(self, request: Request, shared: Sequence[int]) -> bool:
        """Return whether there are blocks for all its tokens and one for each running request, so that the next step
        preempts none."""
        return self.pool.can_acquire(shared, self.pool.blocks_for(len(request.ids)) - len(shared) + len(self.running))

    def cacheable_hashes(self, request: Request) -> list[bytes]:
        """Return the hashes of the blocks that a prefix hit may cover: the last token is computed in any case."""
        if not self.pool.caching or request.num_unscored_tokens:
            return []
        return request.hashes[: (len(request.ids) - 1) // self.config.block_size]

    def count_matched(self, request: Request) -> int:
        """Return the tokens of a request that the prefix cache has now."""
        return len(self._match(request)) * self.config.block_size

    def _match(self, request: Request) -> list[int]:
        """Return the blocks of the longest cached prefix, with states of the longest one that has a snapshot."""
        hashes = self.cacheable_hashes(request)
        blocks = self.pool.match(hashes)
        if self.states is None:
            return blocks
        request.num_matched_tokens = len(blocks) * self.config.block_size
        return blocks[: self.states.longest_snapshot(hashes[: len(blocks)])]

    def _prefix_in_flight(self, request: Request) -> bool:
        """Return whether an equally urgent request is computing the first missing block, so that waiting pays."""
        if not self._in_flight:
            return False
        missing = next((h for h in self.cacheable_hashes(request) if not self.pool.is_cached(h)), None)
        return self._in_flight.is_worth_waiting(missing, request)

    def _release(self, request: Request) -> None:
        self._in_flight.end(request.hashes[request.num_hashed_blocks :], request)
        self.pool.release(request.blocks)
        if self.states is not None:
            self.states.release(request)
        self._free_slots.append(request.batch_slot)
        self.num_guided -= request.constraint is not None
        request.blocks, request.drafts, request.batch_slot = [], [], -1
        request.num_computed_tokens = request.num_hashed_blocks = request.num_blocks_in_table = 0

    def check(self) -> None:
        """Assert the invariants that hold between steps, for tests and debug runs."""
        running, waiting, config = self.running, self.waiting, self.config
        self.pool.check([request.blocks for request in running])
        self._in_flight.check(running)
        if self.states is not None:
            self.states.check(running)
        assert running == sorted(running, key=_schedule_order)
        assert waiting == sorted(waiting, key=_reverse_schedule_order)
        assert not set(running) & set(waiting)
        assert not any(request.is_finished for request in (*running, *waiting))
        slots = [*(request.batch_slot for request in running), *self._free_slots]
        assert sorted(slots) == list(range(self.max_running)), "a batch slot is lost or used twice"
        for request in waiting:
            assert (request.batch_slot, request.num_computed_tokens, request.blocks, request.drafts) == (-1, 0, [], [])
            assert not request.states
        assert self.num_guided == sum(request.constraint is not None for request in running)
        for request in running:
            assert request.num_computed_tokens < len(request.ids)
            assert request.num_computed_tokens <= len(request.blocks) * config.block_size
            assert request.num_blocks_in_table <= len(request.blocks)


def _schedule_order(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival


def _reverse_schedule_order(request: Request) -> tuple[int, int]:
    return -request.priority, -request.arrival


def split_prefill_budget(requests: Iterator[Request], budget: int, scored: int) -> list[tuple[Request, int]]:
    """Return how many tokens of each request a step computes (chunked prefill), at most `scored` with their logits.

    Each gets at most half of the rest, so that a short prompt does not wait for a long one before it; the remainder
    goes to the first.
    """
    counts: list[tuple[Request, int]] = []
    while budget > 0 and (request := next(requests, None)) is not None:
        count = min(request.num_unscheduled_tokens, max(budget // 2, 1))
        if request.num_unscored_tokens:
            count = min(count, scored)
            scored -= count
        if count:
            counts.append((request, count))
            budget -= count
    for i, (request, count) in enumerate(counts):
        scored_count = min(budget, request.num_unscheduled_tokens - count)
        if request.num_unscored_tokens:
            scored_count = min(scored_count, scored)
            scored -= scored_count
        counts[i] = request, count + scored_count
        budget -= scored_count
    return counts


def next_chunk(request: Request, count: int) -> ScheduledTokens:
    """Return the next `count` tokens of a request; logits where it catches up, and where its prompt is scored."""
    start, length = request.num_computed_tokens + request.num_in_flight_tokens, len(request.ids)
    stop = start + count
    logits_from = length - 1 if stop >= length else stop
    if request.num_unscored_tokens:
        assert request.prompt_logprobs is not None
        logits_from = min(logits_from, max(start, len(request.prompt_logprobs) - 1))
    return ScheduledTokens(request, start, stop, logits_from)


def accept_tokens(
    request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None, stats: SchedulerStats
) -> list[StepOutput]:
    """Append sampled tokens up to and including the first that differs from its draft; later tokens are wrong."""
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
    stats.num_drafted_tokens += len(drafts)
    stats.num_accepted_tokens += len(outputs) - 1
    request.drafts = []
    request.num_computed_tokens = len(ids) - (finish != "stop")
    return outputs


class Deadlines:
    """A heap of requests by deadline. Requests that finished in time are removed now and then, not at once."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def add(self, request: Request, num_requests: int) -> None:
        """Add a request if it has a deadline. The heap stays in proportion to `num_requests` of the scheduler."""
        if request.deadline is not None:
            heappush(self._heap, (request.deadline, request.arrival, request))
            if len(self._heap) > 2 * num_requests + 64:
                self._heap = [entry for entry in self._heap if not entry[2].is_finished]
                heapify(self._heap)

    def pop_expired(self, now: float) -> list[Request]:
        """Remove and return the requests whose deadline has passed, finished ones included."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            expired.append(heappop(self._heap)[2])
        return expired
