"""Other OpenAI-compatible clients against a real server."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.helpers.server import Server

MESSAGES = [{"role": "user", "content": "?"}]
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


def answer(server: Server) -> str:
    """Return the worker's reply without a client."""
    reply = server.post("/v1/chat/completions", {"messages": MESSAGES, **OPTIONS})
    said = str(reply.json()["choices"][0]["message"]["content"])
    assert len(said) == 6
    return said


def test_langchain_chat_works(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    given = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    client = langchain.ChatOpenAI(model="tiny", **given, **OPTIONS)
    whole = client.invoke("?")
    assert (whole.content, whole.usage_metadata["output_tokens"]) == (answer(server), 6)
    chunks = list(client.stream("?", stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 6
    with pytest.raises(importlib.import_module("openai").NotFoundError, match="'other'"):
        langchain.ChatOpenAI(model="other", **given).invoke("?")
