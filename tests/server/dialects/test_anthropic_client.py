"""The official Anthropic client and LangChain's, unchanged, against a real server."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pydantic
import pytest

from tests.helpers.scripted_engine import ScriptedServer, call, think
from tests.helpers.server import Server
from tests.server.conftest import KEY

TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
SYSTEM = "You are an assistant of a weather service. " * 100  # a token is a byte here: messages are long too
LATE = {"role": "system", "content": "<total_tokens>150000</total_tokens>"}


def connect(server: Server, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, **{"api_key": "none", "max_retries": 0, **options})


@pytest.fixture(scope="module")
def client(scripted: ScriptedServer) -> anthropic.Anthropic:
    return connect(scripted)


@pytest.fixture
def ask() -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 400, "messages": [{"role": "user", "content": "How is Paris?"}]}


def test_message_streamed_equals_whole(
    scripted: ScriptedServer, client: anthropic.Anthropic, ask: dict[str, Any]
) -> None:
    answer = think("Hm, ü.", "I look.\n" + call("get_weather", city="Köln"))
    scripted.play(answer, answer)
    ask |= {"tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    thought, text, used = whole.content
    assert (thought.thinking, text.text, used.name, used.input) == (
        "Hm, ü.",
        "I look.",
        "get_weather",
        {"city": "Köln"},
    )
    for one, other in zip(whole.content, streamed.content, strict=True):
        ignored = {"id"} if one.type == "tool_use" else set()
        assert one.to_dict().keys() == other.to_dict().keys()
        assert {k: v for k, v in one.to_dict().items() if k not in ignored} == {
            k: v for k, v in other.to_dict().items() if k not in ignored
        }
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert whole.usage.output_tokens == streamed.usage.output_tokens > 0
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)


def test_stop_sequence_is_told(scripted: ScriptedServer, client: anthropic.Anthropic, ask: dict[str, Any]) -> None:
    scripted.play(*["One, two, three."] * 4)
    ended = client.messages.create(**ask)
    assert (ended.content[0].text, ended.stop_reason, ended.stop_sequence) == ("One, two, three.", "end_turn", None)
    for is_streamed in (False, True):
        if is_streamed:
            with client.messages.stream(**ask, stop_sequences=["zzz", ", th"]) as stream:
                assert "".join(stream.text_stream) == "One, two"
                cut = stream.get_final_message()
        else:
            cut = client.messages.create(**ask, stop_sequences=["zzz", ", th"])
        assert (cut.content[0].text, cut.stop_reason, cut.stop_sequence) == ("One, two", "stop_sequence", ", th")
    short = client.messages.create(**{**ask, "max_tokens": 3})
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)


def test_structured_output_is_parsed(
    scripted: ScriptedServer, client: anthropic.Anthropic, ask: dict[str, Any]
) -> None:
    class Weather(pydantic.BaseModel):
        city: str
        degrees: int

    scripted.play('{"city": "Paris", "degrees": 20}', think("Easy.", '{"city": "Paris", "degrees": 21}'))
    assert client.messages.parse(**ask, output_format=Weather).parsed_output == Weather(city="Paris", degrees=20)
    thought = client.messages.parse(**ask, output_format=Weather, thinking={"type": "adaptive"})
    assert thought.parsed_output == Weather(city="Paris", degrees=21)


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "adaptive"}])
def test_second_turn_is_in_the_prefix_cache(
    scripted: ScriptedServer, client: anthropic.Anthropic, ask: dict[str, Any], thinking: Any
) -> None:
    """As an agent has it: a header that always changes, cache_control that moves, system messages in the middle."""
    first = call("get_weather", city="Paris")
    scripted.play(think("Hm.", first) if thinking["type"] == "adaptive" else first, "Sunny.", "Bye.")
    ask |= {"tools": TOOLS, "thinking": thinking}
    system, history = f"{thinking['type']}: {SYSTEM}", [*ask["messages"], LATE]
    marked = {"cache_control": {"type": "ephemeral"}}
    usages = []
    for turn in range(3):
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={turn};"}
        content = history[-1]["content"]
        if isinstance(content, str):  # the client marks the last block of the conversation
            sent = [*history[:-1], {**history[-1], "content": [{"type": "text", "text": content, **marked}]}]
        else:
            sent = [*history[:-1], {**history[-1], "content": [*content[:-1], {**content[-1], **marked}]}]
        ask |= {"system": [header, {"type": "text", "text": system, **marked}], "messages": sent}
        with client.messages.stream(**ask) as stream:
            message = stream.get_final_message()
        usages.append(message.usage)
        history.append({"role": "assistant", "content": message.content})
        if message.stop_reason == "tool_use":
            used = message.content[-1]
            result = {"type": "tool_result", "tool_use_id": used.id, "content": "sunny, 20 C"}
            history += [{"role": "user", "content": [result]}, {**LATE, "content": f"turn {turn}"}]
        else:
            history.append({"role": "user", "content": "Thanks!"})
    assert usages[0].input_tokens > 1500
    for usage in usages[1:]:
        total = usage.input_tokens + usage.cache_read_input_tokens
        assert usage.cache_read_input_tokens > 0.95 * total
    assert "billing" not in "".join(scripted.prompts)
    before, _, _ = scripted.prompts[0].rpartition("<|im_start|>assistant")
    assert before in scripted.prompts[1]
    assert before in scripted.prompts[2]


def test_token_count_is_that_of_the_prompt(
    scripted: ScriptedServer, client: anthropic.Anthropic, ask: dict[str, Any]
) -> None:
    scripted.play("Hi")
    ask |= {"tools": TOOLS, "system": "Be kind."}
    usage = client.messages.create(**ask).usage
    del ask["max_tokens"]
    total = usage.input_tokens + usage.cache_read_input_tokens
    assert client.messages.count_tokens(**ask).input_tokens == total
    assert client.beta.messages.count_tokens(**ask, betas=["token-counting-2024-11-01"]).input_tokens == total
    ask["messages"] = [{"role": "user", "content": "x" * 100_000}]
    assert client.messages.count_tokens(**ask).input_tokens > 100_000


def test_errors_are_raised_by_type(server: Server, locked: Server, ask: dict[str, Any]) -> None:
    plain = connect(server)
    with pytest.raises(anthropic.NotFoundError, match="claude-sonnet-5"):
        plain.messages.create(**{**ask, "model": "claude-sonnet-5"})
    content = [{"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}]
    with pytest.raises(
        anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.source\.url: tiny\.gguf takes no images"
    ):
        plain.messages.create(**{**ask, "messages": [{"role": "user", "content": content}]})
    with pytest.raises(anthropic.AuthenticationError) as caught:
        connect(locked, api_key="wrong").messages.create(**ask)
    assert caught.value.body["error"]["type"] == "authentication_error"
    short = {**ask, "max_tokens": 3}
    assert connect(locked, api_key=KEY).messages.create(**short).usage.output_tokens == 3
    assert connect(locked, api_key=None, auth_token=KEY).messages.create(**short).usage.output_tokens == 3


def test_failure_in_a_stream_is_raised(
    scripted: ScriptedServer, client: anthropic.Anthropic, ask: dict[str, Any]
) -> None:
    def fail(prompt: str) -> str:
        raise RuntimeError("the model fails")

    scripted.play(fail)
    with pytest.raises(anthropic.APIStatusError) as caught, client.messages.stream(**ask) as stream:
        stream.get_final_message()
    assert caught.value.body["error"]["type"] == "api_error"
    scripted.require_alive()


def test_beta_route_is_the_same(scripted: ScriptedServer, client: anthropic.Anthropic, ask: dict[str, Any]) -> None:
    scripted.play("Hi")
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    message = client.beta.messages.create(
        **ask, betas=["context-management-2025-06-27"], context_management={"edits": edits}
    )
    assert message.content[0].text == "Hi"
    assert message.context_management.applied_edits == []


def test_langchain_agent_works(scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    langchain = pytest.importorskip("langchain_anthropic", reason="langchain-anthropic is not installed")
    messages = pytest.importorskip("langchain_core.messages")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    scripted.play(call("get_weather", city="Paris"), "Sunny.", "Sunny again.", '{"city": "Paris"}')
    model = langchain.ChatAnthropic(
        model="tiny", base_url=scripted.url, api_key="none", max_retries=0, max_tokens=200, stream_usage=True
    )
    bound = model.bind_tools(TOOLS)
    question = messages.HumanMessage("How is Paris?")
    called = bound.invoke([messages.SystemMessage(SYSTEM), question])
    (used,) = called.tool_calls
    assert (used["name"], used["args"]) == ("get_weather", {"city": "Paris"})
    result = messages.ToolMessage("sunny", tool_call_id=used["id"])
    told = bound.invoke([messages.SystemMessage(SYSTEM), question, called, result])
    assert told.content == "Sunny."
    usage = told.usage_metadata
    assert usage["input_token_details"]["cache_read"] > 0.95 * usage["input_tokens"]
    chunks = list(model.stream("And now?"))
    assert "".join(chunk.text for chunk in chunks) == "Sunny again."
    schema = {"title": "Place", **TOOLS[0]["input_schema"], "additionalProperties": False}
    made = model.with_structured_output(schema, method="json_schema").invoke("Where?")
    assert json.dumps(made) == '{"city": "Paris"}'
