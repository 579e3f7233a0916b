"""What a profile says: the table, the top five, the classes and the targets, from the run alone; as Markdown and files.

Everything is read back from the results, so a report can be made again from run.json. The page for a browser is
html.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from ..format import quantity, spread
from ..results import Result, ResultsError, Run
from . import flame as flame_graph
from .flame import Flame, speedscope

PHASES = {"prefill": "Prefill", "decode": "Decode"}
LABELS = {
    "embedding": "embedding",
    "norm": "norm",
    "qkv": "QKV",
    "rope": "RoPE",
    "kv_write": "KV write",
    "rope_kv_write": "RoPE + KV write",
    "attention": "attention",
    "output": "output",
    "mlp": "MLP",
    "head": "head",
    "sampling": "sampling",
    "scheduling": "scheduling",
    "python": "Python overhead",
}
CLASSES = ("critical", "moderate", "minor")
COLUMNS = ("component", "share", "time a step", "interval", "calls", "time a call", "bytes", "least time", "% of limit",
           "class")  # fmt: skip
TOP = 5
REACHABLE = 0.5  # of the limit: what a target assumes


class Part(NamedTuple):
    """One component of a phase."""

    name: str
    result: Result

    @property
    def label(self) -> str:
        """As people write it; an op that nobody knows has its own name."""
        return LABELS.get(self.name, self.name)

    @property
    def seconds(self) -> float:
        """A step."""
        return self.result.estimate

    @property
    def share(self) -> float:
        """Of the step."""
        return float(self.result.fields["share"])

    @property
    def kind(self) -> str:
        """Its class."""
        return str(self.result.fields["class"])

    def figure(self, name: str) -> float:
        """A counted field, NaN where it has none."""
        return float(self.result.fields.get(name) or math.nan)


def parts(run: Run, phase: str) -> list[Part]:
    """The components in the order in which a token meets them; unknown ops before Python's rest."""
    found = {r.name.partition("/")[2]: r for r in run.results if r.name.startswith(f"{phase}/") and "share" in r.fields}
    order = {name: i for i, name in enumerate(LABELS)}
    names = sorted(found, key=lambda name: order.get(name, order["python"] - 0.5))
    return [Part(name, found[name]) for name in names]


def whole(run: Run, phase: str) -> Result | None:
    """The step itself."""
    return next((r for r in run.results if r.name == f"{phase}/step"), None)


def top(run: Run, phase: str) -> list[Part]:
    """The five that take the most."""
    return sorted(parts(run, phase), key=lambda part: -part.share)[:TOP]


def part_line(part: Part) -> str:
    """`MLP: 60.2%, 114 ms`."""
    return f"{part.label}: {part.share:.1%}, {quantity(part.seconds, 's')}"


def row(part: Part) -> list[str]:
    """The cells of a component, under COLUMNS."""
    calls, least = part.figure("calls"), part.figure("limit_s")
    return [
        part.label,
        f"{part.share:.1%}",
        quantity(part.seconds, "s"),
        spread((part.result.low, part.result.high), "s"),
        "-" if math.isnan(calls) else f"{calls:,.0f}",
        quantity(part.seconds / calls, "s"),
        quantity(part.figure("bytes"), "B"),
        quantity(least, "s"),
        "-" if math.isnan(least) else f"{100 * least / part.seconds:.1f}%",
        part.kind,
    ]


def targets(run: Run, phase: str) -> list[str]:
    """For each critical component: what its limit is, and what half of that limit would make of the step."""
    step = whole(run, phase)
    critical = [part for part in sorted(parts(run, phase), key=lambda p: -p.share) if part.kind == "critical"]
    return [] if step is None else [target(part, phase, step.estimate) for part in critical]


def target(part: Part, phase: str, step: float) -> str:
    """One sentence."""
    head = f"{part.label} takes {part.share:.1%} of a {phase} step ({quantity(part.seconds, 's')})"
    least = part.figure("limit_s")
    if math.isnan(least):
        best = f"without it the step would be {step / max(step - part.seconds, 1e-12):.2f} times as fast"
        return f"{head}. It has no floor that bytes or operations set: {best}, and no more."
    bound = part.result.fields.get("bound_by")
    amount = (
        f"{part.figure('operations') / 1e6:,.0f} million operations"
        if bound == "arithmetic"
        else f"{quantity(part.figure('bytes'), 'B')} to move"
    )
    head += f", at {100 * least / part.seconds:.1f}% of its limit ({quantity(least, 's')}: {amount}, bound by {bound})"
    if part.seconds <= least / REACHABLE:
        return f"{head}. That is past half of the limit: there is little left to gain."
    after = step - part.seconds + least / REACHABLE
    return (
        f"{head}. At half the limit the step would take {quantity(after, 's')} instead of {quantity(step, 's')}: "
        f"{step / after:.2f} times as fast."
    )


def classes(run: Run, phase: str) -> dict[str, list[str]]:
    """Labels by class, each with its share, the largest first."""
    found = sorted(parts(run, phase), key=lambda part: -part.share)
    return {kind: [f"{part.label} {part.share:.1%}" for part in found if part.kind == kind] for kind in CLASSES}


def step_line(run: Run, phase: str) -> str:
    """`128 tokens in 590 ms (580 to 600 ms): 217 tokens/s`."""
    step = whole(run, phase)
    if step is None:
        return "not measured"
    tokens = int(step.fields.get("tokens", 1))
    amount = f"{tokens:,} token" + "s" * (tokens != 1)
    took = f"{quantity(step.estimate, 's')} ({spread((step.low, step.high), 's')})"
    return f"{amount} in {took}: {tokens / step.estimate:,.1f} tokens/s"


def facts(run: Run) -> dict[str, str]:
    """What was measured, where."""
    machine, commit, settings = run.machine, run.commit, run.settings
    features = " ".join(machine.get("features") or ())
    limits = run.details.get("limits") or {}
    found = {
        "Model": str((run.model or {}).get("name", "-")),
        "Settings": ", ".join(f"{key} {value}" for key, value in settings.items()),
        "Processor": f"{machine.get('cpu')}, {machine.get('cores')} cores, {features}",
        "System": f"{machine.get('system')}, {machine.get('memory_gib')} GiB of memory",
        "Versions": ", ".join(f"{name} {value}" for name, value in run.versions.items()),
        "Commit": "-" if commit is None else commit["id"][:12] + " with changes" * bool(commit.get("dirty")),
        "Date": run.created,
    }
    if limits:
        best, rate = limits["bandwidth"][-1]["bytes_per_second"], limits["operations_per_second"]
        found["Limits"] = (
            f"measured with {limits['threads']} thread(s): {quantity(best, 'B/s')} from memory, "
            f"{quantity(rate, 'FLOP/s')} in float32"
        )
    return found


def remark(run: Run) -> str:
    """What the stopwatch itself costs, and how the figures are to be read."""
    profiler: Mapping[str, Any] = run.details.get("profiler") or {}
    shares = ", ".join(f"{share:.2%} of {phase}" for phase, share in (profiler.get("share") or {}).items())
    cost = quantity(float(profiler.get("seconds_per_call", math.nan)), "s")
    return (
        f"The stopwatch costs {cost} a call ({shares}); that is taken off. Python overhead is what remains of a step "
        "when all ops, the batch and the stopwatch are taken off. Bytes and operations are what an answer needs at "
        "least, not what the backend does for it; the limit is the larger of the two times they take at the measured "
        "rates."
    )


def markdown(run: Run) -> str:
    """The report as text."""
    lines = [f"# Profile of {(run.model or {}).get('name', 'a model')}", ""]
    lines += [f"- {name}: {value}" for name, value in facts(run).items()]
    for phase, title in PHASES.items():
        if whole(run, phase) is None:
            continue
        lines += ["", f"## {title}", "", step_line(run, phase), ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * (len(COLUMNS) - 2) + " --- |"]
        lines += [f"| {' | '.join(row(part))} |" for part in parts(run, phase)]
        lines += ["", "Top five:", ""]
        lines += [f"{i}. {part_line(part)}" for i, part in enumerate(top(run, phase), 1)]
        lines += ["", "Classes:", ""]
        lines += [f"- {kind}: {', '.join(names) or 'none'}" for kind, names in classes(run, phase).items()]
        lines += ["", "Targets:", "", *(f"- {one}" for one in targets(run, phase) or ["nothing is critical"])]
    lines += ["", remark(run), "", "Critical is over 10% of a step, moderate 5 to 10%, minor less.", ""]
    return "\n".join(lines)


def write(folder: Path, run: Run, flames: Mapping[str, Flame], page: str) -> list[Path]:
    """All files of a profile; the graphs that were not drawn are left out."""
    title = f"{(run.model or {}).get('name', 'model')}"
    texts = {"report.md": markdown(run), "report.html": page}
    for phase, flame in flames.items():
        texts[f"flame-{phase}.svg"] = flame_graph.svg(flame, f"{PHASES.get(phase, phase)} of {title}")
    if flames:
        texts["profile.speedscope.json"] = json.dumps(speedscope(flames, f"profile of {title}"), ensure_ascii=False)
    run.save(folder / "run.json")
    try:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"cannot write {folder}: {error.strerror}") from None
    return [folder / name for name in ("run.json", *texts)]


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
    return f'<section class="graph">{flame_graph.svg(flame, f"{PHASES.get(phase, phase)} of {name}")}</section>'
