"""`llm-worker-rbee bench e2e`: a whole model, prefill and decode."""

from dataclasses import fields
from typing import Annotated

import typer

from ...bench import e2e as benchmark
from ...bench.e2e import Plan
from ...bench.results import Result, Run
from ...bench.synthetic import parse
from ...config import SPECULATIVE
from ...progress import step_progress
from ..options import LoadOptions, gather
from ..terminal import columns, note, style
from .common import (
    SYNTHETIC_HELP,
    ModelArgument,
    OutputLengths,
    PromptLengths,
    Repetitions,
    ResultOptions,
    find_source,
    interval,
    measuring,
    parse_counts,
    quantity,
    recording,
)

COMPARISONS = {
    "percent_of_products": "{:.0f}% of the products alone",
    "times_one": "{:.2f} x one sequence",
    "times_shorter": "{:.1f} x shorter",
    "times_plain": "{:.2f} x plain decoding",
    "acceptance": "{:.0%} of drafts accepted",
    "tokens_per_step": "{:.2f} tokens a step",
}


@gather(results=ResultOptions, computing=LoadOptions)
def e2e(
    results: ResultOptions,
    computing: LoadOptions,
    model: ModelArgument = None,
    synthetic: Annotated[
        list[str] | None,
        measuring("--synthetic", metavar="SHAPE:TYPES", help=f"{SYNTHETIC_HELP} FP8 on a GPU. Repeatable."),
    ] = None,
    pp: PromptLengths = "512",
    tg: OutputLengths = "128",
    depth: Annotated[str, measuring("--depth", metavar="N,...", help="Tokens in the KV cache before.")] = "0",
    batch: Annotated[str, measuring("--batch", metavar="N,...", help="Sequences side by side.")] = "1",
    pg: Annotated[
        str | None, measuring("--pg", metavar="P,T", help="Time BATCH requests of P prompt and T output tokens.")
    ] = None,
    prefix: Annotated[
        int, measuring("--prefix", metavar="N", min=0, help="Time two prompts that share N tokens; 0: not.")
    ] = 0,
    target_itl_ms: Annotated[
        str | None,
        measuring(
            "--target-itl-ms", metavar="T,...", help="Time decode during a prefill of 2,000 tokens; 0: no target."
        ),
    ] = None,
    speculative: Annotated[
        str, measuring("--speculative", metavar="HOW", help="Decode real text with a drafter too: ngram.")
    ] = "off",
    draft_tokens: Annotated[
        int | None, measuring("--draft-tokens", metavar="K", min=1, max=16, help="Draft tokens a step.")
    ] = None,
    draft_model: Annotated[
        str | None, measuring("--draft-model", metavar="MODEL", help="Likewise, with this model as drafter.")
    ] = None,
    deterministic: Annotated[
        bool, measuring("--deterministic", help="Batch-invariant kernels, as `serve --deterministic` uses them.")
    ] = False,
    repetitions: Repetitions = 5,
) -> None:
    """Measure a whole model: prefill, decode, time to first token, memory.

    ppN and tgN are what llama-bench measures: N prompt tokens at once, and N
    tokens one after the other from DEPTH cached ones. This worker goes through
    the engine and samples greedily; llama-bench does not sample. With a batch,
    the tokens of all sequences count, and decode stands beside what the matrix
    products alone allow at so many rows, and beside one sequence.

    OF LIMIT: for decode, the bytes that a token needs times the rate, over the
    memory bandwidth measured just before; for prefill, the operations over the
    measured rate of matrix products (float32, on a GPU float16).

    A synthetic model has random weights and llama.cpp's real mix of types: it
    is for speed only. Several of them run in a process each, after the kernels
    of all have been compiled. On a GPU the time of a decode step is split into
    device_step and host_step, which the device does not hide.

    \b
    Examples:
      llm-worker-rbee bench e2e
      llm-worker-rbee bench e2e model.gguf --pp 128,512 --tg 64 --depth 0,2048
      llm-worker-rbee bench e2e --synthetic llama2-7b:Q4_K_M:4 --pp 32 --tg 4 -r 3
      llm-worker-rbee bench e2e --quantize Q8_0 --kv-type int8 --threads 2
      llm-worker-rbee bench e2e --pp 0 --tg 64 --batch 16
      llm-worker-rbee bench e2e --pp 0 --tg 128 --speculative ngram
      llm-worker-rbee bench e2e --pp 0 --tg 0 --target-itl-ms 50,100,0
      llm-worker-rbee bench e2e --device cuda --synthetic llama2-7b:Q4_K_M --batch 1,64
      llm-worker-rbee bench e2e --save-baseline before
    """
    used = computing.set_up()
    if speculative not in SPECULATIVE:
        raise typer.BadParameter(f"--speculative is {speculative!r}: use one of {', '.join(SPECULATIVE)}")
    if speculative != "off" and draft_model is not None:
        raise typer.BadParameter("both --speculative and --draft-model are given: choose one")
    request_lengths = [] if pg is None else parse_counts(pg, "--pg", 1)
    if len(request_lengths) not in (0, 2):
        raise typer.BadParameter(f"--pg is {pg!r}: use two numbers, such as 128,128")
    plan = Plan(
        pp=parse_counts(pp, "--pp"),
        tg=parse_counts(tg, "--tg"),
        depths=parse_counts(depth, "--depth"),
        batches=parse_counts(batch, "--batch", 1),
        prefix=prefix,
        targets_ms=[] if target_itl_ms is None else parse_counts(target_itl_ms, "--target-itl-ms"),
        speculative=speculative,
        draft_tokens=draft_tokens,
        draft_model=None if draft_model is None else str(find_source(draft_model, None)),
        repetitions=repetitions,
        threads=used,
        device=computing.device,
        backend=computing.backend,
        kv_type=computing.kv_type,
        quantize=computing.quantize,
        pg=request_lengths,
        deterministic=deterministic,
    )
    source = find_source(model, synthetic[0] if synthetic else None)
    settings = {field.name: getattr(plan, field.name) for field in fields(plan)}
    with recording("e2e", results, _show, **settings) as recorder, step_progress() as progress:
        if synthetic is not None and len(synthetic) > 1:
            benchmark.run_isolated(recorder, progress, [parse(name) for name in synthetic], plan)
        else:
            benchmark.run(recorder, progress, source, plan)


def _show(run: Run) -> None:
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
        counts = [[result.name.replace("_", " "), quantity(result.estimate, result.unit)] for result in counted]
        print("\n".join(columns(counts, right=[1])))
    for name, reason in run.details.get("failed", {}).items():
        note(f"failed: {name}: {reason}")
    if any(result.unit == "tok/s" for result in timed):
        note("greedy sampling included; llama-bench does not sample")


def _threads(run: Run) -> str:
    count = run.settings["threads"]
    return f"{count} thread{'s' * (count != 1)}"


def _row(result: Result) -> list[str]:
    part = result.fields.get("percent_of_limit")
    return [
        result.name,
        quantity(result.estimate, result.unit),
        interval(result),
        "" if part is None else f"{part:.1f}%",
        str(result.fields.get("bound_by", "")),
        str(len(result.samples)),
        _comparisons(result),
    ]


def _comparisons(result: Result) -> str:
    """Return what a result is compared with."""
    return ", ".join(text.format(result.fields[key]) for key, text in COMPARISONS.items() if key in result.fields)
