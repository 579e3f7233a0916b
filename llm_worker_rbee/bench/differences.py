"""What two runs do not share beside their figures: what one must know to judge a comparison of them.

Figures themselves are compared in baseline.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from . import statistics
from .baseline import MACHINE, Comparison
from .format import quantity
from .results import Run

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
