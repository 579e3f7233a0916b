"""This worker beside others: the same file, lengths and thread count, in turn by repetition.

A peer that is not installed is left out with the reason; one that fails is named and the others go on. llama-bench does
not sample; all others sample greedily. Batches above 1 run in this worker's engine and in llama-server: the rate counts
the tokens of all answers from the first token of the last to the end of the first.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ... import machine
from ...errors import ContextLengthError, InvalidRequestError, human_bytes
from ...models import read_model_config
from ...weights import Checkpoint, open_checkpoint
from .. import library_child, statistics
from ..engine_harness import encode_bundled_prompts
from ..processes import library_environment, package_environment
from ..results import Recorder, Result, describe_model
from .programs import LibraryPeer, LlamaBench, LlamaServer, Peer, PeerError, Task

Progress = Callable[[str, float, float], None]
OURS, LLAMA_BENCH, LLAMA_SERVER = "llm-worker-rbee", "llama-bench", "llama-server"
# Packages that a peer needs; gguf only for a GGUF file.
PACKAGES = {"llama-cpp-python": ("llama_cpp",), "transformers": ("transformers", "torch", "gguf")}
NAMES = (LLAMA_BENCH, *PACKAGES, LLAMA_SERVER)
WARM_UP_TOKENS = 8
BATCH_WARM_UP_TOKENS = 32  # the first answer must not end before the last has begun
PACKAGE_PROBE_S = 60


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


@dataclass(slots=True)
class Rates:
    """The samples so far, and the results made of them."""

    recorder: Recorder
    samples: dict[tuple[Task, str], list[float]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def add(self, peer: Peer, task: Task, rate: float) -> None:
        """Add a sample; remake all results of the task, because their ratios to this worker change with it."""
        self.samples.setdefault((task, peer.name), []).append(rate)
        self.versions[peer.name] = peer.version
        ours = self.samples.get((task, OURS))
        for (known, name), samples in self.samples.items():
            if known == task:
                estimate = statistics.estimate(samples).value
                ratio = None if ours is None else statistics.estimate(ours).value / estimate
                fields = {"peer": name, "version": self.versions[name], "ours_over_peer": ratio}
                self.recorder.add_result(
                    Result.from_samples(f"{task.name}/{name}", "tok/s", samples, "higher", **fields)
                )


def run(recorder: Recorder, progress: Progress, model: Path, plan: Plan) -> None:
    """Start all peers that are installed, then measure them in turn."""
    checkpoint = open_checkpoint(model)
    tasks = _validated_tasks(checkpoint, plan)
    recorder.model = describe_model(model, progress)
    left_out: dict[str, str] = recorder.details.setdefault("left_out", {})
    peers: list[Peer] = [_own_peer(model, plan, tasks), *_find_peers(model, checkpoint, plan, tasks, left_out)]
    rates, rounds = Rates(recorder), plan.repetitions + 1
    try:
        for number in range(rounds):
            turn = list(reversed(peers)) if number and number % 2 == 0 else list(peers)
            for place, peer in enumerate(turn):
                what = f"{number} of {plan.repetitions}" if number else "loading and warming up"
                progress(f"{peer.name}: {what}", number + place / len(turn), rounds)
                _attempt(_measure if number else _warm_up, peer, peers, tasks, rates)
    finally:
        for peer in peers:
            peer.close()


def _attempt(
    act: Callable[[Peer, list[Task], Rates], None], peer: Peer, peers: list[Peer], tasks: list[Task], rates: Rates
) -> None:
    """Drop and name a peer that fails; without this worker there is nothing to compare."""
    try:
        act(peer, [task for task in tasks if peer.can_run(task)], rates)
    except PeerError as error:
        peer.close()
        if peer.name == OURS:
            raise
        peers.remove(peer)
        rates.recorder.details.setdefault("failed", {})[peer.name] = str(error)


def _warm_up(peer: Peer, tasks: list[Task], rates: Rates) -> None:
    peer.start()
    for task in tasks:
        tokens = task.tokens if task.kind == "pp" else BATCH_WARM_UP_TOKENS if task.prompts else WARM_UP_TOKENS
        peer.measure_rate(task._replace(tokens=min(task.tokens, tokens)))


def _measure(peer: Peer, tasks: list[Task], rates: Rates) -> None:
    for task in tasks:
        rates.add(peer, task, peer.measure_rate(task))


def _validated_tasks(checkpoint: Checkpoint, plan: Plan) -> list[Task]:
    """Return the tasks; raise if a peer is unknown, there is no task, or one exceeds the context."""
    unknown = sorted(set(plan.peers) - set(NAMES))
    if unknown:
        raise InvalidRequestError(f"unknown peer {unknown[0]!r}: use some of {', '.join(NAMES)}", "peer")
    tasks, context = plan.tasks(checkpoint), read_model_config(checkpoint).context_length
    if not tasks:
        raise InvalidRequestError("nothing to measure: --pp and --tg are both 0", "pp")
    longest = max(tasks, key=_context_of)
    if _context_of(longest) > context:
        raise ContextLengthError(
            f"{longest.name} needs {_context_of(longest)} tokens, the model's context has {context}: "
            f"use a smaller --{longest.kind}",
            longest.kind,
        )
    return tasks


def _context_of(task: Task) -> int:
    """Return the tokens of the longest sequence."""
    return task.tokens + max(map(len, task.prompts), default=0)


def _child_settings(model: Path, plan: Plan, tasks: Sequence[Task]) -> str:
    settings = {"model": str(model.absolute()), "threads": plan.threads, "context": max(map(_context_of, tasks))}
    settings |= {"device": plan.device, "backend": plan.backend, "batch": max([1, *plan.parallel_batches])}
    return json.dumps(settings)


def _own_peer(model: Path, plan: Plan, tasks: Sequence[Task]) -> Peer:
    command = [sys.executable, "-m", f"{__package__}.worker_child", _child_settings(model, plan, tasks)]
    return LibraryPeer(OURS, command, package_environment(plan.threads), plan.timeout_s, batches=True)


def _find_peers(
    model: Path, checkpoint: Checkpoint, plan: Plan, tasks: Sequence[Task], left_out: dict[str, str]
) -> list[Peer]:
    """Return the peers that are installed and can run some of the tasks."""
    found: list[Peer] = []
    for name in (name for name in NAMES if name in plan.peers):
        own_tasks = [task for task in tasks if bool(task.prompts) == (name == LLAMA_SERVER)]
        if not own_tasks:
            continue
        try:
            make = _make_library if name in PACKAGES else _make_program
            found.append(make(name, model, checkpoint, plan, own_tasks))
        except PeerError as error:
            left_out[name] = str(error)
    return found


def _make_program(name: str, model: Path, checkpoint: Checkpoint, plan: Plan, tasks: Sequence[Task]) -> Peer:
    _require_gguf(checkpoint)
    path = plan.llama_bench if name == LLAMA_BENCH else plan.llama_server
    program = shutil.which(path or name)
    if program is None:
        where = f"{path} is not a program" if path else "it is not on the PATH"
        raise PeerError(f"{where}: --{name} PATH names one")
    if name == LLAMA_BENCH:
        return LlamaBench(program, str(model), plan.threads, plan.timeout_s)
    slots, context = max(len(task.prompts) for task in tasks), max(map(_context_of, tasks))
    return LlamaServer(program, str(model), plan.threads, slots, context, plan.timeout_s)


def _make_library(name: str, model: Path, checkpoint: Checkpoint, plan: Plan, tasks: Sequence[Task]) -> Peer:
    if name == "transformers":
        _require_memory(checkpoint)
    else:
        _require_gguf(checkpoint)
    needed = [package for package in PACKAGES[name] if package != "gguf" or checkpoint.format == "gguf"]
    pythons = dict.fromkeys([*plan.pythons, sys.executable])
    python = next((path for path in pythons if _has_packages(path, needed)), None)
    if python is None:
        raise PeerError(
            f"{' and '.join(needed)} not installed for {', '.join(pythons)}: --peer-python PATH names another"
        )
    source = Path(library_child.__file__).read_text(encoding="utf-8")  # as text: our folder must not be on its path
    env = library_environment(plan.threads)
    return LibraryPeer(name, [python, "-c", source, name, _child_settings(model, plan, tasks)], env, plan.timeout_s)


def _has_packages(python: str, packages: Sequence[str]) -> bool:
    program = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {list(packages)!r})))"
    try:
        done = subprocess.run(
            [python, "-c", program], capture_output=True, timeout=PACKAGE_PROBE_S, env=library_environment(1)
        )
    except subprocess.TimeoutExpired:
        return False
    except OSError as error:
        raise InvalidRequestError(f"--peer-python {python}: {error.strerror}", "peer_python") from None
    return done.returncode == 0


def _require_gguf(checkpoint: Checkpoint) -> None:
    if checkpoint.format != "gguf":
        raise PeerError("it reads GGUF files only")


def _require_memory(checkpoint: Checkpoint) -> None:
    """Raise unless float32 weights fit: transformers keeps them so."""
    needed, (_, free) = 4 * sum(t.size for t in checkpoint.tensors.values()), machine.memory()
    if free is not None and needed > 0.8 * free:
        raise PeerError(f"its float32 weights take {human_bytes(needed)}, and {human_bytes(free)} of memory are free")
