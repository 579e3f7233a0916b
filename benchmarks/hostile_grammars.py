"""Gaps between the tokens of ordinary streams, with and without hostile grammars, on a running server.

    python benchmarks/hostile_grammars.py --url http://127.0.0.1:8080 --streams 16 --hostile 24

Hostile clients send grammars that are slow to compile or slow to run, one after another, each of them new. Prints the
gaps of both runs and what the hostile clients got. Needs `httpx`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from itertools import count, pairwise
from typing import Any

import httpx

CHATS = "/v1/chat/completions"
AMBIGUOUS = 'start: s\ns: s s | s s s | "a" | "b" | "c" | "{}"'
numbers = count()


def hostile_body(kind: int) -> dict[str, Any]:
    """Return a request whose grammar is ambiguous, takes long to compile, or both time and memory."""
    number = next(numbers)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 400, "temperature": 1}
    if kind % 3 == 0:
        return {**body, "grammar": AMBIGUOUS.format(number)}
    if kind % 3 == 1:
        properties = {f"p{i}": {"type": "integer", "multipleOf": 99_990 + i + number} for i in range(50)}
        return {**body, "structured_outputs": {"json": {"type": "object", "properties": properties}}}
    patterns = [{"type": "string", "pattern": f"a.{{{i}}}b{number}"} for i in range(40)]
    return {**body, "structured_outputs": {"json": {"allOf": patterns}}}


async def attack(client: httpx.AsyncClient, kind: int, results: Counter[str], end: asyncio.Event) -> None:
    """Send hostile requests until the end."""
    while not end.is_set():
        reply = await client.post(CHATS, json=hostile_body(kind))
        code = reply.json().get("error", {}).get("code", "") if reply.status_code != 200 else ""
        results[f"{reply.status_code} {code}".strip()] += 1
        if reply.status_code == 429:
            await asyncio.sleep(float(reply.headers["retry-after"]))


async def read_stream(client: httpx.AsyncClient, number: int, max_tokens: int) -> list[float]:
    """Return the seconds between the events of one answer, after the first."""
    messages = [{"role": "user", "content": f"Write a long story about the number {number}."}]
    body = {"messages": messages, "max_tokens": max_tokens, "stream": True, "seed": number}
    times: list[float] = []
    async with client.stream("POST", CHATS, json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times[1:])]


async def measure(client: httpx.AsyncClient, num_streams: int, max_tokens: int) -> list[float]:
    """Return the sorted gaps of streams that run at once."""
    streams = await asyncio.gather(*(read_stream(client, i, max_tokens) for i in range(num_streams)))
    return sorted(gap for gaps in streams for gap in gaps)


def describe(gaps: list[float]) -> str:
    """Return quantiles of sorted gaps."""
    quantiles = {
        name: gaps[min(len(gaps) - 1, int(part * len(gaps)))]
        for name, part in (("P50", 0.5), ("P95", 0.95), ("P99", 0.99))
    }
    return (
        ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in quantiles.items())
        + f", longest {1000 * gaps[-1]:.0f} ms"
    )


async def main() -> None:
    """Print the gaps of both runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--hostile", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=200)
    options = parser.parse_args()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=options.url, timeout=600, limits=limits) as client:
        await measure(client, options.streams, 8)  # warm
        quiet = await measure(client, options.streams, options.max_tokens)
        print(f"quiet:   {describe(quiet)}", flush=True)
        results, end = Counter[str](), asyncio.Event()
        attacks = [asyncio.ensure_future(attack(client, i, results, end)) for i in range(options.hostile)]
        beside = await measure(client, options.streams, options.max_tokens)
        end.set()
        print(f"hostile: {describe(beside)}")
        p95 = int(0.95 * len(beside))
        print(f"ratio of P95: {beside[p95] / quiet[int(0.95 * len(quiet))]:.2f}; hostile requests: {dict(results)}")
        for task in attacks:
            task.cancel()
        await asyncio.gather(*attacks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
