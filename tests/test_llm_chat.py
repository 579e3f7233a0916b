"""Chats of the offline API: tools, reasoning and structured output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee import LLM, StructuredOutputsParams, Tool
from llm_worker_rbee.errors import GrammarDeadEndError, InvalidRequestError
from llm_worker_rbee.tokenizer.chat.events import ReasoningDelta, ToolCallStart
from tests.helpers.scripted_engine import ScriptedModel, call, think, write_chat_model

USER = {"role": "user", "content": "What is the weather in Paris?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool("get_weather", "The weather of a city.", PARAMETERS)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_chat_model(tmp_path_factory.mktemp("chat") / "chat.gguf"), backend="reference", kv_memory=64 << 20)


def play(llm: LLM, *replies: str) -> ScriptedModel:
    model = ScriptedModel(llm.tokenizer)
    model.replies = replies
    llm.engine.replace_model(model)
    return model


@pytest.mark.parametrize("tool", [WEATHER, {"type": "function", "function": {"name": "get_weather"}}])
def test_chat_tells_reasoning_content_and_calls_apart(llm: LLM, tool: Any) -> None:
    play(llm, think("A city.", "Wait.\n" + call("get_weather", city="Paris")))
    stream = llm.stream_chat([USER], tools=[tool], max_tokens=200)
    events = [event for chunk in stream for event in chunk.events]
    done = stream.so_far()
    assert (done.reasoning, done.text, done.finish_reason) == ("A city.", "Wait.", "stop")
    (made,) = done.tool_calls
    assert (made.name, json.loads(made.arguments)) == ("get_weather", {"city": "Paris"})
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "A city."
    assert [event.id for event in events if isinstance(event, ToolCallStart)] == [made.id]


def test_chat_history_with_calls_and_results_renders(llm: LLM) -> None:
    model = play(llm, "Sunny.")
    calls = [{"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}]
    result = {"role": "tool", "tool_call_id": "call_1", "content": "sun"}
    history = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, result]
    assert llm.chat(history, tools=[WEATHER], max_tokens=50).text == "Sunny."
    assert '"arguments": {"city": "Oslo"}' in model.prompts[0]
    assert "<tool_response>\nsun" in model.prompts[0]


def test_chat_template_kwargs_reach_the_template(llm: LLM) -> None:
    model = play(llm, "Hi.", "Hi.")
    llm.chat([USER], chat_template_kwargs={"enable_thinking": False}, max_tokens=20)
    llm.chat([USER], reasoning_effort="none", max_tokens=20)
    assert all(prompt.endswith("<think>\n\n</think>\n\n") for prompt in model.prompts)


def test_schema_begins_after_thinking(llm: LLM) -> None:
    """The played text obeys no mask: it only shows that the grammar accepts reasoning before the document."""
    play(llm, think("Hm.", '{"a": 1}'))
    guided = StructuredOutputsParams(json={"type": "object"})
    done = llm.chat([USER], structured_outputs=guided, max_tokens=100)
    assert (done.reasoning, done.text, done.finish_reason) == ("Hm.", '{"a": 1}', "stop")


def test_objects_are_closed_unless_the_request_or_the_model_opens_them(llm: LLM) -> None:
    document, options = '{"city": "Oslo", "z": 2}', {"max_tokens": 200}
    closed = StructuredOutputsParams(json=PARAMETERS)
    play(llm, *[think("Hm.", document)] * 3, *[call("get_weather", city="Oslo", z=2)] * 2)
    with pytest.raises(GrammarDeadEndError):
        llm.chat([USER], structured_outputs=closed, **options)
    opened = StructuredOutputsParams(json=PARAMETERS, additional_properties="open")
    assert llm.chat([USER], structured_outputs=opened, **options).text == document
    llm.open_objects = True
    assert llm.chat([USER], structured_outputs=closed, **options).text == document
    assert llm.chat([USER], tools=[WEATHER], tool_choice="required", **options).tool_calls
    llm.open_objects = False
    with pytest.raises(GrammarDeadEndError):
        llm.chat([USER], tools=[WEATHER], tool_choice="required", **options)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": [5]}, "tools"), ({"tools": [{"function": {}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "zap"}, "tool_choice"), ({"zap": 1}, "zap"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_bad_chat_options_are_refused_by_name(llm: LLM, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat([USER], **options)
    assert caught.value.field == field


def test_model_without_tools_in_its_template_calls_them(tmp_path: Path) -> None:
    path = write_chat_model(tmp_path / "plain.gguf")
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    llm = LLM(path, backend="reference", kv_memory=16 << 20, chat_template=plain)
    model = play(llm, call("get_weather", city="Rome"))
    assert [one.name for one in llm.chat([USER], tools=[WEATHER], max_tokens=100).tool_calls] == ["get_weather"]
    assert '"get_weather"' in model.prompts[0]
