"""This worker beside others: the same file, the same lengths, the same threads, one run, in turn by repetition.

A peer that is not installed is left out with the reason; one that fails is named and the others go on. llama-bench
leaves sampling out; all others choose each token greedily. Several answers at once are asked of this worker's engine
and of llama-server: tokens that all make from when the last has begun to when the first is complete, over that time.
"""

from __future__ import annotations

import json
import os
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
from .. import environment, statistics
from ..prompt_ids import prompts_of
from ..results import Recorder, Result
from . import child as peer_child
from .llama_server import LlamaServer
from .process import Child, LlamaBench, Peer, PeerError, Task

Progress = Callable[[str, float, float], None]
OURS, LLAMA_BENCH, LLAMA_SERVER = "llm-worker-rbee", "llama-bench", "llama-server"
# What must be installed for a peer; gguf only where the model is a GGUF file.
PACKAGES = {"llama-cpp-python": ("llama_cpp",), "transformers": ("transformers", "torch", "gguf")}
NAMES = (LLAMA_BENCH, *PACKAGES, LLAMA_SERVER)
WARM_UP_TOKENS = 8
WARM_UP_TOGETHER = 32  # of several answers at once: the first must not end before the last has begun
PROBE_S = 60


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare, and with whom."""

    pp: Sequence[int] = (512,)
    tg: Sequence[int] = (128,)
    batches: Sequence[int] = (1,)  # above 1: so many answers at once, of the lengths of tg
    repetitions: int = 3
    threads: int = 1
    peers: Sequence[str] = NAMES
    llama_bench: str | None = None  # the program; None: looked for on the PATH
    llama_server: str | None = None  # likewise
    pythons: Sequence[str] = ()  # interpreters to look for packages in; this one is the last
    timeout_s: float = 900.0  # for one answer
    device: str = "auto"
    backend: str = "auto"

    @property
    def several(self) -> list[int]:
        """How many at once, where it is more than one."""
        return [batch for batch in dict.fromkeys(self.batches) if batch > 1 and any(self.tg)]

    def tests(self, checkpoint: Checkpoint) -> list[Task]:
        """In the order of the table."""
        parts = (("pp", self.pp), ("tg", self.tg)) if 1 in self.batches else ()
        alone = [Task(kind, n) for kind, lengths in parts for n in dict.fromkeys(lengths) if n]
        prompts = tuple(map(tuple, prompts_of(checkpoint, max(self.several)))) if self.several else ()
        together = [Task("tg", n, prompts[:batch]) for batch in self.several for n in dict.fromkeys(self.tg) if n]
        return alone + together


@dataclass(slots=True)
class Rates:
    """What was measured until now, and the results that it makes."""

    recorder: Recorder
    samples: dict[tuple[Task, str], list[float]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def add(self, peer: Peer, test: Task, rate: float) -> None:
        """One sample more; all results of the test are made anew, because their ratios change with ours."""
        self.samples.setdefault((test, peer.name), []).append(rate)
        self.versions[peer.name] = peer.version
        ours = self.samples.get((test, OURS))
        for (known, name), samples in self.samples.items():
            if known == test:
                estimate = statistics.estimate(samples).value
                ratio = None if ours is None else statistics.estimate(ours).value / estimate
                more = {"peer": name, "version": self.versions[name], "ours_over_peer": ratio}
                self.recorder.add_result(Result.from_samples(f"{test.name}/{name}", "tok/s", samples, "higher", **more))


def run(recorder: Recorder, progress: Progress, model: Path, plan: Plan) -> None:
    """Start everyone who is here, then measure in turn."""
    checkpoint = open_checkpoint(model)
    tests = _tests(checkpoint, plan)
    recorder.model = environment.describe_model(model, lambda what, *n: progress(what, n[0], n[1] or 0))
    left_out: dict[str, str] = recorder.details.setdefault("left_out", {})
    peers: list[Peer] = [_ours(model, plan, tests), *_others(model, checkpoint, plan, tests, left_out)]
    rates, parts = Rates(recorder), plan.repetitions + 1
    try:
        for part in range(parts):
            turn = list(reversed(peers)) if part and part % 2 == 0 else list(peers)
            for number, peer in enumerate(turn):
                what = f"{part} of {plan.repetitions}" if part else "loading and warming up"
                progress(f"{peer.name}: {what}", part + number / len(turn), parts)
                act = _round if part else _warm_up
                _attempt(act, peer, peers, tests, rates)
    finally:
        for peer in peers:
            peer.close()


def _attempt(
    act: Callable[[Peer, list[Task], Rates], None], peer: Peer, peers: list[Peer], tests: list[Task], rates: Rates
) -> None:
    """A peer that fails is dropped and named; without this worker there is nothing to compare."""
    try:
        act(peer, [test for test in tests if peer.takes(test)], rates)
    except PeerError as error:
        peer.close()
        if peer.name == OURS:
            raise
        peers.remove(peer)
        rates.recorder.details.setdefault("failed", {})[peer.name] = str(error)


def _warm_up(peer: Peer, tests: list[Task], rates: Rates) -> None:
    peer.start()
    for test in tests:
        most = test.tokens if test.kind == "pp" else WARM_UP_TOGETHER if test.prompts else WARM_UP_TOKENS
        peer.rate(test._replace(tokens=min(test.tokens, most)))


def _round(peer: Peer, tests: list[Task], rates: Rates) -> None:
    for test in tests:
        rates.add(peer, test, peer.rate(test))


def _tests(checkpoint: Checkpoint, plan: Plan) -> list[Task]:
    """What is asked for; what cannot be is refused."""
    unknown = sorted(set(plan.peers) - set(NAMES))
    if unknown:
        raise InvalidRequestError(f"unknown peer {unknown[0]!r}: use some of {', '.join(NAMES)}", "peer")
    tests, context = plan.tests(checkpoint), read_model_config(checkpoint).context_length
    if not tests:
        raise InvalidRequestError("nothing to measure: --pp and --tg are both 0", "pp")
    longest = max(tests, key=_length)
    if _length(longest) > context:
        raise ContextLengthError(
            f"{longest.name} needs {_length(longest)} tokens, the model's context has {context}: "
            f"use a smaller --{longest.kind}",
            longest.kind,
        )
    return tests


def _length(test: Task) -> int:
    """Tokens of the longest sequence."""
    return test.tokens + max(map(len, test.prompts), default=0)


def _settings(model: Path, plan: Plan, tests: Sequence[Task]) -> tuple[str, dict[str, str]]:
    """What a child is told, and its environment."""
    given = {"model": str(model.absolute()), "threads": plan.threads, "context": max(map(_length, tests))}
    given |= {"device": plan.device, "backend": plan.backend, "batch": max([1, *plan.several])}
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    threads = dict.fromkeys(names, str(plan.threads))
    return json.dumps(given), {**os.environ, **threads}


def _ours(model: Path, plan: Plan, tests: Sequence[Task]) -> Peer:
    given, env = _settings(model, plan, tests)
    paths = [str(Path(__file__).parents[3]), env.get("PYTHONPATH", "")]  # this very package, wherever it lies
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return Child(OURS, [sys.executable, "-m", f"{__package__}.worker_child", given], env, plan.timeout_s, batches=True)


def _others(
    model: Path, checkpoint: Checkpoint, plan: Plan, tests: Sequence[Task], left_out: dict[str, str]
) -> list[Peer]:
    """Those who are here, and who can do some of what is asked for."""
    found: list[Peer] = []
    for name in (name for name in NAMES if name in plan.peers):
        wanted = [test for test in tests if bool(test.prompts) == (name == LLAMA_SERVER)]
        if not wanted:
            continue
        try:
            if name in PACKAGES:
                found.append(_package(name, model, checkpoint, plan, wanted))
            else:
                found.append(_program(name, model, checkpoint, plan, wanted))
        except PeerError as error:
            left_out[name] = str(error)
    return found


def _program(name: str, model: Path, checkpoint: Checkpoint, plan: Plan, tests: Sequence[Task]) -> Peer:
    _require_gguf(checkpoint)
    given = plan.llama_bench if name == LLAMA_BENCH else plan.llama_server
    program = shutil.which(given or name)
    if program is None:
        where = f"{given} is no program" if given else "it is not on the PATH"
        raise PeerError(f"{where}: --{name} PATH names one")
    if name == LLAMA_BENCH:
        return LlamaBench(program, str(model), plan.threads, plan.timeout_s)
    slots, context = max(len(test.prompts) for test in tests), max(map(_length, tests))
    return LlamaServer(program, str(model), plan.threads, slots, context, plan.timeout_s)


def _package(name: str, model: Path, checkpoint: Checkpoint, plan: Plan, tests: Sequence[Task]) -> Peer:
    if name == "transformers":
        _require_memory(checkpoint)
    else:
        _require_gguf(checkpoint)
    needed = [package for package in PACKAGES[name] if package != "gguf" or checkpoint.format == "gguf"]
    pythons = dict.fromkeys([*plan.pythons, sys.executable])
    python = next((path for path in pythons if _has(path, needed)), None)
    if python is None:
        raise PeerError(
            f"{' and '.join(needed)} not installed for {', '.join(pythons)}: --peer-python PATH names another"
        )
    given, env = _settings(model, plan, tests)
    source = Path(peer_child.__file__).read_text(encoding="utf-8")  # as text: our folder must not be on its path
    return Child(name, [python, "-c", source, name, given], env, plan.timeout_s)


def _has(python: str, packages: Sequence[str]) -> bool:
    program = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {list(packages)!r})))"
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return False
    except OSError as error:
        raise InvalidRequestError(f"--peer-python {python}: {error.strerror}", "peer_python") from None
    return done.returncode == 0


def _require_gguf(checkpoint: Checkpoint) -> None:
    if checkpoint.format != "gguf":
        raise PeerError("it reads GGUF files only")


def _require_memory(checkpoint: Checkpoint) -> None:
    """It keeps all weights as float32."""
    needed, (_, free) = 4 * sum(t.size for t in checkpoint.tensors.values()), machine.memory()
    if free is not None and needed > 0.8 * free:
        raise PeerError(f"its float32 weights take {human_bytes(needed)}, and {human_bytes(free)} of memory are free")
