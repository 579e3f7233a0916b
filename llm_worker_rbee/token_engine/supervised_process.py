"""A child process that computes, restarted when it dies; the next process gets what is missing of its requests.

An engine of one kind says how a request is sent (`_encode`) and what a message delivers (`_take_output`); the policy is
here. Only an experiment decides which request is to blame for a death. The requests that ran when a process died are
suspects. From their second death on suspects are replayed one at a time, and a request that ends a process twice while
it runs alone is refused; one that gets past the point of its last death is no suspect any more.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

import msgspec

from ..errors import EngineCrashError, InferenceError, WorkerError, copy_error, counted
from ..progress import OnStage, TransferProgress
from .child_process import ChildProcess
from .protocol import Abort, Failed, Load, Located, LogLine, ModelInfo, PoolingInfo, StageReport
from .wire import FromEngine, ProtocolError, ToEngine

RESTART_PERIOD_S = 60.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 5.0
STALL_FACTOR = 10  # of the slowest step seen
RESTART_POLL_S = 0.02
DEATHS_TO_ISOLATE, DEATHS_TO_REFUSE = 2, 2  # with other requests; alone


@dataclass(slots=True, eq=False, kw_only=True)
class OpenRequest(ABC):
    """A request that is not finished: where it is, and the deaths that it is suspected of."""

    id: int
    submission: int = 0  # the id under which the process has it, a new one each time, so that nothing stale counts
    num_deaths: int = 0
    num_deaths_alone: int = 0
    progress_at_death: int = 0

    @property
    @abstractmethod
    def progress(self) -> int:
        """Tokens or rows that were delivered."""

    @property
    def is_running(self) -> bool:
        """Whether the process computes it, as far as is known."""
        return False

    @property
    def is_isolated(self) -> bool:
        return self.num_deaths >= DEATHS_TO_ISOLATE

    def leave_process(self) -> None:
        """Note that the process does not have it any more."""
        self.submission = 0

    @abstractmethod
    def finish_with(self, error: WorkerError) -> None:
        """End it with an error, if it has not ended."""


Info = TypeVar("Info", ModelInfo, PoolingInfo)
Request = TypeVar("Request", bound=OpenRequest)
logger = logging.getLogger("llm_worker_rbee.server")


class SupervisedProcess(ABC, Generic[Info, Request]):
    """A process that loads a model, and is loaded again when it dies. All methods belong to one event loop."""

    info: Info  # once it is started
    num_restarts = 0

    def __init__(
        self,
        load: Load,
        *,
        label: str = "the engine",
        max_restarts: int = 5,
        stall_timeout_s: float = math.inf,
        restart_on_stall: bool = False,
        progress: TransferProgress = lambda what, done, total: None,
        on_located: Callable[[str], None] = lambda path: None,
    ) -> None:
        """Start the process at once. `label` names it in log lines and errors. `max_restarts` is the limit per minute.
        A process that has work and sends nothing for `stall_timeout_s` is stalled; with `restart_on_stall`, after ten
        times its slowest step, it is killed."""
        self._load, self.label = load, label
        self._max_restarts = max_restarts
        self._stall_timeout_s, self._restart_on_stall = stall_timeout_s, restart_on_stall
        self._progress, self._on_located = progress, on_located
        self._child = ChildProcess.start(load)
        self._on_stage: OnStage = lambda stage: None
        self._loaded: asyncio.Future[Info]
        self._state, self._has_loaded = "loading", False
        self._deaths: deque[float] = deque()
        self._last_message_at = time.monotonic()
        self._slowest_step_s = 0.0
        self._num_failed_loads = 0  # in a row
        self._tasks: list[asyncio.Task[None]] = []  # the restart and the watch
        self._requests: dict[int, Request] = {}  # all open requests, by their ids
        self._submitted: dict[int, Request] = {}  # requests that the process has, by their submissions
        self._submissions = count(1)
        self._isolated: deque[Request] = deque()  # replayed one at a time, the first one now, while the others wait

    async def start(self, on_stage: OnStage) -> Info:
        """Load the model; from its return on requests may be submitted."""
        self._on_stage = on_stage
        self.info = await self._attach()
        self._load = self._load.with_options(**self._planned_options())
        if self._restart_on_stall:
            self._tasks.append(asyncio.ensure_future(self._watch_stalls(self._stall_timeout_s)))
        return self.info

    async def _attach(self) -> Info:
        """Connect to the present child and wait until it has loaded the model."""
        self._loaded = asyncio.get_running_loop().create_future()
        await self._child.attach(self._take, self._on_end)
        return await self._loaded

    def _planned_options(self) -> dict[str, object]:
        """Return load options of a restart that follow from the first load."""
        return {"model": self.info.path, "device": self.info.device}

    @property
    def num_requests(self) -> int:
        """Requests that were submitted and are not finished."""
        return len(self._requests)

    @abstractmethod
    def _encode(self, request: Request) -> ToEngine:
        """Return the message that submits a request, less what was delivered, under its present submission."""

    @abstractmethod
    def _take_output(self, message: FromEngine) -> bool:
        """Take in what a step computed; return whether it computed anything. Call `_end` for requests that it ended."""

    @property
    def accepts_requests(self) -> bool:
        """Whether a request is submitted at once: not while a suspect runs alone."""
        return self._state == "ready" and not self._isolated

    def _add(self, request: Request) -> None:
        """Take a request; it waits while the process is restarted. A suspect of another engine runs alone."""
        if not self._requests:
            self._last_message_at = time.monotonic()
        self._requests[request.id] = request
        if request.is_isolated:
            self._isolated.append(request)
            if self._state == "ready" and self._isolated[0] is request:
                for other in self._requests.values():
                    self._withdraw(other)
                self._submit_all()
        elif self.accepts_requests:
            self._submit(request)

    def _submit(self, request: Request) -> None:
        request.submission = next(self._submissions)
        self._submitted[request.submission] = request
        self._child.send(self._encode(request))

    def _submit_all(self) -> None:
        """Submit what the process does not have: the first isolated request alone, or all others."""
        for request in list(self._isolated)[:1] or list(self._requests.values()):
            if not request.submission:
                self._submit(request)

    def _withdraw(self, request: Request) -> None:
        """Take a request out of the process, if it is there."""
        submission = request.submission
        if self._submitted.get(submission) is request:
            del self._submitted[submission]
            request.leave_process()
            self._child.send(Abort(submission))

    def _end(self, request: Request) -> None:
        """Forget a request that the process has finished."""
        self._submitted.pop(request.submission, None)
        self._drop(request)

    def _drop(self, request: Request) -> None:
        """Forget a request that is finished or goes to another engine; the process drops it too."""
        self._withdraw(request)
        if self._requests.pop(request.id, None) is not None:
            self._release(request)

    def _release(self, request: Request) -> None:
        """Go on with the next isolated request, or with all, once this one is finished or is no suspect any more."""
        if request not in self._isolated:
            return
        is_first = self._isolated[0] is request
        self._isolated.remove(request)
        if is_first and self._state == "ready":
            if self._isolated:  # it goes on later, with the others
                self._withdraw(request)
            self._submit_all()

    def _lose_process(self, how: str | None) -> None:
        """Keep the requests of a process that is gone; `how` it died, None if it was stopped."""
        lost = list(self._submitted.values())
        suspects = [request for request in lost if request.is_running] or lost
        self._submitted.clear()
        for request in lost:
            request.leave_process()
        if how is not None:
            self._blame(suspects, how, is_alone=len(lost) == 1)

    def _blame(self, suspects: Sequence[Request], how: str, *, is_alone: bool) -> None:
        """Note the requests that ran at a death; refuse one that has ended processes while it was alone."""
        for request in suspects:
            if request.progress > request.progress_at_death:
                request.num_deaths = request.num_deaths_alone = 0
            request.num_deaths += 1
            request.num_deaths_alone += is_alone
            request.progress_at_death = request.progress
            if request.num_deaths_alone >= DEATHS_TO_REFUSE:
                message = f"{self.label} {how} twice while it computed this request alone: it is not tried again"
                self._finish(request, EngineCrashError(message))
        self._isolated = deque(request for request in self._requests.values() if request.is_isolated)

    def _finish(self, request: Request, error: WorkerError) -> None:
        request.finish_with(error)
        self._drop(request)

    def _finish_all(self, error: WorkerError) -> None:
        """End all requests with an error."""
        for request in list(self._requests.values()):
            self._finish(request, copy_error(error))

    def _give_up(self, error: WorkerError) -> None:
        """End all requests: there will be no other process."""
        self._finish_all(error)

    def _context_of(self, line: LogLine) -> Context:
        """Return the context in which a line of the child is logged."""
        return copy_context()

    async def restart(self) -> None:
        """Replace the process by a new one; no request is lost."""
        await self._wait_while_loading()
        if self._state == "stopped":
            return
        self._state = "loading"
        self._deaths.clear()
        self._num_failed_loads = 0
        self._lose_process(None)
        logger.info("%s is restarted with %s", self.label, counted(self.num_requests, "open request"))
        await self._child.stop()
        self._tasks.append(asyncio.ensure_future(self._restart(0.0)))
        await self._wait_while_loading()
        if self._state == "failed":
            raise InferenceError("an engine that was restarted on request could not load the model again")

    async def _wait_while_loading(self) -> None:
        """Wait for the end of a restart, also if the process dies on the way."""
        while self._state == "loading":
            await asyncio.sleep(RESTART_POLL_S)

    def status(self) -> str:
        """Return "healthy", "stalled" or "failed"; "loading" while it is restarted."""
        if self._state == "ready":
            return "healthy" if self.last_step_age_s <= self._stall_timeout_s else "stalled"
        return "failed" if self._state == "stopped" else self._state

    @property
    def last_step_age_s(self) -> float:
        """Seconds since a step ended, 0 without work."""
        return time.monotonic() - self._last_message_at if self._state == "ready" and self.num_requests else 0.0

    def _require_alive(self) -> None:
        if self._state in ("failed", "stopped"):
            raise InferenceError(f"{self.label} has failed" if self._state == "failed" else f"{self.label} was stopped")

    async def stop(self, error: WorkerError) -> None:
        """End it after its present step; unfinished requests end with `error`."""
        self._state = "stopped"
        for task in self._tasks:
            task.cancel()
        self._finish_all(error)
        await self._child.stop()
        if hasattr(self, "_loaded") and not self._loaded.done():
            self._loaded.cancel()

    def _take(self, message: FromEngine) -> None:
        """Take in a message of the child."""
        if isinstance(message, Failed | ModelInfo | PoolingInfo) and self._loaded.done():
            raise ProtocolError(f"{type(message).__name__} after the end of loading")
        match message:
            case StageReport(stage=stage, is_transfer=is_transfer):
                if not self._has_loaded and is_transfer:
                    self._progress(stage.stage, stage.done, stage.total)
                elif not self._has_loaded:
                    self._on_stage(stage)
            case Located(path=path):
                if not self._has_loaded:
                    self._on_located(path)
            case LogLine():
                self._context_of(message).run(logger.log, message.level, "engine: %s", message.text)
            case Failed(error=error):
                if self._has_loaded:
                    logger.error("%s could not load the model again: %s", self.label, error)
                    self._child.kill()
                self._loaded.set_exception(error)
            case ModelInfo() | PoolingInfo():
                self._state, self._has_loaded = "ready", True
                self._loaded.set_result(message)  # type: ignore[arg-type]  # the one that its `Load` asks for
            case _:
                self._take_step(message)

    def _take_step(self, message: FromEngine) -> None:
        """Take in what a step computed, and when it ended."""
        now = time.monotonic()
        if self._take_output(message):
            self._slowest_step_s = max(self._slowest_step_s, now - self._last_message_at)
        self._last_message_at = now
        if self._isolated and (first := self._isolated[0]).progress > first.progress_at_death:
            first.num_deaths = first.num_deaths_alone = 0  # as in `_blame`
            self._release(first)

    def _on_end(self, how: str) -> None:
        """Restart the child, unless it is stopped or dies too often."""
        if self._state == "stopped":
            return
        if not self._loaded.done():
            self._loaded.set_exception(InferenceError(f"{self.label} {how} while it loaded the model"))
        if not self._has_loaded:
            self._state = "failed"  # the first load is not repeated
            return
        was_loading, self._state = self._state == "loading", "loading"
        self._lose_process(how)
        now = time.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > RESTART_PERIOD_S:
            self._deaths.popleft()
        self._num_failed_loads += was_loading
        if max(len(self._deaths), self._num_failed_loads) > self._max_restarts:
            logger.error(
                "%s %s: more than %s, it is not restarted again",
                self.label,
                how,
                counted(self._max_restarts, "restart"),
            )
            self._state = "failed"
            self._give_up(InferenceError(f"{self.label} {how}, and was restarted too often"))
            return
        self.num_restarts += 1
        pause = min(FIRST_BACKOFF_S * 2 ** (len(self._deaths) - 1), MAX_BACKOFF_S)
        logger.warning(
            "%s %s: restart in %.2f s with %s", self.label, how, pause, counted(self.num_requests, "open request")
        )
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.ensure_future(self._restart(pause)))

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
        logger.info("%s serves again", self.label)
        self._submit_all()

    async def _watch_stalls(self, stall_timeout_s: float) -> None:
        """Kill a child that has work and sends nothing; `_on_end` restarts it."""
        while True:
            await asyncio.sleep(stall_timeout_s / 10)
            if self.last_step_age_s > max(stall_timeout_s, STALL_FACTOR * self._slowest_step_s):
                logger.error("%s sent nothing for %.1f s: it is killed", self.label, self.last_step_age_s)
                self._child.kill()
                self._last_message_at = time.monotonic()
