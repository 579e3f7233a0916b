"""Fixtures: a tiny model and servers of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee import LLM
from tests.conftest import DEVICE, with_kernels
from tests.helpers.browser import chromium
from tests.helpers.scripted_engine import ScriptedServer
from tests.helpers.server import Server, write_model

KEY = "a-key-for-tests"
Start = Callable[..., Server]


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_kernels(write_model(tmp_path_factory.mktemp("server") / "tiny.gguf"))


@pytest.fixture(scope="session")
def load(model_file: Path) -> Callable[..., LLM]:
    """Load the model, for a server of the test's own."""
    return lambda **options: LLM(model_file, **{"device": DEVICE, "kv_memory": 16 << 20, **options})


@pytest.fixture(scope="session")
def server(load: Callable[..., LLM]) -> Iterator[Server]:
    """A shared server without a key."""
    with Server(load) as running:
        yield running.ready()


@pytest.fixture(scope="session")
def locked(load: Callable[..., LLM]) -> Iterator[Server]:
    """A shared server with a key."""
    with Server(load, api_key=KEY, max_body=100_000) as running:
        yield running.ready()


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A shared server whose model plays given texts."""
    with ScriptedServer(tmp_path_factory.mktemp("scripted")) as running:
        running.ready()
        yield running


@pytest.fixture
def start(load: Callable[..., LLM]) -> Iterator[Start]:
    """Start servers that end with the test; `model` are options of the model."""
    running: list[Server] = []

    def begin(model: dict[str, Any] | None = None, **settings: Any) -> Server:
        running.append(Server(lambda: load(**(model or {})), **settings).__enter__())
        return running[-1].ready()

    yield begin
    for server in reversed(running):
        server.__exit__()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture
def leaves_server_healthy(request: pytest.FixtureRequest) -> Iterator[None]:
    """Require after the test that the shared server is idle and answers."""
    yield
    if "server" in request.fixturenames:
        server: Server = request.getfixturevalue("server")
        server.require_idle()
        server.require_alive()
