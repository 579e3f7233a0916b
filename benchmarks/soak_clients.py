"""What visitors of a server do in a soak: ask in both dialects, read early, late, slowly or not to the end, cancel, and
send what nobody should. Each kind of visit is a function of `KINDS`; it raises `OursError` where the server is at fault
and `Refused` where it says that it is full. Everything is drawn from a seeded generator.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from invalid_requests import BAD_BODIES, GARBAGE

from llm_worker_rbee.bench.http_client import Client, EventParser
from llm_worker_rbee.bench.workload import vocabulary

LONGEST_REPLY = 8 << 20
CHAT, TEXT, JOBS, EXECUTE = "/v1/chat/completions", "/v1/completions", "/v1/jobs", "/execute"
TABLE = {"chat": CHAT, "completions": TEXT, "execute": EXECUTE}


class OursError(Exception):
    """The server did what it must not do."""


class Refused(Exception):  # noqa: N818 - nothing is wrong
    """The server is full, and says so."""


@dataclass(slots=True)
class Visitor:
    """One who asks again and again."""

    client: Client
    rng: random.Random
    longest_prompt: int  # in words
    longest_answer: int  # in tokens
    name: str

    async def reply(self, method: str, path: str, body: Any = None, *, may: Sequence[str] = ()) -> Any:
        """A whole reply; `may` are the codes of errors that are asked for."""
        async with self.client.request(method, path, None if body is None else json.dumps(body).encode()) as response:
            text = await response.text(LONGEST_REPLY)
            found = json.loads(text) if response.headers.get("content-type") == "application/json" else text
        if response.status >= 400:
            judge(f"{method} {path}", response.status, found, may)
            return None
        return found

    async def events(
        self, method: str, path: str, body: Any = None, *, leave_after: int | None = None, pause_s: float = 0.0
    ) -> list[str]:
        """The events of a stream, to the end or until this visitor leaves."""
        raw, parser, seen = None if body is None else json.dumps(body).encode(), EventParser(), 0
        found: list[str] = []
        async with self.client.request(method, path, raw) as response:
            if response.status != 200:
                judge(f"{method} {path}", response.status, json.loads(await response.text(LONGEST_REPLY)), ())
                return []
            async for part in response.parts():
                found += parser.feed(part)
                seen += 1
                if leave_after is not None and seen > leave_after:
                    return found
                await asyncio.sleep(pause_s)
        if leave_after is None and found[-1:] != ["[DONE]"]:
            raise OursError(f"{method} {path}: a stream without [DONE]: {found[-2:]}")
        return found

    def prompt(self) -> str:
        """Short most of the time; some begin alike."""
        count = self.rng.choice([3, 10, 40, self.longest_prompt // 2, self.longest_prompt])
        words = self.rng.choices(vocabulary(), k=max(1, count))
        return " ".join(("Once upon a time there was " if self.rng.random() < 0.5 else "").split() + words)

    def sampling(self) -> dict[str, Any]:
        """Fields that both dialects know."""
        rng = self.rng
        made: dict[str, Any] = {"max_tokens": rng.choice([1, 8, 24, self.longest_answer])}
        for name, value in {"temperature": rng.choice([0, 0.7, 1.5]), "top_k": 20, "top_p": 0.9, "seed": 7,
                            "min_p": 0.05, "repetition_penalty": 1.1, "stop": [rng.choice(["e", " the", "0", "xyz"])],
                            "priority": rng.choice([-1, 1])}.items():  # fmt: skip
            if rng.random() < 0.3:
                made[name] = value
        return made

    def openai(self, path: str, *, stream: bool) -> dict[str, Any]:
        """A body of the OpenAI dialect."""
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
        """A body of the job dialect."""
        asked = {"prompt": self.prompt()} if self.rng.random() < 0.7 else {
            "messages": [{"role": "user", "content": self.prompt()}]}  # fmt: skip
        return {**self.sampling(), **asked, **more}

    def body_of(self, kind: str) -> dict[str, Any]:
        """A body whose answer is a stream."""
        if kind == "execute":
            return self.job(job_id=f"{self.name}-{self.rng.getrandbits(64):x}")
        return self.openai(TABLE[kind], stream=True)

    async def begin(self, **more: Any) -> str:
        """Start a job; its path."""
        return f"{JOBS}/{(await self.reply('POST', JOBS, self.job(**more)))['job_id']}"


def judge(what: str, status: int, body: Any, may: Sequence[str]) -> None:
    """An error reply: asked for, the server full, or the server's fault."""
    error = body.get("error", body) if isinstance(body, dict) else {}
    code = str(error.get("code", "")).upper() if isinstance(error, dict) else ""
    if status == 429:
        raise Refused(code)
    if code not in may:
        raise OursError(f"{what}: {status} {str(body)[:200]}")


def ended(events: Sequence[str], may: Sequence[str] = ()) -> None:
    """A stream of either dialect that ended as it should, or with an error of the codes that are asked for."""
    parsed = [json.loads(event) for event in events[:-1]]
    for event in parsed:
        error = event if event.get("type") == "error" else event.get("error")
        if error and str(error.get("code", "")).upper() not in may:
            raise OursError(f"an error in a stream: {str(error)[:200]}")
    types = [event.get("type") for event in parsed]
    if "started" in types and not (types[0] == "started" and types[-1] in ("end", "error")):
        raise OursError(f"events out of order: {types[:2]} ... {types[-2:]}")
    if types.count("end") + types.count("error") > 1:
        raise OursError("a job has two ends")


async def streams(v: Visitor) -> None:
    """Any stream, read to its end."""
    kind = v.rng.choice(list(TABLE))
    ended(await v.events("POST", TABLE[kind], v.body_of(kind)))


async def wholes(v: Visitor) -> None:
    """A whole reply of either dialect."""
    path = v.rng.choice([CHAT, TEXT, JOBS])
    body = v.job(stream=False) if path == JOBS else v.openai(path, stream=False)
    reply = await v.reply("POST", path, body)
    asked = len(body["prompt"]) if path == TEXT and isinstance(body["prompt"], list) else 1
    if path != JOBS and asked == 1 and len(reply["choices"]) != body["n"]:
        raise OursError(f"{path}: {len(reply['choices'])} choices where {body['n']} were asked for")


async def leaves(v: Visitor) -> None:
    """Goes away in the middle of a stream."""
    kind = v.rng.choice(list(TABLE))
    await v.events("POST", TABLE[kind], v.body_of(kind), leave_after=v.rng.choice([0, 1, 2, 5, 20]))


async def is_impatient(v: Visitor) -> None:
    """Goes away after some time, whatever happens: while queued, in prefill, in the middle, in a whole reply."""
    path = v.rng.choice([CHAT, TEXT])
    try:
        async with asyncio.timeout(v.rng.choice([0.001, 0.01, 0.05, 0.3])):
            await v.reply("POST", path, v.openai(path, stream=v.rng.random() < 0.5))
    except TimeoutError:
        pass


async def jobs(v: Visitor) -> None:
    """A job, read by two at once, or late, and again."""
    path = await v.begin()
    if v.rng.random() < 0.5:
        await asyncio.sleep(v.rng.random())
        both = [await v.events("GET", f"{path}/stream") for _ in range(2)]
    else:
        slow = v.rng.choice([0.0, 0.02])
        both = list(
            await asyncio.gather(v.events("GET", f"{path}/stream"), v.events("GET", f"{path}/stream", pause_s=slow))
        )
    ended(both[0])
    if both[0] != both[1]:
        raise OursError("two readers of one job saw different events")
    await v.reply("GET", path)


async def cancels(v: Visitor) -> None:
    """Ends a job, by one way or the other, at some moment."""
    path = await v.begin(max_tokens=v.longest_answer)
    await asyncio.sleep(v.rng.choice([0, 0.01, 0.1, 0.5]))
    if v.rng.random() < 0.5:
        await v.reply("DELETE", path)
    else:
        await v.reply("POST", "/cancel", {"job_id": path.rpartition("/")[2]})
    ended(await v.events("GET", f"{path}/stream"), ["CANCELLED"])


async def runs_out_of_time(v: Visitor) -> None:
    """A deadline that is often too short."""
    limit = v.rng.choice([1, 20, 200])
    if v.rng.random() < 0.5:
        ended(await v.events("POST", CHAT, {**v.openai(CHAT, stream=True), "timeout_ms": limit}), ["TIMEOUT"])
    else:
        await v.reply("POST", JOBS, v.job(stream=False, timeout_ms=limit), may=["TIMEOUT"])


async def reads_slowly(v: Visitor) -> None:
    """Takes its time between pieces."""
    body = v.body_of("chat")
    ended(await v.events("POST", CHAT, body, pause_s=v.rng.choice([0.005, 0.05])))


async def sends_nonsense(v: Visitor) -> None:
    """A body that must be refused, and nothing more happens."""
    path, body = v.rng.choice(BAD_BODIES)
    async with v.client.request("POST", path, body) as response:
        text = await response.text(LONGEST_REPLY)
    if not 400 <= response.status < 500:
        raise OursError(f"POST {path} {body[:60]!r}: {response.status} {text[:100]}")


async def breaks_off(v: Visitor) -> None:
    """Bytes that are no request, or not a whole one."""
    address = v.client.address
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(v.rng.choice(GARBAGE))
        async with asyncio.timeout(v.rng.choice([0.01, 0.2])):
            told = await reader.read(1 << 16)
        if told.startswith(b"HTTP/1.1 5"):
            raise OursError(f"bytes that are no request: {told[:80]!r}")
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()


async def looks_around(v: Visitor) -> None:
    """What an orchestrator and a page ask for."""
    if v.rng.random() < 0.3:
        await v.reply("POST", "/tokenize", {"text": v.prompt()})
    elif v.rng.random() < 0.2:
        await v.reply("GET", f"{JOBS}/nobody", may=["NOT_FOUND"])
    else:
        await v.reply("GET", v.rng.choice(["/", "/v1/models", "/metrics", "/info", "/v1/ready", "/openapi.json"]))


Visit = Callable[[Visitor], Awaitable[None]]
KINDS: dict[str, tuple[Visit, int]] = {  # with how often each comes
    "streams": (streams, 6), "whole replies": (wholes, 5), "leaves a stream": (leaves, 5),
    "impatient": (is_impatient, 3), "jobs, two readers": (jobs, 4), "cancels": (cancels, 4),
    "out of time": (runs_out_of_time, 2), "reads slowly": (reads_slowly, 2),
    "nonsense": (sends_nonsense, 8), "breaks off": (breaks_off, 3),
    "looks around": (looks_around, 4),
}  # fmt: skip
