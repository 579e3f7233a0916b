"""How long the worker takes to start: import, open, tokenizer, weights, first token; how much memory it takes.

Each repetition is a fresh process (child.py), so that imports are real. Cold: the model's pages are put out of the
file cache before; warm: they were read just before. Where the system cannot forget pages, cold is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import WorkerError
from ..weights.hub import model_files
from . import environment, process_stats
from .results import Recorder

Progress = Callable[[str, float, float], None]
CHILD = Path(__file__).with_name("load_child.py")
PROMPT = "The capital of France is"
WITHOUT_FILE = ("interpreter", "import")  # what does not read the model: the same cold and warm
READ_AT_ONCE = 1 << 22
TIMEOUT_S = 1800
STILL_THERE = 0.05  # a part of the file that may stay in the cache without a word


def run(
    recorder: Recorder, progress: Progress, model: Path, repetitions: int, options: dict[str, Any] | None = None
) -> None:
    """Start the worker again and again, cold and warm in turn; `options` are those of LLM.

    A start before the others compiles kernels that are not kept yet: that happens once, and is told apart.
    """
    recorder.model = environment.describe_model(model, lambda what, *n: progress(what, n[0], n[1] or 0))
    files = model_files(model)
    given = {"model": str(model), "prompt": PROMPT, "options": options or {}}
    caches = ["cold", "warm"] if process_stats.can_drop() else ["warm"]
    if "cold" not in caches:
        recorder.details["left_out"] = {"cold": "this system has no posix_fadvise to empty the file cache of a file"}
    if (options or {}).get("backend") != "reference":
        progress("a start before the others", 0, 0)
        recorder.details["start_before"] = _start(given)["seconds"]
    total = repetitions * len(caches)
    for number in range(total):
        cache = caches[number % len(caches)]
        progress(f"{cache} start {number // len(caches) + 1} of {repetitions}", number, total)
        _prepare(files, cache, recorder.details)
        _record(recorder, cache, _start(given))


def _prepare(files: list[Path], cache: str, details: dict[str, Any]) -> None:
    if cache == "warm":
        _read(files)
        return
    process_stats.drop(files)
    left = process_stats.resident_part(files)
    known = details.setdefault("resident_after_drop", [])
    known.append(left)
    if left is not None and left > STILL_THERE:
        details["warning"] = f"{max(filter(None, known)):.0%} of the file stayed in the cache: cold is not wholly cold"


def _read(files: list[Path]) -> None:
    for file in files:
        with file.open("rb") as source:
            while source.read(READ_AT_ONCE):
                pass


def _start(given: dict[str, Any]) -> dict[str, Any]:
    """One fresh process; what it says."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]  # this very package, wherever it lies
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        done = subprocess.run(
            [sys.executable, str(CHILD), repr(time.monotonic()), json.dumps(given)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=settings,
        )
    except subprocess.TimeoutExpired:
        raise WorkerError(f"the worker did not start within {TIMEOUT_S} s") from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise WorkerError(f"the worker does not start: {reason.partition('Error: ')[2] or reason}")
    said = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(said, dict)
    return said


def _record(recorder: Recorder, cache: str, said: dict[str, Any]) -> None:
    for phase, seconds in said["seconds"].items():
        recorder.add_sample(phase if phase in WITHOUT_FILE else f"{phase}/{cache}", "s", seconds)
    for when, size in said["bytes"].items():
        if size is not None:
            recorder.add_sample(f"memory/{when}", "B", size)
