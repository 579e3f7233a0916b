"""Server-sent events: one JSON object an event, sent as soon as it exists, and a ping on an idle stream.

A disconnect closes the source at once. A client that does not read is cut off by its connection (`serve.Connection`).
`EventStream` sends what an asynchronous generator yields. `PushStream` is for the tokens of completions: it has no task
that wakes up for each event, and writes directly to the connection.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from contextvars import copy_context
from typing import Any

import msgspec

# Of an ASGI scope, where the server offers them: a function that writes a part of the body at once, if it can, and
# returns whether it did; a function that registers a callback for a disconnect and returns one that removes it.
WRITE, ON_DISCONNECT = "llm_worker_rbee.write", "llm_worker_rbee.on_disconnect"
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store", "x-accel-buffering": "no"}
encode_json = msgspec.json.Encoder().encode


def encode_event(data: Mapping[str, Any]) -> bytes:
    """Return the bytes of one event."""
    return b"data: " + encode_json(data) + b"\n\n"


def encode_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return the headers of an event stream, with these in addition."""
    return [(k.encode("latin-1"), v.encode("latin-1")) for k, v in {**HEADERS, **headers}.items()]


class EventStream:
    """A streamed response; `source` yields its bytes and is closed in any case."""

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        *,
        ping_s: float,
        headers: Mapping[str, str] = {},
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._source = source
        self._on_end = on_end  # a generator that was never started cleans nothing up
        self._ping_s = ping_s
        self._headers = encode_headers(headers)
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


class EventSource(ABC):
    """Makes events, and reports when some are ready. The event loop calls all methods."""

    is_finished = False  # no events come after those that were taken

    @abstractmethod
    def start(self, on_ready: Callable[[], None]) -> None:
        """Call `on_ready` from now on whenever events are ready; extra calls do no harm."""

    @abstractmethod
    def take(self) -> bytes:
        """Return the ready events; it must not raise."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""


class PushStream:
    """A streamed response of an `EventSource`, which is closed in any case.

    Events are written by the callback that took them, through `scope[WRITE]` where the server offers it; a task sends
    them where it does not, and while the client does not read.
    """

    def __init__(
        self, source: EventSource, *, ping_s: float, headers: Mapping[str, str] = {}, ping: bytes = PING
    ) -> None:
        """`ping` is sent on an idle stream; an empty one is not."""
        self._source, self._ping_s, self._ping_event = source, ping_s, ping
        self._headers = encode_headers(headers)
        self._is_idle, self._is_scheduled = True, False
        self._sending: asyncio.Task[None] | None = None
        self._last = b""  # events that are sent with the end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._loop, self._context = asyncio.get_running_loop(), copy_context()
        self._send, self._write = send, scope.get(WRITE, _cannot_write)
        self._ended: asyncio.Future[bool] = self._loop.create_future()  # whether all events were taken
        stop_watching = watch_disconnect(scope, receive, lambda: self._end(False))
        self._ping = self._loop.call_later(self._ping_s, self._on_ping_time)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            self._source.start(self._on_ready)
            if await self._ended:
                await send({"type": "http.response.body", "body": self._last, "more_body": False})
        except OSError:
            pass  # the client is gone
        finally:
            self._end(False)
            stop_watching()
            self._ping.cancel()
            if self._sending is not None:
                self._sending.cancel()
            self._source.close()

    def _end(self, is_complete: bool) -> None:
        if not self._ended.done():
            self._ended.set_result(is_complete)

    def _on_ready(self) -> None:
        """Flush once per iteration of the event loop."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._flush, context=self._context)

    def _flush(self) -> None:
        """Write what is ready, unless a task is sending: it flushes afterwards."""
        self._is_scheduled = False
        if self._sending is not None or self._ended.done():
            return
        events = self._source.take()
        if self._source.is_finished:
            self._last = events
            self._end(True)
        elif events:
            self._is_idle = False
            if not self._write(events):
                self._sending = asyncio.ensure_future(self._send_events(events))

    async def _send_events(self, events: bytes) -> None:
        try:
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
        except Exception as error:
            if not self._ended.done():
                self._ended.set_exception(error)
        finally:
            self._sending = None
        self._flush()

    def _on_ping_time(self) -> None:
        if self._ping_event and self._is_idle and self._sending is None and not self._write(self._ping_event):
            self._sending = asyncio.ensure_future(self._send_events(self._ping_event))
        self._is_idle = True
        self._ping = self._loop.call_later(self._ping_s, self._on_ping_time)


def _cannot_write(_: bytes) -> bool:
    return False


def watch_disconnect(scope: Any, receive: Any, on_disconnect: Callable[[], object]) -> Callable[[], object]:
    """Call `on_disconnect` when the client disconnects; return a function that ends this."""
    if (register := scope.get(ON_DISCONNECT)) is not None:
        return register(on_disconnect)  # type: ignore[no-any-return]
    watch = asyncio.ensure_future(wait_for_disconnect(receive))
    watch.add_done_callback(lambda task: None if task.cancelled() else on_disconnect())
    return watch.cancel


async def wait_for_disconnect(receive: Any) -> None:
    """Return when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
