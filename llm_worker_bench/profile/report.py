"""The report of a profile, from its results alone: a table by component, the top five, classes, targets."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..flame_graph import Flame, render_svg, speedscope
from ..report import html
from ..results import Result, ResultsError, Run, quantity, spread
from . import attention_pass
from .workload import PHASES

CRITICAL_SHARE, MODERATE_SHARE = 0.10, 0.05
LABELS = {
    "embedding": "embedding", "embedding_norm": "embedding + norm (one kernel)", "norm": "norms",
    "per_layer_projection": "per-layer embeddings: projection", "per_layer_inputs": "per-layer embeddings: inputs",
    "per_layer_gate": "per-layer embeddings: gate",
    "rope_angles": "RoPE angles", "attention_split": "attention: split of its work", "qkv": "QKV", "rope": "RoPE",
    "kv_write": "KV write", "rope_kv_write": "RoPE + KV write (one kernel)", "kv_read": "KV read", "scores": "scores",
    "mask": "mask", "softmax": "softmax", "values": "values",
    "attention": "attention: scores + softmax + values (one kernel)",
    "rope_kv_attention": "RoPE + KV write + attention (one kernel)", "quantize": "quantize activations",
    "output": "output", "output_norm": "output + norm (one kernel)", "conv_input": "convolution: input",
    "causal_conv": "convolution", "conv_output": "convolution: output", "delta_input": "linear attention: input",
    "gated_delta": "linear attention: gated delta rule", "attention_gate": "gate of attention", "gate": "gated output",
    "router": "router", "route": "experts: choice",
    "gather": "experts: copies of rows", "experts_gate_up": "experts: gate + up", "experts_down": "experts: down",
    "combine": "experts: weighted sum", "gate_up": "gate + up",
    "gate_up_activation": "gate + up + activation (one kernel)", "activation": "activation", "down": "down",
    "down_norm": "down + norm (one kernel)", "head": "head", "sampling": "sampling", "copies": "copies to the device",
    "scheduling": "scheduling", "text": "text: tokenize + detokenize", "host": "host: Python + launches",
}  # in the order of a step  # fmt: skip
CLASSES = ("critical", "moderate", "minor")
COLUMNS = (
    "component",
    "share",
    "time a step",
    "interval",
    "calls",
    "bytes",
    "operations",
    "roofline time",
    "% of roofline",
    "bound by",
    "class",
)
TEXT_COLUMNS = 2  # the last ones
HEAD_LINE = "| --- |" + " ---: |" * (len(COLUMNS) - 1 - TEXT_COLUMNS) + " --- |" * TEXT_COLUMNS
NUM_TOP = 5
TARGET_FRACTION = 0.5  # of the limit
NOT_COMPONENTS = ("step", "timed_step", "components_of_step")


def classify(share: float) -> str:
    """Return the class of a component; only critical ones are worth a change."""
    return "critical" if share > CRITICAL_SHARE else "moderate" if share >= MODERATE_SHARE else "minor"


class Component(NamedTuple):
    """One component of a phase."""

    label: str
    seconds: float  # a step
    share: float
    rank: str  # its class
    result: Result

    def number(self, name: str) -> float:
        """Return a counted field, NaN if it has none."""
        return float(self.result.fields.get(name) or math.nan)

    @property
    def percent(self) -> float:
        """The share of the limit, by the kernels' own time where they overlap."""
        return float(self.result.fields.get("percent_of_limit") or 100 * self.number("limit_s") / self.seconds)

    def cells(self) -> list[str]:
        """Return the row under COLUMNS."""
        calls, limit_s, bound = self.number("calls"), self.number("limit_s"), self.result.fields.get("bound_by")
        if bound == "arithmetic":
            bound = str(self.result.fields.get("arithmetic", bound))
        return [
            self.label,
            f"{self.share:.1%}",
            quantity(self.seconds, "s"),
            spread((self.result.low, self.result.high), "s"),
            "-" if math.isnan(calls) else f"{calls:,.0f}",
            quantity(self.number("bytes"), "B"),
            quantity(self.number("operations"), "B").replace("B", "op"),
            quantity(limit_s, "s"),
            "-" if math.isnan(limit_s) else f"{self.percent:.1f}%",
            bound or "-",
            self.rank,
        ]


def components(run: Run, phase: str) -> list[Component]:
    """Return the components in the order of a step; unknown ops before the host."""
    parts = {r.name.partition("/")[2]: r for r in run.results if r.name.startswith(f"{phase}/") and "share" in r.fields}
    order = {name: i for i, name in enumerate(LABELS)}
    return [
        Component(LABELS.get(name, name), r.estimate, float(r.fields["share"]), str(r.fields["class"]), r)
        for name, r in sorted(parts.items(), key=lambda item: order.get(item[0], order["host"] - 0.5))
    ]


def step_result(run: Run, phase: str) -> Result | None:
    """Return the result of the whole step."""
    return next((r for r in run.results if r.name == f"{phase}/step"), None)


def by_share(run: Run, phase: str) -> list[Component]:
    """Return the components, the largest share first."""
    return sorted(components(run, phase), key=lambda part: -part.share)


def targets(run: Run, phase: str) -> list[str]:
    """Return for each critical component its limit, and the step's time at half of that limit."""
    step = step_result(run, phase)
    critical = [part for part in by_share(run, phase) if part.rank == "critical"]
    lines = [] if step is None else [_target(part, phase, step.estimate) for part in critical]
    return lines or ["nothing is critical"]


def _target(part: Component, phase: str, step: float) -> str:
    head = f"{part.label} takes {part.share:.1%} of a {phase} step ({quantity(part.seconds, 's')})"
    limit_s, bound = part.number("limit_s"), part.result.fields.get("bound_by")
    if math.isnan(limit_s):
        best = f"without it the step would be {step / max(step - part.seconds, 1e-12):.2f} times as fast"
        return f"{head}. It has no floor that bytes or operations set: {best}, and no more."
    operations = f"{part.number('operations') / 1e6:,.0f} million operations"
    amount = operations if bound == "arithmetic" else f"{quantity(part.number('bytes'), 'B')} to move"
    part_of_limit = f"{part.percent:.1f}% of its limit"
    head += f", at {part_of_limit} ({quantity(limit_s, 's')}: {amount}, bound by {bound})"
    if part.percent >= 100 * TARGET_FRACTION:
        return f"{head}. That is past half of the limit: there is little left to gain."
    after = step - part.seconds * (1 - part.percent / (100 * TARGET_FRACTION))
    times = f"{quantity(after, 's')} instead of {quantity(step, 's')}: {step / after:.2f} times as fast"
    return f"{head}. At half the limit the step would take {times}."


def classes(run: Run, phase: str) -> list[str]:
    """Return a line for each class: its components with their shares, the largest first."""
    parts = by_share(run, phase)
    names = {rank: [f"{part.label} {part.share:.1%}" for part in parts if part.rank == rank] for rank in CLASSES}
    return [f"{rank}: {', '.join(shares) or 'none'}" for rank, shares in names.items()]


def _top_lines(run: Run, phase: str) -> list[str]:
    """Return `MLP: 60.2%, 114 ms` for each of the largest components."""
    top = by_share(run, phase)[:NUM_TOP]
    return [f"{part.label}: {part.share:.1%}, {quantity(part.seconds, 's')}" for part in top]


def step_line(run: Run, phase: str) -> str:
    """Return `128 tokens in 590 ms (580 to 600 ms): 217 tokens/s`."""
    step = step_result(run, phase)
    if step is None:
        return "not measured"
    tokens = int(step.fields.get("tokens", 1))
    took = f"{quantity(step.estimate, 's')} ({spread((step.low, step.high), 's')})"
    return f"{tokens:,} token{'s' * (tokens != 1)} in {took}: {tokens / step.estimate:,.1f} tokens/s"


def run_facts(run: Run) -> dict[str, str]:
    """Return the model, settings, machine, versions and limits of a run, by label."""
    machine, commit = run.machine, run.commit
    rows = {
        "Model": str((run.model or {}).get("name", "-")),
        "Settings": ", ".join(f"{key} {value}" for key, value in run.settings.items()),
        "Processor": f"{machine.get('cpu')}, {machine.get('cores')} cores, {' '.join(machine.get('features') or ())}",
        "System": f"{machine.get('system')}, {machine.get('memory_gib')} GiB of memory",
        "Versions": ", ".join(f"{name} {value}" for name, value in run.versions.items()),
        "Commit": "-" if commit is None else commit["id"][:12] + " with changes" * bool(commit.get("dirty")),
        "Date": run.created,
    }
    if limits := run.details.get("limits"):
        best, rate = limits["bandwidth"][-1]["bytes_per_second"], limits["operations_per_second"]
        kind, where = ("float32", f"{limits['threads']} thread(s)") if limits["threads"] else ("float16", "the device")
        rates = [f"{quantity(best, 'B/s')} from memory", f"{_rate(rate)} in {kind}"]
        rates += [
            f"{_rate(speed)} in {name}" for name, speed in (limits.get("other_operations_per_second") or {}).items()
        ]
        rows["Limits"] = f"measured with {where}: {', '.join(rates)}"
    return rows


def _rate(value: float) -> str:
    return quantity(value, "FLOP/s").replace("FLOP", "op")


def sum_line(run: Run, phase: str) -> str:
    """Return how the components add up to the step as it runs without a timer."""
    total = next((r for r in run.results if r.name == f"{phase}/components_of_step"), None)
    if total is None:
        return ""
    return f"The components sum to {total.estimate:.1%} of it ({total.low:.1%} to {total.high:.1%})."


def remark(run: Run) -> str:
    """Return how the numbers are to be read."""
    return (
        "A step is timed as it runs for users; its components in a run beside it, in turn. Waiting for the last thread "
        "of a task is a part of that task. The host's time is what no kernel covers. Bytes and operations are what an "
        "answer needs at least, not what the backend does for it; the limit is the larger of the two times they take "
        "at the measured rates of memory and of the kernels' own arithmetic. Where kernels of a GPU overlap "
        "(programmatic dependent launch), a moment counts once in the times, and the percentage of the roofline is by "
        "the kernels' own durations: there the roofline time may be longer than the time shown."
    )


def markdown(run: Run) -> str:
    """Return the report as Markdown."""
    lines = [f"# Profile of {(run.model or {}).get('name', 'a model')}", ""]
    lines += [f"- {name}: {value}" for name, value in run_facts(run).items()]
    lines += attention_lines(run)
    for part, suffix in by_backend(run):
        lines += phase_lines(part, suffix)
    lines += ["", remark(run), "", "Critical is over 10% of a step, moderate 5 to 10%, minor less.", ""]
    return "\n".join(lines)


def by_backend(run: Run) -> list[tuple[Run, str]]:
    """Return the run of each backend, with ` on NAME` where there are several."""
    names = attention_pass.backends(run)
    if len(names) < 2:
        return [(run, "")]
    return [(attention_pass.of_backend(run, name), f" on {name}") for name in names]


def attention_lines(run: Run) -> list[str]:
    """Return the table of the attention pass, if the run is one."""
    if not run.settings.get("attention_pass"):
        return []
    head, *rows = attention_pass.rows(run)
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    text = f"Shares of one attention pass, {attention_pass.TOKENS} tokens at width 4096 in float32:"
    return ["", text, "", *lines, *(f"| {' | '.join(row)} |" for row in rows)]


def phase_lines(run: Run, suffix: str = "", heading: str = "##") -> list[str]:
    """Return the sections of a run on one backend."""
    lines: list[str] = []
    for phase, title in PHASES.items():
        if step_result(run, phase) is None:
            continue
        lines += ["", f"{heading} {title}{suffix}", "", f"{step_line(run, phase)}. {sum_line(run, phase)}", ""]
        lines += [f"| {' | '.join(COLUMNS)} |", HEAD_LINE]
        lines += [f"| {' | '.join(part.cells())} |" for part in components(run, phase)]
        lines += ["", "Top five:", "", *(f"{i}. {line}" for i, line in enumerate(_top_lines(run, phase), 1))]
        lines += ["", "Classes:", "", *(f"- {line}" for line in classes(run, phase))]
        lines += ["", "Targets:", "", *(f"- {line}" for line in targets(run, phase))]
    return lines


def write_report(folder: Path, run: Run, flames: Mapping[str, Flame]) -> list[Path]:
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
    if run.settings.get("attention_pass"):
        head, *rows = attention_pass.rows(run)
        table = html.table("shares of one attention pass", head, rows, range(1, len(head)))
        sections.append(html.Section("Attention pass", table))
    for part, suffix in by_backend(run):
        for phase, title in PHASES.items():
            if step_result(part, phase) is not None:
                sections.append(html.Section(f"{title}{suffix}", _phase_section(part, phase)))
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
        label, share, *cells, rank = part.cells()
        rows.append([label, html.bar(part.share / longest, share, rank), *cells, html.badge(rank)])
    caption = "critical: over 10% of the step, moderate: 5 to 10%, minor: under 5%"
    table = html.table(caption, COLUMNS, rows, range(2, len(COLUMNS) - TEXT_COLUMNS))
    top, ranks, aims = _top_lines(run, phase), classes(run, phase), targets(run, phase)
    head = f"{step_line(run, phase)}. {sum_line(run, phase)}"
    return html.joined(
        [
            html.soft(head),
            table,
            html.heading("Top five"),
            html.bullets(top, ordered=True),
            html.heading("Classes"),
            html.bullets(ranks),
            html.heading("Targets"),
            html.bullets(aims),
        ]
    )
