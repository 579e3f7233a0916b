"""Charts of a report as inline SVG: distributions, values against length or category, roofline, latencies, history.

The only module that imports matplotlib (the extra `bench`). Colours are placeholders that become variables of the
page's style sheet, so that one chart serves light and dark pages. Text stays text. A group whose id starts with TIP
gets a `<title>`, shown on hovering.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_worker_rbee.errors import MissingDependencyError

from ..results import Result, digits, quantity, scale
from . import html
from .html import Html

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.axis import Axis as Axis

Floats = NDArray[np.float64]
MARKERS = "osD^vPX*"
INK, MUTED, GRID, BAD, PAPER = "#010101", "#020202", "#030303", "#040404", "#050505"
SERIES = tuple(f"#0601{i:02x}" for i in range(8))
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", BAD: "bad", PAPER: "card"}
VARIABLES |= {colour: f"s{i}" for i, colour in enumerate(SERIES)}
UNIT_SYMBOLS, MAX_UNIT_CHARACTERS = {"us": "µs"}, 10
MIN_LOG_DECADES = 0.7  # a narrower logarithmic axis has too few round values
TIP = "tip-"
SMALL_WIDTH, LARGE_WIDTH = 4.7, 9.6  # inches
STYLE = {
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 9.5, "axes.titlesize": 10.5,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.edgecolor": GRID, "axes.labelcolor": MUTED,
    "axes.titlecolor": INK, "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "axes.facecolor": "none", "figure.facecolor": "none", "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": GRID, "ytick.color": GRID, "xtick.labelcolor": MUTED, "ytick.labelcolor": INK, "text.color": INK,
    "xtick.minor.visible": False, "legend.frameon": False, "legend.fontsize": 8.5, "legend.labelcolor": INK,
    "lines.linewidth": 1.4, "path.simplify": True,
}  # fmt: skip


@dataclass(slots=True)
class ChartRenderer:
    """Renders the charts of one page; they are numbered, so that their inner ids differ."""

    count: int = 0
    figure: Html = field(default_factory=Html)  # the last chart
    _tooltips: list[str] = field(default_factory=list)
    _matplotlib: Any = field(default_factory=lambda: _import_matplotlib())

    @contextmanager
    def chart(self, title: str, description: str, height: float, width: float = SMALL_WIDTH) -> Iterator[Axes]:
        """Give the axes of a chart of this size in inches; afterwards `figure` holds it."""
        self.count += 1
        self._tooltips.clear()
        with self._matplotlib.rc_context({**STYLE, "svg.hashsalt": f"plot {self.count}"}):
            figure = self._matplotlib.figure.Figure((width, height), layout="constrained")
            axes = figure.add_subplot()
            yield axes
            axes.set_title(_truncate(title, 44))
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        self.figure = html.figure(self._clean_svg(file.getvalue()), description, wide=width > SMALL_WIDTH)

    def tooltip(self, text: str) -> str:
        """Return the id of a group that shows this text."""
        self._tooltips.append(text)
        return f"{TIP}{len(self._tooltips) - 1}"

    def _clean_svg(self, svg: str) -> str:
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.S)
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
        svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', svg, count=1)
        svg = re.sub(rf'<g id="{TIP}(\d+)">', lambda m: f"<g><title>{escape(self._tooltips[int(m[1])])}</title>", svg)
        svg = re.sub(r'<g id="[^"]*"', "<g", svg)
        svg = re.sub(r"(font: [\d.]+px|font: bold [\d.]+px) [^;\"]*", r"\1 sans-serif", svg)
        svg = re.sub(r": (#[0-9a-f]{6})", lambda m: f": var(--{VARIABLES[m[1]]})" if m[1] in VARIABLES else m[0], svg)
        return re.sub(r"\s*\n\s*", " ", svg)

    def log_ticks(self, axis: Axis, ends: tuple[float, float], unit: str) -> None:
        """Set few ticks on a logarithmic axis, with prefixed units."""
        ticker = self._matplotlib.ticker
        decades = math.log10(max(ends[1], 1e-300) / max(ends[0], 1e-300))
        many = ticker.LogLocator(subs=(1, 2, 5) if decades < 1.4 else (1,), numticks=6)
        axis.set_major_locator(many if decades > MIN_LOG_DECADES else ticker.MaxNLocator(4, steps=[1, 2, 5, 10]))
        axis.set_minor_locator(ticker.NullLocator())
        axis.set_major_formatter(lambda value, _: format_tick(value, unit))


def format_tick(value: float, unit: str) -> str:
    """Format a value on an axis, as short as possible."""
    size, name = scale(value * (1 + 1e-9), unit)
    return f"{value / size:,.3g} {UNIT_SYMBOLS.get(name, name)[:MAX_UNIT_CHARACTERS]}".rstrip()


def _import_matplotlib() -> Any:
    try:
        import matplotlib
        import matplotlib.figure
        import matplotlib.ticker
    except ImportError:
        message = "charts need matplotlib, which is not installed: pip install 'llm-worker-rbee[bench]'"
        raise MissingDependencyError(message) from None
    return matplotlib


class Line(NamedTuple):
    """A line through results at places on the x axis."""

    label: str
    points: Sequence[tuple[float, Result]]
    limit: Sequence[tuple[float, float]] = ()  # the limit of the machine, drawn dashed

    def columns(self) -> Floats:
        """Return all x, estimates, lower and upper ends."""
        return np.array([(x, r.estimate, r.low, r.high) for x, r in self.points]).T


class Dot(NamedTuple):
    """A benchmark on the roofline: operations per byte, operations per second."""

    label: str
    group: str
    intensity: float
    rate: float


def draw_distributions(renderer: ChartRenderer, title: str, rows: Mapping[str, Result]) -> Html:
    """Draw each row's samples as a density around its estimate; outliers as dots, far ones at the edge."""
    reach = max((_axis_reach(row) for row in rows.values()), default=0.05)
    description = f"distribution of the samples of {', '.join(row.name for row in rows.values())}"
    with renderer.chart(title, description, 0.75 + 0.29 * len(rows)) as axes:
        for place, (label, row) in enumerate(rows.items()):
            _draw_distribution(renderer, axes, place, label, row, reach)
        axes.set(xlim=(-reach, reach * 1.04), ylim=(len(rows) - 0.4, -0.75), xlabel="difference from the estimate")
        axes.set_yticks(range(len(rows)), [_truncate(label) for label in rows])
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:+.{0 if reach > 0.03 else 1}%}" if abs(x) > 1e-9 else "0")
        axes.locator_params(axis="x", nbins=5, steps=[1, 2, 5, 10])
        axes.tick_params(length=0)
        axes.grid(axis="y", visible=False)
    return renderer.figure


def _draw_distribution(renderer: ChartRenderer, axes: Axes, place: int, label: str, row: Result, reach: float) -> None:
    values = np.asarray(row.samples) / row.estimate - 1
    outlier = _is_outlier(values)
    regular = values[~outlier]
    tip = renderer.tooltip(f"{label}: {len(values)} samples, {int(outlier.sum())} outliers")
    if len(regular) >= 12 and np.ptp(regular) > 0:
        x, height = _density(regular, reach)
        axes.fill_between(x, place - 0.6 * height, place, color=SERIES[0], alpha=0.55, linewidth=0, gid=tip)
    else:
        heights = np.full(len(regular), place - 0.2)
        axes.plot(regular, heights, "o", ms=3, alpha=0.7, color=SERIES[0], mew=0, gid=tip)
    far = np.clip(values[outlier], -reach, reach)
    for marker, which in (("o", abs(values[outlier]) < reach), (">", abs(values[outlier]) >= reach)):
        if which.any():
            axes.plot(far[which], np.full(int(which.sum()), place - 0.2), marker, ms=2.8, alpha=0.8, color=BAD, mew=0)
    low, high = (np.clip(value / row.estimate - 1, -reach, reach) for value in (row.low, row.high))
    axes.plot([low, high], [place + 0.12] * 2, color=INK, linewidth=2.2, solid_capstyle="butt")
    axes.plot([0], [place + 0.12], "|", color=INK, ms=6, mew=1.2)


def draw_lines(renderer: ChartRenderer, title: str, lines: Sequence[Line], unit: str, across: str) -> Html:
    """Draw values against a length, both on logarithmic axes, with intervals and limits."""
    places = sorted({point[0] for line in lines for point in line.points})
    description = f"{title} against {across}, for {', '.join(line.label for line in lines)}"
    with renderer.chart(title, description, 2.9 + 0.18 * -(-len(lines) // 3) * (len(lines) > 1)) as axes:
        for i, line in enumerate(lines):
            _draw_line(renderer, axes, line, i, unit)
        axes.set_xscale("symlog", linthresh=1) if places[0] <= 0 else axes.set_xscale("log")
        axes.set(yscale="log", xlabel=across)
        axes.set_xticks(_pick_evenly(places), [f"{x:,g}" for x in _pick_evenly(places)])
        renderer.log_ticks(axes.yaxis, axes.get_ylim(), unit)
        axes.minorticks_off()
        if len(lines) > 1:
            axes.figure.legend(loc="outside lower center", ncols=3, handlelength=1.6)
        elif lines[0].limit:
            axes.legend(loc="best", handlelength=1.6)
        axes.margins(0.06, 0.12)
    return renderer.figure


def _draw_line(renderer: ChartRenderer, axes: Axes, line: Line, i: int, unit: str) -> None:
    colour = SERIES[i % len(SERIES)]
    x, value, low, high = line.columns()
    tip = f"{line.label}: " + ", ".join(f"{a:g}: {quantity(v, unit)}" for a, v in zip(x, value, strict=True))
    axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(x, value, label=_truncate(line.label), gid=renderer.tooltip(tip), **_marker_style(i))
    if line.limit:
        label = "limit of the machine" if i == 0 else None
        axes.plot(*zip(*line.limit, strict=True), color=MUTED, ls=(0, (4, 3)), lw=1, label=label)


def draw_dots(renderer: ChartRenderer, title: str, rows: Sequence[str], lines: Sequence[Line], unit: str) -> Html:
    """Draw one row a category, a dot with its interval for each series; the x of a line's points is the row."""
    height = 0.8 + 0.22 * len(rows) + 0.25 * (len(lines) > 1)
    with renderer.chart(title, f"{title} for {', '.join(rows)}", height) as axes:
        for i, line in enumerate(lines):
            colour = SERIES[i % len(SERIES)]
            row, value, low, high = line.columns()
            axes.hlines(row, low, high, color=colour, linewidth=2.4, alpha=0.5)
            for y, x in zip(row, value, strict=True):
                tip = renderer.tooltip(f"{rows[int(y)]} {line.label}: {quantity(x, unit)}")
                axes.plot([x], [y], gid=tip, **_marker_style(i))
            axes.plot([], [], ls="", label=_truncate(line.label), **_marker_style(i))
        axes.set(xscale="log", ylim=(len(rows) - 0.5, -0.5))
        axes.set_yticks(range(len(rows)), [_truncate(row) for row in rows])
        renderer.log_ticks(axes.xaxis, axes.get_xlim(), unit)
        axes.tick_params(length=0)
        if len(lines) > 1:
            axes.figure.legend(loc="outside lower center", ncols=min(4, len(lines)), handletextpad=0.2)
    return renderer.figure


def draw_cumulative(renderer: ChartRenderer, title: str, points: Sequence[tuple[float, float]], unit: str) -> Html:
    """Draw the cumulative distribution of sorted values."""
    with renderer.chart(title, f"share of all measurements of {title} that came within a time", 2.7) as axes:
        axes.plot(*np.array(points).T, drawstyle="steps-post", color=SERIES[0], label=_truncate(title))
        axes.set(xscale="log", ylim=(0, 1.02))
        renderer.log_ticks(axes.xaxis, axes.get_xlim(), unit)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
        axes.axhline(0.95, color=MUTED, lw=0.8, ls=(0, (2, 3)))
    return renderer.figure


def draw_roofline(
    renderer: ChartRenderer, dots: Sequence[Dot], roof: float, slopes: Sequence[tuple[str, float]]
) -> Html:
    """Draw operations per second against operations per byte, under the measured limits."""
    description = f"roofline of {len(dots)} benchmarks: operations a second against operations a byte"
    with renderer.chart("", description, 4.4, LARGE_WIDTH) as axes:
        axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="operations a second")
        places, rates = [dot.intensity for dot in dots], [dot.rate for dot in dots]
        axes.set_xlim(min(*places, 0.25) / 2, max(*places, 4 * roof / slopes[0][1]) * 2)
        axes.set_ylim(min(*rates, roof / 100) / 3, max(*rates, roof) * 3)
        _draw_limits(axes, roof, slopes)
        for i, group in enumerate(dict.fromkeys(dot.group for dot in dots)):
            for dot in (dot for dot in dots if dot.group == group):
                tip = f"{dot.label}: {quantity(dot.rate, 'FLOP/s')} at {digits(dot.intensity)} FLOP/B"
                axes.plot([dot.intensity], [dot.rate], alpha=0.85, gid=renderer.tooltip(tip), **_marker_style(i))
            axes.plot([], [], ls="", label=_truncate(group), **_marker_style(i))
        renderer.log_ticks(axes.yaxis, axes.get_ylim(), "FLOP/s")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
        axes.minorticks_off()
        axes.figure.legend(loc="outside right upper", handletextpad=0.2)
    return renderer.figure


def _draw_limits(axes: Axes, roof: float, slopes: Sequence[tuple[str, float]]) -> None:
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    axes.hlines(roof, roof / max(rate for _, rate in slopes), right, color=INK, lw=1.3)
    axes.text(right, roof * 1.12, f"arithmetic {quantity(roof, 'FLOP/s')} ", ha="right", va="bottom", fontsize=8.5)
    # how steep a decade a decade looks, in a picture about twice as wide as it is high
    angle = np.degrees(np.arctan(0.58 * np.log10(right / left) / np.log10(top / bottom)))
    for i, (name, rate) in enumerate(slopes):
        style = "-" if i == 0 else (0, (4, 3))
        axes.plot([left, roof / rate], [left * rate, roof], color=INK if i == 0 else MUTED, ls=style, lw=1.3)
        start = max(left, bottom / rate) ** 0.4 * (roof / rate) ** 0.6
        axes.text(
            start,
            start * rate * 1.2,
            f"{name} {quantity(rate, 'B/s')}",
            rotation=angle,
            rotation_mode="anchor",
            fontsize=8.5,
            ha="center",
            va="bottom",
        )


def draw_history(renderer: ChartRenderer, title: str, names: Sequence[str], lines: Sequence[Line]) -> Html:
    """Draw estimates over commits, each line as percent of its first value."""
    description = f"{title} over {len(names)} runs: {', '.join(line.label for line in lines)}"
    with renderer.chart(title, description, 2.7 + 0.2 * (len(lines) > 3)) as axes:
        for i, line in enumerate(lines):
            colour = SERIES[i % len(SERIES)]
            x, value, low, high = line.columns()
            first = value[0]
            shares = [f"{names[int(a)]} {v / first:.1%}" for a, v in zip(x, value, strict=True)]
            tip = f"{line.label}: {', '.join(shares)}"
            axes.fill_between(x, low / first, high / first, color=colour, alpha=0.16, linewidth=0)
            axes.plot(x, value / first, label=_truncate(line.label), gid=renderer.tooltip(tip), **_marker_style(i))
        axes.axhline(1.0, color=MUTED, lw=0.8)
        axes.set_ylabel("of the first run")
        shown = _pick_evenly(range(len(names)), 6)
        axes.set_xticks(shown, [names[i] for i in shown], rotation=20 if len(shown) > 3 else 0)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
        axes.margins(0.08, 0.15)
        if 1 < len(lines) <= len(SERIES):
            axes.figure.legend(loc="outside lower center", ncols=min(3, len(lines)), handlelength=1.4)
    return renderer.figure


def _marker_style(i: int) -> dict[str, Any]:
    """Return the style of the i-th series: a colour comes with its own marker, and with another one the next time."""
    turn = i // len(SERIES)
    return {"color": SERIES[i % len(SERIES)], "marker": MARKERS[(i + turn) % len(MARKERS)], "ms": 4.5, "mew": 0}


def _truncate(text: str, max_count: int = 24) -> str:
    """Shorten a label; matplotlib hides labels that start with an underscore."""
    text = text if len(text) <= max_count else text[: max_count - 1] + "…"
    return "\u200b" + text if text.startswith("_") else text


def _pick_evenly(places: Sequence[Any], max_count: int = 7) -> list[Any]:
    """Return at most so many values, evenly chosen, with the first and the last."""
    if len(places) <= max_count:
        return list(places)
    return [places[round(i * (len(places) - 1) / (max_count - 1))] for i in range(max_count)]


def _is_outlier(values: Floats) -> NDArray[np.bool_]:
    """Return which values are beyond Tukey's inner fences, as statistics.outliers counts."""
    first, third = np.percentile(values, [25, 75])
    step = 1.5 * (third - first)
    return np.asarray((values < first - step) | (values > third + step))


def _axis_reach(row: Result) -> float:
    """Return how far the axis must go for the samples of a row without outliers."""
    values = np.asarray(row.samples) / row.estimate - 1
    regular = values[~_is_outlier(values)]
    return float(np.clip(1.25 * np.abs(regular).max(), 0.01, 1.0))


def _density(values: Floats, reach: float) -> tuple[Floats, Floats]:
    """Return (x, height up to 1): a Gaussian kernel with Silverman's width at 64 points."""
    spread = min(values.std(), np.subtract(*np.percentile(values, [75, 25])) / 1.34) or values.std()
    width = 0.9 * spread * len(values) ** -0.2
    x = np.linspace(max(values.min() - 3 * width, -reach), min(values.max() + 3 * width, reach), 64)
    height = np.exp(-0.5 * ((x[:, None] - values) / width) ** 2).sum(1)
    return x, height / height.max()
