"""The worker behind the routes: starts its engine and generations, reports health, drains.

The port is bound before the engine has loaded its model. The worker knows its engine by the protocol only
(`TokenEngine`); the text side of the model, tokenizer and chat template, is its own. Everything here runs in the event
loop. Which requests may enter is decided in `admission`; what replies look like, in `dialects`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from prometheus_client.core import Metric

from ..config import LoraUse
from ..engine.request import BATCH_PRIORITY
from ..errors import (
    DeadlineError,
    InferenceError,
    InvalidRequestError,
    ModelLoadingError,
    ModelNotFoundError,
    ShuttingDownError,
    WorkerError,
)
from ..generation import Generation, GenerationListener, make_generations
from ..progress import OnStage, Stage
from ..sampling_params import SamplingParams
from ..text_model import EncodedPrompt, TextModel
from ..token_engine.protocol import ModelInfo, TokenEngine
from .admission import Admission
from .batches import BatchService
from .lora_names import LoraNames
from .metrics import LatencyHistograms, batch_metrics, chat_families, encode_families, merge_families, pool_metrics
from .model_pool import Member, ModelPool
from .model_store import ModelStore
from .offload import OffloadPool, PromptEncoder
from .pooling import MAX_OFFLOADED_BYTES, OPTIONS, Kind, PoolingService
from .schema import KINDS, ModelLimits, ParseOptions, ValidationError, ValidationIssue
from .settings import ServerSettings, is_name_of

State = Literal["loading", "ready", "stopping", "failed"]
LOADING_RETRY_S = 2
MAX_LISTED = 8  # names in an error
MAX_MESSAGES = 1000  # that wait for the callback URL
QUEUED_IMAGE_BODIES = 4  # bodies of the largest size that wait to be parsed
logger = logging.getLogger("llm_worker_rbee.server")


def is_batch_work(generation: Generation) -> bool:
    """Return whether a generation belongs to a batch: its latencies concern no client, and the queue is not its own."""
    return generation.request.submitted.priority >= BATCH_PRIORITY


class Front:
    """What the routes need of a server: its models, which of them a request means, and the state of all.

    Its models are those of a pool, or (`has_pool` is not set) a chat model and pooling models that are fixed: they are
    loaded when it starts, and one that cannot be loaded ends it.
    """

    batches: BatchService | None = None  # with --files-dir

    def __init__(
        self,
        settings: ServerSettings,
        pool: ModelPool,
        add_models: Callable[[], Awaitable[list[Member]]],
        *,
        offload: OffloadPool,
        store: ModelStore | None = None,
    ) -> None:
        """`add_models` adds the models that the options name to the pool, and fetches those that are not here; it
        returns those to load at once. `store` is --models-dir."""
        self.settings, self.names, self.pool, self.offload = settings, settings.names, pool, offload
        self.pooling_offload = OffloadPool(MAX_OFFLOADED_BYTES)  # bodies and texts of pooling models never delay chat
        self.state: State = "loading"
        self.started_at = time.time()  # a date; uptime comes from the monotonic clock
        self._start_clock = time.monotonic()
        self.loading_events: list[dict[str, Any]] = []  # of /v1/loading/progress
        self.loading_changed = asyncio.Event()  # replaced with each event
        self.failure: WorkerError | None = None
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue(MAX_MESSAGES)  # for the callback URL
        self._has_dropped = False  # one of them
        self.store, self._add_models = store, add_models
        self._restarting = asyncio.Lock()
        self._preloading: asyncio.Task[None] | None = None
        self.was_ready = False
        pool.on_stage = self._publish_stage

    @property
    def chat(self) -> Worker | None:
        """The chat model of a server that has no pool."""
        service = None if self.settings.has_pool else self.pool.members[0].source.service
        return service if isinstance(service, Worker) else None

    async def start(self) -> None:
        """Load the models; the first one is served while others still load. A failure is kept and raised."""
        try:
            named = await self._add_models()
            await self.refresh()
            if self.settings.has_pool:
                await self.pool.preload(named[:1])
                self._become_ready()
                self._preloading = asyncio.ensure_future(self.pool.preload(named[1:]))
            else:
                await self._load_fixed(named)
        except Exception as error:
            if self.state == "stopping":  # an engine that is stopped cannot load
                return
            raise self._note_failure(error) from error

    async def _load_fixed(self, members: Sequence[Member]) -> None:
        """Load the models of a server without a pool at the same time."""

        async def load(member: Member) -> None:
            member.state = "loading"
            member.service = await self.pool.open(member)
            member.rows, member.state, member.num_loads = member.source.plan(), "loaded", 1
            if member is members[0]:
                self._become_ready()
                for other in members:
                    if other.state == "loading":
                        logger.warning("the model %s is still loading: /health is degraded until it serves", other.name)

        loading = [asyncio.ensure_future(load(member)) for member in members]
        try:
            await asyncio.gather(*loading)
        finally:
            for task in loading:
                task.cancel()

    def _become_ready(self) -> None:
        if self.state == "loading":  # else it was stopped meanwhile
            self.state, self.was_ready = "ready", True
            self._publish({"stage": "ready"})

    @property
    def takes_images(self) -> bool:
        """Whether a model that is served takes images."""
        if self.chat is not None:
            return self.chat.takes_images
        return any(facts.takes_images for member in self.pool.members if (facts := member.source.facts) is not None)

    def _note_failure(self, error: Exception) -> WorkerError:
        """Keep and return why nothing can be served."""
        what = "the model could not be loaded"
        known = error if isinstance(error, WorkerError) else InferenceError(f"{what}: {type(error).__name__}: {error}")
        self.failure, self.state = known, "failed"
        self._publish({"stage": "failed", "message": what})
        return known

    async def stop(self) -> None:
        """Take no new requests, let running ones finish within the shutdown timeout, end the others with an error."""
        if self._preloading is not None:
            self._preloading.cancel()
        was_loading, self.state = self.state == "loading", "stopping"
        if was_loading:
            self._publish({"stage": "stopping"})
        end = time.monotonic() + self.settings.shutdown_timeout_s
        while self.is_busy and time.monotonic() < end:
            await asyncio.sleep(0.02)
        if self.store is not None:
            await self.store.close()
        await self.pool.stop(ShuttingDownError("the worker is shutting down"))
        for offload in (self.offload, self.pooling_offload):
            offload.close()

    async def restart_engines(self) -> None:
        """Replace the engines' processes, one after another."""
        if self.state != "ready" or self._restarting.locked():
            reason = "a restart is under way" if self._restarting.locked() else f"the worker is {self.state}"
            logger.warning("the engines are not restarted: %s", reason)
            return
        async with self._restarting:
            for member in self.pool.residents:
                if member.is_serving and member.service is not None:
                    try:
                        await member.service.engine.restart()
                    except WorkerError as error:
                        logger.warning("the engine of %s is not restarted: %s", member.name, error)

    async def refresh(self) -> None:
        """Add the models that are new in --models-dir, and forget those that are gone."""
        if self.store is not None:
            await self.store.refresh()

    def require_ready(self) -> None:
        """Raise unless requests are accepted."""
        if self.state == "stopping":
            raise ShuttingDownError("the worker is shutting down")
        if self.failure is not None:
            raise InferenceError("the model could not be loaded")
        if self.state != "ready":
            raise ModelLoadingError("the model is loading", LOADING_RETRY_S)

    async def find(self, name: str | None, *kinds: str) -> Member:
        """Return the member of a request: by its name, or the first of these kinds; raise if there is none."""
        if self.settings.has_pool:  # else the models are known before they are loaded
            self.require_ready()
        if (member := self._named(name, kinds)) is None and self.settings.may_have_adapters:
            self.require_ready()  # their names are known once the model is loaded
        if self.store is not None and (member is None or await self.store.has_changed(member)):
            await self.store.refresh()
            member = self._named(name, kinds)
        if member is not None and member.source.kind in kinds:
            self.require_ready()
            if member.source.is_fixed and member.state == "loading":
                raise ModelLoadingError(f"the model {member.name!r} is loading", LOADING_RETRY_S)
            return member
        fitting = [other.name for other in self.pool.members if other.source.kind in kinds]
        options = " or ".join(OPTIONS[kind] for kind in kinds)
        use = f"use {', '.join(map(repr, fitting[:MAX_LISTED]))}" if fitting else f"start the worker with {options}"
        if member is not None:
            kind = f"of kind {member.source.kind!r}, which does not do this"
            raise InvalidRequestError(f"the model {member.name!r} is {kind}: {use}", "model")
        if name is None:
            raise ModelNotFoundError(f"there is no model of kind {' or '.join(kinds)} here: {use}")
        raise ModelNotFoundError(f"the model {name[:100]!r} is not served here: {use}{', or no model' * bool(fitting)}")

    def _named(self, name: str | None, kinds: Sequence[str]) -> Member | None:
        """Return the model, or the one of the adapter, of this name; without one the default of these kinds."""
        if name is None:
            return self.default(kinds)
        if (member := self.pool.named(name)) is None:
            is_adapter = self.chat is not None and self.chat.loras.find(name) is not None
            return self.pool.members[0] if is_adapter else None
        if member.source.kind in kinds:
            return member
        others = (other for other in self.pool.members if other.source.kind in kinds)  # two may have one name
        return next((other for other in others if any(is_name_of(name, own) for own in other.source.names)), member)

    def default(self, kinds: Sequence[str] = KINDS) -> Member | None:
        """Return the first model of the first of these kinds whose files can be used."""
        usable = [member for member in self.pool.members if member.source.facts is not None or member.source.is_fixed]
        return next((member for kind in kinds for member in usable if member.source.kind == kind), None)

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[Worker]:
        """Provide the chat model of a request; it is loaded first if it is not, and kept meanwhile."""
        async with self.pool.use(await self.find(name, "chat")) as service:
            assert isinstance(service, Worker)
            yield service

    @asynccontextmanager
    async def use_pooling(
        self, name: str | None, *kinds: Kind, keep_alive: float | None = None
    ) -> AsyncIterator[PoolingService]:
        """Provide the pooling model of a request, of one of these kinds, and keep it so long after the request."""
        member = await self.find(name, *kinds)
        async with self.pool.use(member) as service:
            assert isinstance(service, PoolingService)
            if keep_alive is not None:
                self.pool.set_keep_alive(member, keep_alive)
            yield service

    async def parse(self, parser: str, body: bytes, *, is_stream: bool = False, chat: Worker | None = None) -> Any:
        """Parse a body with one of `body_parsers`, within the limits of a chat model; a large one in another process.
        Raise if it has a priority where priorities are not honoured."""
        chat, settings = chat or self.chat, self.settings
        limits = None if chat is None else chat.limits
        options = ParseOptions(limits, settings.ignore_unknown_fields, is_stream, settings.has_pool)
        record = await self.offload.parse(parser, body, options)
        if getattr(record, "priority", 0) and not settings.allow_priority:
            message = "priority is not honoured here: send 0 or none, or start the worker with --allow-priority"
            raise ValidationError([ValidationIssue("priority", "unsupported", message, record.priority)])
        return record

    async def parse_pooling(self, parser: str, body: bytes) -> Any:
        """Return the record of a body for a pooling model."""
        options = ParseOptions(None, self.settings.ignore_unknown_fields, has_pool=self.settings.has_pool)
        return await self.pooling_offload.parse(parser, body, options)

    def report(self, message: dict[str, Any]) -> None:
        """Send a message to the callback URL, if there is one."""
        if self.settings.callback_url is not None:
            if self.messages.full():
                self.messages.get_nowait()
                if not self._has_dropped:
                    logger.warning("the callback URL does not answer: its oldest messages are dropped")
                self._has_dropped = True
            self.messages.put_nowait({"worker_id": self.settings.worker_id, **message})

    def _publish_stage(self, member: Member, stage: Stage) -> None:
        if self.state == "loading" and member is self.pool.members[0]:
            event = {"stage": stage.stage, "done": stage.done, "total": stage.total, "seconds": round(stage.seconds, 6)}
            self._publish(event if stage.detail is None else event | {"detail": stage.detail})

    def _publish(self, event: dict[str, Any]) -> None:
        self.loading_events.append(event)
        changed, self.loading_changed = self.loading_changed, asyncio.Event()
        changed.set()

    @property
    def is_busy(self) -> bool:
        """Whether there is any request."""
        return self.pool.num_waiting > 0 or any(member.is_busy for member in self.pool.members)

    def engine_status(self) -> str:
        """Return the worst state of the loaded members; one that is not loaded is no fault."""
        self.pool.notice_failures()
        started = [(member.state, member.service) for member in self.pool.members if member.service is not None]
        states = [state if state == "loading" else str(service.engine.status()) for state, service in started]
        if self.chat is not None and states[0] != "healthy":
            return states[0]
        errors = [member.error for member in self.pool.members if member.state == "failed"]
        has_failed = any(isinstance(error, InferenceError | DeadlineError) for error in errors)  # not by its files
        if len(set(states)) == 1 and not has_failed:
            return states[0]
        return "degraded" if has_failed or set(states) - {"healthy"} else "healthy"

    def health(self) -> dict[str, Any]:
        """Return the health from cached state: forward progress, not that the process exists."""
        members, first = self.pool.members, self.default()
        workers = [member.service for member in members if isinstance(member.service, Worker)]
        loads = [worker.admission.load for worker in workers]
        age = max((worker.engine.last_step_age_s for worker in workers if self.state == "ready"), default=0.0)
        status = self.engine_status() if self.state == "ready" else self.state
        if status == "healthy" and age > self.settings.stall_timeout_s:
            status = "stalled"
        health: dict[str, Any] = {
            "status": status,
            "model": None if first is None else first.name,
            "uptime_s": round(time.monotonic() - self._start_clock, 3),
            "last_step_age_s": round(age, 3),
            "running": sum(load.running for load in loads),
            "waiting": sum(load.waiting for load in loads) + self.pool.num_waiting,
            "pooling": [],
        }
        if self.settings.has_pool:
            return health | {**self.pool.describe(), "pulls": None if self.store is None else self.store.describe()}
        pooling = [member.service for member in members if isinstance(member.service, PoolingService)]
        return health | {"pooling": [service.health() for service in pooling]}

    def metrics(self) -> bytes:
        """Return the metrics as Prometheus scrapes them; a pool's metrics are labelled by model."""
        members, has_pool = self.pool.members, self.settings.has_pool
        labels = ({"model": member.name} if has_pool else {} for member in members)
        groups = zip(labels, ((member.service or member.source).metrics() for member in members), strict=True)
        own = [*(pool_metrics(members) if has_pool else ()), *batch_metrics(self.batches)]
        return encode_families([*own, *merge_families(groups)])


class Worker(GenerationListener):
    """One chat model on the wire."""

    def __init__(
        self,
        settings: ServerSettings,
        engine: TokenEngine,
        open_model: Callable[[ModelInfo], TextModel],
        offload: OffloadPool,
    ) -> None:
        """`open_model` returns the text side of the model that the engine has loaded; it is called in a thread."""
        self.settings, self.names, self.engine, self.offload = settings, settings.names, engine, offload
        self._open: set[Generation] = set()  # not read to their end
        self._unstarted: set[Generation] = set()  # of these, without a token
        self.admission = Admission.of_chat(engine, settings)
        self.loras = LoraNames(engine, settings)
        self.latencies = LatencyHistograms()
        self._open_model: Callable[[ModelInfo], TextModel] | None = open_model
        self._on_idle: Callable[[], None] = lambda: None
        self._model: TextModel | None = None
        self._is_closed = False
        self.encoder: PromptEncoder  # once the model is loaded

    async def start(self, on_stage: OnStage, on_idle: Callable[[], None]) -> None:
        """Load the model; `on_idle` is called when the last request has ended."""
        loop, self._on_idle = asyncio.get_running_loop(), on_idle

        def report(stage: Stage) -> None:  # also called in a thread of the engine
            loop.call_soon_threadsafe(on_stage, stage)

        info = await self.engine.start(report)
        self.require_open()
        model = await self._open_text(info, on_stage)
        self.loras.add_loaded(info)
        self.encoder = PromptEncoder(model, self.offload, self.settings)
        self._model = model

    async def _open_text(self, info: ModelInfo, on_stage: OnStage) -> TextModel:
        """Open the text side of the model; a phase of loading, unless the engine's own load had it."""
        start = time.perf_counter()
        assert self._open_model is not None
        model = await asyncio.to_thread(self._open_model, info)
        model.open_objects = self.settings.open_objects
        if info.vision is not None and model.vision is None:
            await asyncio.to_thread(model.use_images, info.vision)
        if model.image_decoder is not None:
            model.image_decoder.max_bytes = self.settings.max_image_bytes
            model.image_decoder.max_pixels = self.settings.max_image_pixels
            self.offload.grow(QUEUED_IMAGE_BODIES * self.settings.max_image_body)
        if (phase := "tokenizer") not in info.phases:
            seconds = info.phases[phase] = time.perf_counter() - start
            on_stage(Stage(phase, 0, None, 0.0))
            on_stage(Stage(phase, 1, 1, seconds))
        return model

    async def close(self, error: WorkerError) -> None:
        """End the engine, and let go of the text side; requests that are left end with the error."""
        self._is_closed = True
        has_requests = bool(self._open)  # their replies are still printed
        await self.engine.stop(error)
        self._open_model = None
        if not has_requests:  # replies that ended hold the worker until they are collected
            self._model = None
            self.__dict__.pop("encoder", None)

    @property
    def model(self) -> TextModel:
        """The text side of the model; raises while it loads and once it is closed."""
        self.require_ready()
        return self.loaded

    @property
    def is_loaded(self) -> bool:
        return self._model is not None

    @property
    def takes_images(self) -> bool:
        return self._model is not None and self._model.vision is not None

    @property
    def loaded(self) -> TextModel:
        """The model for requests that were admitted, also while the worker stops."""
        assert self._model is not None
        return self._model

    @property
    def limits(self) -> ModelLimits | None:
        """The limits of values in bodies; none until it is loaded."""
        return None if self._model is None else ModelLimits(self._model.max_context, self._model.vocab_size)

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_unstarted(self) -> int:
        return len(self._unstarted)

    def require_open(self) -> None:
        if self._is_closed:
            raise ShuttingDownError("the worker is shutting down")

    def require_ready(self) -> None:
        """Raise unless it is loaded."""
        self.require_open()
        if self._model is None:
            raise ModelLoadingError("the model is loading", LOADING_RETRY_S)

    def start_generations(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams,
        *,
        n: int = 1,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
        is_scored_only: bool = False,
        loras: Sequence[LoraUse] = (),
    ) -> list[Generation]:
        """Start `n` generations of one prompt, within a reservation; they share one seed."""
        model = self.model
        generations = make_generations(
            model.tokenizer,
            self.engine.info.engine,
            model.vocab_size,
            prompt,
            params.resolve(model.sampling_defaults.values),
            n=n,
            priority=priority,
            timeout_s=timeout_s,
            cache_salt=cache_salt,
            is_scored_only=is_scored_only,
            loras=loras,
            listener=self,
        )
        for generation in generations:
            generation.submit(self.engine)
            self._open.add(generation)
            if not is_batch_work(generation):
                self.admission.add(generation.request)
                self._unstarted.add(generation)
        return generations

    def on_first_outputs(self, generation: Generation, seconds: float, count: int) -> None:
        if is_batch_work(generation):
            self.latencies.num_tokens += count
            return
        self._unstarted.discard(generation)
        self.latencies.observe_first(seconds, count, generation.request.queue_s)

    def on_outputs(self, generation: Generation, seconds: float, count: int) -> None:
        if is_batch_work(generation):
            self.latencies.num_tokens += count
            return
        self.latencies.observe_outputs(seconds, count)
        self.admission.observe_itl(seconds, count)

    def on_close(self, generation: Generation) -> None:
        self._unstarted.discard(generation)
        self._open.discard(generation)
        if not is_batch_work(generation):
            self.admission.remove(generation.request)
            self.latencies.e2e.observe(time.perf_counter() - generation.started_at)
        if not self._open:
            self._on_idle()

    @property
    def context_length(self) -> int:
        return self.engine.info.max_context

    def metrics(self) -> Iterator[Metric]:
        load = self.admission.load
        return chat_families(self.latencies, load.running, load.waiting, self.engine if self.is_loaded else None)
