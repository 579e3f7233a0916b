"""`llm-worker-rbee profile`: where the time of a step goes, with a report and flame graphs."""

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import typer

from ..bench import profile as benchmark
from ..bench.flame_graph import Flame, PySpy, find_py_spy
from ..bench.results import Run
from ..progress import step_progress
from .bench.common import ModelArgument, Repetitions, ResultOptions, option, recording, require_place
from .options import LoadOptions, ModelOptions, gather, load_model
from .terminal import Status, columns, note, program_lines, style

COLOURS = {"critical": "red", "moderate": "yellow", "minor": "dim"}


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Which model, how much to run, and where the report goes."""

    model: ModelArgument = None
    pp: int = option(128, "N", "Length of the prompt in tokens.", min=1)
    tg: int = option(16, "N", "Tokens to generate.", min=1)
    repetitions: Repetitions = 5
    flame: float = option(3.0, "S", "Seconds for each flame graph; 0: none.", min=0, max=600)
    py_spy: bool = option(False, None, "Sample with py-spy (extra `bench`).")
    native: bool = option(False, None, "With --py-spy: include native frames.")
    out: Path | None = option(None, "FOLDER", "Folder of the report.", "-o", show_default="profile-MODEL-DATE")


@gather(options=ProfileOptions, results=ResultOptions, computing=LoadOptions)
def profile(options: ProfileOptions, results: ResultOptions, computing: LoadOptions) -> None:
    """Show where the time goes, by component, for prefill and decode.

    Writes report.html, report.md, flame graphs (SVG, and JSON for speedscope.app) and the run itself.

    \b
    Examples:
      llm-worker-rbee profile
      llm-worker-rbee profile model.gguf --pp 512 --tg 32 --out before
      llm-worker-rbee profile --py-spy --native
    """
    used, out = computing.set_up(), options.out
    if options.native and not options.py_spy:
        raise typer.BadParameter("--native goes with --py-spy: the built-in sampler sees Python only")
    require_place(out or Path("profile"), folder=out is not None)
    spy = PySpy(find_py_spy(), options.native) if options.py_spy else None
    settings = benchmark.Settings(options.pp, options.tg, options.repetitions, options.flame, spy)
    llm = load_model(ModelOptions(model=options.model), computing, Status())
    lengths = {"pp": options.pp, "tg": options.tg, "repetitions": options.repetitions}
    recorded = lengths | {"threads": used, "backend": llm.model.ops.name}
    flames: dict[str, Flame] = {}
    complete = False
    with recording("profile", results, _print_run, **recorded) as recorder:
        program = llm.model.program(llm.kv_type)
        recorder.details["program"] = [[repeats, [list(line) for line in lines]] for repeats, lines in program]
        try:
            with step_progress() as progress:
                benchmark.run(recorder, progress, llm, settings, flames)
            complete = True
        finally:  # after Ctrl-C too: the report of what was measured until then
            if recorder.results():
                folder = out or _default_folder(llm.checkpoint.path)
                benchmark.write_report(folder, recorder.to_run(complete=complete), flames)
                note(f"report: {folder / 'report.html'}")


def _default_folder(model: Path) -> Path:
    """Return `profile-<model>-<date>` here; a second one on the same day gets a number."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", model.name.removesuffix(".gguf"))
    base = f"profile-{stem}-{datetime.now().date().isoformat()}"
    names = (Path(base if i == 1 else f"{base}-{i}") for i in range(1, 10_000))
    return next(name for name in names if not name.exists())


def _print_run(run: Run) -> None:
    for phase, title in benchmark.PHASES.items():
        found = benchmark.components(run, phase)
        if not found:
            continue
        print(f"{style(title, 'bold')}  {benchmark.step_line(run, phase)}\n")
        rows = [[name.upper() for name in benchmark.COLUMNS], *(part.cells() for part in found)]
        for line, part in zip(columns(rows, right=range(1, len(rows[0]) - 1)), [None, *found], strict=True):
            print(style(line, "bold" if part is None else COLOURS[part.rank]))
        top = benchmark.by_share(run, phase)[: benchmark.NUM_TOP]
        print("\ntop five: " + ", ".join(f"{part.label} {part.share:.1%}" for part in top))
        print("\n".join([*benchmark.classes(run, phase), "targets:"]))
        print("\n".join(f"  {line}" for line in benchmark.targets(run, phase)) + "\n")
    print("\n".join([style("Program of a step", "bold"), *program_lines(run.details["program"]), ""]))
    print(style(benchmark.remark(run), "dim"))
