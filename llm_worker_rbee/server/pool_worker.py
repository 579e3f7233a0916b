"""The worker of a pool of models: which member a request means, what is loaded at the start, and the state of all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..errors import (
    DeadlineError,
    InferenceError,
    InvalidRequestError,
    ModelNotFoundError,
    ShuttingDownError,
    WorkerError,
)
from .metrics import PREFIX, batch_metrics, chat_families, encode_families, label_families
from .model_pool import Member, ModelPool
from .model_source import ChatSource, ModelsFolder
from .model_store import ModelStore
from .offload import OffloadPool
from .pooling import Kind, PoolingModels, PoolingService, pooling_metrics
from .schema import KINDS
from .settings import ServerSettings
from .worker import Front, Worker

MAX_LISTED = 8  # names in an error
logger = logging.getLogger("llm_worker_rbee.server")


class PoolWorker(Front):
    """Several models on the wire."""

    pool: ModelPool

    def __init__(
        self,
        settings: ServerSettings,
        pool: ModelPool,
        add_models: Callable[[], Awaitable[list[Member]]],
        folder: ModelsFolder | None,
        offload: OffloadPool,
        max_pull: int = 0,
    ) -> None:
        """`add_models` adds the models that the options name to the pool, and fetches those that are not here; it
        returns those to load at once. `folder` are the models of --models-dir, `max_pull` the bytes that one of the hub
        may have which a request fetches."""
        super().__init__(settings, PoolingModels(), offload)
        self.pool, self._add_models, self.folder = pool, add_models, folder
        self.store = None if folder is None else ModelStore(folder.folder, pool, self.refresh, max_pull)
        self._of_folder: set[Member] = set()
        self._scanning = asyncio.Lock()
        self._preloading: asyncio.Task[None] | None = None
        self._is_located = False

    @property
    def takes_images(self) -> bool:
        return any(facts.takes_images for member in self.pool.members if (facts := member.source.facts) is not None)

    async def start(self) -> None:
        """Locate the models, and load the first; the others are loaded while it serves."""
        try:
            named = await self._add_models()
            await self.refresh()
            await self.pool.preload(named[:1])
        except Exception as error:
            if self.state == "stopping":
                return
            raise self._note_failure(error, "the models could not be located") from error
        if self.state != "loading":
            return
        self.state, self._is_located = "ready", True
        self._publish({"stage": "ready"})
        self._preloading = asyncio.ensure_future(self.pool.preload(named[1:]))

    async def stop(self) -> None:
        if self._preloading is not None:
            self._preloading.cancel()
        error = await self._drain(lambda: any(member.is_busy for member in self.pool.members))
        if self.store is not None:
            await self.store.close()
        await self.pool.stop(error)
        await self.pooling.stop(error)
        self.offload.close()

    async def restart_engines(self) -> None:
        for member in list(self.pool.residents):
            if member.is_serving:
                try:
                    async with self.pool.use(member) as service:
                        await service.engine.restart()
                except WorkerError as error:
                    logger.warning("the engine of %s is not restarted: %s", member.name, error)

    async def refresh(self) -> None:
        """Add the models that are new in the folder, and forget those that are gone; loaded ones stay until then."""
        if self.folder is None:
            return
        async with self._scanning:
            sources = await asyncio.to_thread(self.folder.scan)
        for member in list(self._of_folder):
            if member.source not in sources and not (member.rows or member.loading or member.waiters):
                self._of_folder.remove(member)
                self.pool.remove(member)
                member.source.drop()
        for source in sources:
            if self.pool.named(source.names[0]) is None:
                self._of_folder.add(self.pool.add(source))

    async def find(self, name: str | None, *kinds: str) -> Member:
        """Return the member of a request: by its name, or the first of these kinds; raise if there is none."""
        if self.state == "stopping":
            raise ShuttingDownError("the worker is shutting down")
        self.require_ready()
        member = self._default(kinds) if name is None else self.pool.named(name)
        if self.folder is not None and (member is None or await self._has_changed(member)):
            await self.refresh()
            member = self._default(kinds) if name is None else self.pool.named(name)
        fitting = [other.name for other in self.pool.members if other.source.kind in kinds]
        use = f"use one of {', '.join(map(repr, fitting[:MAX_LISTED]))}" if fitting else "this worker has none"
        if member is None:
            what = f"no model of kind {' or '.join(kinds)}" if name is None else f"no model {name[:100]!r}"
            raise ModelNotFoundError(f"there is {what} here: {use}")
        if member.source.kind not in kinds:
            kind = f"of kind {member.source.kind!r}, which does not do this"
            raise InvalidRequestError(f"the model {member.name!r} is {kind}: {use}", "model")
        return member

    async def _has_changed(self, member: Member) -> bool:
        """Return whether the files of a model that is not loaded have changed since the folder was read."""
        if member not in self._of_folder or member.rows or member.loading is not None or self.folder is None:
            return False
        return not await asyncio.to_thread(self.folder.is_current, member.source)

    def _default(self, kinds: tuple[str, ...]) -> Member | None:
        """Return the first model of the first of these kinds whose files can be used."""
        usable = [member for member in self.pool.members if member.source.facts is not None]
        return next((member for kind in kinds for member in usable if member.source.kind == kind), None)

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[Worker]:
        async with self.use_member(await self.find(name, "chat")) as chat:
            yield chat

    @asynccontextmanager
    async def use_member(self, member: Member) -> AsyncIterator[Worker]:
        """Provide a chat model of the pool."""
        async with self.pool.use(member) as service:
            assert isinstance(service, Worker)
            yield service

    @asynccontextmanager
    async def use_pooling(
        self, name: str | None, *kinds: Kind, keep_alive: float | None = None
    ) -> AsyncIterator[PoolingService]:
        member = await self.find(name, *kinds)
        async with self.pool.use(member) as service:
            assert isinstance(service, PoolingService)
            if keep_alive is not None:
                self.pool.set_keep_alive(member, keep_alive)
            yield service

    @property
    def is_loaded(self) -> bool:
        return self._is_located

    @property
    def is_busy(self) -> bool:
        return self.pool.num_waiting > 0 or any(member.is_busy for member in self.pool.members)

    @property
    def pulls(self) -> list[dict[str, Any]]:
        """The models that are being fetched, and how far they are."""
        pulls = () if self.store is None else self.store.pulls.values()
        return [{"model": pull.name, "progress": pull.progress} for pull in pulls]

    def engine_status(self) -> str:
        """Return the worst state of the loaded members; one that is not loaded is no fault."""
        self.pool.notice_failures()
        states = {member.service.engine.status() for member in self.pool.members if member.service}
        worst = next((state for state in ("stalled", "loading") if state in states), "healthy")
        errors = [member.error for member in self.pool.members if member.state == "failed"]
        has_failed = any(isinstance(error, InferenceError | DeadlineError) for error in errors)  # not by its files
        if worst != "healthy" or has_failed:
            return worst if len(states) == 1 and worst != "healthy" and not has_failed else "degraded"
        return "healthy"

    def health(self) -> dict[str, Any]:
        status = {"ready": "healthy"}.get(self.state, self.state)
        if status == "healthy":
            status = self.engine_status()
        workers = [member.service for member in self.pool.members if isinstance(member.service, Worker)]
        loads = [worker.admission.load for worker in workers]
        ages = [worker.engine.last_step_age_s for worker in workers]
        return {
            "status": status,
            "model": None if (first := self._default(KINDS)) is None else first.name,
            "uptime_s": self.uptime_s,
            "last_step_age_s": round(max(ages, default=0.0), 3),
            "running": sum(load.running for load in loads),
            "waiting": sum(load.waiting for load in loads) + self.pool.num_waiting,
            "pooling": [],
            "models": [member.describe() for member in self.pool.members],
            "pulls": None if self.store is None else self.pulls,
            "memory": {"used_bytes": self.pool.used_bytes, "limit_bytes": self.pool.max_bytes},
        }

    def metrics(self) -> bytes:
        """Return the metrics of all members, labelled by model."""
        states = GaugeMetricFamily(f"{PREFIX}model_state", "1 in the state of a model.", labels=["model", "state"])
        sizes = GaugeMetricFamily(f"{PREFIX}model_memory_bytes", "Planned memory of a model.", labels=["model"])
        loads = CounterMetricFamily(f"{PREFIX}model_loads", "How often a model was loaded.", labels=["model"])
        waiting = GaugeMetricFamily(f"{PREFIX}model_waiting", "Requests that wait for its load.", labels=["model"])
        for member in self.pool.members:
            states.add_metric([member.name, member.state], 1)
            sizes.add_metric([member.name], member.size_bytes)
            loads.add_metric([member.name], member.num_loads)
            waiting.add_metric([member.name], len(member.waiters))
        groups = ((member.name, _families(member)) for member in self.pool.members)
        families = [states, sizes, loads, waiting, *batch_metrics(self.batches)]
        return encode_families([*families, *label_families(groups)])


def _families(member: Member) -> Iterator[Metric]:
    service = member.service
    if isinstance(service, PoolingService):
        yield from pooling_metrics([service])
    elif isinstance(service, Worker):
        load = service.admission.load
        yield from chat_families(service.latencies, load.running, load.waiting, service.engine)
    elif isinstance(member.source, ChatSource):  # its counters stay while it is not loaded
        yield from chat_families(member.source.latencies, 0, 0, None)
