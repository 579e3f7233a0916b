"""Admission: whether a request may enter a model's queue, by the number of requests and of tokens that wait, and the
`Retry-After` of requests that may not. Each model has one of its own, a chat model as well as a pooling model.

The state of chat requests comes with the engine's messages, so a figure may be one step old: a request runs from its
admission to the batch on, and waits before that and after preemption. A reservation stands for requests whose state no
engine reports: prompts that are still being tokenized, with an estimate of their tokens, and inputs of pooling models.
All of it belongs to the event loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..errors import InvalidRequestError, QueueFullError
from ..token_engine.protocol import ModelInfo, RequestState, TokenEngine
from .settings import ServerSettings

MAX_RETRY_S = 60
EMA_WEIGHT = 0.1
MIN_QUEUE, QUEUED_BATCHES = 256, 4  # requests that wait by default: so many, and so many full batches
MIN_QUEUED_TOKENS, QUEUED_STEPS = 262_144, 64  # likewise prompt tokens, in full steps


class QueueLimits(NamedTuple):
    """Requests that may be inside, and tokens that may wait."""

    max_batch: int  # requests that are computed at the same time
    max_queue: int  # requests that wait beside these
    max_queued_tokens: int

    @property
    def capacity(self) -> int:
        return self.max_batch + self.max_queue


class QueueLoad(NamedTuple):
    """Requests inside, and prompt tokens without prefill; of a pooling model, inputs and their tokens."""

    running: int
    waiting: int
    unprefilled_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.running} requests are running, {self.waiting} are waiting, "
            f"{self.unprefilled_tokens} prompt tokens wait for prefill"
        )


def chat_limits(info: ModelInfo, settings: ServerSettings) -> QueueLimits:
    """Return the limits of a chat model; the defaults follow its batch and its steps."""
    max_queue, max_tokens = settings.max_queue, settings.max_queued_tokens
    full_steps = info.num_replicas * info.engine.max_step_tokens
    return QueueLimits(
        info.max_batch,
        max(MIN_QUEUE, QUEUED_BATCHES * info.max_batch) if max_queue is None else max_queue,
        max(MIN_QUEUED_TOKENS, QUEUED_STEPS * full_steps) if max_tokens is None else max_tokens,
    )


class Reservation:
    """Places of requests whose state no engine reports."""

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

    def __init__(
        self,
        limits: Callable[[], QueueLimits],
        seconds_per_token: Callable[[], float],
        describe: Callable[[QueueLoad], str] = lambda load: f"the queue is full: {load}",
    ) -> None:
        """`seconds_per_token` is the engine's present speed of prompts; `describe` says why a request may not enter."""
        self.limits, self._seconds_per_token, self._describe = limits, seconds_per_token, describe
        self.num_reserved = self.num_refused = 0  # reservations so far, and refusals
        self._requests: set[RequestState] = set()
        self._prompt_tokens = 0  # of these requests
        self._reservations: set[Reservation] = set()
        self._itl_s: float | None = None  # moving average of the inter-token latency
        self._output_tokens = self._max_tokens = 0.0  # of finished requests, decayed: most end before max_tokens

    @classmethod
    def of_chat(cls, engine: TokenEngine, settings: ServerSettings) -> Admission:
        """Return the admission of a chat model."""
        return cls(lambda: chat_limits(engine.info, settings), lambda: engine.stats().seconds_per_prefill_token)

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

    @property
    def num_reservations(self) -> int:
        return len(self._reservations)

    def require_capacity(self, num_requests: int) -> None:
        """Raise if one body asks for more requests than could ever be inside."""
        if num_requests > (capacity := self.limits().capacity):
            message = f"the body asks for {num_requests} answers at once: at most {capacity} are accepted"
            raise InvalidRequestError(message, "prompt")

    @contextmanager
    def reserve(self, num_requests: int, num_tokens: int) -> Iterator[Reservation]:
        """Hold places until the requests are submitted, or finished where none are; raise if there are no places."""
        self.require(num_requests, num_tokens)
        reservation = Reservation(self, num_requests, num_tokens)
        self._reservations.add(reservation)
        self.num_reserved += 1
        try:
            yield reservation
        finally:
            self._reservations.remove(reservation)

    def require(self, num_requests: int, num_tokens: int) -> None:
        """Raise `QueueFullError` with the time to retry if these do not fit.

        More than a limit enters when nothing else is inside, or no other token waits.
        """
        limits = self.limits()
        if self._surely_fits(limits, num_requests, num_tokens):
            return
        load, excess_requests, excess_tokens = self.load, 0, 0
        if num_inside := load.running + load.waiting:
            excess_requests = num_inside + num_requests - limits.capacity
        if load.unprefilled_tokens:
            excess_tokens = load.unprefilled_tokens + num_tokens - limits.max_queued_tokens
        if excess_requests > 0 or excess_tokens > 0:
            self.num_refused += 1
            raise QueueFullError(self._describe(load), self._retry_after(load, excess_requests, excess_tokens))

    def _surely_fits(self, limits: QueueLimits, num_requests: int, num_tokens: int) -> bool:
        """Return whether these fit even if all prompts inside wait for prefill; it does not look at each request."""
        for reservation in self._reservations:
            num_requests += reservation.num_requests
            num_tokens += reservation.num_tokens
        fits = len(self._requests) + num_requests <= limits.capacity
        return fits and self._prompt_tokens + num_tokens <= limits.max_queued_tokens

    def _retry_after(self, load: QueueLoad, excess_requests: int, excess_tokens: int) -> int:
        """Estimate when so many requests have ended; for tokens, when prefill is done, which needs a free slot."""
        seconds, excess_tokens = 0.0, min(excess_tokens, load.unprefilled_tokens)
        if not load.running:  # requests end with their tokens
            tokens_of_requests = load.unprefilled_tokens * max(0, excess_requests) // max(1, load.waiting)
            excess_requests, excess_tokens = 0, max(excess_tokens, min(tokens_of_requests, load.unprefilled_tokens))
        if excess_tokens > 0:
            seconds = excess_tokens * self._seconds_per_token()
            excess_requests = max(excess_requests, int(load.running >= self.limits().max_batch))
        if excess_requests > 0:
            seconds += self._seconds_until_finished(excess_requests)
        return max(1, min(MAX_RETRY_S, math.ceil(seconds)))

    def _seconds_until_finished(self, count: int) -> float:
        """Estimate when `count` running requests have ended, from the part of max_tokens that was used of late."""
        part = min(1.0, self._output_tokens / self._max_tokens) if self._max_tokens else 1.0
        prompt_s, token_s = self._seconds_per_token(), (self._itl_s or 0.0) * part
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
