"""Who may come in: how many requests are on their way, how many tokens of prompts nobody has read yet, and when there
will be room again.

The engine's own books are looked at, never kept twice: a request runs while it has a row, it waits before that and
after it was sent back. What is still being tokenized is held a place, with an estimate of its tokens. All of it belongs
to the event loop; the engine's thread goes on meanwhile, so that a figure may be a step old.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..engine.engine import Engine
from ..engine.request import Request
from ..errors import InvalidRequestError, QueueFullError
from .config import Settings

LONGEST_RETRY_S = 60
NEWEST = 0.1  # weight of what was seen last


class Load(NamedTuple):
    """What is on its way."""

    running: int
    waiting: int
    unread: int  # tokens of prompts


class Hold:
    """Places for requests whose prompts are not ids yet."""

    def __init__(self, admission: Admission, requests: int, tokens: int) -> None:
        self.requests, self.tokens = requests, tokens
        self._admission = admission

    def correct(self, tokens: int) -> None:
        """So many it is in truth; where that is too much after all, it is refused now."""
        self.requests, requests, self.tokens = 0, self.requests, 0
        self._admission.require(requests, tokens)
        self.requests, self.tokens = requests, tokens


class Admission:
    """The queue's door."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._engine: Engine  # of the last who asked: there is one
        self._taken: set[Request] = set()
        self._holds: set[Hold] = set()
        self._token_s: float | None = None  # between two tokens of an answer
        self._made = self._asked = 0.0  # tokens of answers that ended, of late: most end before they must

    @property
    def load(self) -> Load:
        """As it is now."""
        running = waiting = unread = 0
        for hold in self._holds:
            waiting += hold.requests
            unread += hold.tokens
        for request in self._taken:
            if request.batch_slot >= 0:
                running += 1
            elif request.arrival >= 0 and request.is_finished:
                continue  # its reader has not heard of it yet
            else:
                waiting += 1
            unread += max(0, request.num_prompt_tokens - request.num_computed_tokens)
        return Load(running, waiting, unread)

    def require_room(self, engine: Engine, requests: int) -> None:
        """Refuse more at once than could ever wait."""
        if requests > (room := self._room(engine)):
            raise InvalidRequestError(f"{requests} answers are asked for at once: at most {room} are taken", "prompt")

    @contextmanager
    def held(self, engine: Engine, requests: int, tokens: int) -> Iterator[Hold]:
        """Places until the requests are begun, or given up."""
        self._engine = engine
        self.require(requests, tokens)
        hold = Hold(self, requests, tokens)
        self._holds.add(hold)
        try:
            yield hold
        finally:
            self._holds.remove(hold)

    def require(self, requests: int, tokens: int) -> None:
        """Refuse what would wait too long, with the time after which it would not. What is larger than all that may
        wait comes in when there is nothing else to read."""
        load, room = self.load, self._room(self._engine)
        too_many = load.running + load.waiting + requests - room
        too_long = load.unread + tokens - self._settings.max_queued_tokens if load.unread else 0
        if too_many > 0 or too_long > 0:
            told = f"{load.running} requests are computed, {load.waiting} wait, {load.unread} prompt tokens are unread"
            raise QueueFullError(told, self._retry_after(load, too_many, too_long))

    def _room(self, engine: Engine) -> int:
        return engine.config.max_batch + self._settings.max_queue

    def _retry_after(self, load: Load, too_many: int, too_long: int) -> int:
        """When so many have ended; for tokens, when they are read, which begins when somebody's row is free."""
        seconds = 0.0
        if too_long > 0:
            seconds = too_long * (self._engine.token_budget.seconds_per_token or 0.0)
            too_many = max(too_many, int(load.running >= self._engine.config.max_batch))
        if too_many > 0:
            seconds += self._seconds_until_gone(too_many)
        return max(1, min(LONGEST_RETRY_S, math.ceil(seconds)))

    def _seconds_until_gone(self, count: int) -> float:
        """As far as those who run tell it: what they may still say, as much of it as answers have lately said."""
        part = min(1.0, self._made / self._asked) if self._asked else 1.0
        prompt_s, token_s = self._engine.token_budget.seconds_per_token or 0.0, (self._token_s or 0.0) * part
        left = sorted(
            max(0, request.max_total_tokens - request.num_tokens) * token_s
            + max(0, request.num_prompt_tokens - request.num_computed_tokens) * prompt_s
            for request in self._taken
            if request.batch_slot >= 0
        )
        if not left:
            return 0.0
        return left[count - 1] if count <= len(left) else left[-1] * count / len(left)

    def began(self, request: Request) -> None:
        """The engine has it."""
        self._taken.add(request)

    def spoke(self, seconds: float, tokens: int) -> None:
        """An answer went on, so long after it did before."""
        new = seconds / tokens
        self._token_s = new if self._token_s is None else self._token_s + NEWEST * (new - self._token_s)

    def ended(self, request: Request) -> None:
        """However it did."""
        self._taken.discard(request)
        if request.num_tokens > request.num_prompt_tokens:
            self._made = (1 - NEWEST) * self._made + request.num_tokens - request.num_prompt_tokens
            self._asked = (1 - NEWEST) * self._asked + request.max_tokens
