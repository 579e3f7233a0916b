"""The OpenAI protocol of a client: the list of models, and one streamed answer with the time of each delta.

Times are `time.perf_counter` when the bytes of a delta were read; no text is kept. An answer is complete when it has a
finish reason or ends with [DONE].
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

MAX_ERROR_BYTES = 1 << 14
MAX_LIST_BYTES = 4 << 20
PATHS = {"chat": "/chat/completions", "completions": "/completions"}
Endpoint = Literal["chat", "completions"]


def api_address(url: str) -> Address:
    """Return the base of the API: the path of the URL, or /v1."""
    found = Address.parse(url)
    return found if found.base else replace(found, base="/v1")


@dataclass(slots=True)
class Answer:
    """What was received for one request."""

    arrivals: list[float] = field(default_factory=list)  # of each delta with text
    events: int = 0
    ended: float = 0.0  # when the finish reason or the last delta came
    finished: bool = False
    prompt_tokens: int | None = None  # counted by the server
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A server and the fields of its requests."""

    client: Client
    model: str
    endpoint: Endpoint = "chat"
    temperature: float = 0.0
    ignore_eos: bool = False
    usage: bool = True  # request token counts at the end of the stream

    async def request(self, job: Job, answer: Answer) -> None:
        """Send one request and read its stream into `answer`, which others may read meanwhile."""
        body = json.dumps(self.body(job)).encode()
        async with self.client.request("POST", PATHS[self.endpoint], body) as response:
            if response.status != 200:
                raise RequestFailedError(
                    f"http {response.status}", _error_message(await response.text(MAX_ERROR_BYTES))
                )
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise RequestFailedError("protocol", "the response is not an event stream")
            parser = EventParser()
            async for part in response.parts():
                now = time.perf_counter()
                for data in parser.feed(part):
                    add_event(answer, data, now)
            for data in parser.finish():
                add_event(answer, data, time.perf_counter())
        if not answer.finished:
            raise RequestFailedError("truncated", "the stream ended without a finish reason")

    def body(self, job: Job) -> dict[str, Any]:
        prompt = job.prompt
        if self.endpoint == "completions":
            content: dict[str, Any] = {"prompt": prompt.text}
        else:
            content = {"messages": prompt.messages or [{"role": "user", "content": prompt.text}]}
        extra: dict[str, Any] = {"stream_options": {"include_usage": True}} if self.usage else {}
        extra |= {"ignore_eos": True} if self.ignore_eos else {}
        return {
            "model": self.model,
            **content,
            "max_tokens": job.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            **extra,
        }


def add_event(answer: Answer, data: str, now: float) -> None:
    """Add one event to an answer."""
    answer.events += 1
    if data == "[DONE]":
        answer.finished, answer.ended = True, answer.ended or now
        return
    event = _parse_object(data)
    if event.get("error"):
        raise RequestFailedError("server", _error_message(data))
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


async def list_models(client: Client) -> list[str]:
    """Return the names that GET /models lists."""
    async with client.request("GET", "/models") as response:
        text = await response.text(MAX_LIST_BYTES)
        if response.status != 200:
            raise RequestFailedError(f"http {response.status}", _error_message(text))
    listed = _parse_object(text).get("data")
    if not isinstance(listed, list):
        raise RequestFailedError("protocol", "GET /models returned no list")
    return [one["id"] for one in listed if isinstance(one, dict) and isinstance(one.get("id"), str)]


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    held = delta if isinstance(delta, dict) else {}
    return bool(choice.get("text") or any(held.get(key) for key in ("content", "reasoning_content", "reasoning")))


def _parse_object(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestFailedError("protocol", f"the response has {text[:60]!r} instead of a JSON object")
    return value


def _count(usage: Mapping[str, Any], key: str) -> int | None:
    value = usage.get(key)
    return value if type(value) is int and value >= 0 else None


def _error_message(text: str) -> str:
    """Return the message of an error body, in one line."""
    try:
        error = json.loads(text)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError, RecursionError):
        message = text
    return " ".join(str(message).split())[:300] or "no reason given"
