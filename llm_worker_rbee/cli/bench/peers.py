"""`llm-worker-rbee bench peers`: this worker beside llama.cpp and transformers."""

from dataclasses import asdict
from typing import Annotated

from ...bench import peers as benchmark
from ...bench.peers import OURS
from ...bench.results import Result, Run
from ...progress import step_progress
from ..options import ComputeOptions, gather, options_in
from ..terminal import cell, note
from . import common
from .common import ModelArgument, OutputLengths, PromptLengths, Repetitions, ResultOptions, SyntheticOption

_peer_option = options_in("Peers")


@gather(results=ResultOptions, computing=ComputeOptions)
def peers(
    results: ResultOptions,
    computing: ComputeOptions,
    model: ModelArgument = None,
    synthetic: SyntheticOption = None,
    pp: PromptLengths = "512",
    tg: OutputLengths = "128",
    batch: Annotated[
        str, common.measuring(metavar="N,...", help="Batch sizes; above 1, decode only and only with llama-server.")
    ] = "1",
    repetitions: Repetitions = 3,
    peer: Annotated[
        list[str] | None, _peer_option(metavar="NAME", show_default="all", help="Measure only this peer. Repeatable.")
    ] = None,
    llama_bench: Annotated[
        str | None, _peer_option(metavar="PATH", show_default="on the PATH", help="Path of llama-bench.")
    ] = None,
    llama_server: Annotated[
        str | None, _peer_option(metavar="PATH", show_default="on the PATH", help="Path of llama-server.")
    ] = None,
    peer_python: Annotated[
        list[str] | None,
        _peer_option(metavar="PATH", show_default="this one",
                     help="Python with llama-cpp-python or transformers. Repeatable."),
    ] = None,
    timeout: Annotated[float, _peer_option(metavar="S", min=0.1, help="Timeout of one answer, in seconds.")] = 900.0,
) -> None:  # fmt: skip
    """Measure this worker beside llama-bench, llama-cpp-python and transformers.

    The same file, the same lengths, the same number of threads, in turn;
    device, backend and instruction set are ours alone. Each
    peer but llama-bench keeps the model loaded; loading is not counted.
    transformers computes in float32. llama-bench does not sample, the
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
    plan = benchmark.Plan(
        threads=computing.set_up(), pp=common.parse_counts(pp, "--pp"), tg=common.parse_counts(tg, "--tg"),
        batches=common.parse_counts(batch, "--batch", 1), repetitions=repetitions, peers=peer or benchmark.NAMES,
        llama_bench=llama_bench, llama_server=llama_server, pythons=peer_python or (), timeout_s=timeout,
        device=computing.device, backend=computing.backend,
    )  # fmt: skip
    source = common.find_source(model, synthetic)
    with (
        common.recording("peers", results, _show, **asdict(plan)) as recorder,
        step_progress() as progress,
        common.model_file(source, progress) as path,
    ):
        benchmark.run(recorder, progress, path, plan)


def _show(run: Run) -> None:
    if run.model:
        count = run.settings["threads"]
        size = common.quantity(run.model["bytes"], "B")
        print(f"{run.model['name']}, {size}, {count} thread{'s' * (count != 1)}\n")
    tests = list(dict.fromkeys(result.name.partition("/")[0] for result in run.results))
    order = sorted(run.results, key=lambda r: (tests.index(r.name.partition("/")[0]), r.fields["peer"] != OURS))
    head = ["", "PEER", "RESULT", "95% INTERVAL", "OURS / PEER", "VERSION"]
    common.print_table([head, *map(_row, order)], right=[2, 4])
    for what in ("left_out", "failed"):
        for name, reason in run.details.get(what, {}).items():
            note(cell(f"{what.replace('_', ' ')}: {name}: {reason}"))
    if any(result.name.endswith("/llama-bench") for result in run.results):
        note("llama-bench does not sample; the others sample greedily")


def _row(result: Result) -> list[str]:
    ratio = result.fields["ours_over_peer"]
    test, _, name = result.name.partition("/")
    shown = "" if ratio is None or name == OURS else f"{ratio:.3g}"
    value = common.quantity(result.estimate, result.unit)
    return [test, name, value, common.interval(result), shown, result.fields["version"]]
