"""An engine in a child process that is restarted when it dies; its requests go on, there or in another engine.

Every open request is submitted again with the tokens that were delivered, as after a preemption: draws are keyed by
position, so the output is the same as without the death. Only an experiment decides which request is to blame. The
requests that ran when an engine died are suspects. From their second death on suspects are replayed one at a time, and
a request that ends an engine twice while it runs alone is refused; one that gets past the point of its last death is
no suspect any more.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import msgspec

from ..errors import DeadlineError, InferenceError, WorkerError, copy_error, counted
from .protocol import (
    Abort,
    EngineStats,
    Load,
    LogLine,
    ModelInfo,
    RequestEvent,
    RequestState,
    RequestStream,
    StepResult,
    TokenEngine,
    add_stats,
    take_result,
)
from .routing import Candidate, PrefixIndex
from .supervised_process import SupervisedProcess
from .wire import FromEngine, ProtocolError

DEATHS_TO_ISOLATE, DEATHS_TO_REFUSE = 2, 2  # with other requests; alone
DEADLINE_GRACE_S = 0.05  # for the engine to end a request at its deadline itself


@dataclass(slots=True, eq=False)
class SupervisedRequest:
    """A request as the supervisor knows it: its stream, its deadline, and the deaths that it is suspected of."""

    stream: RequestStream
    deadline: float | None  # on the monotonic clock
    hashes: Sequence[bytes] = ()  # of the prompt's full blocks, where requests are routed by them
    num_matched_tokens: int = 0  # of the prompt, in the engine's prefix cache when it was routed there
    submission: int = 0  # the id under which an engine knows it: a new one each time, so that nothing stale counts
    num_deaths: int = 0
    num_deaths_alone: int = 0
    num_tokens_at_death: int = 0
    timer: asyncio.TimerHandle | None = None  # of the deadline
    context: Context = field(default_factory=copy_context)  # log lines about it have its correlation id

    @property
    def request(self) -> RequestState:
        return self.stream.request

    @property
    def is_isolated(self) -> bool:
        return self.num_deaths >= DEATHS_TO_ISOLATE

    @property
    def load(self) -> int:
        """Tokens that the engine computes for it: prompt tokens that were not cached, and its output."""
        return self.request.num_prompt_tokens - self.num_matched_tokens + len(self.request.tokens)


class SupervisedEngine(SupervisedProcess[ModelInfo], TokenEngine):
    """A `TokenEngine` in a child process."""

    def __init__(
        self,
        load: Load,
        *,
        move: Callable[[SupervisedRequest, bool], bool] = lambda supervised, is_final: False,
        **options: Any,
    ) -> None:
        """Start the process at once; `SupervisedProcess` gets the options. `move` may give a request of a dead process
        to another engine, by its `adopt`; with True if there will be no other process here."""
        super().__init__(load, **options)
        self._move = move
        self.prefix_index = PrefixIndex()
        self._requests: dict[int, SupervisedRequest] = {}  # all open requests, by their ids
        self._streams: dict[int, RequestStream] = {}  # those that the engine has, by their submissions
        self._submissions = count(1)
        self._isolated: deque[SupervisedRequest] = (
            deque()
        )  # replayed one at a time, the first one now, while the others wait
        self._stats = self._stats_before = EngineStats(num_free_blocks=1, num_blocks=1)
        self._num_queried_tokens = self._num_hit_tokens = 0  # counted here: a request that is replayed counts once

    def _planned_options(self) -> dict[str, object]:
        return {
            "model": self.info.path,
            "device": self.info.device,
            "kv_memory": self.info.kv_cache_bytes,
            "max_context": self.info.max_context,
        }

    def submit(self, request: RequestState, hashes: Sequence[bytes] = ()) -> RequestStream:
        self._require_alive()
        timeout_s = request.submitted.timeout_s
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        supervised = SupervisedRequest(RequestStream(request, self._abort, asyncio.Event()), deadline, hashes)
        if timeout_s is not None:  # the engine's own clock is not there during a restart
            supervised.timer = asyncio.get_running_loop().call_later(timeout_s + DEADLINE_GRACE_S, _expire, supervised)
        self.adopt(supervised)
        return supervised.stream

    def adopt(self, supervised: SupervisedRequest) -> None:
        """Take a request, be it new or of another engine; it waits while this one is restarted."""
        if not self._requests:
            self._last_message_at = time.monotonic()
        supervised.num_matched_tokens = self._match(supervised.hashes)
        self.prefix_index.add_pending(supervised.hashes)
        supervised.stream.on_abort = self._abort
        supervised.submission = 0
        self._requests[supervised.request.id] = supervised
        if supervised.is_isolated:
            self._isolate(supervised)
        elif self.accepts_requests:
            self._send(supervised)

    def _isolate(self, supervised: SupervisedRequest) -> None:
        """Let a suspect of another engine run alone; what runs here goes on afterwards."""
        self._isolated.append(supervised)
        if self._state == "ready" and self._isolated[0] is supervised:
            for other in self._requests.values():
                self._withdraw(other)
            self._submit_all()

    @property
    def accepts_requests(self) -> bool:
        """Whether a request is submitted at once: not while a suspect runs alone."""
        return self._state == "ready" and not self._isolated

    @property
    def is_serving(self) -> bool:
        return self.accepts_requests and self.status() == "healthy"

    def candidate(self, hashes: Sequence[bytes]) -> Candidate:
        """Return this engine as routing sees it, for a request with these hashes."""
        load = sum(supervised.load for supervised in self._requests.values())
        return Candidate(self._match(hashes), load, len(self.prefix_index))

    def _match(self, hashes: Sequence[bytes]) -> int:
        return self.prefix_index.match(hashes) * self.info.engine.block_size if hashes else 0

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def stats(self) -> EngineStats:
        stats = add_stats([self._stats], [self._stats_before])
        return msgspec.structs.replace(
            stats, num_queried_tokens=self._num_queried_tokens, num_hit_tokens=self._num_hit_tokens
        )

    def _abort(self, request: RequestState) -> None:
        supervised = self._remove(request)
        if supervised is not None:
            self._withdraw(supervised)
            self._release(supervised)

    def _remove(self, request: RequestState) -> SupervisedRequest | None:
        """Remove a request that is finished or goes to another engine, and return it if it was here."""
        supervised = self._requests.pop(request.id, None)
        if supervised is not None:
            self.prefix_index.remove_pending(supervised.hashes)
            if supervised.request.is_finished and supervised.timer is not None:
                supervised.timer.cancel()  # it would keep the request until the deadline
        return supervised

    def _context_of(self, line: LogLine) -> Context:
        stream = None if line.request_id is None else self._streams.get(line.request_id)
        supervised = None if stream is None else self._requests.get(stream.request.id)
        return copy_context() if supervised is None else supervised.context

    def _take_output(self, message: FromEngine) -> None:
        if not isinstance(message, StepResult):
            raise ProtocolError(f"{type(message).__name__} of an engine of tokens")
        self._take_result(message)

    def _take_result(self, result: StepResult) -> None:
        self._observe_message(bool(result.outputs))
        if result.stats is not None:
            self._stats = result.stats
        self.prefix_index.update(result.stored, result.removed)
        for event in result.events:
            self._count_admission(event)
        ended = [self._streams.get(output.id) for output in result.outputs if output.finish_reason is not None]
        take_result(result, self._streams)
        for stream in ended:
            if stream is not None and (supervised := self._remove(stream.request)) is not None:
                self._release(supervised)
        if self._isolated and len((first := self._isolated[0]).request.tokens) > first.num_tokens_at_death:
            first.num_deaths = first.num_deaths_alone = 0  # as in `_record_death`
            self._release(first)

    def _count_admission(self, event: RequestEvent) -> None:
        """Count the prompt of a request that is admitted for the first time, in any process."""
        stream = self._streams.get(event.id) if event.kind == "admitted" else None
        if stream is not None and not stream.request.was_admitted:
            self._num_queried_tokens += stream.request.num_prompt_tokens
            self._num_hit_tokens += event.num_tokens

    def _lose_process(self, how: str | None) -> None:
        self._stats_before = self.stats()
        if how is None:
            self._clear()
        else:
            self._record_death(how)
        self._move_requests()

    def _give_up(self, error: WorkerError) -> None:
        self._move_requests(is_final=True)
        self._finish_all(error)

    def _record_death(self, how: str) -> None:
        """Note who ran; refuse a request that has ended engines while alone."""
        known = [supervised for supervised in self._requests.values() if supervised.submission in self._streams]
        suspects = [supervised for supervised in known if supervised.request.is_running] or known
        self._clear()
        for supervised in suspects:
            if len(supervised.request.tokens) > supervised.num_tokens_at_death:
                supervised.num_deaths = supervised.num_deaths_alone = 0  # it got past the point of its last death
            supervised.num_deaths += 1
            supervised.num_deaths_alone += len(known) == 1
            supervised.num_tokens_at_death = len(supervised.request.tokens)
            if supervised.num_deaths_alone >= DEATHS_TO_REFUSE:
                message = f"the engine {how} twice while it computed this request alone: it is not tried again"
                supervised.stream.finish_with(InferenceError(message))
        self._isolated = deque(supervised for supervised in self._requests.values() if supervised.is_isolated)

    def _clear(self) -> None:
        """Forget the state of a process that is gone; the requests are kept."""
        self._stats = EngineStats(num_free_blocks=self._stats.num_blocks, num_blocks=self._stats.num_blocks)
        self.prefix_index.clear()
        for supervised in self._requests.values():
            supervised.request.is_running, supervised.request.num_computed_tokens = False, 0
            supervised.request.num_restarts += supervised.submission in self._streams
        self._streams.clear()

    def _move_requests(self, *, is_final: bool = False) -> None:
        """Give the requests to other engines, if there are any; requests that must run alone stay while they can."""
        for supervised in list(self._requests.values()):
            if (is_final or not supervised.is_isolated) and self._move(supervised, is_final):
                self._remove(supervised.request)
                if supervised in self._isolated:
                    self._isolated.remove(supervised)

    def _submit_all(self) -> None:
        """Submit what the engine does not have: the first isolated request alone, or all others."""
        waiting = list(self._requests.values()) if not self._isolated else [self._isolated[0]]
        for supervised in waiting:
            if supervised.submission not in self._streams:
                self._send(supervised)

    def _release(self, supervised: SupervisedRequest) -> None:
        """Go on with the next isolated request, or with all, once this one is finished or is no suspect any more."""
        if supervised not in self._isolated:
            return
        is_first = self._isolated[0] is supervised
        self._isolated.remove(supervised)
        if is_first and self._state == "ready":
            if self._isolated:  # it goes on later, with the others
                self._withdraw(supervised)
            self._submit_all()

    def _withdraw(self, supervised: SupervisedRequest) -> None:
        """Take a request out of the engine, if it is there."""
        if self._streams.pop(supervised.submission, None) is not None:
            supervised.request.is_running = False
            self._child.send(Abort(supervised.submission))

    def _send(self, supervised: SupervisedRequest) -> None:
        """Submit a request with the tokens that were delivered."""
        request, submitted, timeout_s = supervised.request, supervised.request.submitted, None
        if supervised.deadline is not None:
            timeout_s = supervised.deadline - time.monotonic()
            if timeout_s <= 0:
                _expire(supervised)
                return
        params = submitted.params
        if request.prompt_logprobs is not None:  # delivered already
            params = replace(params, prompt_logprobs=False)
        supervised.submission = next(self._submissions)
        self._streams[supervised.submission] = supervised.stream
        self._child.send(
            msgspec.structs.replace(
                submitted, id=supervised.submission, generated=request.tokens, params=params, timeout_s=timeout_s
            )
        )

    def _finish_all(self, error: WorkerError) -> None:
        for supervised in list(self._requests.values()):
            supervised.stream.finish_with(copy_error(error))


def _expire(supervised: SupervisedRequest) -> None:
    """End a request whose deadline has passed, if the engine has not."""
    tokens = counted(len(supervised.request.tokens), "output token")
    supervised.stream.finish_with(DeadlineError(f"the request timed out after {tokens}"))
