"""`llm-worker-rbee bench experiments`: the claims, settled on this machine."""

from pathlib import Path
from typing import Annotated

from ...bench import experiments as benchmark
from ...bench.experiments.harness import QUICK, THOROUGH, Harness
from ...bench.results import Run, write_atomically
from ...progress import step_progress, transfer_progress
from ...weights.hub import locate_model
from ..options import MODEL_HELP, gather, options_in, use_threads
from ..terminal import cell, columns, note, style
from .common import MEASURING_PANEL, ResultOptions, recording, require_place

COLOURS = {"confirmed": "green", "refuted": "red", "within noise": "yellow"}
_option = options_in(MEASURING_PANEL)


@gather(results=ResultOptions)
def experiments(
    results: ResultOptions,
    only: Annotated[
        list[str] | None, _option("--only", metavar="CLAIM", help="This claim alone, such as 3a. Repeatable.")
    ] = None,
    all_: Annotated[bool, _option("--all", help="More lengths, and longer.")] = False,
    model: Annotated[
        str | None, _option("--model", "-m", metavar="MODEL", help=f"For claims 2 and 4. {MODEL_HELP}")
    ] = None,
    threads: Annotated[
        int | None, _option("--threads", metavar="N", min=1, help="Threads of the matrix library.", show_default="1")
    ] = None,
    claims: Annotated[
        Path | None, _option("--claims", metavar="FILE", help="Write the claims with their verdicts as Markdown.")
    ] = None,
) -> None:
    """Settle the claims of old on this machine.

    Each ends in a line: confirmed, refuted or within noise, with the numbers. Under 3 minutes on 2 cores.

    \b
    Examples:
      llm-worker-rbee bench experiments
      llm-worker-rbee bench experiments --only 3a --only 5
      llm-worker-rbee bench experiments --all --claims docs/claims.md
    """
    used = use_threads(threads, "reference")
    selected = benchmark.select(only or ())
    if claims is not None:
        require_place(claims)
    with transfer_progress() as bar:
        path = locate_model(model, progress=bar)
    with recording("experiments", results, _print_run, claims=selected, all=all_, threads=used) as recorder:
        with step_progress() as progress:
            benchmark.run(Harness(recorder, progress, path, all_, THOROUGH if all_ else QUICK), selected)
        if claims is not None:
            write_atomically(claims, benchmark.markdown(recorder.to_run()).encode())
            note(f"wrote {claims}")


def _print_run(run: Run) -> None:
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
