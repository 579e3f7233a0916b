"""What a profile says: the table, the top five, the classes and the targets, from the run alone; as Markdown and files.

Everything is read back from the results, so a report can be made again from run.json. The page for a browser is
html.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..format import quantity, spread
from ..results import Result, ResultsError, Run
from . import flame_svg
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
        texts[f"flame-{phase}.svg"] = flame_svg.svg(flame, f"{PHASES.get(phase, phase)} of {title}")
    if flames:
        texts["profile.speedscope.json"] = json.dumps(speedscope(flames, f"profile of {title}"), ensure_ascii=False)
    run.save(folder / "run.json")
    try:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"cannot write {folder}: {error.strerror}") from None
    return [folder / name for name in ("run.json", *texts)]
