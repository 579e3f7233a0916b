"""The report of a profile, from the run alone: table, top five, classes and targets, as Markdown and as an HTML page.

Everything is read back from the results, so a report can be made again from run.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..report import html
from ..results import Result, ResultsError, Run, quantity, spread
from .flame import Flame, render_svg, speedscope

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
NUM_TOP = 5
TARGET_FRACTION = 0.5  # of the limit


class Component(NamedTuple):
    """One component of a phase."""

    name: str
    result: Result

    @property
    def label(self) -> str:
        return LABELS.get(self.name, self.name)

    @property
    def seconds(self) -> float:
        return self.result.estimate

    @property
    def share(self) -> float:
        return float(self.result.fields["share"])

    @property
    def rank(self) -> str:
        return str(self.result.fields["class"])

    def number(self, name: str) -> float:
        """Return a counted field, NaN if it has none."""
        return float(self.result.fields.get(name) or math.nan)


def components(run: Run, phase: str) -> list[Component]:
    """Return the components in the order of a step; unknown ops before Python overhead."""
    found = {r.name.partition("/")[2]: r for r in run.results if r.name.startswith(f"{phase}/") and "share" in r.fields}
    order = {name: i for i, name in enumerate(LABELS)}
    names = sorted(found, key=lambda name: order.get(name, order["python"] - 0.5))
    return [Component(name, found[name]) for name in names]


def step_result(run: Run, phase: str) -> Result | None:
    """Return the result of the whole step."""
    return next((r for r in run.results if r.name == f"{phase}/step"), None)


def by_share(run: Run, phase: str) -> list[Component]:
    """Return the components, the largest share first."""
    return sorted(components(run, phase), key=lambda part: -part.share)


def component_line(part: Component) -> str:
    """Return `MLP: 60.2%, 114 ms`."""
    return f"{part.label}: {part.share:.1%}, {quantity(part.seconds, 's')}"


def component_row(part: Component) -> list[str]:
    """Return the cells of a component, under COLUMNS."""
    calls, limit_s = part.number("calls"), part.number("limit_s")
    return [
        part.label,
        f"{part.share:.1%}",
        quantity(part.seconds, "s"),
        spread((part.result.low, part.result.high), "s"),
        "-" if math.isnan(calls) else f"{calls:,.0f}",
        quantity(part.seconds / calls, "s"),
        quantity(part.number("bytes"), "B"),
        quantity(limit_s, "s"),
        "-" if math.isnan(limit_s) else f"{100 * limit_s / part.seconds:.1f}%",
        part.rank,
    ]


def targets(run: Run, phase: str) -> list[str]:
    """Return for each critical component its limit, and the step's time at half of that limit."""
    step = step_result(run, phase)
    critical = [part for part in by_share(run, phase) if part.rank == "critical"]
    return [] if step is None else [_target(part, phase, step.estimate) for part in critical]


def _target(part: Component, phase: str, step: float) -> str:
    head = f"{part.label} takes {part.share:.1%} of a {phase} step ({quantity(part.seconds, 's')})"
    limit_s = part.number("limit_s")
    if math.isnan(limit_s):
        best = f"without it the step would be {step / max(step - part.seconds, 1e-12):.2f} times as fast"
        return f"{head}. It has no floor that bytes or operations set: {best}, and no more."
    bound = part.result.fields.get("bound_by")
    amount = (
        f"{part.number('operations') / 1e6:,.0f} million operations"
        if bound == "arithmetic"
        else f"{quantity(part.number('bytes'), 'B')} to move"
    )
    head += (
        f", at {100 * limit_s / part.seconds:.1f}% of its limit ({quantity(limit_s, 's')}: {amount}, bound by {bound})"
    )
    if part.seconds <= limit_s / TARGET_FRACTION:
        return f"{head}. That is past half of the limit: there is little left to gain."
    after = step - part.seconds + limit_s / TARGET_FRACTION
    return (
        f"{head}. At half the limit the step would take {quantity(after, 's')} instead of {quantity(step, 's')}: "
        f"{step / after:.2f} times as fast."
    )


def classes(run: Run, phase: str) -> dict[str, list[str]]:
    """Return labels by class, each with its share, the largest first."""
    found = by_share(run, phase)
    return {rank: [f"{part.label} {part.share:.1%}" for part in found if part.rank == rank] for rank in CLASSES}


def step_line(run: Run, phase: str) -> str:
    """Return `128 tokens in 590 ms (580 to 600 ms): 217 tokens/s`."""
    step = step_result(run, phase)
    if step is None:
        return "not measured"
    tokens = int(step.fields.get("tokens", 1))
    amount = f"{tokens:,} token" + "s" * (tokens != 1)
    took = f"{quantity(step.estimate, 's')} ({spread((step.low, step.high), 's')})"
    return f"{amount} in {took}: {tokens / step.estimate:,.1f} tokens/s"


def run_facts(run: Run) -> dict[str, str]:
    """Return what was measured, and where."""
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
    """Return what the timer itself costs, and how the numbers are to be read."""
    profiler: Mapping[str, Any] = run.details.get("profiler") or {}
    shares = ", ".join(f"{share:.2%} of {phase}" for phase, share in (profiler.get("share") or {}).items())
    cost = quantity(float(profiler.get("seconds_per_call", math.nan)), "s")
    return (
        f"The timer costs {cost} a call ({shares}); that is subtracted. Python overhead is what remains of a step "
        "when all ops, the batch and the timer are subtracted. Bytes and operations are what an answer needs at "
        "least, not what the backend does for it; the limit is the larger of the two times they take at the measured "
        "rates."
    )


def markdown(run: Run) -> str:
    """Return the report as Markdown."""
    lines = [f"# Profile of {(run.model or {}).get('name', 'a model')}", ""]
    lines += [f"- {name}: {value}" for name, value in run_facts(run).items()]
    for phase, title in PHASES.items():
        if step_result(run, phase) is None:
            continue
        lines += ["", f"## {title}", "", step_line(run, phase), ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * (len(COLUMNS) - 2) + " --- |"]
        lines += [f"| {' | '.join(component_row(part))} |" for part in components(run, phase)]
        lines += ["", "Top five:", ""]
        lines += [f"{i}. {component_line(part)}" for i, part in enumerate(by_share(run, phase)[:NUM_TOP], 1)]
        lines += ["", "Classes:", ""]
        lines += [f"- {kind}: {', '.join(names) or 'none'}" for kind, names in classes(run, phase).items()]
        lines += ["", "Targets:", "", *(f"- {one}" for one in targets(run, phase) or ["nothing is critical"])]
    lines += ["", remark(run), "", "Critical is over 10% of a step, moderate 5 to 10%, minor less.", ""]
    return "\n".join(lines)


def write(folder: Path, run: Run, flames: Mapping[str, Flame]) -> list[Path]:
    """Write all files of a profile; flame graphs that were not recorded are left out."""
    title = f"{(run.model or {}).get('name', 'model')}"
    texts = {"report.md": markdown(run), "report.html": render_page(run, flames)}
    for phase, flame in flames.items():
        texts[f"flame-{phase}.svg"] = render_svg(flame, f"{PHASES.get(phase, phase)} of {title}")
    if flames:
        texts["profile.speedscope.json"] = json.dumps(speedscope(flames, f"profile of {title}"), ensure_ascii=False)
    run.save(folder / "run.json")
    try:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"cannot write {folder}: {error.strerror}") from None
    return [folder / name for name in ("run.json", *texts)]


def render_page(run: Run, flames: Mapping[str, Flame]) -> str:
    """Return the report as one HTML page that needs nothing else, with the flame graphs inline."""
    name = str((run.model or {}).get("name", "a model"))
    sections = [html.Section("Run", html.facts(run_facts(run)))]
    for phase, title in PHASES.items():
        if step_result(run, phase) is not None:
            sections.append(html.Section(title, _phase_section(run, phase)))
    for phase, flame in flames.items():
        title = PHASES.get(phase, phase)
        graph = html.Html(f'<div class="drawing wide">{render_svg(flame, f"{title} of {name}")}</div>')
        sections.append(html.Section(f"{title}: flame graph", graph))
    subtitle = "where the time of a step goes" + ("" if run.complete else " (broken off early)")
    return html.page(f"Profile of {name}", subtitle, sections, remark(run), has_script=bool(flames))


def _phase_section(run: Run, phase: str) -> html.Html:
    parts = components(run, phase)
    longest = max((part.share for part in parts), default=1.0) or 1.0
    rows: list[list[object]] = []
    for part in parts:
        label, share, *cells, rank = component_row(part)
        rows.append([label, html.bar(part.share / longest, share, rank), *cells, html.badge(rank)])
    aims = targets(run, phase) or ["nothing is critical"]
    caption = "critical: over 10% of the step, moderate: 5 to 10%, minor: under 5%"
    return html.joined(
        [
            html.soft(step_line(run, phase)),
            html.table(caption, COLUMNS, rows, range(2, len(COLUMNS) - 1)),
            html.heading("Top five"),
            html.bullets(map(component_line, by_share(run, phase)[:NUM_TOP]), ordered=True),
            html.heading("Classes"),
            html.bullets(f"{rank}: {', '.join(names) or 'none'}" for rank, names in classes(run, phase).items()),
            html.heading("Targets"),
            html.bullets(aims),
        ]
    )
