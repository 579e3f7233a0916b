"""Objects in every dialect: closed where a schema lists their properties, unless the request or the server opens them.

What is played obeys no mask: a text that the grammar does not allow ends the request as a dead end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scripted_engine import ScriptedServer, call, think

CHATS = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MESSAGES = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 200}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
JSON: dict[str, tuple[str, dict[str, Any]]] = {
    "response_format": (CHATS, {**MESSAGES, "response_format": RESPONSE_FORMAT}),
    "structured_outputs": (CHATS, {**MESSAGES, "structured_outputs": {"json": SCHEMA}}),
    "completion": ("/v1/completions", {"prompt": "a", "max_tokens": 200, "structured_outputs": {"json": SCHEMA}}),
    "output_config": ("/v1/messages", {"model": "tiny", **MESSAGES, "output_config": {"format": FORMAT}}),
    "format": ("/api/chat", {"model": "tiny", "messages": MESSAGES["messages"], "format": SCHEMA, "stream": False}),
    "text.format": ("/v1/responses", {"input": "a", "text": {"format": {**FORMAT, "name": "n"}}}),
    "job": ("/v1/jobs", {**MESSAGES, "stream": False, "structured_outputs": {"json": SCHEMA}}),
}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "strict": (CHATS, {**MESSAGES, "tools": [{**TOOL, "function": {**FUNCTION, "strict": True}}]}),
    "required": (CHATS, {**MESSAGES, "tools": [TOOL], "tool_choice": "required"}),
    "of responses": ("/v1/responses", {"input": "a", "tools": [{"type": "function", **FUNCTION, "strict": True}]}),
}
WITHOUT_REASONING = ("completion", "output_config")
OPEN = {"structured_outputs": {"json": SCHEMA, "additional_properties": "open"}}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with ScriptedServer(Path(tmp_path_factory.mktemp("opened")), open_objects=True) as running:
        yield running.ready()


def statuses(server: ScriptedServer, path: str, body: dict[str, Any], *texts: str) -> list[int]:
    replies = []
    for text in texts:
        server.play(text)
        replies.append(server.post(path, body).status_code)
    return replies


@pytest.mark.parametrize("name", JSON)
def test_answer_has_only_properties_that_its_schema_names(scripted: ScriptedServer, name: str) -> None:
    path, body = JSON[name]
    documents = ['{"a": 1}', '{"a": 1, "z": 2}']
    texts = documents if name in WITHOUT_REASONING else [think("Hm.", text) for text in documents]
    assert statuses(scripted, path, body, *texts) == [200, 422]


@pytest.mark.parametrize("name", CALLS)
def test_call_has_only_arguments_that_its_tool_names(scripted: ScriptedServer, name: str) -> None:
    path, body = CALLS[name]
    assert statuses(scripted, path, body, call("f", a=1), call("f", a=1, z=2)) == [200, 422]


@pytest.mark.parametrize("name", [*JSON, *CALLS])
def test_server_can_open_objects(opened: ScriptedServer, name: str) -> None:
    path, body = (JSON | CALLS)[name]
    document = '{"a": 1, "z": 2}'
    text = document if name in WITHOUT_REASONING else call("f", a=1, z=2) if name in CALLS else think("Hm.", document)
    assert statuses(opened, path, body, text) == [200]


def test_request_decides_before_the_server(scripted: ScriptedServer, opened: ScriptedServer) -> None:
    text = think("Hm.", '{"a": 1, "z": 2}')
    assert statuses(scripted, CHATS, {**MESSAGES, **OPEN}, text) == [200]
    closed = {"structured_outputs": {"json": SCHEMA, "additional_properties": "closed"}}
    assert statuses(opened, CHATS, {**MESSAGES, **closed}, text) == [422]


@pytest.mark.parametrize("fields", [{"json": SCHEMA, "additional_properties": "ajar"},
                                    {"regex": "a", "additional_properties": "open"}])  # fmt: skip
def test_additional_properties_are_refused_by_name(scripted: ScriptedServer, fields: dict[str, Any]) -> None:
    reply = scripted.post(CHATS, {**MESSAGES, "structured_outputs": fields})
    assert reply.status_code == 400
    assert "structured_outputs.additional_properties must be" in reply.text


def test_number_that_no_double_holds_is_named_with_its_tool(scripted: ScriptedServer) -> None:
    parameters = {"type": "object", "properties": {"id": {"const": 12345678901234567890}}}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    reply = scripted.post(CHATS, {**MESSAGES, "tools": [tool]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")
    assert "const has 12345678901234567890" in reply.text
    held = {"type": "json_schema", "json_schema": {"name": "n", "schema": parameters}}
    reply = scripted.post(CHATS, {**MESSAGES, "response_format": held})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "response_format")
