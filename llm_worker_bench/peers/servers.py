"""Servers as peers: llama-server and `serve`, which answer many requests at once over loopback.

One client sends all prompts, to llama-server with a slot for each and to `serve` with a batch of that size, both
without a prefix cache: the rate counts the tokens of all answers from the first token of the last to the end of the
first.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any
from urllib.parse import urlsplit

from llm_worker_rbee import __version__

from .. import http_client
from ..http_client import Address, BlockingClient, Client, EventParser, RequestFailedError, run_event_loop
from ..server_process import ServerProcess, worker_server
from .programs import ALL_LAYERS, LLAMA_SERVER, OURS, Peer, PeerError, Task, TokenCount

SLOT_CONTEXT_STEP = 256  # the context of a llama-server slot is a multiple of this
SHUTDOWN_S = 5


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
        return self.measure_batch_rate(task)

    def run_batch(self, task: Task) -> list[list[TokenCount]]:
        bodies = [json.dumps(self.make_body(prompt, task.tokens)).encode() for prompt in task.prompts]
        try:
            streams = request_streams(urlsplit(self.process.url).port or 0, self.path, bodies, self._timeout_s)
            answers = list(map(self.count, streams))
            for generated in (answer[-1].tokens for answer in answers):
                if generated != task.tokens:
                    raise RequestFailedError("protocol", f"generated {generated} tokens instead of {task.tokens}")
            return answers
        except RequestFailedError as error:
            self.process.require_alive()
            raise PeerError(f"{self.name}: {error}") from None

    def close(self) -> None:
        with suppress(PeerError):  # it had to be killed
            self._running.close()


class LlamaServer(ServerPeer):
    """The llama-server program, with a slot for each request."""

    name, path = LLAMA_SERVER, "/completion"

    def __init__(
        self, program: str, model: str, threads: int, slots: int, context: int, timeout_s: float, on_gpu: bool = False
    ) -> None:
        super().__init__(timeout_s)
        slot_context = -(-context // SLOT_CONTEXT_STEP) * SLOT_CONTEXT_STEP
        layers = ALL_LAYERS if on_gpu else "0"
        options = ["-t", str(threads), "-ngl", layers, "-np", str(slots), "-c", str(slots * slot_context)]
        self._command = [program, "-m", model, *options]
        self.settings = {"options": " ".join(options)}

    def make_process(self) -> ServerProcess:
        return llama_server_process(self._command, self._timeout_s)

    def read_version(self, authority: str) -> str:
        return read_llama_build(authority)

    def make_body(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        return {
            "prompt": list(prompt),
            "n_predict": tokens,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
        }

    def count(self, stream: Stream) -> list[TokenCount]:
        return count_tokens(stream, "tokens_predicted")


def llama_server_process(command: Sequence[str], timeout_s: float) -> ServerProcess:
    """Return llama-server at a free port of loopback, not started."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return ServerProcess(
        LLAMA_SERVER,
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        timeout_s,
        url=f"http://127.0.0.1:{port}",
        shutdown_s=SHUTDOWN_S,
        max_error_lines=1,
        error=PeerError,
    )


def read_llama_build(authority: str) -> str:
    """Return the build of a running llama-server."""
    _, body = BlockingClient(authority).get("/props") or (0, b"{}")
    try:
        return str(json.loads(body)["build_info"])
    except (ValueError, KeyError, TypeError):
        return "unknown build"


class WorkerServer(ServerPeer):
    """This worker as `serve` runs it: `args` are options of `serve`."""

    name, path = OURS, "/v1/completions"

    def __init__(self, model: str, batch: int, context: int, args: Sequence[str], timeout_s: float) -> None:
        super().__init__(timeout_s)
        options = ["--max-batch", str(batch), "--max-context", str(context), "--no-prefix-cache", *args]
        self._args = ["-m", model, *options]
        self.settings = {"options": " ".join(options)}

    def make_process(self) -> ServerProcess:
        process = worker_server(self._args, timeout_s=self._timeout_s)
        process.name, process.max_error_lines, process.error = f"{self.name} serve", 1, PeerError
        return process

    def read_version(self, authority: str) -> str:
        return __version__

    def make_body(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        return {
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

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
