"""The Messages API on the wire: what is parsed, refused and printed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from llm_worker_rbee.errors import (
    AuthenticationError,
    HostNotAllowedError,
    InferenceError,
    ModelLoadingError,
    PayloadTooLargeError,
    QueueFullError,
    WorkerError,
)
from llm_worker_rbee.sampling_params import StructuredOutputsParams
from llm_worker_rbee.server.bodies import Conversation, GenerateRequest
from llm_worker_rbee.server.dialects.anthropic import MessagePrinter, error_body, parse_messages, to_messages
from llm_worker_rbee.server.schema import ParseOptions, ValidationError
from tests.helpers.scripted_engine import ScriptedServer, call, think
from tests.helpers.server import CONTEXT, Server
from tests.server.conftest import KEY, Start

USER = {"role": "user", "content": "?"}
SOUND: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "messages": [USER]}
TOOL = {"name": "get_weather", "description": "Weather", "input_schema": {"type": "object"}}
USED = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Köln", "n": 10**30}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}


def parse(*, ignores_unknown: bool = False, **fields: Any) -> GenerateRequest:
    return parse_messages(json.dumps({**SOUND, **fields}).encode(), ParseOptions(ignores_unknown=ignores_unknown))


def parse_chat(**fields: Any) -> Conversation:
    conversation = parse(**fields).prompts[0]
    assert isinstance(conversation, Conversation)
    return conversation


def rendered(**fields: Any) -> list[Any]:
    """Return the messages that the template gets."""
    return list(json.loads(parse_chat(**fields).messages))


def wire_events(reply: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream; their names are the types of their data."""
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = []
    for part in reply.text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def text_block(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def test_blocks_become_messages_in_their_order() -> None:
    history = [
        {"role": "user", "content": [text_block("a"), text_block("b")]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
            text_block("I "), text_block("look"), USED,
        ]},
        {"role": "user", "content": [
            {**RESULT, "content": [text_block("sun"), text_block("20 C")]}, {**RESULT, "tool_use_id": "other"},
            {**RESULT, "content": "no", "is_error": True}, text_block("and now?"),
        ]},
        {"role": "system", "content": [text_block("<total_tokens>5</total_tokens>")]},
        {"role": "assistant", "content": []},
        {"role": "user", "content": []},
    ]  # fmt: skip
    function = {"name": "get_weather", "arguments": json.dumps(USED["input"], ensure_ascii=False)}
    assert rendered(messages=history, system=[text_block("Be"), text_block("kind.")]) == [
        {"role": "system", "content": "Be\nkind."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "I look", "reasoning_content": "hm",
         "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "get_weather", "content": "sun\n20 C"},
        {"role": "tool", "tool_call_id": "other", "content": ""},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "get_weather", "content": "Error: no"},
        {"role": "user", "content": "and now?"},
        {"role": "system", "content": "<total_tokens>5</total_tokens>"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]  # fmt: skip


def test_prompt_ignores_what_changes_between_turns() -> None:
    marked = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    billing = [text_block(f"x-anthropic-billing-header: cc_version=2; cch={i};") for i in (1, 2)]
    plain = rendered(messages=[USER], system="Be kind.")
    for i, header in enumerate(billing):
        changed = {"system": [header, text_block("Be kind.", **marked)], "metadata": {"user_id": str(i)}, **marked}
        assert rendered(messages=[{"role": "user", "content": [text_block("?", **marked)]}], **changed) == plain
    assert rendered(messages=[{"role": "user", "content": [billing[0]]}])[0]["content"] == billing[0]["text"]
    tools = [parse_chat(tools=[{**TOOL, **more}]).options for more in ({}, marked)]
    assert tools[0] == tools[1]


def test_message_depends_on_earlier_ones_only() -> None:
    turns: list[Any] = [USER, {"role": "assistant", "content": [USED]}, {"role": "user", "content": [
        {**RESULT, "content": "sun", "is_error": False}]}, {"role": "system", "content": "s"}, USER]  # fmt: skip
    whole = list(to_messages("Be kind.", turns))
    for length in range(1, len(turns)):
        part = list(to_messages("Be kind.", turns[:length]))
        assert part == whole[: len(part)]


@pytest.mark.parametrize(
    ("fields", "variables", "budget"),
    [
        ({}, {"enable_thinking": False}, None),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048.0}}, {"enable_thinking": True}, 2048),
        ({"thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "max"}},
         {"enable_thinking": True, "reasoning_effort": "max"}, None),
    ],
)  # fmt: skip
def test_thinking_sets_template_variables(
    fields: dict[str, Any], variables: dict[str, Any], budget: int | None
) -> None:
    options = parse_chat(**fields).options
    assert options.template_kwargs.items() >= variables.items()
    assert ("reasoning_effort" in options.template_kwargs) == ("reasoning_effort" in variables)
    assert options.thinking_budget == budget


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", None, True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", None, False)),
        ({"type": "tool", "name": "get_weather"}, ("required", "get_weather", True)),
        ({"type": "none"}, ("none", None, True)),
    ],
)
def test_tool_choice_becomes_options(choice: dict[str, Any], expected: tuple[Any, ...]) -> None:
    tool = {**TOOL, "strict": True, "input_examples": [{"city": "Rome"}], "type": "custom"}
    options = parse_chat(tools=[tool, {"type": "bash_20250124", "name": "bash"}], tool_choice=choice).options
    assert (options.tool_choice, options.tool_name, options.parallel_tool_calls) == expected
    (found,) = options.tools
    assert (found.name, found.description, found.strict) == ("get_weather", "Weather", True)
    assert found.parameters == {"type": "object", "examples": [{"city": "Rome"}]}


def test_output_format_is_structured_output() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        assert parse(**fields).params.structured_outputs == StructuredOutputsParams(json=schema)
    params = parse(stop_sequences=["x"], temperature=0.5, top_p=0.9, top_k=5).params
    assert (params.structured_outputs, params.temperature, params.top_p, params.top_k) == (None, 0.5, 0.9, 5)
    assert (list(params.stop), params.max_tokens) == (["x"], 6)


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


def said(role: str, *blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}, USER]}


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "no messages": ("messages", {"messages": []}),
    "no max_tokens": ("max_tokens", {"max_tokens": None}),
    "warm": ("temperature", {"temperature": 1.5}),
    "unknown": ("zap", {"zap": 1}),
    "unknown role": ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
    "no role": ("messages[0].role", {"messages": [{"content": "x"}]}),
    "no content": ("messages[0].content", {"messages": [{"role": "user"}]}),
    "prefill": ("messages[1].role", {"messages": [USER, {"role": "assistant", "content": "{"}]}),
    "a number": ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    "image": ("messages[0].content[1].source.type", said("user", text_block("x"), {"type": "image", "source": {}})),
    "document": ("messages[0].content[0].type", said("user", {"type": "document", "source": {}})),
    "image in a result": ("messages[0].content[0].content[0].source",
                          said("user", {**RESULT, "content": [{"type": "image"}]})),
    "call of the user": ("messages[0].content[0].type", said("user", USED)),
    "result of the assistant": ("messages[0].content[0].type", said("assistant", RESULT)),
    "call without input": ("messages[0].content[0].input", said("assistant", {**USED, "input": None})),
    "unknown in a block": ("messages[0].content[0].zap", said("user", text_block("x", zap=1))),
    "deep input": ("messages[0].content[0].input", said("assistant", {**USED, "input": nested(200)})),
    "deep schema": ("tools[0].input_schema", {"tools": [{**TOOL, "input_schema": nested(200)}]}),
    "tool without schema": ("tools[0].input_schema", {"tools": [{"name": "x"}]}),
    "tool without name": ("tools[0]", {"tools": [{**TOOL, "name": ""}]}),
    "any without tools": ("tool_choice", {"tool_choice": {"type": "any"}}),
    "any of skipped tools": ("tool_choice", {"tool_choice": {"type": "any"}, "tools": [{"type": "bash_20250124"}]}),
    "unknown tool": ("tool_choice", {"tool_choice": {"type": "tool", "name": "x"}, "tools": [TOOL]}),
    "thinking": ("thinking.type", {"thinking": {"type": "between_tools"}}),
    "no budget": ("thinking.budget_tokens", {"thinking": {"type": "enabled"}}),
    "effort": ("output_config.effort", {"output_config": {"effort": "huge"}}),
    "container": ("container", {"container": "x"}),
    "mcp_servers": ("mcp_servers", {"mcp_servers": [{"type": "url"}]}),
}  # fmt: skip


@pytest.mark.parametrize(("field", "fields"), REFUSED.values(), ids=REFUSED)
def test_invalid_body_is_refused_by_name(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        parse(**fields)
    assert caught.value.field == field
    assert field.partition("[")[0].partition(".")[0] in str(caught.value)


def test_large_body_is_parsed_alike(server: Server) -> None:
    """Above 64 KiB another process parses it: the record must be one that passes between processes."""
    tools = [TOOL, {**TOOL, "name": "long", "description": "x" * 70_000, "strict": True}]
    body = {
        "messages": [{"role": "user", "content": [text_block("?")]}],
        "tools": tools,
        "thinking": {"type": "adaptive"},
    }
    counts = [server.post("/v1/messages/count_tokens", {**body, "tools": some}).json() for some in (tools, tools[:1])]
    assert counts[0]["input_tokens"] > 70_000 > counts[1]["input_tokens"]
    for some in (tools[:1], tools):
        some = [*some, {**TOOL, "input_schema": {"type": "object", "maxProperties": 10**30}}]
        reply = server.post("/v1/messages/count_tokens", {**body, "tools": some})
        assert (reply.status_code, "64 bits" in reply.text) == (400, True)


def test_unknown_fields_are_listed_where_ignored() -> None:
    request = parse(ignores_unknown=True, zap=1, tools=[{**TOOL, "zip": 2}], **said("user", text_block("x", zop=3)))
    assert request.ignored == ["zap", "messages[0].content[0].zop", "tools[0].zip"]


def test_skipped_tools_are_named(server: Server) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}]
    for path, fields in (("/v1/messages", SOUND), ("/v1/messages/count_tokens", {"messages": [USER]})):
        reply = server.post(path, {**fields, "tools": tools})
        assert (reply.status_code, reply.headers["x-skipped-tools"]) == (200, "web_search_20250305,bash_20250124")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (AuthenticationError("x"), "authentication_error"), (HostNotAllowedError("x"), "permission_error"),
        (PayloadTooLargeError("x"), "request_too_large"), (QueueFullError("x"), "rate_limit_error"),
        (InferenceError("x"), "api_error"), (ModelLoadingError("x"), "overloaded_error"),
    ],
)  # fmt: skip
def test_error_type_follows_status(error: WorkerError, kind: str) -> None:
    assert error_body(error)["error"] == {"type": kind, "message": "x"}


def test_errors_have_their_form(server: Server, locked: Server) -> None:
    long = {**SOUND, "messages": [{"role": "user", "content": "#" * CONTEXT}]}
    replies = [
        (server.post("/v1/messages", {**SOUND, "model": "claude-x"}), 404, "not_found_error", "--served-model-name"),
        (server.http.get("/v1/messages/zap"), 404, "not_found_error", "no route"),
        (server.post("/v1/messages", long), 400, "invalid_request_error", "prompt is too long"),
        (server.post("/v1/messages/count_tokens", {"messages": 5}), 400, "invalid_request_error", "messages"),
        (httpx.post(f"{locked.url}/v1/messages", json=SOUND), 401, "authentication_error", "no API key"),
    ]
    for reply, status, kind, words in replies:
        body = reply.json()
        assert (reply.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert words in body["error"]["message"]
        assert body["request_id"] == reply.headers["x-correlation-id"]
    assert httpx.post(f"{locked.url}/v1/messages?beta=true", json=SOUND, headers={"x-api-key": KEY}).status_code == 200


def test_events_come_in_their_order(scripted: ScriptedServer) -> None:
    scripted.play(
        think("Hm.", "I look.\n" + call("get_weather", city="Rome") + "\n" + call("get_weather", city="Oslo"))
    )
    body = {**SOUND, "max_tokens": 500, "tools": [TOOL], "thinking": {"type": "adaptive"}, "stream": True}
    events = wire_events(scripted.post("/v1/messages", {**body, "context_management": {"edits": []}}))
    kinds: list[Any] = []
    for event in events:
        kind = (event["type"], event.get("index"), event.get("delta", {}).get("type"))
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    blocks = ["thinking_delta", "text_delta", "input_json_delta", "input_json_delta"]
    expected: list[Any] = [("message_start", None, None)]
    for i, delta in enumerate(blocks):
        signed = [("content_block_delta", i, "signature_delta")] if i == 0 else []
        expected += [("content_block_start", i, None), ("content_block_delta", i, delta), *signed]
        expected.append(("content_block_stop", i, None))
    assert kinds == [*expected, ("message_delta", None, None), ("message_stop", None, None)]
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in started] == ["thinking", "text", "tool_use", "tool_use"]
    assert len({block["id"] for block in started[2:]}) == 2
    written = ["".join(event["delta"].get("partial_json", "") for event in events if event.get("index") == i
                       and "delta" in event) for i in (2, 3)]  # fmt: skip
    assert list(map(json.loads, written)) == [{"city": "Rome"}, {"city": "Oslo"}]
    ended = events[-2]
    assert ended["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert ended["context_management"] == {"applied_edits": []}
    usage, first = ended["usage"], events[0]["message"]["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert total == first["input_tokens"] + first["cache_read_input_tokens"] == len(scripted.llm.tokenize(
        scripted.prompts[0], parse_special=True))  # fmt: skip
    assert usage["output_tokens_details"]["thinking_tokens"] > 0
    assert scripted.post("/v1/messages/count_tokens", {name: body[name] for name in (
        "messages", "tools", "thinking")}).json() == {"input_tokens": total}  # fmt: skip


def test_ping_is_an_event() -> None:
    assert MessagePrinter.ping == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_thinking_can_be_omitted(scripted: ScriptedServer) -> None:
    scripted.play(*[think("Secret.", "Hi")] * 2)
    body = {**SOUND, "max_tokens": 100, "thinking": {"type": "adaptive", "display": "omitted"}}
    whole = scripted.post("/v1/messages", body).json()
    assert whole["content"] == [{"type": "thinking", "thinking": "", "signature": "unsigned"}, text_block("Hi")]
    streamed = scripted.post("/v1/messages", {**body, "stream": True})
    assert "Secret" not in streamed.text
    deltas = [event["delta"]["type"] for event in wire_events(streamed) if event["type"] == "content_block_delta"]
    assert deltas[0] == "signature_delta"


@pytest.mark.parametrize("is_stream", [False, True])
def test_cut_call_keeps_its_text(scripted: ScriptedServer, is_stream: bool) -> None:
    written = call("get_weather", city="Rome, the eternal city")
    scripted.play(written)
    kept = len(scripted.llm.tokenize(written[: written.index("eternal")], parse_special=True, add_special=False))
    reply = scripted.post("/v1/messages", {**SOUND, "max_tokens": kept, "tools": [TOOL], "stream": is_stream})
    if not is_stream:
        message = reply.json()
        assert message["stop_reason"] == "max_tokens"
        assert message["content"][0]["input"] == {"partial_json": '{"city": "Rome, the '}
        return
    events = wire_events(reply)
    parts = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(parts) == '{"city": "Rome, the '
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_context_limit_has_its_stop_reason(start: Start) -> None:
    server = start({"max_context": 64})
    message = server.post("/v1/messages", {**SOUND, "max_tokens": 1000}).json()
    total = message["usage"]["input_tokens"] + message["usage"]["output_tokens"]
    assert (message["stop_reason"], total) == ("model_context_window_exceeded", 64)
