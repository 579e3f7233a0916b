"""The OpenAI dialect beside what its client covers: fields, echo, logprobs, timeouts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.server import schema
from llm_worker_rbee.server.schema import Enum
from tests.conftest import DEVICE
from tests.helpers import tiny_models
from tests.helpers.server import CHAT, Server, events, ids
from tests.server.conftest import Start

JOBS, CHATS, COMPLETIONS = "/v1/jobs", "/v1/chat/completions", "/v1/completions"
UNHONOURED = [
    (path, name)
    for path, table in ((CHATS, schema.CHAT), (COMPLETIONS, schema.COMPLETION))
    for name, field in table.items()
    if isinstance(field.type, Enum)
]
BODIES: dict[str, dict[str, Any]] = {CHATS: {"messages": CHAT}, COMPLETIONS: {"prompt": "#"}}


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_completion_optional_fields_are_accepted(server: Server, path: str) -> None:
    more = {
        "user": "u", "presence_penalty": 0.5, "frequency_penalty": -0.5, "top_k": 5, "min_p": 0.01, "typical_p": 0.99,
        "repetition_penalty": 1.1, "repeat_last_n": 8, "priority": -1, "timeout_ms": 60_000, "top_p": 0.9,
    }  # fmt: skip
    reply = server.post(path, {**BODIES[path], "max_tokens": 2, **more})
    assert (reply.status_code, reply.json()["usage"]["completion_tokens"]) == (200, 2)
    if path == CHATS:
        reply = server.post(path, {**BODIES[path], "max_completion_tokens": 3, "temperature": 0})
        assert reply.json()["usage"]["completion_tokens"] == 3
    else:
        assert server.post(path, {**BODIES[path], "n": 2, "best_of": 2}).status_code == 200


@pytest.mark.parametrize(("path", "name"), UNHONOURED)
def test_unsupported_field_is_refused_unless_default(server: Server, path: str, name: str) -> None:
    """Refused by name, unless its value changes nothing."""
    kind = (schema.CHAT if path == CHATS else schema.COMPLETION)[name].type
    assert isinstance(kind, Enum)
    for value in (*kind.allowed, None):
        assert server.post(path, {**BODIES[path], "max_tokens": 1, name: value}).status_code == 200, value
    error = server.post(path, {**BODIES[path], name: {"something": "else"}}).json()["error"]
    assert (error["param"], error["code"]) == (name, "INVALID_REQUEST")
    assert name in error["message"]


def test_chat_without_template_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("bare") / "bare.gguf"
    metadata = {k: v for k, v in tiny_models.tokenizer_metadata().items() if k != "tokenizer.chat_template"}
    tiny_models.write_scripted(path, {i: i for i in range(256)}, metadata)
    with Server(lambda: LLM(path, device=DEVICE, kv_memory=1 << 20)) as server:
        server.ready()
        error = server.post(CHATS, {"messages": CHAT}).json()["error"]
        assert error["code"] == "INVALID_REQUEST"
        assert "has no chat template" in error["message"]
        assert str(path.parent) not in error["message"]
        (job,) = server.post(JOBS, {"messages": CHAT, "max_tokens": 1}).json()["errors"]
        assert "has no chat template" in job["message"]
        assert server.post(COMPLETIONS, {"prompt": "#"}).status_code == 200


def test_timeout_is_504_in_openai_shape(server: Server) -> None:
    fields = {"messages": CHAT, "max_tokens": 60_000, "timeout_ms": 50}
    reply = server.post(CHATS, fields)
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "TIMEOUT")
    assert events(server.post(CHATS, {**fields, "stream": True}).text)[-1]["error"]["code"] == "TIMEOUT"


@pytest.mark.parametrize("scores", [{"logprobs": 0}, {}])
def test_completion_prompt_filling_context_is_scored(start: Start, scores: dict[str, int]) -> None:
    """No output token is requested; one more prompt token does not fit."""
    server = start({"max_context": 256})
    fields = {"max_tokens": 0, "echo": True, **scores}
    reply = server.post(COMPLETIONS, {"prompt": ids("#") * 256, **fields})
    assert reply.status_code == 200, reply.text
    choice, usage = reply.json()["choices"][0], reply.json()["usage"]
    assert (choice["text"], choice["finish_reason"]) == ("#" * 256, "length")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (256, 0)
    if scores:
        found = choice["logprobs"]["token_logprobs"]
        assert (len(found), found[0]) == (256, None)
        assert all(value <= 0 for value in found[1:])
    for more, max_tokens in ((1, 0), (0, 1)):
        refused = server.post(COMPLETIONS, {"prompt": ids("#") * (256 + more), **fields, "max_tokens": max_tokens})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "CONTEXT_LENGTH_EXCEEDED")
    server.require_idle()


@pytest.mark.parametrize("is_stream", [False, True])
def test_text_offsets_account_for_multi_token_characters(server: Server, is_stream: bool) -> None:
    body: dict[str, Any] = {"prompt": "é😀>", "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 1}
    if is_stream:
        reply = server.post("/v1/completions", {**body, "stream": True}).text
        lines = [json.loads(line[6:]) for line in reply.split("\n\n") if line and "[DONE]" not in line]
        choices = [line["choices"][0] for line in lines]
    else:
        choices = server.post("/v1/completions", body).json()["choices"]
    text = "".join(choice["text"] for choice in choices)
    tokens = [name for choice in choices for name in choice["logprobs"]["tokens"]]
    offsets = [at for choice in choices for at in choice["logprobs"]["text_offset"]]
    assert text == "é😀>Helo"
    assert tokens[:6] == [f"bytes:\\x{byte:02x}" for byte in "é😀".encode()]
    assert offsets[:7] == [0, 0, 1, 1, 1, 1, 2]
    for name, at in list(zip(tokens, offsets, strict=True))[6:]:
        assert text[at : at + len(name)] == name
