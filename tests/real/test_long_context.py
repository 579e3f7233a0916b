"""A fact in a long text, found by a real model. `LLM_WORKER_LONG=1` reads the longest texts, which take minutes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from llm_worker_rbee import LLM
from tests.real.conftest import CODERS

is_long = pytest.mark.skipif(os.environ.get("LLM_WORKER_LONG") != "1", reason="LLM_WORKER_LONG=1 reads long texts")
ANIMALS = ("fox", "heron", "lynx", "otter", "raven", "stoat", "toad", "vole")
PLACES = ("barn", "harbour", "library", "mill", "orchard", "quarry", "station", "tower")
VERBS = ("crossed", "left", "passed", "reached", "searched", "watched")


def long_text(llm: LLM, num_tokens: int, fact: str) -> str:
    """Return about so many tokens of sentences in which a fact stands after a third."""
    rng, sentences = random.Random(num_tokens), list[str]()
    while len(sentences) < num_tokens // 6:  # they have 7 tokens each
        sentences.append(f"The {rng.choice(ANIMALS)} {rng.choice(VERBS)} the {rng.choice(PLACES)}.")
    size = num_tokens * len(sentences) // len(llm.tokenizer.encode(" ".join(sentences)))
    sentences = sentences[:size]
    sentences.insert(len(sentences) // 3, fact)
    return " ".join(sentences)


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [
        (CODERS[0], 2_000), (CODERS[1], 2_000), pytest.param(CODERS[1], 8_000, marks=is_long),
        pytest.param(CODERS[0], 8_000, marks=is_long), pytest.param(CODERS[0], 28_000, marks=is_long),
    ],
)  # fmt: skip
@pytest.mark.timeout(1800)
def test_fact_is_found(real_model: Callable[[str], Path], name: str, num_tokens: int) -> None:
    llm = LLM(real_model(name), max_context=num_tokens + 512)
    text = long_text(llm, num_tokens, "The secret number of the lighthouse is 48213.")
    question = f"{text}\n\nWhat is the secret number of the lighthouse? Answer with the number."
    reply = llm.chat([{"role": "user", "content": question}], temperature=0, max_tokens=24)
    print(f"{name}: {len(reply.prompt_tokens)} tokens, first token after {reply.timings.time_to_first_token:.1f} s")
    assert abs(len(reply.prompt_tokens) - num_tokens) < 200
    assert "48213" in reply.text
