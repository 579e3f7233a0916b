"""Clients of all kinds against `serve` while its engine is killed: no answer changes, and nothing is left behind.

LLM_WORKER_SOAK_ROUNDS=100 runs it for minutes; the usual run has a few rounds.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import ON_CPU, with_kernels
from tests.helpers import tiny_models
from tests.helpers.serve_process import LIMIT_S, ServeProcess, until

ROUNDS = int(os.environ.get("LLM_WORKER_SOAK_ROUNDS", "4"))
NUM_ENGINES = [1] if ROUNDS < 10 else [1, 2]
NUM_CLIENTS, NUM_BODIES = 8, 48
MAX_GROWTH_BYTES = 4 << 20  # of the front, from the middle of the rounds to their end
KINDS = ("completion", "chat", "stream", "job", "leaving")


def bodies(draw: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield requests of all kinds; a seed makes the answer of each the same every time."""
    for number in range(NUM_BODIES):
        kind = KINDS[number % len(KINDS)]
        body: dict[str, Any] = {"seed": number, "temperature": 1.0, "max_tokens": draw.randint(1, 60)}
        prompt = "".join(draw.choices("abcdefgh ", k=draw.randint(1, 50)))
        if kind == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if kind != "job":
            body["n"] = draw.choice((1, 1, 2, 3))
        if kind in ("stream", "leaving"):
            body["stream"] = True
        body |= draw.choice(({}, {"timeout_ms": 1000 * LIMIT_S}))
        body |= draw.choice(({}, {"stop": list("aei")}, {"repetition_penalty": 1.3}, {"priority": draw.randint(-2, 2)}))
        yield kind, body


def answer(client: httpx.Client, kind: str, body: dict[str, Any]) -> Any:
    """Return what must not change in an answer; nothing of a stream that the client leaves after its first event."""
    if kind == "leaving":
        with client.stream("POST", "/v1/completions", json=body | {"max_tokens": 70}) as reply:
            return any(line.startswith("data: {") for line in reply.iter_lines())  # the first; comments precede it
    if kind == "stream":
        texts: dict[int, str] = {}
        with client.stream("POST", "/v1/completions", json=body) as reply:
            for line in reply.iter_lines():
                for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        return texts
    path = {"job": "/v1/jobs", "chat": "/v1/chat/completions"}.get(kind, "/v1/completions")
    reply = client.post(path, json=body | ({"stream": False} if kind == "job" else {}))
    assert reply.status_code == 200, reply.text
    found = reply.json()
    if kind == "job":
        return found["text"], found["stop_reason"], found["tokens_out"]
    return found["choices"], found["usage"]["completion_tokens"]


class Soak:
    """One worker under rounds of the same requests."""

    def __init__(self, running: ServeProcess) -> None:
        self.running, self.draw = running, random.Random(5)
        self.requests = list(bodies(self.draw))

    def run_round(self, num_answers_to_kill: int | None) -> list[Any]:
        """Send all requests, in another order each time; kill the engine after so many answers. Return the answers in
        the order of the requests."""
        order = self.draw.sample(range(NUM_BODIES), NUM_BODIES)
        answers: list[Any] = [None] * NUM_BODIES
        limits = httpx.Limits(max_connections=None)
        with (
            httpx.Client(base_url=self.running.url, timeout=LIMIT_S, limits=limits) as client,
            ThreadPoolExecutor(NUM_CLIENTS) as pool,
        ):
            tasks = {pool.submit(answer, client, *self.requests[number]): number for number in order}
            for count, task in enumerate(as_completed(tasks), 1):
                answers[tasks[task]] = task.result()
                if count == num_answers_to_kill:
                    os.kill(self.draw.choice(self.running.engines()), signal.SIGKILL)
        return answers

    def require_idle(self, num_restarts: int = 0) -> None:
        """Require that no request holds anything, after so many restarts."""
        until(lambda: self.running.metric("engine_restarts_total") == num_restarts)
        until(lambda: self._health() == ("healthy", 0, 0))
        until(lambda: self.running.metric("kv_cache_usage_perc") == 0)

    def _health(self) -> tuple[str, int, int]:
        found = self.running.http.get("/health").json()
        return found["status"], found["running"], found["waiting"]

    def num_descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.running.process.pid}/fd").iterdir()))

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.running.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@ON_CPU
@pytest.mark.timeout(120 + 60 * ROUNDS)
@pytest.mark.parametrize("num_engines", NUM_ENGINES)
def test_answers_stay_the_same_while_engines_are_killed(tmp_path: Path, num_engines: int) -> None:
    """Each token depends on all before it. The first rounds, undisturbed, are the measure of the others."""
    model = with_kernels(tiny_models.write_random(tmp_path / "random.gguf"))
    with (tmp_path / "log").open("wb") as log:
        options = "--engine-restarts", "100", "--replicas", str(num_engines), "--allow-priority"
        running = ServeProcess("-m", model, *options, stderr=log.fileno()).ready()
    try:
        soak = Soak(running)
        expected = soak.run_round(None)
        assert soak.run_round(None) == expected
        soak.require_idle()
        num_processes, num_descriptors, sizes = len(running.processes()), soak.num_descriptors(), []
        for times in range(1, ROUNDS + 1):
            assert soak.run_round(soak.draw.randrange(1, NUM_BODIES)) == expected
            soak.require_idle(times)
            sizes.append(soak.resident_bytes())
        assert max(sizes[-ROUNDS // 4 :]) < max(sizes[ROUNDS // 2 - 1 :][: ROUNDS // 4]) + MAX_GROWTH_BYTES, sizes
        until(lambda: len(running.processes()) == num_processes)
        until(lambda: soak.num_descriptors() <= num_descriptors)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(LIMIT_S) == 0
        assert running.processes() == []
        lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        assert [line for line in lines if line["level"] == "error"] == []
    finally:
        running.close()
