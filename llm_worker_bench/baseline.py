"""Named baselines, and the comparison of two runs: changes, and other differences between them.

A baseline is a saved run in the user's data folder. Times of another machine say nothing about this one: comparing
with them is refused unless it is forced.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llm_worker_rbee.errors import InvalidRequestError

from . import statistics
from .results import Result, ResultsError, Run, quantity
from .statistics import Change

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MACHINE_FIELDS = ("cpu", "architecture", "features", "cores", "quota", "memory_gib", "gpus")  # they decide its speed
SPEED_INDEPENDENT_KINDS = {"accuracy"}
MISSING = "-"
HASH_CHARACTERS = 12
MIN_DRIFT = 0.05  # of the machine's own speed, to be reported
SPEED_UNITS = {"memory": "B/s", "arithmetic": "FLOP/s"}


class OtherMachineError(ResultsError):
    """Two runs from different machines."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One quantity before and after."""

    before: Result
    after: Result
    change: Change

    def is_past(self, threshold: float) -> bool:
        """Whether it became worse by more than this fraction."""
        return self.change.verdict == "regressed" and abs(self.change.change) > threshold

    def as_json(self) -> dict[str, Any]:
        name, backend = self.after.key
        values = {"unit": self.after.unit, "before": self.before.estimate, "after": self.after.estimate}
        return {"name": name, **({"backend": backend} if backend else {}), **values, **self.change._asdict()}


class Difference(NamedTuple):
    """A property in which two runs differ."""

    what: str
    before: str
    after: str


def baseline_dir() -> Path:
    """Return the folder of named baselines."""
    home = os.environ.get("XDG_DATA_HOME")
    try:
        base = Path(home) if home and Path(home).is_absolute() else Path.home() / ".local" / "share"
    except RuntimeError:
        raise ResultsError("there is no home folder for baselines: set XDG_DATA_HOME, or give a path") from None
    return base / "llm-worker-rbee" / "baselines"


def list_names() -> list[str]:
    """Return the names of the saved baselines."""
    return sorted(path.stem for path in baseline_dir().glob("*.json"))


def path_for(name: str) -> Path:
    """Return the file of a baseline of this name."""
    if not NAME.fullmatch(name):
        message = f"{name!r} cannot name a baseline: use letters, digits, dots, dashes and underscores"
        raise InvalidRequestError(message, "save_baseline")
    return baseline_dir() / f"{name}.json"


def load(reference: str) -> Run:
    """Load a baseline by name or by path."""
    path = Path(reference)
    if "/" in reference or reference.endswith((".json", ".json.gz")) or path.is_file():
        return Run.load(path)
    named = baseline_dir() / f"{reference}.json"
    if not NAME.fullmatch(reference) or not named.exists():
        names = ", ".join(list_names()) or "none yet: --save-baseline NAME makes one"
        raise ResultsError(f"there is no baseline {reference!r} (baselines: {names})")
    return Run.load(named)


def require_comparable(before: Run, after: Run, *, force: bool) -> None:
    """Raise if different commands or, unless forced, different machines measured the two runs."""
    require_same_kind(before, after)
    old, new = before.machine, after.machine
    if force or before.kind in SPEED_INDEPENDENT_KINDS or old.get("fingerprint") == new.get("fingerprint"):
        return
    differing = [f"{k} {old.get(k)!r} then, {new.get(k)!r} now" for k in MACHINE_FIELDS if old.get(k) != new.get(k)]
    raise OtherMachineError(
        f"the baseline was taken on another machine ({'; '.join(differing) or 'fingerprints differ'}): "
        "times cannot be compared; take a new baseline here, or say --force"
    )


def require_same_kind(before: Run, after: Run) -> None:
    """Raise ResultsError if different commands measured the two runs."""
    if before.kind != after.kind:
        raise ResultsError(f"a run of `{before.kind}` cannot be compared with one of `{after.kind}`")


def compare(before: Run, after: Run, noise: float = statistics.NOISE) -> list[Comparison]:
    """Compare the results of both runs, by name and backend, or by name alone if it is unique in both."""
    require_same_kind(before, after)
    by_key = {result.key: result for result in before.results}
    unique = _unique_names(before) & _unique_names(after)
    by_name = {result.name: result for result in before.results if result.name in unique}
    comparisons = []
    for result in after.results:
        old = by_key.get(result.key) or by_name.get(result.name)
        if old is not None and old.unit == result.unit:
            comparisons.append(Comparison(old, result, compare_results(old, result, noise)))
    if not comparisons:
        raise ResultsError("the two runs have no benchmark in common")
    return comparisons


def compare_results(before: Result, after: Result, noise: float = statistics.NOISE, *, paired: bool = False) -> Change:
    """Return how one result changed; results without samples are compared by their intervals."""
    lower = after.better == "lower"
    if before.samples and after.samples:
        rounds, sides = (_rounds(before), _rounds(after)), (before.samples, after.samples)
        return statistics.compare(*sides, lower_is_better=lower, noise=noise, rounds=rounds, paired=paired)
    change = statistics.change(before.estimate, after.estimate)
    if before.samples or after.samples:
        return Change(change, -math.inf, math.inf, "within noise")
    # intervals without samples: as far apart as their ends may be (of a count both ends are the count)
    low, high = statistics.change(before.high, after.low), statistics.change(before.low, after.high)
    return Change(change, low, high, statistics.judge(change, low, high, lower, noise))


def _rounds(result: Result) -> list[int]:
    rounds = result.fields.get("rounds", [])
    return rounds if isinstance(rounds, list) and all(type(n) is int and n > 0 for n in rounds) else []


def _unique_names(run: Run) -> set[str]:
    return {name for name, count in Counter(result.name for result in run.results).items() if count == 1}


def find_differences(before: Run, after: Run) -> list[Difference]:
    """Return commit, model, machine and its speed, settings and versions where they differ."""
    old, new = _properties(before), _properties(after)
    pairs = {key: (old.get(key, MISSING), new.get(key, MISSING)) for key in old | new}
    differences = [Difference(key, *pair) for key, pair in pairs.items() if pair[0] != pair[1]]
    return differences + find_machine_drift(before, after)


def find_machine_drift(before: Run, after: Run) -> list[Difference]:
    """Return the machine's own speeds, measured in both runs, where they differ by more than the noise."""
    old, new = machine_speeds(before), machine_speeds(after)
    drift = []
    for what, unit in SPEED_UNITS.items():
        then, now = old.get(what, math.nan), new.get(what, math.nan)
        change = statistics.change(then, now)
        if abs(change) > MIN_DRIFT:
            drift.append(Difference(f"speed: {what}", quantity(then, unit), f"{quantity(now, unit)} ({change:+.0%})"))
    return drift


def machine_speeds(run: Run) -> dict[str, float]:
    """Return the rates that the run measured of its machine, by the names of SPEED_UNITS."""
    limits = run.details.get("limits")
    if not isinstance(limits, dict):
        return {}
    ladder, rate = limits.get("bandwidth"), limits.get("operations_per_second")
    largest = ladder[-1] if isinstance(ladder, list) and ladder else None
    last = largest.get("bytes_per_second") if isinstance(largest, dict) else None
    pairs = zip(SPEED_UNITS, (last, rate), strict=True)
    return {what: float(speed) for what, speed in pairs if isinstance(speed, (int, float))}


def names_not_compared(run: Run, other: Run, compared: Iterable[Comparison]) -> list[str]:
    """Return the names of `run` that were not compared, with the unit if the other run has another."""
    used = {id(result) for pair in compared for result in (pair.before, pair.after)}
    units = {result.name: result.unit for result in other.results}
    rest = [result for result in run.results if id(result) not in used]
    return [f"{r.name} (in {r.unit})" if units.get(r.name, r.unit) != r.unit else r.name for r in rest]


def commit_name(run: Run) -> str:
    """Return the start of the commit's hash, and whether files differed from it."""
    commit = run.commit or {}
    return f"{str(commit.get('id') or MISSING)[:HASH_CHARACTERS]}{' + changes' if commit.get('dirty') else ''}"


def model_name(run: Run) -> str:
    """Return the model's name; empty for a run without one."""
    return str((run.model or {}).get("name") or "")


def _properties(run: Run) -> dict[str, str]:
    digest = str((run.model or {}).get("sha256") or "")[:HASH_CHARACTERS]
    return {
        "commit": commit_name(run),
        "model": (model_name(run) or MISSING) + (f" ({digest})" if digest else ""),
        **{f"machine: {key}": _to_text(run.machine.get(key)) for key in (*MACHINE_FIELDS, "threads")},
        **{f"setting: {key}": _to_text(value) for key, value in run.settings.items()},
        **{f"version: {key}": _to_text(value) for key, value in run.versions.items()},
        "complete": "yes" if run.complete else "no, broken off",
    }


def _to_text(value: Any) -> str:
    return MISSING if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
