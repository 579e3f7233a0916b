"""The few figures of a run that one would say first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from statistics import median

from ..format import digits, percent
from ..results import Result, Run
from . import result_names
from .html import Tile
from .sections import OURS, interval, readable

MOST = 4
# Of each kind, the names to look for, in this order; each takes the first that is there.
KEYS: dict[str, Sequence[str]] = {
    "e2e": (r"pp\d+.*", r"tg\d+.*", r"ttft.*", r"peak_memory.*"),
    "load": (r"total/cold", r"total/warm", r"import", r"memory/peak"),
    "serving": (r"request_throughput", r"output_throughput", r"ttft/median", r"errors"),
    "accuracy": (r"ppl_ratio", r"mean_abs_dlogprob", r"kl", r"top1"),
    "profile": (r"prefill/step", r"decode/step"),
}


def key_figures(run: Run) -> list[Tile]:
    """At most a handful of tiles."""
    found = [_tile(r) for pattern in KEYS.get(run.kind, ()) for r in _first(run, pattern)]
    found += {"micro": _micro, "experiments": _experiments, "peers": _peers, "profile": _profile}.get(run.kind, _none)(
        run
    )
    return found or [Tile("results", str(len(run.results)))]


def _first(run: Run, pattern: str) -> list[Result]:
    return [r for r in run.results if re.fullmatch(pattern, r.name)][:1]


def _tile(result: Result) -> Tile:
    share = result_names.number(result, "percent_of_limit")
    more = [interval(result), "" if share is None else f"{percent(share)} of the limit"]
    return Tile(result.name, readable(result.estimate, result.unit), " · ".join(filter(None, more)))


def _none(run: Run) -> list[Tile]:
    return []


def _micro(run: Run) -> list[Tile]:
    known = [(p, r) for r in run.results if (p := result_names.number(r, "percent_of_limit")) is not None]
    made = [
        Tile(
            "benchmarks",
            str(len(run.results)),
            f"in {len({result_names.family(r.name) for r in run.results})} families",
        )
    ]
    if known:
        best, worst = max(known, key=lambda one: one[0]), min(known, key=lambda one: one[0])
        made.append(Tile("median of the limit", percent(median(p for p, _ in known)), "of what the machine can do"))
        made.append(Tile("nearest to the limit", percent(best[0]), best[1].name))
        made.append(Tile("furthest from it", percent(worst[0]), worst[1].name))
    limits = run.details.get("limits")
    if isinstance(limits, dict) and type(limits.get("operations_per_second")) in (int, float):
        made.append(Tile("arithmetic", readable(limits["operations_per_second"], "FLOP/s"), "measured ceiling"))
        ladder = limits.get("bandwidth")
        last = ladder[-1] if isinstance(ladder, list) and ladder else None
        if isinstance(last, dict) and type(last.get("bytes_per_second")) in (int, float):
            made.append(Tile("memory bandwidth", readable(last["bytes_per_second"], "B/s"), "measured ceiling"))
    return made


def _experiments(run: Run) -> list[Tile]:
    found = run.details.get("verdicts")
    verdicts = (
        Counter(str(one.get("verdict")) for one in found if isinstance(one, dict)) if isinstance(found, list) else {}
    )
    return [Tile("claims", str(count), verdict) for verdict, count in verdicts.items()]


def _peers(run: Run) -> list[Tile]:
    """How ours stands to each peer, test by test."""
    by_test: dict[str, dict[str, Result]] = {}
    for r in run.results:
        test, _, peer = r.name.partition("/")
        by_test.setdefault(test, {})[peer or OURS] = r
    made = []
    for test, peers in by_test.items():
        ours = peers.get(OURS)
        for peer, r in peers.items():
            if ours is not None and peer != OURS and result_names.measurable(r):
                values = f"{readable(ours.estimate, ours.unit)} against {readable(r.estimate, r.unit)}"
                made.append(Tile(f"{test}: ours / {peer}", f"{digits(ours.estimate / r.estimate)}×", values))
    return made[: 2 * MOST]


def _profile(run: Run) -> list[Tile]:
    """The largest part of each phase."""
    made = {}
    for r in sorted(run.results, key=lambda r: result_names.number(r, "share") or 0.0):
        share = result_names.number(r, "share")
        if share is not None:
            made[result_names.family(r.name)] = Tile(
                f"largest part of {result_names.family(r.name)}", r.name.split("/")[-1], f"{share:.1%}"
            )
    return list(made.values())
