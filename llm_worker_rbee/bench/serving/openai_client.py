"""The OpenAI protocol as a client sees it: which models there are, and one streamed answer with the time of each piece.

Times are those of `time.perf_counter` at which the bytes of a piece were read; no text is kept. An answer counts as
whole when it named its finish reason or ended with [DONE].
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from ..http_client import Address, Client, EventParser, RequestFailedError
from ..workload import Job

LONGEST_ERROR = 1 << 14
LONGEST_LIST = 4 << 20
PATHS = {"chat": "/chat/completions", "completions": "/completions"}
Endpoint = Literal["chat", "completions"]


def address(url: str) -> Address:
    """Where the protocol is spoken: below the path that the URL has, or below /v1."""
    found = Address.parse(url)
    return found if found.base else replace(found, base="/v1")


@dataclass(slots=True)
class Answer:
    """What came back for one request."""

    arrivals: list[float] = field(default_factory=list)  # of each piece with text
    events: int = 0
    ended: float = 0.0  # when the finish reason came, or the last piece
    finished: bool = False
    prompt_tokens: int | None = None  # as the server counts them
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how it is asked."""

    client: Client
    model: str
    endpoint: Endpoint = "chat"
    temperature: float = 0.0
    ignore_eos: bool = False
    usage: bool = True  # ask for token counts at the end of the stream

    async def ask(self, job: Job, answer: Answer) -> None:
        """Send one request and read its answer to the end, into a record that can be looked at meanwhile."""
        body = json.dumps(self.body(job)).encode()
        async with self.client.request("POST", PATHS[self.endpoint], body) as response:
            if response.status != 200:
                raise RequestFailedError(f"http {response.status}", _told(await response.text(LONGEST_ERROR)))
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise RequestFailedError("protocol", "the answer is not an event stream")
            parser = EventParser()
            async for part in response.parts():
                now = time.perf_counter()
                for data in parser.feed(part):
                    take(answer, data, now)
            for data in parser.finish():
                take(answer, data, time.perf_counter())
        if not answer.finished:
            raise RequestFailedError("truncated", "the stream ended without a finish reason")

    def body(self, job: Job) -> dict[str, Any]:
        """The request's object."""
        prompt = job.prompt
        if self.endpoint == "completions":
            asked: dict[str, Any] = {"prompt": prompt.text}
        else:
            asked = {"messages": prompt.messages or [{"role": "user", "content": prompt.text}]}
        extra: dict[str, Any] = {"stream_options": {"include_usage": True}} if self.usage else {}
        extra |= {"ignore_eos": True} if self.ignore_eos else {}
        return {
            "model": self.model,
            **asked,
            "max_tokens": job.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            **extra,
        }


def take(answer: Answer, data: str, now: float) -> None:
    """What one event adds to an answer."""
    answer.events += 1
    if data == "[DONE]":
        answer.finished, answer.ended = True, answer.ended or now
        return
    event = _object(data)
    if event.get("error"):
        raise RequestFailedError("server", _told(data))
    for choice in event.get("choices") or ():
        if not isinstance(choice, dict):
            raise RequestFailedError("protocol", "an event's choice is not an object")
        if _has_text(choice):
            answer.arrivals.append(now)
            answer.ended = now
        if choice.get("finish_reason") is not None:
            answer.finished, answer.ended = True, now
    usage = event.get("usage")
    if isinstance(usage, dict):
        answer.prompt_tokens = _count(usage, "prompt_tokens")
        answer.output_tokens = _count(usage, "completion_tokens")


async def models(client: Client) -> list[str]:
    """The names that GET /models lists."""
    async with client.request("GET", "/models") as response:
        text = await response.text(LONGEST_LIST)
        if response.status != 200:
            raise RequestFailedError(f"http {response.status}", _told(text))
    listed = _object(text).get("data")
    if not isinstance(listed, list):
        raise RequestFailedError("protocol", "GET /models gives no list")
    return [one["id"] for one in listed if isinstance(one, dict) and isinstance(one.get("id"), str)]


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    held = delta if isinstance(delta, dict) else {}
    return bool(choice.get("text") or any(held.get(key) for key in ("content", "reasoning_content", "reasoning")))


def _object(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestFailedError("protocol", f"the answer holds {text[:60]!r} where a JSON object must be")
    return value


def _count(usage: Mapping[str, Any], key: str) -> int | None:
    value = usage.get(key)
    return value if type(value) is int and value >= 0 else None


def _told(text: str) -> str:
    """What an error's body says, in one line."""
    try:
        error = json.loads(text)["error"]
        told = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError, RecursionError):
        told = text
    return " ".join(str(told).split())[:300] or "no reason given"
