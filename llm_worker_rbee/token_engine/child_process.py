"""One engine process as the front sees it: started with a socket, fed with messages, and gone at some time."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable
from typing import cast

from ..pipe_process import describe_exit
from . import spawn
from .protocol import Load
from .wire import FrameReader, FromEngine, ProtocolError, ToEngine, encode

STOP_TIMEOUT_S = 2.0  # for a process to end by itself once its socket is closed


class ChildProcess(asyncio.Protocol):
    """A child process and its socket. `start` may be called before there is an event loop; then `attach`."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.process = process
        self._socket = sock
        self._reader: FrameReader[FromEngine] = FrameReader(FromEngine)
        self._transport: asyncio.Transport | None = None
        self._on_message: Callable[[FromEngine], None] = _ignore
        self._on_end: Callable[[str], None] = _ignore
        self._reaping: asyncio.Task[None] | None = None
        self._problem = ""  # what was wrong with its messages
        self._is_attached = False  # the event loop has the socket, perhaps before there is a transport

    @classmethod
    def start(cls, load: Load) -> ChildProcess:
        """Start a process that loads a model."""
        spawned = spawn.take()
        try:
            spawned.socket.sendall(encode(load))  # far less than a socket buffers
        except BaseException:
            spawned.kill()
            raise
        return cls(spawned.process, spawned.socket)

    async def attach(self, on_message: Callable[[FromEngine], None], on_end: Callable[[str], None]) -> None:
        """Pass its messages on; `on_end` is called once, with the way in which it ended."""
        self._on_message, self._on_end, self._is_attached = on_message, on_end, True
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=self._socket)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._on_message(message)
        except ProtocolError as error:
            self._problem = f" after an invalid message ({error})"
            self.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._reaping = asyncio.ensure_future(self._reap())

    async def _reap(self) -> None:
        """Wait for the end of the process, which has closed its socket."""
        try:
            status = await asyncio.to_thread(self.process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = await asyncio.to_thread(self.process.wait)
        self._on_end(describe_exit(status) + self._problem)

    def send(self, message: ToEngine) -> None:
        """Send a message; to a process that has ended it is lost."""
        if self._transport is not None:
            self._transport.write(encode(message))

    def kill(self) -> None:
        self.process.kill()

    async def stop(self) -> None:
        """End the process: close its socket, and kill it if that is not enough."""
        self._on_message = self._on_end = _ignore
        if self._transport is not None:
            self._transport.abort()
        elif self._is_attached:
            self.process.kill()  # libuv aborts if a socket is closed that it is about to poll
        else:
            self._socket.close()
        try:
            await asyncio.to_thread(self.process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)


def _ignore(_: object) -> None: ...
