"""Guesses for the next tokens, verified by the model in one step (speculative decoding). A guess never changes an
answer: what is wrong is thrown away, what is right saves a step.

A drafter sets `request.drafts`. `NGrams` needs no second model: it looks up what followed the last tokens the last time
that they stood in this request. A model that guesses is in draft_model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .request import Request
from .step import ScheduledTokens

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
