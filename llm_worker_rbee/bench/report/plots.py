"""From matplotlib figures to inline SVG: the only file that imports matplotlib (the extra `bench`).

Colours are written as placeholders and replaced by variables of the page's style sheet, so that one picture serves
light and dark pages. Text stays text. A group whose id starts with TIP gets a `<title>`, shown on hovering.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from ...errors import MissingDependencyError
from ..format import scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.axis import Axis as Axis
    from matplotlib.figure import Figure as Figure

INK, MUTED, GRID, BAD, PAPER = "#010101", "#020202", "#030303", "#040404", "#050505"
SERIES = tuple(f"#0601{i:02x}" for i in range(8))
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", BAD: "bad", PAPER: "card"} | {
    colour: f"s{i}" for i, colour in enumerate(SERIES)
}
MICRO, LONGEST_UNIT = {"us": "µs"}, 10
NARROW = 0.7  # decades in which a logarithmic axis has too few round places of its own
TIP = "tip-"
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
class Plots:
    """The plots of one page: numbered, so that their inner ids differ."""

    count: int = 0
    _tips: list[str] = field(default_factory=list)
    _matplotlib: Any = field(default_factory=lambda: _import())

    def draw(self, size: tuple[float, float], paint: Callable[[Figure], None]) -> str:
        """A figure as SVG."""
        self.count += 1
        self._tips.clear()
        with self._matplotlib.rc_context({**STYLE, "svg.hashsalt": f"plot {self.count}"}):
            figure = self._matplotlib.figure.Figure(size, layout="constrained")
            paint(figure)
            file = io.StringIO()
            nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            figure.savefig(file, format="svg", metadata=nothing)
        return self._finished(file.getvalue())

    def tip(self, text: str) -> str:
        """The id of a group that shows this text."""
        self._tips.append(text)
        return f"{TIP}{len(self._tips) - 1}"

    def _finished(self, svg: str) -> str:
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.S)
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
        svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', svg, count=1)
        svg = re.sub(rf'<g id="{TIP}(\d+)">', lambda m: f"<g><title>{escape(self._tips[int(m[1])])}</title>", svg)
        svg = re.sub(r'<g id="[^"]*"', "<g", svg)
        svg = re.sub(r"(font: [\d.]+px|font: bold [\d.]+px) [^;\"]*", r"\1 sans-serif", svg)
        svg = re.sub(r": (#[0-9a-f]{6})", lambda m: f": var(--{VARIABLES[m[1]]})" if m[1] in VARIABLES else m[0], svg)
        return re.sub(r"\s*\n\s*", " ", svg)

    def log_ticks(self, axis: Axis, ends: tuple[float, float], unit: str) -> None:
        """Few ticks on a logarithmic axis, in units that people read."""
        ticker = self._matplotlib.ticker
        decades = math.log10(max(ends[1], 1e-300) / max(ends[0], 1e-300))
        many = ticker.LogLocator(subs=(1, 2, 5) if decades < 1.4 else (1,), numticks=6)
        axis.set_major_locator(many if decades > NARROW else ticker.MaxNLocator(4, steps=[1, 2, 5, 10]))
        axis.set_minor_locator(ticker.NullLocator())
        axis.set_major_formatter(lambda value, _: tick(value, unit))

    def even_ticks(self, axis: Axis, most: int) -> None:
        """So many ticks at round values."""
        axis.set_major_locator(self._matplotlib.ticker.MaxNLocator(most, steps=[1, 2, 5, 10]))


def tick(value: float, unit: str) -> str:
    """A figure on an axis: as short as it can be."""
    size, name = scale(value * (1 + 1e-9), unit)
    return f"{value / size:,.3g} {MICRO.get(name, name)[:LONGEST_UNIT]}".rstrip()


def _import() -> Any:
    try:
        import matplotlib
        import matplotlib.figure
        import matplotlib.ticker
    except ImportError:
        raise MissingDependencyError(
            "plots need matplotlib, which is not installed: pip install 'llm-worker-rbee[bench]'"
        ) from None
    return matplotlib
