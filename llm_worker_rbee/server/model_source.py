"""The models of a pool: what a file needs, and loading it; the models of a folder by their names; a model's defaults.

The text side of a model is opened in a thread while its engine loads the weights, and kept while the model sleeps.
Files outside the folder of --models-dir are reached through options only: a name in a request is looked up among the
files that the folder has, and a link that leads out of it is passed over.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from prometheus_client.core import Metric

from ..backends.select import has_driver, missing_packages, packed_bytes
from ..config import DEVICE_SPARE_BYTES, ComputeOptions, LoadOptions, PoolingOptions
from ..engine.memory_plan import (
    DEVICE_MEMORY_FRACTION,
    HOST_MEMORY_FRACTION,
    MemoryRow,
    free_memory,
    plan_member,
)
from ..errors import InferenceError, InvalidRequestError, ModelLoadingError, UnavailableError, WorkerError
from ..models import read_model_config
from ..models.pooling_config import is_pooling_model, read_pooling_config
from ..models.sampling_defaults import read_sampling_defaults
from ..models.vision import find_projector
from ..pipe_process import package_command
from ..progress import Stage
from ..text_model import TextModel, check_chat_template, open_tokenizer
from ..token_engine import spawn
from ..token_engine.pooling_supervisor import SupervisedPooling
from ..token_engine.protocol import Load, ModelInfo, TokenEngine
from ..token_engine.supervisor import SupervisedEngine
from ..weights import open_checkpoint
from ..weights.hub import Progress, find_model, model_files
from ..weights.quant_mix import quant_name
from .bodies import ModelDefaults
from .metrics import LatencyHistograms, chat_families
from .model_pool import MAX_WAITING, Member, ModelFacts, ModelPool, ModelSource, Service
from .model_store import ModelsFolder, ModelStore
from .offload import OffloadPool, run_in_daemon_thread
from .pooling import TASKS, Kind, PoolingService, open_text_side
from .settings import ServerSettings, model_name
from .worker import Front, Worker

GPU_PROGRAM = "from llm_worker_rbee.backends.select import report_gpu; report_gpu()"
GPU_TIMEOUT_S = 120.0
KV_SHARE = 0.8  # of the memory, for the KV caches of as many models as may be loaded
NEXT_PROCESS_S = 2.0  # after a load, when its first answers have come
LOADING_NICE = 19  # of an engine that loads beside others
POOLING_NICE = (
    10  # of the process of a pooling model: a tenth of the cores beside chat that never pauses (decision 103)
)
POOLING_WORKSPACE_BYTES = 1 << 30  # of a pooling model, beside its weights: an estimate for planning the KV cache
POOLING_STEP_BYTES = 256 << 20  # the same on a CPU, in a pool: the arrays of a step of 1,024 tokens
T = TypeVar("T")
logger = logging.getLogger("llm_worker_rbee.server")


@dataclass(kw_only=True)
class PoolOptions:
    """What all models of a pool share."""

    settings: ServerSettings
    load: LoadOptions  # without a model
    supervision: dict[str, Any]  # of `SupervisedProcess`
    restart_on_stall: bool = False  # a chat engine that makes no progress
    dummy_step_s: float | None = None
    models: Sequence[tuple[str, str | None]]  # references that options name, and what they are used for, if it is known
    max_models: int
    max_bytes: int | None  # for all models together; None: what is free at the start
    sleep_after_s: float | None
    load_timeout_s: float
    folder: Path | None  # --models-dir
    max_pull: int  # bytes of a model that is pulled
    progress: Progress  # of fetching the models that options name

    def __post_init__(self) -> None:
        self.offload = OffloadPool()
        device, backend = self.load.device, self.load.backend
        is_automatic = (device, backend, self.load.threads) == ("auto", "auto", None)
        has_gpu = is_automatic and has_driver() and not missing_packages()
        self.on_device = device.startswith("cuda") or backend == "cuda" or has_gpu  # they share the memory of a GPU
        if self.max_bytes is None and not self.on_device:
            self.max_bytes = free_memory()

    @property
    def kv_fraction(self) -> float:
        """The part of the memory for the KV cache of one model."""
        return min(DEVICE_MEMORY_FRACTION if self.on_device else HOST_MEMORY_FRACTION, KV_SHARE / self.max_models)


def find_gpu(device: str) -> tuple[str, int]:
    """Return the GPU of a device, and its free memory, as a child reads them that ends again: the driver stays out of
    this process."""
    command = package_command(GPU_PROGRAM, device)
    child = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GPU_TIMEOUT_S)
    if child.returncode:
        reason = child.stderr.strip().rpartition("\n")[2].partition(": ")[2]
        raise UnavailableError(f"--device {device} cannot be used ({reason}): use --device cpu")
    gpu = json.loads(child.stdout)
    return gpu["device"], gpu["free"]


def read_facts(path: Path, load: LoadOptions, kind: str | None = None) -> ModelFacts:
    """Return what the files of a model say; `kind` is what it is used for, if that is known."""
    checkpoint = open_checkpoint(path)
    config = read_model_config(checkpoint)
    if kind is None:
        kind = "chat"
        if is_pooling_model(checkpoint, config):
            kind = "rerank" if read_pooling_config(checkpoint, config).is_ranker else "embedding"
    parameters = sum(tensor.size for tensor in checkpoint.tensors.values())
    modified_at = max(file.stat().st_mtime for file in model_files(path))
    sizes = parameters, checkpoint.nbytes, config.context_length
    takes_images = kind == "chat" and find_projector(checkpoint, load)[1] is not None
    return ModelFacts(str(path), kind, config.family.name, quant_name(checkpoint), *sizes, modified_at, takes_images)


class FileSource(ModelSource):
    """A model in files of this machine."""

    def __init__(self, name: str, path: Path, facts: ModelFacts, options: PoolOptions, *names: str) -> None:
        self.names = tuple(dict.fromkeys((name, *names)))
        self.path, self.kind, self._options = path, facts.kind, options
        self.facts: ModelFacts = facts

    @property
    def label(self) -> str:
        return f"the engine of {self.names[0]}"

    @abstractmethod
    def _make_service(self, *, is_alone: bool) -> Worker | PoolingService:
        """Start the process of the engine."""

    async def load(self, on_stage: Callable[[Stage], None], on_idle: Callable[[], None], *, is_alone: bool) -> Service:
        service = self._make_service(is_alone=is_alone)
        try:
            await service.start(on_stage, on_idle)
        except BaseException:
            await service.engine.stop(InferenceError(f"{self.label} was stopped"))
            raise
        loop = asyncio.get_running_loop()  # the process of the next load imports what it needs, a while later
        loop.call_later(NEXT_PROCESS_S, loop.run_in_executor, None, spawn.refill)
        return service


class ChatSource(FileSource):
    """A chat model."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.latencies = LatencyHistograms()  # of all its loads
        self._planned: LoadOptions | None = None

    def plan(self) -> list[MemoryRow]:
        checkpoint, options = open_checkpoint(self.path), self._options
        load = replace(find_projector(checkpoint, options.load)[0], model=str(self.path))
        limits = [limit for limit in (load.max_context, ModelDefaults.read(self.path).context) if limit]
        if limits:
            load = replace(load, max_context=min(*limits, self.facts.context_length))
        plan = plan_member(checkpoint, load, options.max_bytes, options.kv_fraction, on_device=options.on_device)
        load = replace(load, kv_memory=plan.rows[-1].bytes)
        if options.on_device:  # with the arrays of a step that were planned, not with an empty GPU's
            load = replace(load, max_batch=plan.limits.max_batch, max_step_tokens=plan.limits.max_step_tokens)
        self._planned = load
        return plan.rows

    def _make_service(self, *, is_alone: bool) -> Worker:
        options, name = self._options, self.names[0]
        opened = run_in_daemon_thread(self.open_text, "tokenizer").result

        def open_model(info: ModelInfo) -> TextModel:
            self.text = text = opened()
            text.max_context = info.max_context
            return text

        load = Load(
            options=self._planned, dummy_step_s=options.dummy_step_s, loading_nice=0 if is_alone else LOADING_NICE
        )
        engine = SupervisedEngine(
            load, label=self.label, restart_on_stall=options.restart_on_stall, **options.supervision
        )
        settings = replace(options.settings, model_ref=self.names[-1], served_name=name)
        worker = Worker(settings, engine, open_model, options.offload)
        worker.latencies = self.latencies
        return worker

    def open_text(self) -> TextModel:
        return self.text or open_text(self.path)

    def metrics(self) -> Iterator[Metric]:
        return chat_families(self.latencies, 0, 0, None)  # its counters stay while it is not loaded


class PoolingSource(FileSource):
    """An embedding model or a reranker."""

    def plan(self) -> list[MemoryRow]:
        if self._options.on_device:
            size, step = packed_bytes(open_checkpoint(self.path, weights=False)), POOLING_WORKSPACE_BYTES
            reason = "CUDA context, kernels, the arrays of a step"
            process = MemoryRow("process", "device", DEVICE_SPARE_BYTES + step, reason)
            return [MemoryRow("weights", "device", size, "packed for the GPU"), process]
        process = MemoryRow("process", "host", POOLING_STEP_BYTES, "interpreter, kernels, the arrays of a step")
        return [MemoryRow("weights", "host", self.facts.weights_bytes, "the files, mapped or unpacked"), process]

    def _make_service(self, *, is_alone: bool) -> PoolingService:
        kind: Kind = "rerank" if self.kind == "rerank" else "embedding"
        return pooling_service(self.names[0], kind, str(self.path), self._options.load, self._options.supervision)


class FixedSource(ModelSource):
    """A model whose engine is started with the server, and which stays until its end."""

    is_fixed = True
    error = ModelLoadingError("the model is loading")

    def __init__(self, kind: str, names: tuple[str, ...], service: Worker | PoolingService) -> None:
        self.kind, self.names, self.service, self._loading = kind, names, service, service

    def plan(self) -> list[MemoryRow]:
        info = self._loading.engine.info
        memory = "host" if info.device == "cpu" else "device"
        rows = [MemoryRow("weights", memory, info.weights_bytes, "the files, mapped or unpacked")]
        if isinstance(info, ModelInfo):
            rows.append(MemoryRow("KV cache", memory, info.kv_cache_bytes, "blocks of keys and values"))
        return rows

    async def load(self, on_stage: Callable[[Stage], None], on_idle: Callable[[], None], *, is_alone: bool) -> Service:
        service = self._loading
        await service.start(on_stage, on_idle)
        info = service.engine.info
        sizes = info.parameters, info.weights_bytes, service.context_length
        takes_images = isinstance(service, Worker) and service.takes_images
        self.facts = ModelFacts(info.path, self.kind, info.architecture, info.quant, *sizes, time.time(), takes_images)
        if isinstance(service, Worker):
            self.text = service.loaded
        return service


def fixed_front(
    settings: ServerSettings,
    engine: TokenEngine,
    open_model: Callable[[ModelInfo], TextModel],
    pooling: Mapping[str, PoolingService] = MappingProxyType({}),
) -> Front:
    """Return a server of one chat model, whose text side `open_model` opens, and of pooling models beside it, by their
    references."""
    chat = Worker(settings, engine, open_model, OffloadPool())
    pool = ModelPool(max_models=1 + len(pooling), max_bytes=None, load_timeout_s=None)
    source = FixedSource("chat", settings.names, chat)
    source.num_listed = len(settings.listed_names)
    members = [pool.add(source)]
    for reference, service in pooling.items():
        members.append(pool.add(FixedSource(service.kind, (service.name, reference), service)))

    async def list_models() -> list[Member]:
        return members

    return Front(settings, pool, list_models, offload=chat.offload)


def pool_front(options: PoolOptions) -> Front:
    """Return a server of several models; those that options name are fetched when it starts."""
    max_queue = options.settings.max_queue
    pool = ModelPool(
        max_models=options.max_models,
        max_bytes=options.max_bytes,
        keep_alive_s=options.sleep_after_s,
        load_timeout_s=options.load_timeout_s,
        max_waiting=MAX_WAITING if max_queue is None else max_queue,
    )
    store = None
    if options.folder is not None:
        folder = ModelsFolder(options.folder.expanduser(), partial(make_source, options))
        store = ModelStore(folder, pool, options.max_pull)
    return Front(options.settings, pool, partial(_add_models, pool, options), offload=options.offload, store=store)


async def _add_models(pool: ModelPool, options: PoolOptions) -> list[Member]:
    """Find the GPU and the models that options name, and add these to the pool."""
    if options.on_device:
        pool.device, free = await asyncio.to_thread(find_gpu, options.load.device.replace("auto", "cuda"))
        options.load = replace(options.load, device=pool.device)
        pool.max_bytes = options.max_bytes = free if options.max_bytes is None else options.max_bytes
    members: list[Member] = []
    for reference, kind in options.models:
        located = await asyncio.to_thread(find_model, reference, progress=options.progress)
        name = model_name(reference)
        if (other := pool.named(name)) is not None:
            raise InvalidRequestError(f"two models have the name {name!r}: {reference} and {other.source.names[-1]}")
        source = await asyncio.to_thread(partial(make_source, options, name, located.path, reference, kind=kind))
        members.append(pool.add(source))
    return members


def make_source(options: PoolOptions, name: str, path: Path, *names: str, kind: str | None = None) -> ModelSource:
    """Return the source of a model, by its kind; raise if its files cannot be used."""
    facts = read_facts(path, options.load, kind)
    return (ChatSource if facts.kind == "chat" else PoolingSource)(name, path, facts, options, *names)


def pooling_service(
    name: str, kind: Kind, reference: str, chat: ComputeOptions, supervision: dict[str, Any]
) -> PoolingService:
    """Start the process of a pooling model, with the compute options of the chat model."""
    options = PoolingOptions(
        model=reference,
        device=chat.device,
        backend=chat.backend,
        threads=chat.threads,
        deterministic=chat.deterministic,
        task=TASKS[kind],
        refuses_chat_models=True,
    )
    on_located, opened = open_ahead(partial(open_text_side, kind=kind), reference)
    load, label = Load(pooling=options, nice=POOLING_NICE), f"the engine of {name}"
    engine = SupervisedPooling(load, label=label, on_located=on_located, **supervision)
    return PoolingService(name, kind, engine, lambda info: opened())


def open_ahead(open_text: Callable[[Path], T], model: str | None) -> tuple[Callable[[str], None], Callable[[], T]]:
    """Open the text side of a model in a thread, while an engine loads the weights: at once if it is on this machine.
    Return a callback that opens it once the engine has fetched it, and a function that waits for the thread."""
    located: Future[str] = Future()
    with suppress(WorkerError, OSError):
        located.set_result(str(find_model(model, pull=False).path))
    opened = run_in_daemon_thread(lambda: open_text(Path(located.result())), "tokenizer").result
    return (lambda path: None if located.done() else located.set_result(path)), opened


def open_text(path: Path, template: str | None = None, origin: str | None = None) -> TextModel:
    """Open tokenizer, sampling defaults and chat template, with the context of the model's file. `template` replaces
    the file's own, `origin` is the option that gave it."""
    checkpoint = open_checkpoint(path)
    config, defaults = read_model_config(checkpoint), read_sampling_defaults(checkpoint)
    sizes = config.vocab_size, config.context_length
    text_model = TextModel(open_tokenizer(checkpoint), checkpoint.path.name, *sizes, defaults, template)
    use_defaults(text_model, path)
    check_chat_template(text_model, origin)
    text_model.grammar_checker.start()
    return text_model


def use_defaults(text: TextModel, path: Path) -> None:
    """Let a text side start from the defaults beside the model."""
    own = ModelDefaults.read(path)
    text.sampling_defaults = own.sampling_over(text.sampling_defaults)
    text.system, text.first_messages = own.system, msgspec.to_builtins(own.messages)
