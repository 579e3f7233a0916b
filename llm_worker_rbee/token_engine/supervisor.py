"""An engine of tokens in a child process that is restarted when it dies; its requests go on there or in another engine.

Every open request is submitted again with the tokens that were delivered, as after a preemption: draws are keyed by
position, so the output is the same as without the death.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ..config import LoraUse
from ..errors import DeadlineError, WorkerError, counted
from .protocol import (
    EngineStats,
    Load,
    LogLine,
    ModelInfo,
    RequestEvent,
    RequestState,
    RequestStream,
    StepResult,
    Submit,
    TokenEngine,
    UnloadLora,
    add_stats,
)
from .routing import Candidate, PrefixIndex
from .supervised_process import OpenRequest, SupervisedProcess
from .wire import FromEngine, ProtocolError

LORA_TOKENS = 1024  # of a prompt: about as much work as reading an adapter
DEADLINE_GRACE_S = 0.05  # for the engine to end a request at its deadline itself


@dataclass(slots=True, eq=False)
class SupervisedRequest(OpenRequest):
    """A request as the supervisor knows it: its stream and its deadline."""

    stream: RequestStream
    deadline: float | None  # on the monotonic clock
    hashes: Sequence[bytes] = ()  # of the prompt's full blocks, where requests are routed by them
    num_matched_tokens: int = 0  # of the prompt, in the engine's prefix cache when it was routed there
    timer: asyncio.TimerHandle | None = None  # of the deadline
    context: Context = field(default_factory=copy_context)  # log lines about it have its correlation id

    @property
    def request(self) -> RequestState:
        return self.stream.request

    @property
    def progress(self) -> int:
        return len(self.request.tokens)

    @property
    def is_running(self) -> bool:
        return self.request.is_running

    def leave_process(self) -> None:
        self.submission = 0
        self.request.is_running, self.request.num_computed_tokens = False, 0

    def finish_with(self, error: WorkerError) -> None:
        self.stream.finish_with(error)

    @property
    def load(self) -> int:
        """Tokens that the engine computes for it: prompt tokens that were not cached, and its output."""
        return self.request.num_prompt_tokens - self.num_matched_tokens + len(self.request.tokens)


class SupervisedEngine(SupervisedProcess[ModelInfo, SupervisedRequest], TokenEngine):
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
        self._stats = self._stats_before = EngineStats(num_free_blocks=1, num_blocks=1)
        self._loras: set[bytes] = set()  # digests of adapters that requests of this process had
        self._num_queried_tokens = self._num_hit_tokens = 0  # counted here: a request that is replayed counts once

    def _planned_options(self) -> dict[str, object]:
        """Return load options of a restart; adapters are read again for the requests that need them."""
        options, info = self._load.options, self.info
        assert options is not None
        limits = {"kv_memory": info.kv_cache_bytes, "max_context": info.max_context}
        adapters = {"loras": (), "max_loras": options.lora_slots, "max_lora_rank": info.max_lora_rank or None}
        return super()._planned_options() | limits | adapters

    def unload_lora(self, digest: bytes) -> None:
        self._loras.discard(digest)
        if self._state == "ready":
            self._child.send(UnloadLora(digest))

    def submit(self, request: RequestState, hashes: Sequence[bytes] = ()) -> RequestStream:
        self._require_alive()
        timeout_s = request.submitted.timeout_s
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        stream = RequestStream(request, self._abort, asyncio.Event())
        supervised = SupervisedRequest(stream, deadline, hashes, id=request.id)
        if timeout_s is not None:  # the engine's own clock is not there during a restart
            supervised.timer = asyncio.get_running_loop().call_later(timeout_s + DEADLINE_GRACE_S, _expire, supervised)
        self.adopt(supervised)
        return supervised.stream

    def adopt(self, supervised: SupervisedRequest) -> None:
        """Take a request, be it new or of another engine; it waits while this one is restarted."""
        supervised.num_matched_tokens = self._match(supervised.hashes)
        self.prefix_index.add_pending(supervised.hashes)
        supervised.stream.on_abort = self._abort
        self._add(supervised)

    @property
    def is_serving(self) -> bool:
        return self.accepts_requests and self.status() == "healthy"

    def candidate(self, hashes: Sequence[bytes], loras: Sequence[LoraUse] = ()) -> Candidate:
        """Return this engine as routing sees it, for a request with these hashes and adapters."""
        load = sum(supervised.load for supervised in self._requests.values())
        saved = LORA_TOKENS * sum(use.digest in self._loras for use in loras)
        return Candidate(self._match(hashes) + saved, load, len(self.prefix_index))

    def _match(self, hashes: Sequence[bytes]) -> int:
        return self.prefix_index.match(hashes) * self.info.engine.block_size if hashes else 0

    def stats(self) -> EngineStats:
        stats = add_stats([self._stats], [self._stats_before])
        return msgspec.structs.replace(
            stats, num_queried_tokens=self._num_queried_tokens, num_hit_tokens=self._num_hit_tokens
        )

    def _abort(self, request: RequestState) -> None:
        if (supervised := self._requests.get(request.id)) is not None:
            self._drop(supervised)

    def _drop(self, request: SupervisedRequest) -> None:
        if request.id in self._requests:
            self.prefix_index.remove_pending(request.hashes)
            if request.request.is_finished and request.timer is not None:
                request.timer.cancel()  # it would keep the request until the deadline
        super()._drop(request)

    def _context_of(self, line: LogLine) -> Context:
        supervised = None if line.request_id is None else self._submitted.get(line.request_id)
        return copy_context() if supervised is None else supervised.context

    def _take_output(self, message: FromEngine) -> bool:
        if not isinstance(message, StepResult):
            raise ProtocolError(f"{type(message).__name__} of an engine of tokens")
        if message.stats is not None:
            self._stats = message.stats
        self.prefix_index.update(message.stored, message.removed)
        for event in message.events:
            if (supervised := self._submitted.get(event.id)) is not None:
                self._count_admission(event, supervised.request)
                supervised.request.apply(event)
                if event.lora is not None:
                    self._loras.add(event.lora.digest)
        for output in message.outputs:
            if (supervised := self._submitted.get(output.id)) is not None:
                supervised.stream.put(output)
                if output.finish_reason is not None:
                    self._end(supervised)
        return bool(message.outputs)

    def _count_admission(self, event: RequestEvent, request: RequestState) -> None:
        """Count the prompt of a request that is admitted for the first time, in any process."""
        if event.kind == "admitted" and not request.was_admitted:
            self._num_queried_tokens += request.num_prompt_tokens
            self._num_hit_tokens += event.num_tokens

    def _lose_process(self, how: str | None) -> None:
        self._stats_before = self.stats()
        self._stats = EngineStats(num_free_blocks=self._stats.num_blocks, num_blocks=self._stats.num_blocks)
        self.prefix_index.clear()
        self._loras.clear()
        for supervised in self._submitted.values():
            supervised.request.num_restarts += 1
        super()._lose_process(how)
        self._move_requests()

    def _give_up(self, error: WorkerError) -> None:
        self._move_requests(is_final=True)
        self._finish_all(error)

    def _move_requests(self, *, is_final: bool = False) -> None:
        """Give the requests to other engines, if there are any; requests that must run alone stay while they can."""
        for supervised in list(self._requests.values()):
            if (is_final or not supervised.is_isolated) and self._move(supervised, is_final):
                self._drop(supervised)

    def _encode(self, request: SupervisedRequest) -> Submit:
        """Return the request with the tokens that were delivered and the time that is left."""
        state, submitted = request.request, request.request.submitted
        self._loras |= {use.digest for use in submitted.loras} - {b""}
        params = submitted.params
        if state.prompt_logprobs is not None:  # delivered already
            params = replace(params, prompt_logprobs=False)
        timeout_s = None if request.deadline is None else request.deadline - time.monotonic()
        return msgspec.structs.replace(
            submitted, id=request.submission, generated=state.tokens, params=params, timeout_s=timeout_s
        )


def _expire(supervised: SupervisedRequest) -> None:
    """End a request whose deadline has passed, if the engine has not."""
    tokens = counted(len(supervised.request.tokens), "output token")
    supervised.stream.finish_with(DeadlineError(f"the request timed out after {tokens}"))
