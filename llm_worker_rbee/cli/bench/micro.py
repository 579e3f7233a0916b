"""`llm-worker-rbee bench micro`: the ops and parts, one by one, against the limit of the machine."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...progress import step_progress
from ..options import ComputeOptions, gather
from ..terminal import columns, note, style
from .common import MEASURING_PANEL, ResultOptions, interval, quantity, recording, show_changes

if TYPE_CHECKING:
    from ...bench.results import Result, Run


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=MEASURING_PANEL, **more)


@gather(results=ResultOptions, computing=ComputeOptions)
def micro(
    results: ResultOptions,
    computing: ComputeOptions,
    filter: Annotated[
        str | None, _option("--filter", metavar="RE", help="Only benchmarks whose name holds this expression.")
    ] = None,
    ab: Annotated[
        str | None, _option("--ab", metavar="backend=A,B", help="Measure two backends in turn and compare them.")
    ] = None,
    seconds: Annotated[
        float, _option("--seconds", metavar="X", min=0.01, max=600, help="How long each benchmark is measured.")
    ] = 0.5,
    names: Annotated[bool, _option("--list", help="List the benchmarks and leave.")] = False,
) -> None:
    """Measure the ops and parts one by one, each beside the limit of this machine.

    TIME is that of one call: the mean of the middle half of the samples. OF LIMIT is the least time that the memory
    or the arithmetic of this machine, measured just before, allows for the task's bytes and operations, over that.

    A benchmark whose function only the reference has runs there, whatever the backend.

    \b
    Examples:
      llm-worker-rbee bench micro --filter rope
      llm-worker-rbee bench micro --save-baseline before
      llm-worker-rbee bench micro --baseline before --threshold 0.05
      llm-worker-rbee bench micro --ab backend=reference,reference --filter linear/Q4
    """
    used = computing.set_up()
    from ...bench import micro as room

    selected = room.select(filter)
    if names:
        print("\n".join(case.name for case in selected))
        return
    if ab is not None and computing.backend != "auto":
        raise typer.BadParameter("--ab names both backends: leave --backend out")
    sides = [computing.backend] if ab is None else _sides(ab)
    settings = {"filter": filter, "backends": sides, "seconds": seconds, "threads": used}
    with recording("micro", results, _show, **settings) as recorder:
        with step_progress() as progress:
            room.run(recorder, progress, selected, sides, room.round_plan(seconds), computing.kernel_threads)
        if ab is not None:
            recorder.details["ab"] = [c.as_json() for c in room.compare_backends(recorder.results())]


def _sides(ab: str) -> list[str]:
    key, equals, values = ab.partition("=")
    sides = values.split(",")
    if key != "backend" or not equals or len(sides) != 2 or not all(sides):
        raise typer.BadParameter(f"--ab {ab!r} is not of the form backend=A,B, such as backend=reference,cpu")
    return sides


def _show(run: "Run") -> None:
    from ...bench import micro as room

    rows = [["", "BACKEND", "TIME", "95% INTERVAL", "OF LIMIT", "BOUND BY", "SAMPLES", "OUTLIERS"]]
    rows += [_row(result) for result in run.results]
    lines = columns(rows, right=[2, 4, 6])
    print(style(lines[0], "bold"))
    print("\n".join(lines[1:]))
    for name, reason in run.details.get("left_out", {}).items():
        note(f"left out {name}: {reason}")
    if len(run.settings["backends"]) == 2:
        show_changes(room.compare_backends(run.results), float("inf"), ("A", "B"))


def _row(result: "Result") -> list[str]:
    fields = result.fields
    found = {name.replace("_", " "): count for name, count in fields["outliers"].items() if count}
    return [
        result.name,
        str(fields["backend"]),
        quantity(result.estimate, result.unit),
        interval(result),
        f"{fields['percent_of_limit']:.1f}%",
        str(fields["bound_by"]),
        f"{len(result.samples)} x {fields['iterations']}",
        ", ".join(f"{count} {name}" for name, count in found.items()),
    ]
