"""An event stream as a response: its source is closed and its end is sent once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from llm_worker_rbee.server.sse import DONE, WRITE, EventSource, EventStream, PushStream, encode_event
from tests.helpers.server import events, is_decoding, until
from tests.server.conftest import Start

LONG = 60_000  # max_tokens of a request that does not end during a test


def test_event_stream_idle_gets_pings(start: Start) -> None:
    """Pings are comments, so the events stay the same."""
    server = start({"max_batch": 1}, ping_s=0.05)
    running = server.job(max_tokens=LONG)
    until(lambda: is_decoding(server))
    waiting = server.job(max_tokens=3)
    with server.http.stream("GET", f"/v1/jobs/{waiting}/stream") as reply:
        text = ""
        for part in reply.iter_text():
            text += part
            if ": ping\n\n" in text:
                server.http.delete(f"/v1/jobs/{running}")
    assert ": ping" in text
    assert events(text) == server.events(waiting)


async def two_events() -> AsyncGenerator[bytes, None]:
    yield encode_event({"a": "\u2028\n"})
    yield DONE


async def never() -> Any:
    return await asyncio.Event().wait()


@pytest.mark.parametrize("fails_at", ["http.response.start", "http.response.body", None])
def test_event_stream_calls_on_end_once(fails_at: str | None) -> None:
    """Also where the headers could not be sent, so that the source never started."""
    ends: list[int] = []
    sent: list[Any] = []

    async def send(message: Any) -> None:
        if message["type"] == fails_at:
            raise RuntimeError("broken")
        sent.append(message)

    async def run() -> None:
        await EventStream(two_events(), ping_s=9, on_end=lambda: ends.append(1))({}, never, send)

    if fails_at is None:
        asyncio.run(run())
        body = b"".join(one.get("body", b"") for one in sent)
        assert body == b'data: {"a":"\xe2\x80\xa8\\n"}\n\ndata: [DONE]\n\n'
        assert not sent[-1]["more_body"]
    else:
        with pytest.raises(RuntimeError, match="broken"):
            asyncio.run(run())
    assert ends == [1]


class Numbers(EventSource):
    """Has an event for each number that was added; the last one is None."""

    def __init__(self) -> None:
        self.numbers: list[int | None] = []
        self.is_closed = False
        self.on_ready: Callable[[], None] = lambda: None

    def start(self, on_ready: Callable[[], None]) -> None:
        self.on_ready = on_ready
        if self.numbers:
            on_ready()

    def take(self) -> bytes:
        numbers, self.numbers = self.numbers, []
        self.is_finished = None in numbers
        return b"".join(b"data: %d\n\n" % number for number in numbers if number is not None)

    def close(self) -> None:
        self.is_closed = True

    async def add(self, *numbers: int | None) -> None:
        self.numbers += numbers
        self.on_ready()
        for _ in range(3):  # iterations of the event loop
            await asyncio.sleep(0)


class Client:
    """What a client of a stream gets, through `send` and by writing at once."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.body = b""
        self.written: list[bytes] = []
        self.can_write = True
        self.may_send, self.has_left = asyncio.Event(), asyncio.Event()
        self.may_send.set()

    async def send(self, message: Any) -> None:
        await self.may_send.wait()
        self.messages.append(message)
        self.body += message.get("body", b"")

    async def receive(self) -> Any:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    def write(self, data: bytes) -> bool:
        if self.can_write:
            self.written.append(data)
            self.body += data
        return self.can_write

    def start(self, source: Numbers, *, offers_write: bool = True, ping_s: float = 60.0) -> asyncio.Task[None]:
        scope = {WRITE: self.write} if offers_write else {}
        stream = PushStream(source, ping_s=ping_s, headers={"x-a": "b"})
        return asyncio.ensure_future(stream(scope, self.receive, self.send))


@pytest.mark.parametrize("offers_write", [True, False])
def test_push_stream_sends_all_events_and_one_end(offers_write: bool) -> None:
    async def run() -> None:
        source, client = Numbers(), Client()
        task = client.start(source, offers_write=offers_write)
        await asyncio.sleep(0)
        await source.add(1)
        await source.add(2, 3)
        await source.add(4, None)
        await task
        assert client.body == b"".join(b"data: %d\n\n" % number for number in (1, 2, 3, 4))
        assert (b"x-a", b"b") in client.messages[0]["headers"]
        assert [message.get("more_body") for message in client.messages[1:]].count(False) == 1
        assert client.messages[-1]["more_body"] is False
        assert bool(client.written) == offers_write
        assert source.is_closed

    asyncio.run(run())


def test_push_stream_of_slow_client_keeps_order() -> None:
    """While one event is being sent, others wait; none is written before it."""

    async def run() -> None:
        source, client = Numbers(), Client()
        task = client.start(source)
        await asyncio.sleep(0)
        client.can_write = False
        client.may_send.clear()
        await source.add(1)
        client.can_write = True
        await source.add(2)
        await source.add(3)
        assert client.body == b""
        client.may_send.set()
        await source.add(4, None)
        await task
        assert client.body == b"data: 1\n\ndata: 2\n\ndata: 3\n\ndata: 4\n\n"

    asyncio.run(run())


@pytest.mark.parametrize("is_sending", [True, False])
def test_push_stream_disconnect_closes_source(is_sending: bool) -> None:
    async def run() -> None:
        source, client = Numbers(), Client()
        task = client.start(source)
        await asyncio.sleep(0)
        if is_sending:
            client.can_write = False
            client.may_send.clear()
            await source.add(1)
        client.has_left.set()
        await asyncio.wait_for(task, 5)
        assert source.is_closed
        assert [message["type"] for message in client.messages] == ["http.response.start"]
        await source.add(2)
        assert client.body == b""

    asyncio.run(run())


@pytest.mark.parametrize("error", [RuntimeError("broken"), OSError("gone")])
def test_push_stream_whose_send_fails_closes_source(error: Exception) -> None:
    """A client that is gone is no failure."""

    async def run() -> None:
        source, client = Numbers(), Client()
        client.can_write = False

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                raise error

        task = asyncio.ensure_future(PushStream(source, ping_s=60)({WRITE: client.write}, client.receive, send))
        await asyncio.sleep(0)
        await source.add(1)
        if isinstance(error, OSError):
            await asyncio.wait_for(task, 5)
        else:
            with pytest.raises(RuntimeError, match="broken"):
                await asyncio.wait_for(task, 5)
        assert source.is_closed

    asyncio.run(run())


def test_push_stream_idle_gets_pings() -> None:
    async def run() -> None:
        source, client = Numbers(), Client()
        task = client.start(source, ping_s=0.01)
        while client.body.count(b": ping\n\n") < 2:
            await asyncio.sleep(0.005)
        await source.add(1, None)
        await task
        assert client.body.replace(b": ping\n\n", b"") == b"data: 1\n\n"

    asyncio.run(run())
