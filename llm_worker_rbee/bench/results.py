"""The saved form of a benchmark: a `Run` of named `Result`s with their samples, and all that is needed to judge them.

The JSON form is versioned and described in docs/results.md. A `Recorder` collects samples while a benchmark runs and
makes a run of them at any time, also after Ctrl-C.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ..errors import WorkerError
from . import environment, statistics

SCHEMA = "llm-worker-rbee/bench"
SCHEMA_VERSION = 1
MAX_FILE_BYTES = 256 << 20
Better = Literal["lower", "higher"]
SAMPLE_DIGITS = 7  # significant ones, in a file


class ResultsError(WorkerError):
    """A file of results that cannot be read, written or compared."""

    code = "INVALID_RESULTS"


@dataclass(frozen=True, slots=True)
class Result:
    """One measured quantity; `fields` is what only this kind has (backend, iterations, percent_of_limit, ...)."""

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

    def as_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("name", "unit", "estimate", "low", "high", "better")}
        return {**own, **self.fields, "samples": round_samples(self.samples)}

    @staticmethod
    def from_json(value: Any, where: str) -> Result:
        """Raise ResultsError that names what is missing or of the wrong type."""
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

    kind: str  # micro, e2e, load, serving, peers, accuracy, profile, experiments
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

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints and files hold."""
        head = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION}
        names = ("kind", "created", "complete", "elapsed_s", "commit", "machine", "versions", "model", "settings")
        return {
            **head,
            **{name: getattr(self, name) for name in names},
            "details": dict(self.details),
            "results": [result.as_json() for result in self.results],
        }

    def save(self, path: Path) -> None:
        text = json.dumps(replace_non_finite(self.as_json()), indent=1, ensure_ascii=False) + "\n"
        write_atomically(path, text.encode(errors="backslashreplace"))  # undecodable bytes of a path

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
        found = _require_object(value, where)
        if found.get("schema") != SCHEMA:
            raise ResultsError(f"{where} is not a run of `bench`: its schema is {found.get('schema')!r}")
        if found.get("schema_version") != SCHEMA_VERSION:
            raise ResultsError(
                f"{where} has schema version {found.get('schema_version')!r}, this program reads {SCHEMA_VERSION}"
            )
        results = found.get("results")
        if not isinstance(results, list):
            raise ResultsError(f"{where}: results is not a list")
        objects = {
            key: _require_object(found.get(key) or {}, f"{where}: {key}") for key in ("settings", "details", "versions")
        }
        return Run(
            kind=_pop_text(dict(found), "kind", where),
            created=_pop_text(dict(found), "created", where),
            results=tuple(Result.from_json(one, f"{where}: results[{i}]") for i, one in enumerate(results)),
            machine=_require_object(found.get("machine"), f"{where}: machine"),
            commit=None if found.get("commit") is None else _require_object(found["commit"], f"{where}: commit"),
            model=None if found.get("model") is None else _require_object(found["model"], f"{where}: model"),
            complete=found.get("complete", True) is True,
            elapsed_s=_pop_number({"elapsed_s": 0.0, **found}, "elapsed_s", where),
            **objects,
        )


@dataclass(slots=True)
class Recorder:
    """Collects results and samples; `to_run` makes a run of what there is."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] | None = None
    details: dict[str, Any] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)
    _results: dict[tuple[str, str | None], Result] = field(default_factory=dict)
    _pending: dict[tuple[str, str | None], tuple[str, Better, list[float], dict[str, Any]]] = field(
        default_factory=dict
    )

    def add_result(self, result: Result) -> None:
        """Add a finished result, or replace the one of the same name and backend."""
        self._results[result.key] = result

    def add_sample(self, name: str, unit: str, sample: float, better: Better = "lower", **fields: Any) -> None:
        """Add a sample to a result; the fields given last count."""
        key = (name, fields.get("backend"))
        _, _, samples, known = self._pending.setdefault(key, (unit, better, [], {}))
        samples.append(sample)
        known.update(fields)

    def results(self) -> tuple[Result, ...]:
        """Return finished results, then those of single samples."""
        made = {
            key: Result.from_samples(key[0], unit, s, better, **f)
            for key, (unit, better, s, f) in self._pending.items()
        }
        return tuple((self._results | made).values())

    def to_run(self, *, complete: bool = True) -> Run:
        return Run(
            kind=self.kind,
            results=self.results(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=environment.describe_machine(),
            versions=environment.package_versions(),
            commit=environment.describe_commit(),
            model=self.model,
            settings=self.settings,
            details=self.details,
            complete=complete,
            elapsed_s=round(time.monotonic() - self._started, 3),
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


def _pop_text(found: dict[str, Any], key: str, where: str) -> str:
    value = found.pop(key, None)
    if not isinstance(value, str):
        raise ResultsError(f"{where}: {key} is missing or not a text")
    return value


def _pop_number(found: dict[str, Any], key: str, where: str) -> float:
    return _to_float(found.pop(key, ...), f"{where}: {key} is missing or not a number")


def _to_float(value: Any, message: str) -> float:
    if value is None:  # NaN or infinity in a file
        return math.nan
    if type(value) not in (int, float):
        raise ResultsError(message)
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
