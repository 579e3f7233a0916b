"""Guesses for the next tokens, verified by the model in one step (speculative decoding). A guess never changes an
answer: what is wrong is thrown away, what is right saves a step.

A drafter sets `request.drafts`. `NGrams` needs no second model: it looks up what followed the last tokens the last time
that they stood in this request. A model that guesses is in draft_model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..cache import KVCache
from ..config import EngineConfig
from ..errors import InvalidRequestError
from ..models import Transformer
from .model_runner import forward
from .request import Request, ScheduledTokens
from .sampler import sample_rows

LONGEST, SHORTEST = 4, 2  # tokens that must be met again before what followed them is guessed


Reserve = Callable[[Request, int], int]  # blocks for so many tokens of a request; how many they hold
MakeBatch = Callable[[Sequence[ScheduledTokens]], Any]  # the arrays of a step


class Drafter(Protocol):
    """Somebody who guesses."""

    def draft(self, running: Sequence[Request], reserve: Reserve, batch: MakeBatch) -> None:
        """After a step: set `drafts` of those who answer."""


def room_for_drafts(request: Request) -> int:
    """How many guesses make sense: none for a request that reads its prompt, none past the end of the answer."""
    if request.num_computed_tokens != len(request.ids) - 1:
        return 0
    return max(0, request.max_total_tokens - len(request.ids) - 1)


class Guess:
    """The last guess for one request, and how long the next one may be: twice as long as the last if that was right to
    its end, otherwise as long as it was right."""

    def __init__(self, most: int) -> None:
        self.most = self.length = most
        self.at = 0  # where it begins
        self.tokens: list[int] = []

    def num_right(self, ids: Sequence[int]) -> int:
        """How many of its tokens are what the model said."""
        said = ids[self.at : self.at + len(self.tokens)]
        return next((i for i, (a, b) in enumerate(zip(said, self.tokens, strict=False)) if a != b), len(said))

    def learn(self, ids: Sequence[int]) -> None:
        """Look back."""
        if self.tokens:
            right = self.num_right(ids)
            self.length = min(self.most, 2 * right) if right == len(self.tokens) else max(1, right)

    def make(self, ids: Sequence[int], tokens: list[int]) -> list[int]:
        """Remember these."""
        self.at, self.tokens = len(ids), tokens
        return list(tokens)


class NgramDrafter:
    """Prompt lookup: the text repeats itself, or its prompt."""

    def __init__(self, most: int) -> None:
        self.most = most

    def draft(self, running: Sequence[Request], reserve: Reserve, batch: MakeBatch) -> None:
        """Everybody gets what followed the last time."""
        for request in running:
            room = room_for_drafts(request)
            if room:
                if request.draft_state is None:
                    request.draft_state = _Index(self.most)
                request.drafts = request.draft_state.guess(request.ids, room)


class _Index:
    """Where each run of tokens of one request was last followed by something."""

    def __init__(self, most: int) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._seen = 0  # tokens that are in it as followers
        self._last = Guess(most)

    def guess(self, ids: list[int], room: int) -> list[int]:
        """What followed the longest run that was met before."""
        self._last.learn(ids)
        for at in range(self._seen, len(ids)):
            for n in range(SHORTEST, min(LONGEST, at) + 1):
                self._after[tuple(ids[at - n : at])] = at
        self._seen = len(ids)
        for n in range(min(LONGEST, len(ids)), SHORTEST - 1, -1):
            at = self._after.get(tuple(ids[-n:]), -1)
            if at >= 0:
                return self._last.make(ids, ids[at : at + min(room, self._last.length)])
        return self._last.make(ids, [])


class DraftModel:
    """A model that guesses `config.draft_tokens` tokens at a time."""

    def __init__(self, model: Transformer, config: EngineConfig, vocab_size: int, kv_type: str = "float32") -> None:
        if model.config.vocab_size != vocab_size:
            raise InvalidRequestError(
                f"the draft model has a vocabulary of {model.config.vocab_size}, the model one of {vocab_size}: "
                "they must share one tokenizer",
                "draft_model",
            )
        self.model = model
        self.cache = KVCache(model.ops, model.config, config.n_blocks, config.block_size, kv_type)
        self._most, self._block_size = config.draft_tokens, config.block_size
        self._held: dict[int, bytes] = {}  # block -> the hash of what it computed there

    def draft(self, running: Sequence[Request], reserve: Reserve, batch: MakeBatch) -> None:
        """Catch up with everybody, then guess for those who answer, one token of each at a time."""
        for request in running:
            self._state(request).look_back(request, self._num_held)
        guessing = [request for request in running if self._state(request).begin(request, reserve)]
        behind = [self._state(r).catch_up(r) for r in running if r not in guessing]
        spans = [span for span in behind if span.start < span.stop]
        while guessing:
            spans += [self._state(request).span(request) for request in guessing]
            logits = forward(self.model, batch(spans), self.cache)
            tokens = self.model.ops.sample(logits, [sample_rows(request)[-1] for request in guessing]).tolist()
            guessing = [r for r, token in zip(guessing, tokens, strict=True) if self._state(r).add(r, token)]
            spans = []
        if spans:
            forward(self.model, batch(spans), self.cache)
        for request in running:
            self._hold(request)

    def _num_held(self, request: Request) -> int:
        """Tokens at the beginning of a request that somebody's guesses have computed: those found in the prefix cache
        may come from a request that ended before they were."""
        pairs = zip(request.blocks, request.hashes, strict=False)
        blocks = next((i for i, (block, known_as) in enumerate(pairs) if self._held.get(block) != known_as), None)
        whole = request.num_shared_tokens
        return whole if blocks is None else min(whole, blocks * self._block_size)

    def _hold(self, request: Request) -> None:
        """Remember what is computed of full blocks, where others could find them."""
        full = min(request.draft_state.num_computed // self._block_size, request.num_hashed_blocks, len(request.hashes))
        for i in range(request.draft_state.num_held_blocks, full):
            self._held[request.blocks[i]] = request.hashes[i]
        request.draft_state.num_held_blocks = max(full, request.draft_state.num_held_blocks)

    def _state(self, request: Request) -> _State:
        if request.draft_state is None:
            request.draft_state = _State(self._most)
        state: _State = request.draft_state
        return state


class _State:
    """How far the draft model is with one request."""

    def __init__(self, most: int) -> None:
        self.num_computed = self.num_held_blocks = 0
        self._blocks: list[int] | None = None
        self._last = Guess(most)
        self._room = 0

    def look_back(self, request: Request, num_held: Callable[[Request], int]) -> None:
        """What it computed of wrong guesses does not count; after a preemption only what is held still does."""
        if self._blocks is not request.blocks:
            self._blocks, self.num_computed, self.num_held_blocks = request.blocks, num_held(request), 0
            self._last.tokens = []
        if self._last.tokens:
            self._last.learn(request.ids)
            self.num_computed = min(self.num_computed, self._last.at + self._last.num_right(request.ids))

    def begin(self, request: Request, reserve: Reserve) -> bool:
        """Whether there is something to guess: room in the answer, and blocks for the guesses."""
        wanted, known = min(room_for_drafts(request), self._last.length), len(request.ids)
        self._last.make(request.ids, [])
        self._room = reserve(request, known + wanted) - known if wanted else 0
        return self._room > 0

    def catch_up(self, request: Request) -> ScheduledTokens:
        """What the model itself has computed and this one has not."""
        start, self.num_computed = self.num_computed, max(self.num_computed, request.num_computed_tokens)
        return ScheduledTokens(request, start, self.num_computed, self.num_computed)

    def span(self, request: Request) -> ScheduledTokens:
        """What it computes next: all it does not know yet."""
        stop = len(request.ids) + len(request.drafts)
        return ScheduledTokens(request, self.num_computed, stop, stop - 1)

    def add(self, request: Request, token: int) -> bool:
        """One guess more; whether to go on."""
        self.num_computed = len(request.ids) + len(request.drafts)
        request.drafts.append(token)
        self._last.tokens.append(token)
        return len(request.drafts) < self._room
