"""The common parts of the bench commands: the end of a run, tables, the source of a model.

A command fills a `Recorder` inside `recording(...)`; however it ends (even by Ctrl-C), the measurements are shown,
saved and compared.
"""

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from llm_worker_rbee.cli.terminal import cell, columns, note, print_json, style
from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.progress import StepProgress, transfer_progress
from llm_worker_rbee.weights.hub import locate_model

from .. import baseline
from ..baseline import Comparison
from ..results import Recorder, Result, ResultsError, Run
from ..results import quantity as quantity
from ..synthetic import Spec, parse, write
from .options import ResultFlags

COLOURS = {"improved": "green", "regressed": "red", "within noise": "dim"}


@contextmanager
def recording(kind: str, options: ResultFlags, show: Callable[[Run], None], **settings: Any) -> Iterator[Recorder]:
    """Give the block a recorder; afterwards save, `show` (or print as JSON) and compare the run, also on Ctrl-C."""
    for path in _places(options):
        require_place(path)
    before = None if options.baseline is None else baseline.load(options.baseline)
    recorder = Recorder(kind, dict(settings), command=repeatable_command(sys.argv[1:]))
    if before is not None:
        baseline.require_comparable(before, recorder.to_run(), force=options.force)
    interrupted = False
    try:
        yield recorder
    except KeyboardInterrupt:
        interrupted = True
    run = recorder.to_run(complete=not interrupted)
    failed = (run.results or not interrupted) and _finish(run, before, options, show)
    if interrupted:
        note("stopped: what was measured until then is " + ("kept" if run.results else "nothing"))
        raise KeyboardInterrupt
    if failed:
        raise typer.Exit(1)


def repeatable_command(arguments: Sequence[str]) -> str:
    """Return the command line that repeats a run: without `--save` and its like, and with files by name alone."""
    rest, words = list(arguments), ["llm-worker-rbee"]
    while rest:
        word, equals, value = rest.pop(0).partition("=")
        if word in ("--save", "--save-baseline"):
            rest = rest if equals else rest[1:]
        elif word != "--json":
            words.append(f"{word}={_file_name(value)}" if equals else _file_name(word))
    return shlex.join(words)


def _file_name(word: str) -> str:
    return Path(word).name if os.path.isabs(word) else word


def _places(options: ResultFlags) -> list[Path]:
    """Return the files that the run is saved to."""
    kept = None if options.save_baseline is None else baseline.path_for(options.save_baseline)
    return [path for path in (options.save, kept) if path is not None]


def require_place(path: Path, *, folder: bool = False) -> None:
    """Raise if a file (or a folder) cannot be written: before the run, not after it."""
    if not folder and (not path.name or os.path.isdir(path)):
        raise InvalidRequestError(f"cannot write {path}: it is a folder, use the name of a file", "save")
    above = next((place for place in ([path] if folder else []) + [*path.parents] if os.path.lexists(place)), path)
    if not os.path.isdir(above):
        raise InvalidRequestError(f"cannot write {path}: {above} is not a folder", "save")
    if not os.access(above, os.W_OK):
        raise InvalidRequestError(f"cannot write {path}: {above} may not be written to", "save")


def _finish(run: Run, before: Run | None, options: ResultFlags, show: Callable[[Run], None]) -> bool:
    """Save, show and compare; return whether something regressed. A run that cannot be compared is saved and shown."""
    changes, problem = [], None
    try:
        changes = [] if before is None else baseline.compare(before, run)
    except ResultsError as error:
        problem = error
    worse = [c for c in changes if c.is_past(options.threshold)]
    for path in _places(options):  # first: the reader of standard output may be gone
        run.save(path)
        note(f"saved {path}")
    if options.as_json:
        extra = {"comparison": [c.as_json() for c in changes], "regressions": len(worse)} if changes else {}
        print_json({**run.as_json(), **extra})
    else:
        show(run)
        if changes:
            show_changes(changes, options.threshold)
    drift = baseline.find_machine_drift(before, run) if changes and before is not None else []
    if drift:  # which makes verdicts doubtful
        text = "; ".join(f"{d.what.removeprefix('speed: ')} {d.before} then, {d.after} now" for d in drift)
        note(f"the machine itself changed ({text}): measure again when it is quiet, or side by side (--ab)")
    if problem is not None:
        raise problem
    return bool(worse)


def print_table(rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print aligned columns, the first row in bold."""
    head, *lines = columns(rows, right)
    print("\n".join([style(head, "bold"), *lines]))


def show_changes(changes: Sequence[Comparison], threshold: float, sides: tuple[str, str] = ("BEFORE", "AFTER")) -> None:
    """Print the table of changes and a summary line."""
    rows = [["", *sides, "CHANGE", "99% INTERVAL", "VERDICT"]]
    for item in changes:
        change = item.change
        interval = f"{change.low:+.1%} to {change.high:+.1%}" if change.low != float("-inf") else "too few samples"
        verdict = change.verdict + (f" past {threshold:.0%}" if item.is_past(threshold) else "")
        before, after = (quantity(r.estimate, r.unit) for r in (item.before, item.after))
        rows.append([*map(cell, (item.after.label, before, after)), f"{change.change:+.1%}", interval, verdict])
    head, *lines = columns(rows, right=[1, 2, 3])
    verdicts = [str(item.change.verdict) for item in changes]
    coloured = [style(line, COLOURS[verdict]) for line, verdict in zip(lines, verdicts, strict=True)]
    print("\n".join(["", style(head, "bold"), *coloured]))
    print("\n" + ", ".join(f"{verdicts.count(name)} {name}" for name in COLOURS))


def interval(result: Result) -> str:
    """Return `1.20 ms .. 1.26 ms`, or nothing for a result without spread."""
    if not result.samples or result.low == result.high:
        return ""
    return f"{quantity(result.low, result.unit)} .. {quantity(result.high, result.unit)}"


def parse_counts(text: str, option: str, minimum: int = 0) -> list[int]:
    """Parse `128,512`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise typer.BadParameter(f"{option} is {text!r}: use whole numbers, separated by commas")
    counts = [int(part) for part in parts]
    if min(counts) < minimum:
        raise typer.BadParameter(f"{option} is {text!r}: each must be {minimum} or more")
    return counts


def find_source(model: str | None, synthetic: str | None) -> Path | Spec:
    """Return the model's path, fetching it if necessary, or the synthetic model."""
    if synthetic is not None and model is not None:
        raise typer.BadParameter("both a MODEL and --synthetic are given: choose one")
    if synthetic is not None:
        return parse(synthetic)
    with transfer_progress() as progress:
        return locate_model(model, progress=progress)


@contextmanager
def model_file(source: Path | Spec, progress: StepProgress) -> Iterator[Path]:
    """Give the path of a model; a synthetic one is written to a temporary folder."""
    if isinstance(source, Path):
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="llm-worker-rbee-") as folder:
        yield write(source, Path(folder) / f"{str(source).replace(':', '-')}.gguf", progress=progress)
