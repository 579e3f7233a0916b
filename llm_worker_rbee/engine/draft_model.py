"""A second, smaller model that guesses for the first one. Its keys and values lie in a cache of its own under the same
block numbers, so it needs no books: what requests share, and what they lose, they share and lose there too.

After each step it computes what it has not seen of every request, then guesses token after token, choosing as the
request itself would: with the same draws it is right more often than with the likeliest token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..cache import KVCache
from ..config import EngineConfig
from ..errors import InvalidRequestError
from ..models import Transformer
from .model_runner import forward
from .request import Request
from .sampler import sample_rows
from .speculative import Guess, MakeBatch, Reserve, room_for_drafts
from .step import ScheduledTokens


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
