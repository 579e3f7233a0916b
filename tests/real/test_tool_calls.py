"""Calls of tools that a real model must make, by the SDKs: every one names an offered tool, its arguments are valid,
and no markup of the chat format is left in the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import jsonschema_rs
import ollama
import openai
import pytest

from llm_worker_rbee import LLM
from tests.helpers.serve_process import ServeProcess

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS: dict[str, tuple[str, dict[str, Any]]] = {  # name: description, parameters
    "get_weather": ("The weather in a city.", {"city": STRING, "unit": {"enum": ["celsius", "fahrenheit"]}}),
    "send_mail": ("Send a mail.", {"to": STRING, "subject": STRING, "body": STRING}),
    "add": ("Add two integers.", {"a": INTEGER, "b": INTEGER}),
    "find_flights": ("Find flights.", {"start": STRING, "end": STRING, "passengers": INTEGER}),
}
CITIES = ("Paris", "Oslo", "Cairo", "Lima", "Tokyo")
QUESTIONS = [
    *[("get_weather", f"What is the weather in {city}, in celsius?") for city in CITIES],
    *[("send_mail", f"Mail to {city.lower()}@example.com that the train is late.") for city in CITIES],
    *[("add", f"What is {17 * i} + {i + 4}?") for i in range(1, 6)],
    *[("find_flights", f"Find flights from {city} to Rome for two people.") for city in CITIES],
]  # fmt: skip


def schema(name: str) -> dict[str, Any]:
    properties = TOOLS[name][1]
    return {"type": "object", "properties": properties, "required": list(properties)}


def chat_tools() -> Any:
    """Return the tools as chat completions and Ollama take them."""
    return [
        {"type": "function", "function": {"name": name, "description": about, "parameters": schema(name)}}
        for name, (about, _) in TOOLS.items()
    ]


class Call:
    """A call with the text beside it."""

    def __init__(self, name: str, arguments: Any, text: str | None) -> None:
        self.name, self.text = name, text or ""
        self.arguments = json.loads(arguments) if isinstance(arguments, str) else arguments


def by_chat(url: str, question: str, choice: str, is_streamed: bool) -> list[Call]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chosen: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    asked: Any = {
        "model": "coder", "messages": [{"role": "user", "content": question}], "tools": chat_tools(),
        "tool_choice": chosen, "temperature": 0, "max_tokens": 200, "parallel_tool_calls": False,
    }  # fmt: skip
    if is_streamed:
        with client.chat.completions.stream(**asked) as stream:
            reply = stream.get_final_completion()
    else:
        reply = client.chat.completions.create(**asked)
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls"
    return [Call(call.function.name, call.function.arguments, message.content) for call in message.tool_calls or ()]


def by_responses(url: str, question: str, choice: str, is_streamed: bool) -> list[Call]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    tools = [{"type": "function", "name": name, "description": about, "parameters": schema(name), "strict": False}
             for name, (about, _) in TOOLS.items()]  # fmt: skip
    chosen: Any = choice if choice == "required" else {"type": "function", "name": choice}
    asked: Any = {
        "model": "coder", "input": question, "tools": tools, "tool_choice": chosen, "temperature": 0,
        "max_output_tokens": 200, "parallel_tool_calls": False,
    }  # fmt: skip
    if is_streamed:
        with client.responses.stream(**asked) as stream:
            reply: Any = stream.get_final_response()
    else:
        reply = client.responses.create(**asked)
    return [Call(item.name, item.arguments, reply.output_text) for item in reply.output if item.type == "function_call"]


def by_messages(url: str, question: str, choice: str, is_streamed: bool) -> list[Call]:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tools = [{"name": name, "description": about, "input_schema": schema(name)} for name, (about, _) in TOOLS.items()]
    chosen = {"type": "any"} if choice == "required" else {"type": "tool", "name": choice}
    asked: Any = {
        "model": "coder", "messages": [{"role": "user", "content": question}], "tools": tools, "max_tokens": 200,
        "tool_choice": {**chosen, "disable_parallel_tool_use": True}, "extra_body": {"temperature": 0},
    }  # fmt: skip
    if is_streamed:
        with client.messages.stream(**asked) as stream:
            reply = stream.get_final_message()
    else:
        reply = client.messages.create(**asked)
    assert reply.stop_reason == "tool_use"
    text = "".join(block.text for block in reply.content if block.type == "text")
    return [Call(block.name, block.input, text) for block in reply.content if block.type == "tool_use"]


Dialect = Callable[[str, str, str, bool], list[Call]]


@pytest.mark.parametrize("dialect", [by_chat, by_responses, by_messages])
@pytest.mark.parametrize("is_named", [False, True], ids=["required", "named"])
def test_every_call_is_one_that_was_offered(server: ServeProcess, dialect: Dialect, is_named: bool) -> None:
    def ask(number: int) -> list[Call]:
        name, question = QUESTIONS[number]
        return dialect(server.url, question, name if is_named else "required", number % 2 == 1)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(len(QUESTIONS))))
    for (name, question), calls in zip(QUESTIONS, answers, strict=True):
        assert len(calls) == 1, question
        assert calls[0].name in ([name] if is_named else TOOLS), question
        jsonschema_rs.Draft202012Validator(schema(calls[0].name)).validate(calls[0].arguments)
        assert not set(calls[0].arguments) - set(TOOLS[calls[0].name][1]), question
        assert not calls[0].text, question
    right = sum(calls[0].name == name for (name, _), calls in zip(QUESTIONS, answers, strict=True))
    print(f"{dialect.__name__}: {len(answers)} of {len(answers)} calls, {right} of the expected tool")


def test_ollama_calls_tools(server: ServeProcess) -> None:
    """It has no way to demand a call: the model chooses."""
    client, num_calls = ollama.Client(server.url), 0
    for name, question in QUESTIONS[::5]:
        options = {"temperature": 0, "num_predict": 200}
        reply = client.chat("coder", [{"role": "user", "content": question}], tools=chat_tools(), options=options)
        assert "<tool_call>" not in (reply.message.content or "")
        for call in reply.message.tool_calls or ():
            assert call.function.name in TOOLS
            num_calls += call.function.name == name
    assert num_calls


def test_result_of_a_call_is_answered(server: ServeProcess) -> None:
    """Auto, a result, and the answer that tells of it; none: no call, whatever was asked."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked: Any = {"model": "coder", "tools": chat_tools(), "temperature": 0, "max_tokens": 200}
    messages: list[Any] = [{"role": "user", "content": "Use a tool: what is the weather in Oslo, in celsius?"}]
    none = client.chat.completions.create(**asked, messages=messages, tool_choice="none").choices[0].message
    assert none.tool_calls is None
    assert "<tool_call>" not in (none.content or "")
    first = client.chat.completions.create(**asked, messages=messages, tool_choice="auto").choices[0].message
    assert first.tool_calls, first.content
    (call,) = first.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "snow", "temperature": -17}'}
    follow_up = {"role": "user", "content": "Tell me the temperature in a sentence."}  # the 1.5B calls again without it
    messages += [first.model_dump(exclude_none=True), result, follow_up]
    second = client.chat.completions.create(**asked, messages=messages, tool_choice="none").choices[0].message
    assert "17" in (second.content or ""), second


def test_parallel_calls_are_all_valid(server: ServeProcess) -> None:
    """How many calls a small model makes is its own choice; each is of an offered tool."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    question = "Get the weather in Paris and in Oslo, in celsius. Call the tool twice."
    reply = client.chat.completions.create(
        model="coder", messages=[{"role": "user", "content": question}], tools=chat_tools(), tool_choice="required",
        parallel_tool_calls=True, temperature=0, max_tokens=300,
    )  # fmt: skip
    calls: Any = reply.choices[0].message.tool_calls or []
    assert calls
    for call in calls:
        arguments = json.loads(call.function.arguments)
        jsonschema_rs.Draft202012Validator(schema(call.function.name)).validate(arguments)
    print(f"{len(calls)} calls: {[call.function.arguments for call in calls]}")


def test_calls_in_python(coder: Path) -> None:
    llm = LLM(coder, max_context=2048)
    for name, question in QUESTIONS[::5]:
        for choice in ("required", name):
            reply = llm.chat(
                [{"role": "user", "content": question}], tools=chat_tools(), tool_choice=choice, temperature=0,
                max_tokens=200, parallel_tool_calls=False,
            )  # fmt: skip
            (call,) = reply.tool_calls
            assert call.name == name
            jsonschema_rs.Draft202012Validator(schema(name)).validate(json.loads(call.arguments))
