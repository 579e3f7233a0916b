"""Guided decoding: the grammar of one request as it goes on, and the masks of a step.

A `Constraint` follows the tokens of its request. Before sampling it fills a mask for the next token and for the token
after each draft; after sampling it consumes what was accepted. Tokens that the grammar forces become drafts: they are
verified under the masks, so that they save steps and never change an answer. Masks are a function of the tokens alone,
so the same request gets the same answer in any batch, with any drafts, after a preemption or in another engine.

`MaskFiller` computes the masks of a step while the forward pass runs: in a thread, as llguidance needs no interpreter
lock. The mask of a single request is computed at once: waking a thread takes as long as most masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from heapq import heappop, heappush
from typing import Any

import numpy as np

from ..backends.ops import TokenMask
from ..errors import GrammarDeadEndError
from .request import NO_TOKEN, Request, StepOutput, error_output

MAX_FORCED_TOKENS = 16  # drafts of a request in a step
# Ending a document in time (close_on_length): the end is searched for within this many tokens of the limit, and taken
# when it would leave fewer than RESERVE tokens, or a quarter of few tokens, unused.
CLOSING_WINDOW, RESERVE = 256, 16
MAX_SEARCHED_STATES, MAX_BRANCHES, RANK_COST = 250, 8, 16

LEXER_ERROR = "lexer error:"  # of llguidance: too many states, or no fuel left


class Constraint:
    """The grammar of one request, after the tokens that it has."""

    def __init__(
        self, matcher: Any, table_eos_ids: Sequence[int], eos_ids: Sequence[int], vocab_size: int, max_tokens: int,
        match_alone: Callable[[], Any] | None = None, ending_tokens: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """`table_eos_ids`: the ids that end a text for the matcher; `eos_ids`: those of the request.

        `match_alone` returns a matcher that shares no lexer. `ending_tokens`: to end within `max_tokens`.
        """
        self.masks: TokenMask | None = None  # of the step: for the next token, and after each draft
        self.num_words = -(-vocab_size // 32)
        self._matcher, self._match_alone = matcher, match_alone
        self._tokens: list[int] = []
        self._eos_ids, self._table_eos_ids = frozenset(eos_ids), frozenset(table_eos_ids)
        self._not_eos = next(token for token in range(vocab_size) if token not in self._eos_ids)
        self._max_tokens = max_tokens
        self._closing = None if ending_tokens is None else _Closing(ending_tokens, max_tokens)

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end of the text."""
        if self._closing is not None and self._closing.path == []:
            return True
        return bool(self._matcher.is_stopped() and self._matcher.is_accepting())

    def consume(self, token: int) -> bool:
        """Go on by a token that was sampled; return False if the grammar does not allow it: then nothing can follow."""
        if not self._matcher.consume_token(token) and not (self._recover() and self._matcher.consume_token(token)):
            return False
        self._tokens.append(token)
        if self._closing is not None and self._closing.path:
            self._closing.path.pop(0)
        return True

    def replay(self, token: int) -> bool:
        """Go on by a token that was sampled before, by another engine maybe."""
        self._plan_end()
        return self.consume(token)

    def describe_error(self) -> str:
        """Return why no token is possible."""
        reason = next(iter(self._matcher.get_error().splitlines()), "")
        after = f"after {len(self._tokens)} tokens"
        return f"the grammar allows no token {after}" + (f": {reason[:200]}" if reason else "")

    def next_drafts(self, drafts: Sequence[int], room: int) -> list[int]:
        """Return the tokens that are certain to follow, or `drafts` up to the first that the grammar forbids."""
        room = min(room, MAX_FORCED_TOKENS)
        if self._closing is not None:
            if self._closing.path is not None:
                return self._closing.path[:room]
            room = min(room, self._num_left - CLOSING_WINDOW - 1)  # inside the window each token is looked at
        if room <= 0 or self._matcher.is_stopped():
            return []
        if self._matcher.compute_ff_bytes():
            forced: list[int] = self._matcher.compute_ff_tokens()
            if forced:
                return forced[:room]
        cut = next((i for i, token in enumerate(drafts) if token in self._eos_ids), len(drafts))
        valid = self._matcher.validate_tokens(list(drafts[: min(cut, room)])) if drafts else 0
        return list(drafts[:valid])

    def fill(self, drafts: Sequence[int]) -> None:
        """Fill the masks of the next token and of the one after each draft."""
        if not self.prepare():
            self.finish_masks()
            return
        self._fill(drafts)
        if self._matcher.is_error() and self._recover():
            self._fill(drafts)
        self.finish_masks()

    def prepare(self) -> bool:
        """Look for an end in time; return whether the matcher has to fill the masks."""
        self._plan_end()
        return self._closing is None or self._closing.path is None

    @property
    def matcher(self) -> Any:
        return self._matcher

    def finish_masks(self) -> None:
        """Allow the ids that end this request where the grammar may end; where no token is allowed, any is."""
        assert self.masks is not None
        path = None if self._closing is None else self._closing.path
        if path is None and self._matcher.is_error():
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
        self._matcher.unsafe_compute_mask_ptr(address, row_bytes)
        if not drafts:
            return
        self.masks[1:] = 0
        for i, token in enumerate(drafts, 1):
            if not self._matcher.consume_token(token):
                return
            self._matcher.unsafe_compute_mask_ptr(address + i * row_bytes, row_bytes)
        self._matcher.rollback(len(drafts))

    @property
    def _num_left(self) -> int:
        return self._max_tokens - len(self._tokens)

    def _plan_end(self) -> None:
        if self._closing is not None:
            self._closing.plan(self._matcher, self._num_left, self.num_words)

    def _recover(self) -> bool:
        """Go on with a matcher of its own where the lexer, which copies share, may be used up by other requests."""
        match_alone, self._match_alone = self._match_alone, None
        if match_alone is None or not self._matcher.get_error().startswith(LEXER_ERROR):
            return False
        matcher = match_alone()
        if self._tokens and not matcher.consume_tokens(self._tokens):
            return False
        self._matcher = matcher
        return True


class _Closing:
    """Decides when a document must be ended, and how."""

    def __init__(self, ending_tokens: Sequence[int], max_tokens: int) -> None:
        self.path: list[int] | None = None  # the tokens that are left, once the end has begun
        self._ending_tokens = ending_tokens
        self._reserve = min(RESERVE, max_tokens // 4)
        self._next_check = CLOSING_WINDOW

    def plan(self, matcher: Any, num_left: int, num_words: int) -> None:
        """Look for an end of a request that may have `num_left` more tokens, if it is time; begin it if it must be."""
        if self.path is not None or num_left > self._next_check:
            return
        found = find_end(matcher, self._ending_tokens, num_left - 1, num_words)  # one is for the end of the text
        if found is None:
            self._next_check = num_left // 2
            return
        spare = num_left - 1 - len(found) - self._reserve
        if spare <= 0:
            self.path = found
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
                more = 1 + RANK_COST * rank if len(branches) > 1 else 0
                heappush(heap, (cost + more, visited * MAX_BRANCHES + rank, [*path, token]))
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


class MaskFiller:
    """Fills the masks of a step's guided requests: `start` before the forward pass, `wait` before sampling."""

    def __init__(self, make_executor: Callable[[], Any]) -> None:
        self._make_executor = make_executor
        self._executor: Any = None
        self._thread: ThreadPoolExecutor | None = None
        self._buffer: TokenMask = np.zeros((0, 0), np.int32)
        self._pending: Future[None] | None = None

    def start(self, requests: Sequence[Request]) -> None:
        """Begin to fill the masks of the guided ones among these: of the next token, and after each draft."""
        guided = [request for request in requests if request.constraint is not None]
        if not guided:
            return
        self.wait()
        self._assign(guided)
        if len(guided) == 1:
            guided[0].constraint.fill(guided[0].drafts)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._pending = self._thread.submit(self._fill, guided)

    def wait(self) -> None:
        """Wait until `masks` of all constraints are filled."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _assign(self, guided: Sequence[Request]) -> None:
        """Give each constraint its rows of one array."""
        words = guided[0].constraint.num_words
        rows = sum(1 + len(request.drafts) for request in guided)
        if self._buffer.shape[0] < rows or self._buffer.shape[1] != words:
            self._buffer = np.zeros((max(rows, 2 * self._buffer.shape[0]), words), np.int32)
        at = 0
        for request in guided:
            count = 1 + len(request.drafts)
            request.constraint.masks = self._buffer[at : at + count]
            at += count

    def _fill(self, guided: Sequence[Request]) -> None:
        if self._executor is None:
            self._executor = self._make_executor()
        plain: list[tuple[Any, int]] = []
        drafted: list[tuple[Any, int, list[int]]] = []
        at = 0
        for request in guided:
            if request.constraint.prepare():
                request.constraint.masks[:] = 0
                if request.drafts:
                    drafted.append((request.constraint.matcher, at, request.drafts))
                else:
                    plain.append((request.constraint.matcher, at))
            at += 1 + len(request.drafts)
        place = self._buffer.ctypes.data, self._buffer.strides[0], len(self._buffer)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *place)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)
        for request in guided:
            if request.constraint.matcher.is_error():
                request.constraint.fill(request.drafts)
            else:
                request.constraint.finish_masks()


def consume_outputs(outputs: Sequence[StepOutput], remove: Callable[[Request], object]) -> list[StepOutput]:
    """Let constraints consume the tokens of a step; return the outputs with what follows from that.

    A request whose grammar is complete ends as if it had sampled the end of the text; one with a token that its
    grammar refuses, because none was possible, ends with an error. `remove` takes it from the scheduler.
    """
    checked: list[StepOutput] = []
    ended: set[Request] = set()
    for output in outputs:
        request = output.request
        constraint: Constraint | None = request.constraint
        if request in ended:
            continue
        if constraint is None or output.error is not None or output.finish_reason == "stop":
            checked.append(output)
        elif not constraint.consume(output.token):
            checked.append(error_output(request, GrammarDeadEndError(constraint.describe_error())))
            ended.add(request)
        elif constraint.is_complete:  # perhaps with the last token that the limit allows
            checked += [output._replace(finish_reason=None), StepOutput(request, NO_TOKEN, None, "stop")]
            ended.add(request)
        else:
            checked.append(output)
    for request in ended:
        remove(request)
    return checked
