"""`llm-worker-rbee bench compare`: what changed between two saved runs, and what else differs between them."""

from typing import Annotated, Any

import typer

from ...bench import baseline
from ...bench.baseline import Comparison, Difference
from ...bench.results import Run
from ..options import options_in
from ..terminal import cell, columns, note, style
from .common import RESULTS_PANEL, print_object, show_changes

RUN_HELP = "a file that --save wrote, or the name of a baseline."
MAX_NAMES = 8  # of the benchmarks that only one run has
MAX_VALUE_CHARACTERS = 48
_option = options_in(RESULTS_PANEL)


def compare(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help=f"The earlier run: {RUN_HELP}")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help=f"The later run: {RUN_HELP}")],
    threshold: Annotated[
        float, _option("--threshold", metavar="X", min=0.0, help="How much worse fails: a fraction, 0.10 is 10%.")
    ] = 0.10,
    as_json: Annotated[bool, _option("--json", help="Print one JSON object and nothing else.")] = False,
    force: Annotated[bool, _option("--force", help="Compare also runs of different machines.")] = False,
) -> None:
    """Compare two saved runs.

    Exit status 1 if a benchmark became worse by more than the threshold, beyond noise.

    \b
    Examples:
      llm-worker-rbee bench compare before after
      llm-worker-rbee bench compare main.json branch.json --threshold 0.05
    """
    old, new = baseline.load(before), baseline.load(after)
    baseline.require_same_kind(old, new)
    baseline.require_same_machine(old, new, force=force)
    changes, differing = baseline.compare(old, new), baseline.find_differences(old, new)
    left = baseline.names_not_compared(old, new, changes), baseline.names_not_compared(new, old, changes)
    if as_json:
        print_object(_as_json(old, new, changes, threshold, differing, left))
    else:
        show_changes(changes, threshold)
        _print_differences(differing)
        for side, names in zip((before, after), left, strict=True):
            if names:
                more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
                note(f"only in {cell(side)}: {', '.join(map(cell, names[:MAX_NAMES]))}{more}")
    if any(one.is_past(threshold) for one in changes):
        raise typer.Exit(1)


def _as_json(
    before: Run,
    after: Run,
    changes: list[Comparison],
    threshold: float,
    differing: list[Difference],
    left: tuple[list[str], list[str]],
) -> dict[str, Any]:
    """Return the object of `--json`: `results` are the changes, each with the change as its estimate."""
    sides = {
        name: {key: getattr(run, key) for key in ("created", "commit", "machine", "versions", "model", "settings")}
        for name, run in (("before", before), ("after", after))
    }
    return {
        "schema": "llm-worker-rbee/comparison",
        "schema_version": 1,
        "kind": after.kind,
        "threshold": threshold,
        "regressions": sum(one.is_past(threshold) for one in changes),
        **sides,
        "differs": [one._asdict() for one in differing],
        "only_before": left[0],
        "only_after": left[1],
        "results": [{**one.as_json(), "estimate": one.change.change} for one in changes],
    }


def _print_differences(differing: list[Difference]) -> None:
    if not differing:
        note("same commit, model, machine, settings and versions")
        return
    head, *lines = columns([["ALSO DIFFERS", "BEFORE", "AFTER"], *(list(map(_truncate, one)) for one in differing)])
    print("\n" + "\n".join([style(head, "bold"), *lines]))


def _truncate(text: str) -> str:
    text = cell(text)
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 3] + "..."
