"""`llm-worker-rbee bench e2e` and `bench load`: a whole model, prefill and decode; how long a start takes."""

from dataclasses import asdict

import typer

from llm_worker_rbee.backends.select import has_driver
from llm_worker_rbee.cli.loading import set_up
from llm_worker_rbee.cli.options import ComputeFlags
from llm_worker_rbee.cli.terminal import columns, note
from llm_worker_rbee.errors import InvalidRequestError, counted
from llm_worker_rbee.progress import step_progress

from .. import e2e as e2e_benchmark
from .. import load as load_benchmark
from ..results import Result, Run
from ..synthetic import parse
from . import common
from .options import E2eCommand, LoadCommand

COMPARISONS = {
    "percent_of_products": "{:.0f}% of the products alone",
    "times_one": "{:.2f} x one sequence",
    "times_shorter": "{:.1f} x shorter",
    "times_plain": "{:.2f} x plain decoding",
    "acceptance": "{:.0%} of drafts accepted",
    "tokens_per_step": "{:.2f} tokens a step",
    "same_answers": "{:.0%} of answers as without drafts",
}
MEASURED_DRAFTERS = ("off", "ngram")  # of SPECULATIVE


def _plan(options: E2eCommand, threads: int) -> e2e_benchmark.Plan:
    """Return the plan; raise on options that are invalid or exclude each other."""
    if options.speculative not in MEASURED_DRAFTERS:
        names = ", ".join(MEASURED_DRAFTERS)
        raise typer.BadParameter(f"--speculative is {options.speculative!r}: use one of {names}, or --draft-model")
    if options.speculative != "off" and options.draft_model is not None:
        raise typer.BadParameter("both --speculative and --draft-model are given: choose one")
    pg = [] if options.pg is None else common.parse_counts(options.pg, "--pg", 1)
    if len(pg) not in (0, 2):
        raise typer.BadParameter(f"--pg is {options.pg!r}: use two numbers, such as 128,128")
    targets = [] if options.target_itl_ms is None else common.parse_counts(options.target_itl_ms, "--target-itl-ms")
    computing = options.computing
    try:
        return e2e_benchmark.Plan(
            pp=common.parse_counts(options.pp, "--pp"), tg=common.parse_counts(options.tg, "--tg"),
            depths=common.parse_counts(options.depth, "--depth"),
            batches=common.parse_counts(options.batch, "--batch", 1), prefix=options.prefix, pg=pg,
            requests=options.requests, steps=options.step or [], bursts=options.burst or [],
            max_step_tokens=options.max_step_tokens, speculative=options.speculative, draft_tokens=options.draft_tokens,
            targets_ms=targets,
            draft_model=None if options.draft_model is None else str(common.find_source(options.draft_model, None)),
            repetitions=options.repetitions, threads=threads, device=computing.device, backend=computing.backend,
            kv_type=computing.kv_type, quantize=computing.quantize, deterministic=options.deterministic,
        )  # fmt: skip
    except InvalidRequestError as error:
        raise typer.BadParameter(str(error)) from None


def e2e(options: E2eCommand) -> None:
    """Measure the scenarios of the plan."""
    plan, synthetic = _plan(options, set_up(options.computing)), options.synthetic or []
    source = common.find_source(options.model, synthetic[0] if synthetic else None)
    with common.recording("e2e", options.results, _show_e2e, **asdict(plan)) as recorder, step_progress() as progress:
        if len(synthetic) > 1:
            e2e_benchmark.run_isolated(recorder, progress, [parse(name) for name in synthetic], plan)
        else:
            e2e_benchmark.run(recorder, progress, source, plan)


def _show_e2e(run: Run) -> None:
    timed = [result for result in run.results if result.samples]
    single = [result for result in run.results if not result.samples]
    if run.model:
        size, threads = common.quantity(run.model["bytes"], "B"), counted(run.settings["threads"], "thread")
        print(f"{run.model['name']}, {size}, {threads}\n")
    head = ["", "RESULT", "95% INTERVAL", "OF LIMIT", "BOUND BY", "RUNS", "BESIDE"]
    common.print_table([head, *map(_e2e_row, timed)], right=[1, 3, 5])
    if single:
        counts = [[result.name.replace("_", " "), common.quantity(result.estimate, result.unit)] for result in single]
        print("\n" + "\n".join(columns(counts, right=[1])))
    for name, reason in run.details.get("failed", {}).items():
        note(f"failed: {name}: {reason}")
    if any(result.unit == "tok/s" for result in timed):
        note("greedy sampling included; llama-bench does not sample")


def _e2e_row(result: Result) -> list[str]:
    part, fields = result.fields.get("percent_of_limit"), result.fields
    of_limit, bound = "" if part is None else f"{part:.1f}%", str(fields.get("bound_by", ""))
    beside = ", ".join(text.format(fields[key]) for key, text in COMPARISONS.items() if key in fields)
    return [result.name, *_value_cells(result), of_limit, bound, str(len(result.samples)), beside]


def _value_cells(result: Result | None) -> list[str]:
    return ["", ""] if result is None else [common.quantity(result.estimate, result.unit), common.interval(result)]


def load(options: LoadCommand) -> None:
    """Measure cold and warm starts."""
    computing, repetitions = options.computing, options.repetitions
    used = set_up(computing)
    source = common.find_source(options.model, options.synthetic)
    settings = {"repetitions": repetitions, "backend": computing.backend, "device": computing.device, "threads": used}
    with common.recording("load", options.results, _show_load, **settings) as recorder, step_progress() as progress:
        arguments = {"device": computing.device, "backend": computing.backend, "threads": computing.kernel_threads}
        limits = {"max_batch": options.max_batch, "max_step_tokens": options.max_step_tokens}
        arguments |= {name: value for name, value in limits.items() if value is not None}
        with common.model_file(source, progress) as path:
            load_benchmark.run(
                recorder,
                progress,
                path,
                repetitions,
                arguments,
                compile_kernels=options.compile,
                warms_up=_uses_gpu(computing) and not options.no_warm_up,
            )


def _uses_gpu(computing: ComputeFlags) -> bool:
    """Return whether a model goes to a GPU if it fits there."""
    if computing.device.startswith("cuda") or computing.backend == "cuda":
        return True
    return computing.options().is_automatic and has_driver()


def _show_load(run: Run) -> None:
    by_name = {result.name: result for result in run.results if not result.name.startswith("command/")}
    times = dict.fromkeys(name.partition("/")[0] for name, result in by_name.items() if result.unit == "s")
    counts = dict.fromkeys(name.partition("/")[0] for name, result in by_name.items() if result.unit not in ("s", "B"))
    phases = sorted(times, key=lambda name: name == "total")
    caches = ["cold", "warm", *(["compiling"] if "total/compiling" in by_name else [])]
    rows = [["", *(text for cache in caches for text in (cache.upper(), "95% INTERVAL"))]]
    for phase in (*phases, *counts):
        sides = [by_name.get(f"{phase}/{cache}", by_name.get(phase)) for cache in caches]
        rows.append([phase.replace("_", " "), *(cell for side in sides for cell in _value_cells(side))])
    common.print_table(rows, right=range(1, 2 * len(caches), 2))
    sizes = [[n.replace("memory/", "memory, "), *_value_cells(r)] for n, r in by_name.items() if r.unit == "B"]
    print("\n" + "\n".join(columns(sizes, right=[1])))
    commands = [result for result in run.results if result.name.startswith("command/")]
    if commands:
        cells = [[result.name.partition("/")[2].replace("_", " "), *_value_cells(result)] for result in commands]
        print("\n" + "\n".join(columns([["COMMAND", "", "95% INTERVAL"], *cells], right=[1])))
    for what, reason in run.details.get("left_out", {}).items():
        note(f"left out {what}: {reason}")
    if "warning" in run.details:
        note(run.details["warning"])
