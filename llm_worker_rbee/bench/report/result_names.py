"""Parsing of result names into families, lengths and categories: `family/kind/length` or `pp512@d2048@b8`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..results import Result

END_TO_END = re.compile(r"(pp|tg|ttft)([0-9]{1,9})(?:@d([0-9]{1,9}))?(?:@b([0-9]{1,9}))?")
PHASE_NAMES = {"pp": "prefill", "tg": "decode", "ttft": "time to first token"}
MIN_CATEGORIES = 4  # for a chart by category


class Axis(NamedTuple):
    """A chart: what is measured, against what."""

    title: str
    across: str
    unit: str


def family(name: str) -> str:
    """Return the first part of a name; of end-to-end names the phase."""
    found = END_TO_END.fullmatch(name.split("/")[0])
    return PHASE_NAMES[found[1]] if found else name.split("/")[0]


def number(result: Result, key: str) -> float | None:
    """Return a field if it is a finite number."""
    value: Any = result.fields.get(key)
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else None


def label(result: Result, *, backends: bool) -> str:
    """Return the name, with its backend where a run has several."""
    backend = result.fields.get("backend")
    return f"{result.name} [{backend}]" if backends and backend else result.name


def has_several_backends(results: Iterable[Result]) -> bool:
    """Return whether labels must name the backend."""
    return len({result.fields.get("backend") for result in results} - {None}) > 1


def is_positive(result: Result) -> bool:
    """Return whether a result fits on a logarithmic axis."""
    return all(math.isfinite(x) and x > 0 for x in (result.estimate, result.low, result.high))


def by_length(results: Sequence[Result]) -> dict[Axis, dict[str, list[tuple[int, Result]]]]:
    """Group results by chart and series against a length; series with a single length are left out."""
    found: dict[Axis, dict[str, dict[int, Result]]] = {}
    backends = has_several_backends(results)
    for result in filter(is_positive, results):
        for axis, series, x in _chart_positions(result):
            name = " ".join(filter(None, (series, str(result.fields.get("backend") or "") if backends else "")))
            found.setdefault(axis, {}).setdefault(name or "measured", {})[x] = result
    kept = {
        axis: {s: sorted(p.items(), key=lambda pair: pair[0]) for s, p in lines.items() if len(p) > 1}
        for axis, lines in found.items()
    }
    return {axis: lines for axis, lines in kept.items() if lines}


def _chart_positions(result: Result) -> Iterable[tuple[Axis, str, int]]:
    parts = result.name.split("/")
    if found := END_TO_END.fullmatch(parts[0]):
        yield from _end_to_end_positions(result, parts[1:], found)
    elif len(parts) > 1 and parts[-1].isascii() and parts[-1].isdigit() and len(parts[-1]) < 10:
        yield Axis(parts[0], "length", result.unit), "/".join(parts[1:-1]), int(parts[-1])


def _end_to_end_positions(result: Result, rest: list[str], found: re.Match[str]) -> Iterable[tuple[Axis, str, int]]:
    what, tokens, depth, batch = PHASE_NAMES[found[1]], int(found[2]), int(found[3] or 0), int(found[4] or 1)
    sizes: dict[str, Any] = {"tokens": tokens, "depth": depth, "batch": batch}
    for across, x in sizes.items():
        others = [
            f"{key} {value}"
            for key, value in sizes.items()
            if key != across and value != {"depth": 0, "batch": 1}.get(key)
        ]
        yield Axis(f"{what} over {across}", across, result.unit), ", ".join([*rest, *others]), x


def by_category(results: Sequence[Result]) -> dict[Axis, dict[str, list[tuple[str, Result]]]]:
    """Group families whose second part is a category (a block type, a method): series -> (category, result)."""
    found: dict[Axis, dict[str, list[tuple[str, Result]]]] = {}
    backends = has_several_backends(results)
    for result in filter(is_positive, results):
        parts = result.name.split("/")
        if len(parts) < 2 or parts[1].isdigit():
            continue
        series = [f"length {parts[2]}" if parts[2].isdigit() else parts[2]] if len(parts) > 2 else []
        series += [str(result.fields.get("backend") or "")] if backends else []
        lines = found.setdefault(Axis(parts[0], "", result.unit), {})
        lines.setdefault(" ".join(series), []).append((parts[1], result))
    return {axis: lines for axis, lines in found.items() if max(map(len, lines.values())) >= MIN_CATEGORIES}
