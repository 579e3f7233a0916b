"""What a run of a benchmark leaves behind: results with their samples, and all that is needed to judge them later.

The JSON form is versioned and described in docs/results.md. A `Recorder` collects samples while a benchmark runs; what
it has can be turned into a run at any time, also after Ctrl-C.
"""

from __future__ import annotations

import json
import math
import os
import time
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
LARGEST_FILE = 256 << 20
Better = Literal["lower", "higher"]
DIGITS = 7  # significant ones of a sample, in a file


class ResultsError(WorkerError):
    """A file of results that cannot be used."""

    code = "INVALID_RESULTS"


@dataclass(frozen=True, slots=True)
class Result:
    """One measured quantity; `fields` is what only this kind has (backend, iterations, percent_of_limit, ...)."""

    name: str
    unit: str  # s, tok/s, B, ...: always the plain unit, people's prefixes are for display
    estimate: float
    low: float
    high: float
    better: Better = "lower"
    samples: tuple[float, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(name: str, unit: str, samples: Sequence[float], better: Better = "lower", **fields: Any) -> Result:
        """The result that these samples give."""
        value, low, high = statistics.estimate(samples, fields.get("rounds", ()))
        return Result(name, unit, value, low, high, better, tuple(samples), fields)

    @staticmethod
    def exact(name: str, unit: str, value: float, better: Better = "lower", **fields: Any) -> Result:
        """A figure without spread: counted or computed, not timed."""
        return Result(name, unit, value, value, value, better, (), fields)

    @property
    def key(self) -> tuple[str, str | None]:
        """What tells results of one run apart: the name, and the backend where a benchmark ran on several."""
        return self.name, self.fields.get("backend")

    def as_json(self) -> dict[str, Any]:
        """The object of the results list."""
        own = {name: getattr(self, name) for name in ("name", "unit", "estimate", "low", "high", "better")}
        return {**own, **self.fields, "samples": rounded(self.samples)}

    @staticmethod
    def from_json(value: Any, where: str) -> Result:
        """The way back; what is missing or of the wrong type is named."""
        rest = dict(_object(value, where))
        texts = [_typed(rest, key, str, where) for key in ("name", "unit")]
        estimate, low, high = (_number(rest, key, where) for key in ("estimate", "low", "high"))
        better = rest.pop("better", "lower")
        samples = rest.pop("samples", [])
        if not isinstance(rest.get("backend"), str | None):
            raise ResultsError(f"{where}: backend is not a text")
        if better not in ("lower", "higher"):
            raise ResultsError(f"{where}: better is {better!r}, neither lower nor higher")
        if not isinstance(samples, list):
            raise ResultsError(f"{where}: samples is not a list of numbers")
        values = tuple(_float(sample, f"{where}: samples is not a list of numbers") for sample in samples)
        return Result(texts[0], texts[1], estimate, low, high, better, values, rest)


@dataclass(frozen=True, slots=True)
class Run:
    """All of one run."""

    kind: str  # micro, e2e, load, serving, peers, accuracy, profile, experiments
    results: tuple[Result, ...]
    created: str  # ISO 8601, UTC
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    commit: Mapping[str, Any] | None = None
    model: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)  # what only this kind has: limits, a table, a histogram
    complete: bool = True  # False: broken off, with what was measured until then
    elapsed_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """The whole object, as `--json` prints it and files hold it."""
        head = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION}
        names = ("kind", "created", "complete", "elapsed_s", "commit", "machine", "versions", "model", "settings")
        return {
            **head,
            **{name: getattr(self, name) for name in names},
            "details": dict(self.details),
            "results": [result.as_json() for result in self.results],
        }

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        if not path.name or os.path.isdir(path):
            raise ResultsError(f"cannot write {path}: it is a folder, give the name of a file")
        text = json.dumps(finite(self.as_json()), indent=1, ensure_ascii=False) + "\n"
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(text.encode(errors="backslashreplace"))  # what is no text, as in a path: a JSON escape
            part.replace(path)
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise ResultsError(f"cannot write {path}: {error.strerror}") from None

    @staticmethod
    def load(path: Path) -> Run:
        """Read a file; one that is not a run of ours, or of a later version, is refused with the reason."""
        try:
            with path.open("rb") as file:
                data = file.read(LARGEST_FILE + 1)
            if len(data) > LARGEST_FILE:
                raise ResultsError(
                    f"{path} is too large for a file of results: at most {LARGEST_FILE >> 20} MiB are read"
                )
            value = json.loads(data.decode())
        except OSError as error:
            raise ResultsError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ResultsError(f"{path} is not JSON: {error}") from None
        return Run.from_json(value, str(path))

    @staticmethod
    def from_json(value: Any, where: str) -> Run:
        """The way back from `as_json`."""
        found = _object(value, where)
        if found.get("schema") != SCHEMA:
            raise ResultsError(f"{where} is not a run of `bench`: its schema is {found.get('schema')!r}")
        if found.get("schema_version") != SCHEMA_VERSION:
            raise ResultsError(
                f"{where} has schema version {found.get('schema_version')!r}, this program reads {SCHEMA_VERSION}"
            )
        results = found.get("results")
        if not isinstance(results, list):
            raise ResultsError(f"{where}: results is not a list")
        objects = {key: _object(found.get(key) or {}, f"{where}: {key}") for key in ("settings", "details", "versions")}
        return Run(
            kind=_typed(dict(found), "kind", str, where),
            created=_typed(dict(found), "created", str, where),
            results=tuple(Result.from_json(one, f"{where}: results[{i}]") for i, one in enumerate(results)),
            machine=_object(found.get("machine"), f"{where}: machine"),
            commit=None if found.get("commit") is None else _object(found["commit"], f"{where}: commit"),
            model=None if found.get("model") is None else _object(found["model"], f"{where}: model"),
            complete=found.get("complete", True) is True,
            elapsed_s=_number({"elapsed_s": 0.0, **found}, "elapsed_s", where),
            **objects,
        )


@dataclass(slots=True)
class Recorder:
    """Samples as they come in, by name and fields; `run()` makes results of what is there."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] | None = None
    details: dict[str, Any] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)
    _results: dict[tuple[str, str | None], Result] = field(default_factory=dict)
    _pending: dict[tuple[str, str | None], tuple[str, Better, list[float], dict[str, Any]]] = field(
        default_factory=dict
    )

    def put(self, result: Result) -> None:
        """Take a finished result; one of the same name and backend is replaced."""
        self._results[result.key] = result

    def add(self, name: str, unit: str, sample: float, better: Better = "lower", **fields: Any) -> None:
        """Take one sample more; the fields given last count."""
        key = (name, fields.get("backend"))
        _, _, samples, known = self._pending.setdefault(key, (unit, better, [], {}))
        samples.append(sample)
        known.update(fields)

    def results(self) -> tuple[Result, ...]:
        """What is known until now: finished results first, then those of loose samples."""
        made = {key: Result.of(key[0], unit, s, better, **f) for key, (unit, better, s, f) in self._pending.items()}
        return tuple((self._results | made).values())

    def run(self, *, complete: bool = True) -> Run:
        """The run, as it stands."""
        return Run(
            kind=self.kind,
            results=self.results(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=environment.machine_description(),
            versions=environment.versions(),
            commit=environment.commit(),
            model=self.model,
            settings=self.settings,
            details=self.details,
            complete=complete,
            elapsed_s=round(time.monotonic() - self._started, 3),
        )


def rounded(samples: Sequence[float]) -> list[float]:
    """As many digits as a file holds."""
    return [float(f"{value:.{DIGITS}g}") for value in samples]


def finite(value: Any) -> Any:
    """The same value with null where JSON has no number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ResultsError(f"{where} is not a JSON object")
    return value


def _typed(found: dict[str, Any], key: str, kind: type[str], where: str) -> str:
    value = found.pop(key, None)
    if not isinstance(value, kind):
        raise ResultsError(f"{where}: {key} is missing or not a text")
    return value


def _number(found: dict[str, Any], key: str, where: str) -> float:
    return _float(found.pop(key, ...), f"{where}: {key} is missing or not a number")


def _float(value: Any, message: str) -> float:
    if value is None:  # how JSON writes what is no number
        return math.nan
    if type(value) not in (int, float):
        raise ResultsError(message)
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
