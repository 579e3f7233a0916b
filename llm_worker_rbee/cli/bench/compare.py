"""`llm-worker-rbee bench compare`: what changed between two saved runs, and what else differs between them."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..terminal import cell, columns, note, style
from .common import RESULTS_PANEL, print_object, show_changes

if TYPE_CHECKING:
    from ...bench.baseline import Comparison, Difference
    from ...bench.results import Run

RUN_HELP = "a file that --save wrote, or the name of a baseline."
NAMED_AT_MOST = 8  # of the benchmarks that only one run has
WIDEST = 48  # characters of a value that differs


def compare(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help=f"The earlier run: {RUN_HELP}")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help=f"The later run: {RUN_HELP}")],
    threshold: Annotated[
        float,
        typer.Option(
            "--threshold", metavar="X", min=0.0, rich_help_panel=RESULTS_PANEL,
            help="How much worse fails: a fraction, 0.10 is 10%.",
        ),
    ] = 0.10,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=RESULTS_PANEL, help="Print one JSON object and nothing else.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", rich_help_panel=RESULTS_PANEL, help="Compare also runs of different machines.")
    ] = False,
) -> None:  # fmt: skip
    """Compare two saved runs.

    Exit status 1 if a benchmark became worse by more than the threshold, beyond noise.

    \b
    Examples:
      llm-worker-rbee bench compare before after
      llm-worker-rbee bench compare main.json branch.json --threshold 0.05
    """
    from ...bench import baseline
    from ...bench.baseline import find_differences, names_not_compared

    old, new = baseline.load(before), baseline.load(after)
    baseline.require_same_kind(old, new)
    baseline.require_same_machine(old, new, force=force)
    changes = baseline.compare(old, new)
    worse = [one for one in changes if one.is_past(threshold)]
    left = names_not_compared(old, new, changes), names_not_compared(new, old, changes)
    if as_json:
        print_object(_as_json(old, new, changes, threshold, find_differences(old, new), left))
    else:
        show_changes(changes, threshold)
        _show_differences(find_differences(old, new))
        for side, names in zip((before, after), left, strict=True):
            _show_left(side, names)
    if worse:
        raise typer.Exit(1)


def _as_json(
    before: "Run",
    after: "Run",
    changes: list["Comparison"],
    threshold: float,
    differing: list["Difference"],
    left: tuple[list[str], list[str]],
) -> dict[str, Any]:
    """The object of `--json`: `results` is what changed, each with the change as its estimate."""
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


def _show_differences(differing: list["Difference"]) -> None:
    if not differing:
        note("same commit, model, machine, settings and versions")
        return
    rows = [["ALSO DIFFERS", "BEFORE", "AFTER"], *([_cut(text) for text in one] for one in differing)]
    head, *lines = columns(rows)
    print("\n" + style(head, "bold"))
    print("\n".join(lines))


def _cut(text: str) -> str:
    text = cell(text)
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def _show_left(side: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
        note(f"only in {cell(side)}: {', '.join(map(cell, names[:NAMED_AT_MOST]))}{more}")
