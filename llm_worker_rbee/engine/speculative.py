"""Speculative decoding: draft tokens that the model verifies in one step. Drafts never change the output: wrong ones
are discarded, right ones save a step.

A drafter sets `request.drafts`. `NgramDrafter` needs no second model: it looks up the last tokens earlier in the same
sequence. `DraftModel` is a smaller model. Its keys and values lie in a cache of its own under the same block numbers,
so it needs no scheduler: prefix hits and preemptions hold for it too. It samples as the request itself would: with the
same draws it is right more often than with the most probable token. Drafts follow tokens that the host must know: while
drafting no step is launched ahead of the one before (async_scheduling.py says what that costs). Where that does not pay
drafting is paused (draft_control.py); a drafter catches up when it is called again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..backends.ops import Array, Progress, StepLimits, WarmUp
from ..config import EngineConfig
from ..errors import InvalidRequestError
from ..models import Transformer
from ..models.kv_cache import KVCache
from .model_runner import forward
from .request import Request, ScheduledTokens
from .sampler import sample_rows
from .scheduler import MIN_PREFILL_TOKENS

MAX_NGRAM, MIN_NGRAM = 4, 2  # tokens that must repeat before what followed them is proposed

Reserve = Callable[[Request, int], int]  # `Scheduler.reserve`
MakeBatch = Callable[[Sequence[ScheduledTokens]], Any]  # `ModelRunner.batch`


class Drafter(ABC):
    """Proposes draft tokens."""

    can_pause = True  # False: it must follow every step, so drafting is kept on
    needs_hidden = False  # True: it observes the hidden states of every step

    @abstractmethod
    def draft(self, running: Sequence[Request], reserve: Reserve, batch: MakeBatch) -> None:
        """Set `drafts` of the requests that decode, after a step."""

    def observe(self, scheduled: Sequence[ScheduledTokens], hidden: Array) -> None:
        """Read the hidden states of a step, which are valid until the next one."""
        raise NotImplementedError  # of a drafter that needs them

    def warm_up(self, limits: StepLimits, progress: Progress) -> WarmUp:
        """Do the one-time work of its own model."""
        return WarmUp(0, 0)


def max_drafts(request: Request) -> int:
    """Return the useful number of drafts: none during prefill, none past the end of the output."""
    if request.num_computed_tokens != len(request.ids) - 1:
        return 0
    return max(0, request.max_total_tokens - len(request.ids) - 1)


class LastDraft:
    """The last draft of a request, and the length of the next: doubled if all of it was accepted, otherwise as long as
    its accepted part."""

    def __init__(self, max_length: int) -> None:
        self.max_length = self.length = max_length
        self.start = 0
        self.tokens: list[int] = []

    def num_accepted(self, ids: Sequence[int]) -> int:
        """Return the number of its tokens that the model sampled too."""
        actual = ids[self.start : self.start + len(self.tokens)]
        return next((i for i, (a, b) in enumerate(zip(actual, self.tokens, strict=False)) if a != b), len(actual))

    def adapt(self, ids: Sequence[int]) -> None:
        """Set the length of the next draft."""
        if self.tokens:
            accepted = self.num_accepted(ids)
            is_whole = accepted == len(self.tokens)
            self.length = min(self.max_length, 2 * accepted) if is_whole else max(1, accepted)

    def record(self, ids: Sequence[int], tokens: list[int]) -> list[int]:
        """Remember a draft that follows `ids`, and return a copy of it."""
        self.start, self.tokens = len(ids), tokens
        return list(tokens)


class NgramDrafter(Drafter):
    """Prompt lookup: proposes the tokens that followed the same tokens before."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length

    def draft(self, running: Sequence[Request], reserve: Reserve, batch: MakeBatch) -> None:
        for request in running:
            room = max_drafts(request)
            if room:
                if request.draft_state is None:
                    request.draft_state = _NgramIndex(self.max_length)
                request.drafts = request.draft_state.propose(request.ids, room)


class _NgramIndex:
    """The last position of each n-gram of one request that a token follows."""

    def __init__(self, max_length: int) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0  # tokens that are in it as followers
        self._last = LastDraft(max_length)

    def propose(self, ids: list[int], room: int) -> list[int]:
        """Return the tokens that followed the longest n-gram that occurred before, where it occurred last."""
        self._last.adapt(ids)
        for at in range(self._num_indexed, len(ids)):
            for n in range(MIN_NGRAM, min(MAX_NGRAM, at) + 1):
                self._after[tuple(ids[at - n : at])] = at
        self._num_indexed = len(ids)
        for n in range(min(MAX_NGRAM, len(ids)), MIN_NGRAM - 1, -1):
            at = self._after.get(tuple(ids[-n:]), -1)
            if at >= 0:
                return self._last.record(ids, ids[at : at + min(room, self._last.length)])
        return self._last.record(ids, [])


class DraftModel(Drafter):
    """A model that drafts up to `config.draft_tokens` tokens for each request."""

    def __init__(self, model: Transformer, config: EngineConfig, vocab_size: int, kv_type: str = "float32") -> None:
        if model.config.vocab_size != vocab_size:
            raise InvalidRequestError(
                f"the draft model has a vocabulary of {model.config.vocab_size}, the model one of {vocab_size}: "
                "they must share one tokenizer",
                "draft_model",
            )
        if model.config.state_bytes:
            raise InvalidRequestError(
                f"a draft model of the family {model.config.family.name} has states, which is not supported: "
                "use another one, or speculative ngram",
                "draft_model",
            )
        self.model = model
        self.cache = KVCache(model.ops, model.config, config.n_blocks, config.block_size, kv_type)
        self._max_length, self._block_size = config.draft_tokens, config.block_size
        self._max_step_tokens = config.max_step_tokens
        self._computed: dict[int, bytes] = {}  # block -> the hash of what this model computed there

    def draft(self, running: Sequence[Request], reserve: Reserve, batch: MakeBatch) -> None:
        """Catch up with every request, then draft for requests that decode, one token of each at a time.

        What is missing after a pause, or of a prefix that only the model has computed, may take several steps.
        """
        budget = max(self._max_step_tokens, 2 * len(running) + MIN_PREFILL_TOKENS)
        scheduled, drafting = list[ScheduledTokens](), list[Request]()
        for request in running:
            state = self._state(request)
            num_behind = state.sync(request, self._num_computed)
            if num_behind < budget and state.begin(request, reserve):
                drafting.append(request)
                budget -= num_behind + 1
            elif num_behind and budget:
                scheduled.append(state.catch_up(request, min(num_behind, budget)))
                budget -= min(num_behind, budget)
        while drafting:
            scheduled += [self._state(request).schedule(request) for request in drafting]
            logits = forward(self.model, batch(scheduled), self.cache)
            tokens = self.model.ops.sample(logits, [sample_rows(request)[-1] for request in drafting]).tolist()
            drafting = [r for r, token in zip(drafting, tokens, strict=True) if self._state(r).append(r, token)]
            scheduled = []
        if scheduled:
            forward(self.model, batch(scheduled), self.cache)
        for request in running:
            self._record_blocks(request)

    def warm_up(self, limits: StepLimits, progress: Progress) -> WarmUp:
        run = partial(forward, self.model, cache=self.cache)
        return self.model.ops.warm_up(run, self.model.fused, self.cache.layers, limits, progress)

    def _num_computed(self, request: Request) -> int:
        """Return how many tokens of a prefix hit this model has computed too: the request that computed them may have
        finished before this model did."""
        pairs = zip(request.blocks, request.hashes, strict=False)
        blocks = next((i for i, (block, key) in enumerate(pairs) if self._computed.get(block) != key), None)
        shared = request.num_shared_tokens
        return shared if blocks is None else min(shared, blocks * self._block_size)

    def _record_blocks(self, request: Request) -> None:
        """Remember the full blocks that this model has computed and the prefix cache can find."""
        state: _DraftState = request.draft_state
        full = min(state.num_computed // self._block_size, request.num_hashed_blocks, len(request.hashes))
        for i in range(state.num_recorded_blocks, full):
            self._computed[request.blocks[i]] = request.hashes[i]
        state.num_recorded_blocks = max(full, state.num_recorded_blocks)

    def _state(self, request: Request) -> _DraftState:
        if request.draft_state is None:
            request.draft_state = _DraftState(self._max_length)
        state: _DraftState = request.draft_state
        return state


class _DraftState:
    """The draft model's progress with one request."""

    def __init__(self, max_length: int) -> None:
        self.num_computed = self.num_recorded_blocks = 0
        self._blocks: list[int] | None = None
        self._last = LastDraft(max_length)
        self._room = 0

    def sync(self, request: Request, num_computed: Callable[[Request], int]) -> int:
        """Discount rejected drafts, and after a preemption all uncached blocks; return the number of tokens that the
        model has computed and the draft model has not."""
        if self._blocks is not request.blocks:
            self._blocks, self.num_computed, self.num_recorded_blocks = request.blocks, num_computed(request), 0
        elif self._last.tokens:
            self._last.adapt(request.ids)
            accepted = self._last.start + self._last.num_accepted(request.ids)
            # the last token is computed in any case, for its logits: it may be a draft that was dropped, then sampled
            self.num_computed = min(self.num_computed, accepted, len(request.ids) - 1)
        self._last.record(request.ids, [])
        return max(0, request.num_computed_tokens - self.num_computed)

    def begin(self, request: Request, reserve: Reserve) -> bool:
        """Return whether there is room for drafts: in the output, and in blocks."""
        length, known = min(max_drafts(request), self._last.length), len(request.ids)
        self._room = reserve(request, known + length) - known if length else 0
        return self._room > 0

    def catch_up(self, request: Request, count: int) -> ScheduledTokens:
        """Schedule `count` tokens that the model has computed and the draft model has not."""
        start = self.num_computed
        self.num_computed += count
        return ScheduledTokens(request, start, self.num_computed, self.num_computed)

    def schedule(self, request: Request) -> ScheduledTokens:
        """Schedule all tokens and drafts that are not computed."""
        stop = len(request.ids) + len(request.drafts)
        return ScheduledTokens(request, self.num_computed, stop, stop - 1)

    def append(self, request: Request, token: int) -> bool:
        """Append a draft token; return whether there is room for more."""
        self.num_computed = len(request.ids) + len(request.drafts)
        request.drafts.append(token)
        self._last.tokens.append(token)
        return len(request.drafts) < self._room
