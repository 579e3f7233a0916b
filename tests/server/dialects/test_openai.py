"""The OpenAI dialect beside what its client covers: fields, echo, logprobs, timeouts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.generation import TextDelta
from llm_worker_rbee.server.dialects import openai, openai_completions
from llm_worker_rbee.server.schema import Enum
from tests.conftest import DEVICE
from tests.helpers import tiny_models
from tests.helpers.server import CHAT, Server, events, ids
from tests.server.conftest import Start

JOBS, CHATS, COMPLETIONS = "/v1/jobs", "/v1/chat/completions", "/v1/completions"
UNHONOURED = [
    (path, name)
    for path, table in ((CHATS, openai.CHAT), (COMPLETIONS, openai_completions.COMPLETION))
    for name, field in table.items()
    if isinstance(field.type, Enum)
]
BODIES: dict[str, dict[str, Any]] = {CHATS: {"messages": CHAT}, COMPLETIONS: {"prompt": "#"}}


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_every_chunk_may_have_the_usage_so_far(server: Server, path: str) -> None:
    def usages(**options: bool) -> list[Any]:
        body = {**BODIES[path], "max_tokens": 5, "temperature": 0, "stream": True, "stream_options": options}
        return [chunk.get("usage", "none") for chunk in events(server.post(path, body).text)]

    last = usages(include_usage=True)
    assert set(map(str, last[:-1])) == {"None"}
    for options in ({"include_usage": True}, {}):
        found = usages(continuous_usage_stats=True, **options)
        counts = [usage["completion_tokens"] for usage in found]
        assert counts == sorted(counts)
        assert (counts[-1], found[-1]["total_tokens"]) == (5, last[-1]["total_tokens"])
        assert all(usage["prompt_tokens"] == last[-1]["prompt_tokens"] for usage in found)
    assert set(usages(include_usage=False)) == set(usages(continuous_usage_stats=False)) == {"none"}
    for refused in (
        {"continuous_usage_stats": 1},
        {"include_usage": False, "continuous_usage_stats": True},
        {"zap": True},
    ):
        reply = server.post(path, {**BODIES[path], "stream": True, "stream_options": refused})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream_options")


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_completion_optional_fields_are_accepted(server: Server, path: str) -> None:
    more = {
        "user": "u", "presence_penalty": 0.5, "frequency_penalty": -0.5, "top_k": 5, "min_p": 0.01, "typical_p": 0.99,
        "repetition_penalty": 1.1, "repeat_last_n": 8, "priority": 0, "timeout_ms": 60_000, "top_p": 0.9,
    }  # fmt: skip
    reply = server.post(path, {**BODIES[path], "max_tokens": 2, **more})
    assert (reply.status_code, reply.json()["usage"]["completion_tokens"]) == (200, 2)
    if path == CHATS:
        reply = server.post(path, {**BODIES[path], "max_completion_tokens": 3, "temperature": 0})
        assert reply.json()["usage"]["completion_tokens"] == 3
    else:
        assert server.post(path, {**BODIES[path], "n": 2, "best_of": 2}).status_code == 200


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_max_tokens_that_do_not_fit_are_reduced_to_what_is_left(start: Start, path: str) -> None:
    """The header has the number that holds, also of a stream; a prompt that leaves no room stays a 400."""
    server = start({"max_context": 256})
    body = {**BODIES[path], "temperature": 0, "ignore_eos": True}
    for max_tokens in (256, 10**12, -1, -1.0):
        reply = server.post(path, {**body, "max_tokens": max_tokens})
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        assert usage["total_tokens"] == 256
        assert reply.headers["x-effective-max-tokens"] == str(usage["completion_tokens"])
        assert reply.json()["choices"][0]["finish_reason"] == "length"
        stream = server.post(path, {**body, "max_tokens": max_tokens, "stream": True})
        assert stream.headers["x-effective-max-tokens"] == str(usage["completion_tokens"])
        assert events(stream.text)[-1]["choices"][0]["finish_reason"] == "length"
    assert server.post(path, {**body, "max_tokens": 3}).headers["x-effective-max-tokens"] == "3"
    full = {"messages": [{"role": "user", "content": "#" * 256}]} if path == CHATS else {"prompt": "#" * 256}
    for max_tokens in (1, -1, 10**12):
        error = server.post(path, {**body, **full, "max_tokens": max_tokens}).json()["error"]
        assert error["code"] == "CONTEXT_LENGTH_EXCEEDED"
    server.require_idle()


def test_max_tokens_of_several_prompts_are_reduced_for_each(start: Start) -> None:
    server = start({"max_context": 256})
    fields = {"prompt": ["#", "#" * 200], "max_tokens": 100, "temperature": 0, "ignore_eos": True, "n": 2}
    reply = server.post(COMPLETIONS, fields)
    assert [len(choice["text"]) for choice in reply.json()["choices"]] == [100, 100, 56, 56]
    assert reply.headers["x-effective-max-tokens"] == "56", "the smallest"
    scored = server.post(COMPLETIONS, {"prompt": "#", "max_tokens": 0, "echo": True})
    assert scored.headers["x-effective-max-tokens"] == "0"


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_fields_without_effect_are_accepted(server: Server, path: str) -> None:
    harmless: dict[str, Any] = {
        "metadata": {"run": "7"}, "store": False, "user": "u", "service_tier": "default", "parallel_tool_calls": False,
        "safety_identifier": "x", "prompt_cache_key": "x",
    }  # fmt: skip
    reply = server.post(path, {**BODIES[path], **harmless, "max_tokens": 2, "seed": -1, "top_k": -1})
    assert reply.status_code == 200, reply.text
    assert reply.json()["seed"] >= 0
    refused: dict[str, Any] = {"store": True, "service_tier": "flex", "metadata": "x", "parallel_tool_calls": 1}
    for name, value in refused.items():
        error = server.post(path, {**BODIES[path], **harmless, name: value}).json()["error"]
        assert (error["param"], error["code"]) == (name, "INVALID_REQUEST")


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_salt_separates_cached_prompts(server: Server, path: str) -> None:
    """The answers are the same."""
    body = (
        {"prompt": "salted " * 30}
        if path == COMPLETIONS
        else {"messages": [{"role": "user", "content": "salted " * 30}]}
    )
    texts, cached = set(), []
    for salt in ("a", "a", "b", None, "b", None):
        salted = {} if salt is None else {"cache_salt": salt}
        reply = server.post(path, {**body, "temperature": 0, "max_tokens": 3, **salted}).json()
        cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 100)
        texts.add(str(reply["choices"]))
    assert cached == [False, True, False, False, True, True]
    assert len(texts) == 1
    error = server.post(path, {**body, "cache_salt": ""}).json()["error"]
    assert error["param"] == "cache_salt"


@pytest.mark.parametrize(("path", "name"), UNHONOURED)
def test_unsupported_field_is_refused_unless_default(server: Server, path: str, name: str) -> None:
    """Refused by name, unless its value changes nothing."""
    kind = (openai.CHAT if path == CHATS else openai_completions.COMPLETION)[name].type
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


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}, {"n": 3}, {"stop": ["ba"]}])
def test_chunks_from_template_have_the_bytes_of_encoding_each(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, more: dict[str, Any]
) -> None:
    is_chat, pairs = path == CHATS, list[tuple[bytes, bytes]]()
    printer = openai.ChatPrinter if is_chat else openai_completions.CompletionPrinter
    printed = printer.print_delta

    def watched(self: Any, i: int, delta: TextDelta) -> bytes:
        odd = delta._replace(text=delta.text + '"\\\u2028\x00\u00e9\U0001f600"content":""', finish_reason=None)
        choice = {"index": i, "text": odd.text, "logprobs": None, "finish_reason": None}
        expected = self._delta_chunk(i, {"content": odd.text}) if is_chat else self._chunk(choice)
        pairs.append((printed(self, i, odd), expected))
        return printed(self, i, delta)

    monkeypatch.setattr(printer, "print_delta", watched)
    text = server.post(path, {**BODIES[path], "max_tokens": 20, "stream": True, **more}).text
    assert text.endswith("data: [DONE]\n\n")
    assert pairs
    assert [pair for pair in pairs if pair[0] != pair[1]] == []


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS, "/v1/responses", "/v1/jobs"])
def test_priority_is_refused_by_name_unless_it_is_allowed(server: Server, start: Start, path: str) -> None:
    prompts: dict[str, dict[str, Any]] = {"/v1/responses": {"input": "#"}, "/v1/jobs": {"prompt": "#"}}
    body = (BODIES.get(path) or prompts[path]) | {"max_output_tokens" if "responses" in path else "max_tokens": 16}
    reply = server.post(path, {**body, "priority": 3})
    assert reply.status_code == 400
    assert "--allow-priority" in reply.text
    assert server.post(path, {**body, "priority": 0}).status_code == 200
    assert start(allow_priority=True).post(path, {**body, "priority": 3}).status_code == 200
