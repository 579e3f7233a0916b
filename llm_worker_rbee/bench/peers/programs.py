"""The programs that are measured: a library in a child process, llama-bench, llama-server.

llama-bench loads the model for each run and times without loading. llama-server gets a slot for each prompt, the token
ids themselves and its cheapest greedy sampling. A failure is a `PeerError` of one line; every wait is bounded.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import uvloop

from ..http_client import Address, BlockingClient, Client, EventParser, RequestFailedError
from ..processes import ChildFailedError, ChildProcess, describe_exit

PeerError = ChildFailedError
HEALTH_POLL_S = 0.05
SLOT_CONTEXT_STEP = 256  # the context of a llama-server slot is a multiple of this
SHUTDOWN_S = 5
MAX_ERROR_BYTES = 1 << 14


class Task(NamedTuple):
    """`pp` or `tg` of a length; with prompts, answers of that length to all of them at once."""

    kind: str
    tokens: int
    prompts: tuple[tuple[int, ...], ...] = ()

    @property
    def name(self) -> str:
        """`pp512`, `tg128@b16`."""
        return f"{self.kind}{self.tokens}" + (f"@b{len(self.prompts)}" if self.prompts else "")


class Peer(Protocol):
    """A program to compare with; `version` is known once it has started."""

    name: str
    version: str

    def can_run(self, task: Task) -> bool:
        """Return whether it can run this task."""

    def start(self) -> None:
        """Start it and load the model; raise PeerError on failure."""

    def measure_rate(self, task: Task) -> float:
        """Return the tokens per second of one run."""

    def close(self) -> None:
        """End it."""


class LibraryPeer:
    """A library in a child process, which keeps the model loaded between runs."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], timeout_s: float, *, batches: bool = False
    ) -> None:
        self.name, self.version = name, ""
        self._batches = batches
        self._child = ChildProcess(name, command, env, timeout_s)

    def can_run(self, task: Task) -> bool:
        return self._batches or not task.prompts

    def start(self) -> None:
        self.version = str(self._child.start()["version"])

    def measure_rate(self, task: Task) -> float:
        fields = {name: value for name, value in task._asdict().items() if value}
        reply = self._child.request(fields, "seconds")
        return float(reply.get("tokens", task.tokens)) / float(reply["seconds"])

    def close(self) -> None:
        self._child.close()


class LlamaBench:
    """The llama-bench program, one process for each run."""

    name = "llama-bench"

    def __init__(self, program: str, model: str, threads: int, timeout_s: float) -> None:
        self.version = ""
        self._command = [program, "-m", model, "-t", str(threads), "-ngl", "0", "-r", "1", "-o", "json"]
        self._timeout_s = timeout_s

    def can_run(self, task: Task) -> bool:
        return not task.prompts

    def start(self) -> None:
        """Make a first short run: it shows that the program works, and its build."""
        self.measure_rate(Task("tg", 1))

    def measure_rate(self, task: Task) -> float:
        prompt, generated = (task.tokens, 0) if task.kind == "pp" else (0, task.tokens)
        try:
            done = subprocess.run(
                [*self._command, "-p", str(prompt), "-n", str(generated)], capture_output=True, timeout=self._timeout_s
            )
        except subprocess.TimeoutExpired:
            raise PeerError(f"{self.name} did not end within {self._timeout_s:g} s") from None
        except OSError as error:
            raise PeerError(f"{self.name} cannot be started: {error.strerror}") from None
        if done.returncode != 0:
            raise PeerError(describe_exit(self.name, done.returncode, done.stderr))
        return self._parse(done.stdout, prompt, generated)

    def close(self) -> None:
        pass

    def _parse(self, output: bytes, prompt: int, generated: int) -> float:
        try:
            (row,) = [r for r in json.loads(output) if (r["n_prompt"], r["n_gen"]) == (prompt, generated)]
            self.version = f"build {row['build_number']} ({row['build_commit']})"
            return float(row["avg_ts"])
        except (ValueError, KeyError, TypeError):
            raise PeerError(f"{self.name} printed no JSON of the known form: {output[:200]!r}") from None


class LlamaServer:
    """The llama-server program, alive between runs: many requests at once over loopback, each in its own slot."""

    name = "llama-server"

    def __init__(self, program: str, model: str, threads: int, slots: int, context: int, timeout_s: float) -> None:
        self.version = ""
        slot_context = -(-context // SLOT_CONTEXT_STEP) * SLOT_CONTEXT_STEP
        self._command = [program, "-m", model, "-t", str(threads), "-ngl", "0", "-np", str(slots)]
        self._command += ["-c", str(slots * slot_context), "--host", "127.0.0.1"]
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def can_run(self, task: Task) -> bool:
        return bool(task.prompts)

    def start(self) -> None:
        self._port = _find_free_port()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        command = [*self._command, "--port", str(self._port)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            self._output.close()
            raise PeerError(f"{self.name} cannot be started: {error.strerror}") from None
        deadline = time.monotonic() + self._timeout_s
        client = BlockingClient(f"127.0.0.1:{self._port}", self._timeout_s)
        while not client.is_healthy():
            if self._process.poll() is not None:
                raise PeerError(self._describe_end())
            if time.monotonic() > deadline:
                raise PeerError(f"{self.name} was not ready within {self._timeout_s:g} s")
            time.sleep(HEALTH_POLL_S)
        self.version = _read_build(client)
        client.close()

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
            for answer in answers:
                if answer[-1].tokens != task.tokens:
                    raise StreamError(f"generated {answer[-1].tokens} tokens instead of {task.tokens}")
            return shared_rate(answers)
        except StreamError as error:
            assert self._process is not None
            ended = self._process.poll() is not None
            raise PeerError(self._describe_end() if ended else f"{self.name}: {error}") from None

    def close(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()
        self._process = None

    def _describe_end(self) -> str:
        assert self._process is not None
        status = self._process.wait(self._timeout_s)
        self._output.seek(0)
        return describe_exit(self.name, status, self._output.read())


def _read_build(client: BlockingClient) -> str:
    _, body = client.get("/props") or (0, b"{}")
    try:
        return str(json.loads(body)["build_info"])
    except (ValueError, KeyError, TypeError):
        return "unknown build"


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class StreamError(Exception):
    """A stream that failed, or that has not the known form; says why in one line."""


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
        client, stream = Client(Address("http", "127.0.0.1", port, ""), {}), Stream()
        try:
            async with client.request("POST", path, body) as response:
                if response.status != 200:
                    raise StreamError(f"HTTP status {response.status}: {await response.text(MAX_ERROR_BYTES)}")
                async for part in response.parts():
                    stream.append((time.perf_counter(), part))
        finally:
            client.close()
        return stream

    async def read_all() -> list[Stream]:
        async with asyncio.timeout(timeout_s):
            return await asyncio.gather(*map(read_one, bodies))

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(read_all())
    except TimeoutError:
        raise StreamError(f"no answer within {timeout_s:g} s") from None
    except RequestFailedError as error:
        raise StreamError(str(error)) from None


def count_tokens(stream: Stream, key: str) -> list[TokenCount]:
    """Return how the tokens of an answer grew; `key` is the count in each event."""
    parser, counts = EventParser(), list[TokenCount]()
    for moment, part in stream:
        for text in parser.feed(part):
            try:
                tokens = json.loads(text).get(key)
            except (ValueError, AttributeError):
                raise StreamError(f"an event is not a JSON object: {text[:200]!r}") from None
            if tokens:
                counts.append(TokenCount(moment, tokens))
    if not counts or not all(type(count.tokens) is int for count in counts):
        raise StreamError(f"no event has {key}")
    return counts


def shared_rate(answers: Sequence[Sequence[TokenCount]]) -> float:
    """Return tokens per second of all answers, from the first token of the last to the end of the first."""
    start = max(answer[0].time for answer in answers)
    end = min(next(count.time for count in answer if count.tokens == answer[-1].tokens) for answer in answers)
    if end <= start:
        raise StreamError("the first answer ended before the last began: use a longer --tg")
    return sum(_tokens_at(answer, end) - _tokens_at(answer, start) for answer in answers) / (end - start)


def _tokens_at(answer: Sequence[TokenCount], moment: float) -> int:
    return max((count.tokens for count in answer if count.time <= moment), default=0)
