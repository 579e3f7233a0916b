"""One HTML page from saved runs: what was measured, where, how it compares, how it went over time.

Of each subject (history.py) the latest run is shown in full, the earlier ones as its history.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from ..baseline import commit_name, model_name
from ..format import digits, percent
from ..results import Result, Run
from . import result_names
from .charts import Plots
from .history import TITLES, Given, Subject, comparison, history, moment, subjects
from .html import Html, Section, Table, Tile, facts, folded, heading, joined, notice, page, soft, table, tiles
from .sections import OURS, interval, readable, show

Steps = Callable[[str, float, float], None]
LONGEST_VALUE = 400  # characters of a setting


def write(given: Sequence[Given], title: str | None, steps: Steps) -> str:
    """The page."""
    steps("preparing to draw", 0, 1)
    plots, found = Plots(), subjects(given)
    sections = [_summary(found)]
    for number, subject in enumerate(found):
        steps(subject.title, number, len(found))
        sections.append(Section(subject.title, _body(subject, plots)))
    sections += _across(found)
    runs = [one.run for one in sorted(given, key=lambda one: moment(one.run))]
    kinds = list(dict.fromkeys(TITLES.get(subject.latest.kind, subject.latest.kind) for subject in found))
    measured = ", ".join(kinds) if len(kinds) < 4 else "benchmarks"
    version = runs[-1].versions.get("llm-worker-rbee", "")
    footer = f"Made by llm-worker-rbee {version} bench report. Intervals of estimates hold 95%, those of changes 99%."
    return page(title or f"llm-worker-rbee: {measured}", _subtitle(runs), sections, footer)


def _subtitle(runs: Sequence[Run]) -> str:
    cpus = dict.fromkeys(str(run.machine.get("cpu") or "an unnamed processor") for run in runs)
    commits = dict.fromkeys(commit_name(run) for run in runs if run.commit)
    days = sorted({run.created[:10] for run in runs})
    parts = [
        f"{len(runs)} run{'s' * (len(runs) != 1)} on {', '.join(cpus)}",
        f"commit {next(iter(commits))}" if len(commits) == 1 else f"{len(commits)} commits" if commits else "",
        days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}",
    ]
    return " · ".join(filter(None, parts))


def _summary(found: Sequence[Subject]) -> Section:
    """Key figures of all subjects, the machine, and the list of runs."""
    parts: list[object] = []
    for subject in found:
        parts += [heading(subject.title)] if len(found) > 1 else []
        parts.append(tiles(key_figures(subject.latest)))
    machines = {str(s.latest.machine.get("fingerprint")): s.latest.machine for s in found}
    parts += [heading("Machine" if len(machines) == 1 else "Machines"), *map(_machine, machines.values())]
    head = ["file", "kind", "model", "taken (UTC)", "commit", "results", "took", "complete"]
    rows = [_row(one) for subject in found for one in subject.given]
    if not any(row[2] for row in rows):
        head, rows = head[:2] + head[3:], [row[:2] + row[3:] for row in rows]
    numbers = [head.index(name) for name in ("results", "took")]
    runs = table(Table("the runs on this page", head, rows, numbers))
    return Section("Summary", joined([*parts, heading("Runs"), runs]))


def _row(given: Given) -> list[object]:
    run = given.run
    taken = run.created.replace("T", " ")[:16]
    figures = [str(len(run.results)), readable(run.elapsed_s, "s"), "yes" if run.complete else "no: broken off"]
    return [given.name, run.kind, model_name(run), taken, commit_name(run), *figures]


def _machine(machine: Mapping[str, Any]) -> Html:
    known = {
        "processor": machine.get("cpu"), "cores": machine.get("cores"), "cores' worth of time": machine.get("quota"),
        "memory": None if machine.get("memory_gib") is None else f"{machine['memory_gib']} GiB",
        "instruction sets": _listed(machine.get("features")), "GPU": _listed(machine.get("gpus")),
        "system": machine.get("system"),
    }  # fmt: skip
    return facts({key: value for key, value in known.items() if value not in (None, "")})


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else ""


def _body(subject: Subject, plots: Plots) -> Html:
    run = subject.latest
    told = [model_name(run), commit_name(run), f"{run.created.replace('T', ' ')[:16]} UTC", subject.given[-1].name]
    parts = [soft(" · ".join(filter(None, told)))]
    if not run.complete:
        parts.append(notice("This run was broken off: it holds what was measured until then."))
    if len(subject.given) > 1:
        parts.append(comparison(subject.given[0], subject.given[-1]))
    parts += [show(run, plots), history(subject, plots), folded("Settings and versions", _raw(run))]
    return joined([part for part in parts if part])


def _raw(run: Run) -> Html:
    groups = {"setting": run.settings, "version": run.versions, "model": run.model or {}, "machine": run.machine}
    found = {f"{group}: {key}": _plain(value) for group, values in groups.items() for key, value in values.items()}
    return facts({"commit": (run.commit or {}).get("id") or "-", **found})


def _plain(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "…"


def _across(found: Sequence[Subject]) -> list[Section]:
    """Two runs of one kind that differ in model or machine are compared too: the reader gave both."""
    made = []
    for kind in dict.fromkeys(subject.latest.kind for subject in found):
        alike = [subject for subject in found if subject.latest.kind == kind]
        if len(alike) == 2 and all(len(subject.given) == 1 for subject in alike):
            body = comparison(alike[0].given[0], alike[1].given[0])
            made.append(Section(f"{TITLES.get(kind, kind)} compared", body))
    return made


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
