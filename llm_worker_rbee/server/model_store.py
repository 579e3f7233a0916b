"""The folder of --models-dir as a store: copies and removals of its models, their defaults, and pulls from the hub.

A name is a path in the folder without a suffix: `qwen`, `owner/qwen`, `hf.co/owner/repo:Q4_K_M`; no name leads out of
it. A copy is a hard link to the same files. A pull runs in a process of its own, and its files get their names in the
folder once they are complete; what a stopped one has fetched stays in `.pulls`, so that the next one resumes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ..engine.memory_plan import MemoryRow
from ..errors import (
    ConflictError,
    DownloadError,
    InvalidRequestError,
    ModelFileError,
    ModelNotFoundError,
    QueueFullError,
    RequestCancelledError,
    WorkerError,
    copy_error,
)
from ..pipe_process import package_command
from ..weights.gguf import SPLIT_NAME, list_gguf_models
from ..weights.hub import model_files
from ..weights.vision_names import find_projectors
from .bodies import ModelDefaults, defaults_file
from .model_pool import Member, ModelPool, ModelSource, Service
from .settings import model_name

MAX_DEPTH, MAX_ENTRIES = 3, 10_000  # of the folder
WORD = r"[A-Za-z0-9_][\w.-]*"
NAME = re.compile(rf"(?=.{{1,200}}$){WORD}(?:/{WORD}){{0,{MAX_DEPTH - 1}}}(?::{WORD})?", re.ASCII)
HUB_NAME = re.compile(rf"(?:hf:|hf\.co/|huggingface\.co/)(?P<repo>{WORD}/{WORD})(?P<quant>:{WORD})?", re.ASCII)
MAX_PULLS = 2  # at the same time
MAX_LINE_BYTES = 1 << 16
PROGRAM = "from llm_worker_rbee.weights.hub import report_pull; report_pull()"
logger = logging.getLogger("llm_worker_rbee.server")


class BrokenSource(ModelSource):
    """A model whose files cannot be used."""

    def __init__(self, name: str, path: Path, error: WorkerError) -> None:
        self.names, self.kind, self.path, self.error = (name,), "chat", path, error

    def plan(self) -> list[MemoryRow]:
        raise self.error

    async def load(self, *_: Any, **__: Any) -> Service:
        raise self.error


class ModelsFolder:
    """The models of --models-dir, by the names of their GGUF files, or of their folders with a config.json."""

    def __init__(self, folder: Path, make_source: Callable[..., ModelSource]) -> None:
        """`make_source` returns the source of a model, from its name, its path and other names; or raises."""
        self.folder, self._make_source = folder.resolve(), make_source
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
        return keys == [_file_key(source.names[0], source.path)]

    def _open(self, name: str, path: Path) -> ModelSource:
        try:
            alias = [f"hf:{name.removeprefix('hf.co/')}"] if name.startswith("hf.co/") else []
            return self._make_source(name, path, *alias)
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
        projectors = [] if path.is_dir() else find_projectors(path)  # the tower of a folder is in its own files
        stats = [file.stat() for file in (*model_files(path), *projectors)]
        if (file := defaults_file(path)).exists():
            stats.append(file.stat())
    except OSError:
        return None
    return name, sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)


class Pull:
    """A model that is being fetched, for any number of clients; it stops when the last one has left."""

    def __init__(self, name: str) -> None:
        self.name, self.num_readers = name, 0
        self.progress: dict[str, Any] = {"status": "pulling manifest"}  # in Ollama's form; replaced with each report
        self.error: WorkerError | None = None
        self.is_done = False
        self.task: asyncio.Task[None]
        self._changed = asyncio.Event()

    def report(self, **progress: Any) -> None:
        self.progress = progress
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def end(self) -> None:
        self.is_done = True
        self._changed.set()

    async def read(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the latest progress until the end; raise the error that ended the pull."""
        shown = None
        while not self.is_done or shown is not self.progress:
            changed = self._changed
            if shown is self.progress:
                await changed.wait()
            else:
                shown = self.progress
                yield shown
        if self.error is not None:
            raise copy_error(self.error)

    def leave(self) -> None:
        """Count a client less."""
        self.num_readers -= 1
        if self.num_readers == 0:
            self.task.cancel()


class ModelStore:
    """The folder and what changes in it; the pool's members follow."""

    def __init__(self, folder: ModelsFolder, pool: ModelPool, max_bytes: int) -> None:
        """`max_bytes` is for a model that is pulled."""
        self._models, self._folder, self._pool, self._max_bytes = folder, folder.folder, pool, max_bytes
        self.pulls: dict[str, Pull] = {}
        self._members: set[Member] = set()  # of the folder
        self._changing, self._scanning = asyncio.Lock(), asyncio.Lock()

    async def refresh(self) -> None:
        """Add the models that are new in the folder, and forget those that are gone; loaded ones stay until then."""
        async with self._scanning:
            sources = await asyncio.to_thread(self._models.scan)
        for member in list(self._members):
            if member.source not in sources and not (member.rows or member.loading or member.waiters):
                self._members.remove(member)
                self._pool.remove(member)
                member.source.drop()
        for source in sources:
            if self._pool.named(source.names[0]) is None:
                self._members.add(self._pool.add(source))

    async def has_changed(self, member: Member) -> bool:
        """Return whether the files of a model that is not loaded have changed since the folder was read."""
        if member not in self._members or member.rows or member.loading is not None:
            return False
        return not await asyncio.to_thread(self._models.is_current, member.source)

    def describe(self) -> list[dict[str, Any]]:
        """Return the models that are being fetched, and how far they are."""
        return [{"model": pull.name, "progress": pull.progress} for pull in self.pulls.values()]

    async def create(self, origin: Member, name: str, defaults: ModelDefaults | None = None) -> None:
        """Add a model with the files of another one and defaults of its own; without them it is a copy."""
        path = self._require_own(origin)
        target = self._target(name)
        async with self._changing:
            existing = self._pool.named(name)
            if existing is None:
                await asyncio.to_thread(_place, path, target, os.link)
            elif defaults is None or not _are_same(path, self._require_own(existing)):
                raise ConflictError(f"there is a model {name!r} with other files: delete it first")
            await asyncio.to_thread(_write_defaults, path, target, defaults)
        if existing is not None:  # the next load reads them
            await self._pool.unload(existing)
        await self.refresh()

    async def delete(self, member: Member) -> None:
        """Remove the files of a model once its requests have ended."""
        path = self._require_own(member)
        await self._pool.unload(member)
        async with self._changing:
            await asyncio.to_thread(_remove, path, self._folder)
        await self.refresh()

    def start_pull(self, reference: str) -> Pull:
        """Begin to fetch a model of the hub, unless that is under way. The caller is one of its clients: it reads, and
        leaves."""
        if (match := HUB_NAME.fullmatch(reference)) is None or ".." in reference:
            known = "this worker pulls hf.co/owner/repo and hf.co/owner/repo:quant only"
            raise ModelNotFoundError(f"pull model manifest: file does not exist: {reference[:100]!r}; {known}")
        name = f"hf.co/{match['repo']}{match['quant'] or ''}".removesuffix(":latest")
        pull = stopping = self.pulls.get(name)
        if pull is None or pull.num_readers == 0:
            if len(self.pulls) >= MAX_PULLS and stopping is None:
                raise QueueFullError(f"{MAX_PULLS} models are being pulled: wait for one of them", 60)
            pull = self.pulls[name] = Pull(name)
            pull.task = asyncio.ensure_future(self._run_pull(pull, stopping))
            pull.task.add_done_callback(partial(self._end, pull))
        pull.num_readers += 1
        return pull

    async def _run_pull(self, pull: Pull, stopping: Pull | None) -> None:
        """Fetch a model that is not in the folder, and note how it ended; wait for an earlier pull that stops."""
        try:
            if stopping is not None:
                await asyncio.wait({stopping.task})
            if self._pool.named(pull.name) is None:
                await self._fetch(pull, self._target(pull.name))
            pull.report(status="success")
        except asyncio.CancelledError:
            pull.error = RequestCancelledError("the pull was stopped; the next one resumes")
        except Exception as error:
            known = error if isinstance(error, WorkerError) else DownloadError(f"{type(error).__name__}: {error}")
            known.args = (str(known).replace(f"{self._folder}/", ""), *known.args[1:])
            pull.error = known
            logger.warning("the pull of %s failed: %s", pull.name, pull.error)

    def _end(self, pull: Pull, _: asyncio.Task[None]) -> None:
        """Forget a pull that has ended."""
        if self.pulls[pull.name] is pull:
            del self.pulls[pull.name]
        pull.end()

    async def _fetch(self, pull: Pull, target: Path) -> None:
        work = self._folder / ".pulls" / pull.name
        command = package_command(PROGRAM, "hf:" + pull.name.removeprefix("hf.co/"), work, self._max_bytes)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, limit=MAX_LINE_BYTES
        )
        last: dict[str, Any] = {"error": "the process that fetches it has ended"}
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                last = msgspec.json.decode(line)
                if "progress" in last:
                    pull.report(**last["progress"])
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if "path" not in last:
            raise (ModelNotFoundError if last.get("is_unknown") else DownloadError)(str(last.get("error")))
        pull.report(status="writing manifest")
        async with self._changing:
            await asyncio.to_thread(_place, Path(last["path"]), target, _move)
            await asyncio.to_thread(shutil.rmtree, work)
        await self.refresh()

    async def close(self) -> None:
        """Stop all pulls."""
        tasks = [pull.task for pull in self.pulls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _target(self, name: str) -> Path:
        """Return the path of a new model, without a suffix; raise for a name that the folder cannot have."""
        target = self._folder / name.removesuffix(":latest")
        is_name = NAME.fullmatch(name) and ".." not in name and not SPLIT_NAME.fullmatch(f"{target.name}.gguf")
        if not is_name or not Path(os.path.realpath(target)).is_relative_to(self._folder):
            rule = f"use up to {MAX_DEPTH} words of letters, digits and . _ - with / between them, and a :tag"
            raise InvalidRequestError(f"{name[:100]!r} cannot be the name of a model: {rule}", "model")
        above = list(target.relative_to(self._folder).parents)[:-1]
        if any((self._folder / parent / "config.json").exists() for parent in above):
            raise ConflictError(f"{name[:100]!r} would be a file of another model: use another name")
        return target

    def _require_own(self, member: Member) -> Path:
        """Return the path of a model of the folder; raise for one that an option names."""
        path = member.source.path
        if not path.is_relative_to(self._folder):
            raise InvalidRequestError(f"{member.name!r} is not in --models-dir: it is not changed", "model")
        return path


def _are_same(path: Path, other: Path) -> bool:
    """Return whether two models are copies of each other."""
    return [file.stat().st_ino for file in model_files(path)] == [file.stat().st_ino for file in model_files(other)]


def _place(path: Path, target: Path, move: Callable[[Path, Path], None]) -> None:
    """Link or move the files of a model to `target`, which has no suffix."""
    if path.is_dir() and any(file.suffix == ".gguf" or file.name == "config.json" for file in target.rglob("*")):
        raise ConflictError(f"there are other models in {target.name}, which would be files of this one")
    try:
        for file in model_files(path):
            if path.is_dir():
                place = target / file.relative_to(path)
            else:
                part = SPLIT_NAME.fullmatch(file.name)
                number = "" if part is None else f"-{part['part']}-of-{part['parts']}"
                place = target.with_name(f"{target.name}{number}.gguf")
            place.parent.mkdir(parents=True, exist_ok=True)
            move(file.resolve(), place)
    except OSError as error:
        raise ConflictError(f"cannot write {target.name}: {error.strerror}") from None


def _move(file: Path, place: Path) -> None:
    os.replace(file, place)


def _write_defaults(path: Path, target: Path, defaults: ModelDefaults | None) -> None:
    """Write the defaults of a model beside it: its origin's defaults, and what replaces them."""
    file, base = defaults_file(target), defaults_file(path)
    merged = ModelDefaults.read(path).merge(defaults or ModelDefaults())
    if defaults is not None or base.exists():
        partial_file = file.with_name(f".{file.name}.part")
        partial_file.write_bytes(msgspec.json.format(msgspec.json.encode(merged)) + b"\n")
        os.replace(partial_file, file)


def _remove(path: Path, folder: Path) -> None:
    """Remove a model, and the folders that are empty then."""
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            for file in [path] if path.is_dir() else model_files(path):  # a folder that is a link stays
                file.unlink()
    defaults_file(path).unlink(missing_ok=True)
    for parent in path.parents:
        if parent == folder:
            return
        with suppress(OSError):  # it holds others
            parent.rmdir()
