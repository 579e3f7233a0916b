"""docs/claims.md from saved runs alone: the first run is the page, the others add the backends that it lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llm_worker_bench.results import Run

from .decisions import decide
from .harness import agreed, drift_line, verdict_line

TITLE = "# The claims, settled by measurement"
INTRODUCTION = (
    "Two teams made claims about the worker that this one descends from: the first (1 to 5) proposed a rewrite, the",
    "second (6 to 13) measured its claims and made some of its own. `llm-worker-rbee bench experiments` settles each",
    "of them again, by the rule next to it, on every backend of the machine: `reference` is plain NumPy, `cpu` and",
    "`cuda` are the kernels of the product. A verdict is confirmed, refuted or within noise; mixed where backends, or",
    "decode and prefill, differ. The decision states the consequence for the product.",
)
NOTES = (
    'Figures "then" were measured on an unnamed CPU by the authors of the claims. A change is of the second side',
    "relative to the first; both are measured in turn, so that noise affects both alike. Intervals hold with 99%",
    "confidence; a change of less than 3% is within noise whatever its interval. Where no verdict has most lengths,",
    "the longest decides. Claims 3, 3a, 5 and 9 time single ops as Python calls or launches them, with that overhead:",
    "`bench micro` times the kernels alone ([benchmarks.md](benchmarks.md)), and the product runs a step as one call.",
)


ON_REFERENCE = ("7", "8", "11")  # claims about the old way, which only plain NumPy has


def markdown(runs: Run | Sequence[Run]) -> str:
    """Return the page of claims; later runs add only the backends that earlier runs lack."""
    runs = [runs] if isinstance(runs, Run) else list(runs)
    first, backends = runs[0], list(dict.fromkeys(name for run in runs for name in run.details.get("backends") or ()))
    lines = [TITLE, "", *INTRODUCTION, "", *(line for run in runs for line in _facts(run, backends)), ""]
    verdicts = [merge_verdict(runs, one["claim"]) for one in first.details.get("verdicts") or ()]
    lines += _top_table(first, verdicts, backends)
    for one in verdicts:
        lines += _claim_section(runs, one)
    lines += _not_testable(first)
    return "\n".join([*lines, "", *NOTES, ""])


def merge_verdict(runs: Sequence[Run], claim: str) -> dict[str, Any]:
    """Return the verdict of the first run with the backends that later runs add to it (`added`), and its line."""
    found = [_verdict(run, claim) for run in runs]
    merged = {**(found[0] or {}), "backends": {}, "added": []}
    for index, one in enumerate(found):
        new = {name: of for name, of in ((one or {}).get("backends") or {}).items() if name not in merged["backends"]}
        merged["backends"] |= new
        merged["added"] += [(index, list(new))] if index and new else []
    if merged["added"]:
        merged["verdict"] = agreed([one["verdict"] for one in merged["backends"].values()])
    merged["line"] = verdict_line(claim, merged["verdict"], merged.get("summary") or "", merged["backends"])
    return merged


def _verdict(run: Run, claim: str) -> dict[str, Any] | None:
    return next((one for one in run.details.get("verdicts") or () if one["claim"] == claim), None)


def _facts(run: Run, backends: Sequence[str]) -> list[str]:
    details, labels = run.details, list((run.details.get("backends") or {}).values())
    place = machine_name(run, list(details.get("backends") or ()))
    facts = f"- {place}: {', '.join(labels)}; model {(run.model or {}).get('name')}; {run.created[:10]}, "
    facts += f"{run.elapsed_s:.0f} s" + ("" if run.complete else ", interrupted")
    left_out = [f"  Left out: {name}, {reason}." for name, reason in (details.get("left_out") or {}).items()
                if name not in backends]  # fmt: skip
    drift = details.get("drift")
    return [facts + ".", *left_out, *([f"  {_sentence(drift_line(drift))}"] if drift else [])]


def machine_name(run: Run, backends: Sequence[str]) -> str:
    """Return the processor with its cores, and the GPU where it was used."""
    machine = run.machine
    gpus = [str(gpu).partition(",")[0] for gpu in machine.get("gpus") or ()] if "cuda" in backends else []
    return ", ".join([f"{machine.get('cpu')} with {machine.get('cores')} cores", *gpus])


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _top_table(run: Run, verdicts: Sequence[Mapping[str, Any]], backends: Sequence[str]) -> list[str]:
    head = ["claim", "verdict", *backends, "decision"]
    rows = []
    for one in verdicts:
        text = run.details["claims"][one["claim"]]["claim"]
        measured = one["backends"]
        if not measured and one["claim"] in ON_REFERENCE:
            measured = {"reference": {"verdict": one["verdict"], "phases": {"": one["verdict"]}}}
        cells = [_backend_cell(measured.get(name)) for name in backends]
        decision = decide(one["claim"], one["verdict"]).name
        rows.append([f"[{one['claim']}](#claim-{one['claim']}): {text}", one["verdict"], *cells, decision])
    return _markdown_table([head, *rows])


def _backend_cell(one: Mapping[str, Any] | None) -> str:
    """Return `confirmed`, or `decode confirmed, prefill refuted` where these differ."""
    if one is None:
        return "-"
    if len(set(one["phases"].values())) == 1:
        return str(one["verdict"])
    return ", ".join(f"{phase} {verdict}" for phase, verdict in one["phases"].items())


def _claim_section(runs: Sequence[Run], one: Mapping[str, Any]) -> list[str]:
    claim, first = one["claim"], runs[0]
    known, decision = first.details["claims"][claim], decide(claim, one["verdict"])
    lines = ["", f"## Claim {claim}", "", f"> {known['claim']}", "", f"Rule: {known['rule']}.", ""]
    lines += _tables(first, claim, None)
    for index, added in one["added"]:
        run = runs[index]
        places = " and ".join(run.details["backends"][name] for name in added)
        lines += [f"On {places}, {machine_name(run, added)}:", "", *_tables(run, claim, added)]
    lines += [f"`{one['line']}`", "", f"**Decision: {decision.name}**, because {decision.reason}.", ""]
    return [*lines, f"- Risk: {decision.risk}.", f"- Today: {decision.today}."]


def _tables(run: Run, claim: str, backends: Sequence[str] | None) -> list[str]:
    """Return the tables of a claim; with `backends` only their rows."""
    tables = [{"rows": run.details["tables"][claim], "caption": ""}, *(run.details.get("more_tables") or {})[claim]]
    lines = []
    for table in tables:
        head, *rows = table["rows"]
        if backends is not None:
            rows = [row for row in rows if "backend" in head and row[head.index("backend")] in backends]
        if rows:
            caption = [table["caption"] + ":", ""] if table["caption"] else []
            lines += [*caption, *_markdown_table([head, *rows]), ""]
    return lines


def _not_testable(run: Run) -> list[str]:
    rows = [[words, reason] for words, reason in (run.details.get("not_testable") or {}).items()]
    return ["", "## What cannot be tested", "", *_markdown_table([["words", "reason"], *rows])] if rows else []


def _markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *rest = rows
    made = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return made + [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rest]
