"""Programs to compare this worker with, and how each is measured; peer_suite.py says what is compared.

A peer is a library in a child process, llama-bench, or a server. llama-bench loads the model for each run, times
without loading and does not sample; all others sample greedily. Many requests at once are sent over loopback by one
client, to llama-server with a slot for each prompt and to `serve` with a batch of that size, both without a prefix
cache: the rate counts the tokens of all answers from the first token of the last to the end of the first. As a program
this module is the child that runs this worker, by the protocol of library_child.py.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from .. import __version__
from ..backends import resolve_kv_type, select_backend
from ..models import load_model, read_model_config
from ..weights import open_checkpoint
from . import http_client, library_child
from .engine_harness import EngineHarness
from .http_client import Address, BlockingClient, Client, EventParser, RequestFailedError, run_event_loop
from .processes import ChildFailedError, ChildProcess, describe_exit
from .server_process import ServerProcess, worker_server

PeerError = ChildFailedError
OURS, LLAMA_BENCH, LLAMA_SERVER = "llm-worker-rbee", "llama-bench", "llama-server"
WARM_UP_TOKENS = 8
BATCH_WARM_UP_TOKENS = 32  # the first answer must not end before the last has begun
LONG_PROMPT = 2048  # from so many tokens on llama-bench makes no run before the one that it times
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
        self.name = name
        self._child = ChildProcess(name, command, env, timeout_s)

    def start(self) -> None:
        self.version = str(self._child.start()["version"])

    def measure_rate(self, task: Task) -> float:
        reply = self._child.request({"kind": task.kind, "tokens": task.tokens}, "seconds")
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

    def warm_up(self, tasks: Sequence[Task]) -> None:
        """Start only: each run is a process of its own, which warms up itself."""
        self.start()

    def measure_rate(self, task: Task) -> float:
        prompt, generated = (task.tokens, 0) if task.kind == "pp" else (0, task.tokens)
        command = [*self._command, "-p", str(prompt), "-n", str(generated)]
        command += ["--no-warmup"] if prompt >= LONG_PROMPT else []
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


class TokenCount(NamedTuple):
    """How many tokens an answer had at a time."""

    time: float
    tokens: int


Stream = list[tuple[float, bytes]]  # parts of a body, each with the time at which it was read


class ServerPeer(Peer):
    """A server that is alive between runs and gets many requests at once over loopback."""

    batches = (True,)
    path: str  # of the requests

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._running = ExitStack()

    def make_process(self) -> ServerProcess:
        """Return the server, not started."""
        raise NotImplementedError

    def read_version(self, authority: str) -> str:
        """Return the version of the running server."""
        raise NotImplementedError

    def make_body(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        """Return the request for so many tokens, sampled greedily and streamed."""
        raise NotImplementedError

    def count(self, stream: Stream) -> list[TokenCount]:
        """Return how the tokens of an answer grew."""
        raise NotImplementedError

    def start(self) -> None:
        self.process = self._running.enter_context(self.make_process())
        self.version = self.read_version(urlsplit(self.process.url).netloc)

    def measure_rate(self, task: Task) -> float:
        """Send all prompts at once; return the tokens per second while all of them are being answered."""
        bodies = [json.dumps(self.make_body(prompt, task.tokens)).encode() for prompt in task.prompts]
        try:
            streams = request_streams(urlsplit(self.process.url).port or 0, self.path, bodies, self._timeout_s)
            answers = list(map(self.count, streams))
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


class LlamaServer(ServerPeer):
    """The llama-server program, with a slot for each request."""

    name, path = LLAMA_SERVER, "/completion"

    def __init__(self, program: str, model: str, threads: int, slots: int, context: int, timeout_s: float) -> None:
        super().__init__(timeout_s)
        slot_context = -(-context // SLOT_CONTEXT_STEP) * SLOT_CONTEXT_STEP
        self._command = [program, "-m", model, "-t", str(threads), "-ngl", "0", "-np", str(slots)]
        self._command += ["-c", str(slots * slot_context), "--host", "127.0.0.1"]

    def make_process(self) -> ServerProcess:
        with socket.create_server(("127.0.0.1", 0)) as probe:  # a free port
            port = probe.getsockname()[1]
        return ServerProcess(
            self.name, [*self._command, "--port", str(port)], self._timeout_s, url=f"http://127.0.0.1:{port}",
            shutdown_s=SHUTDOWN_S, max_error_lines=1, error=PeerError,
        )  # fmt: skip

    def read_version(self, authority: str) -> str:
        _, body = BlockingClient(authority).get("/props") or (0, b"{}")
        try:
            return str(json.loads(body)["build_info"])
        except (ValueError, KeyError, TypeError):
            return "unknown build"

    def make_body(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        return {
            "prompt": list(prompt), "n_predict": tokens, "temperature": 0.0, "samplers": ["temperature"],
            "ignore_eos": True, "cache_prompt": False, "stream": True,
        }  # fmt: skip

    def count(self, stream: Stream) -> list[TokenCount]:
        return count_tokens(stream, "tokens_predicted")


class WorkerServer(ServerPeer):
    """This worker as `serve` runs it: `args` are options of `serve`."""

    name, path = OURS, "/v1/completions"

    def __init__(self, model: str, batch: int, context: int, args: Sequence[str], timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._args = ["-m", model, "--max-batch", str(batch), "--max-context", str(context), "--no-prefix-cache", *args]

    def make_process(self) -> ServerProcess:
        process = worker_server(self._args, timeout_s=self._timeout_s)
        process.name, process.max_error_lines, process.error = f"{self.name} serve", 1, PeerError
        return process

    def read_version(self, authority: str) -> str:
        return __version__

    def make_body(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        return {
            "prompt": list(prompt), "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip

    def count(self, stream: Stream) -> list[TokenCount]:
        return count_chunks(stream)


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


def parse_events(stream: Stream) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield each event, a JSON object, with the time at which it was complete."""
    parser = EventParser()
    for moment, part in stream:
        for text in parser.feed(part):
            if text == "[DONE]":
                return
            try:
                event = json.loads(text)
            except ValueError:
                event = None
            if not isinstance(event, dict):
                raise RequestFailedError("protocol", f"an event is not a JSON object: {text[:200]!r}")
            if event.get("error"):
                raise RequestFailedError("server", f"an event is an error: {text[:200]}")
            yield moment, event


def count_tokens(stream: Stream, key: str) -> list[TokenCount]:
    """Return how the tokens of an answer grew; `key` is the count in each event."""
    counts = [TokenCount(moment, event[key]) for moment, event in parse_events(stream) if event.get(key)]
    if not counts or not all(type(count.tokens) is int for count in counts):
        raise RequestFailedError("protocol", f"no event has {key}")
    return counts


def count_chunks(stream: Stream) -> list[TokenCount]:
    """Return how the tokens of a completion grew, from the chunks and the usage at the end.

    A chunk is a token, or several if the server was late: then the tokens are spread evenly over the chunks.
    """
    moments, total = list[float](), None
    for moment, event in parse_events(stream):
        if event.get("choices"):
            moments.append(moment)
        total = (event.get("usage") or {}).get("completion_tokens", total)
    if not moments or type(total) is not int:
        raise RequestFailedError("protocol", "no chunk, or no usage at the end")
    return [TokenCount(moment, round(n * total / len(moments))) for n, moment in enumerate(moments, 1)]


def shared_rate(answers: Sequence[Sequence[TokenCount]]) -> float:
    """Return tokens per second of all answers, from the first token of the last to the end of the first."""
    start = max(answer[0].time for answer in answers)
    end = min(next(count.time for count in answer if count.tokens == answer[-1].tokens) for answer in answers)
    if end <= start:
        raise RequestFailedError("protocol", "the first answer ended before the last began: use a longer --tg")
    return sum(_tokens_at(answer, end) - _tokens_at(answer, start) for answer in answers) / (end - start)


def _tokens_at(answer: Sequence[TokenCount], moment: float) -> int:
    return max((count.tokens for count in answer if count.time <= moment), default=0)


def load_worker(settings: dict[str, Any]) -> tuple[str, library_child.Handler]:
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

    return __version__, measure


if __name__ == "__main__":
    library_child.serve(load_worker, json.loads(sys.argv[1]))
