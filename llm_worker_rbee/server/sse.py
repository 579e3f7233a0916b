"""Server-sent events: one object an event, bytes that leave as soon as they exist, a ping where nothing else does.

A client that goes away ends its source at once. One that does not read is cut by its connection (run.py).
"""

from __future__ import annotations

import asyncio
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
        self, source: AsyncGenerator[bytes, None], *, ping_s: float, headers: Mapping[str, str] = {},
        on_end: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._source = source
        self._on_end = on_end  # a generator that has not begun would clean nothing up
        self._ping_s = ping_s
        self._headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in {**HEADERS, **headers}.items()]
        self._is_idle = True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As an ASGI application."""
        tasks = [asyncio.ensure_future(part) for part in (self._pump(send), gone(receive), self._pings(send))]
        try:
            await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
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
            self._is_idle = False
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pings(self, send: Any) -> None:
        while True:
            await asyncio.sleep(self._ping_s)
            if self._is_idle:
                await send({"type": "http.response.body", "body": PING, "more_body": True})
            self._is_idle = True


async def gone(receive: Any) -> None:
    """Until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
