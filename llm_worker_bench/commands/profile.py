"""`llm-worker-rbee profile`: where the time of a step goes, with a report and flame graphs."""

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import typer

from llm_worker_rbee.backends.select import has_driver, missing_packages
from llm_worker_rbee.cli.loading import load_model, set_up
from llm_worker_rbee.cli.options import LoadFlags, ModelFlags
from llm_worker_rbee.cli.terminal import Status, columns, note, program_lines, style
from llm_worker_rbee.progress import step_progress

from .. import profile as benchmark
from ..flame_graph import Flame, PySpy, find_py_spy
from ..profile import attention_pass, report
from ..profile.workload import Loading, Settings, Subject, load_synthetic
from ..results import Recorder, Run, describe_model
from ..synthetic import Spec, parse
from .common import recording, require_place
from .options import ProfileCommand

COLOURS = {"critical": "red", "moderate": "yellow", "minor": "dim"}


def _settings(options: ProfileCommand) -> Settings:
    """Return the settings of the run; raise on options that exclude each other."""
    if options.native and not options.py_spy:
        raise typer.BadParameter("--native goes with --py-spy: the built-in sampler sees Python only")
    if not (options.pp or options.tg):
        raise typer.BadParameter("nothing to profile: --pp and --tg are both 0")
    if options.attention_pass and (
        options.model or options.synthetic or options.prompt or options.batch > 1 or options.depth
    ):
        raise typer.BadParameter("--attention-pass has a model and a prompt of its own: leave out others")
    if options.prompt is not None and (options.batch > 1 or options.depth or options.synthetic):
        raise typer.BadParameter("--prompt is one request of a real model: leave out --batch, --depth, --synthetic")
    if options.synthetic is not None and options.model is not None:
        raise typer.BadParameter("both a MODEL and --synthetic are given: choose one")
    require_place(options.out or Path("profile"), folder=options.out is not None)
    spy = PySpy(find_py_spy(), options.native) if options.py_spy else None
    lengths = (attention_pass.TOKENS, 0) if options.attention_pass else (options.pp, options.tg)
    return Settings(*lengths, options.repetitions, options.flame, spy, options.batch, options.depth, options.prompt)


def profile(options: ProfileCommand) -> None:
    """Measure the steps, and write the report."""
    computing = options.computing
    used, settings = set_up(computing), _settings(options)
    name = attention_pass.SPEC if options.attention_pass else options.synthetic
    spec = None if name is None else parse(name)
    lengths = {name: getattr(settings, name) for name in ("pp", "tg", "batch", "depth", "prompt", "repetitions")}
    flames: dict[str, Flame] = {}
    complete = False
    with recording("profile", options.results, _print_run, **lengths, threads=used) as recorder:
        recorder.settings["attention_pass"] = options.attention_pass
        try:
            for backend in _backends(computing) if options.attention_pass else [computing]:
                subject = _load(recorder, options, backend, spec)
                _profile(recorder, subject, settings, flames)
            complete = True
        finally:  # after Ctrl-C too: the report of what was measured until then
            if recorder.results() and not options.no_report:
                folder = options.out or _default_folder(str((recorder.model or {})["name"]))
                report.write_report(folder, recorder.to_run(complete=complete), flames)
                note(f"report: {folder / 'report.html'}")


def _profile(recorder: Recorder, subject: Subject, settings: Settings, flames: dict[str, Flame]) -> None:
    recorder.settings["backend"] = subject.model.ops.name
    program = subject.model.program(subject.kv_type)
    recorder.details["program"] = [[repeats, [list(line) for line in lines]] for repeats, lines in program]
    with step_progress() as progress:
        benchmark.run(recorder, progress, subject, settings, flames)


def _backends(computing: LoadFlags) -> list[LoadFlags]:
    """Return the options of every available backend, or of the given backend."""
    if computing.backend != "auto" or computing.device != "auto":
        return [computing]
    names = ["reference", "cpu", *(["cuda"] if has_driver() and not missing_packages() else [])]
    return [replace(computing, backend=name) for name in names]


def _load(recorder: Recorder, options: ProfileCommand, computing: LoadFlags, spec: Spec | None) -> Subject:
    if spec is not None:
        where = computing.device, computing.backend, computing.kernel_threads
        loading = Loading(*where, computing.kv_type, computing.quantize)
        with step_progress() as progress:
            return load_synthetic(recorder, progress, spec, loading)
    llm = load_model(ModelFlags(model=options.model), computing, Status())
    with step_progress() as progress:
        recorder.model = describe_model(llm.checkpoint.path, progress)
    return Subject(llm.model, llm.checkpoint, llm.kv_type, llm)


def _default_folder(model: str) -> Path:
    """Return `profile-<model>-<date>` here; a second one on the same day gets a number."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", model.removesuffix(".gguf"))
    base = f"profile-{stem}-{datetime.now().date().isoformat()}"
    names = (Path(base if i == 1 else f"{base}-{i}") for i in range(1, 10_000))
    return next(name for name in names if not name.exists())


def _print_run(run: Run) -> None:
    if run.settings["attention_pass"]:
        head, *rows = attention_pass.rows(run)
        lines = columns([[name.upper() for name in head], *rows], right=range(1, len(head)))
        print("\n".join([style(lines[0], "bold"), *lines[1:], ""]))
    for part, suffix in report.by_backend(run):
        _print_phases(part, suffix)
    print("\n".join([style("Program of a step", "bold"), *program_lines(run.details["program"]), ""]))
    print(style(report.remark(run), "dim"))


def _print_phases(run: Run, suffix: str) -> None:
    for phase, title in benchmark.PHASES.items():
        parts = report.components(run, phase)
        if not parts:
            continue
        print(f"{style(title + suffix, 'bold')}  {report.step_line(run, phase)}. {report.sum_line(run, phase)}\n")
        rows = [[name.upper() for name in report.COLUMNS], *(part.cells() for part in parts)]
        right = range(1, len(rows[0]) - report.TEXT_COLUMNS)
        for line, part in zip(columns(rows, right=right), [None, *parts], strict=True):
            print(style(line, "bold" if part is None else COLOURS[part.rank]))
        top = report.by_share(run, phase)[: report.NUM_TOP]
        print("\ntop five: " + ", ".join(f"{part.label} {part.share:.1%}" for part in top))
        print("\n".join([*report.classes(run, phase), "targets:"]))
        print("\n".join(f"  {line}" for line in report.targets(run, phase)) + "\n")
