"""`llm-worker-rbee bench experiments`: the claims, settled on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import WorkerError
from ...progress import step_progress, transfer_progress
from ..options import MODEL_HELP, gather, use_threads
from ..terminal import cell, columns, note, style
from .common import MEASURING_PANEL, ResultOptions, recording, require_place

if TYPE_CHECKING:
    from ...bench.results import Run

COLOURS = {"confirmed": "green", "refuted": "red", "within noise": "yellow"}


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=MEASURING_PANEL, **more)


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
    from ...bench import experiments as room
    from ...bench.experiments.harness import QUICK, THOROUGH, Harness
    from ...weights.hub import locate_model

    chosen = room.select(only or ())
    if claims is not None:
        require_place(claims)
    with transfer_progress() as bar:
        path = locate_model(model, progress=bar)
    with recording("experiments", results, _show, claims=chosen, all=all_, threads=used) as recorder:
        with step_progress() as progress:
            room.run(Harness(recorder, progress, path, all_, THOROUGH if all_ else QUICK), chosen)
        if claims is not None:
            _write(claims, room.markdown(recorder.to_run()))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WorkerError(f"cannot write {path}: {error.strerror}") from None
    note(f"wrote {path}")


def _show(run: "Run") -> None:
    """Each claim with its table and its verdict; then all verdicts, each on one line."""
    verdicts = run.details.get("verdicts") or []
    for one in verdicts:
        known = run.details["claims"][one["claim"]]
        print(style(f"Claim {one['claim']}: {known['claim']}", "bold"))
        print(style(f"{known['rule']}", "dim") + "\n")
        head, *rows = run.details["tables"][one["claim"]]
        right = [] if one["claim"] == "2" else range(len(head))
        for number, line in enumerate(columns([[cell(c) for c in row] for row in [head, *rows]], right, indent="  ")):
            print(line if number else style(line, "bold"))
        print()
    for one in verdicts:
        print(style(cell(one["line"]), COLOURS[one["verdict"]]))
