"""The sections of a run on the page: functions from a run to HTML, and the table of the sections of each kind of run.

Result names are parsed here into families, lengths and categories: `family/kind/length` or `pp512@d2048@b8`. A section
is empty if a run has nothing for it: an unknown kind of run is shown as far as possible.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from .. import statistics
from ..results import Result, Run, digits, percent, quantity, spread
from . import charts
from .charts import ChartRenderer, Dot, Line
from .html import Html, badge, bar, folded, heading, html, joined, notice, soft, table

Section = Callable[[Run, ChartRenderer], Html]
OWN_NAME = "llm-worker-rbee"
NUMBER = re.compile(r"[+-]?\d|-$")
END_TO_END = re.compile(r"(pp|tg|ttft)([0-9]{1,9})(?:@d([0-9]{1,9}))?(?:@b([0-9]{1,9}))?")
PHASE_NAMES = {"pp": "prefill", "tg": "decode", "ttft": "time to first token"}
MIN_CATEGORIES = 4  # for a chart by category
MIN_DISTRIBUTION_SAMPLES = 5
MAX_DISTRIBUTION_ROWS = 24  # of one chart
MAX_CHARTS = 40  # of one gallery; more are left out, and the page says so
MAX_CATEGORIES = 60  # rows of one chart
MAX_CURVE_POINTS = 200  # of a cumulative distribution
MAX_SERIES = 8  # lines in one chart; more are shown by category
LATENCY_NAMES = {"ttft": "first token", "tpot": "each further token", "itl": "between tokens", "e2e": "whole answer"}


class Axis(NamedTuple):
    """The axes of a chart: its quantity, and the variable."""

    title: str
    across: str
    unit: str


def family(name: str) -> str:
    """Return the first part of a name; of end-to-end names the phase."""
    match = END_TO_END.fullmatch(name.split("/")[0])
    return PHASE_NAMES[match[1]] if match else name.split("/")[0]


def by_family(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Group results by family."""
    families: dict[str, list[Result]] = {}
    for r in results:
        families.setdefault(family(r.name), []).append(r)
    return families


def number(result: Result, key: str) -> float | None:
    """Return a field if it is a finite number."""
    value: Any = result.fields.get(key)
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else None


def has_several_backends(results: Iterable[Result]) -> bool:
    """Return whether labels must name the backend."""
    return len({result.fields.get("backend") for result in results} - {None}) > 1


def detail(run: Run, key: str, kind: type[Any]) -> Any:
    """Return a detail of a run if it is a list or an object, as `kind` says; else an empty one."""
    return value if isinstance(value := run.details.get(key), kind) else kind()


def is_positive(result: Result) -> bool:
    """Return whether a result fits on a logarithmic axis."""
    return all(math.isfinite(x) and x > 0 for x in (result.estimate, result.low, result.high))


def by_length(results: Sequence[Result]) -> dict[Axis, dict[str, list[tuple[int, Result]]]]:
    """Group results by chart and series against a length; series with a single length are left out."""
    axes: dict[Axis, dict[str, dict[int, Result]]] = {}
    backends = has_several_backends(results)
    for result in filter(is_positive, results):
        for axis, series, x in _chart_positions(result):
            name = " ".join(filter(None, (series, str(result.fields.get("backend") or "") if backends else "")))
            axes.setdefault(axis, {}).setdefault(name or "measured", {})[x] = result
    kept = {axis: {s: sorted(p.items()) for s, p in lines.items() if len(p) > 1} for axis, lines in axes.items()}
    return {axis: lines for axis, lines in kept.items() if lines}


def _chart_positions(result: Result) -> Iterable[tuple[Axis, str, int]]:
    first, *rest = result.name.split("/")
    if match := END_TO_END.fullmatch(first):
        sizes = {"tokens": int(match[2]), "depth": int(match[3] or 0), "batch": int(match[4] or 1)}
        usual = {"depth": 0, "batch": 1}
        for across, x in sizes.items():
            others = [f"{key} {value}" for key, value in sizes.items() if key != across and value != usual.get(key)]
            axis = Axis(f"{PHASE_NAMES[match[1]]} over {across}", across, result.unit)
            yield axis, ", ".join([*rest, *others]), x
    elif rest and re.fullmatch("[0-9]{1,9}", rest[-1]):
        yield Axis(first, "length", result.unit), "/".join(rest[:-1]), int(rest[-1])


def by_category(results: Sequence[Result]) -> dict[Axis, dict[str, list[tuple[str, Result]]]]:
    """Group families whose second part is a category (a block type, a method): series -> (category, result)."""
    axes: dict[Axis, dict[str, list[tuple[str, Result]]]] = {}
    backends = has_several_backends(results)
    for result in filter(is_positive, results):
        parts = result.name.split("/")
        if len(parts) < 2 or parts[1].isdigit():
            continue
        series = [f"length {parts[2]}" if parts[2].isdigit() else parts[2]] if len(parts) > 2 else []
        series += [str(result.fields.get("backend") or "")] if backends else []
        lines = axes.setdefault(Axis(parts[0], "", result.unit), {})
        lines.setdefault(" ".join(series), []).append((parts[1], result))
    return {axis: lines for axis, lines in axes.items() if max(map(len, lines.values())) >= MIN_CATEGORIES}


def results_table(run: Run, _: ChartRenderer) -> Html:
    """Show every result with its interval and its percent of the machine's limit."""
    return make_table(run.results, f"{len(run.results)} results; intervals are 95% bootstrap intervals")


def make_table(results: Sequence[Result], caption: str) -> Html:
    """Return a table with the columns that these results need."""
    backends = has_several_backends(results)
    limits = any(number(r, "percent_of_limit") is not None for r in results)
    sampled = any(r.samples for r in results)
    head = ["", "estimate", "interval"] + ["% of limit", "bound by"] * limits + ["samples", "outliers"] * sampled
    rows: list[list[object]] = []
    for r in results:
        row: list[object] = [r.label if backends else r.name, format_value(r.estimate, r.unit), format_interval(r)]
        row += [limit_bar(r), str(r.fields.get("bound_by") or "")] if limits else []
        row += [str(len(r.samples) or ""), format_outliers(r)] if sampled else []
        rows.append(row)
    sizes = [len(list(group)) for _, group in groupby(results, lambda r: family(r.name))]
    starts = [sum(sizes[:i]) for i in range(1, len(sizes)) if max(sizes[i - 1 : i + 1]) > 1]  # a group has several
    return table(caption, head, rows, (1, 2, *((5,) if limits else (3,))) if sampled else (1, 2), starts)


def format_value(value: float, unit: str) -> str:
    """Format a value for a page, which has a letter for micro."""
    return quantity(value, unit).replace(" us", " µs")


def format_interval(result: Result) -> str:
    """Format the two ends; empty if they are equal."""
    if result.low == result.high or not np.isfinite([result.low, result.high]).all():
        return ""
    return spread((result.low, result.high), result.unit).replace(" us", " µs")


def limit_bar(result: Result) -> Html | str:
    """Return a bar that is full at the limit."""
    share = number(result, "percent_of_limit")
    return "" if share is None else bar(share / 100, percent(share))


def format_outliers(result: Result) -> str:
    """Return `2 high, 1 low`."""
    if len(result.samples) < statistics.MIN_SAMPLES:
        return ""
    counts = statistics.outliers(result.samples)
    low, high = counts.low_mild + counts.low_severe, counts.high_mild + counts.high_severe
    return ", ".join(f"{count} {side}" for count, side in ((high, "high"), (low, "low")) if count)


def pivot_tables(run: Run, renderer: ChartRenderer) -> Html:
    """Show `row/column` names as one table for each unit; results without a column stand before them."""
    single = [r for r in run.results if "/" not in r.name]
    parts = [make_table(single, "figures of the whole run")] if single else []
    for unit in dict.fromkeys(r.unit for r in run.results if "/" in r.name):
        results = [r for r in run.results if "/" in r.name and r.unit == unit]
        values = {tuple(r.name.rsplit("/", 1)): format_value(r.estimate, unit) for r in results}
        rows, columns = (list(dict.fromkeys(pair[i] for pair in values)) for i in (0, 1))
        cells = [[LATENCY_NAMES.get(row, row), *(values.get((row, c), "") for c in columns)] for row in rows]
        parts.append(table("by part", ["", *columns], cells, range(1, len(columns) + 1)))
    return joined([*parts, all_results(run, renderer)])


def group_by_test(run: Run) -> dict[str, dict[str, Result]]:
    """Return the results of a comparison with peers: test -> peer -> result."""
    tests: dict[str, dict[str, Result]] = {}
    for r in run.results:
        test, slash, peer = r.name.partition("/")
        tests.setdefault(test, {})[str(r.fields.get("peer") or peer) if slash else OWN_NAME] = r
    return tests


def peer_table(run: Run, _: ChartRenderer) -> Html:
    """Compare this worker with its peers, test by test."""
    rows: list[list[object]] = []
    starts = []
    for test, by_peer in group_by_test(run).items():
        starts.append(len(rows))
        ours = by_peer.get(OWN_NAME)
        best = max((r.estimate for r in by_peer.values() if is_positive(r)), default=1.0)
        for peer, r in by_peer.items():
            ratio = ours.estimate / r.estimate if ours is not None and r.estimate else float("nan")
            value = format_value(r.estimate, r.unit)
            speed = bar(r.estimate / best, value) if is_positive(r) else value
            times = "" if ours is r or ratio != ratio else f"{digits(ratio)}×"
            rows.append([f"{test} · {peer}", speed, format_interval(r), times, str(r.fields.get("version") or "")])
    head = ["", "result", "interval", f"{OWN_NAME} / this", "version"]
    return table("the same file, lengths and machine, in one run", head, rows, (2, 3), starts[1:])


def verdict_list(run: Run, _: ChartRenderer) -> Html:
    """Show one line for each claim."""
    lines = []
    for item in detail(run, "verdicts", list):
        value: dict[str, Any] = item if isinstance(item, dict) else {"line": item}
        line = html(value.get("line") or value.get("claim") or "")
        lines.append(f"<li>{badge(str(value.get('verdict') or 'no verdict'))} {line}</li>")
    return Html(f'<ul class="verdicts">{"".join(lines)}</ul>') if lines else Html()


def claim_tables(run: Run, _: ChartRenderer) -> Html:
    """Show the measurements for each claim, and the rule of its verdict."""
    out = []
    for name, rows in detail(run, "tables", dict).items():
        whole = isinstance(rows, list) and len(rows) > 1 and all(isinstance(row, list) for row in rows)
        if not whole or not rows[0] or any(len(row) != len(rows[0]) for row in rows):
            continue
        claim = detail(run, "claims", dict).get(name)
        text, rule = (str(claim.get(key) or "") for key in ("claim", "rule")) if isinstance(claim, dict) else ("", "")
        numbers = [i for i in range(1, len(rows[0])) if all(NUMBER.match(str(row[i])) for row in rows[1:])]
        out += [heading(f"Claim {name}: {text}"), soft(rule) if rule else ""]
        out.append(table(f"what was measured for claim {name}", rows[0], rows[1:], numbers))
        for extra in detail(run, "more_tables", dict).get(name) or ():
            out.append(table(str(extra["caption"]), extra["rows"][0], extra["rows"][1:], ()))
    return joined(out)


def change_table(changes: Iterable[Mapping[str, Any]], caption: str, sides: tuple[str, str]) -> Html:
    """Show changes in the form of `Comparison.as_json`."""
    rows: list[list[object]] = []
    for row in changes:
        ends = [x for x in (row.get("low"), row.get("high")) if isinstance(x, (int, float)) and math.isfinite(x)]
        interval = " to ".join(f"{x:+.1%}" for x in ends) if len(ends) == 2 else ""
        values = [format_value(row[key], str(row.get("unit") or "")) for key in ("before", "after")]
        rows.append([row.get("name"), *values, f"{row['change']:+.1%}", interval, badge(str(row.get("verdict")))])
    return table(caption, ["", *sides, "change", "99% interval", "verdict"], rows, (1, 2, 3, 4))


def backend_comparison(run: Run, _: ChartRenderer) -> Html:
    """Show two backends that were measured in turn."""
    items = [item for item in detail(run, "ab", list) if isinstance(item, dict)]
    valid = [item for item in items if all(type(item.get(k)) in (int, float) for k in ("before", "after", "change"))]
    if not valid:
        return Html()
    backends = " and ".join(map(str, listed)) if isinstance(listed := run.settings.get("backends"), list) else "A and B"
    changes = change_table(valid, "the second against the first", ("first", "second"))
    return joined([heading(f"{backends}, in turn"), changes])


def component_shares(run: Run, _: ChartRenderer) -> Html:
    """Show where the time of a step goes, the largest part first."""
    out = []
    for phase, results in by_family([r for r in run.results if number(r, "share") is not None]).items():
        rows: list[list[object]] = []
        for r in sorted(results, key=lambda r: -(number(r, "share") or 0)):
            share, rank = number(r, "share") or 0.0, str(r.fields.get("class") or "")
            first = [r.name.removeprefix(f"{phase}/"), bar(share, f"{share:.1%}", rank), badge(rank) if rank else ""]
            rows.append([*first, format_value(r.estimate, r.unit), limit_bar(r)])
        head = ["", "share", "class", "time", "% of limit"]
        out += [heading(phase), table(f"{phase}: time of a step", head, rows, (3,))]
    return joined(out)


def unmeasured(run: Run) -> Html:
    """Show impossible measurements with their reasons."""
    notices = [str(run.details["warning"])] if run.details.get("warning") else []
    for key, words in {"left_out": "left out", "failed": "failed"}.items():
        notices += [f"{words}: {name}: {why}" for name, why in detail(run, key, dict).items()]
    return joined(map(notice, notices))


def all_results(run: Run, renderer: ChartRenderer) -> Html:
    """Show all results, folded."""
    return folded("All results with their intervals", results_table(run, renderer))


def chart_gallery(title: str, description: str, figures: Sequence[Callable[[], Html]], *, uneven: bool = False) -> Html:
    """Draw the first charts side by side, uneven ones in columns without gaps, and say how many are left out."""
    if not figures:
        return Html()
    num_hidden = len(figures) - MAX_CHARTS
    note = f" {num_hidden} more plots are left out." if num_hidden > 0 else ""
    drawn = "".join(draw() for draw in figures[:MAX_CHARTS])
    plots = Html(f'<div class="plots{" uneven" * uneven}">{drawn}</div>')
    return joined([heading(title), soft(description + note), plots])


def charts_by_length(run: Run, renderer: ChartRenderer) -> Html:
    """Draw speed against length."""
    figures = []
    for axis, series in by_length(run.results).items():
        lines = [Line(name, points, _limit(points)) for name, points in series.items()]
        if len(lines) <= MAX_SERIES:
            figures.append(partial(charts.draw_lines, renderer, axis.title, lines, axis.unit, axis.across))
    return chart_gallery("Speed against length", "Both axes are logarithmic; the shade is the 95% interval.", figures)


def _limit(points: Sequence[tuple[int, Result]]) -> list[tuple[float, float]]:
    pairs = [(float(x), number(r, "limit_s")) for x, r in points if r.unit == "s"]
    return [(x, limit_s) for x, limit_s in pairs if limit_s is not None and limit_s > 0]


def charts_by_category(run: Run, renderer: ChartRenderer) -> Html:
    """Draw families that differ by category: block types, ways of sampling."""
    figures = []
    for axis, series in by_category(run.results).items():
        rows = list(dict.fromkeys(kind for points in series.values() for kind, _ in points))[:MAX_CATEGORIES]
        shown = list(series.items())[:MAX_SERIES]
        lines = [Line(name, [(rows.index(kind), r) for kind, r in points if kind in rows]) for name, points in shown]
        kept = [line for line in lines if line.points]
        figures.append(partial(charts.draw_dots, renderer, axis.title, rows, kept, axis.unit))
    return chart_gallery("By kind", "Shorter times are further left; the axis is logarithmic.", figures, uneven=True)


def distribution_charts(run: Run, renderer: ChartRenderer) -> Html:
    """Draw the samples behind each estimate, by family."""
    enough = [r for r in run.results if r.estimate > 0 and len(r.samples) >= MIN_DISTRIBUTION_SAMPLES]
    backends, figures = has_several_backends(run.results), []
    for title, results in by_family([r for r in enough if np.isfinite(r.samples).all()]).items():
        named = [((r.label if backends else r.name).removeprefix(f"{title}/"), r) for r in results]
        for start in range(0, len(named), MAX_DISTRIBUTION_ROWS):
            rows = dict(named[start : start + MAX_DISTRIBUTION_ROWS])
            figures.append(partial(charts.draw_distributions, renderer, title, rows))
    text = (
        "Each curve is the density of one benchmark's samples around its estimate, few samples are dots; the bar below "
        "is the 95% interval. Red are outliers (beyond 1.5 interquartile ranges), triangles lie further out."
    )
    return chart_gallery("Distributions", text, figures, uneven=True)


def roofline_chart(run: Run, renderer: ChartRenderer) -> Html:
    """Draw every benchmark that states its bytes and operations, under the measured limits."""
    limits = detail(run, "limits", dict)
    try:
        roof = float(limits["operations_per_second"])
        ladder = sorted((float(b["bytes"]), float(b["bytes_per_second"])) for b in limits["bandwidth"])
        levels = [("memory", ladder[-1][1]), ("cache", max(rate for _, rate in ladder))]
        slopes = [levels[0]] + [levels[1]] * (levels[1][1] > 1.15 * levels[0][1])
    except (TypeError, KeyError, ValueError, IndexError):
        return Html()
    dots = []
    for r in run.results:
        moved, done = number(r, "bytes") or 0.0, number(r, "operations") or 0.0
        if moved > 0 and done > 0 and r.unit == "s" and is_positive(r):
            dots.append(Dot(r.name, family(r.name), done / moved, done / r.estimate))
    if len(dots) < 2 or not all(np.isfinite(x) and x > 0 for x in (roof, *(rate for _, rate in slopes))):
        return Html()
    text = (
        "Each dot is a benchmark: how many operations it needs for each byte it must move, and how many it does in a "
        "second. The lines are what this machine can do at best, as measured. Hover over a dot for its name."
    )
    return joined([heading("Roofline"), soft(text), charts.draw_roofline(renderer, dots, roof, slopes)])


def latency_charts(run: Run, renderer: ChartRenderer) -> Html:
    """Draw how latencies are distributed over requests."""
    figures = []
    for name, values in detail(run, "latencies", dict).items():
        numbers = [v for v in values if type(v) in (int, float) and 0 <= v < 1e9] if isinstance(values, list) else []
        if len(numbers) >= statistics.MIN_SAMPLES and max(numbers) > 0:
            points = cumulative_points(sorted(numbers))
            figures.append(partial(charts.draw_cumulative, renderer, LATENCY_NAMES.get(name, str(name)), points, "s"))
    description = "The share of requests, or of gaps, that were as quick as this or quicker; the dotted line is 95%."
    return chart_gallery("Latencies", description, figures)


def cumulative_points(ordered: Sequence[float]) -> list[tuple[float, float]]:
    """Return at most MAX_CURVE_POINTS of (value, share); a logarithmic axis cannot show zeros, but they count."""
    places = np.unique(np.linspace(0, len(ordered) - 1, MAX_CURVE_POINTS).astype(int))
    return [(ordered[i], (i + 1) / len(ordered)) for i in places if ordered[i] > 0]


SECTIONS: dict[str, Sequence[Section]] = {
    "micro": (
        backend_comparison,
        results_table,
        roofline_chart,
        charts_by_length,
        charts_by_category,
        distribution_charts,
    ),
    "e2e": (results_table, charts_by_length, distribution_charts),
    "load": (pivot_tables, distribution_charts),
    "kv": (pivot_tables, distribution_charts),
    "serving": (pivot_tables, latency_charts),
    "peers": (peer_table, charts_by_length, distribution_charts),
    "embed": (peer_table, distribution_charts),
    "accuracy": (results_table,),
    "profile": (component_shares, all_results, roofline_chart),
    "experiments": (verdict_list, claim_tables, all_results, charts_by_length, distribution_charts),
}
DEFAULT_SECTIONS: Sequence[Section] = (results_table, charts_by_length, charts_by_category, distribution_charts)


def render_run(run: Run, renderer: ChartRenderer) -> Html:
    """Return all sections of a run."""
    shown = [section(run, renderer) for section in SECTIONS.get(run.kind, DEFAULT_SECTIONS)]
    return joined([unmeasured(run), *shown])
