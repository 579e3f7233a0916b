"""A real server on a free port, in a thread, and a tiny model whose answers are known.

The model: `>` is followed by "Helo wrd" and the end; `#` by abababab without end; `?` and the assistant's turn by
digits, drawn at random, without end; everything else by itself.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
import uvloop

from llm_worker_rbee import LLM
from llm_worker_rbee.engine.engine import Engine
from llm_worker_rbee.progress import OnStage
from llm_worker_rbee.server.app import application
from llm_worker_rbee.server.model_source import fixed_front
from llm_worker_rbee.server.pooling import PoolingService
from llm_worker_rbee.server.serve import connection_class
from llm_worker_rbee.server.settings import ServerSettings
from llm_worker_rbee.server.worker import Worker
from llm_worker_rbee.token_engine.protocol import ModelInfo
from llm_worker_rbee.token_engine.threaded import ThreadedEngine
from tests.helpers import tiny_models

CONTEXT = 65_536
SAID = "Helo wrd"
LIMIT_S = 60
CHAT = [{"role": "user", "content": "#"}]


def write_model(path: Path) -> Path:
    """Write the model of the server tests."""
    digits = {ord(d): 0.6 + 0.01 * i for i, d in enumerate("0123456789")}
    follows: dict[int, Any] = {i: i for i in range(256) if chr(i) not in "ab0123456789>#?" + SAID}
    follows |= {ord("#"): ord("a"), ord("a"): ord("b"), ord("b"): ord("a"), tiny_models.ASSISTANT: digits}
    follows |= {ord("?"): digits, **{ord(d): digits for d in "0123456789"}, **tiny_models.say(SAID)}
    return tiny_models.write_scripted(path, follows, context=CONTEXT)


def ids(text: str) -> list[int]:
    """Return a prompt as token ids."""
    return list(text.encode())


class Server:
    """A server in a thread; tests may read its `worker`."""

    def __init__(
        self, load: Callable[..., LLM], *, http: str = "httptools", takes_on_stage: bool = False,
        pooling: dict[str, PoolingService] | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        """`load` makes the model; with `takes_on_stage` it gets the callback for loading stages."""
        made = load if takes_on_stage else lambda on_stage: load()
        self._loaded: list[LLM] = []

        def load_engine(on_stage: OnStage) -> tuple[Engine, ModelInfo]:
            self._loaded.append(made(on_stage))
            return self.llm.engine, self.llm.info

        engine = ThreadedEngine(load_engine)
        own = ServerSettings(model_ref="tiny", **settings)
        self.worker = fixed_front(own, engine, lambda info: self.llm, pooling or {})
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(application(self.worker), log_level="error", http=connection_class(self.worker))
        self._server = uvicorn.Server(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        headers = {} if (key := settings.get("api_key")) is None else {"authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=LIMIT_S)

    def __enter__(self) -> Server:
        self._thread.start()
        until(lambda: self._server.started)
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.should_exit = True
        self.http.close()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the server did not stop"

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self._loop = runner.get_loop()
            runner.run(self._server.serve(sockets=[self.socket]))

    @property
    def llm(self) -> LLM:
        """The model with its engine, once it is loaded."""
        return self._loaded[0]

    def ready(self) -> Server:
        """Wait until all models are loaded, or one has failed."""
        worker = self.worker
        members = worker.pool.members
        until(lambda: worker.failure or (members and all(member.state == "loaded" for member in members)))
        return self

    @property
    def chat(self) -> Worker:
        """The chat model of the server."""
        assert self.worker.chat is not None
        return self.worker.chat

    @property
    def pooling(self) -> list[Any]:
        """The pooling models of the server."""
        return [member.service for member in self.worker.pool.members[1:]]

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    def soon(self, made: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the server's loop; return its future."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(made, self._loop)

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **options})

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def job(self, **fields: Any) -> str:
        """Start a job; return its id."""
        reply = self.post("/v1/jobs", {"prompt": "#", "max_tokens": 5, "temperature": 0, **fields})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["job_id"])

    def events(self, job: str) -> list[Any]:
        """Return all events of a job."""
        return events(self.http.get(f"/v1/jobs/{job}/stream").text)

    def require_alive(self) -> None:
        """Require that an ordinary request is answered."""
        reply = self.post("/v1/jobs", {"prompt": ">", "max_tokens": 20, "temperature": 0, "stream": False})
        assert (reply.status_code, reply.json()["text"], reply.json()["stop_reason"]) == (200, SAID, "EOS")

    def require_idle(self) -> None:
        """Require that no request or block is left and the scheduler is consistent."""
        scheduler = self.llm.engine.scheduler
        until(lambda: self.chat.num_open == 0 and not scheduler.has_work)
        until(lambda: scheduler.pool.num_free == scheduler.pool.n_blocks)
        scheduler.check()
        assert (self.chat.num_unstarted, self.chat.admission.load) == (0, (0, 0, 0))


def step_through(run: Callable[[Any], Any], engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass every step through `run`; async scheduling is turned off."""
    monkeypatch.setattr(engine.pipeline, "is_enabled", False)
    monkeypatch.setattr(engine.runner, "run", lambda scheduled, *_: run(scheduled))


def until(holds: Callable[[], object]) -> None:
    """Wait until the condition holds; fail after LIMIT_S."""
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end, "the condition did not become true"
        threading.Event().wait(0.002)


def events(text: str) -> list[Any]:
    """Return the events of a stream that ends with [DONE]."""
    lines = [line[6:] for line in text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def is_decoding(server: Server) -> bool:
    """Return whether any request has an output token."""
    running = server.llm.engine.scheduler.running
    return any(request.num_tokens > request.num_prompt_tokens for request in running)


def connected(server: Server, receive_buffer: int | None = None) -> socket.socket:
    """Return a connected socket, with a receive buffer of that size where one is given."""
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(LIMIT_S)
    client.connect(("127.0.0.1", server.port))
    return client


def read_body(client: socket.socket) -> bytes:
    """Return the body of the next reply, whose headers give its length."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(65536)
    head, _, rest = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(rest) < length:
        rest += client.recv(1 << 20)
    return rest
