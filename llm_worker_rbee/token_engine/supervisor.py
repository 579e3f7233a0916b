"""An engine in a child process that is restarted when it dies; its requests go on, there or in another engine.

Every open request is submitted again with the tokens that were delivered, as after a preemption: draws are keyed by
position, so the output is the one that would have come. Which request is to blame is decided by experiment only. The
requests that ran when an engine died are suspects. From their second death on suspects are replayed one at a time, and
a request that ends an engine twice while it runs alone is refused; one that gets past the point of its last death is
no suspect any more.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from itertools import count

import msgspec

from ..engine.request import copy_error
from ..errors import DeadlineError, InferenceError, WorkerError, counted
from ..progress import OnStage, TransferProgress
from .child_process import ChildProcess
from .protocol import (
    Abort,
    EngineStats,
    Failed,
    Load,
    Located,
    LogLine,
    ModelInfo,
    RequestEvent,
    RequestState,
    StageReport,
    StepResult,
    TokenEngine,
    add_stats,
)
from .routing import Candidate, PrefixIndex
from .stream import QueuedStream, take_result
from .wire import FromEngine, ProtocolError

RESTART_PERIOD_S = 60.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 5.0
DEATHS_TO_ISOLATE, DEATHS_TO_REFUSE = 2, 2  # with other requests; alone
STALL_FACTOR = 10  # of the slowest step seen
RESTART_POLL_S = 0.02
DEADLINE_GRACE_S = 0.05  # for the engine to end a request at its deadline itself
logger = logging.getLogger("llm_worker_rbee.server")


@dataclass(slots=True, eq=False)
class SupervisedRequest:
    """A request as the supervisor knows it: its stream, its deadline, and the deaths that it is suspected of."""

    stream: QueuedStream
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
        """Tokens that the engine computes for it: of the prompt those that were not cached, and its output."""
        return self.request.num_prompt_tokens - self.num_matched_tokens + len(self.request.tokens)


class SupervisedEngine(TokenEngine):
    """A `TokenEngine` in a child process."""

    def __init__(
        self, load: Load, *, max_restarts: int = 5, stall_timeout_s: float = math.inf, restart_on_stall: bool = False,
        progress: TransferProgress = lambda what, done, total: None,
        on_located: Callable[[str], None] = lambda path: None,
        move: Callable[[SupervisedRequest, bool], bool] = lambda supervised, is_final: False,
    ) -> None:  # fmt: skip
        """Start the process at once. `max_restarts` are those of a minute. A process that has work and sends nothing
        for `stall_timeout_s` is stalled; with `restart_on_stall`, after ten times its slowest step, it is killed.
        `move` may give a request of a dead process to another engine, by its `adopt`; with True if there will be no
        other process here."""
        self._load = load
        self._move = move
        self.prefix_index = PrefixIndex()
        self._max_restarts = max_restarts
        self._stall_timeout_s, self._restart_on_stall = stall_timeout_s, restart_on_stall
        self._progress, self._on_located = progress, on_located
        self._child = ChildProcess.start(load)
        self._on_stage: OnStage = lambda stage: None
        self._loaded: asyncio.Future[ModelInfo]
        self._state, self._has_loaded = "loading", False
        self._requests: dict[int, SupervisedRequest] = {}  # all open requests, by their ids
        self._streams: dict[int, QueuedStream] = {}  # those that the engine has, by their submissions
        self._submissions = count(1)
        self._isolated: deque[SupervisedRequest] = (
            deque()
        )  # replayed one at a time, the first one now, while the others wait
        self._stats = self._stats_before = EngineStats(num_free_blocks=1, num_blocks=1)
        self._num_queried_tokens = self._num_hit_tokens = 0  # counted here: a request that is replayed counts once
        self._deaths: deque[float] = deque()
        self._last_message_at = time.monotonic()
        self._slowest_step_s = 0.0
        self._num_failed_loads = 0  # in a row
        self._tasks: list[asyncio.Task[None]] = []  # the restart and the watch

    async def start(self, on_stage: OnStage) -> ModelInfo:
        self._on_stage = on_stage
        self.info = await self._attach()
        planned = {"model": self.info.path, "device": self.info.device, "kv_memory": self.info.kv_cache_bytes,
                   "max_context": self.info.max_context}  # fmt: skip
        self._load = msgspec.structs.replace(self._load, options=self._load.options | planned)  # of a restart
        if self._restart_on_stall:
            self._tasks.append(asyncio.ensure_future(self._watch_stalls(self._stall_timeout_s)))
        return self.info

    async def _attach(self) -> ModelInfo:
        """Connect to the present child and wait until it has loaded the model."""
        self._loaded = asyncio.get_running_loop().create_future()
        await self._child.attach(self._take, self._on_end)
        return await self._loaded

    def submit(self, request: RequestState, hashes: Sequence[bytes] = ()) -> QueuedStream:
        if self._state in ("failed", "stopped"):
            raise InferenceError("the engine has failed" if self._state == "failed" else "the engine was stopped")
        timeout_s = request.submitted.timeout_s
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        supervised = SupervisedRequest(QueuedStream(request, self._abort), deadline, hashes)
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
            self._send_all()

    @property
    def accepts_requests(self) -> bool:
        """Whether a request is submitted at once: not while a suspect runs alone."""
        return self._state == "ready" and not self._isolated

    @property
    def is_serving(self) -> bool:
        return self.accepts_requests and self.status() == "healthy"

    def candidate(self, hashes: Sequence[bytes]) -> Candidate:
        """Return what routing has to know for a request with these hashes."""
        load = sum(supervised.load for supervised in self._requests.values())
        return Candidate(self._match(hashes), load, len(self.prefix_index))

    def _match(self, hashes: Sequence[bytes]) -> int:
        return self.prefix_index.match(hashes) * self.info.engine.block_size if hashes else 0

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    async def restart(self) -> None:
        await self._wait_while_loading()
        if self._state == "stopped":
            return
        self._state, self._stats_before = "loading", self.stats()
        self._deaths.clear()
        self._num_failed_loads = 0
        self._clear()
        self._move_requests()
        logger.info("the engine is restarted with %s", counted(len(self._requests), "open request"))
        await self._child.stop()
        self._tasks.append(asyncio.ensure_future(self._restart(0.0)))
        await self._wait_while_loading()
        if self._state == "failed":
            raise InferenceError("an engine that was restarted on request could not load the model again")

    async def _wait_while_loading(self) -> None:
        """Wait for the end of a restart, also if the process dies on the way."""
        while self._state == "loading":
            await asyncio.sleep(RESTART_POLL_S)

    def stats(self) -> EngineStats:
        stats = add_stats([self._stats], [self._stats_before])
        return msgspec.structs.replace(
            stats, num_queried_tokens=self._num_queried_tokens, num_hit_tokens=self._num_hit_tokens
        )

    def status(self) -> str:
        if self._state == "ready":
            return "healthy" if self.last_step_age_s <= self._stall_timeout_s else "stalled"
        return "failed" if self._state == "stopped" else self._state

    @property
    def last_step_age_s(self) -> float:
        return time.monotonic() - self._last_message_at if self._state == "ready" and self._requests else 0.0

    async def stop(self, error: WorkerError) -> None:
        self._state = "stopped"
        for task in self._tasks:
            task.cancel()
        self._finish_all(error)
        await self._child.stop()
        if hasattr(self, "_loaded") and not self._loaded.done():
            self._loaded.cancel()

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

    def _take(self, message: FromEngine) -> None:
        """Take in a message of the child."""
        if isinstance(message, Failed | ModelInfo) and self._loaded.done():
            raise ProtocolError(f"{type(message).__name__} after the end of loading")
        match message:
            case StepResult():
                self._take_result(message)
            case StageReport(stage=stage, is_transfer=is_transfer):
                if not self._has_loaded and is_transfer:
                    self._progress(stage.stage, stage.done, stage.total)
                elif not self._has_loaded:
                    self._on_stage(stage)
            case Located(path=path):
                if not self._has_loaded:
                    self._on_located(path)
            case LogLine():
                self._log(message)
            case Failed(error=error):
                if self._has_loaded:
                    logger.error("the engine could not load the model again: %s", error)
                    self._child.kill()
                self._loaded.set_exception(error)
            case ModelInfo():
                self._state, self._has_loaded = "ready", True
                self._loaded.set_result(message)

    def _log(self, line: LogLine) -> None:
        """Log a line of the child, in the context of the request that it is about."""
        stream = None if line.request_id is None else self._streams.get(line.request_id)
        supervised = None if stream is None else self._requests.get(stream.request.id)
        context = copy_context() if supervised is None else supervised.context
        context.run(logger.log, line.level, "engine: %s", line.text)

    def _take_result(self, result: StepResult) -> None:
        now = time.monotonic()
        if result.outputs:
            self._slowest_step_s = max(self._slowest_step_s, now - self._last_message_at)
        self._last_message_at = now
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

    def _on_end(self, how: str) -> None:
        """Restart the child, unless it is stopped or dies too often."""
        if self._state == "stopped":
            return
        if not self._loaded.done():
            self._loaded.set_exception(InferenceError(f"the engine {how} while it loaded the model"))
        if not self._has_loaded:
            self._state = "failed"  # the first load is not repeated
            return
        was_loading, self._state, self._stats_before = self._state == "loading", "loading", self.stats()
        self._record_death(how)
        self._move_requests()
        now = time.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > RESTART_PERIOD_S:
            self._deaths.popleft()
        self._num_failed_loads += was_loading
        if max(len(self._deaths), self._num_failed_loads) > self._max_restarts:
            logger.error("the engine %s: more than %s, it is not restarted again", how,
                         counted(self._max_restarts, "restart"))  # fmt: skip
            self._state = "failed"
            self._move_requests(is_final=True)
            self._finish_all(InferenceError(f"the engine {how}, and was restarted too often"))
            return
        self.num_restarts += 1
        pause = min(FIRST_BACKOFF_S * 2 ** (len(self._deaths) - 1), MAX_BACKOFF_S)
        logger.warning("the engine %s: restart in %.2f s with %s", how, pause,
                       counted(len(self._requests), "open request"))  # fmt: skip
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.ensure_future(self._restart(pause)))

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
        """Give the requests to other engines, if there are any; those that must run alone stay while they can."""
        for supervised in list(self._requests.values()):
            if (is_final or not supervised.is_isolated) and self._move(supervised, is_final):
                self._remove(supervised.request)
                if supervised in self._isolated:
                    self._isolated.remove(supervised)

    async def _restart(self, pause: float) -> None:
        await asyncio.sleep(pause)
        if self._state == "stopped":
            return
        try:
            self._child = ChildProcess.start(self._load)
        except OSError as error:  # no memory or no descriptor is left: another try may succeed
            self._on_end(f"could not be started ({error})")
            return
        try:
            info = await self._attach()
        except WorkerError:
            return  # `_on_end` follows
        self._num_failed_loads = 0
        self.info = msgspec.structs.replace(info, phases=self.info.phases)
        if self._state != "ready":  # it died again before this ran
            return
        self._last_message_at = time.monotonic()
        logger.info("the engine serves again")
        self._send_all()

    def _send_all(self) -> None:
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
            self._send_all()

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

    async def _watch_stalls(self, stall_timeout_s: float) -> None:
        """Kill a child that has work and sends nothing; `_on_end` restarts it."""
        while True:
            await asyncio.sleep(stall_timeout_s / 10)
            if self.last_step_age_s > max(stall_timeout_s, STALL_FACTOR * self._slowest_step_s):
                logger.error("the engine sent nothing for %.1f s: it is killed", self.last_step_age_s)
                self._child.kill()
                self._last_message_at = time.monotonic()


def _expire(supervised: SupervisedRequest) -> None:
    """End a request whose deadline has passed, if the engine has not."""
    tokens = counted(len(supervised.request.tokens), "output token")
    supervised.stream.finish_with(DeadlineError(f"the request timed out after {tokens}"))
