"""One HTML page from saved runs: measurements, machines, comparisons, history.

Runs are grouped by kind, model and machine. The latest run of each group is shown in full, earlier runs as its history.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from llm_worker_rbee.progress import StepProgress

from .. import baseline
from ..baseline import SPEED_UNITS, Comparison, commit_name, machine_speeds, model_name
from ..results import Result, ResultsError, Run, digits, percent
from . import charts, sections
from .charts import ChartRenderer, Line
from .html import Html, Section, Tile, facts, folded, heading, joined, notice, page, soft, table, tiles
from .sections import family, format_value, number

MAX_SETTING_CHARACTERS = 400
MAX_SHOWN_CHANGES = 20  # more are folded
MAX_PEER_TILES = 8
# Of each kind, the names to look for, in this order; the first match of each is shown.
KEY_RESULTS: dict[str, Sequence[str]] = {
    "e2e": (r"pp\d+.*", r"tg\d+.*", r"ttft.*", r"peak_memory.*"),
    "load": (r"total/cold", r"total/warm", r"import", r"memory/peak"),
    "kv": (r"first_token/kv_dir", r"first_token/ratio", r"decode.*/ratio", r"pause/ratio"),
    "serving": (r"request_throughput", r"output_throughput", r"ttft/median", r"errors"),
    "accuracy": (r"ppl_ratio", r"mean_abs_dlogprob", r"kl", r"top1", r"cosine/mean", r"cosine/min", r"ndcg@10", r"mrr"),
    "profile": (r"prefill/step", r"decode/step"),
}
VERDICT_ORDER = {"regressed": 0, "improved": 1, "within noise": 2}
TITLES = {
    "micro": "Micro-benchmarks",
    "e2e": "End to end",
    "load": "Loading a model",
    "kv": "Keys and values on disk",
    "models": "Several models on one port",
    "lora": "LoRA adapters",
    "batch": "Batches",
    "images": "Images",
    "serving": "Serving",
    "peers": "Beside its peers",
    "accuracy": "Accuracy",
    "profile": "Where the time goes",
    "experiments": "Experiments",
    "embed": "Embeddings",
}


class RunFile(NamedTuple):
    """A run, and the name of its file."""

    name: str
    run: Run


class RunGroup(NamedTuple):
    """Runs of one kind, model and machine, oldest first."""

    title: str
    files: tuple[RunFile, ...]

    @property
    def latest(self) -> Run:
        return self.files[-1].run


def group_runs(files: Sequence[RunFile]) -> list[RunGroup]:
    """Group runs by kind, model and machine, kinds in the order of the documentation."""
    groups: dict[tuple[str, str, str], list[RunFile]] = {}
    for file in sorted(files, key=lambda file: commit_time(file.run)):
        run = file.run
        model = str((run.model or {}).get("sha256") or model_name(run))
        groups.setdefault((run.kind, model, str(run.machine.get("fingerprint"))), []).append(file)
    kinds = list(TITLES)
    ordered = sorted(groups.items(), key=lambda item: kinds.index(item[0][0]) if item[0][0] in kinds else len(kinds))
    alike = {kind: [key for key in groups if key[0] == kind] for kind, *_ in groups}
    return [RunGroup(_group_title(parts[-1].run, alike[kind]), tuple(parts)) for (kind, *_), parts in ordered]


def _group_title(run: Run, alike: Sequence[tuple[str, str, str]]) -> str:
    """Return the kind, and the name that distinguishes the group within it."""
    title = TITLES.get(run.kind, run.kind)
    several_models, several_machines = (len({key[i] for key in alike}) > 1 for i in (1, 2))
    parts = [model_name(run) if several_models else "", str(run.machine.get("cpu") or "") if several_machines else ""]
    return ": ".join(filter(None, [title, ", ".join(filter(None, parts))]))


def commit_time(run: Run) -> tuple[float, str]:
    """Return the commit's date, or else when the run took place."""
    for text in ((run.commit or {}).get("date"), run.created):
        try:
            time = datetime.fromisoformat(str(text))
            return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp(), run.created
        except ValueError:
            continue
    return math.inf, run.created


def render(files: Sequence[RunFile], title: str | None, progress: StepProgress) -> str:
    """Return the page."""
    progress("preparing to draw", 0, 1)
    renderer, groups = ChartRenderer(), group_runs(files)
    parts = [_summary(groups)]
    for index, group in enumerate(groups):
        progress(group.title, index, len(groups))
        parts.append(Section(group.title, _group_body(group, renderer)))
    parts += _compare_across(groups)
    runs = [file.run for file in sorted(files, key=lambda file: commit_time(file.run))]
    kinds = list(dict.fromkeys(TITLES.get(group.latest.kind, group.latest.kind) for group in groups))
    measured = ", ".join(kinds) if len(kinds) < 4 else "benchmarks"
    version = runs[-1].versions.get("llm-worker-rbee", "")
    footer = f"Made by llm-worker-rbee {version} bench report. Intervals of estimates hold 95%, those of changes 99%."
    return page(title or f"llm-worker-rbee: {measured}", _subtitle(runs), parts, footer)


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
        parts += [heading(group.title) if len(groups) > 1 else "", tiles(key_tiles(group.latest))]
    machines = {str(s.latest.machine.get("fingerprint")): s.latest.machine for s in groups}
    parts += [heading("Machine" if len(machines) == 1 else "Machines"), *map(_machine_facts, machines.values())]
    head = ["file", "kind", "model", "taken (UTC)", "commit", "results", "took", "complete"]
    rows = []
    for name, run in (file for group in groups for file in group.files):
        cells = [str(len(run.results)), format_value(run.elapsed_s, "s"), "yes" if run.complete else "no: broken off"]
        rows.append([name, run.kind, model_name(run), _minute(run), commit_name(run), *cells])
    if not any(row[2] for row in rows):
        head, rows = head[:2] + head[3:], [row[:2] + row[3:] for row in rows]
    numbers = [head.index(name) for name in ("results", "took")]
    return Section("Summary", joined([*parts, heading("Runs"), table("the runs on this page", head, rows, numbers)]))


def _minute(run: Run) -> str:
    return run.created.replace("T", " ")[:16]


def _machine_facts(machine: Mapping[str, Any]) -> Html:
    listed = {key: machine.get(key) for key in ("features", "gpus")}
    features, gpus = (", ".join(map(str, items)) if isinstance(items, list) else "" for items in listed.values())
    rows = {
        "processor": machine.get("cpu"),
        "cores": machine.get("cores"),
        "cores' worth of time": machine.get("quota"),
        "memory": None if machine.get("memory_gib") is None else f"{machine['memory_gib']} GiB",
        "instruction sets": features,
        "GPU": gpus,
        "system": machine.get("system"),
    }
    return facts({key: value for key, value in rows.items() if value not in (None, "")})


def _group_body(group: RunGroup, renderer: ChartRenderer) -> Html:
    run = group.latest
    origin = [model_name(run), commit_name(run), f"{_minute(run)} UTC", group.files[-1].name]
    parts = [soft(" · ".join(filter(None, origin)))]
    if not run.complete:
        parts.append(notice("This run was broken off: it holds what was measured until then."))
    if len(group.files) > 1:
        parts.append(compare_section(group.files[0], group.files[-1]))
    settings = folded("Settings and versions", _raw_settings(run))
    return joined([*parts, sections.render_run(run, renderer), history_section(group, renderer), settings])


def _raw_settings(run: Run) -> Html:
    groups = {"setting": run.settings, "version": run.versions, "model": run.model or {}, "machine": run.machine}
    rows = {"commit": (run.commit or {}).get("id") or "-"}
    for group, values in groups.items():
        for key, value in values.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            rows[f"{group}: {key}"] = text[:MAX_SETTING_CHARACTERS] + "…" * (len(text) > MAX_SETTING_CHARACTERS)
    return facts(rows)


def _compare_across(groups: Sequence[RunGroup]) -> list[Section]:
    """Compare two runs of one kind that differ in model or machine."""
    blocks = []
    for kind in dict.fromkeys(group.latest.kind for group in groups):
        alike = [group for group in groups if group.latest.kind == kind]
        if len(alike) == 2 and all(len(group.files) == 1 for group in alike):
            body = compare_section(alike[0].files[0], alike[1].files[0])
            blocks.append(Section(f"{TITLES.get(kind, kind)} compared", body))
    return blocks


def compare_section(before: RunFile, after: RunFile) -> Html:
    """Show what changed from one run to another: clear changes at once, the others folded."""
    try:
        changes = baseline.compare(before.run, after.run)
    except ResultsError as error:
        return notice(f"{before.name} and {after.name} cannot be compared: {error}")
    changes.sort(key=lambda item: (VERDICT_ORDER[item.change.verdict], -abs(item.change.change)))
    clear = [item for item in changes if item.change.verdict != "within noise"]
    noise = changes[len(clear) :]
    summary = f"{before.name} compared with {after.name}: " + ", ".join(
        f"{sum(item.change.verdict == verdict for item in changes)} {verdict}" for verdict in VERDICT_ORDER
    )
    parts: list[object] = [heading("What changed"), notice(summary) if clear else facts({"result": summary})]
    other_machine = before.run.machine.get("fingerprint") != after.run.machine.get("fingerprint")
    if other_machine and after.run.kind not in baseline.SPEED_INDEPENDENT_KINDS:
        parts.append(notice("The two runs were taken on different machines: their times cannot be compared as such."))
    parts.append(_change_table(clear[:MAX_SHOWN_CHANGES], "clear changes") if clear else "")
    if hidden := clear[MAX_SHOWN_CHANGES:]:
        parts.append(folded(f"{len(hidden)} more clear changes", _change_table(hidden, "more clear changes")))
    parts.append(folded(f"{len(noise)} within noise", _change_table(noise, "within noise")) if noise else "")
    if differing := baseline.find_differences(before.run, after.run):
        other = table("settings, versions, machine", ["", "before", "after"], differing)
        parts.append(folded("What else differs", other))
    skipped = {
        f"only in {item.name}": ", ".join(baseline.names_not_compared(item.run, other.run, changes))
        for item, other in ((before, after), (after, before))
    }
    return joined([*parts, facts({key: value for key, value in skipped.items() if value})])


def _change_table(changes: Sequence[Comparison], caption: str) -> Html:
    backends = sections.has_several_backends([item.after for item in changes])
    named = [{**item.as_json(), "name": item.after.label if backends else item.after.name} for item in changes]
    return sections.change_table(named, caption, ("before", "after"))


def history_section(group: RunGroup, renderer: ChartRenderer) -> Html:
    """Draw each result over the runs, by family."""
    runs = [file.run for file in group.files]
    if len(runs) < 2:
        return Html()
    labels = _run_labels(runs)
    lines: dict[tuple[str, str], dict[str, list[tuple[float, Result]]]] = {}
    backends = sections.has_several_backends(runs[-1].results)
    for place, run in enumerate(runs):
        for r in filter(sections.is_positive, run.results):
            series = lines.setdefault((family(r.name), r.better), {})
            series.setdefault(r.label if backends else r.name, []).append((place, r))
    figures = []
    for (group_name, better), named in lines.items():
        title = f"{group_name} ({better} is better)"
        kept = [Line(name.removeprefix(f"{group_name}/"), points) for name, points in named.items() if len(points) > 1]
        for start in range(0, len(kept), sections.MAX_SERIES):
            shown = kept[start : start + sections.MAX_SERIES]
            figures.append(partial(charts.draw_history, renderer, title, labels, shown))
    text = "Estimates as percent of the first run's, in the order of the commits; the shade is the 95% interval."
    return sections.chart_gallery("History", text, figures)


def _run_labels(runs: Sequence[Run]) -> list[str]:
    """Return the label of each run on an axis: its commit, numbered where several runs share it, or its day."""
    names = [commit_name(run)[:7] if run.commit else run.created[:10] for run in runs]
    return [f"{name} #{names[: i + 1].count(name)}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def key_tiles(run: Run) -> list[Tile]:
    """Return the few numbers of a run that come first."""
    patterns = KEY_RESULTS.get(run.kind, ())
    matches = (next((r for r in run.results if re.fullmatch(pattern, r.name)), None) for pattern in patterns)
    shown = [_result_tile(result) for result in matches if result is not None]
    shown += TILES[run.kind](run) if run.kind in TILES else []
    return shown or [Tile("results", str(len(run.results)))]


def _result_tile(result: Result) -> Tile:
    share = number(result, "percent_of_limit")
    notes = [sections.format_interval(result), "" if share is None else f"{percent(share)} of the limit"]
    return Tile(result.name, format_value(result.estimate, result.unit), " · ".join(filter(None, notes)))


def _micro_tiles(run: Run) -> list[Tile]:
    pairs = [(p, r) for r in run.results if (p := number(r, "percent_of_limit")) is not None]
    families = {family(r.name) for r in run.results}
    out = [Tile("benchmarks", str(len(run.results)), f"in {len(families)} families")]
    if pairs:
        out.append(Tile("median of the limit", percent(median(p for p, _ in pairs)), "of what the machine can do"))
        for name, pick in (("nearest to the limit", max), ("furthest from it", min)):
            share, result = pick(pairs, key=lambda pair: pair[0])
            out.append(Tile(name, percent(share), result.name))
    speeds = machine_speeds(run)
    for what, name in (("arithmetic", "arithmetic"), ("memory", "memory bandwidth")):
        if what in speeds:
            out.append(Tile(name, format_value(speeds[what], SPEED_UNITS[what]), "measured ceiling"))
    return out


def _experiment_tiles(run: Run) -> list[Tile]:
    listed = sections.detail(run, "verdicts", list)
    verdicts = Counter(str(item.get("verdict")) for item in listed if isinstance(item, dict))
    return [Tile("claims", str(count), verdict) for verdict, count in verdicts.items()]


def _peer_tiles(run: Run) -> list[Tile]:
    out = []
    for test, peers in sections.group_by_test(run).items():
        ours = peers.get(sections.OWN_NAME)
        for peer, r in peers.items():
            if ours is not None and peer != sections.OWN_NAME and sections.is_positive(r):
                values = f"{format_value(ours.estimate, ours.unit)} against {format_value(r.estimate, r.unit)}"
                out.append(Tile(f"{test}: ours / {peer}", f"{digits(ours.estimate / r.estimate)}×", values))
    return out[:MAX_PEER_TILES]


def _profile_tiles(run: Run) -> list[Tile]:
    out = {}
    for r in sorted(run.results, key=lambda r: number(r, "share") or 0.0):
        phase, share = family(r.name), number(r, "share")
        if share is not None:
            out[phase] = Tile(f"largest part of {phase}", r.name.split("/")[-1], f"{share:.1%}")
    return list(out.values())


TILES = {
    "micro": _micro_tiles,
    "experiments": _experiment_tiles,
    "peers": _peer_tiles,
    "embed": _peer_tiles,
    "profile": _profile_tiles,
}
