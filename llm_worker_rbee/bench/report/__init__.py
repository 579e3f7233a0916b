"""One HTML page from saved runs: what was measured, where, how it compares, how it changed over time.

Of each group of runs the latest is shown in full, the earlier ones as its history.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from ..baseline import SPEED_UNITS, commit_name, machine_speeds, model_name
from ..format import digits, percent
from ..results import Result, Run
from . import result_names
from .charts import ChartRenderer
from .history import TITLES, RunFile, RunGroup, commit_time, compare_section, group_runs, history_section
from .html import Html, Section, Table, Tile, facts, folded, heading, joined, notice, page, soft, table, tiles
from .sections import OWN_NAME, format_interval, format_value, group_by_test, render_run

Progress = Callable[[str, float, float], None]
MAX_SETTING_CHARACTERS = 400


def render(files: Sequence[RunFile], title: str | None, progress: Progress) -> str:
    """Return the page."""
    progress("preparing to draw", 0, 1)
    renderer, groups = ChartRenderer(), group_runs(files)
    sections = [_summary(groups)]
    for index, group in enumerate(groups):
        progress(group.title, index, len(groups))
        sections.append(Section(group.title, _group_body(group, renderer)))
    sections += _compare_across(groups)
    runs = [one.run for one in sorted(files, key=lambda one: commit_time(one.run))]
    kinds = list(dict.fromkeys(TITLES.get(group.latest.kind, group.latest.kind) for group in groups))
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


def _summary(groups: Sequence[RunGroup]) -> Section:
    """Key cells of all subjects, the machine, and the list of runs."""
    parts: list[object] = []
    for group in groups:
        parts += [heading(group.title)] if len(groups) > 1 else []
        parts.append(tiles(key_tiles(group.latest)))
    machines = {str(s.latest.machine.get("fingerprint")): s.latest.machine for s in groups}
    parts += [heading("Machine" if len(machines) == 1 else "Machines"), *map(_machine_facts, machines.values())]
    head = ["file", "kind", "model", "taken (UTC)", "commit", "results", "took", "complete"]
    rows = [_run_row(one) for group in groups for one in group.files]
    if not any(row[2] for row in rows):
        head, rows = head[:2] + head[3:], [row[:2] + row[3:] for row in rows]
    numbers = [head.index(name) for name in ("results", "took")]
    runs = table(Table("the runs on this page", head, rows, numbers))
    return Section("Summary", joined([*parts, heading("Runs"), runs]))


def _run_row(file: RunFile) -> list[object]:
    run = file.run
    taken = run.created.replace("T", " ")[:16]
    cells = [str(len(run.results)), format_value(run.elapsed_s, "s"), "yes" if run.complete else "no: broken off"]
    return [file.name, run.kind, model_name(run), taken, commit_name(run), *cells]


def _machine_facts(machine: Mapping[str, Any]) -> Html:
    known = {
        "processor": machine.get("cpu"), "cores": machine.get("cores"), "cores' worth of time": machine.get("quota"),
        "memory": None if machine.get("memory_gib") is None else f"{machine['memory_gib']} GiB",
        "instruction sets": _join_list(machine.get("features")), "GPU": _join_list(machine.get("gpus")),
        "system": machine.get("system"),
    }  # fmt: skip
    return facts({key: value for key, value in known.items() if value not in (None, "")})


def _join_list(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else ""


def _group_body(group: RunGroup, renderer: ChartRenderer) -> Html:
    run = group.latest
    origin = [model_name(run), commit_name(run), f"{run.created.replace('T', ' ')[:16]} UTC", group.files[-1].name]
    parts = [soft(" · ".join(filter(None, origin)))]
    if not run.complete:
        parts.append(notice("This run was broken off: it holds what was measured until then."))
    if len(group.files) > 1:
        parts.append(compare_section(group.files[0], group.files[-1]))
    parts += [
        render_run(run, renderer),
        history_section(group, renderer),
        folded("Settings and versions", _raw_settings(run)),
    ]
    return joined([part for part in parts if part])


def _raw_settings(run: Run) -> Html:
    groups = {"setting": run.settings, "version": run.versions, "model": run.model or {}, "machine": run.machine}
    found = {
        f"{group}: {key}": _setting_text(value) for group, values in groups.items() for key, value in values.items()
    }
    return facts({"commit": (run.commit or {}).get("id") or "-", **found})


def _setting_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SETTING_CHARACTERS else text[:MAX_SETTING_CHARACTERS] + "…"


def _compare_across(groups: Sequence[RunGroup]) -> list[Section]:
    """Compare two runs of one kind that differ in model or machine."""
    made = []
    for kind in dict.fromkeys(group.latest.kind for group in groups):
        alike = [group for group in groups if group.latest.kind == kind]
        if len(alike) == 2 and all(len(group.files) == 1 for group in alike):
            body = compare_section(alike[0].files[0], alike[1].files[0])
            made.append(Section(f"{TITLES.get(kind, kind)} compared", body))
    return made


MAX_PEER_TILES = 8
# Of each kind, the names to look for, in this order; the first match of each is shown.
KEY_RESULTS: dict[str, Sequence[str]] = {
    "e2e": (r"pp\d+.*", r"tg\d+.*", r"ttft.*", r"peak_memory.*"),
    "load": (r"total/cold", r"total/warm", r"import", r"memory/peak"),
    "serving": (r"request_throughput", r"output_throughput", r"ttft/median", r"errors"),
    "accuracy": (r"ppl_ratio", r"mean_abs_dlogprob", r"kl", r"top1"),
    "profile": (r"prefill/step", r"decode/step"),
}


def key_tiles(run: Run) -> list[Tile]:
    """Return the few numbers of a run that come first."""
    found = [_result_tile(r) for pattern in KEY_RESULTS.get(run.kind, ()) for r in _first_match(run, pattern)]
    found += TILES[run.kind](run) if run.kind in TILES else []
    return found or [Tile("results", str(len(run.results)))]


def _first_match(run: Run, pattern: str) -> list[Result]:
    return [r for r in run.results if re.fullmatch(pattern, r.name)][:1]


def _result_tile(result: Result) -> Tile:
    share = result_names.number(result, "percent_of_limit")
    more = [format_interval(result), "" if share is None else f"{percent(share)} of the limit"]
    return Tile(result.name, format_value(result.estimate, result.unit), " · ".join(filter(None, more)))


def _micro_tiles(run: Run) -> list[Tile]:
    known = [(p, r) for r in run.results if (p := result_names.number(r, "percent_of_limit")) is not None]
    families = {result_names.family(r.name) for r in run.results}
    made = [Tile("benchmarks", str(len(run.results)), f"in {len(families)} families")]
    if known:
        best, worst = max(known, key=lambda one: one[0]), min(known, key=lambda one: one[0])
        made.append(Tile("median of the limit", percent(median(p for p, _ in known)), "of what the machine can do"))
        made.append(Tile("nearest to the limit", percent(best[0]), best[1].name))
        made.append(Tile("furthest from it", percent(worst[0]), worst[1].name))
    speeds = machine_speeds(run)
    for what, name in (("arithmetic", "arithmetic"), ("memory", "memory bandwidth")):
        if what in speeds:
            made.append(Tile(name, format_value(speeds[what], SPEED_UNITS[what]), "measured ceiling"))
    return made


def _experiment_tiles(run: Run) -> list[Tile]:
    found = run.details.get("verdicts")
    known = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    verdicts = Counter(str(one.get("verdict")) for one in known)
    return [Tile("claims", str(count), verdict) for verdict, count in verdicts.items()]


def _peer_tiles(run: Run) -> list[Tile]:
    """Show the ratio to each peer, test by test."""
    made = []
    for test, peers in group_by_test(run).items():
        ours = peers.get(OWN_NAME)
        for peer, r in peers.items():
            if ours is not None and peer != OWN_NAME and result_names.is_positive(r):
                values = f"{format_value(ours.estimate, ours.unit)} against {format_value(r.estimate, r.unit)}"
                made.append(Tile(f"{test}: ours / {peer}", f"{digits(ours.estimate / r.estimate)}×", values))
    return made[:MAX_PEER_TILES]


def _profile_tiles(run: Run) -> list[Tile]:
    """Show the largest component of each phase."""
    made = {}
    for r in sorted(run.results, key=lambda r: result_names.number(r, "share") or 0.0):
        phase, share = result_names.family(r.name), result_names.number(r, "share")
        if share is not None:
            made[phase] = Tile(f"largest part of {phase}", r.name.split("/")[-1], f"{share:.1%}")
    return list(made.values())


TILES = {"micro": _micro_tiles, "experiments": _experiment_tiles, "peers": _peer_tiles, "profile": _profile_tiles}
