"""Ollama's own client and LangChain's against a real server."""

from __future__ import annotations

import importlib
import json
from typing import Any

import ollama
import pytest

from tests.helpers.scripted_engine import CONTEXT, ScriptedServer, call, think
from tests.helpers.server import SAID, Server
from tests.server.conftest import KEY

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
GREEDY = {"temperature": 0, "num_predict": 6}


def get_weather(city: str) -> str:
    """Return the weather.

    Args:
        city: the city
    """
    return f"sunny in {city}"


@pytest.fixture(scope="module")
def client(server: Server) -> ollama.Client:
    return ollama.Client(server.url)


@pytest.fixture(scope="module")
def scripted_client(scripted: ScriptedServer) -> ollama.Client:
    return ollama.Client(scripted.url)


def folded(stream: Any) -> Any:
    """Return the last part of a stream with all text, reasoning, calls and log-probabilities."""
    *parts, last = stream
    assert not any(part.done for part in parts)
    for part in reversed(parts):
        last.message.content = (part.message.content or "") + last.message.content
        last.message.thinking = (part.message.thinking or "") + (last.message.thinking or "") or None
        last.message.tool_calls = [*(part.message.tool_calls or ()), *(last.message.tool_calls or ())] or None
        last.logprobs = [*(part.logprobs or ()), *(last.logprobs or ())] or None
    return last


def test_generate_streamed_equals_whole(client: ollama.Client) -> None:
    asked = {"model": "tiny", "prompt": ">", "raw": True, "options": {"temperature": 0}}
    whole = client.generate(**asked)
    assert (whole.response, whole.done, whole.done_reason, whole.model) == (SAID, True, "stop", "tiny")
    assert (whole.prompt_eval_count, whole.eval_count) == (1, len(SAID) + 1)
    parts = list(client.generate(**asked, stream=True))
    assert "".join(part.response for part in parts) == SAID
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("stop", whole.eval_count)


def test_durations_are_within_the_total(client: ollama.Client) -> None:
    said = client.chat("tiny", ASKED, options=GREEDY)
    assert said.load_duration == 0
    assert said.prompt_eval_duration > 0
    assert said.eval_duration > 0
    assert said.prompt_eval_duration + said.eval_duration <= said.total_duration < 60e9
    assert (said.eval_count, said.done_reason) == (6, "length")


def test_generate_renders_system_and_prompt(scripted: ScriptedServer, scripted_client: ollama.Client) -> None:
    scripted.play("Hello!")
    said = scripted_client.generate("tiny", "Hi", system="Be short.", think=False)
    assert said.response == "Hello!"
    assert "<|im_start|>system\nBe short.\n\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n" in scripted.prompts[0]
    assert scripted.prompts[0].endswith("</think>\n\n")


def test_chat_options_hold(client: ollama.Client) -> None:
    first, again, other = (
        client.chat("tiny", ASKED, options={"seed": seed, "num_predict": 20, "temperature": 1.5, "top_k": 9})
        for seed in (3, 3, 4)
    )
    assert first.message.content == again.message.content != other.message.content
    assert len(first.message.content) == 20
    stopped = client.generate("tiny", ">", raw=True, options={"temperature": 0, "stop": ["o w"]})
    assert (stopped.response, stopped.done_reason) == ("Hel", "stop")


def test_logprobs_streamed_equal_whole(client: ollama.Client) -> None:
    asked = {"model": "tiny", "messages": ASKED, "options": GREEDY, "logprobs": True, "top_logprobs": 2}
    whole, streamed = client.chat(**asked), folded(client.chat(**asked, stream=True))
    assert whole.logprobs == streamed.logprobs
    assert "".join(one.token for one in whole.logprobs) == whole.message.content
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in whole.logprobs)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_thinking_and_calls_come_apart(scripted: ScriptedServer, scripted_client: ollama.Client, stream: bool) -> None:
    scripted.play(think("Two cities.", "Looking." + call("get_weather", city="Paris") + call("get_weather", city="Lü")))
    said = scripted_client.chat("tiny", ASKED, tools=[get_weather], think=True, stream=stream)
    said = folded(said) if stream else said
    assert (said.message.thinking.strip(), said.message.content.strip()) == ("Two cities.", "Looking.")
    assert [(one.function.name, one.function.arguments) for one in said.message.tool_calls] == [
        ("get_weather", {"city": "Paris"}),
        ("get_weather", {"city": "Lü"}),
    ]
    assert said.done_reason == "stop"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_call_that_is_cut_stays_text(scripted: ScriptedServer, scripted_client: ollama.Client, stream: bool) -> None:
    scripted.play(call("get_weather", city="Paris"))
    options = {"num_predict": 50}
    said = scripted_client.chat("tiny", ASKED, tools=[WEATHER], options=options, stream=stream)
    said = folded(said) if stream else said
    assert (said.message.tool_calls, said.done_reason) == (None, "length")
    assert said.message.content.startswith("get_weather{")


def test_second_turn_is_a_prefix_hit(scripted: ScriptedServer, scripted_client: ollama.Client) -> None:
    """The client sends calls back without ids: the prompt is the same up to what is new."""
    replies: list[Any] = []
    scripted_client._client.event_hooks["response"] = [lambda reply: replies.append(json.loads(reply.read()))]
    messages: list[Any] = [{"role": "system", "content": "Answer with the tools. " * 80}, *ASKED]
    scripted.play(think("I look.", call("get_weather", city="Paris")), "It is sunny.")
    first = scripted_client.chat("tiny", messages, tools=[WEATHER])
    assert first.prompt_eval_count > 1_500
    messages += [first.message, {"role": "tool", "tool_name": "get_weather", "content": "sunny"}]
    second = scripted_client.chat("tiny", messages, tools=[WEATHER])
    scripted_client._client.event_hooks["response"] = []
    assert second.message.content == "It is sunny."
    assert scripted.prompts[1].startswith(scripted.prompts[0])
    assert "<tool_response>\nsunny\n</tool_response>" in scripted.prompts[1]
    assert replies[1]["prompt_cached_count"] > 0.95 * second.prompt_eval_count


def test_format_constrains_the_answer(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]}
    said = client.chat("tiny", ASKED, format={**schema, "additionalProperties": False}, options={"temperature": 0})
    assert set(json.loads(said.message.content)) == {"n"}
    assert said.done_reason == "stop"


def test_model_is_listed_shown_and_running(client: ollama.Client, server: Server, scripted: ScriptedServer) -> None:
    (listed,), (running,) = client.list().models, client.ps().models
    assert listed.model == running.model == "tiny:latest"
    assert len(listed.digest) == 64
    assert listed.details.family == "llama"
    assert running.context_length == 65_536
    assert running.expires_at.year == 9999
    shown = client.show("tiny")
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo["llama.context_length"] == 65_536
    assert "num_ctx                        65536" in shown.parameters
    more = ollama.Client(scripted.url).show("tiny:latest")
    assert more.capabilities == ["completion", "tools", "thinking"]
    assert "<tools>" in more.template
    assert server.http.head("/").status_code == 200
    assert server.http.get("/api/version").json() == {"version": "0.14.0"}


def test_empty_prompt_asks_for_the_model(client: ollama.Client) -> None:
    for said in (client.generate("tiny", keep_alive=-1), client.generate("tiny:latest", prompt="")):
        assert (said.done, said.done_reason, said.response) == (True, "load", "")
    (part,) = client.generate("tiny", stream=True)
    assert (part.done, part.done_reason) == (True, "load")
    assert client.chat("tiny", []).done_reason == "load"


def test_errors_reach_the_client(client: ollama.Client, locked: Server) -> None:
    with pytest.raises(ollama.ResponseError, match="'other' is not served here") as caught:
        client.chat("other", ASKED)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="num_ctx is 65537 and the context of this worker 65536"):
        client.chat("tiny", ASKED, options={"num_ctx": 65_537})
    with pytest.raises(ollama.ResponseError, match="nothing is left for an answer"):
        client.generate("tiny", "#" * 65_536, raw=True, options={"num_ctx": 4_096})
    for refused in (client.pull, client.push, client.delete, client.embed, client.show):
        with pytest.raises(ollama.ResponseError) as caught:
            refused("other")
        assert caught.value.status_code == 404, refused
    with pytest.raises(ollama.ResponseError, match="no API key") as caught:
        ollama.Client(locked.url).list()
    assert caught.value.status_code == 401
    assert ollama.Client(locked.url, headers={"authorization": f"Bearer {KEY}"}).list().models


def test_langchain_plays_a_tool_session(scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    langchain = pytest.importorskip("langchain_ollama", reason="langchain-ollama is not installed")
    messages = importlib.import_module("langchain_core.messages")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    model = langchain.ChatOllama(
        model="tiny", base_url=scripted.url, reasoning=True, temperature=0, num_predict=200, num_ctx=CONTEXT,
        validate_model_on_init=True,
    )  # fmt: skip
    tooled = model.bind_tools([get_weather])
    scripted.play(think("I look.", call("get_weather", city="Paris")), think("Now.", "It is sunny."))
    asked = messages.HumanMessage("What is the weather in Paris?")
    first = tooled.invoke([asked])
    assert first.additional_kwargs["reasoning_content"].strip() == "I look."
    (made,) = first.tool_calls
    assert (made["name"], made["args"]) == ("get_weather", {"city": "Paris"})
    second = [*tooled.stream([asked, first, messages.ToolMessage("sunny", tool_call_id=made["id"])])]
    assert "".join(chunk.content for chunk in second).strip() == "It is sunny."
    assert "<tool_response>\nsunny\n</tool_response>" in scripted.prompts[1]
    assert '{"name": "get_weather", "arguments": {"city": "Paris"}}' in scripted.prompts[1].replace('":"', '": "')
    assert [one for chunk in second if (one := chunk.response_metadata.get("done_reason"))] == ["stop"]


def test_langchain_structured_output_is_parsed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    langchain = pytest.importorskip("langchain_ollama", reason="langchain-ollama is not installed")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    schema = {
        "title": "Count", "type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"],
        "additionalProperties": False,
    }  # fmt: skip
    model = langchain.ChatOllama(model="tiny", base_url=server.url, temperature=0, num_predict=200)
    assert set(model.with_structured_output(schema).invoke("?")) == {"n"}
