"""`llm-worker-rbee bench experiments`: the claims, settled by measuring."""

from collections.abc import Sequence

from benchmarks import claims as claims_benchmark
from llm_worker_bench.commands import common
from llm_worker_bench.commands.options import ExperimentsCommand
from llm_worker_bench.results import Run, write_atomically
from llm_worker_rbee.cli.loading import use_threads
from llm_worker_rbee.cli.terminal import cell, columns, note, style
from llm_worker_rbee.progress import step_progress, transfer_progress
from llm_worker_rbee.weights.hub import locate_model

from .decisions import decide
from .harness import QUICK, THOROUGH, Harness, drift_line
from .targets import open_targets

COLOURS = {
    "confirmed": "green", "refuted": "red", "within noise": "yellow", "mixed": "yellow", "not judged": "dim",
}  # fmt: skip


def experiments(options: ExperimentsCommand) -> None:
    """Measure the claims, and print their verdicts."""
    used = use_threads(options.threads, "reference")
    selected = claims_benchmark.select(options.only or ())
    names = [] if options.backends is None else [name.strip() for name in options.backends.split(",")]
    targets, left_out = open_targets(names)
    if options.claims is not None:
        common.require_place(options.claims)
    with transfer_progress() as bar:
        path = locate_model(options.model, progress=bar)
    settings = {
        "claims": selected, "all": options.all, "threads": used, "backends": [target.name for target in targets],
    }  # fmt: skip
    with common.recording("experiments", options.results, _show_experiments, **settings) as recorder:
        recorder.details["left_out"] = left_out
        plan = THOROUGH if options.all else QUICK
        with step_progress() as progress:
            claims_benchmark.run(Harness(recorder, progress, path, targets, options.all, plan), selected)
        if options.claims is not None:
            write_atomically(options.claims, claims_benchmark.markdown(recorder.to_run()).encode())
            note(f"wrote {options.claims}")


def _show_experiments(run: Run) -> None:
    """Print each claim with its tables; then all verdicts, each on one line with its decision below."""
    verdicts = run.details.get("verdicts") or []
    for one in verdicts:
        claim = one["claim"]
        known = run.details["claims"][claim]
        print(style(f"Claim {claim}: {known['claim']}", "bold"))
        print(style(f"{known['rule']}", "dim") + "\n")
        _show_table(run.details["tables"][claim], [] if claim == "2" else None)
        for table in run.details["more_tables"][claim]:
            print(table["caption"] + "\n")
            _show_table(table["rows"])
    for one in verdicts:
        print(style(cell(one["line"]), COLOURS[one["verdict"]]))
    for one in verdicts:
        decision = decide(one["claim"], one["verdict"])
        print(style(cell(f"decision on claim {one['claim']}: {decision.name}, because {decision.reason}"), "dim"))
    for name, reason in (run.details.get("left_out") or {}).items():
        note(f"left out {name}: {reason}")
    if drift := run.details.get("drift"):
        note(drift_line(drift))


def _show_table(rows: Sequence[Sequence[str]], right: Sequence[int] | None = None) -> None:
    """Print a table; columns of words are aligned left, all others right."""
    shown = [[cell(c) for c in row] for row in rows]
    if right is None:
        words = ("backend", "step", "part", "sides", "forward", "folder", "library", "the same block", "claim")
        right = [i for i, name in enumerate(rows[0]) if name not in words]
    head, *lines = columns(shown, right, indent="  ")
    print("\n".join([style(head, "bold"), *lines]) + "\n")
