"""A flame graph as one SVG that needs nothing else: the caller below, the callee above it, as wide as its time.

Hovering shows a frame in full, a click zooms into it, a click on the lowest one zooms out again. The same text stands
alone or inside an HTML page (so the script has no `<` and no `&`, and every style begins with `.flame`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

from .flame import Flame, Frame

WIDTH, MARGIN, ROW, TOP, BOTTOM = 1200, 10, 18, 58, 28
LETTER = 6.7  # width of one, in pixels
THINNEST = 0.001  # of the whole: what is thinner is left out
# room -> (what the legend says, hue, saturation, lightness); shades of it tell neighbours apart
ROOMS = {
    "ours": ("llm_worker_rbee", 28, 85, 66),
    "line": ("its source lines", 46, 90, 74),
    "numpy": ("NumPy", 210, 62, 74),
    "stdlib": ("standard library", 140, 34, 72),
    "native": ("native code", 275, 40, 78),
    "other": ("other", 0, 0, 78),
}
ROOT = Frame("all", "", 0, "other")
STYLE = """
.flame { font: 11px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; max-width: 100%; height: auto;
  background: #fff; }
.flame text { fill: #1b1b1b; pointer-events: none; }
.flame .head, .flame .note { font-family: system-ui, "DejaVu Sans", sans-serif; fill: #222; }
.flame .head { font-size: 16px; font-weight: 600; }
.flame .note { font-size: 12px; fill: #555; }
.flame g.frame { cursor: pointer; }
.flame g.frame:hover rect { stroke: #000; stroke-width: 1; }
.flame g.below { opacity: 0.55; }
@media (prefers-color-scheme: dark) {
  .flame { background: #16181d; }
  .flame .head { fill: #eee; }
  .flame .note { fill: #aaa; }
  .flame g.frame:hover rect { stroke: #fff; }
}
@media print { .flame { background: #fff; } .flame .head { fill: #000; } .flame .note { fill: #333; } }
"""
# Each frame carries its place as fractions of the whole (data-x, data-w), its depth and its name.
SCRIPT = """
(function () {
  var svg = document.currentScript.closest("svg"), frames = Array.from(svg.querySelectorAll("g.frame"));
  function number(g, key) { return parseFloat(g.getAttribute("data-" + key)); }
  function show(chosen) {
    var x0 = number(chosen, "x"), w0 = number(chosen, "w"), d0 = number(chosen, "d"), tiny = 1e-9;
    frames.forEach(function (g) {
      var x = number(g, "x"), w = number(g, "w"), below = d0 > number(g, "d");
      var left = Math.max(0, (x - x0) / w0), right = Math.min(1, (x + w - x0) / w0);
      var out = tiny >= right - left;
      g.style.display = out ? "none" : "";
      g.classList.toggle("below", below);
      var rect = g.querySelector("rect"), text = g.querySelector("text"), wide = (right - left) * SPAN;
      rect.setAttribute("x", MARGIN + left * SPAN);
      rect.setAttribute("width", Math.max(0.3, wide - 0.5));
      text.setAttribute("x", MARGIN + left * SPAN + 4);
      var room = Math.floor((wide - 8) / LETTER), name = g.getAttribute("data-n");
      text.textContent = name.length > room ? (room > 2 ? name.slice(0, room - 1) + "\\u2026" : "") : name;
    });
  }
  frames.forEach(function (g) { g.addEventListener("click", function () { show(g); }); });
})();
"""


@dataclass(slots=True)
class Node:
    """A frame with all the time that was spent in it, under one chain of callers."""

    frame: Frame
    seconds: float = 0.0
    inner: dict[tuple[str, str], Node] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """Rows above and including this one."""
        return 1 + max((one.depth for one in self.inner.values()), default=0)


def tree(flame: Flame) -> Node:
    """Stacks with a common beginning merged."""
    root = Node(ROOT)
    for stack, weight in flame.samples:
        node = root
        node.seconds += weight
        for frame in stack:
            node = node.inner.setdefault((frame.name, frame.file), Node(frame))
            node.seconds += weight
    return root


def svg(flame: Flame, title: str) -> str:
    """The picture."""
    root = tree(flame)
    whole = root.seconds or 1.0
    rows = [one for one in _placed(root, 0.0, 0) if one[0].seconds / whole >= THINNEST or one[2] == 0]
    depth = 1 + max(level for _, _, level in rows)
    height = TOP + depth * ROW + BOTTOM
    script = SCRIPT.replace("SPAN", str(WIDTH - 2 * MARGIN)).replace("MARGIN", str(MARGIN))
    return "\n".join(
        [
            f'<svg class="flame" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img" aria-label="{escape(title)}">',
            f"<style>{STYLE}</style>",
            f'<text class="head" x="{MARGIN}" y="22">{escape(title)}</text>',
            *_legend({node.frame.room for node, _, level in rows if level}),
            *(_box(node, left, level, whole, height) for node, left, level in rows),
            f'<text class="note" x="{MARGIN}" y="{height - 8}">{len(flame.samples):,} samples, {whole:.2f} s · '
            "hover for a frame in full, click to zoom, click the lowest bar to zoom out</text>",
            f"<script>{script.replace('LETTER', str(LETTER))}</script>",
            "</svg>\n",
        ]
    )


def _placed(node: Node, left: float, level: int) -> Iterator[tuple[Node, float, int]]:
    """(node, seconds to its left, row) of all, callees by name so that the same code looks the same in two graphs."""
    yield node, left, level
    for one in sorted(node.inner.values(), key=lambda n: (n.frame.name, n.frame.file)):
        yield from _placed(one, left, level + 1)
        left += one.seconds


def _box(node: Node, left: float, level: int, whole: float, height: int) -> str:
    span = WIDTH - 2 * MARGIN
    x, wide = MARGIN + span * left / whole, span * node.seconds / whole
    y = height - BOTTOM - (level + 1) * ROW
    frame = node.frame
    where = f" · {frame.file}:{frame.line}" if frame.file else ""
    title = f"{frame.name}{where}\n{node.seconds * 1e3:,.1f} ms, {node.seconds / whole:.1%}"
    return (
        f'<g class="frame" data-x="{left / whole:.6f}" data-w="{node.seconds / whole:.6f}" data-d="{level}" '
        f'data-n="{escape(frame.name)}"><title>{escape(title)}</title>'
        f'<rect x="{x:.2f}" y="{y}" width="{max(0.3, wide - 0.5):.2f}" height="{ROW - 1}" rx="2" '
        f'fill="{_colour(frame)}"/><text x="{x + 4:.2f}" y="{y + 12}">{escape(_fitted(frame.name, wide))}</text></g>'
    )


def _fitted(name: str, wide: float) -> str:
    letters = int((wide - 8) / LETTER)
    return name if len(name) <= letters else name[: letters - 1] + "…" if letters > 2 else ""


def _colour(frame: Frame) -> str:
    _, hue, saturation, lightness = ROOMS.get(frame.room, ROOMS["other"])
    shade = zlib.crc32(frame.name.encode()) % 9 - 4  # the same in every run
    return f"hsl({hue + shade * (saturation > 0)} {saturation}% {lightness + shade}%)"


def _legend(rooms: set[str]) -> Iterator[str]:
    x = float(MARGIN)
    for words, hue, saturation, lightness in (look for room, look in ROOMS.items() if room in rooms):
        yield f'<rect x="{x:.0f}" y="34" width="12" height="12" rx="2" fill="hsl({hue} {saturation}% {lightness}%)"/>'
        yield f'<text class="note" x="{x + 17:.0f}" y="44">{words}</text>'
        x += 17 + 6.6 * len(words) + 16
