"""Galleries of plots for a run: speed against length, by kind, distributions, roofline, latencies.

Each function gives nothing where a run has nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from .. import statistics
from ..results import Result, Run
from . import charts, result_names
from .charts import Dot, Line, Sampled
from .html import Html, figure, gallery, heading, joined, soft
from .plots import Plots
from .result_names import family, measurable, number

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
        if len(numbers) >= statistics.FEWEST and max(numbers) > 0:
            figures.append(partial(_shares, plots, LATENCIES.get(name, str(name)), sorted(numbers)))
    told = "The share of requests, or of gaps, that were as quick as this or quicker; the dotted line is 95%."
    return drawn("Latencies", told, figures)


def _shares(plots: Plots, title: str, ordered: Sequence[float]) -> Html:
    """A line of at most STEPS points; a logarithmic axis has no place for zeros, but they count."""
    places = np.unique(np.linspace(0, len(ordered) - 1, STEPS).astype(int))
    points = [(ordered[i], (i + 1) / len(ordered), 0.0, 0.0) for i in places if ordered[i] > 0]
    told = f"share of all measurements of {title} that came within a time"
    return figure(charts.shares(plots, title, [Line(title, points)], "s"), told)
