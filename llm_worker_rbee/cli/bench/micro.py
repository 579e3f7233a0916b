"""`llm-worker-rbee bench micro`: the ops and parts, one by one, against the limit of the machine."""

from typing import Annotated

import typer

from ...bench import micro as benchmark
from ...bench.results import Result, Run
from ...progress import step_progress
from ..options import ComputeOptions, gather, options_in
from ..terminal import columns, note, style
from .common import MEASURING_PANEL, ResultOptions, interval, quantity, recording, show_changes

_option = options_in(MEASURING_PANEL)


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
    selected = benchmark.select(filter)
    if names:
        print("\n".join(case.name for case in selected))
        return
    if ab is not None and computing.backend != "auto":
        raise typer.BadParameter("--ab names both backends: leave --backend out")
    backends = [computing.backend] if ab is None else _parse_ab(ab)
    settings = {"filter": filter, "backends": backends, "seconds": seconds, "threads": used}
    with recording("micro", results, _print_run, **settings) as recorder:
        with step_progress() as progress:
            plan = benchmark.round_plan(seconds)
            benchmark.run(recorder, progress, selected, backends, plan, computing.kernel_threads)
        if ab is not None:
            recorder.details["ab"] = [c.as_json() for c in benchmark.compare_backends(recorder.results())]


def _parse_ab(ab: str) -> list[str]:
    key, equals, values = ab.partition("=")
    backends = values.split(",")
    if key != "backend" or not equals or len(backends) != 2 or not all(backends):
        raise typer.BadParameter(f"--ab {ab!r} is not of the form backend=A,B, such as backend=reference,cpu")
    return backends


def _print_run(run: Run) -> None:
    rows = [["", "BACKEND", "TIME", "95% INTERVAL", "OF LIMIT", "BOUND BY", "SAMPLES", "OUTLIERS"]]
    rows += [_row(result) for result in run.results]
    head, *lines = columns(rows, right=[2, 4, 6])
    print("\n".join([style(head, "bold"), *lines]))
    for name, reason in run.details.get("left_out", {}).items():
        note(f"left out {name}: {reason}")
    if len(run.settings["backends"]) == 2:
        show_changes(benchmark.compare_backends(run.results), float("inf"), ("A", "B"))


def _row(result: Result) -> list[str]:
    fields = result.fields
    outliers = [f"{count} {name.replace('_', ' ')}" for name, count in fields["outliers"].items() if count]
    return [
        result.name, str(fields["backend"]), quantity(result.estimate, result.unit), interval(result),
        f"{fields['percent_of_limit']:.1f}%", str(fields["bound_by"]),
        f"{len(result.samples)} x {fields['iterations']}", ", ".join(outliers),
    ]  # fmt: skip
