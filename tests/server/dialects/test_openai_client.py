"""The official OpenAI client against a real server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest

from llm_worker_rbee import LLM
from tests.helpers.server import CHAT, CONTEXT, SAID, Server, ids
from tests.server.conftest import KEY, Start

LONG = [{"role": "user", "content": "#" * CONTEXT}]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.openai()


def folded_chat(stream: Any) -> tuple[dict[int, list[Any]], Any]:
    """Return role, text, finish and logprobs of each choice, and the usage."""
    choices: dict[int, list[Any]] = {}
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            one = choices.setdefault(choice.index, [None, "", None, []])
            assert one[2] is None, "something comes after the end"
            one[0] = choice.delta.role or one[0]
            one[1] += choice.delta.content or ""
            one[2] = choice.finish_reason
            one[3] += choice.logprobs.content if choice.logprobs else []
    return choices, usage


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"n": 3, "seed": 7, "logprobs": True, "top_logprobs": 3},
        {"stop": ["7", "33"], "seed": 1, "logprobs": True},
        {"max_tokens": 1, "logit_bias": {str(ord("5")): 100}},
    ],
    ids=["greedy", "several-with-logprobs", "stop", "bias"],
)
def test_chat_streamed_equals_whole(client: openai.OpenAI, options: dict[str, Any]) -> None:
    options_sent = {"model": "tiny", "max_tokens": 40, **options}
    messages = [{"role": "developer", "content": [{"type": "text", "text": "be"}]}, {"role": "user", "content": "x"}]
    options_sent["messages"] = messages
    whole = client.chat.completions.create(**options_sent)
    stream = client.chat.completions.create(**options_sent, stream=True, stream_options={"include_usage": True})
    choices, usage = folded_chat(stream)
    assert len(whole.choices) == len(choices) == options.get("n", 1)
    for choice in whole.choices:
        role, text, finish, logprobs = choices[choice.index]
        assert (role, text, finish) == ("assistant", choice.message.content, choice.finish_reason)
        assert logprobs == (choice.logprobs.content if choice.logprobs else [])
        if choice.logprobs:
            assert len(logprobs) == whole.usage.completion_tokens // len(choices)
            assert all(len(one.top_logprobs) == options.get("top_logprobs", 0) for one in logprobs)
            assert all(bytes(one.bytes).decode() == one.token and one.logprob <= 0 for one in logprobs)
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens == len("be") + len("x") + 3


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": ">", "temperature": 0, "max_tokens": 20},
        {"prompt": ["?", "#"], "n": 2, "seed": 5, "logprobs": 2, "echo": True},
        {"prompt": [ids("?1"), ids("?2")], "seed": 9, "logprobs": 0, "stop": "7"},
        {"prompt": "the ?", "max_tokens": 0, "echo": True, "logprobs": 1},
    ],
    ids=["end", "several-with-echo", "ids", "score"],
)
def test_completion_streamed_equals_whole(client: openai.OpenAI, options: dict[str, Any]) -> None:
    whole = client.completions.create(model="tiny", **options)
    stream = client.completions.create(model="tiny", **options, stream=True, stream_options={"include_usage": True})
    found: dict[int, list[Any]] = {}
    for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            one = found.setdefault(choice.index, ["", None, {}])
            one[0] += choice.text
            one[1] = choice.finish_reason
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                one[2].setdefault(name, []).extend(values)
    assert [found[choice.index] for choice in whole.choices] == [
        [choice.text, choice.finish_reason, choice.logprobs.model_dump() if choice.logprobs else {}]
        for choice in whole.choices
    ]
    cached = [one.prompt_tokens_details.cached_tokens for one in (usage, whole.usage)]
    assert (usage.completion_tokens, usage.prompt_tokens) == (whole.usage.completion_tokens, whole.usage.prompt_tokens)
    assert all(0 <= one < usage.prompt_tokens for one in cached)


def test_completion_text_is_the_models(client: openai.OpenAI) -> None:
    ends = client.completions.create(model="tiny", prompt=">", temperature=0, max_tokens=50)
    assert (ends.choices[0].text, ends.choices[0].finish_reason) == (SAID, "stop")
    by_default = client.completions.create(model="tiny", prompt="#", temperature=0)
    assert (by_default.choices[0].text, by_default.choices[0].finish_reason) == ("ab" * 8, "length")
    stopped = client.completions.create(model="tiny", prompt=">", temperature=0, max_tokens=50, stop=["o w", "zzz"])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("Hel", "stop")
    echoed = client.completions.create(model="tiny", prompt="ab#", temperature=0, max_tokens=3, echo=True)
    assert echoed.choices[0].text == "ab#aba"


def test_completion_echo_with_zero_tokens_scores_prompt(client: openai.OpenAI) -> None:
    """As evaluation harnesses do: no output, no score of the first token, `b` after `a` is certain."""
    (choice,) = client.completions.create(
        model="tiny", prompt=ids("#aba1"), max_tokens=0, echo=True, logprobs=2, temperature=0
    ).choices
    assert (choice.text, choice.logprobs.tokens) == ("#aba1", list("#aba1"))
    first, *scores = choice.logprobs.token_logprobs
    assert first is None
    assert all(score > -0.1 for score in scores[:3])
    assert scores[3] < -5
    assert max(choice.logprobs.top_logprobs[4], key=choice.logprobs.top_logprobs[4].get) == "b"
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]


def test_seed_repeats_answer_and_choices_differ(client: openai.OpenAI) -> None:
    def options_sent(seed: int | None) -> list[str]:
        made = client.completions.create(model="tiny", prompt="?", max_tokens=30, n=2, seed=seed)
        return [choice.text for choice in made.choices]

    first, other = options_sent(3), options_sent(4)
    assert first == options_sent(3)
    assert len({*first, *other}) == 4
    assert options_sent(None) != options_sent(None)


def test_usage_reports_cached_prefix(client: openai.OpenAI) -> None:
    prompt = ids("0123456789" * 20 + "cached #")
    first, again = (client.completions.create(model="tiny", prompt=prompt, max_tokens=1) for _ in range(2))
    assert first.usage.prompt_tokens == again.usage.prompt_tokens == len(prompt)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert 100 < again.usage.prompt_tokens_details.cached_tokens < len(prompt)


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.context_length) == ("tiny", CONTEXT)
    assert client.models.retrieve("tiny") == model


def test_fields_that_clients_always_send_are_accepted(client: openai.OpenAI) -> None:
    usual: dict[str, Any] = {
        "metadata": {"run": "7"}, "store": False, "user": "u", "service_tier": "auto", "parallel_tool_calls": True,
        "seed": -1, "max_completion_tokens": CONTEXT, "stop": ["9"], "extra_body": {"top_k": -1},
    }  # fmt: skip
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=CHAT, temperature=0, **usual)
    completion = raw.parse()
    assert int(raw.headers["x-effective-max-tokens"]) == CONTEXT - completion.usage.prompt_tokens
    assert completion.seed >= 0


@pytest.mark.parametrize(
    ("options", "kind", "code", "said"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found", "'other'"),
        ({"temperature": 9}, openai.BadRequestError, "INVALID_REQUEST", "temperature is 9"),
        ({"messages": LONG}, openai.BadRequestError, "CONTEXT_LENGTH_EXCEEDED", str(CONTEXT)),
        ({"store": True}, openai.BadRequestError, "INVALID_REQUEST", "store"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "INVALID_REQUEST", "tools"),
        ({"top_logprobs": 3}, openai.BadRequestError, "INVALID_REQUEST", "top_logprobs"),
        ({"extra_body": {"zap": 1}}, openai.BadRequestError, "INVALID_REQUEST", "'zap'"),
    ],
    ids=lambda one: "-".join(one) if isinstance(one, dict) else "",
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_raise_exceptions_of_client(
    client: openai.OpenAI,
    options: dict[str, Any],
    kind: type[openai.APIStatusError],
    code: str,
    said: str,
    stream: bool,
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": CHAT, **options}, stream=stream)
    assert caught.value.code == code
    assert caught.value.type == "invalid_request_error"
    assert said in caught.value.message


def test_wrong_key_raises_authentication_error(locked: Server) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        locked.openai(api_key="wrong").models.list()
    assert caught.value.code == "INVALID_API_KEY"
    assert locked.openai(api_key=KEY).models.list().data


def test_requests_while_loading_are_503(load: Callable[..., LLM]) -> None:
    """The port answers; inference is 503 with Retry-After until the model is loaded."""
    may_load = threading.Event()

    def slowly() -> LLM:
        may_load.wait()
        return load()

    with Server(slowly) as server:
        try:
            with pytest.raises(openai.InternalServerError) as caught:
                server.openai().chat.completions.create(model="tiny", messages=CHAT)
            assert (caught.value.status_code, caught.value.code) == (503, "MODEL_LOADING")
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert server.http.get("/health").json()["status"] == "loading"
            assert server.http.get("/v1/ready").json()["progress_url"] == "/v1/loading/progress"
        finally:
            may_load.set()
        server.ready().require_alive()


def test_full_queue_raises_rate_limit_error(start: Start) -> None:
    """One runs, one waits, the next gets 429 with Retry-After; the others are not affected."""
    server = start({"max_batch": 1}, max_queue=1)
    running = server.job(max_tokens=60_000)
    while server.http.get(f"/v1/jobs/{running}").json()["state"] == "queued":
        pass
    waiting = server.job()
    with pytest.raises(openai.RateLimitError) as caught:
        server.openai().completions.create(model="tiny", prompt="#")
    assert caught.value.code == "QUEUE_FULL"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    server.http.delete(f"/v1/jobs/{running}")
    assert server.events(waiting)[-1]["type"] == "end"
    server.require_alive()
    server.require_idle()
