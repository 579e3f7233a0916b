"""Groups of runs of one kind, model and machine: what changed between two runs, and each result over all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from .. import baseline
from ..baseline import Comparison, commit_name, find_differences, model_name, names_not_compared
from ..results import ResultsError, Run
from . import charts, result_names
from .charts import ChartRenderer, Line
from .html import Html, Table, badge, facts, figure, folded, heading, joined, notice, table
from .sections import MAX_SERIES, chart_gallery, format_value

MAX_SHOWN_CHANGES = 20  # more are folded
VERDICT_ORDER = {"regressed": 0, "improved": 1, "within noise": 2}


def compare_section(before: RunFile, after: RunFile) -> Html:
    """Show what changed from one run to another: clear changes at once, the others folded."""
    try:
        changes = baseline.compare(before.run, after.run)
    except ResultsError as error:
        return notice(f"{before.name} and {after.name} cannot be compared: {error}")
    changes.sort(key=lambda one: (VERDICT_ORDER[one.change.verdict], -abs(one.change.change)))
    clear = [one for one in changes if one.change.verdict != "within noise"]
    noise = changes[len(clear) :]
    summary = f"{before.name} compared with {after.name}: " + ", ".join(
        f"{sum(one.change.verdict == verdict for one in changes)} {verdict}" for verdict in VERDICT_ORDER
    )
    parts: list[object] = [heading("What changed"), notice(summary) if clear else facts({"result": summary})]
    other_machine = before.run.machine.get("fingerprint") != after.run.machine.get("fingerprint")
    if other_machine and after.run.kind not in baseline.SPEED_INDEPENDENT_KINDS:
        parts.append(notice("The two runs were taken on different machines: their times cannot be compared as such."))
    parts.append(table(_change_table(clear[:MAX_SHOWN_CHANGES], "clear changes")) if clear else "")
    if more := clear[MAX_SHOWN_CHANGES:]:
        parts.append(folded(f"{len(more)} more clear changes", table(_change_table(more, "more clear changes"))))
    parts.append(folded(f"{len(noise)} within noise", table(_change_table(noise, "within noise"))) if noise else "")
    differing = find_differences(before.run, after.run)
    if differing:
        rows = [[one.what, one.before, one.after] for one in differing]
        parts.append(
            folded("What else differs", table(Table("settings, versions, machine", ["", "before", "after"], rows)))
        )
    sides = ((before, after), (after, before))
    left = {f"only in {one.name}": ", ".join(names_not_compared(one.run, other.run, changes)) for one, other in sides}
    parts.append(facts({key: value for key, value in left.items() if value}))
    return joined([part for part in parts if part])


def _change_table(changes: Sequence[Comparison], caption: str) -> Table:
    backends = result_names.has_several_backends([one.after for one in changes])
    rows = []
    for one in changes:
        change = one.change
        interval = "" if math.isinf(change.low) else f"{change.low:+.1%} to {change.high:+.1%}"
        values = [format_value(r.estimate, r.unit) for r in (one.before, one.after)]
        name = result_names.label(one.after, backends=backends)
        rows.append([name, *values, f"{change.change:+.1%}", interval, badge(change.verdict)])
    return Table(caption, ["", "before", "after", "change", "99% interval", "verdict"], rows, (1, 2, 3, 4))


def history_section(group: RunGroup, renderer: ChartRenderer) -> Html:
    """Draw each result over the runs, by family."""
    runs = [one.run for one in group.files]
    if len(runs) < 2:
        return Html()
    labels = _run_labels(runs)
    lines: dict[tuple[str, str], dict[str, list[tuple[float, float, float, float]]]] = {}
    backends = result_names.has_several_backends(runs[-1].results)
    for place, run in enumerate(runs):
        for r in filter(result_names.is_positive, run.results):
            series = lines.setdefault((result_names.family(r.name), r.better), {})
            series.setdefault(result_names.label(r, backends=backends), []).append((place, r.estimate, r.low, r.high))
    figures = []
    for (family, better), found in lines.items():
        kept = [Line(name.removeprefix(f"{family}/"), points) for name, points in found.items() if len(points) > 1]
        for start in range(0, len(kept), MAX_SERIES):
            figures.append(
                partial(
                    _history_chart, renderer, f"{family} ({better} is better)", labels, kept[start : start + MAX_SERIES]
                )
            )
    text = "Estimates as percent of the first run's, in the order of the commits; the shade is the 95% interval."
    return chart_gallery("History", text, figures)


def _history_chart(renderer: ChartRenderer, title: str, labels: Sequence[str], lines: Sequence[Line]) -> Html:
    description = f"{title} over {len(labels)} runs: {', '.join(line.label for line in lines)}"
    return figure(charts.draw_history(renderer, title, labels, lines), description)


def _run_labels(runs: Sequence[Run]) -> list[str]:
    """Return the label of each run on an axis: its commit, numbered where several runs share it, or its day."""
    found = [commit_name(run)[:7] if run.commit else run.created[:10] for run in runs]
    return [f"{name} #{found[: i + 1].count(name)}" if found.count(name) > 1 else name for i, name in enumerate(found)]


TITLES = {
    "micro": "Micro-benchmarks", "e2e": "End to end", "load": "Loading a model", "serving": "Serving",
    "peers": "Beside its peers", "accuracy": "Accuracy", "profile": "Where the time goes", "experiments": "Experiments",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunFile:
    """A run, and the name of its file."""

    name: str
    run: Run


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs of one kind, model and machine, oldest first."""

    title: str
    files: tuple[RunFile, ...]

    @property
    def latest(self) -> Run:
        return self.files[-1].run


def group_runs(files: Sequence[RunFile]) -> list[RunGroup]:
    """Group runs by kind, model and machine, kinds in the order of the documentation."""
    groups: dict[tuple[str, str, str], list[RunFile]] = {}
    for one in sorted(files, key=lambda one: commit_time(one.run)):
        run = one.run
        model = str((run.model or {}).get("sha256") or model_name(run))
        groups.setdefault((run.kind, model, str(run.machine.get("fingerprint"))), []).append(one)
    kinds = list(TITLES)
    ordered = sorted(groups.items(), key=lambda item: kinds.index(item[0][0]) if item[0][0] in kinds else len(kinds))
    return [
        RunGroup(_group_title(parts[-1].run, [key for key in groups if key[0] == kind]), tuple(parts))
        for (kind, *_), parts in ordered
    ]


def _group_title(run: Run, alike: Sequence[tuple[str, str, str]]) -> str:
    """Return the kind, and what tells it apart from others of its kind."""
    title = TITLES.get(run.kind, run.kind)
    several_models, several_machines = (len({key[i] for key in alike}) > 1 for i in (1, 2))
    parts = [
        model_name(run) if several_models else "",
        str(run.machine.get("cpu") or "") if several_machines else "",
    ]
    return ": ".join(filter(None, [title, ", ".join(filter(None, parts))]))


def commit_time(run: Run) -> tuple[float, str]:
    """Return the commit's date, or else when the run took place."""
    for text in ((run.commit or {}).get("date"), run.created):
        try:
            found = datetime.fromisoformat(str(text))
            return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp(), run.created
        except ValueError:
            continue
    return math.inf, run.created
