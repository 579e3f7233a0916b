"""`llm-worker-rbee bench peers`: this worker against llama.cpp, mistral.rs, vLLM and transformers."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from llm_worker_rbee.cli.options import MODEL_HELP, ComputeFlags, gather, option_fields
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
from .common import Repetitions, ResultFlags, option

_peer, _result = option_fields("Peers"), option_fields("Results")
SEVERAL_HELP = f"{MODEL_HELP} Several: a row each."
ModelArguments = Annotated[list[str] | None, typer.Argument(metavar="MODEL...", help=SEVERAL_HELP)]
BUSY_CORES = 0.3  # from which on a machine is not quiet


@dataclass(frozen=True, kw_only=True)
class PeerFlags:
    """The files and lengths to measure, and the peers to compare with."""

    model: ModelArguments = None
    synthetic: list[str] | None = option(None, "SHAPE:TYPES", f"{common.SYNTHETIC_HELP} Repeatable.")
    suite: str | None = option(
        None, "NAME", "A list of rows: cpu or families. MODEL takes the place of the built-in model."
    )
    rows: str | None = option(None, "RE", "Only rows of the suite whose name matches this expression.")
    list_rows: bool = option(False, None, "List the rows, with about how long each takes, and exit.", "--list")
    files: Path | None = option(
        None, "DIR", "Folder for model files that rows make: kept, and used again.", show_default="a temporary one"
    )
    pp: str | None = option(
        None, "N,...", "Prompt lengths in tokens; 0: no prefill.", show_default="512, or the suite's"
    )
    tg: str | None = option(None, "N,...", "Tokens to generate; 0: no decode.", show_default="128, or the suite's")
    batch: str | None = option(
        None,
        "N,...",
        "Batch sizes; above 1, decode only, with llama-server, mistral.rs and vllm.",
        show_default="1, or the suite's",
    )
    repetitions: Repetitions = 3
    markdown: Path | None = _result(None, "FILE", "Write the comparison as a table in Markdown.")
    peer: list[str] | None = _peer(
        None, "NAME", "Measure only this peer; NAME=PATH: the llama-bench of a fork. Repeatable.", show_default="all"
    )
    llama_bench: str | None = _peer(None, "PATH", "Path of llama-bench.", show_default="on the PATH")
    llama_server: str | None = _peer(None, "PATH", "Path of llama-server.", show_default="on the PATH")
    llama_bench_args: list[str] | None = _peer(
        None, "ARGS", "Measure llama-bench once more with these options, such as '-fa off'. Repeatable."
    )
    peer_python: list[str] | None = _peer(
        None,
        "PATH",
        "Python with mistralrs, vllm, transformers or llama-cpp-python. Repeatable.",
        show_default="this one",
    )
    install: list[str] | None = _peer(
        None, "NAME", "Install this peer first, into an environment of its own in the cache folder: mistral.rs."
    )
    timeout: float = _peer(900.0, "S", "Timeout of one answer, in seconds.", min=0.1)

    def plan(self, computing: ComputeFlags) -> Plan:
        benches = dict(text.split("=", 1) for text in self.peer or () if "=" in text)
        return Plan(
            threads=computing.set_up(),
            repetitions=self.repetitions,
            benches=benches,
            peers=[name for name in self.peer or () if "=" not in name] if self.peer else planning.NAMES,
            llama_bench=self.llama_bench,
            llama_server=self.llama_server,
            llama_bench_args=self.llama_bench_args or (),
            pythons=self.peer_python or (),
            timeout_s=self.timeout,
            device=computing.device,
            backend=computing.backend,
        )

    def chosen_rows(self) -> list[Row]:
        """Return the rows with their models and lengths; raise on options that exclude each other."""
        models, shapes = self.model or [], self.synthetic or []
        if self.suite is None:
            if self.rows is not None:
                raise typer.BadParameter("--rows chooses rows of a suite: give --suite too")
            if len(models) == len(shapes) == 1:
                raise typer.BadParameter("both a MODEL and --synthetic are given: choose one, or several of them")
            rows = [*map(self._model_row, models), *(Row(s, synthetic=s) for s in shapes)] or [self._model_row(None)]
        else:
            if shapes or len(models) > 1:
                raise typer.BadParameter("--suite has its models: leave --synthetic out, give at most one MODEL")
            rows = planning.select_rows(self.suite, self.rows)
            if not all(row.synthetic or row.real for row in rows):
                path = self._model_row(models[0] if models else None).model
                rows = [row if row.synthetic or row.real else row._replace(model=path) for row in rows]
        counts = {"pp": (self.pp, "--pp", 0), "tg": (self.tg, "--tg", 0), "batches": (self.batch, "--batch", 1)}
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

    def _model_row(self, name: str | None) -> Row:
        """Return the row of a model; the list of rows does not fetch the default model."""
        if name is None and self.list_rows:
            return Row(DEFAULT_MODEL)
        with transfer_progress() as progress:
            path = locate_model(name, progress=progress)
        return Row(path.name, model=path)


@gather(options=PeerFlags, results=ResultFlags, computing=ComputeFlags)
def peers(options: PeerFlags, results: ResultFlags, computing: ComputeFlags) -> None:
    """Measure this worker against llama.cpp, mistral.rs, vLLM and transformers.

    The same file, the same lengths, the same number of threads, in turn;
    with --device cuda llama.cpp and vLLM compute on the GPU too, and the
    others are left out. Each peer but llama-bench keeps the model loaded;
    loading is not counted. transformers computes in float32. llama-bench
    does not sample, the others sample greedily.

    With --batch 16 `serve` and llama-server with 16 slots answer 16 real
    prompts at once over HTTP, TG tokens each: tokens per second of all
    requests while all of them decode. mistral.rs and vLLM answer them in
    their own process.

    --suite cpu compares the built-in model in three types, the shape of
    Llama-2-7B with 4 layers in three types, a prompt of 4,096 tokens, 16
    requests at once, and Qwen2.5-Coder 0.5B and 1.5B where their files are;
    --suite families six newer shapes in two types.

    OURS / PEER is the ratio of single repetitions, with its interval. How
    many cores were busy before and after a row is part of the run: ratios of
    a machine that does other work are worth little.

    A peer that is not installed is left out, one that fails is named, with
    its own error. --install mistral.rs makes an environment for it, which
    later runs find; it stands on Candle.

    \b
    Examples:
      llm-worker-rbee bench peers --llama-bench ~/llama.cpp/build/bin/llama-bench
      llm-worker-rbee bench peers model-folder --device cuda --peer vllm --peer-python ~/vllm/bin/python
      llm-worker-rbee bench peers --peer llama-bench --llama-bench-args '-fa off' --llama-bench-args '-ub 64'
      llm-worker-rbee bench peers --peer llama-bench --peer ik_llama.cpp=~/ik_llama.cpp/build/bin/llama-bench
      llm-worker-rbee bench peers --batch 16 --llama-server ~/llama.cpp/build/bin/llama-server
      llm-worker-rbee bench peers --synthetic llama2-7b:Q4_0:4 --peer llama-bench
      llm-worker-rbee bench peers --suite cpu --list
      llm-worker-rbee bench peers --suite cpu --rows '7b|long' --llama-bench PATH --save run.json --markdown run.md
    """
    plan, rows = options.plan(computing), options.chosen_rows()
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
    with common.recording("peers", results, _show, **settings) as recorder:
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
