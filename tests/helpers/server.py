"""A real server on a free port of this machine, in a thread; and a small model whose words are known.

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
from llm_worker_rbee.server.app import application
from llm_worker_rbee.server.config import Settings
from llm_worker_rbee.server.serve import connection_class
from llm_worker_rbee.server.worker import Worker
from tests.helpers import tiny_models

CONTEXT = 65_536
SAID = "Helo wrd"
LIMIT_S = 20  # for what should take a moment
CHAT = [{"role": "user", "content": "#"}]


def write_model(path: Path) -> Path:
    """The model of this folder."""
    digits = {ord(d): 0.6 + 0.01 * i for i, d in enumerate("0123456789")}
    follows: dict[int, Any] = {i: i for i in range(256) if chr(i) not in "ab0123456789>#?" + SAID}
    follows |= {ord("#"): ord("a"), ord("a"): ord("b"), ord("b"): ord("a"), tiny_models.ASSISTANT: digits}
    follows |= {ord("?"): digits, **{ord(d): digits for d in "0123456789"}, **tiny_models.say(SAID)}
    return tiny_models.write_scripted(path, follows, context=CONTEXT)


def ids(text: str) -> list[int]:
    """A prompt as ids."""
    return list(text.encode())


class Server:
    """A worker that serves; `worker` may be looked into."""

    def __init__(
        self, load: Callable[..., LLM], *, http: str = "httptools", hears_stages: bool = False, **settings: Any
    ) -> None:
        """`load` makes the model, and is given the hook for the stages of loading if it wants it."""
        made = load if hears_stages else lambda on_stage: load()
        self.worker = Worker(Settings(model_ref="tiny", **settings), made)
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
        assert not self._thread.is_alive(), "the server does not end"

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self._loop = runner.get_loop()
            runner.run(self._server.serve(sockets=[self.socket]))

    def ready(self) -> Server:
        until(lambda: self.worker.state != "loading")
        return self

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    def soon(self, made: Coroutine[Any, Any, Any]) -> Any:
        """Run something in the server's loop; a future."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(made, self._loop)

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **options})

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def job(self, **fields: Any) -> str:
        """Begin one; its id."""
        reply = self.post("/v1/jobs", {"prompt": "#", "max_tokens": 5, "temperature": 0, **fields})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["job_id"])

    def events(self, job: str) -> list[Any]:
        """All of a job's, to the end."""
        return events(self.http.get(f"/v1/jobs/{job}/stream").text)

    def require_alive(self) -> None:
        """An ordinary request is answered, and nothing is left of any other."""
        reply = self.post("/v1/jobs", {"prompt": ">", "max_tokens": 20, "temperature": 0, "stream": False})
        assert (reply.status_code, reply.json()["text"], reply.json()["stop_reason"]) == (200, SAID, "EOS")

    def require_idle(self) -> None:
        """All is free again, and the books agree."""
        scheduler = self.worker.loaded.engine.scheduler
        until(lambda: self.worker.num_open == 0 and not scheduler.has_work)
        until(lambda: scheduler.pool.num_free == scheduler.pool.n_blocks)
        scheduler.check()
        assert (self.worker.num_unstarted, self.worker.admission.load) == (0, (0, 0, 0))


def step_through(run: Callable[[Any], Any], engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step goes through `run`, which is given its spans: none is begun ahead, as a GPU's would be."""
    monkeypatch.setattr(engine, "_async_scheduler", None)
    monkeypatch.setattr(engine.runner, "run", run)


def until(happened: Callable[[], object]) -> None:
    """Wait for something that should take a moment."""
    end = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        threading.Event().wait(0.002)


def events(text: str) -> list[Any]:
    """The objects of a stream; it ends with [DONE]."""
    lines = [line[6:] for line in text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
