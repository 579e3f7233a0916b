"""Simulated clients of a soak: they use both dialects, read early, late, slowly or partly, cancel, send invalid bodies.

Each behaviour is a function in `BEHAVIOURS`; it raises `ServerFaultError` where the server is at fault and
`ServerFullError` where the queue is full. Everything is drawn from a seeded generator.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.invalid_requests import BAD_BODIES, GARBAGE
from llm_worker_bench.http_client import Client, EventParser
from llm_worker_bench.workload import vocabulary

MAX_REPLY_BYTES = 8 << 20
CHAT, TEXT, JOBS, EXECUTE = "/v1/chat/completions", "/v1/completions", "/v1/jobs", "/execute"
STREAM_PATHS = {"chat": CHAT, "completions": TEXT, "execute": EXECUTE}


class ServerFaultError(Exception):
    """The server did what it must not do."""


class ServerFullError(Exception):
    """The server refused a request because its queue is full."""


@dataclass(slots=True)
class SimulatedClient:
    """A client that sends requests drawn from a seeded generator."""

    client: Client
    rng: random.Random
    longest_prompt: int  # in words
    longest_answer: int  # in tokens
    name: str

    async def reply(self, method: str, path: str, body: Any = None, *, expected_codes: Sequence[str] = ()) -> Any:
        """Return a whole reply; errors with the expected codes are accepted."""
        async with self.client.request(method, path, None if body is None else json.dumps(body).encode()) as response:
            text = await response.text(MAX_REPLY_BYTES)
            found = json.loads(text) if response.headers.get("content-type") == "application/json" else text
        if response.status >= 400:
            check_error(f"{method} {path}", response.status, found, expected_codes)
            return None
        return found

    async def events(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        max_parts: int | None = None,
        pause_s: float = 0.0,
        expected_codes: Sequence[str] = (),
    ) -> list[str]:
        """Return the events of a stream, to its end or until `max_parts` were read; errors as in `reply`."""
        raw, parser, seen = None if body is None else json.dumps(body).encode(), EventParser(), 0
        found: list[str] = []
        async with self.client.request(method, path, raw) as response:
            if response.status != 200:
                reply = json.loads(await response.text(MAX_REPLY_BYTES))
                check_error(f"{method} {path}", response.status, reply, expected_codes)
                return []
            async for part in response.parts():
                found += parser.feed(part)
                seen += 1
                if max_parts is not None and seen > max_parts:
                    return found
                await asyncio.sleep(pause_s)
        if max_parts is None and found[-1:] != ["[DONE]"]:
            raise ServerFaultError(f"{method} {path}: a stream without [DONE]: {found[-2:]}")
        return found

    def prompt(self) -> str:
        """Return a prompt: mostly short, some with a common prefix."""
        count = self.rng.choice([3, 10, 40, self.longest_prompt // 2, self.longest_prompt])
        words = self.rng.choices(vocabulary(), k=max(1, count))
        return " ".join(("Once upon a time there was " if self.rng.random() < 0.5 else "").split() + words)

    def sampling(self) -> dict[str, Any]:
        """Return fields that both dialects have."""
        rng = self.rng
        made: dict[str, Any] = {"max_tokens": rng.choice([1, 8, 24, self.longest_answer])}
        for name, value in {"temperature": rng.choice([0, 0.7, 1.5]), "top_k": 20, "top_p": 0.9, "seed": 7,
                            "min_p": 0.05, "repetition_penalty": 1.1, "stop": [rng.choice(["e", " the", "0", "xyz"])],
                            "priority": rng.choice([-1, 1])}.items():  # fmt: skip
            if rng.random() < 0.3:
                made[name] = value
        return made

    def openai(self, path: str, *, stream: bool) -> dict[str, Any]:
        """Return a body of the OpenAI dialect."""
        rng, chat = self.rng, path == CHAT
        body = {**self.sampling(), "stream": stream, "n": rng.choice([1, 1, 1, 2, 3])}
        if chat:
            body["messages"] = [{"role": "user", "content": self.prompt()}]
        else:
            body["prompt"] = rng.choice([self.prompt(), [self.prompt(), self.prompt()], [65, 66, 67], [[65], [66, 67]]])
            body |= {"echo": True} if rng.random() < 0.2 else {}
        if rng.random() < 0.2:
            body["logprobs"] = True if chat else 2
        return body

    def job(self, **more: Any) -> dict[str, Any]:
        """Return a body of the job dialect."""
        prompt = {"prompt": self.prompt()} if self.rng.random() < 0.7 else {
            "messages": [{"role": "user", "content": self.prompt()}]}  # fmt: skip
        return {**self.sampling(), **prompt, **more}

    def stream_body(self, kind: str) -> dict[str, Any]:
        """Return a body whose reply is a stream."""
        if kind == "execute":
            return self.job(job_id=f"{self.name}-{self.rng.getrandbits(64):x}")
        return self.openai(STREAM_PATHS[kind], stream=True)

    async def start_job(self, **more: Any) -> str:
        """Start a job; return its path."""
        return f"{JOBS}/{(await self.reply('POST', JOBS, self.job(**more)))['job_id']}"


def check_error(what: str, status: int, body: Any, expected_codes: Sequence[str]) -> None:
    """Raise unless an error reply is expected; the server may be full or at fault."""
    error = body.get("error", body) if isinstance(body, dict) else {}
    code = str(error.get("code", "")).upper() if isinstance(error, dict) else ""
    if status == 429:
        raise ServerFullError(code)
    if code not in expected_codes:
        raise ServerFaultError(f"{what}: {status} {str(body)[:200]}")


def check_stream(events: Sequence[str], expected_codes: Sequence[str] = ()) -> None:
    """Raise unless a stream of either dialect ended properly or with an expected error."""
    parsed = [json.loads(event) for event in events[:-1]]
    for event in parsed:
        error = event if event.get("type") == "error" else event.get("error")
        if error and str(error.get("code", "")).upper() not in expected_codes:
            raise ServerFaultError(f"an error in a stream: {str(error)[:200]}")
    types = [event.get("type") for event in parsed]
    if "started" in types and not (types[0] == "started" and types[-1] in ("end", "error")):
        raise ServerFaultError(f"events out of order: {types[:2]} ... {types[-2:]}")
    if types.count("end") + types.count("error") > 1:
        raise ServerFaultError("a job has two ends")


async def read_stream(client: SimulatedClient) -> None:
    """Read any stream to its end."""
    kind = client.rng.choice(list(STREAM_PATHS))
    check_stream(await client.events("POST", STREAM_PATHS[kind], client.stream_body(kind)))


async def read_whole(client: SimulatedClient) -> None:
    """Read a whole reply of either dialect."""
    path = client.rng.choice([CHAT, TEXT, JOBS])
    body = client.job(stream=False) if path == JOBS else client.openai(path, stream=False)
    reply = await client.reply("POST", path, body)
    num_prompts = len(body["prompt"]) if path == TEXT and isinstance(body["prompt"], list) else 1
    if path != JOBS and num_prompts == 1 and len(reply["choices"]) != body["n"]:
        raise ServerFaultError(f"{path}: {len(reply['choices'])} choices instead of {body['n']}")


async def leave_stream(client: SimulatedClient) -> None:
    """Disconnect in the middle of a stream."""
    kind = client.rng.choice(list(STREAM_PATHS))
    await client.events(
        "POST", STREAM_PATHS[kind], client.stream_body(kind), max_parts=client.rng.choice([0, 1, 2, 5, 20])
    )


async def disconnect_early(client: SimulatedClient) -> None:
    """Disconnect after some time: while queued, in prefill, in decode, in a whole reply."""
    path = client.rng.choice([CHAT, TEXT])
    try:
        async with asyncio.timeout(client.rng.choice([0.001, 0.01, 0.05, 0.3])):
            await client.reply("POST", path, client.openai(path, stream=client.rng.random() < 0.5))
    except TimeoutError:
        pass


async def read_job_twice(client: SimulatedClient) -> None:
    """Read a job by two readers at once, or late and twice."""
    path = await client.start_job()
    if client.rng.random() < 0.5:
        await asyncio.sleep(client.rng.random())
        both = [await client.events("GET", f"{path}/stream") for _ in range(2)]
    else:
        slow = client.rng.choice([0.0, 0.02])
        both = list(
            await asyncio.gather(
                client.events("GET", f"{path}/stream"), client.events("GET", f"{path}/stream", pause_s=slow)
            )
        )
    check_stream(both[0])
    if both[0] != both[1]:
        raise ServerFaultError("two readers of one job saw different events")
    await client.reply("GET", path)


async def cancel_job(client: SimulatedClient) -> None:
    """Cancel a job by either route at some moment."""
    path = await client.start_job(max_tokens=client.longest_answer)
    await asyncio.sleep(client.rng.choice([0, 0.01, 0.1, 0.5]))
    if client.rng.random() < 0.5:
        await client.reply("DELETE", path)
    else:
        await client.reply("POST", "/cancel", {"job_id": path.rpartition("/")[2]})
    check_stream(await client.events("GET", f"{path}/stream"), ["CANCELLED"])


async def hit_timeout(client: SimulatedClient) -> None:
    """Set a timeout that is often too short."""
    limit = client.rng.choice([1, 20, 200])
    if client.rng.random() < 0.5:
        body = {**client.openai(CHAT, stream=True), "timeout_ms": limit}
        check_stream(await client.events("POST", CHAT, body, expected_codes=["TIMEOUT"]), ["TIMEOUT"])
    else:
        await client.reply("POST", JOBS, client.job(stream=False, timeout_ms=limit), expected_codes=["TIMEOUT"])


async def read_slowly(client: SimulatedClient) -> None:
    """Pause between the parts of a stream."""
    body = client.stream_body("chat")
    check_stream(await client.events("POST", CHAT, body, pause_s=client.rng.choice([0.005, 0.05])))


async def send_invalid_body(client: SimulatedClient) -> None:
    """Send a body that must be refused."""
    path, body = client.rng.choice(BAD_BODIES)
    async with client.client.request("POST", path, body) as response:
        text = await response.text(MAX_REPLY_BYTES)
    if not 400 <= response.status < 500:
        raise ServerFaultError(f"POST {path} {body[:60]!r}: {response.status} {text[:100]}")


async def send_garbage(client: SimulatedClient) -> None:
    """Send bytes that are no request, or an incomplete one."""
    address = client.client.address
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(client.rng.choice(GARBAGE))
        async with asyncio.timeout(client.rng.choice([0.01, 0.2])):
            reply = await reader.read(1 << 16)
        if reply.startswith(b"HTTP/1.1 5"):
            raise ServerFaultError(f"bytes that are no request: {reply[:80]!r}")
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()


async def poll_routes(client: SimulatedClient) -> None:
    """Request what an orchestrator and the page request."""
    if client.rng.random() < 0.3:
        await client.reply("POST", "/tokenize", {"text": client.prompt()})
    elif client.rng.random() < 0.2:
        await client.reply("GET", f"{JOBS}/nobody", expected_codes=["NOT_FOUND"])
    else:
        await client.reply(
            "GET", client.rng.choice(["/", "/v1/models", "/metrics", "/info", "/v1/ready", "/openapi.json"])
        )


Behaviour = Callable[[SimulatedClient], Awaitable[None]]
BEHAVIOURS: dict[str, tuple[Behaviour, int]] = {  # with the weight of each
    "streams": (read_stream, 6), "whole replies": (read_whole, 5), "leaves a stream": (leave_stream, 5),
    "impatient": (disconnect_early, 3), "jobs, two readers": (read_job_twice, 4), "cancels": (cancel_job, 4),
    "out of time": (hit_timeout, 2), "reads slowly": (read_slowly, 2),
    "nonsense": (send_invalid_body, 8), "breaks off": (send_garbage, 3),
    "looks around": (poll_routes, 4),
}  # fmt: skip
