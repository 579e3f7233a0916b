"""Guided decoding: the grammar of one request in progress.

A `Constraint` follows the tokens of its request. Before sampling it fills a mask for the next token and for the token
after each draft; after sampling it consumes the accepted tokens. Tokens that the grammar forces become drafts: they are
verified under the masks, so that they save steps and never change an answer. Masks are a function of the tokens alone,
so the same request gets the same answer in any batch, with any drafts, after a preemption or in another engine.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from statistics import median
from typing import Any

import numpy as np

from ..backends.ops import TokenMask

MAX_FORCED_TOKENS = 16  # drafts of a request in a step
# Ending a document in time (close_on_length): the end is searched for within this many tokens of the limit, and taken
# when it would leave fewer than RESERVE tokens, or a quarter of few tokens, unused.
CLOSING_WINDOW, RESERVE = 256, 16
MAX_SEARCHED_STATES, MAX_BRANCHES, RANK_COST = 250, 8, 16

# Processor time of a step of one grammar: to consume a token, look for forced ones and fill a mask. Beyond SLOW_STEP_S
# the next step is computed while other requests go on; a median of BUDGET_STEPS above MAX_STEP_S ends the request.
SLOW_STEP_S, MAX_STEP_S, BUDGET_STEPS = 0.01, 0.1, 8
WATCHED_S = 0.003  # of wall time, which costs less to read: processor time is read once a call took longer
BACKGROUND_NICE = 5

LEXER_ERROR = "lexer error:"  # of llguidance: too many states, or no fuel left
LIMIT_ERRORS = ("items", "fuel", "too complex")  # of its parser
logger = logging.getLogger("llm_worker_rbee.engine")


class Constraint:
    """The grammar of one request, after the tokens that it has."""

    def __init__(
        self,
        matcher: Any,
        table_eos_ids: Sequence[int],
        eos_ids: Sequence[int],
        vocab_size: int,
        max_tokens: int,
        match_alone: Callable[[], Any] | None = None,
        ending_tokens: Sequence[int] | None = None,
    ) -> None:
        """`table_eos_ids`: the ids that end a text for the matcher; `eos_ids`: the request's ids.

        `match_alone` returns a matcher that shares no lexer. `ending_tokens`: to end within `max_tokens`.
        """
        self.masks: TokenMask | None = None  # of the step: for the next token, and after each draft
        self.num_words = -(-vocab_size // 32)
        self.matcher, self._match_alone = matcher, match_alone
        self._tokens: list[int] = []
        self._eos_ids, self._table_eos_ids = frozenset(eos_ids), frozenset(table_eos_ids)
        self._not_eos = next(token for token in range(vocab_size) if token not in self._eos_ids)
        self._max_tokens = max_tokens
        self._closing = None if ending_tokens is None else _Closing(ending_tokens, max_tokens)
        self._next_mask: TokenMask | None = None  # computed ahead by `advance`
        self._seconds, self._step_seconds = 0.0, deque[float](maxlen=BUDGET_STEPS)
        self._clock = time.perf_counter

    @property
    def is_slow(self) -> bool:
        """Whether the last step took long: the next one is for `MaskFiller.advance`."""
        return bool(self._step_seconds) and self._step_seconds[-1] > SLOW_STEP_S

    @property
    def is_too_slow(self) -> bool:
        """Whether so many steps took too long that the request must end."""
        return len(self._step_seconds) == BUDGET_STEPS and median(self._step_seconds) > MAX_STEP_S

    def _count(self, start: float) -> None:
        """Count the time since `start`. Wall time, which other threads share, ends no request."""
        seconds = self._clock() - start
        if self._clock is time.perf_counter and seconds > WATCHED_S:
            self._clock, seconds = time.thread_time, min(seconds, MAX_STEP_S)
        self._seconds += seconds

    def end_step(self) -> None:
        """Record the time of a mask and of the tokens before it."""
        self._step_seconds.append(self._seconds)
        self._seconds = 0.0

    def advance(self, tokens: Sequence[int]) -> int:
        """Consume tokens as far as the grammar allows them and is not complete, and compute the mask after them ahead.
        Return how many were consumed."""
        for count, token in enumerate(tokens):
            if not self.consume(token):
                return count
            if self.is_complete:
                return count + 1
        self.masks = np.zeros((1, self.num_words), np.int32)
        self.fill(())
        self._next_mask = self.masks[0]
        return len(tokens)

    def take_next_mask(self) -> bool:
        """Take the mask that was computed ahead, if there is one."""
        mask, self._next_mask = self._next_mask, None
        if mask is None or self.masks is None or len(self.masks) > 1:
            return False
        self.masks[0] = mask
        return True

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end of the text."""
        if self._closing is not None and self._closing.path == []:
            return True
        return bool(self.matcher.is_stopped() and self.matcher.is_accepting())

    def consume(self, token: int) -> bool:
        """Consume a sampled token; return False if the grammar does not allow it: then nothing can follow."""
        start, self._next_mask = self._clock(), None
        is_allowed = self.matcher.consume_token(token) or (self._recover() and self.matcher.consume_token(token))
        self._count(start)
        if is_allowed:
            self._tokens.append(token)
            if self._closing is not None and self._closing.path:
                self._closing.path.pop(0)
        return bool(is_allowed)

    def replay(self, token: int) -> bool:
        """Consume a token sampled earlier, possibly by another engine."""
        self._plan_end()
        return self.consume(token)

    def describe_error(self) -> str:
        """Return why no token is possible; the matcher's reason, which names its own parts, is logged."""
        reason = next(iter(self.matcher.get_error().splitlines()), "")
        logger.debug("a matcher stopped: %s", reason)
        is_limit = any(name in reason for name in (LEXER_ERROR, *LIMIT_ERRORS))
        return f"the grammar allows no token after {len(self._tokens)} tokens" + ": it is too complex" * is_limit

    def next_drafts(self, drafts: Sequence[int], room: int) -> list[int]:
        """Return the tokens that are certain to follow, or `drafts` up to the first that the grammar forbids."""
        room = 0 if self.is_slow else min(room, MAX_FORCED_TOKENS)
        if self._closing is not None:
            if self._closing.path is not None:
                return self._closing.path[:room]
            room = min(room, self._num_left - CLOSING_WINDOW - 1)  # inside the window each token is looked at
        if room <= 0 or self.matcher.is_stopped():
            return []
        start = self._clock()
        next_tokens = self._allowed_drafts(drafts, room)
        self._count(start)
        return next_tokens

    def _allowed_drafts(self, drafts: Sequence[int], room: int) -> list[int]:
        if self.matcher.compute_ff_bytes():
            forced: list[int] = self.matcher.compute_ff_tokens()
            if forced:
                return forced[:room]
        cut = next((i for i, token in enumerate(drafts) if token in self._eos_ids), len(drafts))
        valid = self.matcher.validate_tokens(list(drafts[: min(cut, room)])) if drafts else 0
        return list(drafts[:valid])

    def fill(self, drafts: Sequence[int]) -> None:
        """Fill the masks of the next token and of the token after each draft."""
        start = self._clock()
        if self.prepare():
            self._fill(drafts)
            if self.matcher.is_error() and self._recover():
                self._fill(drafts)
        self.finish_masks()
        self._count(start)
        self.end_step()

    def prepare(self) -> bool:
        """Search for an ending in time; return whether `matcher` has to fill the masks."""
        self._plan_end()
        return self._closing is None or self._closing.path is None

    def finish_masks(self) -> None:
        """Allow the ids that end this request where the grammar may end; where no token is allowed, any is."""
        assert self.masks is not None
        path = None if self._closing is None else self._closing.path
        if path is None and self.matcher.is_error():
            self.masks[:] = 0
        has_own_eos = self._eos_ids != self._table_eos_ids
        for i, row in enumerate(self.masks):
            if path is not None:
                row[:] = _bits_of(path[i : i + 1] or self._eos_ids, self.num_words)
            elif has_own_eos and _allowed(row, sorted(self._table_eos_ids)):
                row &= ~_bits_of(self._table_eos_ids, self.num_words)
                row |= _bits_of(self._eos_ids, self.num_words)
            if not np.count_nonzero(row):
                row[:] = _bits_of([self._not_eos], self.num_words)  # one must be sampled: `consume` refuses it

    def _fill(self, drafts: Sequence[int]) -> None:
        assert self.masks is not None
        address, row_bytes = self.masks.__array_interface__["data"][0], 4 * self.num_words
        self.matcher.unsafe_compute_mask_ptr(address, row_bytes)
        if not drafts:
            return
        self.masks[1:] = 0
        for i, token in enumerate(drafts, 1):
            if not self.matcher.consume_token(token):
                return
            self.matcher.unsafe_compute_mask_ptr(address + i * row_bytes, row_bytes)
        self.matcher.rollback(len(drafts))

    @property
    def _num_left(self) -> int:
        return self._max_tokens - len(self._tokens)

    def _plan_end(self) -> None:
        if self._closing is not None:
            self._closing.plan(self.matcher, self._num_left, self.num_words)

    def _recover(self) -> bool:
        """Go on with a matcher of its own where the lexer, which copies share, may be used up by other requests."""
        match_alone, self._match_alone = self._match_alone, None
        if match_alone is None or not self.matcher.get_error().startswith(LEXER_ERROR):
            return False
        matcher = match_alone()
        if self._tokens and not matcher.consume_tokens(self._tokens):
            return False
        self.matcher = matcher
        return True


class _Closing:
    """Decides when and how to end a document."""

    def __init__(self, ending_tokens: Sequence[int], max_tokens: int) -> None:
        self.path: list[int] | None = None  # the tokens that are left, once the end has begun
        self._ending_tokens = ending_tokens
        self._reserve = min(RESERVE, max_tokens // 4)
        self._next_check = CLOSING_WINDOW

    def plan(self, matcher: Any, num_left: int, num_words: int) -> None:
        """Search for an ending of a request with `num_left` tokens left, if it is time; begin it if necessary."""
        if self.path is not None or num_left > self._next_check:
            return
        closing = find_end(matcher, self._ending_tokens, num_left - 1, num_words)  # one is for the end of the text
        if closing is None:
            self._next_check = num_left // 2
            return
        spare = num_left - 1 - len(closing) - self._reserve
        if spare <= 0:
            self.path = closing
        else:  # a token may lengthen the end, so it is looked for again well before the limit
            self._next_check = num_left - max(1, spare // 2)


def find_end(matcher: Any, ending_tokens: Sequence[int], max_length: int, num_words: int) -> list[int] | None:
    """Return a short sequence of tokens after which the grammar accepts; None if none is found.

    First each of `ending_tokens` alone is tried. Then a best-first search: at each state the first few of them that are
    allowed, or the first allowed tokens. A token that is forced costs nothing, another 1 and its rank among them times
    RANK_COST. So the path is short, and not always the shortest.
    """
    copy, mask = matcher.deep_copy(), np.zeros(num_words, np.int32)
    if copy.is_accepting():
        return []
    copy.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    for token in _allowed(mask, ending_tokens) if max_length else ():
        if not copy.consume_token(token):
            return None  # a limit of the grammar
        is_end = copy.is_accepting()
        copy.rollback(1)
        if is_end:
            return [token]
    heap: list[tuple[int, int, list[int]]] = [(0, 0, [])]
    for visited in range(MAX_SEARCHED_STATES):
        if not heap:
            break
        cost, _, path = heappop(heap)
        if path and not copy.consume_tokens(path):
            break
        if copy.is_accepting():
            return path
        if len(path) < max_length:
            copy.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            branches = _allowed(mask, ending_tokens)[:MAX_BRANCHES] or _first_allowed(mask)
            for rank, token in enumerate(branches):
                penalty = 1 + RANK_COST * rank if len(branches) > 1 else 0
                heappush(heap, (cost + penalty, visited * MAX_BRANCHES + rank, [*path, token]))
        copy.rollback(len(path))
    return None


def _allowed(mask: TokenMask, tokens: Sequence[int]) -> list[int]:
    return [token for token in tokens if mask[token >> 5] >> (token & 31) & 1]


def _first_allowed(mask: TokenMask) -> list[int]:
    """Return one token of each of the first words of a mask that allow any."""
    words = np.flatnonzero(mask)[:MAX_BRANCHES].tolist()
    return [32 * word + next(bit for bit in range(32) if mask[word] >> bit & 1) for word in words]


def _bits_of(tokens: Iterable[int], num_words: int) -> TokenMask:
    words = np.zeros(num_words, np.uint32)
    for token in tokens:
        words[token >> 5] |= np.uint32(1 << (token & 31))
    return words.view(np.int32)


def lower_thread_priority() -> None:
    """Let the calling thread yield to threads that compute steps."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, BACKGROUND_NICE)  # of the thread, on Linux
