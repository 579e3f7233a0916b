"""One process that serves: the port first, then the model, then requests until a signal says to stop.

The first SIGTERM or SIGINT lets nobody in any more, waits for those who are in, and leaves with 0; the second leaves at
once. The listening socket stays open meanwhile, so that who comes is told why.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..errors import InvalidRequestError
from .app import application
from .guard import MAX_HEADERS
from .lifecycle import announce
from .worker import Worker

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BACKLOG = 2048
LAST_BYTES_S = 5  # for readers to take what is left after the last request has ended
TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
log = logging.getLogger("llm_worker_rbee.server")


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


def serve(worker: Worker, sock: socket.socket, url: str, on_ready: Callable[[], None], **tls: Any) -> None:
    """Serve until a signal; the error that the model could not be loaded for is raised."""
    config = uvicorn.Config(
        application(worker), loop="uvloop", http=Connection, ws="none", interface="asgi3", lifespan="on",
        log_config=None, access_log=False, server_header=False, proxy_headers=False, backlog=BACKLOG,
        timeout_graceful_shutdown=LAST_BYTES_S, **tls,
    )  # fmt: skip
    Server(config, worker, url, on_ready).run(sockets=[sock])
    if worker.failure is not None:
        raise worker.failure


class Connection(HttpToolsProtocol):
    """One whose headers end in reasonable time; the parser itself would gather any number of bytes."""

    _head = 0
    _is_in_head = True

    def data_received(self, data: bytes) -> None:
        """Some bytes of a client's."""
        if self._is_in_head:
            self._head += len(data)
            if self._head > MAX_HEADERS + len(data):  # without these the head was too long already
                self.transport.write(TOO_LONG)
                self.transport.close()
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """A head begins."""
        self._head, self._is_in_head = 0, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A head has ended."""
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """So has the body."""
        self._head, self._is_in_head = 0, True
        super().on_message_complete()


class Server(uvicorn.Server):
    """The HTTP server with our own way to begin and to end."""

    def __init__(self, config: uvicorn.Config, worker: Worker, url: str, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._worker, self._url, self._on_ready = worker, url, on_ready
        self._life: asyncio.Task[None] | None = None
        self._end: asyncio.Task[None] | None = None
        self._is_ending = False

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
            self._on_ready()
            await announce(self._worker, self._url, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Nobody is in any more."""
        if self._life is not None:
            self._life.cancel()
        await super().shutdown(sockets)
        if not self._worker.is_loaded and self._worker.failure is None:
            _leave(0)  # a thread is loading, and it cannot be told to stop

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """While it serves, signals are ours."""
        loop = asyncio.get_running_loop()

        def on_signal(number: int, _: FrameType | None) -> None:
            if self._is_ending:
                _leave(128 + number)
            self._is_ending = True
            loop.call_soon_threadsafe(self._begin_to_end)

        before = {number: signal.signal(number, on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _begin_to_end(self) -> None:
        log.info("stopping: running requests have %g s", self._worker.settings.shutdown_timeout_s)
        self._end = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        try:
            await self._worker.stop()
        finally:
            self.should_exit = True


def _leave(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
