"""`llm-worker-rbee bench peers`: this worker against llama.cpp, mistral.rs, vLLM and transformers."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import typer

from llm_worker_rbee.cli.loading import set_up
from llm_worker_rbee.cli.terminal import cell, note
from llm_worker_rbee.errors import WorkerError, counted
from llm_worker_rbee.progress import step_progress, transfer_progress
from llm_worker_rbee.weights.hub import DEFAULT_MODEL, locate_model

from ..peers import find
from ..peers import plan as planning
from ..peers import suite as benchmark
from ..peers.plan import Plan, Row, TimeLeft
from ..peers.programs import OURS
from ..results import Recorder, Result, Run, write_atomically
from ..roofline import measure_limits
from . import common
from .options import PeersCommand

BUSY_CORES = 0.3  # from which on a machine is not quiet


def _plan(options: PeersCommand) -> Plan:
    benches = dict(text.split("=", 1) for text in options.peer or () if "=" in text)
    return Plan(
        threads=set_up(options.computing),
        repetitions=options.repetitions,
        benches=benches,
        peers=[name for name in options.peer or () if "=" not in name] if options.peer else planning.NAMES,
        llama_bench=options.llama_bench,
        llama_server=options.llama_server,
        llama_bench_args=options.llama_bench_args or (),
        pythons=options.peer_python or (),
        timeout_s=options.timeout,
        device=options.computing.device,
        backend=options.computing.backend,
    )


def _choose_rows(options: PeersCommand) -> list[Row]:
    """Return the rows with their models and lengths; raise on options that exclude each other."""
    models, shapes = options.model or [], options.synthetic or []
    model_row = partial(_model_row, is_list=options.list_rows)
    if options.suite is None:
        if options.rows is not None:
            raise typer.BadParameter("--rows chooses rows of a suite: give --suite too")
        if len(models) == len(shapes) == 1:
            raise typer.BadParameter("both a MODEL and --synthetic are given: choose one, or several of them")
        rows = [*map(model_row, models), *(Row(s, synthetic=s) for s in shapes)] or [model_row(None)]
    else:
        if shapes or len(models) > 1:
            raise typer.BadParameter("--suite has its models: leave --synthetic out, give at most one MODEL")
        rows = planning.select_rows(options.suite, options.rows)
        if not all(row.synthetic or row.real for row in rows):
            path = model_row(models[0] if models else None).model
            rows = [row if row.synthetic or row.real else row._replace(model=path) for row in rows]
    counts = {"pp": (options.pp, "--pp", 0), "tg": (options.tg, "--tg", 0), "batches": (options.batch, "--batch", 1)}
    lengths: dict[str, Any] = {
        name: common.parse_counts(text, option_name, low)
        for name, (text, option_name, low) in counts.items()
        if text is not None
    }
    names = [row.name for row in rows]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise typer.BadParameter(f"two rows are named {repeated!r}: give each file or shape once, or one run each")
    return [row._replace(**lengths) for row in rows]


def _model_row(name: str | None, *, is_list: bool) -> Row:
    """Return the row of a model; the list of rows does not fetch the default model."""
    if name is None and is_list:
        return Row(DEFAULT_MODEL)
    with transfer_progress() as progress:
        path = locate_model(name, progress=progress)
    return Row(path.name, model=path)


def peers(options: PeersCommand) -> None:
    """Measure the rows, this worker and its peers in turn."""
    plan, rows = _plan(options), _choose_rows(options)
    if options.list_rows:
        _list(rows, plan)
        return
    if options.markdown is not None:
        common.require_place(options.markdown)
    for name in options.install or ():
        with step_progress() as progress:
            find.install(name, progress)
    settings = asdict(plan.for_row(rows[0]) if len(rows) == 1 else plan)
    settings |= {"suite": options.suite, "rows": [row.name for row in rows]}
    settings |= {name: Path(path).name for name in ("llama_bench", "llama_server") if (path := settings[name])}
    settings["benches"] = {name: Path(path).name for name, path in plan.benches.items()}
    settings["pythons"] = [Path(path).name for path in plan.pythons]  # where programs are is no matter of speed
    with common.recording("peers", options.results, _show, **settings) as recorder:
        _measure(recorder, rows, plan, options.files)
        if not recorder.results():
            failed = recorder.details.get("failed", {})
            raise WorkerError(next((f"{row}: {reason}" for row, reason in failed.items()), "no row was measured"))
        if options.markdown is not None:
            write_atomically(options.markdown, benchmark.markdown(recorder.to_run()).encode())
            note(f"wrote {options.markdown}")


def _measure(recorder: Recorder, rows: Sequence[Row], plan: Plan, files: Path | None) -> None:
    """Measure the rows; with several, say how long they take, and the ratios of each when it is finished."""
    with ExitStack() as stack:
        folder = files or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llm-worker-rbee-")))
        folder.mkdir(parents=True, exist_ok=True)
        if len(rows) == 1:
            progress = stack.enter_context(step_progress())
            benchmark.run_rows(recorder, progress, rows, folder, plan)
            return
        estimates = _estimate(rows, plan)
        note(f"{len(rows)} rows: about {_duration(sum(estimates.values()))} (--rows RE measures some of them)")
        remaining = TimeLeft(estimates)

        def on_row(row: Row) -> None:
            pairs = benchmark.compared(recorder.to_run(), row.name)
            ratios = ", ".join(f"{test} {benchmark.ratio_text(theirs)}" for test, _, theirs in pairs)
            failed = recorder.details.get("failed", {}).get(row.name, "no peer was measured")
            seconds = remaining.finish(row.name)
            rest = f"; about {_duration(seconds)} left" if seconds else ""
            note(cell((ratios or f"{row.name}: {failed}") + rest))

        progress = stack.enter_context(step_progress())
        benchmark.run_rows(recorder, progress, rows, folder, plan, on_row)


def _list(rows: Sequence[Row], plan: Plan) -> None:
    estimates = _estimate(rows, plan)
    lines = [[row.name, _tests(row), _duration(estimates[row.name])] for row in rows]
    total = ["", "", _duration(sum(estimates.values()))]
    common.print_table([["", "TESTS", "ABOUT"], *lines, total], right=[2])


def _estimate(rows: Sequence[Row], plan: Plan) -> dict[str, float]:
    limits = measure_limits(plan.threads)
    return {row.name: planning.estimate_seconds(row, plan, limits) for row in rows}


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _tests(row: Row) -> str:
    parts = [f"{kind}{n}" + (f"@b{batch}" if batch > 1 else "") for kind, n, batch in planning.planned_tests(row)]
    return " ".join(parts)


def _show(run: Run) -> None:
    if run.model:
        size, threads = common.quantity(run.model["bytes"], "B"), counted(run.settings["threads"], "thread")
        print(f"{run.model['name']}, {size}, {threads}\n")
    tests = list(dict.fromkeys(result.name.rpartition("/")[0] for result in run.results))
    order = sorted(run.results, key=lambda r: (tests.index(r.name.rpartition("/")[0]), r.fields["peer"] != OURS))
    head = ["", "PEER", "RESULT", "95% INTERVAL", "OURS / PEER", "95% INTERVAL", "VERSION"]
    common.print_table([head, *map(_row, order)], right=[2, 4])
    for what in ("left_out", "failed"):
        for name, reason in run.details.get(what, {}).items():
            note(cell(f"{what.replace('_', ' ')}: {name}: {reason}"))
    for name, cores in benchmark.busy_rows(run):
        if max(share or 0.0 for share in cores) >= BUSY_CORES:
            before, after = (f"{share or 0.0:.1f}" for share in cores)
            note(f"{name}: {before} cores were busy before, {after} after: measure again when the machine is quiet")
    if any(
        result.fields["peer"].startswith(("llama-bench", *run.settings.get("benches", ()))) for result in run.results
    ):
        note("llama-bench does not sample; the others sample greedily")


def _row(result: Result) -> list[str]:
    test, _, name = result.name.rpartition("/")
    ratio, (low, high) = result.fields["ours_over_peer"], result.fields["ratio_interval"]
    is_shown = ratio is not None and name != OURS
    shown, interval = (f"{ratio:.3g}", f"{low:.3g} .. {high:.3g}") if is_shown else ("", "")
    value = common.quantity(result.estimate, result.unit)
    return [test, name, value, common.interval(result), shown, interval, result.fields["version"]]
