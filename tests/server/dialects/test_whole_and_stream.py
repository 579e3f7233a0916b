"""A whole reply is the fold of its stream, in every dialect: what the clients' own accumulators make of a stream equals
the whole reply to the same answer, whatever the order of text, reasoning and calls in it."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import ollama
import pytest

from tests.helpers.scripted_engine import ScriptedServer, call, think

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PARIS, OSLO = call("get_weather", city="Paris"), call("get_weather", city='Ós"lo')
ANSWERS = {
    "nothing": "",
    "text": "Hello, ü!",
    "call": PARIS,
    "text, call": f"I look.\n{PARIS}",
    "call, text": f"{PARIS}\nParis it is.",
    "text, call, text": f"I look.\n{PARIS}\nParis it is.",
    "text, call, text, call": f"First Paris.\n{PARIS}\nThen Oslo.\n{OSLO}",
    "call, call, text": f"{PARIS}\n{OSLO}\nBoth.",
    "reasoning, text": think("Hm.", "Yes."),
    "reasoning, call, text": think("Hm.", f"{PARIS}\nParis it is."),
    "reasoning, text, call, reasoning, text": think("Hm.", f"So.\n{PARIS}\n") + think("Again.", "Done."),
    "malformed call, text": 'Look:\n<tool_call>\n{"name": "get_weather", "arguments": nothing}\n</tool_call>\nNo.',
    "cut call": f"I look.\n{PARIS[:-20]}",
    "call as JSON": '{"name": "get_weather", "arguments": {"city": "Paris"}}',
    "reasoning, call as JSON": think(
        "Hm.", '```json\n{\n  "name": "get_weather",\n  "arguments": {"city": "Paris"}\n}\n```'
    ),
    "JSON that is no call": '```json\n{"name": "get_weather", "arguments": {"town": "Paris"}}\n```\n',
}
NOT_COMPARED = ("id", "call_id", "parsed", "parsed_arguments")
each_answer = pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)


def without_ids(value: Any) -> Any:
    """Return JSON without what is new in each reply, and without what the accumulators add."""
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if isinstance(value, dict):
        return {key: without_ids(one) for key, one in value.items() if key not in NOT_COMPARED}
    return value


@each_answer
def test_anthropic_message(scripted: ScriptedServer, answer: str) -> None:
    client = anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0)
    ask: dict[str, Any] = {
        "model": "tiny", "max_tokens": 2000, "messages": [{"role": "user", "content": "x"}],
        "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
        "thinking": {"type": "adaptive"},
    }  # fmt: skip
    scripted.play(answer, answer)
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    found, expected = without_ids(whole.to_dict()["content"]), without_ids(streamed.to_dict()["content"])
    if answer == ANSWERS["cut call"]:  # the accumulator makes an object of what it can
        assert (found.pop()["type"], expected.pop()["type"]) == ("tool_use", "tool_use")
    assert found == expected
    assert (whole.stop_reason, whole.usage.output_tokens) == (streamed.stop_reason, streamed.usage.output_tokens)


@each_answer
@pytest.mark.parametrize("include", [[], ["message.output_text.logprobs"]], ids=["plain", "logprobs"])
def test_response(scripted: ScriptedServer, answer: str, include: list[Any]) -> None:
    client = scripted.openai()
    tools: list[Any] = [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]
    ask: dict[str, Any] = {"model": "tiny", "input": "x", "tools": tools, "include": include}
    scripted.play(answer, answer, answer)
    whole = client.responses.create(**ask)
    expected = without_ids([item.to_dict() for item in whole.output])
    events = list(client.responses.create(**ask, stream=True))
    assert without_ids([one.item.to_dict() for one in events if one.type == "response.output_item.done"]) == expected
    if answer != ANSWERS["cut call"]:  # whose arguments the client does not parse
        with client.responses.stream(**ask) as stream:
            streamed = stream.get_final_response()
        assert without_ids([item.to_dict() for item in streamed.output]) == expected
        assert (whole.status, whole.output_text) == (streamed.status, streamed.output_text)
    if include:
        for part in [part for item in whole.output if item.type == "message" for part in item.content]:
            assert b"".join([bytes(one.bytes) for one in part.logprobs or ()]).decode() == part.text


@each_answer
def test_chat_completion(scripted: ScriptedServer, answer: str) -> None:
    client = scripted.openai()
    ask: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}],
    }  # fmt: skip
    scripted.play(answer, answer)
    whole = client.chat.completions.create(**ask)
    with client.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
        streamed = stream.get_final_completion()
    found, expected = (without_ids(reply.choices[0].to_dict()) for reply in (whole, streamed))
    for choice in (found, expected):  # absent or empty are the same
        message = choice["message"] = {key: value for key, value in choice["message"].items() if value}
        for one in message.get("tool_calls", []):
            one.pop("index", None)
    assert found == expected
    assert whole.usage.completion_tokens == streamed.usage.completion_tokens


@each_answer
def test_ollama_chat(scripted: ScriptedServer, answer: str) -> None:
    client = ollama.Client(host=scripted.url)
    ask: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}],
    }  # fmt: skip
    scripted.play(answer, answer)
    whole = client.chat(**ask)
    lines = list(client.chat(**ask, stream=True))
    assert (whole.message.content or "") == "".join([line.message.content or "" for line in lines])
    assert (whole.message.thinking or "") == "".join([line.message.thinking or "" for line in lines])
    streamed = [made for line in lines for made in line.message.tool_calls or ()]
    assert json.dumps([made.model_dump() for made in whole.message.tool_calls or ()]) == json.dumps(
        [made.model_dump() for made in streamed]
    )
    assert (whole.done_reason, whole.eval_count) == (lines[-1].done_reason, lines[-1].eval_count)
