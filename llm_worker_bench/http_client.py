"""The HTTP client of all benchmarks: HTTP/1.1 by httptools, server-sent events, the OpenAI API, a blocking GET.

`Client` keeps connections alive, reads chunked and sized bodies and speaks TLS. It follows no redirects, uses no
proxies and decompresses nothing. Bytes are passed on as the socket gives them, so that the caller can time each part. A
failure has a kind, for counting. `Target` streams one answer of an OpenAI-compatible server: times are
`time.perf_counter` when the bytes of a delta were read, and no text is kept.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import ssl
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httptools
import msgspec

from llm_worker_rbee import __version__
from llm_worker_rbee.errors import InvalidRequestError

from .workload import Job

try:
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop  # type: ignore[assignment]

T = TypeVar("T")
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
READ_SIZE = 1 << 16
MAX_HEAD_BYTES = 1 << 16
MAX_EVENT_BYTES = 4 << 20
MAX_HEADERS = 200
HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # what a header may be named
MAX_ERROR_BYTES = 1 << 14
MAX_LIST_BYTES = 4 << 20
PATHS = {"chat": "/chat/completions", "completions": "/completions"}
RESERVED_HEADERS = {"host", "content-length", "transfer-encoding", "connection", "content-type", "accept"}


class RequestFailedError(Exception):
    """A request without a complete response; `kind` is what failures are counted by."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def parse_header(text: str) -> tuple[str, str]:
    """Split `Name: value`; raise if it would break the request."""
    name, colon, value = text.partition(":")
    if not colon or not HEADER_NAME.fullmatch(name) or not value.isprintable() or not value.isascii():
        raise InvalidRequestError(f"{name!r} is not a header: write it as 'Name: value', in ASCII", "header")
    if name.lower() in RESERVED_HEADERS:
        raise InvalidRequestError(f"the header {name!r} is set by the client itself", "header")
    return name, value.strip()


class Response:
    """Status and headers; `parts` reads the body. The methods `on_...` are callbacks of httptools."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self._is_complete = self._keeps_alive = False
        self._num_headers = 0
        self._body: list[bytes] = []  # received, not passed on
        self._reader, self._parser = reader, httptools.HttpResponseParser(self)

    async def read_head(self) -> None:
        """Read status and headers, skipping interim responses (100 Continue)."""
        num_bytes = 0
        while self.status < 200:
            if not (size := await self._receive()):
                where = ("truncated", "inside") if num_bytes else ("connect", "without")
                raise RequestFailedError(where[0], f"the server closed the connection {where[1]} the response")
            num_bytes += size
            if num_bytes > MAX_HEAD_BYTES and self.status < 200:
                raise RequestFailedError("protocol", "the head of the response is too long")

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes."""
        while self._body or not self._is_complete:
            if self._body:
                part = b"".join(self._body)
                self._body.clear()
                yield part
            elif not await self._receive():
                if not self.headers.keys().isdisjoint(("content-length", "transfer-encoding")):
                    raise RequestFailedError("truncated", "the server closed the connection inside the body")
                self._is_complete = True

    async def text(self, max_bytes: int) -> str:
        """Return the first `max_bytes` bytes of the body as text."""
        parts = bytearray()
        async for part in self.parts():
            parts += part
            if len(parts) > max_bytes:
                break
        return parts[:max_bytes].decode(errors="replace")

    @property
    def is_reusable(self) -> bool:
        """Whether the body was read, and the connection can carry another request."""
        return self._keeps_alive and not self._body

    async def _receive(self) -> int:
        """Parse the next bytes; return their number, 0 at the end of the connection."""
        data = await self._reader.read(READ_SIZE)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            reason = str(error.__context__ or error)
            raise RequestFailedError("protocol", f"the response is not HTTP/1.1: {reason}") from None
        return len(data)

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise ValueError("it continues after its end")
        self.headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            raise ValueError(f"it has more than {MAX_HEADERS} headers")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        self._is_complete = self.status >= 200
        self._keeps_alive = self._is_complete and self._parser.should_keep_alive()


@dataclass(slots=True)
class Client:
    """Send requests to one server over kept connections."""

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
        """Send a request and give its response; keep the connection afterwards if it can be reused."""
        connection, response = await self._send(self._message(method, path, body))
        try:
            yield response
        except OSError as error:
            raise RequestFailedError("truncated", f"the connection broke: {_reason(error)}") from None
        finally:
            if response.is_reusable:
                self._idle.append(connection)
            else:
                connection[1].close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()

    async def _send(self, message: bytes) -> tuple[Connection, Response]:
        """Use an idle connection if there is one: that the server closed it meanwhile is no failure."""
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
        address = self.address
        try:
            made = await asyncio.open_connection(address.host, address.port, ssl=self._tls)
        except OSError as error:  # refused, unknown host, bad certificate
            raise RequestFailedError("connect", f"cannot connect to {address.authority}: {_reason(error)}") from None
        self.opened += 1
        return made

    async def _exchange(self, connection: Connection, message: bytes) -> Response:
        reader, writer = connection
        try:
            writer.write(message)
            await writer.drain()
            response = Response(reader)
            await response.read_head()
            return response
        except BaseException as error:
            writer.close()
            if not isinstance(error, OSError):
                raise
            raise RequestFailedError("connect", f"the connection broke before a response: {_reason(error)}") from None

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


def _reason(error: OSError) -> str:
    """Return the reason; asyncio hides it behind `Connect call failed`, one for each address of a host."""
    found = re.search(r"\[Errno (\d+)\] Connect call failed", str(error))
    return os.strerror(int(found[1])) if found else error.strerror or str(error) or type(error).__name__


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: `http://host:port/base`."""

    scheme: str
    host: str
    port: int
    base: str  # prefix of every path, without a slash at its end

    @staticmethod
    def parse(url: str) -> Address:
        """Parse a URL; without a scheme it is http."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise InvalidRequestError(f"{url!r} is not a URL: {error}", "url") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequestError(f"{url!r} is not the URL of a server: use http://host:port", "url")
        if parts.username is not None or parts.query or parts.fragment:
            raise InvalidRequestError("the URL may have host, port and path only: give a key with --api-key", "url")
        if not url.isascii() or re.search(r"[\s\x00-\x1f\x7f]", url):
            raise InvalidRequestError(f"{url!r} has characters that are not allowed in a URL", "url")
        return Address(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.base}"


@dataclass(slots=True)
class EventParser:
    """Parse server-sent events: bytes in any cut -> the data of each event, its lines joined by newlines.

    Lines end with CR, LF or both; a blank line ends an event.
    """

    _buffer: bytes = b""  # an incomplete event
    _is_after_cr: bool = False

    def feed(self, part: bytes) -> Iterator[str]:
        """Yield the events that this part completes."""
        if self._is_after_cr and part.startswith(b"\n"):  # the other half of a CRLF
            part = part[1:]
        self._is_after_cr = part.endswith(b"\r")
        lines = part.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, self._buffer = (self._buffer + lines).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:  # nearly all of them
                yield event[6:].decode(errors="replace")
                continue
            fields = (line.partition(b":") for line in event.split(b"\n"))
            data = [value.removeprefix(b" ").decode(errors="replace") for name, _, value in fields if name == b"data"]
            if data:
                yield "\n".join(data)
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise RequestFailedError("protocol", f"an event is longer than {MAX_EVENT_BYTES >> 20} MiB")

    def finish(self) -> Iterator[str]:
        """Yield what the end of the stream completes: some servers omit the last blank line."""
        return self.feed(b"\n\n")


def run_event_loop(act: Coroutine[Any, Any, T]) -> T:
    """Run in the fastest event loop: on a small machine the server lacks the CPU time that the client takes."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(act)


class BlockingClient:
    """GET over one kept connection, blocking: for health checks and small JSON replies."""

    def __init__(self, authority: str, timeout_s: float = 10.0) -> None:
        self._connection = http.client.HTTPConnection(authority, timeout=timeout_s)

    def get(self, path: str) -> tuple[int, bytes] | None:
        """Return status and body; None if there is no response."""
        try:
            self._connection.request("GET", path)
            response = self._connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            self.close()
            return None

    def is_healthy(self) -> bool:
        response = self.get("/health")
        return response is not None and response[0] == 200

    def close(self) -> None:
        self._connection.close()


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
    data: list[str] | None = None  # a list: what all events hold is kept


@dataclass(frozen=True, slots=True)
class Target:
    """A server and the fields of its requests."""

    client: Client
    model: str
    endpoint: str = "chat"  # a key of PATHS
    temperature: float = 0.0
    ignore_eos: bool = False
    usage: bool = True  # request token counts at the end of the stream

    async def request(self, job: Job, answer: Answer) -> None:
        """Send one request and read its stream into `answer`, which others may read meanwhile."""
        body = json.dumps(self.body(job)).encode()
        async with self.client.request("POST", PATHS[self.endpoint], body) as response:
            if response.status != 200:
                message = _error_message(await response.text(MAX_ERROR_BYTES))
                raise RequestFailedError(f"http {response.status}", message)
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
            content: dict[str, Any] = {"prompt": prompt.text if prompt.ids is None else prompt.ids}
        else:
            content = {"messages": prompt.messages or [{"role": "user", "content": prompt.text}]}
        body = {"model": self.model, **content, "max_tokens": job.max_tokens, "temperature": self.temperature}
        body |= {"stream": True, **({"stream_options": {"include_usage": True}} if self.usage else {})}
        return body | ({"ignore_eos": True} if self.ignore_eos else {})


def add_event(answer: Answer, data: str, now: float) -> None:
    """Add one event to an answer."""
    answer.events += 1
    if answer.data is not None:
        answer.data.append(data)
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


async def list_models(client: Client, timeout_s: float) -> list[str]:
    """Return the names that GET /models lists, and close the client; raise TimeoutError if that takes longer."""
    with closing(client):
        async with asyncio.timeout(timeout_s), client.request("GET", "/models") as response:
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
