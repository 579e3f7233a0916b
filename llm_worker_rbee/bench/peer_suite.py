"""What is compared with peers, in turn by repetition: rows, each a model file with its lengths, and suites of rows.

A peer that is not installed is left out with the reason; one that fails is named and the others go on, and so do the
other rows. Files of rows are made here: the default model in other types, and synthetic models. Ratios are those of
single repetitions, since a machine that changes its speed changes both sides.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from .. import machine
from ..config import ModelConfig
from ..errors import ContextLengthError, InvalidRequestError, WorkerError, human_bytes
from ..models import read_model_config
from ..models.convert import convert
from ..progress import StepProgress
from ..weights import Checkpoint, open_checkpoint
from . import library_child, statistics, synthetic
from . import peers as programs
from .engine_harness import encode_bundled_prompts
from .peers import (
    LLAMA_BENCH,
    LLAMA_SERVER,
    OURS,
    LibraryPeer,
    LlamaBench,
    LlamaServer,
    Peer,
    PeerError,
    Task,
    WorkerServer,
)
from .processes import busy_cores, library_environment, package_environment
from .results import Recorder, Result, Run, describe_model, quantity, spread
from .roofline import Limits

# Packages that a peer needs; gguf only for a GGUF file.
PACKAGES = {"llama-cpp-python": ("llama_cpp",), "transformers": ("transformers", "torch", "gguf")}
NAMES = (LLAMA_BENCH, *PACKAGES, LLAMA_SERVER)
PACKAGE_PROBE_S = 60
# For estimates of time: a run takes about so many times the least time, a process starts, files are written and read.
TIMES_LIMIT, START_S, WRITE_RATE, READ_RATE = 2.5, 3.0, 1e8, 1e9


class Row(NamedTuple):
    """A model file, or how to make it, and the lengths to compare."""

    name: str
    pp: Sequence[int] = (512,)
    tg: Sequence[int] = (128,)
    batches: Sequence[int] = (1,)
    model: Path | None = None
    synthetic: str = ""  # shape:types:layers, instead of a model
    converted: str = ""  # the type that the model is converted to


MIXES_7B = ("Q4_K_M", "Q4_0", "Q8_0")
SUITES: dict[str, tuple[Row, ...]] = {
    "cpu": (
        Row("default"),
        Row("q4_0", converted="Q4_0"),
        Row("q8_0", converted="Q8_0"),
        *(Row(f"7b-{mix.lower()}", (128,), (32,), synthetic=f"llama2-7b:{mix}:4") for mix in MIXES_7B),
        Row("long", (4096,), ()),
        Row("requests", (), (128,), (16,)),
    ),
}


def select_rows(suite: str, pattern: str | None) -> list[Row]:
    """Return the rows of a suite whose name matches the regular expression; raise if there is none."""
    if suite not in SUITES:
        raise InvalidRequestError(f"unknown suite {suite!r}: use one of {', '.join(SUITES)}", "suite")
    try:
        found = [row for row in SUITES[suite] if re.search(pattern or "", row.name)]
    except re.error as error:
        raise InvalidRequestError(f"--rows {pattern!r} is not a regular expression: {error}", "rows") from None
    if not found:
        names = ", ".join(row.name for row in SUITES[suite])
        raise InvalidRequestError(f"--rows {pattern!r} matches no row (there are {names})", "rows")
    return found


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare, and with which peers."""

    pp: Sequence[int] = (512,)
    tg: Sequence[int] = (128,)
    batches: Sequence[int] = (1,)  # above 1: so many answers at once, of tg tokens each
    repetitions: int = 3
    threads: int = 1
    peers: Sequence[str] = NAMES
    llama_bench: str | None = None  # path; None: search the PATH
    llama_server: str | None = None  # path; None: search the PATH
    pythons: Sequence[str] = ()  # interpreters to search for packages, before this one
    timeout_s: float = 900.0  # of one reply
    device: str = "auto"
    backend: str = "auto"

    def __post_init__(self) -> None:
        unknown = sorted(set(self.peers) - set(NAMES))
        if unknown:
            raise InvalidRequestError(f"unknown peer {unknown[0]!r}: use some of {', '.join(NAMES)}", "peer")

    @property
    def parallel_batches(self) -> list[int]:
        return [batch for batch in dict.fromkeys(self.batches) if batch > 1 and any(self.tg)]

    def tasks(self, checkpoint: Checkpoint) -> list[Task]:
        """Return the tasks in the order of the table."""
        parts = (("pp", self.pp), ("tg", self.tg)) if 1 in self.batches else ()
        single = [Task(kind, n) for kind, lengths in parts for n in dict.fromkeys(lengths) if n]
        batches = self.parallel_batches
        prompts = tuple(map(tuple, encode_bundled_prompts(checkpoint, max(batches)))) if batches else ()
        return single + [Task("tg", n, prompts[:batch]) for batch in batches for n in dict.fromkeys(self.tg) if n]

    def for_row(self, row: Row) -> Plan:
        """Return the plan with the lengths of a row."""
        return replace(self, pp=row.pp, tg=row.tg, batches=row.batches)

    @property
    def is_on_cpu(self) -> bool:
        return self.backend in ("auto", "cpu") and not self.device.startswith("cuda")


def make_file(row: Row, folder: Path, progress: StepProgress) -> Path:
    """Return the file of a row; one that has to be made is written to the folder, unless it is there."""
    if row.synthetic:
        spec = synthetic.parse(row.synthetic)
        path = folder / f"{str(spec).replace(':', '-')}.gguf"
        return path if path.exists() else synthetic.write(spec, path, progress=progress)
    source = row.model
    assert source is not None
    if not row.converted:
        return source
    path = folder / f"{source.stem}-as-{row.converted}.gguf"
    if not path.exists():
        show = lambda what, done, total: progress(what, done, total or 0)  # noqa: E731
        convert(open_checkpoint(source), path, row.converted, progress=show)
    return path


def run_rows(
    recorder: Recorder, progress: StepProgress, rows: Sequence[Row], folder: Path, plan: Plan,
    on_row: Callable[[Row], None] = lambda row: None,
) -> None:  # fmt: skip
    """Measure each row; with several, results are named `ROW TEST/PEER`, and a row that fails is named."""
    if len(rows) == 1:
        path = make_file(rows[0], folder, progress)
        run(recorder, progress, path, plan.for_row(rows[0]))
        return
    recorder.model = {"name": ", ".join(row.name for row in rows), "bytes": 0}
    for number, row in enumerate(rows):

        def show(what: str, done: float, total: float, number: int = number, name: str = row.name) -> None:
            progress(f"{name}: {what}", number + (done / total if total else 0.0), len(rows))

        try:
            path = make_file(row, folder, show)
            run(recorder, show, path, plan.for_row(row), row.name)
        except WorkerError as error:
            recorder.details.setdefault("failed", {})[row.name] = str(error)
        on_row(row)


def run(recorder: Recorder, progress: StepProgress, model: Path, plan: Plan, row: str = "") -> None:
    """Start all peers that are installed, then measure them in turn."""
    prefix = f"{row} " if row else ""
    checkpoint = open_checkpoint(model)
    tasks = _validated_tasks(checkpoint, plan)
    _describe(recorder, model, row, progress)
    busy = recorder.details.setdefault("busy_cores", {}).setdefault(row or model.name, [busy_cores()])
    left_out = dict[str, str]()
    peers = [*_own_peers(model, plan, tasks), *_find_peers(model, checkpoint, plan, tasks, left_out)]
    recorder.details.setdefault("left_out", {}).update({prefix + name: reason for name, reason in left_out.items()})
    samples, rounds = dict[Task, dict[Peer, list[float]]](), plan.repetitions + 1
    try:
        for number in range(rounds):
            turn = list(reversed(peers)) if number and number % 2 == 0 else list(peers)
            for place, peer in enumerate(turn):
                what = f"{number} of {plan.repetitions}" if number else "loading and warming up"
                progress(f"{peer.name}: {what}", number + place / len(turn), rounds)
                try:
                    _measure(recorder, peer, tasks, samples, prefix) if number else peer.warm_up(tasks)
                except PeerError as error:
                    peer.close()
                    if peer.name == OURS:  # there is nothing to compare with
                        raise
                    peers.remove(peer)
                    recorder.details.setdefault("failed", {})[prefix + peer.name] = str(error)
    finally:
        for peer in peers:
            peer.close()
        busy.append(busy_cores())


def _describe(recorder: Recorder, model: Path, row: str, progress: StepProgress) -> None:
    described = describe_model(model, progress)
    if not row:
        recorder.model = described
        return
    recorder.details.setdefault("models", {})[row] = described
    assert recorder.model is not None
    recorder.model["bytes"] += described["bytes"]


def _measure(
    recorder: Recorder, peer: Peer, tasks: Sequence[Task], samples: dict[Task, dict[Peer, list[float]]], prefix: str
) -> None:
    """Run each task once and make all its results anew: their ratios to this worker change with every sample."""
    for task in filter(peer.can_run, tasks):
        rate = peer.measure_rate(task)
        samples.setdefault(task, {}).setdefault(peer, []).append(rate)
        ours = next((rates for one, rates in samples[task].items() if one.name == OURS), [])
        for one, rates in samples[task].items():
            ratio = statistics.estimate([a / b for a, b in zip(ours, rates, strict=False)])
            value, low, high = ratio if ours else (None, None, None)
            fields = {"peer": one.name, "version": one.version, "ours_over_peer": value, "ratio_interval": [low, high]}
            name = f"{prefix}{task.name}/{one.name}"
            recorder.add_result(Result.from_samples(name, "tok/s", rates, "higher", **fields))


def _validated_tasks(checkpoint: Checkpoint, plan: Plan) -> list[Task]:
    """Return the tasks; raise if there is none, or one exceeds the context."""
    tasks, context = plan.tasks(checkpoint), read_model_config(checkpoint).context_length
    if not tasks:
        raise InvalidRequestError("nothing to measure: --pp and --tg are both 0", "pp")
    longest = max(tasks, key=_context_of)
    if _context_of(longest) > context:
        needed = f"{longest.name} needs {_context_of(longest)} tokens, the model's context has {context}"
        raise ContextLengthError(f"{needed}: use a smaller --{longest.kind}", longest.kind)
    return tasks


def _context_of(task: Task) -> int:
    """Return the tokens of the longest sequence."""
    return task.tokens + max(map(len, task.prompts), default=0)


def _split(tasks: Sequence[Task]) -> tuple[list[Task], list[Task]]:
    """Return the tasks of one sequence, and those of many prompts at once."""
    return [task for task in tasks if not task.prompts], [task for task in tasks if task.prompts]


def _own_peers(model: Path, plan: Plan, tasks: Sequence[Task]) -> list[Peer]:
    """Return this worker: the engine for single sequences, `serve` for many prompts at once."""
    single, together = _split(tasks)
    found: list[Peer] = []
    if single:
        command = [sys.executable, "-m", programs.__name__, _child_settings(model, plan, single)]
        found.append(LibraryPeer(OURS, command, package_environment(plan.threads), plan.timeout_s))
    if together:
        args = ["--device", plan.device, "--backend", plan.backend]
        args += ["--threads", str(plan.threads)] if plan.is_on_cpu else []
        found.append(WorkerServer(str(model), *_sizes(together), args, plan.timeout_s))
    return found


def _sizes(tasks: Sequence[Task]) -> tuple[int, int]:
    """Return the largest batch and the longest sequence."""
    return max(len(task.prompts) for task in tasks), max(map(_context_of, tasks))


def _child_settings(model: Path, plan: Plan, tasks: Sequence[Task]) -> str:
    settings = {"model": str(model.absolute()), "threads": plan.threads, "context": max(map(_context_of, tasks))}
    return json.dumps({**settings, "device": plan.device, "backend": plan.backend})


def _find_peers(
    model: Path, checkpoint: Checkpoint, plan: Plan, tasks: Sequence[Task], left_out: dict[str, str]
) -> list[Peer]:
    """Return the peers that are installed and can run some of the tasks."""
    found: list[Peer] = []
    for name in (name for name in NAMES if name in plan.peers):
        own_tasks = _split(tasks)[name == LLAMA_SERVER]
        if not own_tasks:
            continue
        try:
            if name == "transformers":
                _require_memory(checkpoint)
            elif checkpoint.format != "gguf":
                raise PeerError("it reads GGUF files only")
            make = _make_library if name in PACKAGES else _make_program
            found.append(make(name, model, checkpoint, plan, own_tasks))
        except PeerError as error:
            left_out[name] = str(error)
    return found


def _make_program(name: str, model: Path, _: Checkpoint, plan: Plan, tasks: Sequence[Task]) -> Peer:
    path = plan.llama_bench if name == LLAMA_BENCH else plan.llama_server
    program = shutil.which(path or name)
    if program is None:
        where = f"{path} is not a program" if path else "it is not on the PATH"
        raise PeerError(f"{where}: --{name} PATH names one")
    if name == LLAMA_BENCH:
        return LlamaBench(program, str(model), plan.threads, plan.timeout_s)
    return LlamaServer(program, str(model), plan.threads, *_sizes(tasks), plan.timeout_s)


def _make_library(name: str, model: Path, checkpoint: Checkpoint, plan: Plan, tasks: Sequence[Task]) -> Peer:
    needed = [package for package in PACKAGES[name] if package != "gguf" or checkpoint.format == "gguf"]
    pythons = dict.fromkeys([*plan.pythons, sys.executable])
    python = next((path for path in pythons if _has_packages(path, needed)), None)
    if python is None:
        missing = f"{' and '.join(needed)} not installed for {', '.join(pythons)}"
        raise PeerError(f"{missing}: --peer-python PATH names another")
    source = Path(library_child.__file__).read_text(encoding="utf-8")  # as text: our folder must not be on its path
    env = library_environment(plan.threads)
    return LibraryPeer(name, [python, "-c", source, name, _child_settings(model, plan, tasks)], env, plan.timeout_s)


def _has_packages(python: str, packages: Sequence[str]) -> bool:
    program = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {list(packages)!r})))"
    command, env = [python, "-c", program], library_environment(1)
    try:
        return not subprocess.run(command, capture_output=True, timeout=PACKAGE_PROBE_S, env=env).returncode
    except subprocess.TimeoutExpired:
        return False
    except OSError as error:
        raise InvalidRequestError(f"--peer-python {python}: {error.strerror}", "peer_python") from None


def _require_memory(checkpoint: Checkpoint) -> None:
    """Raise unless float32 weights fit: transformers keeps them so."""
    needed, (_, free) = 4 * sum(t.size for t in checkpoint.tensors.values()), machine.memory()
    if free is not None and needed > 0.8 * free:
        raise PeerError(f"its float32 weights take {human_bytes(needed)}, and {human_bytes(free)} of memory are free")


class Size(NamedTuple):
    """What the time of a run follows from."""

    values: int  # of all matrices
    bytes: int
    config: ModelConfig


def size_of(row: Row) -> Size:
    """Return the size of a row's model, which need not be made yet; that of the model which it is converted from."""
    if row.model is not None:
        checkpoint = open_checkpoint(row.model)
        values = sum(tensor.size for tensor in checkpoint.tensors.values())
        return Size(values, checkpoint.nbytes, read_model_config(checkpoint))
    spec = synthetic.parse(row.synthetic)
    values = sum(prod(plan.shape) for plan in synthetic.plans(spec))
    return Size(values, spec.nbytes, read_model_config(synthetic.without_weights(spec)))


def estimate_seconds(row: Row, plan: Plan, limits: Limits) -> float:
    """Return about how long a row takes with one peer: from the machine's limits, which both sides stay below."""
    size, rounds, tests = size_of(row), plan.repetitions + 1, list(planned_tests(row))
    seconds = sum(_least_seconds(size, *test, limits) for test in tests)
    read = len(tests) * (START_S / 3 + size.bytes / READ_RATE)  # llama-bench loads the model for each of them
    made = size.bytes / WRITE_RATE if row.synthetic or row.converted else 0.0
    return made + 2 * START_S + rounds * (2 * TIMES_LIMIT * seconds + read)


def planned_tests(row: Row) -> Iterator[tuple[str, int, int]]:
    """Yield kind, tokens and batch of each test of a row."""
    for batch in dict.fromkeys(row.batches):
        yield from (("pp", n, 1) for n in row.pp if n and batch == 1)
        yield from (("tg", n, batch) for n in row.tg if n)


def _least_seconds(size: Size, kind: str, tokens: int, batch: int, limits: Limits) -> float:
    config = size.config
    if kind == "tg":
        step = max(size.bytes / limits.memory_bandwidth, 2 * size.values * batch / limits.operations)
        return tokens * step
    pairs = 2 * tokens**2 * config.n_layers * config.n_heads * config.head_dim  # causality leaves half of them
    return (2 * size.values * tokens + pairs) / limits.operations


class TimeLeft:
    """Estimates of rows, corrected by how long the finished ones took."""

    def __init__(self, estimates: dict[str, float]) -> None:
        self._left, self._done_s, self._start = dict(estimates), 0.0, time.monotonic()

    def finish(self, row: str) -> float:
        """Return the seconds that are left after a row."""
        self._done_s += self._left.pop(row)
        return sum(self._left.values()) * (time.monotonic() - self._start) / self._done_s


def compared(run: Run, row: str = "") -> Iterator[tuple[str, Result, Result]]:
    """Yield the name, this worker's result and a peer's, for each test; of one row, or of all."""
    own = {result.name.rpartition("/")[0]: result for result in run.results if result.fields["peer"] == OURS}
    for result in run.results:
        test = result.name.rpartition("/")[0]
        if result.fields["peer"] != OURS and test in own and test.startswith(f"{row} " if row else ""):
            yield test, own[test], result


def ratio_text(result: Result) -> str:
    """Return `2.65 (2.60 to 2.71)`."""
    low, high = result.fields["ratio_interval"]
    return f"{result.fields['ours_over_peer']:.2f} ({low:.2f} to {high:.2f})"


def markdown(run: Run) -> str:
    """Return the run as a table in Markdown, with machine, commit and load."""
    commit = str((run.commit or {}).get("id") or "none")[:7]
    threads = run.settings["threads"]
    head = [
        f"{run.machine['cpu']}, {run.machine['cores']} cores, {threads} threads, {run.created}, commit {commit}.",
        "",
        "| test | peer | this worker | peer | ratio |",
        "| --- | --- | --- | --- | --- |",
    ]
    rows = [
        f"| {test} | {theirs.fields['peer']}, {theirs.fields['version']} | {_value(ours)} | {_value(theirs)} "
        f"| {ratio_text(theirs)} |"
        for test, ours, theirs in compared(run)
    ]
    busy = [f"{name} {_cores(before)} and {_cores(after)}" for name, (before, after) in busy_rows(run)]
    load = f"Cores that were busy before and after each row: {'; '.join(busy)}." if busy else ""
    missing = [
        f"- {what.replace('_', ' ')}: {name}: {reason}"
        for what in ("left_out", "failed")
        for name, reason in run.details.get(what, {}).items()
    ]
    return "\n".join([*head, *rows, "", *missing, *[""] * bool(missing), load]).rstrip() + "\n"


def busy_rows(run: Run) -> Iterator[tuple[str, tuple[float | None, float | None]]]:
    """Yield the busy cores before and after each finished row."""
    for name, values in run.details.get("busy_cores", {}).items():
        if len(values) == 2:
            yield name, (values[0], values[1])


def _cores(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}"


def _value(result: Result) -> str:
    return f"{quantity(result.estimate, result.unit)} ({spread((result.low, result.high), result.unit)})"
