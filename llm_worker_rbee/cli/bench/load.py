"""`llm-worker-rbee bench load`: how long a start takes, and of what."""

from typing import Annotated

from ...bench import load as benchmark
from ...bench.results import Result, Run
from ...progress import step_progress
from ..options import ComputeOptions, gather
from ..terminal import columns, note, style
from .common import (
    ModelArgument,
    ResultOptions,
    SyntheticOption,
    find_source,
    interval,
    measuring,
    model_file,
    quantity,
    recording,
)


@gather(results=ResultOptions, computing=ComputeOptions)
def load(
    results: ResultOptions,
    computing: ComputeOptions,
    model: ModelArgument = None,
    synthetic: SyntheticOption = None,
    compile_kernels: Annotated[
        bool, measuring("--compile", help="One start more with an empty kernel cache: it compiles all kernels.")
    ] = False,
    repetitions: Annotated[
        int, measuring("--repetitions", "-r", metavar="N", min=1, help="How often, cold and warm each.")
    ] = 3,
) -> None:
    """Measure a start: import, open, tokenizer, kernels, weights, first token.

    Every start is a process of its own. COLD: the model's file was dropped from
    the page cache before; WARM: it was read just before. TOTAL is the time from
    starting the process to the first token of a short prompt.

    KERNELS is the time to load their machine code; the first start after an
    installation compiles it, so there is a start before those that count. On a
    GPU its memory is measured too, also after batches of many sizes.

    \b
    Examples:
      llm-worker-rbee bench load
      llm-worker-rbee bench load model.gguf -r 5
      llm-worker-rbee bench load --device cuda --synthetic llama2-7b:Q4_K_M --compile
      llm-worker-rbee bench load --json
    """
    used = computing.set_up()
    source = find_source(model, synthetic)
    settings = {"repetitions": repetitions, "backend": computing.backend, "device": computing.device, "threads": used}
    with recording("load", results, _show, **settings) as recorder, step_progress() as progress:
        options = {"device": computing.device, "backend": computing.backend, "threads": computing.kernel_threads}
        with model_file(source, progress) as path:
            benchmark.run(recorder, progress, path, repetitions, options, compile_kernels=compile_kernels)


def _show(run: Run) -> None:
    found = {result.name: result for result in run.results}
    times = [name for name, result in found.items() if result.unit == "s"]
    phases = list(dict.fromkeys(name.partition("/")[0] for name in times))
    phases.sort(key=lambda name: name == "total")
    caches = ["cold", "warm", *(["compiling"] if "total/compiling" in found else [])]
    rows = [["", *(text for cache in caches for text in (cache.upper(), "95% INTERVAL"))]]
    for phase in phases:
        sides = [found.get(f"{phase}/{cache}", found.get(phase)) for cache in caches]
        rows.append([phase.replace("_", " "), *(cell for side in sides for cell in _cells(side))])
    lines = columns(rows, right=range(1, 2 * len(caches), 2))
    print(style(lines[0], "bold"))
    print("\n".join([*lines[1:], ""]))
    sizes = [[name, quantity(r.estimate, r.unit), interval(r)] for name, r in found.items() if r.unit == "B"]
    print("\n".join(columns([[n.replace("memory/", "memory, "), *rest] for n, *rest in sizes], right=[1])))
    for what, reason in run.details.get("left_out", {}).items():
        note(f"left out {what}: {reason}")
    if "warning" in run.details:
        note(run.details["warning"])


def _cells(result: Result | None) -> list[str]:
    return ["", ""] if result is None else [quantity(result.estimate, result.unit), interval(result)]
