"""Servers that several files of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee import LLM
from tests.conftest import DEVICE, with_kernels
from tests.helpers.server import Server, write_model

KEY = "a-key-for-tests"
Start = Callable[..., Server]


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_kernels(write_model(tmp_path_factory.mktemp("server") / "tiny.gguf"))


@pytest.fixture(scope="session")
def load(model_file: Path) -> Callable[..., LLM]:
    """A model for a server of one's own."""
    return lambda **options: LLM(model_file, **{"device": DEVICE, "kv_memory": 16 << 20, **options})


@pytest.fixture(scope="session")
def server(load: Callable[..., LLM]) -> Iterator[Server]:
    """Without a key."""
    with Server(load) as running:
        yield running.ready()


@pytest.fixture(scope="session")
def locked(load: Callable[..., LLM]) -> Iterator[Server]:
    """With a key."""
    with Server(load, api_key=KEY, max_body=100_000) as running:
        yield running.ready()


@pytest.fixture
def start(load: Callable[..., LLM]) -> Iterator[Start]:
    """Servers with settings of their own, which end with the test; `model` is for the model."""
    began: list[Server] = []

    def begin(model: dict[str, Any] | None = None, **settings: Any) -> Server:
        began.append(Server(lambda: load(**(model or {})), **settings).__enter__())
        return began[-1].ready()

    yield begin
    for running in reversed(began):
        running.__exit__()
