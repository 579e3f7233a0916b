"""Multi-token prediction as a drafter: the head in the model's own file proposes the next tokens, one after the other.

The head reads token p with the hidden state of the model at p - 1, and writes keys and values at p, in a cache of one
layer under the same block numbers: so prefix hits and preemptions hold for them too. The head follows every step of the
model, prefill included, because hidden states are not kept: so drafting is not paused.

The first token after a prefix hit gets a hidden state of zeros, since the one before it is not computed. The last step
of a request is not read, as the request has ended by then: a later prefix hit on its blocks finds old keys there. Both
make drafts worse, and change no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..backends.ops import Array, Batch, Progress, StepLimits, WarmUp
from ..config import EngineConfig
from ..models import MtpHead
from ..models.kv_cache import KVCache
from .request import Request, ScheduledTokens
from .sampler import sample_rows
from .speculative import Drafter, LastDraft, MakeBatch, Reserve, max_drafts

MAX_TOKENS = 1024  # of a pass: bounds the memory of its arrays


class _Step(NamedTuple):
    """The model's last step."""

    scheduled: Sequence[ScheduledTokens]
    hidden: Array  # of all its tokens


class MtpDrafter(Drafter):
    """Drafts up to `config.draft_tokens` tokens for each request with the head of its model."""

    can_pause = False
    needs_hidden = True

    def __init__(self, head: MtpHead, config: EngineConfig, kv_type: str = "float32") -> None:
        self.head = head
        self.cache = KVCache(head.ops, head.config, config.n_blocks, config.block_size, kv_type)
        self._max_length = config.draft_tokens
        self._step: _Step | None = None

    def observe(self, scheduled: Sequence[ScheduledTokens], hidden: Array) -> None:
        self._step = _Step(scheduled, hidden)

    def draft(self, running: Sequence[Request], reserve: Reserve, batch: MakeBatch) -> None:
        """Follow the last step with every request, and draft for requests that decode, one token of each at a time."""
        step, self._step = self._step, None
        if step is None:
            return
        scheduled, drafting, rows, at = list[ScheduledTokens](), list[Request](), list[int](), 0
        for request, start, stop, _ in step.scheduled:
            if request.batch_slot >= 0 and (item := self._state(request).follow(request, start, reserve)):
                scheduled.append(item)
                drafting += [request] if item.logits_from < item.stop else []
                rows += [at + slot - 1 - start if slot > start else -1 for slot in range(item.start, item.stop)]
            at += stop - start
        for part, index in _split(scheduled, rows):
            logits, hidden = self._forward(batch(part), step.hidden, index)
            for item in part:
                self._state(item.request).computed(item)
        while drafting:
            tokens = self.head.ops.sample(logits, [sample_rows(request)[-1] for request in drafting]).tolist()
            index = [i for i, request in enumerate(drafting) if self._state(request).append(request, tokens[i])]
            drafting = [drafting[i] for i in index]
            if drafting:
                last = [_last_draft(request) for request in drafting]
                logits, hidden = self._forward(batch(last), hidden, index)

    def warm_up(self, limits: StepLimits, progress: Progress) -> WarmUp:
        return self.head.ops.warm_up(self._run_empty, self.head.fused, self.cache.layers, limits, progress)

    def _run_empty(self, batch: Batch) -> Array:
        """Run the head with hidden states of zeros; return the logits."""
        zeros = self.head.ops.prepare_vector(np.zeros((1, self.head.config.d_model), np.float32))
        return self._forward(batch, zeros, [-1] * len(batch.ids))[0]

    def _forward(self, batch: Batch, hidden: Array, index: Sequence[int]) -> tuple[Array, Array]:
        rows = self.head.ops.gather_rows(hidden, np.array(index, np.int64))
        with np.errstate(all="ignore"):
            return self.head.forward(replace(batch, hidden=rows), self.cache)

    def _state(self, request: Request) -> _HeadState:
        if request.draft_state is None:
            request.draft_state = _HeadState(self._max_length, self.cache.block_size)
        state: _HeadState = request.draft_state
        return state


def _split(scheduled: list[ScheduledTokens], rows: list[int]) -> list[tuple[list[ScheduledTokens], list[int]]]:
    """Return passes of at most MAX_TOKENS tokens, each with its rows of hidden states; the last has all logits."""
    if len(rows) <= MAX_TOKENS:
        return [(scheduled, rows)] if scheduled else []
    passes, last, last_rows, at = [(list[ScheduledTokens](), list[int]())], list[ScheduledTokens](), list[int](), 0
    for request, start, stop, logits_from in scheduled:
        first = start
        while first < logits_from:
            part, index = passes[-1]
            end = min(logits_from, first + MAX_TOKENS - len(index))
            part.append(ScheduledTokens(request, first, end, end))
            index += rows[at + first - start : at + end - start]
            first = end
            if len(index) == MAX_TOKENS:
                passes.append(([], []))
        at += stop - start
        if logits_from < stop:
            last.append(ScheduledTokens(request, logits_from, stop, logits_from))
            last_rows += rows[at - (stop - logits_from) : at]
    return [item for item in (*passes, (last, last_rows)) if item[0]]


def _last_draft(request: Request) -> ScheduledTokens:
    stop = len(request.ids) + len(request.drafts)
    return ScheduledTokens(request, stop - 1, stop, stop - 1)


class _HeadState:
    """The head's progress with one request."""

    def __init__(self, max_length: int, block_size: int) -> None:
        self._block_size = block_size
        self._num_computed = 0  # tokens that the head has read, without drafts
        self._blocks: list[int] | None = None
        self._last = LastDraft(max_length)
        self._room = 0

    def follow(self, request: Request, start: int, reserve: Reserve) -> ScheduledTokens | None:
        """Schedule the tokens that a step from `start` on lets the head read, with logits if drafts are to follow; None
        if there are none."""
        if self._blocks is not request.blocks:  # it was admitted, perhaps again
            self._blocks, self._num_computed = request.blocks, request.num_shared_tokens
        if self._last.tokens:
            self._last.adapt(request.ids)
        self._last.record(request.ids, [])
        first = self._num_computed
        if not start <= first <= start + 1:  # a step was missed: its hidden states are gone
            return None
        known, length = len(request.ids), min(max_drafts(request), self._last.length)
        self._room = reserve(request, known + length) - known if length else 0
        stop = min(request.num_computed_tokens + 1, len(request.blocks) * self._block_size)
        if first >= stop:
            return None
        return ScheduledTokens(request, first, stop, stop - 1 if self._room > 0 else stop)

    def computed(self, scheduled: ScheduledTokens) -> None:
        """Record the tokens that the head has read."""
        self._num_computed = scheduled.stop

    def append(self, request: Request, token: int) -> bool:
        """Append a draft token; return whether there is room for more."""
        request.drafts.append(token)
        self._last.tokens.append(token)
        return len(request.drafts) < self._room
