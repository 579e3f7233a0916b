"""`llm-worker-rbee bench experiments`: the claims, settled by measuring."""

from dataclasses import dataclass
from pathlib import Path

from ...bench import experiments as claims_benchmark
from ...bench.experiments.harness import QUICK, THOROUGH, Harness
from ...bench.results import Run, write_atomically
from ...progress import step_progress, transfer_progress
from ...weights.hub import locate_model
from ..options import MODEL_HELP, gather, use_threads
from ..terminal import cell, columns, note, style
from . import common
from .common import ResultOptions, option

COLOURS = {"confirmed": "green", "refuted": "red", "within noise": "yellow"}


@dataclass(frozen=True, kw_only=True)
class ClaimOptions:
    """Which claims, and how thoroughly."""

    only: list[str] | None = option(None, "CLAIM", "This claim alone, such as 3a. Repeatable.")
    all: bool = option(False, None, "More lengths, and longer.")
    model: str | None = option(None, "MODEL", f"For claims 2 and 4. {MODEL_HELP}", "-m")
    threads: int | None = option(None, "N", "Threads of the matrix library.", min=1, show_default="1")
    claims: Path | None = option(None, "FILE", "Write the claims with their verdicts as Markdown.")


@gather(options=ClaimOptions, results=ResultOptions)
def experiments(options: ClaimOptions, results: ResultOptions) -> None:
    """Settle the claims of old on this machine.

    Each ends in a line: confirmed, refuted or within noise, with the numbers. Under 3 minutes on 2 cores.

    \b
    Examples:
      llm-worker-rbee bench experiments
      llm-worker-rbee bench experiments --only 3a --only 5
      llm-worker-rbee bench experiments --all --claims docs/claims.md
    """
    used = use_threads(options.threads, "reference")
    selected = claims_benchmark.select(options.only or ())
    if options.claims is not None:
        common.require_place(options.claims)
    with transfer_progress() as bar:
        path = locate_model(options.model, progress=bar)
    settings = {"claims": selected, "all": options.all, "threads": used}
    with common.recording("experiments", results, _show_experiments, **settings) as recorder:
        plan = THOROUGH if options.all else QUICK
        with step_progress() as progress:
            claims_benchmark.run(Harness(recorder, progress, path, options.all, plan), selected)
        if options.claims is not None:
            write_atomically(options.claims, claims_benchmark.markdown(recorder.to_run()).encode())
            note(f"wrote {options.claims}")


def _show_experiments(run: Run) -> None:
    """Print each claim with its table and its verdict; then all verdicts, each on one line."""
    verdicts = run.details.get("verdicts") or []
    for one in verdicts:
        known = run.details["claims"][one["claim"]]
        print(style(f"Claim {one['claim']}: {known['claim']}", "bold"))
        print(style(f"{known['rule']}", "dim") + "\n")
        rows = [[cell(c) for c in row] for row in run.details["tables"][one["claim"]]]
        head, *lines = columns(rows, [] if one["claim"] == "2" else range(len(rows[0])), indent="  ")
        print("\n".join([style(head, "bold"), *lines]) + "\n")
    for one in verdicts:
        print(style(cell(one["line"]), COLOURS[one["verdict"]]))
