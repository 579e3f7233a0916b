"""One engine for all streams of this process, without a thread of its own: whoever wants a token makes a step for
everybody, and finds what others stepped for it in its box.

Several threads may do so: one steps, the others wait. A stream that is dropped only leaves a note, because Python may
collect it in the middle of a step.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from ..engine.engine import Engine
from ..engine.request import StepOutput, Request
from ..errors import RequestCancelledError

Box = deque[tuple[float, StepOutput]]  # when, on the clock of time.perf_counter, and what


class Driver:
    """Steps an engine on behalf of those who wait."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._boxes: dict[Request, Box] = {}
        self._dropped: deque[Request] = deque()
        self._lock = threading.Lock()

    def add(self, request: Request) -> Box:
        """Take a request on; what comes of it goes into the box."""
        with self._lock:
            self._forget_dropped()
            self.engine.add(request)
            self._boxes[request] = box = Box()
            return box

    def drop(self, request: Request) -> None:
        """Nobody wants the rest of it."""
        self._dropped.append(request)

    def wait_for(self, box: Box) -> None:
        """Step until there is something in the box."""
        while not box:
            with self._lock:
                if not box:
                    assert self.engine.has_work, "somebody waits for a request that the engine does not have"
                    self._step()

    def _step(self) -> None:
        self._forget_dropped()
        try:
            outputs, now = self.engine.step(), time.perf_counter()
            for output in outputs:
                self._boxes[output.request].append((now, output))
                if output.finish_reason is not None:
                    del self._boxes[output.request]
        except BaseException:  # Ctrl-C: between two steps, or where nothing is written, the others could go on
            if not self.engine.is_computing:
                self._start_anew()
            raise

    def _forget_dropped(self) -> None:
        while self._dropped:
            request = self._dropped.popleft()
            if self._boxes.pop(request, None) is not None:
                self.engine.abort(request)

    def _start_anew(self) -> None:
        self.engine.reset()
        now = time.perf_counter()
        for request, box in self._boxes.items():
            error = RequestCancelledError("the answer was interrupted")
            box.append((now, StepOutput(request, -1, None, "error", error)))
        self._boxes.clear()
