"""What a peer is, libraries in a child process, and llama-bench; as a program, the child that runs this worker.

llama-bench loads the model for each run, times without loading and does not sample; all others sample greedily. A child
speaks the protocol of library_child.py.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from llm_worker_rbee import __version__
from llm_worker_rbee.backends import resolve_kv_type, select_backend
from llm_worker_rbee.models import load_model, read_model_config
from llm_worker_rbee.weights import open_checkpoint

from ..engine_harness import EngineHarness
from ..http_client import RequestFailedError
from ..processes import ChildFailedError, ChildProcess, describe_exit
from . import library_child

PeerError = ChildFailedError
OURS, LLAMA_BENCH, LLAMA_SERVER = "llm-worker-rbee", "llama-bench", "llama-server"
WARM_UP_TOKENS = 8
BATCH_ATTEMPTS = 3  # of a run whose first answer may end before the last begins
GPU_REPETITIONS = 5
ALL_LAYERS = "999"  # of a model, to the GPU
# what llama-bench says about itself that speed depends on
BENCH_SETTINGS = ("backends", "n_threads", "n_batch", "n_ubatch", "type_k", "type_v", "n_gpu_layers", "flash_attn")
NO_WARM_UP = "--no-warmup"
LONG_PROMPT = 2048  # from so many tokens on llama-bench makes no run before the one that it times


class Task(NamedTuple):
    """`pp` or `tg` of a length; with prompts, answers of that length to all of them at once."""

    kind: str
    tokens: int
    prompts: tuple[tuple[int, ...], ...] = ()

    @property
    def name(self) -> str:
        """`pp512`, `tg128@b16`."""
        return f"{self.kind}{self.tokens}" + (f"@b{len(self.prompts)}" if self.prompts else "")


class TokenCount(NamedTuple):
    """How many tokens an answer had at a time."""

    time: float
    tokens: int


class Peer:
    """A program to compare with; version and settings are known once it has started."""

    name: str
    version = ""
    settings: Mapping[str, Any] = {}  # those that speed depends on
    batch_warm_up_tokens = 32
    warm_up_runs = 1
    batches: tuple[bool, ...] = (False,)  # whether it runs tasks of one sequence, of many prompts, or of both

    def can_run(self, task: Task) -> bool:
        return bool(task.prompts) in self.batches

    def start(self) -> None:
        """Start it and load the model; raise PeerError on failure."""

    def warm_up(self, tasks: Sequence[Task]) -> None:
        """Start it, then run each prefill and a few tokens of each decode."""
        self.start()
        for task in self.warm_up_runs * list(filter(self.can_run, tasks)):
            few = task.tokens if task.kind == "pp" else self.batch_warm_up_tokens if task.prompts else WARM_UP_TOKENS
            task = task._replace(tokens=min(task.tokens, few))
            self.run_batch(task) if task.prompts else self.measure_rate(task)

    def measure_rate(self, task: Task) -> float:
        """Return the tokens per second of one run."""
        raise NotImplementedError

    def run_batch(self, task: Task) -> list[list[TokenCount]]:
        """Send all prompts at once; return how the tokens of each answer grew."""
        raise NotImplementedError

    def measure_batch_rate(self, task: Task) -> float:
        """Return the tokens per second while all prompts are being answered; a run without such a time is repeated."""
        for attempt in range(BATCH_ATTEMPTS):
            try:
                return shared_rate(self.run_batch(task))
            except RequestFailedError as error:
                if attempt + 1 == BATCH_ATTEMPTS:
                    raise PeerError(f"{self.name}: {error}") from None
        raise AssertionError("unreachable")

    def close(self) -> None: ...


class LibraryPeer(Peer):
    """A library in a child process, which keeps the model loaded between runs."""

    batch_warm_up_tokens = sys.maxsize  # a whole answer: some prefill one prompt after the other

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        timeout_s: float,
        batches: tuple[bool, ...] = (False,),
        warm_up_runs: int = 1,
    ) -> None:
        self.name, self.batches, self.warm_up_runs = name, batches, warm_up_runs
        self._child = ChildProcess(name, command, env, timeout_s)

    def start(self) -> None:
        greeting = self._child.start()
        self.version, self.settings = str(greeting["version"]), dict(greeting.get("settings") or {})

    def measure_rate(self, task: Task) -> float:
        if task.prompts:
            return self.measure_batch_rate(task)
        reply = self._child.request({"kind": task.kind, "tokens": task.tokens}, "seconds")
        return float(reply.get("tokens", task.tokens)) / float(reply["seconds"])

    def run_batch(self, task: Task) -> list[list[TokenCount]]:
        message = {"kind": task.kind, "tokens": task.tokens, "prompts": task.prompts}
        answers = self._child.request(message, "answers")["answers"]
        return [[TokenCount(*count) for count in answer] for answer in answers]

    def close(self) -> None:
        self._child.close()


class LlamaBench(Peer):
    """A llama-bench program, one process for each run; with more options it is named after them.

    Forks of llama.cpp have it too, some of them without --no-warmup. On a GPU a run takes milliseconds and the first
    after its warm-up is slower: the median of several is taken.
    """

    def __init__(
        self,
        program: str,
        model: str,
        threads: int,
        timeout_s: float,
        *,
        on_gpu: bool = False,
        options: str = "",
        name: str = LLAMA_BENCH,
    ) -> None:
        layers, repetitions = (ALL_LAYERS, str(GPU_REPETITIONS)) if on_gpu else ("0", "1")
        self._command = [program, "-m", model, "-t", str(threads), "-ngl", layers, "-r", repetitions, "-o", "json"]
        self._command += shlex.split(options)  # the last of an option counts
        self._timeout_s = timeout_s
        self.name = f"{name} {options}".strip()
        self._long_prompt_args: list[str] = []

    def start(self) -> None:
        """Make a first short run: it shows that the program works, and its build."""
        self._long_prompt_args = [NO_WARM_UP] if NO_WARM_UP.encode() in self._run([self._command[0], "--help"]) else []
        self.measure_rate(Task("tg", 1))

    def warm_up(self, tasks: Sequence[Task]) -> None:
        """Start only: each run is a process of its own, which warms up itself."""
        self.start()

    def measure_rate(self, task: Task) -> float:
        prompt, generated = (task.tokens, 0) if task.kind == "pp" else (0, task.tokens)
        command = [*self._command, "-p", str(prompt), "-n", str(generated)]
        command += self._long_prompt_args if prompt >= LONG_PROMPT else []
        return self._parse(self._run(command), prompt, generated)

    def _run(self, command: Sequence[str]) -> bytes:
        """Return the output of a command; raise PeerError if it fails."""
        try:
            done = subprocess.run(command, capture_output=True, timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            raise PeerError(f"{self.name} did not end within {self._timeout_s:g} s") from None
        except OSError as error:
            raise PeerError(f"{self.name} cannot be started: {error.strerror}") from None
        if done.returncode != 0:
            raise PeerError(describe_exit(self.name, done.returncode, done.stderr))
        return done.stdout

    def _parse(self, output: bytes, prompt: int, generated: int) -> float:
        try:
            (row,) = [r for r in json.loads(output) if (r["n_prompt"], r["n_gen"]) == (prompt, generated)]
            self.version = f"build {row['build_number']} ({row['build_commit']})"
            self.settings = {key: row[key] for key in BENCH_SETTINGS if key in row}
            return float(median(row.get("samples_ts") or [row["avg_ts"]]))
        except (ValueError, KeyError, TypeError):
            raise PeerError(f"{self.name} printed no JSON of the known form: {output[:200]!r}") from None


def shared_rate(answers: Sequence[Sequence[TokenCount]]) -> float:
    """Return tokens per second of all answers, from the first token of the last to the end of the first."""
    if not all(answers):
        raise RequestFailedError("protocol", "an answer has no tokens")
    start = max(answer[0].time for answer in answers)
    end = min(next(count.time for count in answer if count.tokens == answer[-1].tokens) for answer in answers)
    if end <= start:
        raise RequestFailedError("protocol", "the first answer ended before the last began: use a longer --tg")
    return sum(_tokens_at(answer, end) - _tokens_at(answer, start) for answer in answers) / (end - start)


def _tokens_at(answer: Sequence[TokenCount], moment: float) -> int:
    return max((count.tokens for count in answer if count.time <= moment), default=0)


def load_worker(settings: dict[str, Any]) -> library_child.Loaded:
    """Prefill and decode as `bench e2e` runs them."""
    checkpoint = open_checkpoint(Path(settings["model"]))
    on_cpu = settings["backend"] in ("auto", "cpu") and not settings["device"].startswith("cuda")
    backend = select_backend(settings["device"], settings["backend"], settings.get("threads") if on_cpu else None)
    config = read_model_config(checkpoint)
    kv_type = resolve_kv_type(backend)
    backend.load_kernels(checkpoint, config, kv_type)
    model = load_model(checkpoint, backend, config, settings["context"])
    harness = EngineHarness(model, settings["context"], kv_type=kv_type)

    def measure(kind: str, tokens: int) -> dict[str, float]:
        timed = (harness.prefill if kind == "pp" else harness.decode)(0, tokens, 1)
        return {"seconds": timed.seconds, "tokens": timed.tokens}

    used = {"backend": backend.name, "threads": settings.get("threads"), "kv_type": kv_type}
    return __version__, used, measure


if __name__ == "__main__":
    library_child.serve(load_worker, json.loads(sys.argv[1]))
