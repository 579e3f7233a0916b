"""The models of a pool: what a file needs, and loading it; the models of a folder by their names; a model's defaults.

The text side of a model is opened in a thread while its engine loads the weights, and kept while the model sleeps.
Files outside the folder of --models-dir are reached through options only: a name in a request is looked up among the
files that the folder has, and a link that leads out of it is passed over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..config import ComputeOptions, LoadOptions, PoolingOptions
from ..engine.memory_plan import MemoryPlan, MemoryRow, plan_member, require_room
from ..errors import InferenceError, ModelFileError, WorkerError
from ..models import read_model_config
from ..models.pooling_config import is_pooling_model, read_pooling_config
from ..models.sampling_defaults import read_sampling_defaults
from ..models.vision import find_projector
from ..progress import Stage
from ..text_model import TextModel, check_chat_template, open_tokenizer
from ..token_engine import spawn
from ..token_engine.pooling_supervisor import SupervisedPooling
from ..token_engine.protocol import Load, ModelInfo
from ..token_engine.supervisor import SupervisedEngine
from ..weights import open_checkpoint
from ..weights.gguf import list_gguf_models
from ..weights.hub import find_model, model_files
from ..weights.quant_mix import quant_name
from .bodies import ModelDefaults, defaults_file
from .metrics import LatencyHistograms
from .model_pool import ModelFacts, ModelSource, Service
from .model_store import MAX_DEPTH
from .offload import OffloadPool
from .pooling import TASKS, Kind, PoolingService, open_text_side
from .settings import ServerSettings, model_name
from .worker import Worker

NEXT_PROCESS_S = 2.0  # after a load, when its first answers have come
LOADING_NICE = 19  # of an engine that loads beside others
POOLING_NICE = (
    10  # of the process of a pooling model: a tenth of the cores beside chat that never pauses (decision 103)
)
POOLING_WORKSPACE_BYTES = 1 << 30  # of a pooling model, beside its weights: an estimate for planning the KV cache
POOLING_STEP_BYTES = 256 << 20  # the same on a CPU, in a pool: the arrays of a step of 1,024 tokens
MAX_ENTRIES = 10_000  # of --models-dir
T = TypeVar("T")
logger = logging.getLogger("llm_worker_rbee.server")


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """What all models of a pool share."""

    settings: ServerSettings
    load: LoadOptions  # without a model
    supervision: dict[str, Any]  # of `SupervisedProcess`
    restart_on_stall: bool = False  # a chat engine that makes no progress
    offload: OffloadPool
    max_bytes: int | None  # for all models together
    kv_fraction: float  # of these, for the KV cache of one
    dummy_step_s: float | None = None


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

    def _prepare_next(self) -> None:
        """Start the process of the next load a while later, to import what it needs."""
        loop = asyncio.get_running_loop()
        loop.call_later(NEXT_PROCESS_S, loop.run_in_executor, None, spawn.refill)


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
        rows = plan_member(checkpoint, load, options.max_bytes, options.kv_fraction).rows
        self._planned = replace(load, kv_memory=rows[-1].bytes)
        return rows

    async def load(self, on_stage: Callable[[Stage], None], on_idle: Callable[[], None], *, is_alone: bool) -> Service:
        options, name = self._options, self.names[0]
        opened = _opened(self.text) if self.text is not None else _open(self.open_text)

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
        shared: Any = {"offload": options.offload, "on_stage": on_stage, "on_idle": on_idle}
        worker = Worker(settings, engine, open_model, **shared)
        worker.latencies = self.latencies
        try:
            await worker.start()
        except BaseException:
            await engine.stop(InferenceError(f"{self.label} was stopped"))
            raise
        self._prepare_next()
        return worker

    def open_text(self) -> TextModel:
        return open_text(self.path)


class PoolingSource(FileSource):
    """An embedding model or a reranker."""

    def plan(self) -> list[MemoryRow]:
        plan = MemoryPlan("host", self._options.max_bytes, 0.0, limits=None)  # type: ignore[arg-type]  # it has no steps
        plan.add("weights", self.facts.weights_bytes, "the files, mapped or unpacked")
        plan.add("process", POOLING_STEP_BYTES, "interpreter, kernels, the arrays of a step")
        require_room(plan)
        return plan.rows

    async def load(self, on_stage: Callable[[Stage], None], on_idle: Callable[[], None], *, is_alone: bool) -> Service:
        kind: Kind = "rerank" if self.kind == "rerank" else "embedding"
        service = pooling_service(kind, str(self.path), self._options.load, self._options.supervision, self.names[0])
        try:
            await service.start(on_stage)
        except BaseException:
            await service.engine.stop(InferenceError(f"{self.label} was stopped"))
            raise
        self._prepare_next()
        return service


class BrokenSource(ModelSource):
    """A model whose files cannot be used."""

    def __init__(self, name: str, path: Path, error: WorkerError) -> None:
        self.names, self.kind, self.path, self.error = (name,), "chat", path, error

    def plan(self) -> list[MemoryRow]:
        raise self.error

    async def load(self, *_: Any, **__: Any) -> Service:
        raise self.error


def make_source(name: str, path: Path, options: PoolOptions, *names: str, kind: str | None = None) -> ModelSource:
    """Return the source of a model, by its kind; raise if its files cannot be used."""
    facts = read_facts(path, options.load, kind)
    return (ChatSource if facts.kind == "chat" else PoolingSource)(name, path, facts, options, *names)


class ModelsFolder:
    """The models of --models-dir, by the names of their GGUF files, or of their folders with a config.json."""

    def __init__(self, folder: Path, options: PoolOptions) -> None:
        self.folder, self._options = folder.resolve(), options
        self._sources: dict[tuple[str, int, int], ModelSource] = {}  # by name, size and time of the last change
        self._refused: set[str] = set()

    def scan(self) -> list[ModelSource]:
        """Return the models that are in the folder now; called in a thread."""
        sources: dict[tuple[str, int, int], ModelSource] = {}
        for name, path in self._models():
            if (key := _file_key(name, path)) is None:  # it was removed meanwhile
                continue
            sources[key] = self._sources.get(key) or self._open(name, path)
        self._sources = sources
        return list(sources.values())

    def is_current(self, source: ModelSource) -> bool:
        """Return whether the files of a model are as they were in the last scan; called in a thread."""
        keys = [key for key, other in self._sources.items() if other is source]
        return isinstance(source, FileSource | BrokenSource) and keys == [_file_key(source.names[0], source.path)]

    def _open(self, name: str, path: Path) -> ModelSource:
        try:
            alias = [f"hf:{name.removeprefix('hf.co/')}"] if name.startswith("hf.co/") else []
            return make_source(name, path, self._options, *alias)
        except (WorkerError, OSError) as error:
            known = error if isinstance(error, WorkerError) else ModelFileError(f"{name} cannot be read: {error}")
            known.args = (str(known).replace(f"{self.folder}/", ""), *known.args[1:])
            logger.warning("the model %s of --models-dir cannot be used: %s", name, known)
            return BrokenSource(name, path, known)

    def _models(self) -> Iterator[tuple[str, Path]]:
        """Yield name and path of each model, by name."""
        count = 0
        pending = [(self.folder, 0)]
        while pending:
            folder, depth = pending.pop()
            with suppress(OSError):
                ggufs = set(list_gguf_models(folder))
                for path in sorted(folder.iterdir()):
                    count += 1
                    is_folder = path.is_dir()
                    if count > MAX_ENTRIES or path.name.startswith(".") or not self._is_inside(path):
                        continue
                    if path in ggufs and path.is_file():
                        yield self._name(path.with_name(model_name(f"./{path.name}"))), path
                    elif is_folder and (path / "config.json").is_file():
                        yield self._name(path), path
                    elif is_folder and depth + 1 < MAX_DEPTH:
                        pending.append((path, depth + 1))

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _is_inside(self, path: Path) -> bool:
        """Return whether a path is in the folder, wherever links lead; a name must be printable."""
        is_inside = path.name.isprintable() and Path(os.path.realpath(path)).is_relative_to(self.folder)
        if not is_inside and path.name not in self._refused:
            self._refused.add(path.name)
            logger.warning("%s is passed over: its name is not printable, or it leads out of --models-dir", path)
        return is_inside


def _file_key(name: str, path: Path) -> tuple[str, int, int] | None:
    """Return what differs once a model's files or its defaults are changed or replaced; None if they are gone."""
    try:
        stats = [file.stat() for file in model_files(path)]
        if (file := defaults_file(path)).exists():
            stats.append(file.stat())
    except OSError:
        return None
    return name, sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)


def pooling_service(
    kind: Kind, reference: str, chat: ComputeOptions, supervision: dict[str, Any], name: str | None = None
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
    load, label = Load(pooling=options, nice=POOLING_NICE), f"the engine of {name or reference}"
    engine = SupervisedPooling(load, label=label, on_located=on_located, **supervision)
    service = PoolingService(reference, kind, engine, lambda info: opened())
    service.name = name or service.name
    return service


def _opened(text: T) -> Callable[[], T]:
    return lambda: text


def _open(open_text: Callable[[], T]) -> Callable[[], T]:
    """Start opening the text side of a model in a thread; return a function that waits for it."""
    opening: Future[T] = Future()

    def run() -> None:
        try:
            opening.set_result(open_text())
        except Exception as error:
            opening.set_exception(error)

    threading.Thread(target=run, name="tokenizer", daemon=True).start()
    return opening.result


def open_ahead(open_text: Callable[[Path], T], model: str | None) -> tuple[Callable[[str], None], Callable[[], T]]:
    """Open the text side of a model in a thread, while an engine loads the weights: at once if it is on this machine.
    Return a callback that opens it once the engine has fetched it, and a function that waits for the thread."""
    opening: Future[Callable[[], T]] = Future()

    def start(path: str) -> None:
        opening.set_result(_open(lambda: open_text(Path(path))))

    with suppress(WorkerError, OSError):
        start(str(find_model(model, pull=False).path))
        return lambda path: None, opening.result()
    return start, lambda: opening.result()()


def open_text(path: Path, template: str | None = None, origin: str | None = None) -> TextModel:
    """Open tokenizer, sampling defaults and chat template; the context is that of the model's file. `template` replaces
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
