"""The engine in a thread of its own: the one place where threads meet.

An event loop submits requests and awaits their outputs; the thread takes in what was submitted and aborted, steps, and
posts the outputs of a step to each loop in one call. Without work it sleeps. A reader that does not read never holds a
step up: past a bounded number of outputs its request is aborted.

    async with AsyncEngine(engine) as async_engine:
        stream = async_engine.submit(request)
        while outputs := await stream.next_outputs(): ...
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
from .request import Request, StepOutput, copy_error, error_output

MAX_BUFFERED_OUTPUTS = 4096  # of one request


class RequestStream:
    """The outputs of one request, for one reader in the event loop that submitted it."""

    def __init__(self, engine: AsyncEngine, request: Request, max_buffered_outputs: int) -> None:
        self.request = request
        self._engine = engine
        self._max_buffered_outputs = max_buffered_outputs
        self._outputs: deque[StepOutput] = deque()
        self._changed = asyncio.Event()
        self._is_finished = False

    async def next_outputs(self) -> list[StepOutput]:
        """Return all outputs that are there, at least one; none after the end. An error is raised after the outputs
        before it."""
        while not self._outputs:
            if self._is_finished:
                return []
            self._changed.clear()
            await self._changed.wait()
        if self._outputs[0].error is not None:
            raise self._outputs.popleft().error  # type: ignore[misc]
        found: list[StepOutput] = []
        while self._outputs and self._outputs[0].error is None:
            found.append(self._outputs.popleft())
        return found

    def abort(self) -> None:
        """End the request within a step; its reader gets an error."""
        self._finish_with(RequestCancelledError("the request was cancelled"))

    def put(self, output: StepOutput) -> None:
        """Add an output, in the event loop."""
        if self._is_finished:
            return
        self._outputs.append(output)
        self._is_finished = output.finish_reason is not None
        if len(self._outputs) > self._max_buffered_outputs and not self._is_finished:
            self._outputs.clear()
            message = f"the output was not read: {self._max_buffered_outputs} tokens were waiting"
            self._finish_with(RequestCancelledError(message))
        self._changed.set()

    def _finish_with(self, error: WorkerError) -> None:
        if not self._is_finished:
            self._is_finished = True
            self._outputs.append(error_output(self.request, error))
            self._changed.set()
            self._engine.abort(self.request)


class Reader(NamedTuple):
    """Where the outputs of a request go."""

    stream: RequestStream
    loop: asyncio.AbstractEventLoop


class AsyncEngine:
    """Serves an engine to event loops."""

    def __init__(self, engine: Engine, max_buffered_outputs: int = MAX_BUFFERED_OUTPUTS) -> None:
        self.engine = engine
        self.last_step_at = time.monotonic()  # when a step last ended, or there was no work
        self._max_buffered_outputs = max_buffered_outputs
        self._inbox: deque[tuple[Request, Reader | None]] = deque()  # submitted with a reader, aborted without
        self._readers: dict[Request, Reader] = {}  # the thread's own
        self._wake = threading.Event()
        self._is_stopping = False
        self._stop_lock = threading.Lock()  # nothing is submitted after the inbox was drained for the last time
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)

    async def __aenter__(self) -> AsyncEngine:
        self.start()
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.stop()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    async def stop(self, error: WorkerError | None = None) -> None:
        """End the thread after its present step; unfinished requests end with `error`."""
        with self._stop_lock:
            self._is_stopping = True
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._drain_inbox()
        self._finish_all(error or RequestCancelledError("the engine was stopped"))

    def submit(self, request: Request) -> RequestStream:
        """Queue a request from an event loop; `resolve_max_tokens` has checked that it fits."""
        assert self.engine.has_room_for(request), "the request is longer than the context or the KV cache"
        stream = RequestStream(self, request, self._max_buffered_outputs)
        with self._stop_lock:
            if self._is_stopping:
                raise RequestCancelledError("the engine was stopped")
            self._inbox.append((request, Reader(stream, asyncio.get_running_loop())))
        self._wake.set()
        return stream

    def abort(self, request: Request) -> None:
        """Drop a request, from any thread."""
        self._inbox.append((request, None))
        self._wake.set()

    def _serve(self) -> None:
        """Step while there is work. An unexpected error finishes every request, and the engine starts anew."""
        while not self._is_stopping:
            try:
                self._drain_inbox()
                if self.engine.has_work:
                    self._dispatch_outputs(self.engine.step())
                else:
                    self._sleep()
            except Exception as error:
                failure = InferenceError(f"the engine failed ({type(error).__name__})")
                failure.__cause__ = error
                try:
                    self.engine.reset()
                finally:  # if even that fails the thread ends, and `is_alive` is False
                    self._finish_all(failure)
            self.last_step_at = time.monotonic()

    def _sleep(self) -> None:
        """Wait for the inbox; in debug runs the idle scheduler is checked first."""
        if self.engine.config.debug:
            self.engine.scheduler.check()
        self._wake.wait()
        self._wake.clear()

    def _drain_inbox(self) -> None:
        """Add and abort requests in the order of submission."""
        while self._inbox:
            request, reader = self._inbox.popleft()
            if reader is not None:
                self._add(request, reader)
            elif self._readers.pop(request, None) is not None:
                self.engine.abort(request)

    def _add(self, request: Request, reader: Reader) -> None:
        """Add a request to the engine; one that the engine refuses ends at once, without harm to the others."""
        self._readers[request] = reader  # first, so that any error reaches it
        try:
            self.engine.add(request)
        except WorkerError as error:
            self._dispatch_outputs([error_output(request, error)])

    def _finish_all(self, error: WorkerError) -> None:
        for request in self._readers:
            self.engine.abort(request)
        self._dispatch_outputs([error_output(request, copy_error(error)) for request in self._readers])

    def _dispatch_outputs(self, outputs: Sequence[StepOutput]) -> None:
        """Post outputs with one call for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, StepOutput]]] = {}
        for output in outputs:
            stream, loop = self._readers[output.request]
            by_loop.setdefault(loop, []).append((stream, output))
            if output.finish_reason is not None:
                del self._readers[output.request]
        for loop, pairs in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, pairs)
            except RuntimeError:  # the loop is closed
                for stream, _ in pairs:
                    self.abort(stream.request)


def _put_all(pairs: list[tuple[RequestStream, StepOutput]]) -> None:
    for stream, output in pairs:
        stream.put(output)
