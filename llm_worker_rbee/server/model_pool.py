"""The pool of models: which are loaded, which wait for memory, which one is unloaded for another.

A member is a model that may be loaded; its engine is supervised as any other (`token_engine`), and the pool is above
it. A request holds a member while it runs. One that is not loaded is loaded for the first request; others wait with
it. Where memory or places are missing, idle members are unloaded, the least recently used first. A busy one takes no
new request until its own have ended: two that do not fit together take turns. All belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from prometheus_client.core import Metric

from ..engine.memory_plan import MemoryRow, require_room
from ..errors import (
    DeadlineError,
    InferenceError,
    ModelNotFoundError,
    QueueFullError,
    UnavailableError,
    WorkerError,
    copy_error,
    counted,
)
from ..machine import trim_heap
from ..progress import Stage
from ..text_model import TextModel
from .settings import LATEST, RETRY_FAILED_S

State = Literal["unloaded", "loading", "loaded", "sleeping", "failed"]
MAX_WAITING = 512  # requests that wait for a model to be loaded
TURN_S = 30.0  # so long a busy model takes no new requests for one that waits for its memory, then it serves as long
logger = logging.getLogger("llm_worker_rbee.server")


class Service(Protocol):
    """A model that is loaded and answers requests."""

    @property
    def engine(self) -> Any: ...
    @property
    def num_open(self) -> int: ...  # requests that are not finished
    @property
    def context_length(self) -> int: ...
    async def close(self, error: WorkerError) -> None: ...  # its process ends; its requests end with the error
    def metrics(self) -> Iterable[Metric]: ...


class ModelFacts(NamedTuple):
    """What a model's files say, for lists; the sizes are of its weights."""

    path: str
    kind: str
    architecture: str
    quant: str
    parameters: int
    weights_bytes: int
    context_length: int
    modified_at: float
    takes_images: bool = False


class ModelSource(ABC):
    """What the pool asks of a model: its names and its memory, and to load it."""

    is_fixed = False  # loaded once, when the server starts, and never unloaded
    service: Service | None = None  # of one that is fixed: it is there before it is loaded
    names: tuple[str, ...]  # of requests; replies use the first
    num_listed = 1  # of these, in Ollama's lists
    path = Path()  # of its files
    kind: str  # chat, embedding or rerank
    facts: ModelFacts | None = None  # None: the files cannot be used, for `error`
    error: WorkerError
    text: TextModel | None = None  # of a chat model, while it is loaded or sleeps

    def open_text(self) -> TextModel:
        """Open the text side of a chat model; called in a thread."""
        raise NotImplementedError

    @abstractmethod
    def plan(self) -> list[MemoryRow]:
        """Return the memory that it takes once it is loaded; called in a thread. Raise if it cannot be loaded."""

    @abstractmethod
    async def load(self, on_stage: Callable[[Stage], None], on_idle: Callable[[], None], *, is_alone: bool) -> Service:
        """Load it; `on_idle` is called when its last request has ended. `is_alone`: no other model answers now."""

    def metrics(self) -> Iterable[Metric]:
        """Return the metrics of a model that is not loaded."""
        return ()

    def drop(self) -> None:
        """Free what is kept of a model that is not loaded."""
        text, self.text = self.text, None
        if text is not None:
            text.close()


@dataclass(eq=False, slots=True, kw_only=True)
class Member:
    """A model of the pool, and where it is."""

    source: ModelSource
    keep_alive_s: float | None  # after its last request; None: for ever
    state: State = "unloaded"
    service: Service | None = None
    rows: list[MemoryRow] = field(default_factory=list)  # of its memory, while it takes any
    error: WorkerError | None = None  # of the last load, or of its engine
    failed_at: float = 0.0  # on the monotonic clock, like the other times
    last_used_at: float = 0.0
    stage: Stage | None = None  # of the present load
    num_users: int = 0  # requests that hold it
    num_loads: int = 0
    waiters: set[asyncio.Future[Service]] = field(default_factory=set)
    drained_for: set[object] = field(default_factory=set)  # members that wait for its memory, calls that unload it
    background: asyncio.Task[None] | None = None  # a load that no request waits for
    loading: asyncio.Task[None] | None = None
    unloading: asyncio.Task[None] | None = None
    waits_for_room: bool = False
    timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        return self.source.names[0]

    @property
    def size_bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def context_length(self) -> int | None:
        """Tokens that it takes, or that its files say; None: the files cannot be used."""
        if self.service is not None and self.state == "loaded":
            return self.service.context_length
        return None if self.source.facts is None else self.source.facts.context_length

    @property
    def num_requests(self) -> int:
        """Requests that it computes or is about to compute."""
        return max(self.num_users, 0 if self.service is None else self.service.num_open)

    @property
    def is_busy(self) -> bool:
        return self.num_users > 0 or (self.service is not None and self.service.num_open > 0)

    @property
    def is_serving(self) -> bool:
        """Whether a request may have it at once."""
        return self.state == "loaded" and self.unloading is None and not self.drained_for

    @property
    def expires_in_s(self) -> float | None:
        """Seconds until it sleeps, if no request comes; None: never."""
        if self.state != "loaded" or self.keep_alive_s is None:
            return None
        return self.keep_alive_s if self.is_busy else max(0.0, self.last_used_at + self.keep_alive_s - time.monotonic())

    def status(self) -> dict[str, Any]:
        """Return its state in the form of llama-server's router, with the reason or the progress."""
        status: dict[str, Any] = {"value": self.state}
        if self.state == "failed":
            status |= {"failed": True, "reason": str(self.error)}
        if self.state == "loading" and self.waits_for_room:
            status["reason"] = "it waits for the memory of other models"
        if self.state == "loading" and self.stage is not None:
            status["progress"] = {"stage": self.stage.stage, "done": self.stage.done, "total": self.stage.total}
        return status

    def describe(self) -> dict[str, Any]:
        """Return its state, memory and queue, for `/health`."""
        status = self.status()
        described = {"model": self.name, "kind": self.source.kind, "status": status["value"]}
        described |= {name: status[name] for name in ("reason", "progress") if name in status}
        return described | {"requests": self.num_requests, "waiting": len(self.waiters), "bytes": self.size_bytes}


class ModelPool:
    """The members, and the memory that they share."""

    def __init__(
        self,
        *,
        max_models: int,
        max_bytes: int | None,
        keep_alive_s: float | None = None,
        load_timeout_s: float | None = 300.0,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """`max_bytes` is for all members together; None: no limit but the system's."""
        self.members: list[Member] = []
        self.device, self.max_models, self.max_bytes = "cpu", max_models, max_bytes
        self.keep_alive_s = None if keep_alive_s == math.inf else keep_alive_s
        self.load_timeout_s, self.max_waiting = load_timeout_s, max_waiting
        self.on_stage: Callable[[Member, Stage], None] = lambda member, stage: None
        self._by_name: dict[str, Member] = {}
        self._queue: list[Member] = []  # that wait for room, the first one first: small models would starve a large one
        self._changed = asyncio.Event()  # replaced with each change of memory
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop_error: WorkerError | None = None

    def add(self, source: ModelSource) -> Member:
        """Add a model. A name that an earlier member has stays with that one."""
        member = Member(source=source, keep_alive_s=self.keep_alive_s, service=source.service)
        self.members.append(member)
        for name in source.names:
            self._by_name.setdefault(name.removesuffix(LATEST), member)
        return member

    def remove(self, member: Member) -> None:
        """Forget a model that is not loaded."""
        self.members.remove(member)
        self._by_name = {name: other for name, other in self._by_name.items() if other is not member}

    def named(self, name: str) -> Member | None:
        """Return the member of this name, with or without the tag `:latest`."""
        return self._by_name.get(name) or self._by_name.get(name.removesuffix(LATEST))

    @property
    def residents(self) -> list[Member]:
        """The members that take memory: they are loading, loaded or being unloaded."""
        return [member for member in self.members if member.rows]

    @property
    def used_bytes(self) -> int:
        return sum(member.size_bytes for member in self.residents)

    @property
    def num_waiting(self) -> int:
        return sum(len(member.waiters) for member in self.members)

    def describe(self) -> dict[str, Any]:
        """Return states, memory and queue of each model, and the memory of all."""
        memory = {"used_bytes": self.used_bytes, "limit_bytes": self.max_bytes}
        return {"models": [member.describe() for member in self.members], "memory": memory}

    @asynccontextmanager
    async def use(self, member: Member) -> AsyncIterator[Service]:
        """Provide the service of a member that is not unloaded meanwhile; load it first if it is not loaded."""
        self._notice_failure(member)
        if member.is_serving and member.service is not None:
            service, member.num_users = member.service, member.num_users + 1
        else:
            service = await self._wait_for(member)
        try:
            yield service
        finally:
            self._release(member)

    async def _wait_for(self, member: Member) -> Service:
        """Return the service once it is loaded; the caller is counted as a user of it."""
        self._require_place(member)
        future: asyncio.Future[Service] = asyncio.get_running_loop().create_future()
        member.waiters.add(future)
        try:
            self._start_load(member)
            async with asyncio.timeout(self.load_timeout_s):
                return await future
        except BaseException as error:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._release(member)  # it was served in the same moment
            if isinstance(error, TimeoutError):
                raise DeadlineError(self._describe_wait(member)) from None
            raise
        finally:
            member.waiters.discard(future)
            if not member.waiters and member.waits_for_room and member.loading is not None:
                member.loading.cancel()

    def _require_place(self, member: Member) -> None:
        """Raise if no request may wait for this member."""
        if self._stop_error is not None:
            raise copy_error(self._stop_error)
        if member not in self.members:  # its file went while the request was read
            raise ModelNotFoundError(f"there is no model {member.name!r} here any more")
        if self.num_waiting >= self.max_waiting:
            count = counted(self.num_waiting, "request")
            raise QueueFullError(f"{count} wait for models to be loaded: the queue is full", 1)
        is_recent = time.monotonic() - member.failed_at < RETRY_FAILED_S
        if member.state == "failed" and member.error is not None and is_recent:
            raise copy_error(member.error)

    def _describe_wait(self, member: Member) -> str:
        if member.state == "loaded":
            return f"{member.name!r} is being unloaded, and its requests did not end within {self.load_timeout_s:g} s"
        seconds = f"the model {member.name!r} was not loaded within {self.load_timeout_s:g} s"
        if not member.waits_for_room:
            return seconds
        busy = ", ".join(repr(other.name) for other in self.residents if other.is_busy)
        return f"{seconds}: it does not fit beside the models that answer requests ({busy})"

    def _release(self, member: Member) -> None:
        """Count a user less."""
        member.num_users -= 1
        self._on_idle(member)

    def _on_idle(self, member: Member) -> None:
        """Let a member without requests go, or let its time run."""
        if member.is_busy or member.state != "loaded" or member.unloading is not None:
            return
        member.last_used_at = time.monotonic()
        if member.timer is not None:
            member.timer.cancel()
        if member.drained_for:
            self._notify()
        elif member.keep_alive_s == 0:
            self._start_unload(member, "unloaded")
        elif member.keep_alive_s is not None:
            loop = asyncio.get_running_loop()
            member.timer = loop.call_later(member.keep_alive_s, self._on_expiry, member)

    def _on_expiry(self, member: Member) -> None:
        if member.is_serving and not member.is_busy:
            logger.info("the model %s sleeps: no request for %g s", member.name, member.keep_alive_s)
            self._start_unload(member, "sleeping")

    def set_keep_alive(self, member: Member, seconds: float) -> None:
        """Keep a member for so long after its last request; 0: unload it then, infinite: keep it."""
        member.keep_alive_s = None if seconds == math.inf else seconds
        self._on_idle(member)

    def _start_load(self, member: Member) -> None:
        """Load a member that is not loaded, unless that is under way."""
        if member.loading is None and not (member.state == "loaded" and member.unloading is None):
            member.loading = self._start_task(self._load(member))

    async def _load(self, member: Member) -> None:
        """Load a member, and hand it to the requests that wait."""
        before = member.state
        member.state, member.error, member.stage = "loading", None, None
        member.keep_alive_s = self.keep_alive_s
        try:
            if member.unloading is not None:
                await asyncio.shield(member.unloading)
                before, member.state = member.state, "loading"
            await self._take_room(member, await self._plan(member))
            try:
                member.service = await self.open(member)
            except (InferenceError, UnavailableError, ConnectionError) as error:  # its process has died
                logger.warning("the model %s is loaded again: %s", member.name, error)
                member.service = await self.open(member)
            member.state, member.num_loads = "loaded", member.num_loads + 1
        except asyncio.CancelledError:
            member.state, member.rows = "unloaded" if before == "loading" else before, []
            if self._stop_error:
                raise
        except Exception as error:
            self._fail(member, error)
        finally:
            member.loading, member.stage = None, None
            self._notify()
        if member.state == "loaded":
            self._serve_waiters(member)
            self._on_idle(member)
        elif member.state != "failed" and member.waiters:  # they came while it was cancelled
            self._start_load(member)

    async def open(self, member: Member) -> Service:
        """Start the engine of a member, once it has room."""

        def on_stage(stage: Stage) -> None:
            member.stage = stage
            self.on_stage(member, stage)

        def on_idle() -> None:
            self._on_idle(member)

        start, is_alone = time.monotonic(), not any(other.is_busy for other in self.residents)
        try:
            async with asyncio.timeout(self.load_timeout_s):
                service = await member.source.load(on_stage, on_idle, is_alone=is_alone)
        except TimeoutError:
            raise DeadlineError(f"the model {member.name!r} was not loaded within {self.load_timeout_s:g} s") from None
        logger.info("the model %s is loaded after %.2f s", member.name, time.monotonic() - start)
        return service

    def _serve_waiters(self, member: Member) -> None:
        """Hand a loaded member to the requests that wait for it."""
        assert member.service is not None
        for future in member.waiters:
            if not future.done():
                member.num_users += 1
                future.set_result(member.service)

    def _fail(self, member: Member, error: Exception) -> None:
        """Note why a member cannot serve; requests that wait end with the error."""
        known = error if isinstance(error, WorkerError) else InferenceError(f"{type(error).__name__}: {error}")
        known.args = (str(known).replace(f"{member.source.path.parent}/", ""), *known.args[1:])  # clients see it
        logger.error("the model %s failed: %s", member.name, known)
        member.state, member.rows, member.service = "failed", [], None
        member.error, member.failed_at = known.with_traceback(None), time.monotonic()
        member.source.drop()
        for future in member.waiters:
            if not future.done():
                future.set_exception(copy_error(known))

    async def require_fits(self, member: Member) -> int:
        """Return the bytes that a member takes beside those it has; raise if it cannot be loaded even alone."""
        if member.rows or member.loading is not None:
            return 0
        try:
            return sum(row.bytes for row in await self._plan(member))
        except WorkerError as error:
            if not member.rows and member.loading is None:
                self._fail(member, error)
            raise

    async def _plan(self, member: Member) -> list[MemoryRow]:
        """Return the memory that a member takes; raise if it is more than all may have."""
        rows = await asyncio.to_thread(member.source.plan)
        require_room(rows, self.max_bytes)
        return rows

    async def _take_room(self, member: Member, rows: list[MemoryRow]) -> None:
        """Reserve the memory of a load; wait until others have left it."""
        size, start = sum(row.bytes for row in rows), time.monotonic()
        self._queue.append(member)
        try:
            while self._queue[0] is not member or self._unload_for(member, size, (time.monotonic() - start) // TURN_S):
                member.waits_for_room = True
                with suppress(TimeoutError):
                    async with asyncio.timeout(TURN_S - (time.monotonic() - start) % TURN_S):
                        await self._changed.wait()
            member.rows = rows
        finally:
            self._queue.remove(member)
            member.waits_for_room = False
            self._stop_draining(member)
            self._notify()

    def _unload_for(self, member: Member, size: int, turn: float) -> bool:
        """Unload idle members, and in even turns drain busy ones, until there is room; return whether it must be waited
        for. In odd turns those serve again: the answers that they compute may be long."""
        others = [other for other in self.residents if other is not member]
        for other in others:
            self._notice_failure(other)
        used, count = sum(other.size_bytes for other in others), len(others)

        def fits() -> bool:
            return count < self.max_models and (self.max_bytes is None or used + size <= self.max_bytes)

        if fits():
            return False
        leaving = [other for other in others if other.unloading is not None]
        loaded = [other for other in others if other.state == "loaded" and other.unloading is None]
        loaded.sort(key=lambda other: (other.is_busy, member not in other.drained_for, other.last_used_at))
        if turn % 2:
            self._stop_draining(member)
        for other in (*leaving, *loaded):
            if fits():
                break
            used, count = used - other.size_bytes, count - 1
            if other.unloading is None and other.is_busy:
                other.drained_for |= set() if turn % 2 else {member}
            elif other.unloading is None:
                logger.info("the model %s is unloaded for %s", other.name, member.name)
                self._start_unload(other, "unloaded")
        return True

    def _stop_draining(self, reason: object) -> None:
        """Let members that were drained for this reason serve again; the wait is over."""
        for other in self.members:
            if reason in other.drained_for:
                other.drained_for.discard(reason)
                if other.is_serving:
                    self._serve_waiters(other)
                    self._on_idle(other)

    async def preload(self, members: Sequence[Member]) -> None:
        """Load members one after another, as long as there is room without unloading any."""
        for member in members:
            with suppress(WorkerError):  # it is the member's reason
                size = await self.require_fits(member)
                has_room = self.max_bytes is None or self.used_bytes + size <= self.max_bytes
                if len(self.residents) < self.max_models and has_room:
                    await self.load(member)

    async def load(self, member: Member) -> None:
        """Load a member, and return once it is loaded."""
        async with self.use(member):
            pass

    def start_load(self, member: Member) -> None:
        """Load a member in the background, unless that is under way; raise if too many requests wait for loads."""
        if member.is_serving or (member.background is not None and not member.background.done()):
            return
        self._require_place(member)

        async def load() -> None:
            with suppress(WorkerError):  # it is the member's reason
                await self.load(member)

        member.background = self._start_task(load())

    async def unload(self, member: Member, state: State = "unloaded") -> None:
        """Unload a member once its requests have ended; new ones wait, and load it again."""
        if member.loading is not None:
            await asyncio.wait({member.loading})
        reason = object()  # of this call: another one may end before
        member.drained_for.add(reason)
        try:
            while member.state == "loaded" and member.unloading is None and member.is_busy:
                await self._changed.wait()
            if member.state == "loaded" and member.unloading is None:
                self._start_unload(member, state)
            if member.unloading is not None:
                await asyncio.shield(member.unloading)
        finally:
            self._stop_draining(reason)
        if member.state in ("sleeping", "failed") and state == "unloaded":
            member.state, member.error = "unloaded", None
        if member.state == "unloaded":
            member.source.drop()

    async def sleep(self) -> None:
        """Unload all members once their requests have ended, until they are used again or `wake` is called."""
        loaded = [member for member in self.members if member.state in ("loaded", "loading")]
        await asyncio.gather(*(self.unload(member, "sleeping") for member in loaded))

    async def wake(self) -> None:
        """Load the members that sleep, as many as there is room for."""
        sleeping = [member for member in self.members if member.state == "sleeping"]
        await self.preload(sorted(sleeping, key=lambda member: member.last_used_at, reverse=True))

    def _start_unload(self, member: Member, state: State) -> None:
        member.unloading = self._start_task(self._unload(member, state))

    async def _unload(self, member: Member, state: State) -> None:
        """End the engine of a member; its memory is free once the process has ended."""
        service, member.service = member.service, None
        assert service is not None
        try:
            await service.close(self._stop_error or InferenceError("the model was unloaded"))
        finally:
            member.rows, member.unloading = [], None
            if member.loading is None:
                member.state = state
            self._drop_texts()
            asyncio.get_running_loop().run_in_executor(None, trim_heap)
            self._notify()
        if member.waiters and not self._stop_error:
            self._start_load(member)

    def _drop_texts(self) -> None:
        """Keep the text sides of as many models as may be loaded, for those that were used last and may come back."""
        others = [member for member in self.members if not member.rows and member.loading is None]
        others.sort(key=lambda member: member.last_used_at, reverse=True)
        for member in others[self.max_models :]:
            member.source.drop()

    def _notice_failure(self, member: Member) -> None:
        """Let go of an engine that died too often to be restarted."""
        service, rows = member.service, member.rows
        if member.state != "loaded" or member.unloading is not None or service is None or member.source.is_fixed:
            return
        if service.engine.status() == "failed":
            self._fail(member, InferenceError(f"the engine of {member.name!r} died and was restarted too often"))
            member.service, member.rows = service, rows  # until the process has ended
            self._start_unload(member, "failed")

    def notice_failures(self) -> None:
        """Bring the states of all members up to date."""
        for member in self.members:
            self._notice_failure(member)

    def _start_task(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def stop(self, error: WorkerError) -> None:
        """End all engines; requests that wait end with the error."""
        self._stop_error = error
        for member in self.members:
            for future in member.waiters:
                if not future.done():
                    future.set_exception(copy_error(error))
            if member.loading is not None:
                member.loading.cancel()
        for member in self.members:
            is_loaded = member.state == "loaded" or member.source.is_fixed
            if is_loaded and member.unloading is None and member.service is not None:
                self._start_unload(member, "unloaded")
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
