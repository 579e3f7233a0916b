"""An engine in a thread of this process, the one place where threads meet: an event loop submits requests and awaits
their outputs; the thread takes in submissions and aborts, steps, and posts the results to the loop. Without work it
sleeps.

    async with ThreadedEngine(load) as token_engine:
        stream = token_engine.submit(RequestState(...))
        while outputs := await stream.next_outputs(): ...
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..engine.engine import Engine
from ..errors import InferenceError, RequestCancelledError, WorkerError
from ..progress import OnStage
from .engine_loop import EngineLoop, is_urgent
from .protocol import (
    MAX_BUFFERED_OUTPUTS,
    Abort,
    EngineStats,
    ModelInfo,
    RequestEvent,
    RequestState,
    RequestStream,
    StepResult,
    ToEngineLoop,
    TokenEngine,
    UnloadLora,
)

Load = Callable[[OnStage], tuple[Engine, ModelInfo]]


class ThreadedEngine(TokenEngine):
    """Serves an engine to the event loop that starts it."""

    def __init__(self, load: Load, max_buffered_outputs: int = MAX_BUFFERED_OUTPUTS) -> None:
        """`load` makes the engine, in a thread."""
        self.engine: Engine  # once it is started, as these
        self._loop: EngineLoop
        self._event_loop: asyncio.AbstractEventLoop
        self._load = load
        self._last_step_at = time.monotonic()  # when a step last ended, or there was no work
        self._max_buffered_outputs = max_buffered_outputs
        self._inbox: deque[ToEngineLoop] = deque()
        self._streams: dict[int, RequestStream] = {}  # the event loop's own
        self._wake = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)

    async def start(self, on_stage: OnStage) -> ModelInfo:
        self._event_loop = asyncio.get_running_loop()
        self.engine, self.info = await asyncio.to_thread(self._load, on_stage)
        self._loop = EngineLoop(self.engine, self._post_events)
        self.engine.stop_for(lambda: any(map(is_urgent, list(self._inbox))))
        self._thread.start()
        return self.info

    async def __aenter__(self) -> ThreadedEngine:
        await self.start(lambda stage: None)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.stop(RequestCancelledError("the engine was stopped"))

    async def restart(self) -> None:
        raise InferenceError("an engine in the worker's own process cannot be restarted")

    async def stop(self, error: WorkerError) -> None:
        self._is_stopping = True
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        for stream in list(self._streams.values()):
            stream.finish_with(error)
        self._drain_inbox()  # the thread is gone

    def submit(self, request: RequestState) -> RequestStream:
        if self._is_stopping:
            raise RequestCancelledError("the engine was stopped")
        stream = RequestStream(request, self._abort, asyncio.Event(), self._max_buffered_outputs)
        self._streams[request.id] = stream
        self._send(request.submitted)
        return stream

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    def stats(self) -> EngineStats:
        return self._loop.stats()

    @property
    def last_step_age_s(self) -> float:
        return time.monotonic() - self._last_step_at if self._loop.has_work else 0.0

    def status(self) -> str:
        if self.engine.device_failed:
            return "failed"
        return "healthy" if self._thread.is_alive() else "stalled"

    def _abort(self, request: RequestState) -> None:
        self._streams.pop(request.id, None)
        self._send(Abort(request.id))

    def unload_lora(self, digest: bytes) -> None:
        self._send(UnloadLora(digest))

    def _send(self, message: ToEngineLoop) -> None:
        self._inbox.append(message)
        self._wake.set()

    def _serve(self) -> None:
        """Step while there is work. An unexpected error finishes every request, and the engine starts anew."""
        while not self._is_stopping:
            try:
                self._drain_inbox()
                if self._loop.has_work:
                    self._post(self._loop.step())
                else:
                    self._sleep()
            except Exception as error:
                failure = InferenceError(f"the engine failed ({type(error).__name__})")
                failure.__cause__ = error
                self._post(self._loop.fail_all(failure))  # if even that fails the thread ends: status() shows it
            self._last_step_at = time.monotonic()

    def _sleep(self) -> None:
        """Wait for the inbox; in debug runs the idle scheduler is checked first."""
        if self.engine.config.debug:
            self.engine.scheduler.check()
        self._wake.wait()
        self._wake.clear()

    def _drain_inbox(self) -> None:
        """Add and abort requests in the order of submission."""
        while self._inbox:
            self._loop.receive(self._inbox.popleft())

    def _post_events(self, events: list[RequestEvent]) -> None:
        self._post(StepResult(events=events))

    def _post(self, result: StepResult) -> None:
        try:
            self._event_loop.call_soon_threadsafe(self._take, result)
        except RuntimeError:  # the loop is closed: no reader is left
            self._loop.fail_all(RequestCancelledError("the event loop was closed"))

    def _take(self, result: StepResult) -> None:
        """Pass events and outputs to the streams of their requests, in the event loop."""
        for event in result.events:
            if (stream := self._streams.get(event.id)) is not None:
                stream.request.apply(event)
        for output in result.outputs:
            if (stream := self._streams.get(output.id)) is not None:
                if output.finish_reason is not None:
                    del self._streams[output.id]
                stream.put(output)
