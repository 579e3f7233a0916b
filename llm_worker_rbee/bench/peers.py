"""This worker beside others: the same file, lengths and thread count, in turn by repetition.

A peer is a library in a child process, llama-bench or llama-server. One that is not installed is left out with the
reason; one that fails is named and the others go on. llama-bench loads the model for each run, times without loading
and does not sample; all others sample greedily. Batches above 1 run in this worker's engine, without HTTP, and in
llama-server, which gets a slot for each prompt: the rate counts the tokens of all answers from the first token of the
last to the end of the first. As a program this module is the child that runs this worker, by the protocol of
library_child.py.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__, machine
from ..backends import resolve_kv_type, select_backend
from ..errors import ContextLengthError, InvalidRequestError, human_bytes
from ..models import load_model, read_model_config
from ..progress import StepProgress
from ..weights import Checkpoint, open_checkpoint
from . import http_client, library_child, statistics
from .engine_harness import EngineHarness, encode_bundled_prompts
from .http_client import Address, BlockingClient, Client, EventParser, RequestFailedError, run_event_loop
from .processes import ChildFailedError, ChildProcess, describe_exit, library_environment, package_environment
from .results import Recorder, Result, describe_model
from .server_process import ServerProcess

PeerError = ChildFailedError
OURS, LLAMA_BENCH, LLAMA_SERVER = "llm-worker-rbee", "llama-bench", "llama-server"
# Packages that a peer needs; gguf only for a GGUF file.
PACKAGES = {"llama-cpp-python": ("llama_cpp",), "transformers": ("transformers", "torch", "gguf")}
NAMES = (LLAMA_BENCH, *PACKAGES, LLAMA_SERVER)
WARM_UP_TOKENS = 8
BATCH_WARM_UP_TOKENS = 32  # the first answer must not end before the last has begun
PACKAGE_PROBE_S = 60
SLOT_CONTEXT_STEP = 256  # the context of a llama-server slot is a multiple of this
SHUTDOWN_S = 5


class Task(NamedTuple):
    """`pp` or `tg` of a length; with prompts, answers of that length to all of them at once."""

    kind: str
    tokens: int
    prompts: tuple[tuple[int, ...], ...] = ()

    @property
    def name(self) -> str:
        """`pp512`, `tg128@b16`."""
        return f"{self.kind}{self.tokens}" + (f"@b{len(self.prompts)}" if self.prompts else "")


class Peer:
    """A program to compare with; `version` is known once it has started."""

    name: str
    version = ""
    batches: tuple[bool, ...] = (False,)  # whether it runs tasks of one sequence, of many prompts, or of both

    def can_run(self, task: Task) -> bool:
        return bool(task.prompts) in self.batches

    def start(self) -> None:
        """Start it and load the model; raise PeerError on failure."""

    def warm_up(self, tasks: Sequence[Task]) -> None:
        """Start it, then run each prefill and a few tokens of each decode."""
        self.start()
        for task in filter(self.can_run, tasks):
            few = task.tokens if task.kind == "pp" else BATCH_WARM_UP_TOKENS if task.prompts else WARM_UP_TOKENS
            self.measure_rate(task._replace(tokens=min(task.tokens, few)))

    def measure_rate(self, task: Task) -> float:
        """Return the tokens per second of one run."""
        raise NotImplementedError

    def close(self) -> None: ...


class LibraryPeer(Peer):
    """A library in a child process, which keeps the model loaded between runs."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> None:
        self.name, self.batches = name, (False, True) if name == OURS else (False,)
        self._child = ChildProcess(name, command, env, timeout_s)

    def start(self) -> None:
        self.version = str(self._child.start()["version"])

    def measure_rate(self, task: Task) -> float:
        fields = {name: value for name, value in task._asdict().items() if value}
        reply = self._child.request(fields, "seconds")
        return float(reply.get("tokens", task.tokens)) / float(reply["seconds"])

    def close(self) -> None:
        self._child.close()


class LlamaBench(Peer):
    """The llama-bench program, one process for each run."""

    name = LLAMA_BENCH

    def __init__(self, program: str, model: str, threads: int, timeout_s: float) -> None:
        self._command = [program, "-m", model, "-t", str(threads), "-ngl", "0", "-r", "1", "-o", "json"]
        self._timeout_s = timeout_s

    def start(self) -> None:
        """Make a first short run: it shows that the program works, and its build."""
        self.measure_rate(Task("tg", 1))

    def measure_rate(self, task: Task) -> float:
        prompt, generated = (task.tokens, 0) if task.kind == "pp" else (0, task.tokens)
        command = [*self._command, "-p", str(prompt), "-n", str(generated)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            raise PeerError(f"{self.name} did not end within {self._timeout_s:g} s") from None
        except OSError as error:
            raise PeerError(f"{self.name} cannot be started: {error.strerror}") from None
        if done.returncode != 0:
            raise PeerError(describe_exit(self.name, done.returncode, done.stderr))
        return self._parse(done.stdout, prompt, generated)

    def _parse(self, output: bytes, prompt: int, generated: int) -> float:
        try:
            (row,) = [r for r in json.loads(output) if (r["n_prompt"], r["n_gen"]) == (prompt, generated)]
            self.version = f"build {row['build_number']} ({row['build_commit']})"
            return float(row["avg_ts"])
        except (ValueError, KeyError, TypeError):
            raise PeerError(f"{self.name} printed no JSON of the known form: {output[:200]!r}") from None


class LlamaServer(Peer):
    """The llama-server program, alive between runs: many requests at once over loopback, each in its own slot."""

    name, batches = LLAMA_SERVER, (True,)

    def __init__(self, program: str, model: str, threads: int, slots: int, context: int, timeout_s: float) -> None:
        slot_context = -(-context // SLOT_CONTEXT_STEP) * SLOT_CONTEXT_STEP
        self._command = [program, "-m", model, "-t", str(threads), "-ngl", "0", "-np", str(slots)]
        self._command += ["-c", str(slots * slot_context), "--host", "127.0.0.1"]
        self._timeout_s = timeout_s
        self._running = ExitStack()

    def start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:  # a free port
            self._port = probe.getsockname()[1]
        server = ServerProcess(
            self.name, [*self._command, "--port", str(self._port)], self._timeout_s,
            url=f"http://127.0.0.1:{self._port}", shutdown_s=SHUTDOWN_S, max_error_lines=1, error=PeerError,
        )  # fmt: skip
        self.process = self._running.enter_context(server)
        self.version = _read_build(self._port)

    def measure_rate(self, task: Task) -> float:
        """Send all prompts at once; return the tokens per second while all of them are being answered."""
        common: dict[str, Any] = {
            "n_predict": task.tokens, "temperature": 0.0, "samplers": ["temperature"], "ignore_eos": True,
            "cache_prompt": False, "stream": True,
        }  # fmt: skip
        bodies = [json.dumps({"prompt": list(prompt), **common}).encode() for prompt in task.prompts]
        try:
            streams = request_streams(self._port, "/completion", bodies, self._timeout_s)
            answers = [count_tokens(stream, "tokens_predicted") for stream in streams]
            for generated in (answer[-1].tokens for answer in answers):
                if generated != task.tokens:
                    raise RequestFailedError("protocol", f"generated {generated} tokens instead of {task.tokens}")
            return shared_rate(answers)
        except RequestFailedError as error:
            self.process.require_alive()
            raise PeerError(f"{self.name}: {error}") from None

    def close(self) -> None:
        with suppress(PeerError):  # it had to be killed
            self._running.close()


def _read_build(port: int) -> str:
    _, body = BlockingClient(f"127.0.0.1:{port}").get("/props") or (0, b"{}")
    try:
        return str(json.loads(body)["build_info"])
    except (ValueError, KeyError, TypeError):
        return "unknown build"


class TokenCount(NamedTuple):
    """How many tokens an answer had at a time."""

    time: float
    tokens: int


Stream = list[tuple[float, bytes]]  # parts of a body, each with the time at which it was read


def request_streams(port: int, path: str, bodies: Sequence[bytes], timeout_s: float) -> list[Stream]:
    """Send all bodies at once to a local server and return the streams when the last has ended.

    On a small machine a client takes CPU time from the server that it measures: events are parsed afterwards.
    """

    async def read_one(body: bytes) -> Stream:
        with closing(Client(Address("http", "127.0.0.1", port, ""))) as client:
            async with client.request("POST", path, body) as response:
                if response.status != 200:
                    text = await response.text(http_client.MAX_ERROR_BYTES)
                    raise RequestFailedError("http", f"HTTP status {response.status}: {text}")
                return [(time.perf_counter(), part) async for part in response.parts()]

    async def read_all() -> list[Stream]:
        async with asyncio.timeout(timeout_s):
            return await asyncio.gather(*map(read_one, bodies))

    try:
        return run_event_loop(read_all())
    except TimeoutError:
        raise RequestFailedError("timeout", f"no answer within {timeout_s:g} s") from None


def count_tokens(stream: Stream, key: str) -> list[TokenCount]:
    """Return how the tokens of an answer grew; `key` is the count in each event."""
    parser, counts = EventParser(), list[TokenCount]()
    for moment, part in stream:
        for text in parser.feed(part):
            try:
                tokens = json.loads(text).get(key)
            except (ValueError, AttributeError):
                raise RequestFailedError("protocol", f"an event is not a JSON object: {text[:200]!r}") from None
            if tokens:
                counts.append(TokenCount(moment, tokens))
    if not counts or not all(type(count.tokens) is int for count in counts):
        raise RequestFailedError("protocol", f"no event has {key}")
    return counts


def shared_rate(answers: Sequence[Sequence[TokenCount]]) -> float:
    """Return tokens per second of all answers, from the first token of the last to the end of the first."""
    start = max(answer[0].time for answer in answers)
    end = min(next(count.time for count in answer if count.tokens == answer[-1].tokens) for answer in answers)
    if end <= start:
        raise RequestFailedError("protocol", "the first answer ended before the last began: use a longer --tg")
    return sum(_tokens_at(answer, end) - _tokens_at(answer, start) for answer in answers) / (end - start)


def _tokens_at(answer: Sequence[TokenCount], moment: float) -> int:
    return max((count.tokens for count in answer if count.time <= moment), default=0)


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


def run(recorder: Recorder, progress: StepProgress, model: Path, plan: Plan) -> None:
    """Start all peers that are installed, then measure them in turn."""
    checkpoint = open_checkpoint(model)
    tasks = _validated_tasks(checkpoint, plan)
    recorder.model = describe_model(model, progress)
    left_out: dict[str, str] = recorder.details.setdefault("left_out", {})
    command = [sys.executable, "-m", __name__, _child_settings(model, plan, tasks)]
    ours = LibraryPeer(OURS, command, package_environment(plan.threads), plan.timeout_s)
    peers: list[Peer] = [ours, *_find_peers(model, checkpoint, plan, tasks, left_out)]
    samples, rounds = dict[Task, dict[Peer, list[float]]](), plan.repetitions + 1
    try:
        for number in range(rounds):
            turn = list(reversed(peers)) if number and number % 2 == 0 else list(peers)
            for place, peer in enumerate(turn):
                what = f"{number} of {plan.repetitions}" if number else "loading and warming up"
                progress(f"{peer.name}: {what}", number + place / len(turn), rounds)
                try:
                    _measure(recorder, peer, tasks, samples) if number else peer.warm_up(tasks)
                except PeerError as error:
                    peer.close()
                    if peer is ours:  # there is nothing to compare with
                        raise
                    peers.remove(peer)
                    recorder.details.setdefault("failed", {})[peer.name] = str(error)
    finally:
        for peer in peers:
            peer.close()


def _measure(
    recorder: Recorder, peer: Peer, tasks: Sequence[Task], samples: dict[Task, dict[Peer, list[float]]]
) -> None:
    """Run each task once and make all its results anew: their ratios to this worker change with every sample."""
    for task in filter(peer.can_run, tasks):
        rate = peer.measure_rate(task)
        samples.setdefault(task, {}).setdefault(peer, []).append(rate)
        estimates = {one.name: statistics.estimate(rates).value for one, rates in samples[task].items()}
        for one, rates in samples[task].items():
            ratio = estimates[OURS] / estimates[one.name] if OURS in estimates else None
            fields = {"peer": one.name, "version": one.version, "ours_over_peer": ratio}
            recorder.add_result(Result.from_samples(f"{task.name}/{one.name}", "tok/s", rates, "higher", **fields))


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
        needed = f"{longest.name} needs {_context_of(longest)} tokens, the model's context has {context}"
        raise ContextLengthError(f"{needed}: use a smaller --{longest.kind}", longest.kind)
    return tasks


def _context_of(task: Task) -> int:
    """Return the tokens of the longest sequence."""
    return task.tokens + max(map(len, task.prompts), default=0)


def _child_settings(model: Path, plan: Plan, tasks: Sequence[Task]) -> str:
    settings = {"model": str(model.absolute()), "threads": plan.threads, "context": max(map(_context_of, tasks))}
    settings |= {"device": plan.device, "backend": plan.backend, "batch": max([1, *plan.parallel_batches])}
    return json.dumps(settings)


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
    slots, context = max(len(task.prompts) for task in tasks), max(map(_context_of, tasks))
    return LlamaServer(program, str(model), plan.threads, slots, context, plan.timeout_s)


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


def load_worker(settings: dict[str, Any]) -> tuple[str, library_child.Handler]:
    """Prefill and decode as `bench e2e` runs them; with prompts, answer all of them at once."""
    checkpoint = open_checkpoint(Path(settings["model"]))
    on_cpu = settings["backend"] in ("auto", "cpu") and not settings["device"].startswith("cuda")
    backend = select_backend(settings["device"], settings["backend"], settings.get("threads") if on_cpu else None)
    config = read_model_config(checkpoint)
    kv_type = resolve_kv_type(backend)
    backend.load_kernels(checkpoint, config, kv_type)
    model = load_model(checkpoint, backend, config, settings["context"])
    harness = EngineHarness(model, settings["context"], settings.get("batch", 1), kv_type=kv_type)

    def measure(kind: str, tokens: int, prompts: Sequence[list[int]] = ()) -> dict[str, float]:
        single = harness.prefill if kind == "pp" else harness.decode
        timed = harness.decode_prompts(prompts, tokens) if prompts else single(0, tokens, 1)
        return {"seconds": timed.seconds, "tokens": timed.tokens}

    return __version__, measure


if __name__ == "__main__":
    library_child.serve(load_worker, json.loads(sys.argv[1]))
