"""Baselines by name, and what changed between two runs.

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

from ..errors import InvalidRequestError
from . import statistics
from .format import quantity
from .results import Result, ResultsError, Run

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MACHINE = ("cpu", "architecture", "features", "cores", "quota", "memory_gib", "gpus")  # what decides its speed
TIMELESS = {"accuracy"}  # kinds whose figures do not depend on the machine's speed


class OtherMachineError(ResultsError):
    """Two runs that were taken on different machines."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One quantity before and after."""

    before: Result
    after: Result
    change: statistics.Change

    def past(self, threshold: float) -> bool:
        """Whether it became worse by more than this fraction."""
        return self.change.verdict == "regressed" and abs(self.change.change) > threshold

    def as_json(self) -> dict[str, Any]:
        """The object of the comparison list."""
        name, backend = self.after.key
        names = {"name": name, **({"backend": backend} if backend else {})}
        return {
            **names,
            "unit": self.after.unit,
            "before": self.before.estimate,
            "after": self.after.estimate,
            **self.change._asdict(),
        }


def folder() -> Path:
    """Where named baselines lie."""
    home = os.environ.get("XDG_DATA_HOME")
    try:
        base = Path(home) if home and Path(home).is_absolute() else Path.home() / ".local" / "share"
    except RuntimeError:
        raise ResultsError("there is no home folder for baselines: set XDG_DATA_HOME, or give a path") from None
    return base / "llm-worker-rbee" / "baselines"


def names() -> list[str]:
    """The baselines there are."""
    return sorted(path.stem for path in folder().glob("*.json")) if folder().is_dir() else []


def path_of(name: str) -> Path:
    """The file of a baseline of this name."""
    if not NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{name!r} cannot name a baseline: use letters, digits, dots, dashes and underscores", "save_baseline"
        )
    return folder() / f"{name}.json"


def save(run: Run, name: str) -> Path:
    """Keep a run under a name; one that is there is replaced."""
    path = path_of(name)
    run.save(path)
    return path


def load(reference: str) -> Run:
    """A baseline by name, or by path where that is what was given."""
    path = Path(reference)
    if "/" in reference or reference.endswith(".json") or path.is_file():
        return Run.load(path)
    named = folder() / f"{reference}.json"
    if not NAME.fullmatch(reference) or not named.exists():
        known = ", ".join(names()) or "none yet: --save-baseline NAME makes one"
        raise ResultsError(f"there is no baseline {reference!r} (baselines: {known})")
    return Run.load(named)


def require_same_machine(before: Run, after: Run, *, force: bool) -> None:
    """Refuse to compare speeds of different machines."""
    if force or before.kind in TIMELESS:
        return
    old, new = before.machine, after.machine
    if old.get("fingerprint") == new.get("fingerprint"):
        return
    differing = [
        f"{key} {old.get(key)!r} then, {new.get(key)!r} now" for key in MACHINE if old.get(key) != new.get(key)
    ]
    raise OtherMachineError(
        f"the baseline was taken on another machine ({'; '.join(differing) or 'fingerprints differ'}): "
        "times cannot be compared; take a new baseline here, or say --force"
    )


def require_same_kind(before: Run, after: Run) -> None:
    """Refuse to compare what different commands measured."""
    if before.kind != after.kind:
        raise ResultsError(f"a run of `{before.kind}` cannot be compared with one of `{after.kind}`")


def compare(before: Run, after: Run, noise: float = statistics.NOISE) -> list[Comparison]:
    """What both runs have, in the order of the later one; by name and backend, or by name alone where that is clear."""
    require_same_kind(before, after)
    by_key = {result.key: result for result in before.results}
    alone = _alone(before) & _alone(after)
    by_name = {result.name: result for result in before.results if result.name in alone}
    made = []
    for result in after.results:
        old = by_key.get(result.key) or by_name.get(result.name)
        if old is not None and old.unit == result.unit:
            made.append(Comparison(old, result, change_of(old, result, noise)))
    if not made:
        raise ResultsError("the two runs have no benchmark in common")
    return made


def change_of(
    before: Result, after: Result, noise: float = statistics.NOISE, *, paired: bool = False
) -> statistics.Change:
    """How one result changed; figures without samples are compared by their intervals."""
    lower = after.better == "lower"
    if before.samples and after.samples:
        rounds = (_rounds(before), _rounds(after))
        return statistics.compare(
            before.samples, after.samples, lower_is_better=lower, noise=noise, rounds=rounds, paired=paired
        )
    change = statistics.change(before.estimate, after.estimate)
    if before.samples or after.samples:
        return statistics.Change(change, float("-inf"), float("inf"), "within noise")
    # intervals without samples: as far apart as their ends may be (a counted figure is both its ends)
    low, high = statistics.change(before.high, after.low), statistics.change(before.low, after.high)
    return statistics.Change(change, low, high, statistics.judge(change, low, high, lower, noise))


def _rounds(result: Result) -> list[int]:
    found = result.fields.get("rounds", [])
    return found if isinstance(found, list) and all(type(n) is int and n > 0 for n in found) else []


def _alone(run: Run) -> set[str]:
    """The names that a run has once."""
    return {name for name, count in Counter(result.name for result in run.results).items() if count == 1}


MISSING = "-"
SHORT = 12  # characters of a hash
DRIFT = 0.05
SPEEDS = {"memory": "B/s", "arithmetic": "FLOP/s"}


class Difference(NamedTuple):
    """One thing, as each of the two runs has it."""

    what: str
    before: str
    after: str


def differences(before: Run, after: Run) -> list[Difference]:
    """Commit, model, machine and its speed, settings and versions where they differ."""
    old, new = _described(before), _described(after)
    pairs = {key: (old.get(key, MISSING), new.get(key, MISSING)) for key in old | new}
    return [Difference(key, *pair) for key, pair in pairs.items() if pair[0] != pair[1]] + drifted(before, after)


def drifted(before: Run, after: Run) -> list[Difference]:
    """How fast the machine itself was, measured in both runs, where that differs by more than the noise."""
    old, new = _speeds(before), _speeds(after)
    found = []
    for what, unit in SPEEDS.items():
        then, now = old.get(what, math.nan), new.get(what, math.nan)
        change = statistics.change(then, now)
        if abs(change) > DRIFT:
            found.append(Difference(f"speed: {what}", quantity(then, unit), f"{quantity(now, unit)} ({change:+.0%})"))
    return found


def _speeds(run: Run) -> dict[str, float]:
    limits = run.details.get("limits")
    if not isinstance(limits, dict):
        return {}
    ladder, rate = limits.get("bandwidth"), limits.get("operations_per_second")
    largest = ladder[-1] if isinstance(ladder, list) and ladder else None
    last = largest.get("bytes_per_second") if isinstance(largest, dict) else None
    pairs = zip(SPEEDS, (last, rate), strict=True)
    return {what: float(found) for what, found in pairs if isinstance(found, (int, float))}


def only_in(one: Run, other: Run, compared: Iterable[Comparison]) -> list[str]:
    """Names of one run's results that were not compared; a unit that the other run does not have is told."""
    used = {id(result) for pair in compared for result in (pair.before, pair.after)}
    units = {result.name: result.unit for result in other.results}
    left = [result for result in one.results if id(result) not in used]
    return [f"{r.name} (in {r.unit})" if units.get(r.name, r.unit) != r.unit else r.name for r in left]


def commit_name(run: Run) -> str:
    """The start of the commit's id, and whether files differed from it."""
    commit = run.commit or {}
    return f"{str(commit.get('id') or MISSING)[:SHORT]}{' + changes' if commit.get('dirty') else ''}"


def model_name(run: Run) -> str:
    """The model's name; empty for a run without one."""
    return str((run.model or {}).get("name") or "")


def _described(run: Run) -> dict[str, str]:
    digest = str((run.model or {}).get("sha256") or "")[:SHORT]
    return {
        "commit": commit_name(run),
        "model": (model_name(run) or MISSING) + (f" ({digest})" if digest else ""),
        **{f"machine: {key}": _shown(run.machine.get(key)) for key in (*MACHINE, "threads")},
        **{f"setting: {key}": _shown(value) for key, value in run.settings.items()},
        **{f"version: {key}": _shown(value) for key, value in run.versions.items()},
        "complete": "yes" if run.complete else "no, broken off",
    }


def _shown(value: Any) -> str:
    return MISSING if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
