"""An event stream as a response: its source is closed and its end is sent once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from llm_worker_rbee.server.sse import DONE, EventStream, encode_event
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
