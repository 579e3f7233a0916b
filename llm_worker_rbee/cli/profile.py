"""`llm-worker-rbee profile`: where the time of a step goes, with a report and flame graphs."""

import re
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from ..bench import profile as benchmark
from ..bench.flame_graph import Flame, PySpy, find_py_spy
from ..bench.results import Recorder, Run
from ..llm import LLM
from ..progress import step_progress
from .bench.common import ModelArgument, Repetitions, ResultOptions, measuring, recording, require_place
from .options import LoadOptions, ModelOptions, gather, load_model
from .terminal import Status, columns, note, style

COLOURS = {"critical": "red", "moderate": "yellow", "minor": "dim"}


@gather(results=ResultOptions, computing=LoadOptions)
def profile(
    results: ResultOptions,
    computing: LoadOptions,
    model: ModelArgument = None,
    pp: Annotated[int, measuring(metavar="N", min=1, help="Tokens of the prompt.")] = 128,
    tg: Annotated[int, measuring(metavar="N", min=1, help="Tokens to make after it.")] = 16,
    repetitions: Repetitions = 5,
    flame_seconds: Annotated[
        float, measuring("--flame", metavar="S", min=0, max=600, help="Seconds for each flame graph; 0: none.")
    ] = 3.0,
    py_spy: Annotated[bool, measuring("--py-spy", help="Flame graphs by py-spy (extra `bench`).")] = False,
    native: Annotated[bool, measuring("--native", help="With --py-spy: native frames too.")] = False,
    out: Annotated[
        Path | None,
        measuring("--out", "-o", metavar="FOLDER", help="Where the report goes.", show_default="profile-MODEL-DATE"),
    ] = None,
) -> None:
    """Show where the time goes, by component, for prefill and decode.

    Writes report.html, report.md, flame graphs (SVG, and JSON for speedscope.app) and the run itself.

    \b
    Examples:
      llm-worker-rbee profile
      llm-worker-rbee profile model.gguf --pp 512 --tg 32 --out before
      llm-worker-rbee profile --py-spy --native
    """
    used = computing.set_up()
    if native and not py_spy:
        raise typer.BadParameter("--native goes with --py-spy: the built-in sampler sees Python only")
    require_place(out or Path("profile"), folder=out is not None)
    spy = PySpy(find_py_spy(), native) if py_spy else None
    settings = benchmark.Settings(pp, tg, repetitions, flame_seconds, spy)
    llm = load_model(ModelOptions(model=model), computing, Status())
    recorded = {"pp": pp, "tg": tg, "repetitions": repetitions, "threads": used, "backend": llm.model.ops.name}
    with recording("profile", results, _print_run, **recorded) as recorder:
        _measure(recorder, llm, settings, out)


def _measure(recorder: Recorder, llm: LLM, settings: benchmark.Settings, out: Path | None) -> None:
    """Profile, and write the report; after Ctrl-C, of what was measured until then."""
    flames: dict[str, Flame] = {}
    complete = False
    try:
        with step_progress() as progress:
            benchmark.run(recorder, progress, llm, settings, flames)
        complete = True
    finally:
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
    print(style(benchmark.remark(run), "dim"))
