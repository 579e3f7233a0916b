"""A small HTTP/1.1 client on asyncio streams, for load: keep-alive, chunked and sized bodies, TLS.

It does not follow redirects, use proxies or unpack compressed bodies. Bytes are handed on as the socket gives them, so
that whoever reads can note when each part came. What fails says which kind of failure it is.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from .. import __version__
from ..errors import InvalidRequestError

READ_AT_ONCE = 1 << 16
LONGEST_LINE = 1 << 16  # of a response's head
CHUNK_HEAD = re.compile(rb"[ \t]*([0-9a-fA-F]{1,15})[ \t]*(?:;[^\n]*)?\r?\n")
MOST_HEADERS = 200
TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # what a header may be named
OURS = {"host", "content-length", "transfer-encoding", "connection", "content-type", "accept"}


class RequestFailedError(Exception):
    """A request without a whole answer: the kind of failure, for counting, and what happened."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def checked_header(text: str) -> tuple[str, str]:
    """`Name: value`; what would break the request is refused."""
    name, colon, value = text.partition(":")
    if not colon or not TOKEN.fullmatch(name) or not value.isprintable() or not value.isascii():
        raise InvalidRequestError(f"{name!r} is not a header: write it as 'Name: value', in plain letters", "header")
    if name.lower() in OURS:
        raise InvalidRequestError(f"the header {name!r} is set by the client itself", "header")
    return name, value.strip()


@dataclass(slots=True)
class Response:
    """The head of an answer; `parts` reads its body."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    reader: asyncio.StreamReader
    whole: bool = False  # the body has been read to its end

    async def parts(self) -> AsyncIterator[bytes]:
        """The body, piece by piece as it comes."""
        if self.status in (204, 304):
            pass
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            chunks = Chunks()
            while not chunks.are_over:
                part = await self.reader.read(READ_AT_ONCE)
                if not part:
                    raise RequestFailedError("truncated", "the server closed the connection inside the body")
                if data := chunks.feed(part):
                    yield data
        elif "content-length" in self.headers:
            async for part in self._exactly(_number(self.headers["content-length"], "content-length")):
                yield part
        else:
            while part := await self.reader.read(READ_AT_ONCE):
                yield part
        self.whole = True

    async def text(self, most: int) -> str:
        """The body's first bytes as text."""
        held = bytearray()
        async for part in self.parts():
            held += part
            if len(held) > most:
                break
        return held[:most].decode(errors="replace")

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection can carry another request."""
        bounded = "content-length" in self.headers or "transfer-encoding" in self.headers
        return self.whole and bounded and "close" not in self.headers.get("connection", "").lower()

    async def _exactly(self, size: int) -> AsyncIterator[bytes]:
        while size:
            part = await self.reader.read(min(size, READ_AT_ONCE))
            if not part:
                raise RequestFailedError("truncated", "the server closed the connection inside the body")
            size -= len(part)
            yield part


@dataclass(slots=True)
class Chunks:
    """A chunked body: bytes as they come -> what they hold, of all chunks that came together in one piece."""

    are_over: bool = False
    _rest: bytes = b""  # a line that is not complete
    _left: int = 0  # bytes of the present chunk that are to come
    _is_after: bool = False  # a chunk, whose line must end here
    _is_in_trailers: bool = False

    def feed(self, part: bytes) -> bytes:
        """The data that came with this part."""
        raw, at, held = self._rest + part if self._rest else part, 0, []
        while at < len(raw) and not self.are_over:
            if self._left:
                data = raw[at : at + self._left]
                held.append(data)
                at += len(data)
                self._left -= len(data)
                self._is_after = not self._left
                continue
            end = raw.find(b"\n", at)
            if end < 0:
                break
            self._line(raw, at, end)
            at = end + 1
        self._rest = raw[at:]
        if len(self._rest) > LONGEST_LINE or (self.are_over and self._rest):
            raise RequestFailedError("protocol", "the body goes on where it should end")
        return b"".join(held)

    def _line(self, raw: bytes, at: int, end: int) -> None:
        """What stands between chunks: the end of one, the size of the next, trailers behind the last."""
        if self._is_after or self._is_in_trailers:
            is_blank = raw[at:end] in (b"", b"\r")
            if self._is_after and not is_blank:
                raise RequestFailedError("protocol", "a chunk of the body is longer than it said")
            self._is_after, self.are_over = False, is_blank and self._is_in_trailers
            return
        found = CHUNK_HEAD.match(raw, at)
        if found is None:
            raise RequestFailedError("protocol", f"the answer's chunk size is {raw[at : min(end, at + 40)]!r}")
        self._left = int(found[1], 16)
        self._is_in_trailers = not self._left


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class Client:
    """Requests to one server; connections are kept and used again."""

    address: Address
    headers: Mapping[str, str] = field(default_factory=dict)
    opened: int = 0
    _idle: list[Connection] = field(default_factory=list)
    _tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        if self.address.scheme == "https":
            self._tls = ssl.create_default_context()

    @asynccontextmanager
    async def request(self, method: str, path: str, body: bytes | None = None) -> AsyncIterator[Response]:
        """Send, and give the head of the answer; afterwards the connection is kept, or closed if it cannot be."""
        connection, response = await self._begin(self._message(method, path, body))
        try:
            yield response
        except OSError as error:
            raise RequestFailedError("truncated", f"the connection broke: {_reason(error)}") from None
        finally:
            if response.keeps_alive:
                self._idle.append(connection)
            else:
                connection[1].close()

    def close(self) -> None:
        """Close what is kept."""
        while self._idle:
            self._idle.pop()[1].close()

    async def _begin(self, message: bytes) -> tuple[Connection, Response]:
        """Over a kept connection if there is one; that the server has closed such a one meanwhile is no failure."""
        while self._idle:
            connection = self._idle.pop()
            try:
                if not connection[0].at_eof():
                    return connection, await self._exchange(connection, message)
            except RequestFailedError as error:
                if error.kind != "connect":
                    raise
            connection[1].close()
        connection = await self._open()
        return connection, await self._exchange(connection, message)

    async def _open(self) -> Connection:
        try:
            made = await asyncio.open_connection(
                self.address.host, self.address.port, ssl=self._tls, limit=LONGEST_LINE
            )
        except OSError as error:  # refused, unknown name, bad certificate
            raise RequestFailedError(
                "connect", f"cannot connect to {self.address.authority}: {_reason(error)}"
            ) from None
        self.opened += 1
        return made

    async def _exchange(self, connection: Connection, message: bytes) -> Response:
        reader, writer = connection
        try:
            writer.write(message)
            await writer.drain()
            return await _head(reader)
        except OSError as error:
            writer.close()
            raise RequestFailedError("connect", f"the connection broke before an answer: {_reason(error)}") from None
        except BaseException:
            writer.close()
            raise

    def _message(self, method: str, path: str, body: bytes | None) -> bytes:
        headers = {
            "Host": self.address.authority,
            "User-Agent": f"llm-worker-rbee/{__version__}",
            "Accept": "text/event-stream, application/json",
            "Connection": "keep-alive",
            **self.headers,
        }
        if body is not None:
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        lines = [f"{method} {self.address.base}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
        return "\r\n".join(lines).encode("ascii") + (body or b"")


async def _head(reader: asyncio.StreamReader) -> Response:
    """Status and headers; interim answers (100 Continue) are passed over."""
    status = 100
    while status < 200:
        first = (await _line(reader, at_start=True)).split(" ", 2)
        if not first[0].startswith("HTTP/1.") or len(first) < 2:
            raise RequestFailedError("protocol", "the answer is not HTTP/1.1")
        status = _number(first[1], "status")
        headers: dict[str, str] = {} if first[0] != "HTTP/1.0" else {"connection": "close"}
        for _ in range(MOST_HEADERS):
            if not (line := await _line(reader)):
                break
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        else:
            raise RequestFailedError("protocol", f"the answer has more than {MOST_HEADERS} headers")
    return Response(status, headers, reader)


async def _line(reader: asyncio.StreamReader, *, at_start: bool = False) -> str:
    try:
        return (await reader.readuntil(b"\n")).rstrip(b"\r\n").decode("latin-1")
    except asyncio.LimitOverrunError:
        raise RequestFailedError("protocol", "a line of the answer's head is too long") from None
    except asyncio.IncompleteReadError as error:
        if at_start and not error.partial:
            raise RequestFailedError("connect", "the server closed the connection without an answer") from None
        raise RequestFailedError("truncated", "the server closed the connection inside the answer") from None


def _number(text: str, what: str) -> int:
    digits = text.strip()
    if not re.fullmatch(r"[0-9]{1,15}", digits):
        raise RequestFailedError("protocol", f"the answer's {what} is {digits[:40]!r}")
    return int(digits)


def _reason(error: OSError) -> str:
    """What went wrong; asyncio hides it behind `Connect call failed`, or several of them where a name has addresses."""
    found = re.search(r"\[Errno (\d+)\] Connect call failed", str(error))
    return os.strerror(int(found[1])) if found else error.strerror or str(error) or type(error).__name__


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: `http://host:port/base`."""

    scheme: str
    host: str
    port: int
    base: str  # the path before each request's own, without a slash at its end

    @staticmethod
    def parse(url: str) -> Address:
        """Take a URL apart; one without a scheme is http."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise InvalidRequestError(f"{url!r} is not a URL: {error}", "url") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequestError(f"{url!r} is not the URL of a server: give http://host:port", "url")
        if parts.username is not None or parts.query or parts.fragment:
            raise InvalidRequestError(
                "the URL must hold a host, a port and a path only: a key goes into --api-key", "url"
            )
        if not url.isascii() or re.search(r"[\s\x00-\x1f\x7f]", url):
            raise InvalidRequestError(f"{url!r} holds characters that no URL has", "url")
        return Address(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """Host and port, as the Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.base}"


LONGEST_EVENT = 4 << 20
LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(slots=True)
class EventParser:
    """One stream; what is not complete yet waits for its rest.

    Most servers end their lines with LF alone: until a CR is seen, whole events are cut out at once.
    """

    _rest: bytes = b""
    _data: list[str] = field(default_factory=list)
    _has_cr: bool = False
    _after_cr: bool = False
    _size: int = 0

    def feed(self, part: bytes) -> Iterator[str]:
        """The events that are complete with this part."""
        self._has_cr = self._has_cr or b"\r" in part
        if self._has_cr:
            yield from self._feed_lines(part)
        else:
            *events, self._rest = (self._rest + part).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: ") and b"\n" not in event:
                    yield event[6:].decode(errors="replace")
                else:
                    yield from self._take([*event.split(b"\n"), b""])
        if self._size + len(self._rest) > LONGEST_EVENT:
            raise RequestFailedError("protocol", f"an event is longer than {LONGEST_EVENT >> 20} MiB")

    def finish(self) -> Iterator[str]:
        """What the end of the stream completes: some servers leave out the last blank line."""
        return self.feed(b"\n\n")

    def _feed_lines(self, part: bytes) -> Iterator[str]:
        if self._after_cr and part.startswith(b"\n"):  # the other half of a CRLF
            part = part[1:]
        self._after_cr = part.endswith(b"\r")
        *lines, self._rest = LINE_END.split(self._rest + part)
        yield from self._take(lines)

    def _take(self, lines: list[bytes]) -> Iterator[str]:
        """Lines of events; an empty one ends an event."""
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" ").decode(errors="replace"))
                self._size += len(value)
            elif not line and self._data:
                yield "\n".join(self._data)
                self._data, self._size = [], 0
