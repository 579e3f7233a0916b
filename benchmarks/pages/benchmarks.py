"""docs/benchmarks.md: every figure of the saved runs in docs/results, by machine and command."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from llm_worker_bench.micro.suite import ORIGINAL_S
from llm_worker_bench.results import Result, Run, quantity

Runs = Mapping[str, Run]
OURS = "llm-worker-rbee"
THIS_WORKER = {OURS: "this worker", f"{OURS} tokenized": "this worker, tokenized beforehand"}
BUSY_CORES = 0.3  # from which on a machine is not quiet
PEERS = {"llama-bench": "llama.cpp", "llama-server": "llama.cpp (llama-server)", "mistral.rs": "mistral.rs"}
KINDS = {
    "peers": "Against other programs",
    "e2e": "Prefill and decode",
    "embed": "Embeddings",
    "micro": "The named benchmarks",
    "accuracy": "Accuracy",
    "load": "Start",
    "serving": "Server",
}
INTRO = """# Benchmarks

Figures of this worker and of other programs on the same machine and file, measured in turn in one run. A figure is the
mean of the middle half of its samples, with the 95% interval in brackets; a ratio is the mean of per-repetition ratios.
Rows `7b-*` are the Llama-2-7B shape with 4 of its 32 layers and random weights; `default`, `q4_0` and `q8_0` are the
default model as it is and converted. Each section names the command that repeats it: [measuring.md](measuring.md)
explains the commands, [saved-runs.md](saved-runs.md) the files behind the figures. [claims.md](claims.md) has the
verdicts on claims of speed, [profile.md](profile.md) the time of a step by component, [peers.md](peers.md) the reasons
why other programs differ, and [decisions](decisions/README.md) the experiments.

![Tokens per second relative to llama.cpp](pictures/speed.svg)"""
MICRO_NOTE = (
    "Hidden size 4096, 32 heads of 128, float32, batch 1. An operation that a backend fuses with other work, or does "
    "not need, is computed with its other ops; the list below the table says how."
)
# results that are left to the saved run: parts of a start, counts behind a figure
LEFT_OUT = {
    "e2e": re.compile(r"(bytes_per_token|device_step/|host_step/|products/|device_memory/)"),
    "load": re.compile(r"(?!(ready|first_token|total|memory|peak))"),
}


def uses_gpu(run: Run) -> bool:
    """Return whether a run measured a GPU."""
    named = [str(run.settings.get(key) or "") for key in ("device", "backend")]
    return any(name.startswith("cuda") for name in named + [str(r.fields.get("backend")) for r in run.results])


def machine_name(run: Run) -> str:
    """Return `Arm Neoverse-N1, 2 cores`, or the GPU where the run used it."""
    machine = run.machine
    name = f"{machine.get('cpu')}, {machine.get('cores')} cores"
    gpus = [str(gpu).partition(",")[0] for gpu in machine.get("gpus") or ()]
    return f"{gpus[0]} ({name})" if gpus and uses_gpu(run) else name


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table."""
    return [f"| {' | '.join(head)} |", "|" + " --- |" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def number(value: float) -> str:
    """Return three digits or whole numbers: 4.54, 35.6, 1,755; six just below 1, where a cosine lies: 0.998610."""
    if 0.99 < value < 1:
        return f"{value:.6f}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def with_interval(result: Result) -> str:
    """Return `611 (608 to 612)`; of a figure without spread the value alone."""
    if result.unit not in ("tok/s", "req/s", ""):
        value, low, high = (quantity(one, result.unit) for one in (result.estimate, result.low, result.high))
    else:
        value, low, high = map(number, (result.estimate, result.low, result.high))
    return value if result.low == result.high else f"{value} ({low} to {high})"


def peers_table(run: Run) -> list[str]:
    """Return a row for each file and length, a pair of columns for each peer."""
    by_task: dict[str, dict[str, Result]] = {}
    for result in run.results:
        task, _, peer = result.name.rpartition("/")
        by_task.setdefault(task, {})[peer] = result
    measured = {peer for found in by_task.values() for peer in found}
    ours = [name for name in THIS_WORKER if name in measured]
    peers = list(dict.fromkeys(peer for found in by_task.values() for peer in found if peer not in ours))
    rows = []
    for task, found in by_task.items():
        cells = [task, *(with_interval(found[name]) if name in found else "-" for name in ours)]
        for peer in peers:
            cells += [with_interval(found[peer]), ratio(found[peer])] if peer in found else ["-", "-"]
        rows.append(cells)
    names = [f"{PEERS.get(peer, peer)} {version(run, peer)}".strip() for peer in peers]
    columns = [THIS_WORKER[name] for name in ours]
    return table(["file and tokens", *columns, *(cell for name in names for cell in (name, "ratio"))], rows)


def version(run: Run, peer: str) -> str:
    """Return the version of a peer."""
    found = (result.fields.get("version") for result in run.results if result.name.endswith(f"/{peer}"))
    return str(next(found, "") or "")


def ratio(result: Result) -> str:
    """Return `4.54 (4.52 to 4.54)`."""
    value, ends = result.fields.get("ours_over_peer"), result.fields.get("ratio_interval")
    if value is None:
        return "-"
    return f"**{value:.2f}**" + (f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else "")


def results_table(run: Run) -> list[str]:
    """Return name and value of each result."""
    skipped = LEFT_OUT.get(run.kind)
    kept = [result for result in run.results if skipped is None or not skipped.match(result.name)]
    rows = ([f"`{r.name}`", f"{with_interval(r)} {'tok/s' * (r.unit == 'tok/s')}".strip()] for r in kept)
    return table(["result", "value"], rows)


def micro_table(runs: Sequence[Run]) -> list[str]:
    """Return the named benchmarks, a column for each backend and the original's figures."""
    columns = {str(result.fields.get("backend")): None for run in runs for result in run.results}
    times = {(result.name, result.fields.get("backend")): result for run in runs for result in run.results}
    rows = []
    for name, original in ORIGINAL_S.items():
        cells = [with_interval(times[name, backend]) if (name, backend) in times else "-" for backend in columns]
        if any(cell != "-" for cell in cells):
            rows.append([f"`{name}`", *cells, quantity(original, "s")])
    return table(["benchmark", *columns, "the original, unnamed CPU"], rows)


def micro_notes(runs: Sequence[Run]) -> list[str]:
    """Return lines with the notes of results, by family and backend: how they differ from a step of the product."""
    results = (result for run in runs for result in run.results if result.fields.get("note"))
    notes = {(result.name.split("/")[0], result.fields["backend"]): result.fields["note"] for result in results}
    return [f"- `{family}` on {backend}: {note}" for (family, backend), note in notes.items()]


def origin(run: Run) -> str:
    """Return date, commit, model and command of a run."""
    commit = "-" if run.commit is None else str(run.commit["id"])[:7]
    model = f", {run.model['name']}" if run.model and run.model.get("name") else ""
    return f"{run.created[:10]}, commit {commit}{model}: `{run.command}`{busy_note(run)}"


def busy_note(run: Run) -> str:
    """Return how many cores other programs used, if they used any."""
    found = [max(values) for values in (run.details.get("busy_cores") or {}).values() if None not in values]
    busy = max(found, default=0.0)
    return f" (not quiet: up to {busy:.1f} cores were in use by other programs)" if busy >= BUSY_CORES else ""


SHOWN: Mapping[str, Callable[[Run], list[str]]] = {"peers": peers_table, "embed": peers_table}


def markdown(runs: Runs) -> str:
    """Return the page: a section for each machine, in it one for each kind of run."""
    machines: dict[str, list[Run]] = {}
    for run in runs.values():
        if run.kind in KINDS:
            machines.setdefault(machine_name(run), []).append(run)
    lines = [INTRO]
    for machine, found in machines.items():
        lines += ["", f"## {machine}"]
        for kind, title in KINDS.items():
            own = [run for run in found if run.kind == kind]
            if not own:
                continue
            lines += ["", f"### {title}"]
            if kind == "micro":
                lines += ["", MICRO_NOTE, "", *micro_table(own), "", *micro_notes(own), ""]
                lines += [f"- {origin(run)}" for run in own]
                continue
            for run in own:
                lines += ["", origin(run), "", *SHOWN.get(kind, results_table)(run)]
    return "\n".join(lines)
