"""The worker behind the routes: starts its engine and generations, reports health, drains.

The port is bound before the engine has loaded its model. The worker knows its engine by the protocol only
(`TokenEngine`); the text side of the model, tokenizer and chat template, is its own. Everything here runs in the event
loop. Which requests may enter is decided in `admission`; what replies look like, in `dialects`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from ..config import LoraUse
from ..engine.request import BATCH_PRIORITY
from ..errors import (
    ConflictError,
    InferenceError,
    InvalidRequestError,
    ModelFileError,
    ModelLoadingError,
    ModelNotFoundError,
    NotFoundError,
    ShuttingDownError,
    WorkerError,
)
from ..generation import Generation, GenerationListener, NamedLora, make_generations, named_loras
from ..progress import OnStage, Stage
from ..sampling_params import SamplingParams
from ..text_model import TextModel
from ..token_engine.protocol import ModelInfo, TokenEngine
from ..tokenizer.chat.parser import ChatParser
from .admission import Admission, Reservation
from .batches import BatchService
from .metrics import LatencyHistograms, batch_metrics, exposition
from .model_pool import ModelPool
from .model_store import ModelStore
from .offload import OffloadPool, PromptEncoder
from .pooling import Kind, PoolingModels, PoolingService, pooling_metrics
from .schema import ModelLimits, ParseOptions, ValidationError, ValidationIssue, is_name_of
from .settings import ServerSettings

State = Literal["loading", "ready", "stopping", "failed"]
LOADING_RETRY_S = 2
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")  # of a model or an adapter
logger = logging.getLogger("llm_worker_rbee.server")


def is_batch_work(generation: Generation) -> bool:
    """Return whether a generation belongs to a batch: its latencies concern no client, and the queue is not its own."""
    return generation.request.submitted.priority >= BATCH_PRIORITY


class Front(ABC):
    """What the routes need of a worker, be it of one chat model (`Worker`) or of a pool of models (`PoolWorker`)."""

    pool: ModelPool | None = None
    batches: BatchService | None = None  # with --files-dir
    store: ModelStore | None = None  # of --models-dir

    def __init__(self, settings: ServerSettings, pooling: PoolingModels, offload: OffloadPool | None) -> None:
        self.settings, self.names, self.pooling = settings, settings.names, pooling
        self.state: State = "loading"
        self.started_at = time.time()  # a date; uptime comes from the monotonic clock
        self._start_clock = time.monotonic()
        self.loading_events: list[dict[str, Any]] = []  # of /v1/loading/progress
        self.loading_changed = asyncio.Event()  # replaced with each event
        self.failure: WorkerError | None = None
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()  # for the callback URL
        self._owns_offload, self.offload = offload is None, offload or OffloadPool()

    @property
    def chat(self) -> Worker | None:
        """The chat model of a worker that has no pool."""
        return None

    @abstractmethod
    def use(self, name: str | None) -> AbstractAsyncContextManager[Worker]:
        """Provide the chat model of a request; in a pool it is loaded first if it is not, and kept meanwhile."""

    @abstractmethod
    def use_pooling(
        self, name: str | None, *kinds: Kind, keep_alive: float | None = None
    ) -> AbstractAsyncContextManager[PoolingService]:
        """Provide the pooling model of a request, of one of these kinds; a pool keeps it so long after the request."""

    @abstractmethod
    async def start(self) -> None:
        """Load the models."""

    @abstractmethod
    async def stop(self) -> None:
        """Take no new requests, let running ones finish within the shutdown timeout, end the others with an error."""

    @abstractmethod
    async def restart_engines(self) -> None:
        """Replace the engines' processes, one after another."""

    @abstractmethod
    def health(self) -> dict[str, Any]:
        """Return the health from cached state: forward progress, not that the process exists."""

    @abstractmethod
    def engine_status(self) -> str:
        """Return the state of the engines: "healthy", "loading", "stalled", "degraded" or "failed"."""

    @abstractmethod
    def metrics(self) -> bytes:
        """Return the metrics as Prometheus scrapes them."""

    @property
    @abstractmethod
    def is_loaded(self) -> bool:
        """Whether the worker has loaded what it loads at its start."""

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether there is any request."""

    async def parse(self, parser: str, body: bytes, *, is_stream: bool = False) -> Any:
        """Parse a body with one of `body_parsers`, without the limits of a model."""
        options = ParseOptions(None, self.settings.ignore_unknown_fields, is_stream, self.pool is not None)
        return self._checked(await self.offload.parse(parser, body, options))

    def _checked(self, record: Any) -> Any:
        """Return the record of a body; raise if it has a priority where priorities are not honoured."""
        if getattr(record, "priority", 0) and not self.settings.allow_priority:
            message = "priority is not honoured here: send 0 or none, or start the worker with --allow-priority"
            raise ValidationError([ValidationIssue("priority", "unsupported", message, record.priority)])
        return record

    async def parse_pooling(self, parser: str, body: bytes) -> Any:
        """Return the record of a body for a pooling model, without delaying the chat model."""
        options = ParseOptions(None, self.settings.ignore_unknown_fields, has_pool=self.pool is not None)
        return await self.pooling.offload.parse(parser, body, options)

    def _note_failure(self, error: Exception, what: str) -> WorkerError:
        """Keep and return why nothing can be served."""
        known = error if isinstance(error, WorkerError) else InferenceError(f"{what}: {type(error).__name__}: {error}")
        self.failure, self.state = known, "failed"
        self._publish({"stage": "failed", "message": what})
        return known

    async def _drain(self, is_busy: Callable[[], bool]) -> ShuttingDownError:
        """Take no new requests, and wait for running ones within the shutdown timeout; return the error of the rest."""
        was_loading, self.state = self.state == "loading", "stopping"
        if was_loading:
            self._publish({"stage": "stopping"})
        end = time.monotonic() + self.settings.shutdown_timeout_s
        while is_busy() and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return ShuttingDownError("the worker is shutting down")

    @property
    def uptime_s(self) -> float:
        return round(time.monotonic() - self._start_clock, 3)

    def report(self, message: dict[str, Any]) -> None:
        """Send a message to the callback URL, if there is one."""
        if self.settings.callback_url is not None:
            self.messages.put_nowait({"worker_id": self.settings.worker_id, **message})

    def require_ready(self) -> None:
        """Raise unless requests are accepted."""
        if self.state == "stopping":
            raise ShuttingDownError("the worker is shutting down")
        if self.failure is not None:
            raise InferenceError("the model could not be loaded")
        if not self.is_loaded or self.state != "ready":
            raise ModelLoadingError("the model is loading", LOADING_RETRY_S)

    def _publish_stage(self, stage: Stage) -> None:
        event = {"stage": stage.stage, "done": stage.done, "total": stage.total, "seconds": round(stage.seconds, 6)}
        self._publish(event if stage.detail is None else event | {"detail": stage.detail})

    def _publish(self, event: dict[str, Any]) -> None:
        self.loading_events.append(event)
        changed, self.loading_changed = self.loading_changed, asyncio.Event()
        changed.set()


class LoraNames:
    """The names of a model's adapters, in the order in which they came; engines know adapters by their content."""

    def __init__(self, engine: TokenEngine, settings: ServerSettings) -> None:
        self._engine, self._settings = engine, settings
        self._named: dict[str, NamedLora] = {}
        self._changing = asyncio.Lock()
        self.defaults: dict[str, float] = {}  # scales of requests that name no adapter

    @property
    def listed(self) -> list[NamedLora]:
        return list(self._named.values())

    def add_loaded(self, info: ModelInfo) -> None:
        """Add those that the engine was loaded with."""
        self._named = named_loras(self._settings.loras, info)

    def find(self, name: str) -> NamedLora | None:
        """Return the adapter of a model's name: its own, or `base:adapter`."""
        bases = (f"{base}:" for base in self._settings.names)
        written = [name, *(name.removeprefix(base) for base in bases if name.startswith(base))]
        return next((own for key, own in self._named.items() if any(is_name_of(text, key) for text in written)), None)

    def uses_of(self, name: str | None, scales: Sequence[tuple[int, float]] | None) -> list[LoraUse]:
        """Return the adapters of a request: what it names as its model, or by ids, or what it has by default."""
        named = None if name is None else self.find(name)
        if scales is not None:
            if named is not None:
                raise InvalidRequestError(f"the model {named.name!r} is an adapter, and lora names others", "lora")
            self._require_numbers(scales)
            listed = self.listed
            return [listed[number].use(scale) for number, scale in scales if scale]
        if named is not None:
            return [named.use(named.scale)] if named.scale else []
        return [self._named[key].use(scale) for key, scale in self.defaults.items()]

    def set_defaults(self, scales: Sequence[tuple[int, float]]) -> None:
        """Set the scales of requests that name no adapter; of adapters that are left out, 0."""
        self._require_numbers(scales)
        self.defaults = {self.listed[number].name: scale for number, scale in scales if scale}

    def _require_numbers(self, scales: Sequence[tuple[int, float]]) -> None:
        numbers = [number for number, _ in scales]
        for number in numbers:
            if number >= len(self._named):
                raise NotFoundError(f"there is no adapter {number}: see /lora-adapters")
        if len(set(numbers)) < len(numbers):
            raise InvalidRequestError("lora names an adapter twice", "lora")

    def require_path(self, text: str) -> str:
        """Return the path of an adapter below --lora-dir; raise for any other."""
        folder = self._settings.lora_dir
        if folder is None:
            raise NotFoundError("adapters are loaded over HTTP from a folder: start with --lora-dir")
        try:
            path = (folder / text).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            path = Path("/")
        if not path.is_relative_to(folder.resolve()) or path == folder.resolve():
            raise InvalidRequestError(f"there is no adapter {text[:200]!r} below --lora-dir", "lora_path")
        return str(path)

    async def load(self, name: str, path: str, scale: float, *, replaces: bool) -> NamedLora:
        """Load an adapter under a name; `replaces` gives a name that is taken to the new one."""
        if not NAME.fullmatch(name):
            allowed = "use up to 128 letters, digits and . _ : / @ + -"
            raise InvalidRequestError(f"lora_name {name[:100]!r}: {allowed}", "lora_name")
        async with self._changing:
            if any(is_name_of(name, served) for served in self._settings.names):
                raise ConflictError(f"{name!r} is the name of the model: give the adapter another one")
            old = self._named.get(name)
            if old is not None and not replaces:
                raise ConflictError(f"the adapter {name!r} is loaded already: unload it first, or use load_inplace")
            others = {named.info.digest for named in self._named.values() if named is not old}
            if len(others) >= (most := self._engine.info.max_loras) > 0:
                problem = f"all {most} places for adapters are taken (max_loras, max_cpu_loras)"
                raise InvalidRequestError(f"{problem}: unload one, or start with more", "lora")
            try:
                info = await self._engine.load_lora(path)
            except ModelFileError as error:
                raise InvalidRequestError(str(error), "lora_path") from error
            self._named[name] = NamedLora(name, path, scale, info)
            self._drop(old)
            return self._named[name]

    async def unload(self, name: str) -> None:
        """Take a name away; its adapter goes with the last request that uses it."""
        async with self._changing:
            if name not in self._named:
                raise ModelNotFoundError(f"there is no adapter {name[:100]!r}: see /lora-adapters")
            self.defaults.pop(name, None)
            self._drop(self._named.pop(name))

    def _drop(self, old: NamedLora | None) -> None:
        """Let the engine forget a content that has no name any more."""
        if old is not None and all(named.info.digest != old.info.digest for named in self._named.values()):
            self._engine.unload_lora(old.info.digest)


class Worker(Front, GenerationListener):
    """One chat model on the wire, alone or as a member of a pool."""

    def __init__(
        self,
        settings: ServerSettings,
        engine: TokenEngine,
        open_model: Callable[[ModelInfo], TextModel],
        pooling: PoolingModels | None = None,
        *,
        offload: OffloadPool | None = None,
        on_stage: OnStage = lambda stage: None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """`open_model` returns the text side of the model that the engine has loaded; it is called in a thread.
        `pooling` are the embedding models and rerankers. In a pool all members share `offload`, `on_stage` and
        `on_idle` are called with the stages of loading and when the last request has ended."""
        super().__init__(settings, pooling or PoolingModels(), offload)
        self.engine = engine
        self._is_restarting = False
        self._open: set[Generation] = set()  # not read to their end
        self._unstarted: set[Generation] = set()  # of these, without a token
        self.admission = Admission.of_chat(engine, settings)
        self.loras = LoraNames(engine, settings)
        self.latencies = LatencyHistograms()
        self._open_model, self._on_stage, self._on_idle = open_model, on_stage, on_idle
        self._model: TextModel | None = None
        self.encoder: PromptEncoder  # once the model is loaded

    @property
    def chat(self) -> Worker | None:
        return self

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[Worker]:
        self.require_model(name)
        yield self

    @asynccontextmanager
    async def use_pooling(
        self, name: str | None, *kinds: Kind, keep_alive: float | None = None
    ) -> AsyncIterator[PoolingService]:
        yield self.find_pooling(name, *kinds)

    async def start(self) -> None:
        """Load the models; chat is served while pooling models still load. A failure is kept and raised."""
        loading = [asyncio.ensure_future(work) for work in (self._load_chat(), self.pooling.start())]
        try:
            await asyncio.gather(*loading)
        except Exception as error:
            for task in loading:
                task.cancel()
            if self.state == "stopping":  # an engine that is stopped cannot load
                return
            raise self._note_failure(error, "the model could not be loaded") from error

    async def _load_chat(self) -> None:
        """Load the chat model, then serve it."""
        loop = asyncio.get_running_loop()

        def on_stage(stage: Stage) -> None:
            loop.call_soon_threadsafe(self._publish_stage, stage)
            loop.call_soon_threadsafe(self._on_stage, stage)

        info = await self.engine.start(on_stage)
        self._model = await self._open_text(info)
        if self.state != "loading":  # stopped meanwhile
            return
        self.loras.add_loaded(info)
        self.encoder = PromptEncoder(self._model, self.offload)
        self.state = "ready"
        self._publish({"stage": "ready"})
        for service in self.pooling.services:
            if not service.is_loaded:
                logger.warning("the model %s is still loading: until it serves, /health is degraded", service.name)

    async def _open_text(self, info: ModelInfo) -> TextModel:
        """Open the text side of the model; a phase of loading, unless the engine's own load had it."""
        start = time.perf_counter()
        model = await asyncio.to_thread(self._open_model, info)
        model.open_objects = self.settings.open_objects
        if (phase := "tokenizer") not in info.phases:
            seconds = info.phases[phase] = time.perf_counter() - start
            self._publish_stage(Stage(phase, 0, None, 0.0))
            self._publish_stage(Stage(phase, 1, 1, seconds))
        return model

    async def restart_engines(self) -> None:
        """Replace the engines' processes, one after another."""
        if self.state != "ready" or self._is_restarting:
            reason = "a restart is under way" if self._is_restarting else f"the worker is {self.state}"
            logger.warning("the engines are not restarted: %s", reason)
            return
        self._is_restarting = True
        try:
            await self.engine.restart()
            await self.pooling.restart()
        except WorkerError as error:
            logger.warning("the engines are not restarted: %s", error)
        finally:
            self._is_restarting = False

    async def stop(self) -> None:
        error = await self._drain(lambda: bool(self.num_open or self.pooling.num_open))
        await asyncio.gather(self.engine.stop(error), self.pooling.stop(error))
        self.offload.close()

    async def close(self, error: WorkerError) -> None:
        """End the engine at once, and let go of the text side; requests that are left end with the error."""
        self.state = "stopping"
        await self.engine.stop(error)
        self._model = None  # replies that ended hold the worker until they are collected
        self.__dict__.pop("encoder", None)
        self.__dict__.pop("_open_model", None)

    @property
    def model(self) -> TextModel:
        """The text side of the model; raises while it loads, after it failed and while the worker stops."""
        self.require_ready()
        return self.loaded

    @property
    def is_loaded(self) -> bool:
        return self._model is not None

    @property
    def loaded(self) -> TextModel:
        """The model for requests that were admitted, also while the worker stops."""
        assert self._model is not None
        return self._model

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_unstarted(self) -> int:
        return len(self._unstarted)

    @property
    def is_busy(self) -> bool:
        return self.num_open > 0 or self.admission.load.waiting > 0 or self.pooling.num_open > 0

    async def parse(self, parser: str, body: bytes, *, is_stream: bool = False) -> Any:
        """Parse a body with one of `body_parsers`; a large one is parsed in another process."""
        model = self._model
        limits = None if model is None else ModelLimits(model.max_context, model.vocab_size)
        has_pool = not self._owns_offload
        options = ParseOptions(limits, self.settings.ignore_unknown_fields, is_stream, has_pool)
        return self._checked(await self.offload.parse(parser, body, options))

    def find_pooling(self, name: str | None, *kinds: Kind) -> PoolingService:
        """Return a request's pooling model of one of these kinds; raise if there is none, or it still loads."""
        service = self.pooling.find(name, kinds, self.names)
        self.require_ready()
        service.require_loaded()
        return service

    def require_model(self, name: str | None) -> None:
        """Raise unless this is the chat model's name, or none."""
        if name is None or any(is_name_of(name, served) for served in self.names):
            return
        if self.loras.find(name) is None:
            if (other := self.pooling.named(name)) is not None:
                message = f"the model {name[:100]!r} is of kind {other.kind!r}, not a chat model: use {self.names[0]!r}"
                raise InvalidRequestError(message, "model")
            raise ModelNotFoundError(f"the model {name[:100]!r} is not served here: use {self.names[0]!r}, or no model")

    def reserve(self, num_requests: int, num_tokens: int) -> AbstractContextManager[Reservation]:
        """Reserve places for requests that are being tokenized, with an estimate of their tokens; raise if full."""
        self.require_ready()
        return self.admission.reserve(num_requests, num_tokens)

    def require_capacity(self, num_requests: int) -> None:
        """Raise if one body asks for more requests than could ever be inside."""
        self.require_ready()
        self.admission.require_capacity(num_requests)

    def start_generations(
        self,
        ids: list[int],
        params: SamplingParams,
        *,
        n: int = 1,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
        is_scored_only: bool = False,
        loras: Sequence[LoraUse] = (),
        make_parser: Callable[[], ChatParser] | None = None,
    ) -> list[Generation]:
        """Start `n` generations of one prompt, within a reservation; they share one seed."""
        model = self.model
        generations = make_generations(
            model.tokenizer,
            self.engine.info.engine,
            model.vocab_size,
            ids,
            params.resolve(model.sampling_defaults.values),
            n=n,
            priority=priority,
            timeout_s=timeout_s,
            cache_salt=cache_salt,
            is_scored_only=is_scored_only,
            loras=loras,
            listener=self,
            make_parser=make_parser,
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

    def engine_status(self) -> str:
        return self.engine.status()

    @property
    def context_length(self) -> int:
        return self.engine.info.max_context

    def metrics(self) -> bytes:
        load = self.admission.load
        engine = self.engine if self.is_loaded else None
        pooling = self.pooling.services if self.is_loaded else ()
        more = [*pooling_metrics(pooling), *batch_metrics(self.batches)]
        return exposition(self.latencies, load.running, load.waiting, engine, more)

    def health(self) -> dict[str, Any]:
        """Return the health from cached state: forward progress, not that the process exists."""
        status, age = {"ready": "healthy"}.get(self.state, self.state), 0.0
        if status == "healthy":
            status, age = self.engine.status(), self.engine.last_step_age_s
            if status == "healthy" and age > self.settings.stall_timeout_s:
                status = "stalled"
        load = self.admission.load
        pooling = self.pooling.health()
        if status == "healthy" and any(model["status"] != "healthy" for model in pooling):
            status = "degraded"
        return {
            "status": status,
            "model": self.names[0],
            "uptime_s": self.uptime_s,
            "last_step_age_s": round(age, 3),
            "running": load.running,
            "waiting": load.waiting,
            "pooling": pooling,
        }
