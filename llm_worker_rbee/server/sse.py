"""Server-sent events: one JSON object an event, sent as soon as it exists, and a ping on an idle stream.

A disconnect closes the source at once. A client that does not read is cut off by its connection (`serve.Connection`).
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


def encode_event(data: Mapping[str, Any]) -> bytes:
    """Return the bytes of one event."""
    return b"data: " + _encode(data) + b"\n\n"


class EventStream:
    """A streamed response; `source` yields its bytes and is closed in any case."""

    def __init__(
        self, source: AsyncGenerator[bytes, None], *, ping_s: float, headers: Mapping[str, str] = {},
        on_end: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._source = source
        self._on_end = on_end  # a generator that was never started cleans nothing up
        self._ping_s = ping_s
        self._headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in {**HEADERS, **headers}.items()]
        self._is_idle = True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        parts = (self._send_events(send), wait_for_disconnect(receive), self._send_pings(send))
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await self._source.aclose()
            self._on_end()
        if isinstance(results[0], Exception) and not isinstance(results[0], OSError):
            raise results[0]

    async def _send_events(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        async for chunk in self._source:
            self._is_idle = False
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_pings(self, send: Any) -> None:
        while True:
            await asyncio.sleep(self._ping_s)
            if self._is_idle:
                await send({"type": "http.response.body", "body": PING, "more_body": True})
            self._is_idle = True


async def wait_for_disconnect(receive: Any) -> None:
    """Return when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
