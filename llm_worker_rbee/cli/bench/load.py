"""`llm-worker-rbee bench load`: how long a start takes, and of what."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...progress import step_progress, transfer_progress
from ..options import MODEL_HELP, ComputeOptions, gather
from ..terminal import columns, note, style
from .common import MEASURING_PANEL, ResultOptions, interval, quantity, recording

if TYPE_CHECKING:
    from ...bench.results import Result, Run


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=MEASURING_PANEL, **more)


@gather(results=ResultOptions, computing=ComputeOptions)
def load(
    results: ResultOptions,
    computing: ComputeOptions,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None,
    repetitions: Annotated[
        int, _option("--repetitions", "-r", metavar="N", min=1, help="How often, cold and warm each.")
    ] = 3,
) -> None:
    """Measure a start: import, open, tokenizer, kernels, weights, first token.

    Every start is a process of its own. COLD: the model's file was put out of
    the system's file cache before; WARM: it was read just before. TOTAL is the
    time from starting the process to the first token of a short prompt.

    KERNELS is the time to load their machine code; the first start after an
    installation compiles it, so there is a start before those that count.

    \b
    Examples:
      llm-worker-rbee bench load
      llm-worker-rbee bench load model.gguf -r 5
      llm-worker-rbee bench load --json
    """
    used = computing.set_up()
    from ...bench import load as room
    from ...weights.hub import locate_model

    with transfer_progress() as bar:
        path = locate_model(model, progress=bar)
    settings = {"repetitions": repetitions, "backend": computing.backend, "device": computing.device, "threads": used}
    with recording("load", results, _show, **settings) as recorder, step_progress() as progress:
        start = {"device": computing.device, "backend": computing.backend, "threads": computing.kernel_threads}
        room.run(recorder, progress, path, repetitions, start)


def _show(run: "Run") -> None:
    found = {result.name: result for result in run.results}
    times = [name for name, result in found.items() if result.unit == "s"]
    phases = list(dict.fromkeys(name.partition("/")[0] for name in times))
    phases.sort(key=lambda name: name == "total")
    rows = [["", "COLD", "95% INTERVAL", "WARM", "95% INTERVAL"]]
    for phase in phases:
        sides = [found.get(f"{phase}/{cache}", found.get(phase)) for cache in ("cold", "warm")]
        rows.append([phase.replace("_", " "), *(cell for side in sides for cell in _cells(side))])
    lines = columns(rows, right=[1, 3])
    print(style(lines[0], "bold"))
    print("\n".join([*lines[1:], ""]))
    sizes = [[name, quantity(r.estimate, r.unit), interval(r)] for name, r in found.items() if r.unit == "B"]
    print("\n".join(columns([[n.replace("memory/", "memory, "), *rest] for n, *rest in sizes], right=[1])))
    for what, reason in run.details.get("left_out", {}).items():
        note(f"left out {what}: {reason}")
    if "warning" in run.details:
        note(run.details["warning"])


def _cells(result: "Result | None") -> list[str]:
    return ["", ""] if result is None else [quantity(result.estimate, result.unit), interval(result)]
