"""Clients whose requirements exclude each other, each in an environment of its own (`make test-extra`), against a real
server whose model plays given texts."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.scripted_engine import ScriptedServer, call
from tests.helpers.tiny_pooling import NAMES, pooling_models

ENVIRONMENTS = os.environ.get("LLM_WORKER_CLIENTS")  # a folder with one environment for each client
SESSIONS = Path(__file__).parent / "clients"
ADA = {"name": "Ada", "age": 36}
pytestmark = pytest.mark.skipif(ENVIRONMENTS is None, reason="clients in environments of their own: make test-extra")


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    folder = tmp_path_factory.mktemp("clients")
    with ScriptedServer(folder, pooling=pooling_models(folder), embedding_model=NAMES["embedding"]) as running:
        running.ready()
        yield running


def play(scripted: ScriptedServer, client: str, *replies: str) -> Any:
    """Return what a session got of these replies, all of which it must have asked for."""
    assert ENVIRONMENTS is not None
    python = Path(ENVIRONMENTS).absolute() / client / "bin" / "python"
    scripted.play(*replies)
    command = [python, "-P", SESSIONS / f"{client}_session.py", scripted.url]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=kept)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(scripted.prompts) == len(replies)
    return json.loads(done.stdout.splitlines()[-1])


def test_instructor_gets_models_of_answers(scripted: ScriptedServer) -> None:
    made, too_old = call("Person", **ADA), call("Person", name="Ada", age=360)
    got = play(scripted, "instructor", made, json.dumps(ADA), call("PartialPerson", **ADA), too_old, made)
    assert got == {"tools": ADA, "schema": ADA, "parts": ADA, "again": ADA}
    assert "nobody is that old" in scripted.prompts[-1]


def test_llama_index_chats_calls_tools_embeds_and_gets_models(scripted: ScriptedServer) -> None:
    asked = call("get_weather", city="Paris")
    got = play(scripted, "llama_index", "Hello!", "Hello again!", asked, "It is sunny.", call("Person", **ADA))
    assert (got["whole"], got["streamed"], got["second"]) == ("Hello!", "Hello again!", "It is sunny.")
    assert got["call"] == ["get_weather", {"city": "Paris"}]
    assert got["person"] == ADA
    reply = scripted.post("/v1/embeddings", {"input": ["hello", "world"]}).json()["data"]
    np.testing.assert_array_equal(np.float32(got["rows"]), np.float32([one["embedding"] for one in reply]))
    assert got["row"] == got["rows"][0]
    assert "<tool_response>\nsunny in Paris\n</tool_response>" in scripted.prompts[3]


def test_litellm_chats_calls_tools_and_gets_json(scripted: ScriptedServer) -> None:
    asked = call("get_weather", city="Paris")
    got = play(scripted, "litellm", "Hello!", "Hello again!", asked, json.dumps(ADA), "As Ollama.", "As Anthropic.")
    assert (got["whole"], got["tokens"], got["streamed"]) == ("Hello!", len("Hello!") + 1, "Hello again!")
    assert (got["call"], got["finish_reason"]) == (["get_weather", {"city": "Paris"}], "tool_calls")
    assert got["person"] == ADA
    assert (got["ollama"], got["anthropic"]) == ("As Ollama.", "As Anthropic.")
    assert "'other'" in got["error"]
