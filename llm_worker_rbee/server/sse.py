"""Server-sent events: one object an event, bytes that leave as soon as they exist, a ping where nothing else does.

A client that goes away ends its source at once; one that does not read is cut after a while, never waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store", "x-accel-buffering": "no"}
_encode = msgspec.json.Encoder().encode


def event(data: Mapping[str, Any]) -> bytes:
    """One event."""
    return b"data: " + _encode(data) + b"\n\n"


class EventStream:
    """A response that is a stream; `source` gives the bytes, and is closed whatever happens."""

    def __init__(
        self, source: AsyncGenerator[bytes, None], *, ping_s: float, stall_s: float, headers: Mapping[str, str] = {},
        on_end: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._source = source
        self._on_end = on_end  # a generator that has not begun would clean nothing up
        self._ping_s, self._stall_s = ping_s, stall_s
        self._headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in {**HEADERS, **headers}.items()]
        self._sent_at = time.monotonic()
        self._is_sending = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As an ASGI application."""
        tasks = [asyncio.ensure_future(part) for part in (self._pump(send), gone(receive), self._watch(send))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            await self._source.aclose()
            self._on_end()
        if isinstance(found[0], Exception) and not isinstance(found[0], OSError):
            raise found[0]

    async def _pump(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        async for chunk in self._source:
            self._sent_at, self._is_sending = time.monotonic(), True
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._is_sending = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, send: Any) -> None:
        """Until nobody reads: one timer for the whole stream costs less than one for each chunk."""
        while True:
            await asyncio.sleep(min(self._ping_s, self._stall_s / 4))
            quiet_s = time.monotonic() - self._sent_at
            if self._is_sending and quiet_s > self._stall_s:
                return
            if not self._is_sending and quiet_s >= self._ping_s:
                self._sent_at = time.monotonic()
                await send({"type": "http.response.body", "body": PING, "more_body": True})


async def gone(receive: Any) -> None:
    """Until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
