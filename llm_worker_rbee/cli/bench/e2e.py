"""`llm-worker-rbee bench e2e`: a whole model, prefill and decode."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...progress import step_progress, transfer_progress
from ..options import MODEL_HELP, LoadOptions, gather
from ..terminal import columns, note, style
from .common import MEASURING_PANEL, ResultOptions, interval, numbers, quantity, recording

if TYPE_CHECKING:
    from ...bench.results import Result, Run
    from ...bench.synthetic import Spec

SYNTHETIC_HELP = "Random weights of a known shape in place of a model: llama2-7b:Q4_K_M, or :4 after it for 4 layers."

BESIDE = {
    "percent_of_products": "{:.0f}% of the products alone",
    "times_one": "{:.2f} x one sequence",
    "times_shorter": "{:.1f} x shorter",
    "times_plain": "{:.2f} x without guesses",
    "acceptance": "{:.0%} of guesses right",
    "tokens_per_step": "{:.2f} tokens a step",
}


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=MEASURING_PANEL, **more)


def _lengths(name: str, help: str) -> Any:
    return _option(name, metavar="N,...", help=help)


@gather(results=ResultOptions, computing=LoadOptions)
def e2e(
    results: ResultOptions,
    computing: LoadOptions,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None,
    synthetic: Annotated[str | None, _option("--synthetic", metavar="SHAPE:TYPES", help=SYNTHETIC_HELP)] = None,
    pp: Annotated[str, _lengths("--pp", "Tokens of the prompt; 0: no prefill.")] = "512",
    tg: Annotated[str, _lengths("--tg", "Tokens to generate; 0: no decode.")] = "128",
    depth: Annotated[str, _lengths("--depth", "Tokens that are in the cache before.")] = "0",
    batch: Annotated[str, _lengths("--batch", "Sequences side by side.")] = "1",
    prefix: Annotated[
        int, _option("--prefix", metavar="N", min=0, help="Time two prompts that share N tokens; 0: not.")
    ] = 0,
    target_itl_ms: Annotated[
        str | None,
        _option("--target-itl-ms", metavar="T,...", help="Time answers while a prompt of 2,000 is read; 0: no target."),
    ] = None,
    speculative: Annotated[
        str, _option("--speculative", metavar="HOW", help="Decode real text with guesses too: ngram.")
    ] = "off",
    draft_tokens: Annotated[
        int | None, _option("--draft-tokens", metavar="K", min=1, max=16, help="The most guesses in a step.")
    ] = None,
    draft_model: Annotated[
        str | None, _option("--draft-model", metavar="MODEL", help="Likewise, with guesses of this model.")
    ] = None,
    repetitions: Annotated[int, _option("--repetitions", "-r", metavar="N", min=1, help="How often.")] = 5,
) -> None:
    """Measure a whole model: prefill, decode, time to first token, memory.

    ppN and tgN are what llama-bench measures: N prompt tokens at once, and N
    tokens one after the other from DEPTH cached ones. Ours goes through the
    engine and samples greedily; llama-bench leaves sampling out. With a batch,
    the tokens of all sequences count, and decode stands beside what the matrix
    products alone allow at so many rows, and beside one sequence.

    OF LIMIT: for decode, the bytes that a token needs times the rate, over the
    memory bandwidth measured just before; for prefill, the operations over the
    measured rate of float32 matrix products.

    A synthetic model has random weights and llama.cpp's real mix of types: it
    is for speed only.

    \b
    Examples:
      llm-worker-rbee bench e2e
      llm-worker-rbee bench e2e model.gguf --pp 128,512 --tg 64 --depth 0,2048
      llm-worker-rbee bench e2e --synthetic llama2-7b:Q4_K_M:4 --pp 32 --tg 4 -r 3
      llm-worker-rbee bench e2e --quantize Q8_0 --kv-type int8 --threads 2
      llm-worker-rbee bench e2e --pp 0 --tg 64 --batch 16
      llm-worker-rbee bench e2e --pp 0 --tg 128 --speculative ngram
      llm-worker-rbee bench e2e --pp 0 --tg 0 --target-itl-ms 50,100,0
      llm-worker-rbee bench e2e --save-baseline before
    """
    used = computing.set_up()
    from ...bench import e2e as room
    from ...bench.e2e.throughput import Plan
    from ...config.engine import SPECULATIVE

    if speculative not in SPECULATIVE:
        raise typer.BadParameter(f"--speculative is {speculative!r}: use one of {', '.join(SPECULATIVE)}")
    if speculative != "off" and draft_model is not None:
        raise typer.BadParameter("both --speculative and --draft-model are given: choose one")

    plan = Plan(
        pp=numbers(pp, "--pp"),
        tg=numbers(tg, "--tg"),
        depths=numbers(depth, "--depth"),
        batches=numbers(batch, "--batch", least=1),
        prefix=prefix,
        targets_ms=[] if target_itl_ms is None else numbers(target_itl_ms, "--target-itl-ms"),
        speculative=speculative,
        draft_tokens=draft_tokens,
        draft_model=None if draft_model is None else str(source_of(draft_model, None)),
        repetitions=repetitions,
        threads=used,
        device=computing.device,
        backend=computing.backend,
        kv_type=computing.kv_type,
        quantize=computing.quantize,
    )
    source = source_of(model, synthetic)
    settings = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    with recording("e2e", results, _show, **settings) as recorder, step_progress() as progress:
        room.run(recorder, progress, source, plan)


def source_of(model: str | None, synthetic: str | None) -> "Path | Spec":
    """The file or the synthetic model that is meant."""
    if synthetic is not None and model is not None:
        raise typer.BadParameter("both a MODEL and --synthetic are given: choose one")
    if synthetic is not None:
        from ...bench.synthetic import parse

        return parse(synthetic)
    from ...weights.hub import locate_model

    with transfer_progress() as progress:
        return locate_model(model, progress=progress)


def _show(run: "Run") -> None:
    timed = [result for result in run.results if result.samples]
    counted = [result for result in run.results if not result.samples]
    rows = [["", "RESULT", "95% INTERVAL", "OF LIMIT", "BOUND BY", "RUNS", "BESIDE"], *map(_row, timed)]
    if run.model:
        print(f"{run.model['name']}, {quantity(run.model['bytes'], 'B')}, {_threads(run)}\n")
    lines = columns(rows, right=[1, 3, 5])
    print(style(lines[0], "bold"))
    print("\n".join(lines[1:]))
    if counted:
        print()
        told = [[result.name.replace("_", " "), quantity(result.estimate, result.unit)] for result in counted]
        print("\n".join(columns(told, right=[1])))
    if any(result.unit == "tok/s" for result in timed):
        note("greedy sampling included; llama-bench leaves it out")


def _threads(run: "Run") -> str:
    count = run.settings["threads"]
    return f"{count} thread{'s' * (count != 1)}"


def _row(result: "Result") -> list[str]:
    part = result.fields.get("percent_of_limit")
    return [
        result.name,
        quantity(result.estimate, result.unit),
        interval(result),
        "" if part is None else f"{part:.1f}%",
        str(result.fields.get("bound_by", "")),
        str(len(result.samples)),
        _beside(result),
    ]


def _beside(result: "Result") -> str:
    """What a figure is compared with."""
    return ", ".join(text.format(result.fields[key]) for key, text in BESIDE.items() if key in result.fields)
