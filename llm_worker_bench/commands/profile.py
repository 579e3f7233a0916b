"""`llm-worker-rbee profile`: where the time of a step goes, with a report and flame graphs."""

import re
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import typer

from llm_worker_rbee.backends.select import has_driver, missing_packages
from llm_worker_rbee.cli.options import LoadFlags, ModelFlags, gather, load_model
from llm_worker_rbee.cli.terminal import Status, columns, note, program_lines, style
from llm_worker_rbee.progress import step_progress

from .. import profile as benchmark
from ..flame_graph import Flame, PySpy, find_py_spy
from ..profile import attention_pass, report
from ..profile.workload import Loading, Settings, Subject, load_synthetic
from ..results import Recorder, Run, describe_model
from ..synthetic import Spec, parse
from .common import ModelArgument, Repetitions, ResultFlags, SyntheticOption, option, recording, require_place

COLOURS = {"critical": "red", "moderate": "yellow", "minor": "dim"}


@dataclass(frozen=True, kw_only=True)
class ProfileFlags:
    """Which model, how much to run, and where the report goes."""

    model: ModelArgument = None
    synthetic: SyntheticOption = None
    pp: int = option(128, "N", "Length of the prompt in tokens; 0: no prefill.", min=0)
    tg: int = option(16, "N", "Tokens to generate; 0: no decode.", min=0)
    prompt: str | None = option(None, "TEXT", "A real prompt, from text to text, in place of --pp random tokens.")
    depth: int = option(0, "N", "Tokens in the KV cache before the prompt.", min=0)
    batch: int = option(1, "N", "Requests at once.", min=1)
    repetitions: Repetitions = 5
    flame: float = option(3.0, "S", "Seconds for each flame graph; 0: none.", min=0, max=600)
    attention_pass: bool = option(
        False, None, "One attention pass, 128 tokens at width 4096, on every backend, with the Rust worker's shares."
    )
    no_report: bool = option(False, None, "Write no folder: print, and what --save says.")
    py_spy: bool = option(False, None, "Sample with py-spy (extra `bench`).")
    native: bool = option(False, None, "With --py-spy: include native frames.")
    out: Path | None = option(None, "FOLDER", "Folder of the report.", "-o", show_default="profile-MODEL-DATE")

    def settings(self) -> Settings:
        """Return the settings of the run; raise on options that exclude each other."""
        if self.native and not self.py_spy:
            raise typer.BadParameter("--native goes with --py-spy: the built-in sampler sees Python only")
        if not (self.pp or self.tg):
            raise typer.BadParameter("nothing to profile: --pp and --tg are both 0")
        if self.attention_pass and (self.model or self.synthetic or self.prompt or self.batch > 1 or self.depth):
            raise typer.BadParameter("--attention-pass has a model and a prompt of its own: leave out others")
        if self.prompt is not None and (self.batch > 1 or self.depth or self.synthetic):
            raise typer.BadParameter("--prompt is one request of a real model: leave out --batch, --depth, --synthetic")
        if self.synthetic is not None and self.model is not None:
            raise typer.BadParameter("both a MODEL and --synthetic are given: choose one")
        require_place(self.out or Path("profile"), folder=self.out is not None)
        spy = PySpy(find_py_spy(), self.native) if self.py_spy else None
        lengths = (attention_pass.TOKENS, 0) if self.attention_pass else (self.pp, self.tg)
        return Settings(*lengths, self.repetitions, self.flame, spy, self.batch, self.depth, self.prompt)


@gather(options=ProfileFlags, results=ResultFlags, computing=LoadFlags)
def profile(options: ProfileFlags, results: ResultFlags, computing: LoadFlags) -> None:
    """Show where the time goes, by component, for prefill and decode.

    Steps go through the engine as a server's do. On the CPU every task of a
    step is timed where it runs, on a GPU every kernel; HOST is what none of
    them covers. OF LIMIT compares with the measured rates of this machine:
    memory, and the arithmetic that a component is computed in.

    Writes report.html, report.md, flame graphs (SVG, and JSON for speedscope.app) and the run itself.

    \b
    Examples:
      llm-worker-rbee profile
      llm-worker-rbee profile model.gguf --pp 512 --tg 32 --out before
      llm-worker-rbee profile --prompt "Once upon a time"
      llm-worker-rbee profile --pp 0 --tg 32 --batch 16 --depth 1024
      llm-worker-rbee profile --synthetic llama2-7b:Q4_K_M:4 --backend reference
      llm-worker-rbee profile --device cuda --synthetic llama2-7b:Q4_K_M --batch 64
      llm-worker-rbee profile --attention-pass
      llm-worker-rbee profile --py-spy --native
    """
    used, settings = computing.set_up(), options.settings()
    name = attention_pass.SPEC if options.attention_pass else options.synthetic
    spec = None if name is None else parse(name)
    lengths = {name: getattr(settings, name) for name in ("pp", "tg", "batch", "depth", "prompt", "repetitions")}
    flames: dict[str, Flame] = {}
    complete = False
    with recording("profile", results, _print_run, **lengths, threads=used) as recorder:
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


def _load(recorder: Recorder, options: ProfileFlags, computing: LoadFlags, spec: Spec | None) -> Subject:
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
