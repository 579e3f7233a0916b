"""One serving process: binds the port, loads the model, serves until a signal. Limits of the HTTP protocol are here.

The first SIGTERM or SIGINT drains: new requests are refused, running ones finish, exit status 0. The second exits at
once with 128 + its number; one that comes after the end changes nothing. The listening socket stays open while
draining, so that new clients get the reason.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any
from uuid import uuid4

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .. import machine
from ..errors import HeadersTooLargeError, InvalidRequestError, WorkerError
from . import log
from .app import BODY_TIMEOUT_S, application
from .middleware import HEADERS_TOO_LONG, MAX_HEADER_BYTES, error_response
from .orchestrator import announce
from .sse import ON_DISCONNECT, PING, WRITE
from .worker import Front

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BACKLOG = 2048
MAX_OPEN_FILES = 1 << 16  # each connection is one; systems often allow 1,024 unless a process asks for more
LAST_BYTES_S = 5  # for clients to read what is left after the last request has ended
HEAD_TIMEOUT_S = 30.0  # from the connection, or the first byte of a request, to the end of its headers
KEEP_ALIVE_S = 75  # an idle connection stays open, as long as nginx and most clients keep theirs
FIRST_PROBE_S, MAX_PROBE_S = 0.02, 2.0
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PING_CHUNK = b"%x\r\n%b\r\n" % (len(PING), PING)
UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)
LINGER_S, LINGER_BYTES = 2.0, 8 << 20  # for a client that still sends to receive its refusal
logger = logging.getLogger("llm_worker_rbee.server")


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise a one-line error if the address cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InvalidRequestError(f"cannot listen at --host {host} --port {port}: {why}", "port") from None
    return sock


def base_url(host: str, port: int, scheme: str = "http") -> str:
    """Return the URL of a worker; with this machine's name if it listens on all addresses."""
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostname()
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def serve(
    worker: Front, sock: socket.socket, url: str, on_ready: Callable[[], None], signals: Signals, **tls: Any
) -> None:
    """Serve until a signal; raise the error of a model that could not be loaded."""
    machine.return_large_blocks()
    machine.raise_open_files(MAX_OPEN_FILES)
    config = uvicorn.Config(
        application(worker),
        loop="auto",  # uvloop if it is installed
        http=connection_class(worker),
        ws="none",
        interface="asgi3",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=LAST_BYTES_S,
        **tls,
    )
    try:
        Server(config, worker, url, on_ready, signals).run(sockets=[sock])
    finally:
        signals.ignore()
    if worker.failure is not None:
        raise worker.failure


class Signals:
    """Handlers of SIGINT, SIGTERM and SIGUSR2 from now to the end of the process; Python's own never run in between."""

    def __init__(self) -> None:
        self.has_come = False
        self._drain: Callable[[], object] | None = None
        self._restart: Callable[[], object] = lambda: None
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGUSR2, lambda *_: self._restart())

    def on_restart(self, restart: Callable[[], object]) -> None:
        """Call `restart` at each SIGUSR2; one that comes before is ignored."""
        self._restart = restart

    def on_first_signal(self, drain: Callable[[], object]) -> None:
        """Call `drain` at the first signal; at once, if it has come already."""
        self._drain = drain
        if self.has_come:
            drain()

    def ignore(self) -> None:
        """Ignore signals from now on: Python's handlers end before the process does."""
        for number in (*SIGNALS, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.has_come:
            exit_now(128 + number)
        self.has_come = True
        if self._drain is not None:
            self._drain()


class Connection(HttpToolsProtocol):
    """A connection with limits: headers have a maximum length and time, bodies a maximum time, replies must be read.

    The parser itself would buffer any number of bytes. It would also take a request that offers another protocol
    (`Upgrade: h2c`, as curl and Java do) for the end of HTTP, and its body for the next request, and the trailer fields
    of a body in chunks for headers.
    """

    stall_s = 30.0  # a client must read something of a waiting reply within this time
    _num_head_bytes = 0  # since the last bytes of a body: of headers, trailers and the lines between chunks
    _is_in_head = True
    _num_dropped = -1  # bytes that came after a refusal; -1: not refused
    _probe: asyncio.TimerHandle | None = None
    _read_limit_s: float | None = HEAD_TIMEOUT_S
    _has_new_limit = False
    _read_timeout: asyncio.TimerHandle | None = None
    _write_timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._disconnect_callbacks: list[Callable[[], object]] = []
        self.timeout_keep_alive = KEEP_ALIVE_S
        self._start_read_timeout(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        for callback in self._disconnect_callbacks:
            self.loop.call_soon(callback)
        self._cancel_read_timeout()
        if self._probe is not None:
            self._probe.cancel()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timeout = self.loop.call_later(self.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timeout is not None:
            self._write_timeout.cancel()
            self._write_timeout = None

    def data_received(self, data: bytes) -> None:
        if self._num_dropped >= 0:
            self._num_dropped += len(data)
            if self._num_dropped > LINGER_BYTES:
                self.transport.abort()
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEADER_BYTES + len(data):  # too long already without these bytes
            self._refuse(HeadersTooLargeError(HEADERS_TOO_LONG))
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(_hide_upgrade(data) if self._is_in_head else data)
        except httptools.HttpParserUpgrade:
            self._unsupported_upgrade_warning()
        except httptools.HttpParserError as error:
            reason = "its target is no path" if isinstance(error, httptools.HttpParserCallbackError) else error
            self._refuse(InvalidRequestError(f"the request is not valid HTTP: {reason}", "request"))
            return
        if self._read_limit_s is None:
            self._cancel_read_timeout()
        elif self._has_new_limit:
            self._start_read_timeout(self._read_limit_s)
        self._has_new_limit = False

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the reply is still sent to a client that ended its side after a whole request.

        One that closed the connection entirely looks the same until bytes are sent to it: see `_probe_client`. HTTP/1.0
        has no bytes that may precede a reply, so there it is noticed with the reply only. TLS has no such state.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:  # no request to answer, or not a whole one
            return False
        if self.scheme == "https":
            return False
        cycle.keep_alive = False
        if cycle.scope["http_version"] != "1.0":
            self._probe_client(FIRST_PROBE_S)
        return True

    def _probe_client(self, seconds: float) -> None:
        """Send `100 Continue` or a ping, at growing intervals: a failed write ends the connection and its request."""
        if not self.pipeline:  # else an earlier reply is being sent
            if not self.cycle.response_started:
                self.transport.write(CONTINUE)
            elif self.cycle.chunked_encoding and not self.cycle.response_complete:
                self.transport.write(PING_CHUNK)
        self._probe = self.loop.call_later(seconds, self._probe_client, min(4 * seconds, MAX_PROBE_S))

    def _unsupported_upgrade_warning(self) -> None:
        """Close after the reply: the client offered an upgrade, and the bytes after it are not HTTP."""
        if self.cycle is not None:
            self.cycle.keep_alive = False
        self._num_dropped = 0

    def _limit_read(self, seconds: float | None) -> None:
        """Set the time limit of the remaining data; its timer starts after the current data are parsed, if at all."""
        self._read_limit_s, self._has_new_limit = seconds, True

    def _start_read_timeout(self, seconds: float) -> None:
        self._cancel_read_timeout()
        self._read_timeout = self.loop.call_later(seconds, self.transport.close)

    def _cancel_read_timeout(self) -> None:
        if self._read_timeout is not None:
            self._read_timeout.cancel()
            self._read_timeout = None

    def _refuse(self, error: WorkerError) -> None:
        """Send the error, and close later: a client that is still sending would lose the reply."""
        self._num_dropped, cycle = 0, self.cycle
        self._cancel_read_timeout()
        figures: dict[str, Any] = {"status": error.status, "correlation_id": str(uuid4())}
        logger.warning("refused what a client sent: %s", error, extra={"figures": figures})
        if cycle is not None and not cycle.response_complete:
            if self.pipeline or cycle.response_started or not cycle.more_body:  # the connection ends with its reply
                cycle.keep_alive = False
                return
            cycle.disconnected = True
            cycle.message_event.set()
        status, headers, body = error_response((self.scope or {}).get("path", ""), error)
        headers |= {"x-correlation-id": figures["correlation_id"], "connection": "close"}
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"content-length: {len(body)}"]
        lines += [*(f"{name}: {value}" for name, value in headers.items()), "", ""]
        self.transport.write("\r\n".join(lines).encode() + body)
        self.loop.call_later(LINGER_S, self.transport.close)

    def on_message_begin(self) -> None:
        self._num_head_bytes, self._is_in_head = 0, True
        self._limit_read(HEAD_TIMEOUT_S)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # else it is a trailer field
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._num_head_bytes, self._is_in_head = 0, False
        self._limit_read(BODY_TIMEOUT_S + LINGER_S)  # the route replies with an error before
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = send_without_chunks(self.cycle)  # type: ignore[assignment]
        self.scope[WRITE] = partial(write_chunk, self.cycle)  # type: ignore[literal-required]
        self.scope[ON_DISCONNECT] = self.on_disconnect  # type: ignore[literal-required]

    def on_disconnect(self, callback: Callable[[], object]) -> Callable[[], object]:
        """Call a function when the connection is lost; return one that removes it."""
        self._disconnect_callbacks.append(callback)
        self.flow.resume_reading()  # paused after a large body: the end of the connection would not be seen
        if self.transport.is_closing():
            self.loop.call_soon(callback)
        return partial(self._disconnect_callbacks.remove, callback)

    def on_message_complete(self) -> None:
        self._num_head_bytes, self._is_in_head = 0, True
        self._limit_read(None)
        super().on_message_complete()


def send_without_chunks(cycle: RequestResponseCycle) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """Return a `send` for HTTP/1.0, which has no chunks: a reply of unknown length ends with the connection."""
    send = cycle.send

    async def send_message(message: Any) -> None:
        if message["type"] == "http.response.start":
            if not any(name == b"content-length" for name, _ in message["headers"]):
                cycle.chunked_encoding = False
        elif cycle.expected_content_length == 0:
            cycle.expected_content_length = len(message.get("body", b""))  # of this part
        await send(message)

    return send_message


def write_chunk(cycle: RequestResponseCycle, data: bytes) -> bool:
    """Write a part of a body at once; return False where only `send` can: flow control, HTTP/1.0, no client."""
    if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True


def connection_class(worker: Front) -> type[Connection]:
    """Return the class of connections with the worker's stall timeout."""
    return type("Connection", (Connection,), {"stall_s": worker.settings.stall_timeout_s})


def _hide_upgrade(data: bytes) -> bytes:
    """Rename `Upgrade` in headers."""
    if UPGRADE.search(data) is None:
        return data
    head, blank, rest = data.partition(b"\r\n\r\n")
    return UPGRADE.sub(b"\r\nx-upgrade:", head) + blank + rest


class Server(uvicorn.Server):
    """Uvicorn's server with the worker's startup and drain."""

    def __init__(
        self, config: uvicorn.Config, worker: Front, url: str, on_ready: Callable[[], None], signals: Signals
    ) -> None:
        super().__init__(config)
        self._worker, self._url, self._on_ready, self._signals = worker, url, on_ready, signals
        self._watchers: list[asyncio.Task[None]] = []  # of the worker's state
        self._draining: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        port = (sockets or [])[0].getsockname()[1]
        watchers = self._announce_when_ready(port), self._exit_on_failure()
        self._watchers = [asyncio.ensure_future(watcher) for watcher in watchers]

    async def _exit_on_failure(self) -> None:
        """Exit once a model could not be loaded, even if only a pooling model."""
        while self._worker.failure is None:
            await self._worker.loading_changed.wait()
        self.should_exit = True

    async def _announce_when_ready(self, port: int) -> None:
        while self._worker.state == "loading":
            await self._worker.loading_changed.wait()
        if self._worker.state == "ready":
            with suppress(OSError):  # standard output is closed
                self._on_ready()
            await announce(self._worker, self._url, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await super().shutdown(sockets)
        self._signals.ignore()
        if not self._worker.was_ready and self._worker.failure is None:
            exit_now(0)  # the thread that loads the model cannot be stopped

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        self._signals.on_first_signal(lambda: loop.call_soon_threadsafe(self._start_drain))
        self._signals.on_restart(lambda: loop.call_soon_threadsafe(self._start_restart))
        yield

    def _start_restart(self) -> None:
        self._restarting = asyncio.ensure_future(self._worker.restart_engines())

    def _start_drain(self) -> None:
        logger.info("stopping: running requests have %g s", self._worker.settings.shutdown_timeout_s)
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        try:
            if self._worker.batches is not None:
                await self._worker.batches.stop()
            await self._worker.stop()
        finally:
            self.should_exit = True


def exit_now(status: int) -> None:
    """Flush the output and end the process."""
    log.flush()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed
            stream.flush()
    os._exit(status)
