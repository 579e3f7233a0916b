"""`llm-worker-rbee bench peers`: this worker beside llama.cpp and transformers."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...progress import step_progress
from ..options import MODEL_HELP, ComputeOptions, gather
from ..terminal import cell, columns, note, style
from .common import MEASURING_PANEL, ResultOptions, interval, numbers, quantity, recording
from .e2e import SYNTHETIC_HELP, source_of

if TYPE_CHECKING:
    from ...bench.results import Result, Run

PEERS_PANEL = "Peers"
OURS = "llm-worker-rbee"


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, **{"rich_help_panel": MEASURING_PANEL} | more)


def _peer_option(*names: str, help: str, **more: Any) -> Any:
    return _option(*names, help=help, rich_help_panel=PEERS_PANEL, **more)


@gather(results=ResultOptions, computing=ComputeOptions)
def peers(
    results: ResultOptions,
    computing: ComputeOptions,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None,
    synthetic: Annotated[str | None, _option("--synthetic", metavar="SHAPE:TYPES", help=SYNTHETIC_HELP)] = None,
    pp: Annotated[str, _option("--pp", metavar="N,...", help="Tokens of the prompt; 0: no prefill.")] = "512",
    tg: Annotated[str, _option("--tg", metavar="N,...", help="Tokens to generate; 0: no decode.")] = "128",
    batch: Annotated[
        str, _option("--batch", metavar="N,...", help="Answers at once; above 1 beside llama-server, decode only.")
    ] = "1",
    repetitions: Annotated[int, _option("--repetitions", "-r", metavar="N", min=1, help="How often.")] = 3,
    peer: Annotated[
        list[str] | None,
        _peer_option("--peer", metavar="NAME", show_default="all", help="Only this one. Repeatable."),
    ] = None,
    llama_bench: Annotated[
        str | None,
        _peer_option("--llama-bench", metavar="PATH", show_default="on the PATH", help="The program llama-bench."),
    ] = None,
    llama_server: Annotated[
        str | None,
        _peer_option("--llama-server", metavar="PATH", show_default="on the PATH", help="The program llama-server."),
    ] = None,
    peer_python: Annotated[
        list[str] | None,
        _peer_option(
            "--peer-python",
            metavar="PATH",
            show_default="this one",
            help="A Python that has llama-cpp-python or transformers. Repeatable.",
        ),
    ] = None,
    timeout: Annotated[
        float, _peer_option("--timeout", metavar="S", min=0.1, help="How long to wait for one answer.")
    ] = 900.0,
) -> None:
    """Measure this worker beside llama-bench, llama-cpp-python and transformers.

    The same file, the same lengths, the same number of threads, in turn;
    device, backend and instruction set are ours alone. Each
    peer but llama-bench keeps the model loaded; loading is not counted.
    transformers computes in float32. llama-bench leaves sampling out, the
    others sample greedily.

    With --batch 16 this worker and llama-server with 16 slots answer 16 real
    prompts at once, TG tokens each: what all of them make a second from when
    the last has begun to when the first is complete. Ours has no HTTP then.

    A peer that is not installed is left out, one that fails is named.

    \b
    Examples:
      llm-worker-rbee bench peers --llama-bench ~/llama.cpp/build/bin/llama-bench
      llm-worker-rbee bench peers model.gguf --peer-python ~/venv/bin/python
      llm-worker-rbee bench peers --batch 16 --llama-server ~/llama.cpp/build/bin/llama-server
      llm-worker-rbee bench peers --synthetic llama2-7b:Q4_0:4 --peer llama-bench
    """
    used = computing.set_up()
    from ...bench import peers as room
    from ...bench.synthetic import write

    plan = room.Plan(
        pp=numbers(pp, "--pp"),
        tg=numbers(tg, "--tg"),
        batches=numbers(batch, "--batch", least=1),
        repetitions=repetitions,
        threads=used,
        peers=peer or room.NAMES,
        llama_bench=llama_bench,
        llama_server=llama_server,
        pythons=peer_python or (),
        timeout_s=timeout,
        device=computing.device,
        backend=computing.backend,
    )
    source = source_of(model, synthetic)
    settings = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    with recording("peers", results, _show, **settings) as recorder, step_progress() as progress:
        if isinstance(source, Path):
            room.run(recorder, progress, source, plan)
            return
        with tempfile.TemporaryDirectory(prefix="llm-worker-rbee-") as folder:
            file = Path(folder) / f"{str(source).replace(':', '-')}.gguf"
            room.run(recorder, progress, write(source, file, progress=progress), plan)


def _show(run: "Run") -> None:
    if run.model:
        count = run.settings["threads"]
        size = quantity(run.model["bytes"], "B")
        print(f"{run.model['name']}, {size}, {count} thread{'s' * (count != 1)}\n")
    tests = list(dict.fromkeys(result.name.partition("/")[0] for result in run.results))
    order = sorted(run.results, key=lambda r: (tests.index(r.name.partition("/")[0]), r.fields["peer"] != OURS))
    rows = [["", "PEER", "RESULT", "95% INTERVAL", "OURS / PEER", "VERSION"], *map(_row, order)]
    lines = columns(rows, right=[2, 4])
    print(style(lines[0], "bold"))
    print("\n".join(lines[1:]))
    for what in ("left_out", "failed"):
        for name, reason in run.details.get(what, {}).items():
            note(cell(f"{what.replace('_', ' ')}: {name}: {reason}"))
    if any(result.name.endswith("/llama-bench") for result in run.results):
        note("llama-bench leaves sampling out; the others sample greedily")


def _row(result: "Result") -> list[str]:
    ratio = result.fields["ours_over_peer"]
    test, _, name = result.name.partition("/")
    shown = "" if ratio is None or name == OURS else f"{ratio:.3g}"
    return [test, name, quantity(result.estimate, result.unit), interval(result), shown, result.fields["version"]]
