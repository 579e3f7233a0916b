"""Programs that embed the same inputs: this worker, sentence-transformers and llama-server; the child of this worker.

This worker and sentence-transformers are child processes, timed inside: their result is an array. llama-server is timed
from sending a request to the end of its answer, over loopback, with base64 for short answers; parsing does not count.
One sequence a step is its fastest on a CPU: sequences of one step pay for the attention of all.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from llm_worker_rbee import __version__
from llm_worker_rbee.embedder import Embedder

from ..peers import library_child
from ..peers.programs import ALL_LAYERS, LLAMA_SERVER, OURS, PeerError
from ..peers.servers import llama_server_process, read_llama_build
from ..processes import ChildProcess, library_environment, package_environment
from .retrieval import Vectors

SENTENCE_TRANSFORMERS = "sentence-transformers"
TOKENIZED = f"{OURS} tokenized"  # the same without tokenizing
WARM_UP_INPUTS = 32
CONTEXT_STEP = 512  # the context of llama-server is a multiple of this

Inputs = Sequence[str] | Sequence[Sequence[int]]


class EmbedTask(NamedTuple):
    """Inputs to embed, `batch` of them a call."""

    name: str
    inputs: Inputs
    batch: int
    tokens: int  # of all inputs

    @property
    def is_tokenized(self) -> bool:
        return not isinstance(self.inputs[0], str)

    def calls(self) -> list[Inputs]:
        return [self.inputs[i : i + self.batch] for i in range(0, len(self.inputs), self.batch)]


class EmbedSide:
    """A program that embeds; `row` names the types of the weights that it is measured with, "" for all."""

    name: str
    row = ""
    version = ""
    settings: Mapping[str, Any] = {}
    needs_texts = False  # it does not take token ids

    @property
    def title(self) -> str:
        """The row and the name."""
        return f"{self.row} {self.name}".strip()

    def start(self) -> None:
        """Start it and load the model; raise PeerError on failure."""

    def seconds(self, task: EmbedTask, name: str) -> float:
        """Return how long all calls of a task take; `name` is one of `names`."""
        raise NotImplementedError

    def names(self, task: EmbedTask) -> list[str]:
        """Return the names of the measurements of a task; none if this side needs texts and the task has ids."""
        return [] if self.needs_texts and task.is_tokenized else [self.name]

    def warm_up(self, tasks: Sequence[EmbedTask], *, whole: bool) -> None:
        """Run each task once, or its first inputs."""
        for task in tasks:
            few = task if whole else task._replace(inputs=task.inputs[:WARM_UP_INPUTS])
            for name in self.names(task):
                self.seconds(few, name)

    def close(self) -> None:
        """End it."""


class ChildSide(EmbedSide):
    """A library in a child process: this worker or sentence-transformers."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], timeout_s: float, row: str = ""
    ) -> None:
        self.name, self.row, self.needs_texts = name, row, name != OURS
        self._child = ChildProcess(name, command, env, timeout_s)

    def start(self) -> None:
        greeting = self._child.start()
        self.version, self.settings = str(greeting["version"]), dict(greeting.get("settings") or {})

    def names(self, task: EmbedTask) -> list[str]:
        inherited = super().names(task)
        return inherited if inherited != [OURS] else [TOKENIZED] if task.is_tokenized else [OURS, TOKENIZED]

    def seconds(self, task: EmbedTask, name: str) -> float:
        message = {"inputs": task.inputs, "batch": task.batch, "tokenized": name == TOKENIZED}
        return float(self._child.request(message, "seconds")["seconds"])

    def vectors(self, texts: Sequence[str], file: Path) -> Vectors:
        """Return normalized embeddings, which come back through a file."""
        self._child.request({"inputs": list(texts), "batch": len(texts), "file": str(file)}, "seconds")
        return normalized(np.load(file, allow_pickle=False))

    def close(self) -> None:
        self._child.close()


class LlamaServerSide(EmbedSide):
    """llama-server with --embedding: a request a call, one sequence a step."""

    name = LLAMA_SERVER

    def __init__(
        self, program: str, model: Path, threads: int, longest: int, timeout_s: float, *, on_gpu: bool, row: str
    ) -> None:
        self.row, self._timeout_s = row, timeout_s
        context = str(-(-longest // CONTEXT_STEP) * CONTEXT_STEP)
        options = ["-t", str(threads), "-ngl", ALL_LAYERS if on_gpu else "0", "-np", "1"]
        options += ["-c", context, "-b", context, "-ub", context, "--embedding"]
        self._command = [program, "-m", str(model), *options]
        self.settings = {"options": " ".join(options)}
        self._running = ExitStack()

    def start(self) -> None:
        self._process = self._running.enter_context(llama_server_process(self._command, self._timeout_s))
        self.version = read_llama_build(urlsplit(self._process.url).netloc)

    def seconds(self, task: EmbedTask, name: str) -> float:
        bodies = [json.dumps({"input": inputs, "encoding_format": "base64"}).encode() for inputs in task.calls()]
        connection = HTTPConnection(urlsplit(self._process.url).netloc, timeout=self._timeout_s)
        start = time.perf_counter()
        answers = [self._post(connection, body) for body in bodies]
        passed = time.perf_counter() - start
        connection.close()
        count = sum(map(count_embeddings, answers))
        if count != len(task.inputs):
            raise PeerError(f"{self.name} answered {count} embeddings to {len(task.inputs)} inputs")
        return passed

    def _post(self, connection: HTTPConnection, body: bytes) -> bytes:
        try:
            connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
        except (OSError, HTTPException) as error:
            self._process.require_alive()
            raise PeerError(f"{self.name}: {error}") from None
        if response.status != 200:
            raise PeerError(f"{self.name}: HTTP status {response.status}: {answer[:200].decode(errors='replace')}")
        return answer

    def close(self) -> None:
        with suppress(PeerError):  # it had to be killed
            self._running.close()


def count_embeddings(answer: bytes) -> int:
    """Return the number of embeddings in an answer of /v1/embeddings; raise unless all are finite numbers."""
    try:
        rows = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in json.loads(answer)["data"]]
    except (ValueError, KeyError, TypeError):
        raise PeerError(f"{LLAMA_SERVER} answered {answer[:200]!r}, which has no embeddings") from None
    if not all(row.size and np.isfinite(row).all() for row in rows):
        raise PeerError(f"{LLAMA_SERVER}: an embedding is not of finite numbers")
    return len(rows)


def normalized(rows: Any) -> Vectors:
    """Return rows of length 1."""
    values = np.asarray(rows, np.float64)
    return np.asarray(values / np.linalg.norm(values, axis=1, keepdims=True), np.float32)


def worker_side(model: Path, settings: Mapping[str, Any], threads: int, timeout_s: float, row: str = "") -> ChildSide:
    """Return this worker, in a process of its own."""
    text = json.dumps({"model": str(model.absolute()), "threads": threads, **settings})
    command = [sys.executable, "-m", __name__, text]
    return ChildSide(OURS, command, package_environment(threads), timeout_s, row)


def sentence_transformers_side(python: str, model: Path, threads: int, timeout_s: float) -> ChildSide:
    """Return sentence-transformers under an interpreter that has it, in float32 on the CPU."""
    source = Path(library_child.__file__).read_text(encoding="utf-8")
    text = json.dumps({"model": str(model.absolute()), "threads": threads})
    env = library_environment(threads) | {"CUDA_VISIBLE_DEVICES": ""}
    return ChildSide(SENTENCE_TRANSFORMERS, [python, "-c", source, SENTENCE_TRANSFORMERS, text], env, timeout_s)


def load_worker(settings: dict[str, Any]) -> library_child.Loaded:
    """Embed with `Embedder`, as a program that uses this package does."""
    on_cpu = settings["backend"] in ("auto", "cpu") and not settings["device"].startswith("cuda")
    embedder = Embedder(
        settings["model"],
        device=settings["device"],
        backend=settings["backend"],
        threads=settings["threads"] if on_cpu else None,
        quantize=settings.get("quantize"),
    )

    def embed(inputs: list[Any], batch: int, tokenized: bool = False, file: str = "") -> library_child.Reply:
        batches = embedder.encode(inputs, truncate=True) if tokenized else inputs
        start = time.perf_counter()
        calls = (batches[i : i + batch] for i in range(0, len(batches), batch))
        rows = [embedder.embed(call, truncate=True, progress=False) for call in calls]
        passed = time.perf_counter() - start
        if file:
            np.save(file, np.concatenate(rows))
        return {"seconds": passed}

    used = {"backend": embedder.backend, "threads": settings["threads"], "types": embedder.quant}
    return __version__, used, embed


if __name__ == "__main__":
    library_child.serve(load_worker, json.loads(sys.argv[1]))
