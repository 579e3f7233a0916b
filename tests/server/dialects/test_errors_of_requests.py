"""Errors that name what is wrong with a request, as the clients of each dialect look for it."""

from __future__ import annotations

from typing import Any

import langchain_anthropic
import langchain_openai
import pytest
from langchain_core.exceptions import ContextOverflowError

from tests.helpers.scripted_engine import CONTEXT, ScriptedServer

USER = {"role": "user", "content": "x"}
GOOD: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
BAD: dict[str, Any] = {"type": "object", "properties": {"cities": {"type": "array", "uniqueItems": True}}}
SKIPPED = {"type": "web_search_20250305", "name": "web_search"}


def function(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "parameters": schema, "strict": True}


FUNCTIONS = [
    {"type": "function", "function": function("good", GOOD)},
    {"type": "function", "function": function("bad", BAD)},
]
RESPONSE_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "function", **function("good", GOOD)},
    {"type": "namespace", "name": "space", "tools": [{"type": "function", **function("bad", BAD)}]},
]
MESSAGES_TOOLS = [
    SKIPPED,
    {"name": "good", "input_schema": GOOD},
    {"name": "bad", "input_schema": BAD, "strict": True},
]
WITH_TOOLS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": [USER], "tools": FUNCTIONS}, "tools[1].function.parameters (bad)"),
    "/v1/responses": ({"input": "x", "tools": RESPONSE_TOOLS}, "tools[2].tools[0].parameters (space__bad)"),
    "/v1/messages": ({"messages": [USER], "max_tokens": 5, "tools": MESSAGES_TOOLS}, "tools[2].input_schema (bad)"),
    "/api/chat": ({"messages": [USER], "tools": FUNCTIONS}, "tools[1].function.parameters (bad)"),
}


@pytest.mark.parametrize("path", WITH_TOOLS)
def test_schema_that_cannot_be_used_is_named_with_its_tool(scripted: ScriptedServer, path: str) -> None:
    body, place = WITH_TOOLS[path]
    reply = scripted.post(path, {"model": "tiny", **body})
    error = reply.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert reply.status_code == 400
    assert message.startswith(f"{place}: ")
    assert "uniqueItems" in message
    assert path.startswith(("/api", "/v1/messages")) or error["param"] == "tools"


@pytest.mark.parametrize("uses_responses", [False, True])
def test_overflow_is_known_to_langchain(scripted: ScriptedServer, uses_responses: bool) -> None:
    chat = langchain_openai.ChatOpenAI(
        base_url=f"{scripted.url}/v1", api_key="none", model="tiny", max_retries=0, use_responses_api=uses_responses
    )
    with pytest.raises(ContextOverflowError, match=str(CONTEXT)) as caught:
        chat.invoke("x" * CONTEXT)
    assert "Input tokens exceed the configured limit" in str(caught.value)
    assert getattr(caught.value, "code", None) == "CONTEXT_LENGTH_EXCEEDED"


def test_overflow_is_known_to_langchain_of_anthropic(scripted: ScriptedServer) -> None:
    chat = langchain_anthropic.ChatAnthropic(
        base_url=scripted.url, api_key="none", model_name="tiny", max_retries=0, max_tokens_to_sample=5
    )
    with pytest.raises(ContextOverflowError, match=rf"prompt is too long: .*{CONTEXT}"):
        chat.invoke("x" * CONTEXT)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "messages"),
        ("/v1/completions", {"prompt": "x" * CONTEXT}, "prompt"),
        ("/v1/responses", {"input": "x" * CONTEXT}, "input"),
        ("/v1/responses", {"input": "x" * 20 * CONTEXT}, "input"),
    ],
)
def test_overflow_names_the_field(scripted: ScriptedServer, path: str, body: dict[str, Any], param: str) -> None:
    reply = scripted.post(path, body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
