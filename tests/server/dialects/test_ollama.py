"""Ollama's API beside what its client covers: fields, options, messages, streams, errors in its form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llm_worker_rbee.sampling_params import MAX_COUNT
from llm_worker_rbee.server.bodies import Conversation
from llm_worker_rbee.server.dialects import ollama
from llm_worker_rbee.server.schema import ModelLimits, ParseOptions, ValidationError
from tests.helpers.server import CHAT, CONTEXT, Server
from tests.server.conftest import Start

pytestmark = pytest.mark.usefixtures("leaves_server_healthy")
CHATS, GENERATE = "/api/chat", "/api/generate"
QUICK = {"num_predict": 3, "temperature": 0}
PARSE = ParseOptions(ModelLimits(CONTEXT, 256))


def parsed(parse: ParseOptions = PARSE, /, **fields: Any) -> Any:
    """Return the request of a chat."""
    return ollama.parse_chat(json.dumps({"messages": CHAT, **fields}).encode(), parse)


def rendered(messages: list[Any]) -> Any:
    """Return messages as a template gets them."""
    (conversation,) = parsed(messages=messages).prompts
    assert isinstance(conversation, Conversation)
    return json.loads(conversation.messages)


def test_stream_is_lines_of_json(server: Server) -> None:
    reply = server.post(CHATS, {"messages": CHAT, "options": QUICK})
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert all(line["model"] == "tiny" and line["created_at"].endswith("Z") for line in lines)
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["message"] == {"role": "assistant", "content": ""}
    assert (lines[-1]["done_reason"], lines[-1]["eval_count"]) == ("length", 3)
    whole = server.post(CHATS, {"messages": CHAT, "options": QUICK, "stream": False}).json()
    assert whole["message"]["content"] == "".join(line["message"]["content"] for line in lines)


def test_options_become_sampling_params() -> None:
    given = {
        "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8, "seed": 7, "stop": ["a", "b"],
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repeat_penalty": 1.2, "repeat_last_n": 9, "num_predict": 4,
    }  # fmt: skip
    params = parsed(options=given).params
    renamed = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
    for name, value in given.items():
        found = getattr(params, renamed.get(name, name))
        assert (list(found) if name == "stop" else found) == value, name
    unlimited = parsed(options={"num_predict": -1, "repeat_last_n": -1, "num_ctx": 512}).params
    assert (unlimited.max_tokens, unlimited.repeat_last_n) == (None, MAX_COUNT)
    assert parsed(options={"num_predict": -2}).params.max_tokens is None
    assert parsed().params.temperature is None


def test_options_without_effect_are_listed(server: Server) -> None:
    options = {**QUICK, "num_gpu": 99, "num_thread": 4, "use_mmap": True, "mirostat": 0, "num_keep": None}
    reply = server.post(CHATS, {"messages": CHAT, "options": options, "keep_alive": "5m"})
    assert reply.status_code == 200
    assert reply.headers["x-ignored-fields"] == "options.num_gpu,options.num_thread,options.use_mmap,keep_alive"


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (CHATS, {"options": {"colour": 1}}, "unknown field 'options.colour'"),
        (CHATS, {"colour": 1}, "unknown field 'colour'"),
        (CHATS, {"options": {"temperature": "hot"}}, "options.temperature must be a number, not a string"),
        (CHATS, {"options": {"num_predict": 0}}, "options.num_predict is 0: it must be 1 or more"),
        (CHATS, {"options": {"mirostat": 2}}, "options.mirostat is not supported"),
        (CHATS, {"options": []}, "options must be an object"),
        (CHATS, {"format": "yaml"}, 'format must be "json" or a JSON schema'),
        (CHATS, {"think": "hard"}, "think must be true, false or one of low, medium, high, max"),
        (CHATS, {"truncate": True}, "truncate is not supported"),
        (CHATS, {"top_logprobs": 3}, "top_logprobs needs logprobs: true"),
        (CHATS, {"tools": [{"type": "web_search"}]}, "tools[0].type must be function"),
        (CHATS, {"messages": {}}, "messages must be a list of messages"),
        (CHATS, {"messages": ["x"]}, "messages[0] must be an object"),
        (CHATS, {"messages": [{"role": "king"}]}, "messages[0].role must be one of"),
        (CHATS, {"messages": [*CHAT, {"role": "user", "content": []}]}, "messages[1].content must be a string"),
        (
            CHATS,
            {"messages": [{"role": "user", "images": ["aGk="]}]},
            "messages[0].images[0]: tiny.gguf takes no images",
        ),
        (CHATS, {"messages": [{"role": "user", "name": "x"}]}, "unknown field 'messages[0].name'"),
        (
            CHATS,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
            "messages[0].tool_calls[0].function.arguments must be an object",
        ),
        (GENERATE, {"prompt": "x", "images": ["aGk="]}, "images[0]: tiny.gguf takes no images"),
        (GENERATE, {"prompt": "x", "suffix": "y"}, "suffix is not supported"),
        (GENERATE, {"prompt": "x", "template": "y"}, "template is not supported"),
        (GENERATE, {"prompt": "x", "context": [1]}, "context is not supported"),
        (GENERATE, {"prompt": "x", "raw": True, "system": "y"}, "leave system out"),
        (GENERATE, {"prompt": "x", "raw": True, "think": True}, "leave think out"),
    ],
)
def test_invalid_field_is_refused_by_name(server: Server, path: str, fields: dict[str, Any], message: str) -> None:
    reply = server.post(path, {**({"messages": CHAT} if path == CHATS else {}), **fields})
    assert reply.status_code == 400
    assert list(reply.json()) == ["error"]
    assert message in reply.json()["error"]


def test_unknown_fields_are_listed_where_they_are_ignored() -> None:
    messages = [{"role": "user", "content": "#", "id": 1}]
    found = parsed(ParseOptions(ignores_unknown=True), messages=messages, colour=1, options={"size": 2})
    assert found.ignored == ["colour", "options.size", "messages[0].id"]
    with pytest.raises(ValidationError, match="unknown field 'colour'"):
        parsed(messages=messages, colour=1)


def test_thinking_and_format_become_options() -> None:
    assert parsed().chat.template_kwargs == {}
    assert parsed(think=True).chat.template_kwargs == {"enable_thinking": True}
    assert parsed(think=False).chat.template_kwargs == {"enable_thinking": False}
    assert parsed(think="low").chat.template_kwargs == {"enable_thinking": True, "reasoning_effort": "low"}
    assert parsed(format="").params.structured_outputs is None
    assert parsed(format="json").params.structured_outputs.json_object
    assert json.loads(parsed(format={"type": "null"}).params.structured_outputs.json) == {"type": "null"}


def test_calls_without_ids_get_the_same_ones_each_turn() -> None:
    def called(name: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"x": 1}}}

    messages = [
        *CHAT,
        {"role": "assistant", "thinking": "both", "tool_calls": [called("f"), called("g")]},
        {"role": "tool", "tool_name": "g", "content": "of g"},
        {"role": "tool", "content": "of f"},
        {"role": "assistant", "tool_calls": [{"id": "mine", **called("f")}]},
        {"role": "tool", "tool_call_id": "mine", "content": "of mine"},
    ]
    made = rendered(messages)
    assert made[1]["reasoning_content"] == "both"
    assert [one["id"] for one in made[1]["tool_calls"]] == ["call00000", "call00001"]
    assert made[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x":1}'}
    assert [(one["tool_call_id"], one["name"]) for one in made if one["role"] == "tool"] == [
        ("call00001", "g"), ("call00000", "f"), ("mine", "f"),
    ]  # fmt: skip
    assert rendered(messages[:3]) == made[:3]


def test_result_without_a_call_is_kept() -> None:
    (result,) = rendered([{"role": "tool", "content": "late"}])
    assert (result["content"], result["tool_call_id"]) == ("late", "call00000")


@pytest.mark.parametrize("path", ["/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"])
def test_routes_that_change_models_are_refused(server: Server, path: str) -> None:
    reply = server.http.request("DELETE" if path == "/api/delete" else "POST", path, content=b"{}")
    assert reply.status_code == 404
    assert reply.json()["error"].startswith(f"{path} is not supported: ")
    missing = server.http.get("/api/blobs/sha256:1")
    assert (missing.status_code, missing.json()) == (404, {"error": "there is no route GET '/api/blobs/sha256:1'"})


@pytest.mark.parametrize("served", ["one", "one:latest", "folder/one", "one:8b"])
def test_every_route_takes_the_name_with_and_without_its_tag(start: Start, served: str) -> None:
    server = start(served_name=served)
    listed = [one["name"] for one in server.http.get("/api/tags").json()["models"]]
    assert listed == [served if ":" in served else f"{served}:latest", "tiny:latest"]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": CHAT}, "/v1/completions": {"prompt": "#"}, "/v1/responses": {"input": "#"},
        "/v1/messages": {"messages": CHAT, "max_tokens": 2}, "/v1/messages/count_tokens": {"messages": CHAT},
        "/v1/jobs": {"prompt": "#", "max_tokens": 2}, "/api/chat": {"messages": CHAT, "options": QUICK},
        "/api/generate": {"prompt": "#", "options": QUICK}, "/api/show": {},
    }  # fmt: skip
    openai = {"/v1/chat/completions": "max_tokens", "/v1/completions": "max_tokens"}
    limits = {path: {field: 2} for path, field in {**openai, "/v1/responses": "max_output_tokens"}.items()}
    for name in {served, served.removesuffix(":latest"), *listed}:
        for path, body in bodies.items():
            reply = server.post(path, {**body, **limits.get(path, {}), "model": name})
            assert reply.status_code == 200, (path, name, reply.text)
        assert server.http.get(f"/v1/models/{name}").status_code == 200
    for name in ("other", "other:latest", f"{served}:7b"):
        assert {server.post(path, {**body, "model": name}).status_code for path, body in bodies.items()} == {404}


def test_error_in_a_stream_is_its_last_line(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> bytes:
        raise RuntimeError

    monkeypatch.setattr(ollama.ChatPrinter, "fields", fail)
    reply = server.post(CHATS, {"messages": CHAT, "options": QUICK})
    assert json.loads(reply.text.splitlines()[-1]) == {"error": "internal error of the worker"}


@pytest.mark.parametrize(("headers", "status"), [
    ({"content-type": "application/x-www-form-urlencoded"}, 200), ({}, 200),
    ({"content-type": "text/plain", "origin": "http://127.0.0.1"}, 400),
    ({"content-type": "text/plain", "sec-fetch-site": "cross-site"}, 400),
])  # fmt: skip
def test_content_type_is_not_required_unless_a_page_sends_it(
    server: Server, headers: dict[str, str], status: int
) -> None:
    """`curl -d` without a header, as Ollama's documents have it."""
    body = json.dumps({"model": server.worker.names[0], "prompt": "#", "stream": False, "options": {"num_predict": 1}})
    reply = server.http.post("/api/generate", content=body.encode(), headers=headers)
    assert reply.status_code == status, reply.text
