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
from .engine import Engine, require_fit
from .request import Output, Request, own_error

MOST_UNREAD = 4096  # outputs of one request


class Ticket:
    """What comes of one request, for one reader in the event loop that submitted it. `async with` cancels what
    has not ended by itself."""

    def __init__(self, serving: AsyncEngine, request: Request, most_unread: int) -> None:
        self.request = request
        self._serving = serving
        self._most_unread = most_unread
        self._unread: deque[Output] = deque()
        self._news = asyncio.Event()
        self._has_ended = False

    async def __aenter__(self) -> Ticket:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.cancel()

    def __aiter__(self) -> Ticket:
        return self

    async def __anext__(self) -> Output:
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

    async def several(self) -> list[Output]:
        """All that is there, at least one; nothing once it has ended. An error is raised when all before it is read."""
        while not self._unread:
            if self._has_ended:
                return []
            self._news.clear()
            await self._news.wait()
        if self._unread[0].error is not None:
            raise self._unread.popleft().error  # type: ignore[misc]
        found: list[Output] = []
        while self._unread and self._unread[0].error is None:
            found.append(self._unread.popleft())
        return found

    def cancel(self) -> None:
        """Give the request up: it ends within a step, and its reader hears of it."""
        self._end(RequestCancelledError("the request was cancelled"))

    def put(self, output: Output) -> None:
        """In the event loop: something came of it."""
        if self._has_ended:
            return
        self._unread.append(output)
        self._has_ended = output.finish_reason is not None
        if len(self._unread) > self._most_unread and not self._has_ended:
            self._unread.clear()
            self._end(RequestCancelledError(f"nobody read the answer: {self._most_unread} tokens were waiting"))
        self._news.set()

    def _end(self, error: WorkerError) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._unread.append(Output(self.request, -1, None, "error", error))
            self._news.set()
            self._serving.give_up(self.request)


class Reader(NamedTuple):
    """Who waits for a request, and where."""

    ticket: Ticket
    loop: asyncio.AbstractEventLoop


class AsyncEngine:
    """Serves an engine to event loops."""

    def __init__(self, engine: Engine, most_unread: int = MOST_UNREAD) -> None:
        self.engine = engine
        self.last_step_at = time.monotonic()  # when a step last ended, or there was nothing to do
        self._most_unread = most_unread
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
        self._take_in()
        self._end_all(error or RequestCancelledError("the engine was stopped"))

    def submit(self, request: Request) -> Ticket:
        """Take a request on, in an event loop; one that can never fit is refused at once."""
        require_fit(request.num_prompt_tokens, request.max_tokens, self.engine.config)
        ticket = Ticket(self, request, self._most_unread)
        with self._stopping:
            if self._is_stopping:
                raise RequestCancelledError("the engine was stopped")
            self._inbox.append((request, Reader(ticket, asyncio.get_running_loop())))
        self._wake.set()
        return ticket

    def give_up(self, request: Request) -> None:
        """From any thread: nobody wants the rest of it."""
        self._inbox.append((request, None))
        self._wake.set()

    def _serve(self) -> None:
        """What should never happen ends everybody's request, and the engine begins anew with clean books."""
        while not self._is_stopping:
            try:
                self._take_in()
                if self.engine.has_work:
                    self._hand_over(self.engine.step())
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

    def _take_in(self) -> None:
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
            self._hand_over([_ended(request, error)])

    def _end_all(self, error: WorkerError) -> None:
        for request in self._readers:
            self.engine.abort(request)
        self._hand_over([_ended(request, own_error(error)) for request in self._readers])

    def _hand_over(self, outputs: Sequence[Output]) -> None:
        """One call for each event loop and step."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Output]]] = {}
        for output in outputs:
            ticket, loop = self._readers[output.request]
            by_loop.setdefault(loop, []).append((ticket, output))
            if output.finish_reason is not None:
                del self._readers[output.request]
        for loop, news in by_loop.items():
            if not _tell(loop, news):  # that loop is closed: nobody reads any more
                for ticket, _ in news:
                    self.give_up(ticket.request)


def _tell(loop: asyncio.AbstractEventLoop, news: list[tuple[Ticket, Output]]) -> bool:
    """Whether the loop is still there."""
    try:
        loop.call_soon_threadsafe(_put_all, news)
    except RuntimeError:
        return False
    return True


def _put_all(news: list[tuple[Ticket, Output]]) -> None:
    for ticket, output in news:
        ticket.put(output)


def _ended(request: Request, error: WorkerError) -> Output:
    return Output(request, -1, None, "error", error)
