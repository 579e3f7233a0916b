"""OpenAI's Responses API with the official client, unchanged: items, events, tools, reasoning, and what is refused."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from llm_worker_rbee.server.dialects.openai_responses_printer import InputDecoder
from tests.helpers.scripted_engine import CONTEXT, ScriptedServer, call, think
from tests.helpers.server import Server

WEATHER: dict[str, Any] = {
    "type": "function", "name": "get_weather", "description": "The weather of a city.", "strict": True,
    "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": False,
    },
}  # fmt: skip
PATCH_GRAMMAR = """
start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?
hunk: "*** Delete File: " /(.+)/ LF
%import common.LF
"""
PATCH = '*** Begin Patch\n*** Delete File: a "b"\\é\U0001f600\n*** End Patch\n'
APPLY_PATCH = {
    "type": "custom", "name": "apply_patch", "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
}  # fmt: skip
LONG = "Rules of the house. " * 100


@pytest.fixture(scope="module")
def client(scripted: ScriptedServer) -> openai.OpenAI:
    return scripted.openai()


def items(response: Any) -> list[Any]:
    """Type and content of the items of a response."""
    found = []
    for item in response.output:
        data = item.model_dump()
        texts = [part["text"] for part in data.get("content") or data.get("summary") or []]
        found.append((item.type, item.status, data.get("name"), data.get("arguments") or data.get("input") or texts))
    return found


def test_whole_response_has_reasoning_text_and_calls(scripted: ScriptedServer, client: openai.OpenAI) -> None:
    scripted.play(think("A city.", "Let me look.\n" + call("get_weather", city="Paris")))
    response = client.responses.create(
        model="tiny", input="Weather?", instructions="Be brief.", tools=[WEATHER], metadata={"run": "7"}, temperature=0
    )
    assert (response.status, response.store, response.error) == ("completed", False, None)
    assert items(response) == [
        ("reasoning", "completed", None, ["A city."]), ("message", "completed", None, ["Let me look."]),
        ("function_call", "completed", "get_weather", '{"city": "Paris"}'),
    ]  # fmt: skip
    assert response.output_text == "Let me look."
    prefixes = [item.id.partition("_")[0] for item in response.output]
    assert [response.id.partition("_")[0], *prefixes] == ["resp", "rs", "msg", "fc"]
    assert response.output[2].call_id.startswith("call_")
    echoed = (response.instructions, response.metadata, response.temperature, response.tool_choice)
    assert echoed == ("Be brief.", {"run": "7"}, 0, "auto")
    assert response.tools[0].name == "get_weather"
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens == len(scripted.llm.tokenizer.encode(scripted.prompts[0], parse_special=True))
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert "Be brief." in scripted.prompts[0]


@pytest.mark.parametrize("summary", [None, "auto"])
def test_stream_has_events_in_official_order(
    scripted: ScriptedServer, client: openai.OpenAI, summary: Literal["auto"] | None
) -> None:
    answer = think("Hm.", "Sure\n" + call("get_weather", city="Oslo") + call("apply_patch", input=PATCH))
    scripted.play(answer, answer)
    tools: Any = [WEATHER, APPLY_PATCH]
    asked: dict[str, Any] = {"model": "tiny", "input": "x", "tools": tools, "reasoning": {"summary": summary}}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    order = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    text, part = ("reasoning_text", "content_part") if summary is None else ("reasoning_summary_text",) * 2
    part = part.replace("_text", "_part")
    assert order == [
        "created", "in_progress", "output_item.added", f"{part}.added", f"{text}.delta", f"{text}.done", f"{part}.done",
        "output_item.done", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "output_item.added", "custom_tool_call_input.delta",
        "custom_tool_call_input.done", "output_item.done", "completed",
    ]  # fmt: skip
    done = [event.item for event in events if event.type == "response.output_item.done"]
    final = events[-1].response
    assert [item.model_dump() for item in final.output] == [item.model_dump() for item in done]
    assert items(final) == items(whole)
    assert items(final)[3] == ("custom_tool_call", "completed", "apply_patch", PATCH)
    assert final.usage.output_tokens == whole.usage.output_tokens
    for index in range(4):
        deltas = [one.delta for one in events if "delta" in one.type and one.output_index == index]
        ends = [one for one in events if one.type.endswith(("_text.done", "arguments.done", "input.done"))]
        last = ends[index].model_dump()
        assert last["output_index"] == index
        assert "".join(deltas) == (last.get("text") or last.get("arguments") or last.get("input"))
    assert all(event.response.id == final.id for event in events[:2])


def test_stream_helper_of_client_parses_arguments(scripted: ScriptedServer, client: openai.OpenAI) -> None:
    scripted.play(call("get_weather", city="Rome"))
    with client.responses.stream(model="tiny", input="x", tools=[WEATHER]) as stream:
        for event in stream:
            if event.type == "response.function_call_arguments.delta":
                snapshot = event.snapshot
        final = stream.get_final_response()
    assert snapshot == final.output[0].arguments == '{"city": "Rome"}'
    assert final.output[0].parsed_arguments == {"city": "Rome"}


class Report(BaseModel):
    city: Literal["Rome", "Oslo"]
    is_sunny: bool
    days: list[Literal["1", "2"]]


def test_parse_gives_object_of_real_model(server: Server) -> None:
    """The grammar decides: this model writes digits without end."""
    response = server.openai().responses.parse(
        model="tiny", input="x", text_format=Report, max_output_tokens=200, extra_body={"close_on_length": True}
    )
    assert isinstance(response.output_parsed, Report)
    assert response.text.format.type == "json_schema"
    found = server.openai().responses.create(
        model="tiny", input="x", text={"format": {"type": "json_object"}}, max_output_tokens=60,
        extra_body={"close_on_length": True},
    )  # fmt: skip
    assert isinstance(json.loads(found.output_text), dict)


def test_second_turn_of_agent_is_found_in_prefix_cache(scripted: ScriptedServer, client: openai.OpenAI) -> None:
    """What the first turn gave is sent back as it came; the prompt begins with the one before and its answer."""
    spoken = think("Hm.", "Let me look.\n" + call("get_weather", city="Paris"))
    patched = think("Now the file.", call("apply_patch", input=PATCH))
    scripted.play(spoken, patched, "Done.")
    history: list[Any] = [{"role": "developer", "content": "Help."}, {"role": "user", "content": "Weather?"}]
    asked: dict[str, Any] = {"model": "tiny", "instructions": LONG, "tools": [WEATHER, APPLY_PATCH]}
    first = client.responses.create(**asked, input=history)
    history += [*first.output, {
        "type": "function_call_output", "call_id": first.output[-1].call_id,
        "output": [{"type": "input_text", "text": "rain"}],
    }]  # fmt: skip
    second = client.responses.create(**asked, input=history, prompt_cache_key="k", user="u")
    history += [*second.output, {
        "type": "custom_tool_call_output", "call_id": second.output[-1].call_id, "output": "ok",
    }]  # fmt: skip
    third = client.responses.create(**asked, input=history)
    for before, answer, after in zip(scripted.prompts, (spoken, patched), scripted.prompts[1:], strict=False):
        assert after.startswith(before + answer)
    for turn, earlier in ((second, first), (third, second)):
        cached = turn.usage.input_tokens_details.cached_tokens
        assert earlier.usage.input_tokens > 1_500
        assert cached > 0.95 * earlier.usage.input_tokens
        assert cached > 0.95 * turn.usage.input_tokens
    assert third.output_text == "Done."


def test_reasoning_comes_back_by_whatever_client_keeps(scripted: ScriptedServer, client: openai.OpenAI) -> None:
    scripted.play(think("Two steps.", "4"), "a", "b", "c", "d")
    reasoning, message = client.responses.create(model="tiny", input="2+2").output
    kept = [
        {"summary": [], "encrypted_content": reasoning.encrypted_content},
        {"summary": [], "content": [{"type": "reasoning_text", "text": "Two steps."}], "encrypted_content": None},
        {"summary": [{"type": "summary_text", "text": "Two steps."}]},
    ]
    for item in kept:
        history: list[Any] = [{"role": "user", "content": "2+2"}, {"type": "reasoning", **item}, message, USER]
        client.responses.create(model="tiny", input=history)
    assert len(set(scripted.prompts[1:])) == 1
    assert "<think>\nTwo steps.\n</think>\n\n4<|im_end|>" in scripted.prompts[1]
    foreign: Any = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA-of-another-server"}
    client.responses.create(model="tiny", input=[USER, foreign, message, USER])
    assert "<think>" not in scripted.prompts[-1]


USER: Any = {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}


def test_items_become_messages(scripted: ScriptedServer, client: openai.OpenAI) -> None:
    scripted.play("x")
    history: list[Any] = [
        USER, {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "namespace": "mcp__", "arguments": '{"broken'},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": "two"},
        {"role": "system", "content": "late"}, {"role": "user", "content": "<|im_end|>"},
    ]  # fmt: skip
    client.responses.create(model="tiny", input=history)
    prompt = scripted.prompts[0]
    assert "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nc\n<tool_call>" in prompt
    assert '"mcp__g"' in prompt
    assert prompt.index("one\n") < prompt.index("two\n") < prompt.index("late")


def test_tools_of_namespaces_keep_their_names(scripted: ScriptedServer, client: openai.OpenAI) -> None:
    inner = {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}, "strict": False}
    tools: Any = [
        {"type": "namespace", "name": "mcp__files__", "description": "Files.", "tools": [inner, {"type": "zap"}]},
        {"type": "web_search"}, {"type": "local_shell"}, {"type": "namespace", "name": "v1", "tools": [APPLY_PATCH]},
    ]  # fmt: skip
    scripted.play(call("mcp__files__read") + call("v1__apply_patch", input=PATCH))
    raw = client.responses.with_raw_response.create(model="tiny", input="x", tools=tools)
    assert raw.headers["x-skipped-tools"] == "zap,web_search,local_shell"
    found, custom = raw.parse().output
    assert (found.namespace, found.name) == ("mcp__files__", "read")
    assert (custom.namespace, custom.name, custom.input) == ("v1", "apply_patch", PATCH)
    assert "mcp__files__read" in scripted.prompts[0]
    assert "web_search" not in scripted.prompts[0]


def test_tool_choice(scripted: ScriptedServer, client: openai.OpenAI) -> None:
    scripted.play(*[call("get_weather", city="a")] * 3, call("apply_patch", input=PATCH), "no")
    choices: list[Any] = [
        "required", {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
        {"type": "custom", "name": "apply_patch"}, "none",
    ]  # fmt: skip
    for choice in choices:
        response = client.responses.create(
            model="tiny", input="x", tools=[WEATHER, APPLY_PATCH], tool_choice=choice, parallel_tool_calls=False
        )
        assert response.tool_choice == choice or response.tool_choice.model_dump(exclude_none=True) == choice
    assert ["apply_patch" in prompt for prompt in scripted.prompts][:4] == [True, True, False, True]
    assert response.output_text == "no"


def test_answer_that_is_cut_is_incomplete(scripted: ScriptedServer, client: openai.OpenAI) -> None:
    scripted.play("abcdef", *["abcdef"] * 2, call("get_weather", city="Paris"))
    whole = client.responses.create(model="tiny", input="x", max_output_tokens=3)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert items(whole) == [("message", "incomplete", None, ["abc"])]
    last = list(client.responses.create(model="tiny", input="x", max_output_tokens=3, stream=True))[-1]
    assert (last.type, items(last.response)) == ("response.incomplete", items(whole))
    assert last.response.usage.output_tokens == 3
    raw = client.responses.with_raw_response.create(model="tiny", input="x", max_output_tokens=10**9)
    assert int(raw.headers["x-effective-max-tokens"]) < CONTEXT
    cut = client.responses.create(model="tiny", input="x", tools=[WEATHER], max_output_tokens=50)
    (item,) = cut.output
    assert (cut.status, item.status) == ("incomplete", "incomplete")
    assert '{"city": "Paris"}'.startswith(item.arguments)


def test_logprobs_are_those_of_the_text(scripted: ScriptedServer, client: openai.OpenAI) -> None:
    answer = think("the theory", "the thé\n" + call("get_weather", city="the"))
    scripted.play(answer, answer)
    asked: dict[str, Any] = {
        "model": "tiny", "input": "x", "tools": [WEATHER], "top_logprobs": 1,
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    }  # fmt: skip
    message = client.responses.create(**asked).output[1]
    part = message.content[0]
    assert b"".join(bytes(one.bytes) for one in part.logprobs).decode() == part.text == "the thé"
    assert all(len(one.top_logprobs) == 1 for one in part.logprobs)
    events = list(client.responses.create(**asked, stream=True))
    streamed = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [one.model_dump() for one in streamed] == [one.model_dump() for one in part.logprobs]


def test_empty_answer_is_empty_message(scripted: ScriptedServer, client: openai.OpenAI) -> None:
    scripted.play("", "")
    assert items(client.responses.create(model="tiny", input="x")) == [("message", "completed", None, [""])]
    events = list(client.responses.create(model="tiny", input="x", stream=True))
    assert items(events[-1].response) == [("message", "completed", None, [""])]


def test_error_inside_stream_is_failed_response(scripted: ScriptedServer, client: openai.OpenAI) -> None:
    scripted.play()  # the engine fails
    first, *_, last = client.responses.create(model="tiny", input="x", stream=True)
    assert (first.type, last.type) == ("response.created", "response.failed")
    assert (last.response.status, last.response.error.code) == ("failed", "server_error")
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="tiny", input="x")


def test_prompt_over_context_fails_as_agents_expect(scripted: ScriptedServer, client: openai.OpenAI) -> None:
    first, last = client.responses.create(model="tiny", input="x" * CONTEXT, stream=True)
    assert (first.type, last.type) == ("response.created", "response.failed")
    assert last.response.error.code == "context_length_exceeded"
    assert str(CONTEXT) in last.response.error.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="x" * CONTEXT)
    assert (caught.value.code, caught.value.param) == ("CONTEXT_LENGTH_EXCEEDED", "input")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "keeps no responses"),
    ({"previous_response_id": "resp_1"}, "previous_response_id cannot be used: this worker keeps no responses"),
    ({"conversation": "conv_1"}, "keeps no responses"),
    ({"background": True}, "keeps no responses"),
    ({"truncation": "auto"}, "truncation is not supported"),
    ({"input": []}, "input must be"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0] refers to a stored item"),
    ({"input": [{"id": "msg_1"}]}, "input[0] refers to a stored item"),
    ({"input": [USER, {"type": "web_search_call", "id": "1"}]}, "input[1].type is 'web_search_call'"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
     "input[0].content[0] must be a data URL"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": {}}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": None}]}, "input[0].output"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{**APPLY_PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "start: start"}}]},
     "tools[0].format.definition cannot be used: the rule start is recursive"),
    ({"tools": [{**APPLY_PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": "("}}]},
     "unclosed group"),
    ({"tools": [APPLY_PATCH] * 17}, "more than 16 grammars"),
    ({"tool_choice": "required"}, "tool_choice required needs tools"),
    ({"tool_choice": {"type": "function", "name": "zap"}, "tools": [WEATHER]}, "zap"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice must be"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"zap": 1}}, "reasoning.zap"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "zap"}}}}, "zap"),
    ({"include": ["zap"]}, "include must be"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"extra_body": {"zap": 1}}, "'zap'"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_what_is_not_supported_is_refused_by_name(
    scripted: ScriptedServer, client: openai.OpenAI, fields: dict[str, Any], said: str
) -> None:
    scripted.play()
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "tiny", "input": "x", **fields})
    assert said in caught.value.message
    assert "\n" not in caught.value.message
    assert not scripted.prompts


def test_large_body_is_parsed_alike(scripted: ScriptedServer, client: openai.OpenAI) -> None:
    """In another process; what is repeated in the reply passes through, integers without bounds too."""
    scripted.play("x")
    tools: Any = [{"type": "zap", "size": 10**30}, {"type": "namespace", "name": "n", "tools": [WEATHER]}]
    response = client.responses.create(model="tiny", instructions="y" * 100_000, input="x", tools=tools)
    assert response.output_text == "x"
    assert response.tools[0].size == 10**30


def test_stored_responses_are_not_found(client: openai.OpenAI) -> None:
    for find in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="keeps no responses"):
            find("resp_1")


def test_settings_without_effect_are_named(scripted: ScriptedServer, client: openai.OpenAI) -> None:
    scripted.play("x", "y")
    usual: dict[str, Any] = {
        "stream_options": {"include_obfuscation": False}, "prompt_cache_key": "k", "service_tier": "auto",
        "client_metadata": {"a": "b"}, "store": False, "truncation": "disabled", "include": [],
    }  # fmt: skip
    plain = client.responses.with_raw_response.create(model="tiny", input="x", extra_body=usual)
    assert "x-ignored-fields" not in plain.headers
    raw = client.responses.with_raw_response.create(
        model="tiny", input="x", text={"verbosity": "low"}, reasoning={"effort": "none", "context": "all_turns"}
    )
    assert raw.headers["x-ignored-fields"] == "text.verbosity,reasoning.context"
    assert scripted.prompts[1].endswith("</think>\n\n")


@pytest.mark.parametrize("text", ['a"b\\c\n\t\u00e9\U0001f600/', "", "\\", '"'])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_custom_input_is_decoded_wherever_it_is_cut(text: str, ascii_only: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    for size in range(1, len(arguments) + 1):
        decoder = InputDecoder()
        pieces = [decoder.push(arguments[at : at + size]) for at in range(0, len(arguments), size)]
        assert "".join(pieces) + decoder.finish() == text
    other = InputDecoder()
    assert other.push('{"patch": "x"}') + other.finish() == '{"patch": "x"}'


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


@pytest.fixture(scope="module")
def chat(scripted: ScriptedServer) -> ChatOpenAI:
    return ChatOpenAI(
        model="tiny", base_url=f"{scripted.url}/v1", api_key="none", use_responses_api=True, max_retries=0,
        output_version="responses/v1",
    )  # fmt: skip


def test_langchain_calls_tools_and_streams(scripted: ScriptedServer, chat: ChatOpenAI) -> None:
    spoken = think("Hm.", "Let me look.\n" + call("get_weather", city="Oslo"))
    scripted.play(spoken, "It rains.", spoken)
    bound = chat.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(f"{LONG} Weather?")]
    asked = bound.invoke(messages)
    (wanted,) = asked.tool_calls
    assert (wanted["name"], wanted["args"]) == ("get_weather", {"city": "Oslo"})
    answer = bound.invoke([*messages, asked, get_weather.invoke(wanted)])
    assert answer.text == "It rains."
    details = answer.usage_metadata
    assert details["input_token_details"]["cache_read"] > 0.95 * asked.usage_metadata["input_tokens"]
    chunks = list(bound.stream(messages))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.text == "Let me look."
    assert [(one["name"], one["args"]) for one in whole.tool_calls] == [("get_weather", {"city": "Oslo"})]


def test_langchain_structured_output(scripted: ScriptedServer, chat: ChatOpenAI) -> None:
    scripted.play(*['{"city": "Rome", "is_sunny": true, "days": ["1"]}'] * 2)
    expected = Report(city="Rome", is_sunny=True, days=["1"])
    assert chat.with_structured_output(Report).invoke("x") == expected
    assert list(chat.with_structured_output(Report).stream("x"))[-1] == expected
