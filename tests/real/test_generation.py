"""A real model behind the real server, by OpenAI's client: stop strings, log-probabilities, seeds, the second turn of a
chat, an engine that is killed; in Python: drafts and the reference backend give the same answers."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from llm_worker_rbee import LLM
from tests.helpers.serve_process import ServeProcess, until
from tests.real.conftest import CODERS

PROMPTS = (
    "def fibonacci(n):\n",
    "The three primary colours are",
    "import json\n\nwith open('data.json') as f:\n",
    "SELECT name, age FROM people WHERE",
)
REPETITIVE = "Write the numbers from 1 to 20, each on its own line as 'line N of the list'."
MAX_GAP = 0.1  # of log-probability, where two ways of rounding part
small = pytest.mark.parametrize("coder", CODERS[:1], indirect=True)


@pytest.fixture
def client(server: ServeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


@small
def test_stop_strings_end_an_answer_before_them(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "coder", "prompt": "1, 2, 3, 4,", "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    assert " 8" in whole
    for stop in (" 8", [" 12", ", 8,"], "7, 8"):
        choice = client.completions.create(**asked, stop=stop).choices[0]
        assert choice.finish_reason == "stop"
        first = min(whole.find(text) for text in ([stop] if isinstance(stop, str) else stop) if text in whole)
        assert choice.text == whole[:first]
        parts = client.completions.create(**asked, stop=stop, stream=True)
        assert "".join(part.choices[0].text for part in parts if part.choices) == choice.text


@small
def test_log_probabilities_are_of_the_sampled_tokens(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="coder", messages=[{"role": "user", "content": "Name a fruit."}], temperature=0, max_tokens=12,
        logprobs=True, top_logprobs=5,
    )  # fmt: skip
    entries = (reply.choices[0].logprobs and reply.choices[0].logprobs.content) or []
    assert "".join(entry.token for entry in entries).startswith(reply.choices[0].message.content or "?")
    for entry in entries:
        assert entry.token == entry.top_logprobs[0].token  # greedy
        ordered = [top.logprob for top in entry.top_logprobs]
        assert ordered == sorted(ordered, reverse=True)
        assert sum(map(math.exp, ordered)) <= 1 + 1e-5


@small
def test_seeds_repeat_an_answer(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        reply = client.completions.create(
            model="coder", prompt="Once upon a time", max_tokens=24, temperature=1, seed=seed
        )
        return reply.choices[0].text

    answers = [ask(seed) for seed in (1, 2, 3)]
    assert len(set(answers)) == 3
    assert [ask(seed) for seed in (1, 2, 3)] == answers


@small
def test_second_turn_comes_from_the_prefix_cache(client: openai.OpenAI) -> None:
    code = "\n".join(f"def f{i}(x):\n    return x + {i}" for i in range(40))
    messages: list[Any] = [{"role": "user", "content": f"How many functions are in this file?\n{code}"}]
    first = client.chat.completions.create(model="coder", messages=messages, max_tokens=40, temperature=0)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Why?"},
    ]
    second = client.chat.completions.create(model="coder", messages=messages, max_tokens=8, temperature=0)
    assert first.usage
    assert second.usage
    assert second.usage.prompt_tokens_details
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= first.usage.prompt_tokens - 32  # but for a part of a block


@small
def test_answer_goes_on_after_its_engine_was_killed(server: ServeProcess, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "coder", "prompt": PROMPTS[0], "max_tokens": 60, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    text, engine = "", server.engine()
    for number, part in enumerate(client.completions.create(**asked, stream=True)):
        text += part.choices[0].text if part.choices else ""
        if number == 10:
            os.kill(engine, signal.SIGKILL)
    assert text == whole
    until(lambda: server.http.get("/health").json()["status"] == "healthy")
    assert server.engine() != engine


@pytest.fixture(scope="module")
def plain(real_model: Callable[[str], Path]) -> dict[str, Any]:
    """Greedy answers of the larger model without drafts."""
    llm = LLM(real_model(CODERS[1]), max_context=1024)
    return {prompt: llm.generate(prompt, temperature=0, max_tokens=40).text for prompt in (*PROMPTS, REPETITIVE)}


@pytest.mark.parametrize("kind", ["ngram", "draft model"])
def test_drafts_change_no_answer(kind: str, plain: dict[str, str], real_model: Callable[[str], Path]) -> None:
    if kind == "ngram":
        llm = LLM(real_model(CODERS[1]), max_context=1024, speculative="ngram")
    else:
        llm = LLM(real_model(CODERS[1]), max_context=1024, draft_model=real_model(CODERS[0]))
    for prompt, text in plain.items():
        assert llm.generate(prompt, temperature=0, max_tokens=40).text == text, prompt
    stats = llm.engine.scheduler.stats
    print(f"{kind}: {stats.num_accepted_tokens} of {stats.num_drafted_tokens} drafts accepted")
    assert stats.num_accepted_tokens


def test_greedy_tokens_are_those_of_the_reference_backend(real_model: Callable[[str], Path]) -> None:
    """Where they part the log-probabilities of the two tokens nearly tie."""
    fast, reference = (LLM(real_model(CODERS[0]), max_context=256, backend=name) for name in ("cpu", "reference"))
    for prompt in PROMPTS[:2]:
        answers = [llm.generate(prompt, temperature=0, max_tokens=8, logprobs=2) for llm in (fast, reference)]
        require_same_but_for_ties(*([(entry.token, dict(entry.top)) for entry in a.logprobs] for a in answers))


def require_same_but_for_ties(left: list[Any], right: list[Any]) -> None:
    """Compare greedy answers up to where they part, if they do: (token, log-probabilities of the first) each."""
    for (token, logprobs), (other, _) in zip(left, right, strict=False):
        if token != other:
            assert other in logprobs, "the other token is not even the second"
            assert logprobs[token] - logprobs[other] < MAX_GAP
            return
