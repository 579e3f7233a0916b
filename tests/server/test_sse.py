"""A stream as a response: whatever happens on the way out, its source is closed and its end is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from llm_worker_rbee.server.sse import DONE, EventStream, encode_event


async def events() -> AsyncGenerator[bytes, None]:
    yield encode_event({"a": "\u2028\n"})
    yield DONE


async def never() -> Any:
    return await asyncio.Event().wait()


@pytest.mark.parametrize("fails_at", ["http.response.start", "http.response.body", None])
def test_the_end_is_told_once(fails_at: str | None) -> None:
    """Also where not even the first line could be sent, so that the source never began."""
    ends: list[int] = []
    sent: list[Any] = []

    async def send(message: Any) -> None:
        if message["type"] == fails_at:
            raise RuntimeError("broken")
        sent.append(message)

    async def run() -> None:
        await EventStream(events(), ping_s=9, on_end=lambda: ends.append(1))({}, never, send)

    if fails_at is None:
        asyncio.run(run())
        body = b"".join(one.get("body", b"") for one in sent)
        assert body == b'data: {"a":"\xe2\x80\xa8\\n"}\n\ndata: [DONE]\n\n'
        assert not sent[-1]["more_body"]
    else:
        with pytest.raises(RuntimeError, match="broken"):
            asyncio.run(run())
    assert ends == [1]
