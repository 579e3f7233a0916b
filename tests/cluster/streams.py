"""Many streams at once, and what each of them must say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx

from llm_worker_rbee import LLM
from llm_worker_rbee.sampling_params import SamplingParams

SAMPLING = {"ignore_eos": True, "top_k": 0, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.0}
NUM_STREAMS = 16


def bodies(max_tokens: int = 64) -> list[dict[str, Any]]:
    """Return the bodies of requests, greedy ones and sampled ones."""
    return [
        {"prompt": f"Chapter {i}. The travellers came to a river and", "max_tokens": max_tokens, "seed": 100 + i,
         "temperature": 0.0 if i % 2 else 0.8, "presence_penalty": 0.5 if i % 3 else 0.0, **SAMPLING}
        for i in range(NUM_STREAMS)
    ]  # fmt: skip


def expected(llm: LLM, made: list[dict[str, Any]]) -> list[str]:
    """Return the texts that this process computes for the bodies."""
    plain = [{name: value for name, value in body.items() if name != "prompt"} for body in made]
    return [llm.generate(body["prompt"], SamplingParams(**fields)).text
            for body, fields in zip(made, plain, strict=True)]  # fmt: skip


async def read_all(url: str, made: list[dict[str, Any]], on_running: Callable[[], None]) -> list[str]:
    """Stream all bodies at once and return their texts; `on_running` is called once each has some text."""
    texts = [""] * len(made)
    is_running = asyncio.Event()

    async def read(http: httpx.AsyncClient, i: int) -> None:
        async with http.stream("POST", "/v1/completions", json={**made[i], "stream": True}) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    texts[i] += event["choices"][0]["text"] if event["choices"] else ""
                    if all(texts):
                        is_running.set()

    async def act() -> None:
        await is_running.wait()
        await asyncio.to_thread(on_running)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        await asyncio.gather(act(), *(read(http, i) for i in range(len(made))))
    return texts
