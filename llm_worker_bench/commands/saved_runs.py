"""`llm-worker-rbee bench compare` and `bench report`: what changed between two saved runs; runs as one HTML page."""

import os
from pathlib import Path
from typing import Any

import typer

from llm_worker_rbee.cli.terminal import cell, note, print_json
from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.progress import step_progress

from .. import baseline
from ..baseline import Difference
from ..report import RunFile, render
from ..results import Run, write_atomically
from .common import print_table, quantity, show_changes
from .options import CompareCommand, ReportCommand

MAX_NAMES = 8  # of the benchmarks that only one run has
MAX_VALUE_CHARACTERS = 48


def compare(options: CompareCommand) -> None:
    """Print what changed between the runs."""
    threshold = options.threshold
    old, new = baseline.load(options.before), baseline.load(options.after)
    baseline.require_comparable(old, new, force=options.force)
    changes, differing = baseline.compare(old, new), baseline.find_differences(old, new)
    unpaired = baseline.names_not_compared(old, new, changes), baseline.names_not_compared(new, old, changes)
    if options.as_json:
        regressions = sum(item.is_past(threshold) for item in changes)
        head = {"schema": "llm-worker-rbee/comparison", "schema_version": 1, "kind": new.kind, "threshold": threshold}
        print_json(
            {
                **head,
                "regressions": regressions,
                "before": _origin(old),
                "after": _origin(new),
                "differs": [item._asdict() for item in differing],
                "only_before": unpaired[0],
                "only_after": unpaired[1],
                "results": [{**item.as_json(), "estimate": item.change.change} for item in changes],
            }
        )
    else:
        show_changes(changes, threshold)
        _print_differences(differing)
        for side, names in zip((options.before, options.after), unpaired, strict=True):
            if names:
                suffix = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
                note(f"only in {cell(side)}: {', '.join(map(cell, names[:MAX_NAMES]))}{suffix}")
    if any(item.is_past(threshold) for item in changes):
        raise typer.Exit(1)


def _origin(run: Run) -> dict[str, Any]:
    return {key: getattr(run, key) for key in ("created", "commit", "machine", "versions", "model", "settings")}


def _print_differences(differing: list[Difference]) -> None:
    if not differing:
        note("same commit, model, machine, settings and versions")
        return
    print()
    print_table([["ALSO DIFFERS", "BEFORE", "AFTER"], *(list(map(_truncate, item)) for item in differing)])


def _truncate(text: str) -> str:
    text = cell(text)
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 3] + "..."


def report(options: ReportCommand) -> None:
    """Write the page."""
    output = options.output
    if not output.name or os.path.isdir(output):
        raise InvalidRequestError(f"cannot write {output}: it is a folder, give the name of a file", "output")
    files = [RunFile(Path(name).name, baseline.load(name)) for name in options.results]
    with step_progress() as progress:
        page = render(files, options.title, progress)
    write_atomically(output, page.encode(errors="replace"))
    note(f"saved {output} ({quantity(output.stat().st_size, 'B')})")
