"""Prompts that cannot fit are refused before they are tokenized."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.server import CONTEXT, Server

COMPLETIONS, CHATS, JOBS = "/v1/completions", "/v1/chat/completions", "/v1/jobs"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, {"prompt": "x" * 2_000_000}, "prompt"),
        (COMPLETIONS, {"prompt": ["#", "x" * 2_000_000]}, "prompt"),
        (CHATS, {"messages": [{"role": "user", "content": "x" * 2_000_000}]}, "messages"),
        (COMPLETIONS, {"prompt": [1] * (CONTEXT + 1)}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], [1] * (CONTEXT + 1)]}, "prompt"),
        (JOBS, {"prompt": "x" * 2_000_000, "max_tokens": 1}, None),
    ],
)
def test_prompt_over_context_is_not_tokenized(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], field: str | None
) -> None:
    """Decided by its bytes or its number of ids; the message has the figures."""

    def encode(text: str, *_: Any, **__: Any) -> list[int]:
        raise AssertionError(f"{len(text)} characters were tokenized")

    tokenizer = server.worker.loaded.tokenizer
    whole = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **more: whole(text, **more) if text == "#" else encode(text))
    reply = server.post(path, body)
    error = reply.json() if field is None else reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "CONTEXT_LENGTH_EXCEEDED")
    assert field is None or error["param"] == field
    assert str(CONTEXT) in error["message"]
    server.require_idle()
