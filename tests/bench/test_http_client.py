"""The HTTP client against raw bytes of real sockets: bodies, chunks, events, failures by kind."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from llm_worker_bench.http_client import (
    MAX_EVENT_BYTES,
    Address,
    Client,
    EventParser,
    RequestFailedError,
    Response,
    api_address,
    parse_header,
)
from llm_worker_rbee.errors import InvalidRequestError

CERTIFICATE = Path(__file__).parent / "data" / "loopback.pem"  # with its key, for these tests only
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_event_parser_any_cut_gives_the_same_events(end: str, size: int) -> None:
    lines = [": comment", "event: x", "data: ä🧀", "data:two", "", "data", "", "", "id: 4", "", "data: [DONE]"]
    raw = end.join(lines).encode()
    parser, found = EventParser(), []
    for i in range(0, len(raw), size):
        found += parser.feed(raw[i : i + size])
    assert found == ["ä🧀\ntwo", ""]
    assert list(parser.finish()) == ["[DONE]"]


def test_event_parser_endless_event_fails() -> None:
    parser = EventParser()
    with pytest.raises(RequestFailedError, match="longer than"):
        list(parser.feed(b"data: " + b"x" * MAX_EVENT_BYTES))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080/v1"),
        ("localhost:8080/", "http://localhost:8080/v1"),
        ("https://host/api/v1/", "https://host:443/api/v1"),
        ("http://[::1]:80/v1", "http://[::1]:80/v1"),
    ],
)
def test_api_address_of_urls(url: str, shown: str) -> None:
    assert str(api_address(url)) == shown


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "http://x:99999", "http://u:p@x", "http://x?a", "http://x/a b", "http://ä"]
)
def test_address_parse_invalid_url_raises(url: str) -> None:
    with pytest.raises(InvalidRequestError):
        Address.parse(url)


@pytest.mark.parametrize("text", ["X", "X Y: z", "X: a\r\nY: b", "Host: x", "content-length: 3", ": x"])
def test_parse_header_invalid_raises(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_header(text)


async def answers_to(raw: bytes) -> bytes:
    """What the client makes of these bytes from a server."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        client = Client(Address("http", "127.0.0.1", server.sockets[0].getsockname()[1], ""))
        async with client.request("GET", "/") as response:
            return b"".join([part async for part in response.parts()])


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (CHUNKED + b"2;x=y\r\nab\r\n1\r\nc\r\n0\r\nTrailer: 1\r\n\r\n", b"abc"),
    ],
)
def test_client_reads_bodies(raw: bytes, body: bytes) -> None:
    assert asyncio.run(answers_to(raw)) == body


async def read(raw: bytes, size: int) -> tuple[bytes, bool]:
    """The body that comes in pieces of `size` bytes, and whether the connection can be used again."""
    reader = asyncio.StreamReader()
    response = Response(reader)

    async def feed() -> None:
        for i in range(0, len(raw), size):
            reader.feed_data(raw[i : i + size])
            await asyncio.sleep(0)
        reader.feed_eof()

    async with asyncio.TaskGroup() as group:
        group.create_task(feed())
        await response.read_head()
        body = b"".join([part async for part in response.parts()])
    return body, response.is_reusable


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_chunked_body_any_cut_gives_the_same(size: int) -> None:
    raw = b"5\r\na\r\nbc\r\n1a;x=y\r\n" + b"d" * 26 + b"\r\n1\r\ne\r\n0\r\nTrailer: 5\r\n\r\n"
    assert asyncio.run(read(CHUNKED + raw, size)) == (b"a\r\nbc" + b"d" * 26 + b"e", True)


@pytest.mark.parametrize(
    "raw", [b"0\r\n\r\nmore", b"-1\r\n", b"\r\n", b"1\r\nab\r\n", b"x" * 70_000, b"1" * 17 + b"\r\n"]
)
def test_invalid_chunks_fail(raw: bytes) -> None:
    with pytest.raises(RequestFailedError) as caught:
        asyncio.run(answers_to(CHUNKED + raw))
    assert caught.value.kind == "protocol"


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"", "connect"),
        (b"SSH-2.0-x\r\n", "protocol"),
        (b"HTTP/1.1 abc\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "truncated"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "truncated"),
        (CHUNKED + b"zz\r\n", "protocol"),
        (CHUNKED + b"1\r\nabc\r\n", "protocol"),
        (CHUNKED + b"5\r\nabc", "truncated"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, "protocol"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 300, "protocol"),
    ],
)
def test_client_broken_responses_fail_by_kind(raw: bytes, kind: str) -> None:
    with pytest.raises(RequestFailedError) as caught:
        asyncio.run(answers_to(raw))
    assert caught.value.kind == kind


def test_client_https_needs_a_trusted_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk() -> str:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE)

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")

        server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
        async with server:
            client = Client(Address("https", "127.0.0.1", server.sockets[0].getsockname()[1], ""))
            async with client.request("GET", "/") as response:
                text = await response.text(10)
            client.close()
            return text

    with pytest.raises(RequestFailedError, match="certificate"):
        asyncio.run(talk())
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    assert asyncio.run(talk()) == "hi"


@pytest.mark.parametrize(
    ("raw", "is_reusable"),
    [
        (b"Content-Length: 0\r\n\r\n", True),
        (b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", True),
        (b"Content-Length: 0\r\nConnection: Close\r\n\r\n", False),
        (b"\r\n", False),
    ],
)
def test_response_is_reusable_if_bounded_and_kept_alive(raw: bytes, is_reusable: bool) -> None:
    assert asyncio.run(read(b"HTTP/1.1 200 OK\r\n" + raw, 1000)) == (b"", is_reusable)


def test_response_is_not_reusable_before_its_end() -> None:
    async def read_part() -> bool:
        reader = asyncio.StreamReader()
        reader.feed_data(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")
        response = Response(reader)
        await response.read_head()
        return response.is_reusable

    assert not asyncio.run(read_part())
