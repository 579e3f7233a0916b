"""Gaps between the tokens of chat streams, quiet and while embeddings run, at a worker that serves both.

    llm-worker-rbee serve --embedding-model all-minilm-l6-v2 --port 8080 &
    python benchmarks/chat_beside_embeddings.py --url http://127.0.0.1:8080 --streams 4

Rounds alternate: quiet, then with 1,000 texts of 20 to 200 tokens in requests of `--batch` inputs, sent one after
another for as long as the streams last. One line for each round, as JSON; then the ratio of the medians of P99.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from typing import Any

import httpx

TEXTS, SHORTEST, LONGEST = 1_000, 20, 200
FIRST_ID, LAST_ID = 2_000, 20_000  # whole words of BERT's vocabulary; any ids will do


async def stream(client: httpx.AsyncClient, tokens: int) -> list[float]:
    """Return the seconds between the tokens of one answer."""
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    times: list[float] = []
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(times)]


async def computed(client: httpx.AsyncClient) -> float:
    """Return how many texts the worker has computed so far."""
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("llm_worker_pooling_sequences_total"))


async def embed(client: httpx.AsyncClient, batch: int, stop: asyncio.Event) -> None:
    """Send requests until told to stop."""
    made = random.Random(0)
    texts = [[made.randint(FIRST_ID, LAST_ID) for _ in range(made.randint(SHORTEST, LONGEST))] for _ in range(TEXTS)]
    while not stop.is_set():
        for at in range(0, TEXTS, batch):
            body = {"input": texts[at : at + batch], "encoding_format": "base64"}
            sending = asyncio.ensure_future(client.post("/v1/embeddings", json=body))
            waiting = asyncio.ensure_future(stop.wait())
            await asyncio.wait((sending, waiting), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not sending.done():
                sending.cancel()
                await client.post("/v1/embeddings", json={"input": texts[:1]})  # after the step in flight
                return
            sending.result().raise_for_status()


async def measure(options: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Return the figures of a round; `batch` 0 is a quiet one."""
    async with httpx.AsyncClient(base_url=options.url, timeout=600) as client:
        stop = asyncio.Event()
        embedding = asyncio.ensure_future(embed(client, batch, stop)) if batch else None
        await asyncio.sleep(0.5 if batch else 0.0)
        before, start = await computed(client), time.perf_counter()
        found = await asyncio.gather(*(stream(client, options.tokens) for _ in range(options.streams)))
        seconds, texts = time.perf_counter() - start, await computed(client) - before
        stop.set()
        if embedding is not None:
            await embedding
    gaps = sorted(gap for one in found for gap in one)
    return {
        "embeddings": bool(batch), "p50_ms": round(1e3 * statistics.median(gaps), 2),
        "p99_ms": round(1e3 * gaps[int(0.99 * len(gaps))], 2), "max_ms": round(1e3 * gaps[-1], 2),
        "texts_per_s": round(texts / seconds, 1),
    }  # fmt: skip


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    p99: dict[bool, list[float]] = {False: [], True: []}
    await measure(options, 0)
    for _ in range(options.rounds):
        for batch in (0, options.batch):
            figures = await measure(options, batch)
            p99[bool(batch)].append(figures["p99_ms"])
            print(json.dumps(figures), flush=True)
    print(json.dumps({"ratio": round(statistics.median(p99[True]) / statistics.median(p99[False]), 2)}))


asyncio.run(main())
