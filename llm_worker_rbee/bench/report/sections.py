"""How each kind of run is shown: functions from a run to HTML, and the table that says which of them a kind gets.

A view gives nothing where a run has nothing for it: a kind of run that nobody foresaw is shown as far as it can be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from .. import statistics
from ..format import digits, percent, quantity, spread
from ..results import Result, Run
from . import charts, result_names
from .charts import Dot, Line, Plots, Sampled
from .html import Html, Table, badge, bar, figure, folded, gallery, heading, html, joined, notice, soft, table
from .result_names import family, measurable, number

View = Callable[[Run, Plots], Html]
OURS = "llm-worker-rbee"
FIGURE = re.compile(r"[+-]?\d|-$")


def results_table(run: Run, _: Plots) -> Html:
    """Every result with its interval, and how near the machine's limit it is."""
    return table(table_of(run, run.results, f"{len(run.results)} results; intervals are 95% bootstrap intervals"))


def table_of(run: Run, results: Sequence[Result], caption: str) -> Table:
    """The columns that these results need."""
    backends = result_names.several_backends(results)
    limits = any(number(r, "percent_of_limit") is not None for r in results)
    sampled = any(r.samples for r in results)
    head = ["", "estimate", "interval"] + ["% of limit", "bound by"] * limits + ["samples", "outliers"] * sampled
    rows: list[list[object]] = []
    for r in results:
        row: list[object] = [result_names.label(r, backends=backends), readable(r.estimate, r.unit), interval(r)]
        row += [of_limit(r), str(r.fields.get("bound_by") or "")] if limits else []
        row += [str(len(r.samples) or ""), outliers(r)] if sampled else []
        rows.append(row)
    sizes = [len(list(group)) for _, group in groupby(results, lambda r: family(r.name))]
    starts = [sum(sizes[:i]) for i in range(1, len(sizes)) if max(sizes[i - 1 : i + 1]) > 1]  # of more than one row
    return Table(caption, head, rows, (1, 2, *((5,) if limits else (3,))) if sampled else (1, 2), frozenset(starts))


def readable(value: float, unit: str) -> str:
    """A figure on a page, where there is a letter for micro."""
    return quantity(value, unit).replace(" us", " µs")


def interval(result: Result) -> str:
    """The two ends; nothing for a figure without spread."""
    if result.low == result.high or not np.isfinite([result.low, result.high]).all():
        return ""
    return spread((result.low, result.high), result.unit).replace(" us", " µs")


def of_limit(result: Result) -> Html | str:
    """A bar that is full at the limit."""
    share = number(result, "percent_of_limit")
    return "" if share is None else bar(share / 100, percent(share))


def outliers(result: Result) -> str:
    """`2 high, 1 low` of the samples."""
    if len(result.samples) < statistics.MIN_SAMPLES:
        return ""
    found = statistics.outliers(result.samples)
    low, high = found.low_mild + found.low_severe, found.high_mild + found.high_severe
    return ", ".join(f"{count} {side}" for count, side in ((high, "high"), (low, "low")) if count)


def pivot(run: Run, plots: Plots) -> Html:
    """`row/column` names as tables of rows and columns, one for each unit; what has no column stands before them."""
    loose = [r for r in run.results if "/" not in r.name]
    parts = [table(table_of(run, loose, "figures of the whole run"))] if loose else []
    for unit in dict.fromkeys(r.unit for r in run.results if "/" in r.name):
        pairs = {_split(r.name): r for r in run.results if "/" in r.name and r.unit == unit}
        rows, columns = (list(dict.fromkeys(pair[i] for pair in pairs)) for i in (0, 1))
        cells = [[LATENCIES.get(row, row), *(_cell(pairs.get((row, c))) for c in columns)] for row in rows]
        parts.append(table(Table("by part", ["", *columns], cells, range(1, len(columns) + 1))))
    return joined([*parts, others(run, plots)])


def _split(name: str) -> tuple[str, str]:
    row, _, column = name.rpartition("/")
    return row, column


def _cell(result: Result | None) -> str:
    return "" if result is None else readable(result.estimate, result.unit)


def peers(run: Run, _: Plots) -> Html:
    """Ours beside the others, test by test."""
    tests: dict[str, dict[str, Result]] = {}
    for r in run.results:
        test, slash, peer = r.name.partition("/")
        tests.setdefault(test, {})[str(r.fields.get("peer") or peer) if slash else OURS] = r
    rows: list[list[object]] = []
    starts = set()
    for test, by_peer in tests.items():
        starts.add(len(rows))
        ours = by_peer.get(OURS)
        best = max((r.estimate for r in by_peer.values() if measurable(r)), default=1.0)
        for peer, r in by_peer.items():
            ratio = ours.estimate / r.estimate if ours is not None and r.estimate else float("nan")
            speed = (
                bar(r.estimate / best, readable(r.estimate, r.unit)) if measurable(r) else readable(r.estimate, r.unit)
            )
            told = "" if ours is r or ratio != ratio else f"{digits(ratio)}×"
            rows.append([f"{test} · {peer}", speed, interval(r), told, str(r.fields.get("version") or "")])
    head = ["", "result", "interval", f"{OURS} / this", "version"]
    return table(Table("the same file, lengths and machine, in one run", head, rows, (2, 3), frozenset(starts - {0})))


def verdicts(run: Run, _: Plots) -> Html:
    """One line for each claim."""
    found = run.details.get("verdicts")
    lines = []
    for one in found if isinstance(found, list) else ():
        value: dict[str, Any] = one if isinstance(one, dict) else {"line": one}
        told = html(value.get("line") or value.get("claim") or "")
        lines.append(f"<li>{badge(str(value.get('verdict') or 'told'))} {told}</li>")
    return Html(f'<ul class="verdicts">{"".join(lines)}</ul>') if lines else Html()


def claims(run: Run, _: Plots) -> Html:
    """What was measured for each claim, and the rule that its verdict follows."""
    tables, told = run.details.get("tables"), run.details.get("claims")
    made = []
    for name, rows in tables.items() if isinstance(tables, dict) else ():
        whole = isinstance(rows, list) and len(rows) > 1 and all(isinstance(row, list) for row in rows)
        if not whole or not rows[0] or any(len(row) != len(rows[0]) for row in rows):
            continue
        known = told.get(name) if isinstance(told, dict) else None
        text, rule = (str(known.get(key) or "") for key in ("claim", "rule")) if isinstance(known, dict) else ("", "")
        numbers = [i for i in range(1, len(rows[0])) if all(FIGURE.match(str(row[i])) for row in rows[1:])]
        made += [heading(f"Claim {name}: {text}"), soft(rule) if rule else ""]
        made.append(table(Table(f"what was measured for claim {name}", rows[0], rows[1:], numbers)))
    return joined(made)


def sides(run: Run, _: Plots) -> Html:
    """Two backends whose samples were taken in turn."""
    found = run.details.get("ab")
    rows: list[list[object]] = []
    for one in found if isinstance(found, list) else ():
        if isinstance(one, dict) and all(type(one.get(key)) in (int, float) for key in ("before", "after", "change")):
            unit, ends = str(one.get("unit") or ""), [one.get(key) for key in ("low", "high")]
            spread = f"{ends[0]:+.1%} to {ends[1]:+.1%}" if all(type(end) in (int, float) for end in ends) else ""
            values = [readable(one[key], unit) for key in ("before", "after")]
            rows.append([one.get("name"), *values, f"{one['change']:+.1%}", spread, badge(str(one.get("verdict")))])
    if not rows:
        return Html()
    backends = " and ".join(map(str, listed)) if isinstance(listed := run.settings.get("backends"), list) else "A and B"
    head = ["", "first", "second", "change", "99% interval", "verdict"]
    return joined(
        [heading(f"{backends}, in turn"), table(Table("the second against the first", head, rows, (1, 2, 3, 4)))]
    )


def shares(run: Run, _: Plots) -> Html:
    """Where the time of a step goes, the largest part first."""
    phases: dict[str, list[Result]] = {}
    for r in run.results:
        if number(r, "share") is not None:
            phases.setdefault(family(r.name), []).append(r)
    made = []
    for phase, results in phases.items():
        rows: list[list[object]] = []
        for r in sorted(results, key=lambda r: -(number(r, "share") or 0)):
            share, rank = number(r, "share") or 0.0, str(r.fields.get("class") or "")
            name = r.name.removeprefix(f"{phase}/")
            rows.append(
                [
                    name,
                    bar(share, f"{share:.1%}", rank),
                    badge(rank) if rank else "",
                    readable(r.estimate, r.unit),
                    of_limit(r),
                ]
            )
        made += [
            heading(phase),
            table(Table(f"{phase}: time of a step", ["", "share", "class", "time", "% of limit"], rows, (3,))),
        ]
    return joined(made)


def missing(run: Run) -> Html:
    """What could not be measured, or not wholly, and why."""
    told = [str(run.details["warning"])] if run.details.get("warning") else []
    for key, words in {"left_out": "left out", "failed": "failed"}.items():
        found = run.details.get(key)
        told += [f"{words}: {name}: {why}" for name, why in found.items()] if isinstance(found, dict) else []
    return joined(map(notice, told))


def others(run: Run, plots: Plots) -> Html:
    """All results, folded: what a view above shows differently."""
    return folded("All results with their intervals", results_table(run, plots))


FEWEST = 5  # samples that make a distribution
ROWS = 24  # of one plot of distributions
MOST_PLOTS = 40  # of one kind; more are left out, and the page says so
MOST_KINDS = 60  # rows of one plot of categories
STEPS = 200  # of a curve of shares
MOST_SERIES = 8  # lines in one plot; more are shown by category
LATENCIES = {"ttft": "first token", "tpot": "each further token", "itl": "between tokens", "e2e": "whole answer"}


def drawn(title: str, told: str, figures: Sequence[Callable[[], Html]], *, uneven: bool = False) -> Html:
    """The first of them, as a gallery, and how many are left out."""
    left = len(figures) - MOST_PLOTS
    more = f" {left} more plots are left out." if left > 0 else ""
    return gallery(title, told + more, [draw() for draw in figures[:MOST_PLOTS]], uneven=uneven)


def lengths(run: Run, plots: Plots) -> Html:
    """Speed against length."""
    found = {axis: series for axis, series in result_names.by_length(run.results).items() if len(series) <= MOST_SERIES}
    figures = [partial(_lines, plots, axis, series) for axis, series in found.items()]
    return drawn("Speed against length", "Both axes are logarithmic; the shade is the 95% interval.", figures)


def _lines(plots: Plots, axis: result_names.Axis, series: Mapping[str, Sequence[tuple[int, Result]]]) -> Html:
    lines = [Line(name, [_point(x, r) for x, r in points], _limit(points)) for name, points in series.items()]
    told = f"{axis.title} against {axis.across}, for {', '.join(series)}"
    return figure(charts.lines(plots, axis.title, lines, axis.unit, axis.across), told)


def _point(x: float, result: Result) -> tuple[float, float, float, float]:
    return x, result.estimate, result.low, result.high


def _limit(points: Sequence[tuple[int, Result]]) -> list[tuple[float, float]]:
    found = [(float(x), number(r, "limit_s")) for x, r in points if r.unit == "s"]
    return [(x, least) for x, least in found if least is not None and least > 0]


def categories(run: Run, plots: Plots) -> Html:
    """Families that differ by kind: block types, ways of sampling."""
    figures = [partial(_dots, plots, axis, series) for axis, series in result_names.by_category(run.results).items()]
    return drawn("By kind", "Shorter times are further left; the axis is logarithmic.", figures, uneven=True)


def _dots(plots: Plots, axis: result_names.Axis, series: Mapping[str, Sequence[tuple[str, Result]]]) -> Html:
    rows = list(dict.fromkeys(kind for points in series.values() for kind, _ in points))[:MOST_KINDS]
    place = {kind: i for i, kind in enumerate(rows)}
    lines = [
        Line(name, [_point(place[kind], r) for kind, r in points if kind in place])
        for name, points in list(series.items())[:MOST_SERIES]
    ]
    kept = [line for line in lines if line.points]
    return figure(charts.dots(plots, axis.title, rows, kept, axis.unit), f"{axis.title} for {', '.join(rows)}")


def distributions(run: Run, plots: Plots) -> Html:
    """The samples behind each estimate, by family."""
    groups: dict[str, list[Result]] = {}
    for result in run.results:
        if len(result.samples) >= FEWEST and result.estimate > 0 and np.isfinite(result.samples).all():
            groups.setdefault(family(result.name), []).append(result)
    backends = result_names.several_backends(run.results)
    figures = [
        partial(_distribution, plots, title, results[start : start + ROWS], backends)
        for title, results in groups.items()
        for start in range(0, len(results), ROWS)
    ]
    text = (
        "Each curve is the density of one benchmark's samples around its estimate, few samples are dots; the bar below "
        "is the 95% interval. Red are outliers (beyond 1.5 interquartile ranges), triangles lie further out."
    )
    return drawn("Distributions", text, figures, uneven=True)


def _distribution(plots: Plots, title: str, results: Sequence[Result], backends: bool) -> Html:
    labels = [result_names.label(r, backends=backends).removeprefix(f"{title}/") for r in results]
    rows = [Sampled(name, r.samples, r.estimate, r.low, r.high) for name, r in zip(labels, results, strict=True)]
    told = f"distribution of the samples of {', '.join(r.name for r in results)}"
    return figure(charts.distributions(plots, title, rows), told)


def roofline(run: Run, plots: Plots) -> Html:
    """Every benchmark that states its bytes and operations, under the ceilings that were measured."""
    limits = run.details.get("limits")
    try:
        roof = float(limits["operations_per_second"])  # type: ignore[index]
        ladder = sorted((float(b["bytes"]), float(b["bytes_per_second"])) for b in limits["bandwidth"])  # type: ignore[index]
        found = [("memory", ladder[-1][1]), ("cache", max(rate for _, rate in ladder))]
        slopes = [found[0]] + [found[1]] * (found[1][1] > 1.15 * found[0][1])
    except (TypeError, KeyError, ValueError, IndexError):
        return Html()
    dots = []
    for r in run.results:
        moved, done = number(r, "bytes") or 0.0, number(r, "operations") or 0.0
        if moved > 0 and done > 0 and r.unit == "s" and measurable(r):
            dots.append(Dot(r.name, family(r.name), done / moved, done / r.estimate))
    if len(dots) < 2 or not all(np.isfinite(x) and x > 0 for x in (roof, *(rate for _, rate in slopes))):
        return Html()
    told = f"roofline of {len(dots)} benchmarks: operations a second against operations a byte"
    text = (
        "Each dot is a benchmark: how many operations it needs for each byte it must move, and how many it does in a "
        "second. The lines are what this machine can do at best, as measured. Hover over a dot for its name."
    )
    return joined(
        [heading("Roofline"), soft(text), figure(charts.roofline(plots, dots, roof, slopes), told, wide=True)]
    )


def latencies(run: Run, plots: Plots) -> Html:
    """How latencies are spread over requests."""
    kept = run.details.get("latencies")
    figures = []
    for name, values in kept.items() if isinstance(kept, dict) else ():
        numbers = [v for v in values if type(v) in (int, float) and 0 <= v < 1e9] if isinstance(values, list) else []
        if len(numbers) >= statistics.MIN_SAMPLES and max(numbers) > 0:
            figures.append(partial(_shares, plots, LATENCIES.get(name, str(name)), sorted(numbers)))
    told = "The share of requests, or of gaps, that were as quick as this or quicker; the dotted line is 95%."
    return drawn("Latencies", told, figures)


def _shares(plots: Plots, title: str, ordered: Sequence[float]) -> Html:
    """A line of at most STEPS points; a logarithmic axis has no place for zeros, but they count."""
    places = np.unique(np.linspace(0, len(ordered) - 1, STEPS).astype(int))
    points = [(ordered[i], (i + 1) / len(ordered), 0.0, 0.0) for i in places if ordered[i] > 0]
    told = f"share of all measurements of {title} that came within a time"
    return figure(charts.shares(plots, title, [Line(title, points)], "s"), told)


VIEWS: dict[str, Sequence[View]] = {
    "micro": (sides, results_table, roofline, lengths, categories, distributions),
    "e2e": (results_table, lengths, distributions),
    "load": (pivot, distributions),
    "serving": (pivot, latencies),
    "peers": (peers, lengths, distributions),
    "accuracy": (results_table,),
    "profile": (shares, others, roofline),
    "experiments": (verdicts, claims, others, lengths, distributions),
}
PLAIN: Sequence[View] = (results_table, lengths, categories, distributions)


def show(run: Run, plots: Plots) -> Html:
    """All that there is to see of a run."""
    shown = [view(run, plots) for view in VIEWS.get(run.kind, PLAIN)]
    return joined([part for part in (missing(run), *shown) if part])
