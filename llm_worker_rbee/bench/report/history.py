"""How a subject went from run to run: what changed between two of them, and every benchmark over all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from .. import baseline
from ..baseline import Comparison
from ..differences import commit_name, differences, only_in
from ..results import ResultsError, Run
from . import charts, result_names
from .charts import Line
from .html import Html, Table, badge, facts, figure, folded, heading, joined, notice, table
from .plot_views import MOST_SERIES, drawn
from .plots import Plots
from .sections import readable
from .subjects import Given, Subject

SHOWN = 20  # changes that are not folded
ORDER = {"regressed": 0, "improved": 1, "within noise": 2}


def comparison(before: Given, after: Given) -> Html:
    """What changed from one run to another: clear changes at once, the others folded."""
    try:
        changes = baseline.compare(before.run, after.run)
    except ResultsError as error:
        return notice(f"{before.name} and {after.name} cannot be compared: {error}")
    changes.sort(key=lambda one: (ORDER[one.change.verdict], -abs(one.change.change)))
    clear = [one for one in changes if one.change.verdict != "within noise"]
    noise = changes[len(clear) :]
    told = f"{before.name} compared with {after.name}: " + ", ".join(
        f"{sum(one.change.verdict == verdict for one in changes)} {verdict}" for verdict in ORDER
    )
    parts: list[object] = [heading("What changed"), notice(told) if clear else facts({"result": told})]
    elsewhere = before.run.machine.get("fingerprint") != after.run.machine.get("fingerprint")
    if elsewhere and after.run.kind not in baseline.TIMELESS:
        parts.append(notice("The two runs were taken on different machines: their times cannot be compared as such."))
    parts.append(table(_changes(clear[:SHOWN], "clear changes")) if clear else "")
    if more := clear[SHOWN:]:
        parts.append(folded(f"{len(more)} more clear changes", table(_changes(more, "more clear changes"))))
    parts.append(folded(f"{len(noise)} within noise", table(_changes(noise, "within noise"))) if noise else "")
    differing = differences(before.run, after.run)
    if differing:
        rows = [[one.what, one.before, one.after] for one in differing]
        parts.append(
            folded("What else differs", table(Table("settings, versions, machine", ["", "before", "after"], rows)))
        )
    sides = ((before, after), (after, before))
    left = {f"only in {one.name}": ", ".join(only_in(one.run, other.run, changes)) for one, other in sides}
    parts.append(facts({key: value for key, value in left.items() if value}))
    return joined([part for part in parts if part])


def _changes(changes: Sequence[Comparison], caption: str) -> Table:
    backends = result_names.several_backends([one.after for one in changes])
    rows = []
    for one in changes:
        change = one.change
        interval = "" if math.isinf(change.low) else f"{change.low:+.1%} to {change.high:+.1%}"
        values = [readable(r.estimate, r.unit) for r in (one.before, one.after)]
        name = result_names.label(one.after, backends=backends)
        rows.append([name, *values, f"{change.change:+.1%}", interval, badge(change.verdict)])
    return Table(caption, ["", "before", "after", "change", "99% interval", "verdict"], rows, (1, 2, 3, 4))


def history(subject: Subject, plots: Plots) -> Html:
    """Every benchmark over the runs, by family."""
    runs = [one.run for one in subject.given]
    if len(runs) < 2:
        return Html()
    labels = _moments(runs)
    lines: dict[tuple[str, str], dict[str, list[tuple[float, float, float, float]]]] = {}
    backends = result_names.several_backends(runs[-1].results)
    for place, run in enumerate(runs):
        for r in filter(result_names.measurable, run.results):
            group = lines.setdefault((result_names.family(r.name), r.better), {})
            group.setdefault(result_names.label(r, backends=backends), []).append((place, r.estimate, r.low, r.high))
    figures = []
    for (family, better), found in lines.items():
        kept = [Line(name.removeprefix(f"{family}/"), points) for name, points in found.items() if len(points) > 1]
        for start in range(0, len(kept), MOST_SERIES):
            figures.append(
                partial(_over_time, plots, f"{family} ({better} is better)", labels, kept[start : start + MOST_SERIES])
            )
    text = "Estimates as percent of the first run's, in the order of the commits; the shade is the 95% interval."
    return drawn("History", text, figures)


def _over_time(plots: Plots, title: str, labels: Sequence[str], lines: Sequence[Line]) -> Html:
    told = f"{title} over {len(labels)} runs: {', '.join(line.label for line in lines)}"
    return figure(charts.history(plots, title, labels, lines), told)


def _moments(runs: Sequence[Run]) -> list[str]:
    """What to call each run on an axis: its commit, numbered where several runs share it, or its day."""
    found = [commit_name(run)[:7] if run.commit else run.created[:10] for run in runs]
    return [f"{name} #{found[: i + 1].count(name)}" if found.count(name) > 1 else name for i, name in enumerate(found)]
