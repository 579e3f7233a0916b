"""The report of a profile as one HTML page that needs nothing else: bars, tables, targets, and the flame graphs inline.

Light and dark follow the reader's setting; printed, it is light.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from ..results import Run
from . import flame_svg
from .flame import Flame
from .report import (
    COLUMNS,
    PHASES,
    Part,
    classes,
    facts,
    part_line,
    parts,
    remark,
    row,
    step_line,
    targets,
    top,
    whole,
)

COLOURS = {"critical": "var(--critical)", "moderate": "var(--moderate)", "minor": "var(--minor)"}
STYLE = """
:root { color-scheme: light dark; --text: #1c1e22; --soft: #5d636e; --page: #f6f7f9; --card: #fff; --line: #e2e5ea;
  --critical: #d9542b; --moderate: #e0a526; --minor: #8fa3b8; --track: #eceff3; }
@media (prefers-color-scheme: dark) { :root { --text: #e8eaee; --soft: #9aa2af; --page: #101216; --card: #16181d;
  --line: #2a2e37; --critical: #ec6b42; --moderate: #e0b04a; --minor: #61748a; --track: #23272f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 0; } h3 { font-size: 15px; margin: 22px 0 6px; }
.soft { color: var(--soft); } .step { font-size: 15px; margin: 2px 0 14px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 20px 22px;
  margin: 18px 0; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 18px; } .pair section { margin: 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 14px 0 22px; font-size: 13.5px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 5px 12px; align-items: center; }
.track { background: var(--track); border-radius: 4px; height: 14px; }
.bar { height: 14px; border-radius: 4px; min-width: 2px; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.share { text-align: right; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 9px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
.mark { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 6px;
  print-color-adjust: exact; -webkit-print-color-adjust: exact; }
ol, ul { margin: 0; padding-left: 22px; } li { margin: 4px 0; } .plain { list-style: none; padding: 0; }
.key { font-size: 13px; margin-top: 14px; } .key span { margin-right: 16px; white-space: nowrap; }
.graph { padding: 12px 10px; overflow-x: auto; } .graph svg { width: 100%; min-width: 760px; display: block; }
@media (max-width: 800px) { .pair { grid-template-columns: 1fr; } }
@media print { :root { --text: #000; --soft: #444; --page: #fff; --card: #fff; --line: #ccc; --track: #eee; }
  main { max-width: none; padding: 0; } section { break-inside: avoid; } .graph svg { min-width: 0; }
  table { font-size: 10.5px; } th, td { padding: 3px 5px; } }
"""


def page(run: Run, flames: Mapping[str, Flame]) -> str:
    """The whole page."""
    name = escape(str((run.model or {}).get("name", "a model")))
    shown = [phase for phase in PHASES if whole(run, phase) is not None]
    body = [
        f"<h1>Profile of {name}</h1>",
        f'<div class="soft">where the time of a step goes{"" if run.complete else " (broken off early)"}</div>',
        "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts(run).items()) + "</dl>",
        '<div class="pair">' + "".join(_bars(run, phase) for phase in shown) + "</div>",
        *(_phase(run, phase) for phase in shown),
        *(_graph(phase, flame, name) for phase, flame in flames.items()),
        f'<p class="soft">{escape(remark(run))}</p>',
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Profile of {name}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _bars(run: Run, phase: str) -> str:
    """All components as bars, the largest first; a full track is the largest one."""
    found = sorted(parts(run, phase), key=lambda part: -part.share)
    longest = max((part.share for part in found), default=1.0) or 1.0
    lines = "".join(
        f'<div>{escape(part.label)}</div><div class="track"><div class="bar" style="background:{COLOURS[part.kind]};'
        f'width:{100 * part.share / longest:.2f}%"></div></div><div class="share">{part.share:.1%}</div>'
        for part in found
    )
    key = "".join(f"<span>{_mark(kind)}{kind} ({words})</span>" for kind, words in
                  (("critical", "over 10%"), ("moderate", "5 to 10%"), ("minor", "under 5%")))  # fmt: skip
    return (
        f'<section><h2>{PHASES[phase]}</h2><div class="step soft">{escape(step_line(run, phase))}</div>'
        f'<div class="bars">{lines}</div><div class="key soft">{key}</div></section>'
    )


def _phase(run: Run, phase: str) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    rows = "".join(_row(part) for part in parts(run, phase))
    best = "".join(f"<li>{escape(part_line(part))}</li>" for part in top(run, phase))
    kinds = "".join(
        f"<li>{_mark(kind)}{kind}: {escape(', '.join(names) or 'none')}</li>"
        for kind, names in classes(run, phase).items()
    )
    aims = "".join(f"<li>{escape(one)}</li>" for one in targets(run, phase)) or "<li>nothing is critical</li>"
    return (
        f"<section><h2>{PHASES[phase]}: the components</h2>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f'<h3>Top five</h3><ol>{best}</ol><h3>Classes</h3><ul class="plain">{kinds}</ul>'
        f"<h3>Targets</h3><ul>{aims}</ul></section>"
    )


def _row(part: Part) -> str:
    *cells, kind = row(part)
    return "<tr>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + f"<td>{_mark(kind)}{escape(kind)}</td></tr>"


def _mark(kind: str) -> str:
    return f'<i class="mark" style="background:{COLOURS[kind]}"></i>'


def _graph(phase: str, flame: Flame, name: str) -> str:
    return f'<section class="graph">{flame_svg.svg(flame, f"{PHASES.get(phase, phase)} of {name}")}</section>'
