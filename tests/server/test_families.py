"""Families whose layers differ from those of Llama, over HTTP: parallel streams and prefix hits answer as `LLM` does.

Weights are random: every token depends on all those before, in every layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.weights.gguf_writer import write_gguf
from tests.conftest import DEVICE, with_kernels
from tests.helpers import model_zoo, tiny_models
from tests.helpers.server import Server
from tests.server.test_metrics import scraped

FAMILIES = ("qwen3moe", "gpt-oss", "lfm2", "qwen3_5", "qwen3_5_moe", "gemma4", "gemma4-e", "gemma4-moe")
WITH_STATES = ("lfm2", "qwen3_5", "qwen3_5_moe")
BEGINNING = "What they have in common is longer than two blocks of sixteen."
PROMPTS = [f"{BEGINNING} {end}" for end in ("One.", "Other?")]
ASK: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}


class Served(NamedTuple):
    """A model over HTTP, and without."""

    name: str
    server: Server
    alone: LLM


def write_family(path: Path, name: str) -> Path:
    """Write a model of the zoo with a byte vocabulary."""
    known = model_zoo.ZOO[name]
    sizes = {key: tiny_models.VOCAB for key in known.settings if key.startswith("vocab_size")}
    variant = replace(known, settings={**known.settings, "vocab_size": tiny_models.VOCAB, **sizes})
    model = model_zoo.make_hf(variant)
    metadata = {**model_zoo.gguf_metadata(variant, model), **tiny_models.tokenizer_metadata()}
    return with_kernels(write_gguf(path, metadata, model_zoo.gguf_tensors(variant, model)))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = write_family(tmp_path_factory.mktemp("families") / f"{request.param}.gguf", request.param)

    def load() -> LLM:
        return LLM(path, device=DEVICE, deterministic=True, kv_memory=16 << 20)

    with Server(load) as running:
        yield Served(request.param, running.ready(), load())


def streamed(server: Server, prompt: str) -> tuple[str, list[float], int]:
    """Return text, log-probabilities and the number of cached tokens of a streamed completion."""
    body = {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, **ASK}
    text, logprobs, cached = "", [], 0
    with server.http.stream("POST", "/v1/completions", json=body) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                text += choice["text"]
                logprobs += choice["logprobs"]["token_logprobs"]
            if chunk.get("usage"):
                cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
    return text, logprobs, cached


def test_streams_and_prefix_hits_answer_as_llm_does(family: Served) -> None:
    server, alone = family.server, family.alone
    expected = [(done.text, [one.logprob for one in done.logprobs or ()]) for done in alone.generate(PROMPTS, **ASK)]
    with ThreadPoolExecutor(2) as both:
        found = list(both.map(lambda prompt: streamed(server, prompt), PROMPTS))
    assert [one[:2] for one in found] == expected
    again = [streamed(server, prompt) for prompt in PROMPTS]
    assert [one[:2] for one in again] == expected
    assert all(one[2] >= 32 for one in again)
    server.require_idle()
    require_state_metrics(scraped(server), family.name in WITH_STATES)


def require_state_metrics(found: dict[str, float], has_states: bool) -> None:
    """Slots, snapshots and hits are counted where a model has states, and only there."""
    assert ("num_state_slots" in found) == has_states
    if has_states:
        assert found["num_state_slots"] >= 64
        assert found["num_used_state_slots"] == 0
        assert 2 <= found["num_snapshots"] <= found["num_state_slots"]
        assert found["snapshot_hits_total"] >= 2
