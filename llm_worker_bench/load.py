"""How long the worker takes to start: import, open, tokenizer, weights, warm-up, first token; and its memory.

Each repetition is a fresh process (load_child.py), so that imports are real. Cold: the model's pages were dropped from
the page cache before; warm: they were read just before. Where the system cannot drop pages, cold is left out. With
`compile_kernels` one more start has an empty kernel cache. On a GPU, unless `warms_up` is False, the engine starts as
under `serve`: `ready` is the time until all kernels are compiled and loaded and all graphs captured.

On a CPU whole commands are timed too, as a user sees them (`command/...`): from starting the process to the end of
`--version` and of a help text, to the first piece of an answer of `run`, and until `serve` is healthy.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_worker_rbee.backends.kernel_library import PREBUILT_VARIABLE
from llm_worker_rbee.errors import WorkerError
from llm_worker_rbee.progress import StepProgress
from llm_worker_rbee.weights.hub import model_files

from . import processes
from .processes import ChildFailedError, ChildProcess, package_environment
from .results import Recorder, describe_model
from .server_process import worker_server

PROMPT = "The capital of France is"
WITHOUT_FILE = ("interpreter", "import")  # phases that do not read the model: the same cold and warm
CHILD = str(Path(__file__).with_name("load_child.py"))
READ_SIZE = 1 << 22
TIMEOUT_S = 1800
MAX_CACHED_WHEN_COLD = 0.05  # a larger part of the file in the page cache is worth a warning
HELP_COMMANDS = {"version": ["--version"], "help": ["--help"], "run_help": ["run", "--help"]}
KERNEL_CACHE_VARIABLES = ("TRITON_CACHE_DIR", "LLM_WORKER_KERNEL_CACHE")  # of the GPU, of the CPU


def run(
    recorder: Recorder,
    progress: StepProgress,
    model: Path,
    repetitions: int,
    options: dict[str, Any] | None = None,
    *,
    compile_kernels: bool = False,
    warms_up: bool = False,
) -> None:
    """Start the worker repeatedly, cold and warm in turn; `options` are arguments of LLM.

    A first start, kept apart, compiles kernels that are not cached yet.
    """
    recorder.model = describe_model(model, progress)
    files = model_files(model)
    settings = {"model": str(model), "prompt": PROMPT, "options": options or {}, "warm_up": warms_up}
    caches = ["cold", "warm"] if processes.can_drop_pages() else ["warm"]
    if "cold" not in caches:
        recorder.details["left_out"] = {"cold": "this system has no posix_fadvise to drop a file from the page cache"}
    if compile_kernels:
        progress("a start that compiles all kernels", 0, 0)
        with tempfile.TemporaryDirectory(prefix="llm-worker-rbee-") as folder:
            variables = dict.fromkeys(KERNEL_CACHE_VARIABLES, folder) | {PREBUILT_VARIABLE: "0"}
            _record(recorder, "compiling", _start(settings, variables))
    if (options or {}).get("backend") != "reference":
        progress("a start before the others", 0, 0)
        recorder.details["start_before"] = _start(settings)["seconds"]
    total = repetitions * len(caches)
    for number in range(total):
        cache = caches[number % len(caches)]
        progress(f"{cache} start {number // len(caches) + 1} of {repetitions}", number, total)
        _prepare_page_cache(files, cache, recorder.details)
        _record(recorder, cache, _start(settings))
    if not warms_up:
        for number in range(repetitions):
            progress("commands", number, repetitions)
            _measure_commands(recorder, model)


def _measure_commands(recorder: Recorder, model: Path) -> None:
    """Time commands with default options on the CPU."""
    on_cpu = ["--model", str(model), "--device", "cpu"]
    for name, arguments in HELP_COMMANDS.items():
        recorder.add_sample(f"command/{name}", "s", _time_command(arguments))
    answer = ["run", *on_cpu, "--raw", "--temperature", "0", "--max-tokens", "4", PROMPT]
    recorder.add_sample("command/run_first_token", "s", _time_command(answer, bytes_read=1))
    with worker_server(on_cpu) as server:
        recorder.add_sample("command/serve_ready", "s", server.start_s)
        sizes = [processes.memory_of(pid).get("VmRSS") or 0 for pid in processes.children_of(server.pid)]
        if any(sizes):
            recorder.add_sample("memory/serve_engine", "B", max(sizes))


def _time_command(arguments: Sequence[str], bytes_read: int = -1) -> float:
    """Return the seconds until a command has printed so many bytes, or all."""
    command = [sys.executable, "-m", "llm_worker_rbee", *arguments]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=package_environment()) as child:
        assert child.stdout is not None
        child.stdout.read(bytes_read)
        seconds = time.perf_counter() - start
        _, errors = child.communicate()
    if child.returncode:
        raise WorkerError(f"{' '.join(command[2:5])} fails: {errors.decode(errors='replace').strip()[-300:]}")
    return seconds


def _prepare_page_cache(files: list[Path], cache: str, details: dict[str, Any]) -> None:
    if cache == "warm":
        for file in files:
            with file.open("rb") as source:
                while source.read(READ_SIZE):
                    pass
        return
    processes.drop_pages(files)
    cached = processes.cached_fraction(files)
    fractions = details.setdefault("resident_after_drop", [])
    fractions.append(cached)
    if cached is not None and cached > MAX_CACHED_WHEN_COLD:
        largest = max(filter(None, fractions))
        details["warning"] = f"{largest:.0%} of the file stayed in the page cache: cold is not wholly cold"


def _start(settings: dict[str, Any], variables: dict[str, str] | None = None) -> dict[str, Any]:
    command = [sys.executable, "-P", CHILD, repr(time.monotonic()), json.dumps(settings)]
    child = ChildProcess("the worker", command, package_environment() | (variables or {}), TIMEOUT_S)
    try:
        return child.start("seconds")
    except ChildFailedError as error:
        reason = str(error).partition(": ")[2] or str(error)
        raise WorkerError(f"the worker does not start: {reason.partition('Error: ')[2] or reason}") from None
    finally:
        child.close()


def _record(recorder: Recorder, cache: str, output: dict[str, Any]) -> None:
    for phase, seconds in output["seconds"].items():
        recorder.add_sample(phase if phase in WITHOUT_FILE else f"{phase}/{cache}", "s", seconds)
    for what, count in output.get("counts", {}).items():
        recorder.add_sample(f"{what}/{cache}", what.partition("_")[0], count)
    for when, size in output["bytes"].items():
        if size is not None and cache != "compiling":
            recorder.add_sample(f"memory/{when}", "B", size)
