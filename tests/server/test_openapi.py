"""The description of the routes agrees with what is served."""

from __future__ import annotations

from typing import Any

import pytest

from llm_worker_rbee.server import dialects
from llm_worker_rbee.server.app import Routes
from llm_worker_rbee.server.dialects import (
    anthropic,
    jobs,
    ollama_embed,
    openai,
    openai_completions,
    openai_pooling,
    openai_responses,
)
from llm_worker_rbee.server.schema import Field, field_schema
from tests.helpers.json_schema import fits
from tests.helpers.server import Server, events

TABLES = {
    "job": jobs.JOB, "chat": openai.CHAT, "completion": openai_completions.COMPLETION,
    "responses": openai_responses.RESPONSES,
    "tokenize": dialects.TOKENIZE, "detokenize": dialects.DETOKENIZE, "cancel": jobs.CANCEL,
    "anthropic": anthropic.create_fields(is_open=False), "embeddings": openai_pooling.EMBEDDINGS,
    "rerank": openai_pooling.RERANK, "score": openai_pooling.SCORE, "ollama_embed": ollama_embed.EMBED,
}  # fmt: skip
FIELDS = [(table, name) for table, fields in TABLES.items() for name in fields]
# one of every kind, and the edges of everything that has edges
SOME: list[Any] = [
    True, False, 0, 1, -1, 0.5, 1.5, 2.5, -2.5, 4, 5, 16, 17, 20, 21, 2**31, 2**31 - 1, -(2**31), -(2**31) - 1,
    2**64, 2**64 - 1, 10**12, "x", "infer", "none", "auto", "medium", "no spaces", "a" * 64, "a" * 65, "a" *
    101, [], {}, ["a"], ["a" * 101], ["a"] * 4, ["a"] * 5, ["a"] * 17, [1], [[1]], [-1], [1, "a"], [[]], [None],
    {"1": 5}, {"1": 101}, {"x": 1}, {"1": True}, {"include_usage": True}, {"include_usage": 1}, {"type":
    "text"}, ["text"], [{}], [{"role": "user", "content": "x"}], [{"role": "unknown", "content": "x"}], [{"role":
    "user"}], [{"role": "user", "content": [{"type": "text", "text": "x"}]}], [{"role": "user", "content": 5}],
    0.0, 5.0, -1.0, 1e300, 86_400_000, 86_400_001, "", [""], [1.0], [1.5], [[2.0]], [[True]], [[1], 1],
    [{"role": "assistant", "tool_calls": [{}]}], [{"role": "assistant", "content": None, "tool_calls": []}],
    [{"role": "assistant"}], [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "refusal": 5}],
    [{"role": "assistant", "refusal": "no", "tool_calls": None}], [{"role": "user", "content": None}],
    [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}], [{"role": "assistant", "tool_calls": {}}],
    [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}], [{"role": "assistant", "content": 5}],
    [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f", "input": "x"}}]}],
    [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "", "input": "x"}}]}],
    [{"role": "assistant", "tool_calls": [{"type": "custom"}]}], [{"role": "assistant", "tool_calls": ["x"]}],
    [{"role": "user", "content": [{"text": "x", "more": 1}]}], {"12345678901": 1}, {"include_usage": None},
    {"continuous_usage_stats": True}, {"continuous_usage_stats": 1},
    {"include_usage": False, "continuous_usage_stats": True}, {"include_usage": True, "continuous_usage_stats": False},
    [{"type": "reasoning", "summary": [{"text": "x"}]}], [{"type": "reasoning", "content": [{"text": 5}]}],
    [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}], [{"type": "function_call"}],
    [{"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "refusal", "refusal": "x"}]}],
    [{"type": "item_reference", "id": "1"}], [{"type": "web_search"}], [{"type": "custom", "name": "f"}],
    [{"type": "namespace", "name": "n", "tools": [{"type": "namespace", "name": "n"}]}], "required",
    [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}], [{"type": "function"}],
    {"type": "custom", "name": "f"}, {"type": "allowed_tools", "mode": "auto", "tools": []}, {"effort": "low"},
    {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}, {"effort": "zap"},
    {"format": {"type": "json_schema"}}, {"format": {"type": "json_schema", "schema": {}}, "verbosity": None},
    ["message.output_text.logprobs"], {"summary": "auto", "zap": 1}, "disabled", [{"type": "custom", "name": "f",
    "format": {"type": "grammar", "syntax": "regex", "definition": "a"}}], [{"type": "custom", "name": "f",
    "format": {"type": "grammar", "syntax": "zap", "definition": "a"}}],
]  # fmt: skip


@pytest.fixture(scope="module")
def described(server: Server) -> dict[str, Any]:
    reply = server.http.get("/openapi.json")
    assert reply.status_code == 200
    return dict(reply.json())


def test_description_lists_served_routes(server: Server, described: dict[str, Any]) -> None:
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in Routes(server.worker).table()
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert {(path, method) for path, methods in described["paths"].items() for method in methods} == served


@pytest.mark.parametrize(("table", "name"), FIELDS)
def test_field_schema_accepts_what_validate_accepts(table: str, name: str) -> None:
    field: Field = TABLES[table][name]
    schema = field_schema(field)
    for value in SOME:
        assert fits(schema, value, {}) == (field.type.validate(name, value) is None), f"{name}: {value!r}"
    assert fits(schema, None, {}) == (not field.required)
    assert field.default is None or schema["default"] == (
        list(field.default) if isinstance(field.default, tuple) else field.default
    )


def test_replies_and_events_match_description(server: Server, described: dict[str, Any]) -> None:
    def require(name: str, value: Any) -> None:
        assert fits(described["components"]["schemas"][name], value, described), (name, value)

    chat = {"messages": [{"role": "user", "content": "#"}], "max_tokens": 3, "logprobs": True}
    require("ChatRequest", chat)
    require("ChatCompletion", server.post("/v1/chat/completions", chat).json())
    for chunk in events(server.post("/v1/chat/completions", {**chat, "stream": True}).text):
        require("ChatChunk", chunk)
    require("Completion", server.post("/v1/completions", {"prompt": ">"}).json())
    for event in server.events(server.job()):
        require("JobEvent", event)
    require("JobResult", server.post("/v1/jobs", {"prompt": "#", "max_tokens": 2, "stream": False}).json())
    for path, name in (("/health", "Health"), ("/v1/ready", "Ready"), ("/info", "Info"), ("/v1/models", "Models")):
        require(name, server.http.get(path).json())
    require("FieldErrors", server.post("/v1/jobs", {"zap": 1}).json())
    require("OpenAIError", server.post("/v1/completions", {}).json())
    require("Error", server.http.get("/v1/jobs/no-such-job").json())


@pytest.mark.parametrize("body", [{"max_tokens": 1}, {"max_tokens": 1, "prompt": "a", "messages": []}, {"prompt": "a"}])
def test_job_refused_by_description_is_refused(server: Server, described: dict[str, Any], body: dict[str, Any]) -> None:
    assert not fits(described["components"]["schemas"]["JobRequest"], body, described)
    assert server.post("/v1/jobs", body).status_code == 400
