"""One process that serves: the port first, then the model, then requests until a signal says to stop.

The first SIGTERM or SIGINT lets nobody in any more, waits for those who are in, and leaves with 0; the second leaves at
once with 128 and its number; one that comes when all is done changes nothing. The listening socket stays open
meanwhile, so that who comes is told why.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any
from uuid import uuid4

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..errors import HeadersTooLargeError, InvalidRequestError
from . import log
from .app import BODY_S, application
from .middleware import MAX_HEADERS, TOO_LONG, told
from .orchestrator import announce
from .worker import Worker

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BACKLOG = 2048
LAST_BYTES_S = 5  # for readers to take what is left after the last request has ended
HEAD_S = 30.0  # for a client to say what it wants, once it is connected or has begun to
OFFER = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)
LINGER_S, LINGER_BYTES = 2.0, 8 << 20  # for a client that is still sending to hear why it is refused
logger = logging.getLogger("llm_worker_rbee.server")


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens from now on; what is wrong with the place is said in one line."""
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


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """Where a worker is reached; one that listens everywhere, by this machine's name."""
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostname()
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def serve(
    worker: Worker, sock: socket.socket, url: str, on_ready: Callable[[], None], signals: Signals, **tls: Any
) -> None:
    """Serve until a signal; the error that the model could not be loaded for is raised."""
    config = uvicorn.Config(
        application(worker), loop="uvloop", http=connection_for(worker), ws="none", interface="asgi3", lifespan="on",
        log_config=None, access_log=False, server_header=False, proxy_headers=False, backlog=BACKLOG,
        timeout_graceful_shutdown=LAST_BYTES_S, **tls,
    )  # fmt: skip
    try:
        Server(config, worker, url, on_ready, signals).run(sockets=[sock])
    finally:
        signals.ignore()
    if worker.failure is not None:
        raise worker.failure


class Signals:
    """They are ours from here to the end of the process: nowhere between do they meet Python's own handlers.

    The first one begins the end, the second one is the end.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._begin: Callable[[], object] | None = None
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def then(self, begin: Callable[[], object]) -> None:
        """What the first one begins; at once, if it was here before."""
        self._begin = begin
        if self.has_come:
            begin()

    def ignore(self) -> None:
        """Nothing is left to be ended. A function of ours would be taken away before the process is gone."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.has_come:
            _leave(128 + number)
        self.has_come = True
        if self._begin is not None:
            self._begin()


class Connection(HttpToolsProtocol):
    """One that waits for nobody for ever: headers end in reasonable time and length, bodies come, replies are read.

    The parser itself would gather any number of bytes, and would take a request that offers another protocol
    (`Upgrade: h2c`, as curl and Java do) for the end of HTTP: what follows, its body, would be the next request.
    """

    stall_s = 30.0  # for a reader to take some of what waits for it
    _head = 0
    _is_in_head = True
    _num_dropped = -1  # bytes that came after the refusal; -1: it was not refused
    _patience: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody is there."""
        super().connection_made(transport)
        self._wait(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """He is gone."""
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """More waits to be read than is good."""
        super().pause_writing()
        self._stalled = self.loop.call_later(self.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        """He reads."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def data_received(self, data: bytes) -> None:
        """Some bytes of a client's."""
        if self._num_dropped >= 0:
            self._num_dropped += len(data)
            if self._num_dropped > LINGER_BYTES:
                self.transport.abort()
            return
        if self._is_in_head:
            self._head += len(data)
            if self._head > MAX_HEADERS + len(data):  # without these the head was too long already
                self._refuse()
                return
            data = _without_offers(data)
        super().data_received(data)

    def _unsupported_upgrade_warning(self) -> None:
        """An offer that was not found before: what comes after it is not HTTP any more."""
        if self.cycle is not None:
            self.cycle.keep_alive = False
        self._num_dropped = 0

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._patience = self.loop.call_later(seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _refuse(self) -> None:
        """Say why. Closing at once would take the reply from a client that is still sending."""
        if self.cycle is not None and not self.cycle.response_complete:  # it would end up within another reply
            self.transport.close()
            return
        status, headers, body = told("", HeadersTooLargeError(TOO_LONG))
        lines = [f"HTTP/1.1 {status} Request Header Fields Too Large", f"content-length: {len(body)}"]
        headers |= {"x-correlation-id": str(uuid4()), "connection": "close"}
        lines += [*(f"{name}: {value}" for name, value in headers.items()), "", ""]
        self._num_dropped = 0
        self.transport.write("\r\n".join(lines).encode() + body)
        self.loop.call_later(LINGER_S, self.transport.close)
        figures = {"status": status, "correlation_id": headers["x-correlation-id"]}
        logger.warning("headers of more than %d bytes were refused", MAX_HEADERS, extra={"figures": figures})

    def on_message_begin(self) -> None:
        """A head begins."""
        self._head, self._is_in_head = 0, True
        self._wait(HEAD_S)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A head has ended."""
        self._is_in_head = False
        self._wait(BODY_S + LINGER_S)  # the route says so first
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """So has the body."""
        self._head, self._is_in_head = 0, True
        self._stop_waiting()
        super().on_message_complete()


def connection_for(worker: Worker) -> type[Connection]:
    """Connections with that worker's patience."""
    return type("Connection", (Connection,), {"stall_s": worker.settings.stall_timeout_s})


def _without_offers(data: bytes) -> bytes:
    """Headers without the name of the one that offers another protocol."""
    if OFFER.search(data) is None:
        return data
    head, blank, rest = data.partition(b"\r\n\r\n")
    return OFFER.sub(b"\r\nx-upgrade:", head) + blank + rest


class Server(uvicorn.Server):
    """The HTTP server with our own way to begin and to end."""

    def __init__(
        self, config: uvicorn.Config, worker: Worker, url: str, on_ready: Callable[[], None], signals: Signals
    ) -> None:
        super().__init__(config)
        self._worker, self._url, self._on_ready, self._signals = worker, url, on_ready, signals
        self._life: asyncio.Task[None] | None = None
        self._end: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """The port answers; the model is being loaded."""
        await super().startup(sockets)
        port = (sockets or [])[0].getsockname()[1]
        self._life = asyncio.ensure_future(self._live(port))

    async def _live(self, port: int) -> None:
        while self._worker.state == "loading":
            await self._worker.news.wait()
        if self._worker.state == "failed":
            self.should_exit = True
        elif self._worker.state == "ready":
            with suppress(OSError):  # nobody reads what is printed
                self._on_ready()
            await announce(self._worker, self._url, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Nobody is in any more."""
        if self._life is not None:
            self._life.cancel()
        await super().shutdown(sockets)
        self._signals.ignore()
        if not self._worker.is_loaded and self._worker.failure is None:
            _leave(0)  # a thread is loading, and it cannot be told to stop

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are ours already; the first one is heard in the loop."""
        loop = asyncio.get_running_loop()
        self._signals.then(lambda: loop.call_soon_threadsafe(self._begin_to_end))
        yield

    def _begin_to_end(self) -> None:
        logger.info("stopping: running requests have %g s", self._worker.settings.shutdown_timeout_s)
        self._end = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        try:
            await self._worker.stop()
        finally:
            self.should_exit = True


def _leave(status: int) -> None:
    log.flush()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it
            stream.flush()
    os._exit(status)
