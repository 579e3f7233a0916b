"""Models on the Hugging Face hub, `hf:owner/repo[:quant]`: choosing files, fetching, finding again.

Files stay in the hub's own cache (HF_HOME), shared with other programs. The same rules choose from a repository's
listing and, offline, from the cached snapshot: `models--owner--repo/snapshots/<commit>/...`, with the commit of the
main branch in `refs/main`. huggingface_hub is imported only when something must be fetched.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ...errors import DownloadError, ModelNotFoundError, UnsupportedModelError, WorkerError
from ..checkpoint import PICKLE_SUFFIXES
from ..gguf import SPLIT_NAME
from ..vision_names import PREPROCESSOR_FILES, is_projector, projector_order
from .cache_dir import DISK_FULL_ERRNOS, Progress, disk_full_error, explain_os_errors, require_space, user_cache_dir

PREFERRED_QUANTS = ("Q4_K_M", "Q4_0", "Q8_0")
REFERENCE_PATTERN = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<quant>[\w./-]+))?", re.ASCII)
QUANT_PATTERN = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?I?Q\d\w*|TQ\d_0|MXFP4\w*|NVFP4|BF16|F16|F32)(?!\w)", re.IGNORECASE
)
NOT_A_MODEL_PATTERN = re.compile(r"mmproj|imatrix", re.IGNORECASE)
COMPANION_FILES = (
    *("config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer.model"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "modules.json", "config_sentence_transformers.json"),
    *PREPROCESSOR_FILES,
)
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")  # of a PEFT adapter
MODULE_FILE = re.compile(r"sentence_\w+_config\.json|\d+_\w+/(?:config\.json|model\.safetensors)", re.ASCII)


@dataclass(frozen=True)
class HubModel:
    """A model on the hub; `quant` is a quantization or a whole file name."""

    repo: str
    quant: str | None = None

    @property
    def reference(self) -> str:
        return f"hf:{self.repo}" + (f":{self.quant}" if self.quant else "")


def parse_reference(reference: str) -> HubModel:
    """Parse `hf:owner/repo[:quant]`."""
    match = REFERENCE_PATTERN.fullmatch(reference)
    if match is None or ".." in reference:
        raise ModelNotFoundError(f"{reference!r} is not of the form hf:owner/repo or hf:owner/repo:quant")
    return HubModel(match["repo"], match["quant"])


def choose_files(model: HubModel, listing: list[str]) -> list[str]:
    """Return the files of the referenced model, the entry file first; with a GGUF file the projector beside it."""
    safe = [name for name in listing if not name.startswith("/") and ".." not in PurePosixPath(name).parts]
    files = _choose_model(model, safe)
    folder, is_gguf = PurePosixPath(files[0]).parent, files[0].lower().endswith(".gguf")
    paths = [PurePosixPath(name) for name in safe if is_gguf and is_projector(name)]
    beside = sorted((path for path in paths if path.parent == folder), key=projector_order)
    return [*files, *map(str, beside[:1])]


def _choose_model(model: HubModel, safe: list[str]) -> list[str]:
    sets = _gguf_sets(safe)
    if model.quant:
        return _by_quant(model, model.quant, sets)
    is_adapter = set(ADAPTER_FILES) <= set(safe)
    if "config.json" in safe and (weights := _safetensors(safe)) and not (is_adapter and ADAPTER_FILES[1] in weights):
        modules = sorted(filter(MODULE_FILE.fullmatch, safe)) if "modules.json" in safe else []
        return [name for name in COMPANION_FILES if name in safe] + modules + weights
    if is_adapter:
        return list(ADAPTER_FILES)
    if not sets:
        raise _no_model_error(model, safe)
    if len(sets) == 1:
        return _require_complete(model, next(iter(sets.values())))
    for quant in PREFERRED_QUANTS:
        names = _matching(quant, sets)
        if len(names) == 1:
            return _require_complete(model, sets[names[0]])
    raise ModelNotFoundError(f"{model.reference} holds several models, choose one: {_list_choices(model, sets)}")


def _safetensors(names: list[str]) -> list[str]:
    """Return the top-level weights; only `model*` if there are others (consolidated, adapters)."""
    top = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    return [name for name in top if name.startswith("model")] or top


def _gguf_sets(names: list[str]) -> dict[str, list[str]]:
    """Map the first file of each GGUF model to all its files, in order."""
    sets: dict[tuple[str, str], list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not NOT_A_MODEL_PATTERN.search(name):
            match = SPLIT_NAME.fullmatch(name)
            sets.setdefault((match["stem"], match["parts"]) if match else (name, ""), []).append(name)
    return {files[0]: files for files in sets.values()}


def _matching(quant: str, sets: Mapping[str, list[str]]) -> list[str]:
    """Return entries whose name contains `quant` as a word: Q4_K does not match Q4_K_M, nor F16 BF16."""
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(quant)}(?!\w)", re.IGNORECASE)
    return [name for name in sets if word.search(name)]


def _by_quant(model: HubModel, quant: str, sets: dict[str, list[str]]) -> list[str]:
    names = [name for name in sets if quant in (name, PurePosixPath(name).name)] or _matching(quant, sets)
    if len(names) == 1:
        return _require_complete(model, sets[names[0]])
    if names:
        raise ModelNotFoundError(
            f"{model.reference} matches several files, give the whole file name after the colon: {', '.join(names)}"
        )
    if not sets:
        raise ModelNotFoundError(f"{model.repo} holds no GGUF file, so no {quant}: try hf:{model.repo}")
    raise ModelNotFoundError(f"{model.repo} holds no {quant}; it holds: {_list_choices(model, sets)}")


def _require_complete(model: HubModel, files: list[str]) -> list[str]:
    match = SPLIT_NAME.fullmatch(files[0])
    if match and len(files) != int(match["parts"]):
        held = f"{len(files)} of {int(match['parts'])} parts"
        raise ModelNotFoundError(f"{model.reference} is incomplete: it has {held} of {match['stem']}")
    return files


def _list_choices(model: HubModel, sets: Mapping[str, list[str]]) -> str:
    """List the choices after the colon: quantizations, or file names where these are ambiguous."""
    words = [(QUANT_PATTERN.findall(PurePosixPath(name).name) or [""])[-1] for name in sets]
    unambiguous = all(words) and len(set(words)) == len(words)
    return ", ".join(words if unambiguous else (PurePosixPath(name).name for name in sets))


def _no_model_error(model: HubModel, names: list[str]) -> WorkerError:
    if any(name.endswith(PICKLE_SUFFIXES) for name in names):
        return UnsupportedModelError(
            f"{model.repo} holds pickled weights only, which are refused: use a repository with safetensors or GGUF"
        )
    held = ", ".join(names[:8]) or "nothing"
    return ModelNotFoundError(f"{model.repo} holds no GGUF and no config.json with safetensors; it holds: {held}")


DEFAULT_ENDPOINT = "https://huggingface.co"
POLL_INTERVAL_S = 0.1
LISTING_TIMEOUT_S = 10.0


def hub_cache() -> Path:
    """Return the hub's cache folder, by the rules of huggingface_hub."""
    for variable, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if named := os.environ.get(variable):
            return Path(os.path.expandvars(named)).expanduser() / below
    return user_cache_dir() / "huggingface" / "hub"


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set."""
    named = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return named.upper() in {"1", "ON", "YES", "TRUE"}


def endpoint() -> str:
    """Return the hub's address (huggingface_hub reads the variable only once, at import)."""
    return (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def pull_model(model: HubModel, progress: Progress) -> Path:
    """Fetch the missing files; return the GGUF file (the first of a split set) or the folder."""
    if is_offline():
        return find_cached(model)
    try:
        commit, sizes = _listing(model)
    except DownloadError as error:
        try:  # hub not reachable: use the cached snapshot
            return find_cached(model)
        except WorkerError:
            raise error from error.__cause__
    names = choose_files(model, list(sizes))
    snapshot = _fetch(model, commit, {name: sizes[name] for name in names}, progress)
    return _entry(snapshot, names)


def find_cached(model: HubModel) -> Path:
    """Return the model from the cached snapshot, without a network."""
    snapshot = _snapshot(model)
    if snapshot is None:
        why = "HF_HUB_OFFLINE is set" if is_offline() else "it has not been pulled"
        raise ModelNotFoundError(f"{model.reference} is not in {hub_cache()} and {why}: pull it with a network first")
    present = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
    names = choose_files(model, present)
    index = snapshot / "model.safetensors.index.json"
    if index.name in names and (absent := _shards(index) - set(names)):
        raise ModelNotFoundError(f"{model.reference} is only partly cached ({min(absent)} is missing): pull again")
    return _entry(snapshot, names)


def _snapshot(model: HubModel) -> Path | None:
    folder = hub_cache() / f"models--{model.repo.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def _shards(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return set()  # the safetensors reader reports what is wrong


def _entry(snapshot: Path, names: list[str]) -> Path:
    return snapshot / names[0] if names[0].lower().endswith(".gguf") else snapshot


def _import_library() -> Any:
    """Import huggingface_hub (slow) with the submodules that it does not load by itself."""
    import huggingface_hub
    import huggingface_hub.errors
    import huggingface_hub.file_download
    import huggingface_hub.utils

    return huggingface_hub


def _listing(model: HubModel) -> tuple[str, dict[str, int | None]]:
    """Return the commit of the main branch, and the size of each file (None if unknown)."""
    with _library_calls(model):
        api = _import_library().HfApi(endpoint=endpoint())
        info = api.model_info(model.repo, files_metadata=True, timeout=LISTING_TIMEOUT_S)
        return str(info.sha), {file.rfilename: file.size for file in info.siblings or ()}


def _fetch(model: HubModel, commit: str, sizes: Mapping[str, int | None], progress: Progress) -> Path:
    """Download the files one by one in this thread, so that Ctrl-C ends it at once."""
    folder = hub_cache() / f"models--{model.repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    absent = {name: size for name, size in sizes.items() if not (snapshot / name).exists()}
    needed = sum(size or 0 for size in absent.values())
    with explain_os_errors(hub_cache(), needed):
        hub_cache().mkdir(parents=True, exist_ok=True)
        require_space(hub_cache(), needed)
    with _report_growth(folder / "blobs", model, absent, progress), _library_calls(model, needed):
        for name in sizes:
            path = _import_library().hf_hub_download(
                model.repo, name, revision="main", endpoint=endpoint(), cache_dir=hub_cache()
            )
            if not Path(path).is_relative_to(snapshot):
                raise DownloadError(f"{model.repo} changed during the download: pull again")
    return snapshot


def fetch_into(model: HubModel, folder: Path, progress: Progress) -> Path:
    """Fetch a model into a folder of its own, and return it as `pull_model` does. What an earlier call had fetched is
    not fetched again, in the middle of a file too, which the library's cache does not do."""
    commit, sizes = _listing(model)
    names, blobs, snapshot = choose_files(model, list(sizes)), folder / "blobs", folder / commit
    library, absent = _import_library(), {name: sizes[name] for name in names}
    needed = sum(size or 0 for size in absent.values())
    with explain_os_errors(folder, needed):
        blobs.mkdir(parents=True, exist_ok=True)
        require_space(folder, needed - _blob_bytes(blobs, finished=False))
    with _report_growth(blobs, model, absent, progress), _library_calls(model, needed):
        urls = {name: library.hf_hub_url(model.repo, name, revision=commit, endpoint=endpoint()) for name in names}
        files = {name: blobs / library.get_hf_file_metadata(url).etag for name, url in urls.items()}
        for name, file in files.items():
            if file.exists():
                continue
            part = file.with_suffix(".incomplete")
            with open(part, "ab") as target:
                resumed = {"resume_size": target.tell(), "expected_size": sizes[name]}
                library.file_download.http_get(urls[name], target, headers=library.utils.build_hf_headers(), **resumed)
            os.replace(part, file)
    for name, file in files.items():
        if not _matches_name(file, progress):
            file.unlink()
            raise DownloadError(f"{name} of {model.reference} was damaged on its way: pull it again")
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).unlink(missing_ok=True)
        os.link(file, snapshot / name)
    return _entry(snapshot, names)


@contextmanager
def _report_growth(
    blobs: Path, model: HubModel, absent: Mapping[str, int | None], progress: Progress
) -> Iterator[None]:
    """Report the growth of the hub's blob folder: correct for every download method of the library."""
    if not absent:
        yield
        return
    total = sum(size or 0 for size in absent.values()) if all(absent.values()) else None
    before = _blob_bytes(blobs, finished=True)
    done = threading.Event()

    def report() -> None:
        count = max(0, _blob_bytes(blobs, finished=False) - before)
        progress(f"downloading {model.reference}", min(count, total) if total else count, total)

    def watch() -> None:
        while not done.wait(POLL_INTERVAL_S):
            report()

    report()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    report()


def _blob_bytes(blobs: Path, *, finished: bool) -> int:
    """Return the size of all blobs, or of the finished ones."""
    total = 0
    with suppress(OSError):  # not created yet, or just renamed
        for entry in os.scandir(blobs):
            total += 0 if finished and entry.name.endswith(".incomplete") else entry.stat().st_size
    return total


@contextmanager
def _library_calls(model: HubModel, needed: int | None = None) -> Iterator[None]:
    """Silence the library; turn whatever it or its HTTP client raises into a WorkerError of one line."""
    utils = _import_library().utils
    level, disabled = utils.logging.get_verbosity(), utils.are_progress_bars_disabled()
    utils.logging.set_verbosity_error()
    utils.disable_progress_bars()
    try:
        yield
    except WorkerError:
        raise
    except Exception as error:
        raise _to_worker_error(model, error, needed) from error
    finally:
        utils.logging.set_verbosity(level)
        if not disabled:
            utils.enable_progress_bars()


def _to_worker_error(model: HubModel, error: Exception, needed: int | None) -> WorkerError:
    errors = _import_library().errors
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
        return disk_full_error(hub_cache(), needed)
    if isinstance(error, errors.GatedRepoError):
        page = f"{endpoint()}/{model.repo}"
        return DownloadError(f"{model.repo} is gated: accept its terms at {page} and set HF_TOKEN to your token")
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return ModelNotFoundError(f"no model {model.repo!r} at {endpoint()} (a private one needs HF_TOKEN)")
    return DownloadError(f"cannot fetch {model.reference} from {endpoint()}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    cause = error.__cause__ if type(error).__name__ == "LocalEntryNotFoundError" and error.__cause__ else error
    lines = str(cause).strip().splitlines()
    return lines[0][:300] if lines else type(cause).__name__


def remove_damaged(files: list[Path], progress: Progress) -> list[Path]:
    """Remove and return the files whose content does not match the name of their blob.

    The hub names a blob by its hash: SHA-256 for large files, git's SHA-1 of an object for small ones.
    """
    damaged = [file for file in files if not _matches_name(file, progress)]
    for file in damaged:
        file.resolve().unlink()
        file.unlink(missing_ok=True)
    return damaged


def _matches_name(file: Path, progress: Progress) -> bool:
    blob = file.resolve()
    total = blob.stat().st_size
    digests = {64: hashlib.sha256(), 40: hashlib.sha1(b"blob %d\0" % total, usedforsecurity=False)}
    digest = digests.get(len(blob.name)) if re.fullmatch(r"[0-9a-f]+", blob.name) else None
    if digest is None:
        return True  # a hub that does not name blobs by hash
    done = 0
    with open(blob, "rb") as source:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            done += len(chunk)
            progress(f"verifying {file.name}", done, total)
    return digest.hexdigest() == blob.name
