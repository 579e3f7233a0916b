"""gpt-oss over HTTP: channels become reasoning, text and calls in every dialect, and messages that clients send back
become a prompt that its template accepts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests.helpers.scripted_engine import HARMONY, ScriptedServer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
USER: dict[str, Any] = {"role": "user", "content": "Weather?"}
NEXT, ANALYSIS = "<|end|><|start|>assistant", "<|channel|>analysis<|message|>"
FINAL = f"{ANALYSIS}It rains.{NEXT}<|channel|>final<|message|>Rain.<|return|>"
HEADERS = {  # the two orders in which models write the recipient
    "channel first": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
    "recipient first": " to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>",
}
CALL = f'{ANALYSIS}Look up.{NEXT}{HEADERS["channel first"]}{{"city": "Paris"}}<|call|>'
PREAMBLE = f"{ANALYSIS}Look up.{NEXT}<|channel|>commentary<|message|>I look.{NEXT}"
PREAMBLE_CALL = f'{PREAMBLE}{HEADERS["recipient first"]}{{"city": "Paris"}}<|call|>'
ARGUMENTS = '{"city": "Paris"}'
CALLED = f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with ScriptedServer(tmp_path_factory.mktemp("harmony"), HARMONY) as running:
        running.ready()
        yield running


def returned(content: str) -> str:
    """Return the result of a call as the template prints it."""
    return f"<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>{json.dumps(content)}<|end|>"


def chat(server: ScriptedServer, *messages: Any, **fields: Any) -> dict[str, Any]:
    reply = server.post("/v1/chat/completions", {"messages": [USER, *messages], "tools": TOOLS, **fields})
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return message


def folded(client: openai.OpenAI) -> tuple[str, str, str, str | None]:
    """Return reasoning, content, arguments and finish reason of a streamed chat completion."""
    reasoning = content = arguments = ""
    finish = None
    for chunk in client.chat.completions.create(model="tiny", messages=[USER], tools=TOOLS, stream=True):  # type: ignore[list-item]
        delta, finish = chunk.choices[0].delta, chunk.choices[0].finish_reason
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
        for call in delta.tool_calls or ():
            assert call.function is not None
            arguments += call.function.arguments or ""
    return reasoning, content, arguments, finish


def test_chat_completions_separate_the_channels(harmony: ScriptedServer) -> None:
    answers = {
        FINAL: ("It rains.", "Rain.", "", "stop"),
        CALL: ("Look up.", "", ARGUMENTS, "tool_calls"),
        PREAMBLE_CALL: ("Look up.", "I look.", ARGUMENTS, "tool_calls"),
    }
    for answer, expected in answers.items():
        harmony.play(answer, answer)
        message = chat(harmony)
        calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
        assert (message["reasoning_content"], message["content"] or "", "".join(calls)) == expected[:3]
        assert folded(harmony.openai()) == expected


def test_other_dialects_separate_the_channels(harmony: ScriptedServer) -> None:
    harmony.play(PREAMBLE_CALL, PREAMBLE_CALL, PREAMBLE_CALL)
    tool: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
    items = harmony.openai().responses.create(model="tiny", input="Weather?", tools=[tool]).output
    assert [item.type for item in items] == ["reasoning", "message", "function_call"]
    claude = anthropic.Anthropic(base_url=harmony.url, api_key="none", max_retries=0)
    with claude.messages.stream(
        model="tiny", max_tokens=500, messages=[USER], thinking={"type": "adaptive"},  # type: ignore[list-item]
        tools=[{"name": "get_weather", "input_schema": SCHEMA}],
    ) as stream:  # fmt: skip
        blocks = stream.get_final_message().to_dict()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    assert (blocks[0]["thinking"], blocks[2]["input"]) == ("Look up.", {"city": "Paris"})
    answer = ollama.Client(host=harmony.url).chat(model="tiny", messages=[USER], tools=TOOLS, think="high").message
    assert (answer.thinking, answer.content) == ("Look up.", "I look.")
    assert [call.function.arguments for call in answer.tool_calls or ()] == [{"city": "Paris"}]
    assert ["Reasoning: high" in prompt for prompt in harmony.prompts] == [False, False, True]


def test_second_turn_has_the_call_and_its_result(harmony: ScriptedServer) -> None:
    """The template takes content or reasoning beside a call: with both, the text follows the reasoning."""
    harmony.play(CALL, FINAL, PREAMBLE_CALL, FINAL, FINAL)
    for reasoning in ("Look up.", "Look up.\n\nI look."):
        asked = chat(harmony)
        result = {"role": "tool", "tool_call_id": asked["tool_calls"][0]["id"], "content": "rain"}
        answered = chat(harmony, asked, result)
        assert harmony.prompts[-1].endswith(
            f"<|start|>assistant{ANALYSIS}{reasoning}<|end|>{CALLED}{returned('rain')}<|start|>assistant"
        )
    chat(harmony, asked, result, answered, {"role": "user", "content": "And now?"})  # reasoning of past turns is gone
    final = "<|start|>assistant<|channel|>final<|message|>Rain.<|end|>"
    then = f"{final}<|start|>user<|message|>And now?<|end|><|start|>assistant"
    assert harmony.prompts[-1].endswith(f"Weather?<|end|>{CALLED}{returned('rain')}{then}")


def test_second_turns_of_other_dialects_are_the_same_prompt(harmony: ScriptedServer) -> None:
    harmony.play(*(PREAMBLE_CALL, FINAL) * 3)
    tool: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
    responses = harmony.openai().responses
    items: Any = [item.to_dict() for item in responses.create(model="tiny", input="Weather?", tools=[tool]).output]
    output = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "rain"}
    assert responses.create(model="tiny", input=[USER, *items, output], tools=[tool]).output_text == "Rain."
    claude: Any = anthropic.Anthropic(base_url=harmony.url, api_key="none", max_retries=0).messages
    ask = {"model": "tiny", "max_tokens": 500, "thinking": {"type": "adaptive"}}
    ask["tools"] = [{"name": "get_weather", "input_schema": SCHEMA}]
    blocks = [block.to_dict() for block in claude.create(messages=[USER], **ask).content]
    result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "rain"}
    history = [USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    assert claude.create(messages=history, **ask).content[-1].text == "Rain."
    client = ollama.Client(host=harmony.url)
    asked = client.chat(model="tiny", messages=[USER], tools=TOOLS).message
    answer = {"role": "tool", "tool_name": "get_weather", "content": "rain"}
    assert client.chat(model="tiny", messages=[USER, asked, answer], tools=TOOLS).message.content == "Rain."
    turn = f"{ANALYSIS}Look up.\n\nI look.<|end|>{CALLED}{returned('rain')}<|start|>assistant"
    assert [prompt.endswith(turn) for prompt in harmony.prompts] == [False, True] * 3


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_calls_of_one_message_follow_each_other(harmony: ScriptedServer, order: tuple[str, str]) -> None:
    """The template shows one call a message; each is followed by its own result."""
    harmony.play(FINAL)
    function = {"name": "get_weather", "arguments": ARGUMENTS}
    calls = [{"id": name, "type": "function", "function": function} for name in ("a", "b")]
    results = [{"role": "tool", "tool_call_id": name, "content": f"result {name}"} for name in order]
    chat(harmony, {"role": "assistant", "content": None, "reasoning_content": "Both.", "tool_calls": calls}, *results)
    both = f"{CALLED}{returned('result a')}{CALLED}{returned('result b')}"
    assert harmony.prompts[-1].endswith(f"{ANALYSIS}Both.<|end|>{both}<|start|>assistant")


@pytest.mark.parametrize(
    ("effort", "shown"),
    [(None, "medium"), ("none", "low"), ("minimal", "low"), ("low", "low"), ("medium", "medium"), ("high", "high"),
     ("xhigh", "high"), ("max", "high")],
)  # fmt: skip
def test_effort_of_reasoning_is_one_of_its_three(harmony: ScriptedServer, effort: str | None, shown: str) -> None:
    harmony.play(FINAL)
    chat(harmony, **({} if effort is None else {"reasoning_effort": effort}))
    assert f"Reasoning: {shown}<|end|>" in harmony.prompts[0]


def test_schema_holds_the_final_channel_alone(harmony: ScriptedServer) -> None:
    """What is played obeys no mask: a wrong text after the reasoning is a dead end."""
    right, wrong = (f"{ANALYSIS}Not {{json}}.{NEXT}<|channel|>final<|message|>{end}" for end in (ARGUMENTS, "Oslo"))
    harmony.play(right, wrong)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    message = chat(harmony, response_format=schema, tools=[])
    assert (message["reasoning_content"], message["content"]) == ("Not {json}.", ARGUMENTS)
    refused = harmony.post("/v1/chat/completions", {"messages": [USER], "response_format": schema})
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "GRAMMAR_DEAD_END")
