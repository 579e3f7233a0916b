"""The saved form of a benchmark: a `Run` of named `Result`s with their samples, on a machine, a commit and a model.

The JSON form is versioned and described in docs/saved-runs.md; it holds plain units, and prefixes are added for
display. A `Recorder` collects samples while a benchmark runs and makes a run of them at any time, also after Ctrl-C.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

from llm_worker_rbee import __version__, machine
from llm_worker_rbee.errors import WorkerError
from llm_worker_rbee.progress import StepProgress

from . import statistics
from .processes import THREAD_VARIABLES
from .provenance import source_hashes

SCHEMA = "llm-worker-rbee/bench"
SCHEMA_VERSION = 1
MAX_FILE_BYTES = 256 << 20
Better = Literal["lower", "higher"]
SAMPLE_DIGITS = 7  # significant ones, in a file
PACKAGES = ("numpy", "numba", "llvmlite", "tokenizers", "torch", "triton", "transformers", "matplotlib")
HASH_CHUNK_BYTES = 1 << 22
PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (0.0, "ns"))


class ResultsError(WorkerError):
    """A file of results that cannot be read, written or compared."""

    code = "INVALID_RESULTS"


@dataclass(frozen=True, slots=True)
class Result:
    """One measured quantity; `fields` are specific to its kind (backend, iterations, percent_of_limit, ...)."""

    name: str
    unit: str  # s, tok/s, B, ...: always the plain unit, prefixes are for display
    estimate: float
    low: float
    high: float
    better: Better = "lower"
    samples: tuple[float, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_samples(name: str, unit: str, samples: Sequence[float], better: Better = "lower", **fields: Any) -> Result:
        value, low, high = statistics.estimate(samples, fields.get("rounds", ()))
        return Result(name, unit, value, low, high, better, tuple(samples), fields)

    @staticmethod
    def exact(name: str, unit: str, value: float, better: Better = "lower", **fields: Any) -> Result:
        """Return a result without an interval: counted or computed, not timed."""
        return Result(name, unit, value, value, value, better, (), fields)

    @property
    def key(self) -> tuple[str, str | None]:
        """The name, and the backend where a benchmark ran on several: unique in a run."""
        return self.name, self.fields.get("backend")

    @property
    def label(self) -> str:
        """`name [backend]`, or the name alone."""
        name, backend = self.key
        return f"{name} [{backend}]" if backend else name

    def as_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("name", "unit", "estimate", "low", "high", "better")}
        return {**own, **self.fields, "samples": round_samples(self.samples)}

    @staticmethod
    def from_json(value: Any, where: str) -> Result:
        """Raise ResultsError that names a missing or mistyped field."""
        rest = dict(_require_object(value, where))
        texts = [_pop_text(rest, key, where) for key in ("name", "unit")]
        estimate, low, high = (_pop_number(rest, key, where) for key in ("estimate", "low", "high"))
        better = rest.pop("better", "lower")
        samples = rest.pop("samples", [])
        if not isinstance(rest.get("backend"), str | None):
            raise ResultsError(f"{where}: backend is not a text")
        if better not in ("lower", "higher"):
            raise ResultsError(f"{where}: better is {better!r}, neither lower nor higher")
        if not isinstance(samples, list):
            raise ResultsError(f"{where}: samples is not a list of numbers")
        values = tuple(_to_float(sample, f"{where}: samples is not a list of numbers") for sample in samples)
        return Result(texts[0], texts[1], estimate, low, high, better, values, rest)


@dataclass(frozen=True, slots=True)
class Run:
    """One saved measurement of a command."""

    kind: str  # micro, e2e, embed, load, kv, models, serving, peers, accuracy, profile, experiments
    results: tuple[Result, ...]
    created: str  # ISO 8601, UTC
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    commit: Mapping[str, Any] | None = None
    model: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)  # of this kind alone: limits, a table, a histogram
    complete: bool = True  # False: interrupted, with what was measured until then
    elapsed_s: float = 0.0
    command: str = ""  # that repeats it
    sources: Mapping[str, str] = field(default_factory=dict)  # hashes of the code that was there (provenance.py)

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints and files hold."""
        names = (
            "kind",
            "created",
            "complete",
            "elapsed_s",
            "command",
            "commit",
            "sources",
            "machine",
            "versions",
            "model",
            "settings",
        )
        head = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **{name: getattr(self, name) for name in names}}
        return {**head, "details": dict(self.details), "results": [result.as_json() for result in self.results]}

    def save(self, path: Path) -> None:
        text = json.dumps(replace_non_finite(self.as_json()), indent=1, ensure_ascii=False) + "\n"
        data = text.encode(errors="backslashreplace")  # undecodable bytes of a path
        write_atomically(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)

    @staticmethod
    def load(path: Path) -> Run:
        """Raise ResultsError with the reason if the file is not a run, or of a later version."""
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
            if len(data) > MAX_FILE_BYTES:
                raise ResultsError(f"{path} is too large: at most {MAX_FILE_BYTES >> 20} MiB of results are read")
            value = json.loads(data.decode())
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ResultsError(f"{path} is not a gzip file: {error}") from None
        except OSError as error:
            raise ResultsError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ResultsError(f"{path} is not JSON: {error}") from None
        return Run.from_json(value, str(path))

    @staticmethod
    def from_json(value: Any, where: str) -> Run:
        content = _require_object(value, where)
        if content.get("schema") != SCHEMA:
            raise ResultsError(f"{where} is not a run of `bench`: its schema is {content.get('schema')!r}")
        if (version := content.get("schema_version")) != SCHEMA_VERSION:
            raise ResultsError(f"{where} has schema version {version!r}, this program reads {SCHEMA_VERSION}")
        results = content.get("results")
        if not isinstance(results, list):
            raise ResultsError(f"{where}: results is not a list")
        objects = {key: content.get(key) or {} for key in ("settings", "details", "versions", "sources")}
        objects |= {key: content[key] for key in ("commit", "model") if content.get(key) is not None}
        objects["machine"] = content.get("machine")
        fields: dict[str, Any] = {key: _require_object(item, f"{where}: {key}") for key, item in objects.items()}
        fields |= {key: _pop_text(dict(content), key, where) for key in ("kind", "created")}
        parsed = tuple(Result.from_json(item, f"{where}: results[{i}]") for i, item in enumerate(results))
        elapsed_s = _pop_number({"elapsed_s": 0.0, **content}, "elapsed_s", where)
        fields["command"] = _pop_text({"command": "", **content}, "command", where)
        return Run(results=parsed, complete=content.get("complete", True) is True, elapsed_s=elapsed_s, **fields)


Pending = tuple[str, Better, list[float], dict[str, Any]]  # unit, better, samples, fields


@dataclass(slots=True)
class Recorder:
    """Collects results and samples; `to_run` makes a run from them."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] | None = None
    details: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    _started: float = field(default_factory=time.monotonic)
    _results: dict[tuple[str, str | None], Result] = field(default_factory=dict)
    _pending: dict[tuple[str, str | None], Pending] = field(default_factory=dict)

    def add_result(self, result: Result) -> None:
        """Add a finished result, or replace the result of the same name and backend."""
        self._results[result.key] = result

    def add_sample(self, name: str, unit: str, sample: float, better: Better = "lower", **fields: Any) -> None:
        """Add a sample to a result; the fields given last count."""
        key = (name, fields.get("backend"))
        _, _, samples, extra = self._pending.setdefault(key, (unit, better, [], {}))
        samples.append(sample)
        extra.update(fields)

    def results(self) -> tuple[Result, ...]:
        """Return finished results, then one result for each list of samples."""
        pending = self._pending.items()
        new = {key: Result.from_samples(key[0], unit, s, better, **f) for key, (unit, better, s, f) in pending}
        return tuple((self._results | new).values())

    def to_run(self, *, complete: bool = True) -> Run:
        created, elapsed_s = datetime.now(UTC).isoformat(timespec="seconds"), round(time.monotonic() - self._started, 3)
        return Run(
            self.kind,
            self.results(),
            created,
            describe_machine(),
            package_versions(),
            describe_commit(),
            self.model,
            self.settings,
            self.details,
            complete,
            elapsed_s,
            self.command,
            source_hashes(),
        )


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file and its folders, whole or not at all; raise ResultsError if that fails."""
    if not path.name or os.path.isdir(path):
        raise ResultsError(f"cannot write {path}: it is a folder, give the name of a file")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise ResultsError(f"cannot write {path}: {error.strerror}") from None


def round_samples(samples: Sequence[float]) -> list[float]:
    """Round to the digits that a file holds."""
    return [float(f"{value:.{SAMPLE_DIGITS}g}") for value in samples]


def replace_non_finite(value: Any) -> Any:
    """Return the value with None where JSON has no number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: replace_non_finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_non_finite(inner) for inner in value]
    return value


def _require_object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ResultsError(f"{where} is not a JSON object")
    return value


def _pop_text(content: dict[str, Any], key: str, where: str) -> str:
    value = content.pop(key, None)
    if not isinstance(value, str):
        raise ResultsError(f"{where}: {key} is missing or not a text")
    return value


def _pop_number(content: dict[str, Any], key: str, where: str) -> float:
    return _to_float(content.pop(key, ...), f"{where}: {key} is missing or not a number")


def _to_float(value: Any, message: str) -> float:
    if value is None:  # NaN or infinity in a file
        return math.nan
    if type(value) not in (int, float):
        raise ResultsError(message)
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


@cache
def describe_machine() -> dict[str, Any]:
    """Return processor, memory, GPU and system, and the fingerprint."""
    total, _ = machine.memory()
    hardware: dict[str, Any] = {
        "cpu": machine.cpu_name(),
        "features": machine.cpu_features(),
        "cores": machine.usable_cores(),
        "quota": machine.cpu_quota(),
        "memory_gib": None if total is None else round(total / (1 << 30)),
        "gpus": machine.gpus(),
        "architecture": platform.machine(),
    }
    fingerprint = hashlib.sha256(repr(sorted(hardware.items())).encode()).hexdigest()[:12]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    threads = {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
    state = {"system": platform.platform(terse=True), "load_at_start": load, "threads": threads}
    return {**hardware, **state, "fingerprint": fingerprint}


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of this program, of Python and of the installed packages that speed depends on."""
    versions = {"llm-worker-rbee": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


@cache
def describe_commit() -> dict[str, Any] | None:
    """Return the commit of this checkout and whether the package differs from it; None for an installed package."""
    package = Path(__file__).parent
    root = package.parent
    line = _git(root, "log", "-1", "--format=%H %cI") if (root / ".git").exists() else None
    if line is None:
        return None
    identity, date = line.split()
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", package.name, "llm_worker_rbee")
    return {"id": identity, "date": date, "dirty": bool(changed)}


def _git(root: Path, *args: str) -> str | None:
    command = ["git", "-C", str(root), *args]
    with suppress(OSError, subprocess.SubprocessError):
        output = subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=10)
        return output.decode(errors="replace").strip()
    return None


def describe_model(path: Path, progress: StepProgress | None = None) -> dict[str, Any]:
    """Return name, size and SHA-256 of a model file; of a folder, the hash over its weight files and their names."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else _split_files(path)
    total, done = sum(file.stat().st_size for file in files), 0
    digest = hashlib.sha256()
    for file in files:
        if path.is_dir() or len(files) > 1:
            digest.update(file.name.encode())
        with file.open("rb") as source:
            while part := source.read(HASH_CHUNK_BYTES):
                digest.update(part)
                done += len(part)
                if progress is not None:
                    progress(f"hashing {path.name}", done, total)
    return {"name": path.name, "bytes": total, "sha256": digest.hexdigest()}


def _split_files(path: Path) -> list[Path]:
    stem, dash, count = path.stem.rpartition("-of-")
    if not dash or not count.isdigit():
        return [path]
    return sorted(path.parent.glob(f"{stem.rpartition('-')[0]}-*-of-{count}.gguf"))


def quantity(value: float, unit: str) -> str:
    """Format a value with its unit: `1.23 ms`, `4.10 tok/s`, `98.4 MB`."""
    if value != value:
        return "-"
    size, name = scale(value, unit) if value else (1.0, unit)
    if name == unit and size == 1.0 and unit != "s" and value == round(value, 0):
        return f"{value:,.0f} {unit}".rstrip()  # probably a count
    return f"{digits(value / size)} {name}".rstrip()


def scale(value: float, unit: str) -> tuple[float, str]:
    """Return the size and the name of the prefixed unit that suits a value."""
    if unit == "s":
        size, name = next(((s, n) for s, n in SECONDS if abs(value) >= s), SECONDS[-1])
        return size or 1e-9, name
    if unit in ("B", "B/s", "FLOP/s"):
        size, name = next(((s, n) for s, n in PREFIXES if abs(value) >= s), PREFIXES[-1])
        return size, name + unit
    return 1.0, unit


def digits(value: float) -> str:
    """Format about three significant digits, and all digits before the point."""
    size = abs(value)
    if size >= 999.5 or not value:
        return f"{value:,.0f}"
    return f"{value:.2f}" if 0.1 <= size < 99.995 else f"{value:.3g}"


def percent(value: float) -> str:
    """Format a value that is in percent: `43.2%`, `0.006%`."""
    return f"{value:.1f}%" if abs(value) >= 1 or not value else f"{value:.2g}%"


def spread(values: Sequence[float], unit: str) -> str:
    """Format two values as `1.20 to 1.26 ms`; each with its own unit where those differ."""
    low, high = (quantity(value, unit) for value in values)
    number, _, name = low.partition(" ")
    return f"{number} to {high}" if name == high.partition(" ")[2] else f"{low} to {high}"
