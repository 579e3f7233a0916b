"""Admission: whether a request may enter, by the number of requests and of prompt tokens that wait, and the
`Retry-After` of those that may not.

The state of requests is what the engine's messages say, so a figure may be one step old: a request runs from its
admission to the batch on, and waits before that and after preemption. Prompts that are still being tokenized hold a
reservation with an estimate of their tokens. All of it belongs to the event loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..errors import InvalidRequestError, QueueFullError
from ..token_engine.protocol import RequestState, TokenEngine
from .settings import ServerSettings

MAX_RETRY_S = 60
EMA_WEIGHT = 0.1
MIN_QUEUE, QUEUED_BATCHES = 256, 4  # requests that wait by default: so many, and so many full batches
MIN_QUEUED_TOKENS, QUEUED_STEPS = 262_144, 64  # likewise prompt tokens, in full steps


class QueueLoad(NamedTuple):
    """Requests inside, and prompt tokens without prefill."""

    running: int
    waiting: int
    unprefilled_tokens: int


class Reservation:
    """Places of requests whose prompts are not tokenized yet."""

    def __init__(self, admission: Admission, num_requests: int, num_tokens: int) -> None:
        self.num_requests, self.num_tokens = num_requests, num_tokens
        self._admission = admission

    def set_actual(self, num_tokens: int) -> None:
        """Replace the estimate of tokens; raise if the actual number does not fit."""
        self.num_requests, num_requests, self.num_tokens = 0, self.num_requests, 0
        self._admission.require(num_requests, num_tokens)
        self.num_requests, self.num_tokens = num_requests, num_tokens


class Admission:
    """Counts the requests inside and refuses those that would wait too long."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._engine: TokenEngine  # set by the first reservation; a worker has one
        self._requests: set[RequestState] = set()
        self._prompt_tokens = 0  # of these requests
        self._reservations: set[Reservation] = set()
        self._itl_s: float | None = None  # moving average of the inter-token latency
        self._output_tokens = self._max_tokens = 0.0  # of finished requests, decayed: most end before max_tokens

    @property
    def load(self) -> QueueLoad:
        running = waiting = unprefilled = 0
        for reservation in self._reservations:
            waiting += reservation.num_requests
            unprefilled += reservation.num_tokens
        for request in self._requests:
            if request.is_finished:
                continue  # its reader has not seen the end yet
            running += request.is_running
            waiting += not request.is_running
            unprefilled += request.num_unprefilled_tokens
        return QueueLoad(running, waiting, unprefilled)

    def require_capacity(self, engine: TokenEngine, num_requests: int) -> None:
        """Raise if one body asks for more requests than could ever be inside."""
        if num_requests > (capacity := self._capacity(engine)):
            message = f"the body asks for {num_requests} answers at once: at most {capacity} are accepted"
            raise InvalidRequestError(message, "prompt")

    @contextmanager
    def reserve(self, engine: TokenEngine, num_requests: int, num_tokens: int) -> Iterator[Reservation]:
        """Hold places until the requests are submitted or given up; raise if there are none."""
        self._engine = engine
        self.require(num_requests, num_tokens)
        reservation = Reservation(self, num_requests, num_tokens)
        self._reservations.add(reservation)
        try:
            yield reservation
        finally:
            self._reservations.remove(reservation)

    def require(self, num_requests: int, num_tokens: int) -> None:
        """Raise `QueueFullError` with the time to retry if these do not fit.

        A prompt over `max_queued_tokens` enters when no other prompt waits for prefill.
        """
        if self._surely_fits(num_requests, num_tokens):
            return
        load, capacity = self.load, self._capacity(self._engine)
        excess_requests = load.running + load.waiting + num_requests - capacity
        excess_tokens = 0
        if load.unprefilled_tokens:
            excess_tokens = load.unprefilled_tokens + num_tokens - self.max_queued_tokens(self._engine)
        if excess_requests > 0 or excess_tokens > 0:
            message = (
                f"the queue is full: {load.running} requests are running, {load.waiting} are waiting, "
                f"{load.unprefilled_tokens} prompt tokens wait for prefill"
            )
            raise QueueFullError(message, self._retry_after(load, excess_requests, excess_tokens))

    def _surely_fits(self, num_requests: int, num_tokens: int) -> bool:
        """Return whether these fit even if all prompts inside wait for prefill; it does not look at each request."""
        for reservation in self._reservations:
            num_requests += reservation.num_requests
            num_tokens += reservation.num_tokens
        fits = len(self._requests) + num_requests <= self._capacity(self._engine)
        return fits and self._prompt_tokens + num_tokens <= self.max_queued_tokens(self._engine)

    def _capacity(self, engine: TokenEngine) -> int:
        return engine.info.max_batch + self.max_queue(engine)

    def max_queue(self, engine: TokenEngine) -> int:
        """Return how many requests may wait beside those of full batches."""
        given = self._settings.max_queue
        return max(MIN_QUEUE, QUEUED_BATCHES * engine.info.max_batch) if given is None else given

    def max_queued_tokens(self, engine: TokenEngine) -> int:
        """Return how many prompt tokens may wait for prefill."""
        given, info = self._settings.max_queued_tokens, engine.info
        full_steps = info.num_replicas * info.engine.max_step_tokens
        return max(MIN_QUEUED_TOKENS, QUEUED_STEPS * full_steps) if given is None else given

    def _retry_after(self, load: QueueLoad, excess_requests: int, excess_tokens: int) -> int:
        """Estimate when so many requests have ended; for tokens, when prefill is done, which needs a free slot."""
        seconds = 0.0
        if excess_tokens > 0:
            seconds = excess_tokens * self._engine.stats().seconds_per_prefill_token
            excess_requests = max(excess_requests, int(load.running >= self._engine.info.max_batch))
        if excess_requests > 0:
            seconds += self._seconds_until_finished(excess_requests)
        return max(1, min(MAX_RETRY_S, math.ceil(seconds)))

    def _seconds_until_finished(self, count: int) -> float:
        """Estimate when `count` running requests have ended, from the part of max_tokens that was used of late."""
        part = min(1.0, self._output_tokens / self._max_tokens) if self._max_tokens else 1.0
        prompt_s, token_s = self._engine.stats().seconds_per_prefill_token, (self._itl_s or 0.0) * part
        left = sorted(
            max(0, request.submitted.max_tokens - len(request.tokens)) * token_s
            + request.num_unprefilled_tokens * prompt_s
            for request in self._requests
            if request.is_running
        )
        if not left:
            return 0.0
        return left[count - 1] if count <= len(left) else left[-1] * count / len(left)

    def add(self, request: RequestState) -> None:
        if request not in self._requests:
            self._requests.add(request)
            self._prompt_tokens += request.num_prompt_tokens

    def remove(self, request: RequestState) -> None:
        """Forget a request that ended, in whatever way."""
        if request in self._requests:
            self._requests.remove(request)
            self._prompt_tokens -= request.num_prompt_tokens
        if request.tokens:
            self._output_tokens = (1 - EMA_WEIGHT) * self._output_tokens + len(request.tokens)
            self._max_tokens = (1 - EMA_WEIGHT) * self._max_tokens + request.submitted.max_tokens

    def observe_itl(self, seconds: float, num_tokens: int) -> None:
        """Record tokens that came `seconds` after the previous ones of their request."""
        new = seconds / num_tokens
        self._itl_s = new if self._itl_s is None else self._itl_s + EMA_WEIGHT * (new - self._itl_s)
