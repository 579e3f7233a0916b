"""The engine in a thread of its own: the one place where threads meet.

An event loop submits requests and awaits what comes of them; the thread takes in what was submitted and given up,
steps, and hands the outputs of a whole step over at once. While there is nothing to do it sleeps. A reader that does
not read never holds a step up: past a bounded number of outputs its request is ended.

    async with AsyncEngine(engine) as serving:
        ticket = serving.submit(request)
        async for output in ticket: ...
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import InferenceError, RequestCancelledError, WorkerError
from .engine import Engine
from .request import Request, StepOutput, copy_error

MAX_BUFFERED_OUTPUTS = 4096  # outputs of one request


class RequestStream:
    """What comes of one request, for one reader in the event loop that submitted it. `async with` cancels what
    has not ended by itself."""

    def __init__(self, serving: AsyncEngine, request: Request, max_buffered_outputs: int) -> None:
        self.request = request
        self._serving = serving
        self._max_buffered_outputs = max_buffered_outputs
        self._unread: deque[StepOutput] = deque()
        self._news = asyncio.Event()
        self._has_ended = False

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.abort()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StepOutput:
        """The next token; an error that ended the request is raised once all before it is read."""
        while not self._unread:
            if self._has_ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        output = self._unread.popleft()
        if output.error is not None:
            raise output.error
        return output

    async def next_outputs(self) -> list[StepOutput]:
        """All that is there, at least one; nothing once it has ended. An error is raised when all before it is read."""
        while not self._unread:
            if self._has_ended:
                return []
            self._news.clear()
            await self._news.wait()
        if self._unread[0].error is not None:
            raise self._unread.popleft().error  # type: ignore[misc]
        found: list[StepOutput] = []
        while self._unread and self._unread[0].error is None:
            found.append(self._unread.popleft())
        return found

    def abort(self) -> None:
        """End the request within a step; its reader gets an error."""
        self._finish_with(RequestCancelledError("the request was cancelled"))

    def put(self, output: StepOutput) -> None:
        """In the event loop: something came of it."""
        if self._has_ended:
            return
        self._unread.append(output)
        self._has_ended = output.finish_reason is not None
        if len(self._unread) > self._max_buffered_outputs and not self._has_ended:
            self._unread.clear()
            message = f"the output was not read: {self._max_buffered_outputs} tokens were waiting"
            self._finish_with(RequestCancelledError(message))
        self._news.set()

    def _finish_with(self, error: WorkerError) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._unread.append(StepOutput(self.request, -1, None, "error", error))
            self._news.set()
            self._serving.abort(self.request)


class Reader(NamedTuple):
    """Who waits for a request, and where."""

    ticket: RequestStream
    loop: asyncio.AbstractEventLoop


class AsyncEngine:
    """Serves an engine to event loops."""

    def __init__(self, engine: Engine, max_buffered_outputs: int = MAX_BUFFERED_OUTPUTS) -> None:
        self.engine = engine
        self.last_step_at = time.monotonic()  # when a step last ended, or there was nothing to do
        self._max_buffered_outputs = max_buffered_outputs
        self._inbox: deque[tuple[Request, Reader | None]] = deque()  # submitted with a reader, given up without
        self._readers: dict[Request, Reader] = {}  # the thread's own
        self._wake = threading.Event()
        self._is_stopping = False
        self._stopping = threading.Lock()  # nothing is submitted behind the last look into the inbox
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)

    async def __aenter__(self) -> AsyncEngine:
        self.start()
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.stop()

    @property
    def is_alive(self) -> bool:
        """Whether anybody steps."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    async def stop(self, error: WorkerError | None = None) -> None:
        """End the thread after its present step; requests that are not answered end with an error, or with this one."""
        with self._stopping:
            self._is_stopping = True
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._drain_inbox()
        self._end_all(error or RequestCancelledError("the engine was stopped"))

    def submit(self, request: Request) -> RequestStream:
        """Queue a request from an event loop; `resolve_max_tokens` has checked that it fits."""
        assert self.engine.has_room_for(request), "the request is longer than the context or the KV cache"
        ticket = RequestStream(self, request, self._max_buffered_outputs)
        with self._stopping:
            if self._is_stopping:
                raise RequestCancelledError("the engine was stopped")
            self._inbox.append((request, Reader(ticket, asyncio.get_running_loop())))
        self._wake.set()
        return ticket

    def abort(self, request: Request) -> None:
        """From any thread: nobody wants the rest of it."""
        self._inbox.append((request, None))
        self._wake.set()

    def _serve(self) -> None:
        """What should never happen ends everybody's request, and the engine begins anew with clean books."""
        while not self._is_stopping:
            try:
                self._drain_inbox()
                if self.engine.has_work:
                    self._dispatch_outputs(self.engine.step())
                else:
                    self._rest()
            except Exception as error:
                failure = InferenceError(f"the engine failed ({type(error).__name__})")
                failure.__cause__ = error
                try:
                    self.engine.reset()
                finally:  # if even that fails there is no engine any more: `is_alive` says so
                    self._end_all(failure)
            self.last_step_at = time.monotonic()

    def _rest(self) -> None:
        """Until something comes; in debug runs the books of an idle engine are looked at first."""
        if self.engine.config.debug:
            self.engine.scheduler.check()
        self._wake.wait()
        self._wake.clear()

    def _drain_inbox(self) -> None:
        """What was submitted and given up since the last step, in that order."""
        while self._inbox:
            request, reader = self._inbox.popleft()
            if reader is not None:
                self._begin(request, reader)
            elif self._readers.pop(request, None) is not None:
                self.engine.abort(request)

    def _begin(self, request: Request, reader: Reader) -> None:
        """One that the engine does not take ends at once; the others know nothing of it."""
        self._readers[request] = reader  # who waits is known, whatever happens
        try:
            self.engine.add(request)
        except WorkerError as error:
            self._dispatch_outputs([_ended(request, error)])

    def _end_all(self, error: WorkerError) -> None:
        for request in self._readers:
            self.engine.abort(request)
        self._dispatch_outputs([_ended(request, copy_error(error)) for request in self._readers])

    def _dispatch_outputs(self, outputs: Sequence[StepOutput]) -> None:
        """One call for each event loop and step."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, StepOutput]]] = {}
        for output in outputs:
            ticket, loop = self._readers[output.request]
            by_loop.setdefault(loop, []).append((ticket, output))
            if output.finish_reason is not None:
                del self._readers[output.request]
        for loop, news in by_loop.items():
            if not _post(loop, news):  # that loop is closed: nobody reads any more
                for ticket, _ in news:
                    self.abort(ticket.request)


def _post(loop: asyncio.AbstractEventLoop, news: list[tuple[RequestStream, StepOutput]]) -> bool:
    """Whether the loop is still there."""
    try:
        loop.call_soon_threadsafe(_put_all, news)
    except RuntimeError:
        return False
    return True


def _put_all(news: list[tuple[RequestStream, StepOutput]]) -> None:
    for ticket, output in news:
        ticket.put(output)


def _ended(request: Request, error: WorkerError) -> StepOutput:
    return StepOutput(request, -1, None, "error", error)
