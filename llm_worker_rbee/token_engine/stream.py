"""The outputs of one request in an event loop: what engines of all kinds put in, and one reader takes out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..errors import RequestCancelledError, WorkerError
from .protocol import RequestState, RequestStream, StepResult, TokenOutput

MAX_BUFFERED_OUTPUTS = 4096  # of one request


class QueuedStream(RequestStream):
    """A queue of outputs. A reader that does not read never holds an engine up: past a bound its request is aborted."""

    def __init__(
        self, request: RequestState, on_abort: Callable[[RequestState], None],
        max_buffered_outputs: int = MAX_BUFFERED_OUTPUTS,
    ) -> None:  # fmt: skip
        self.request = request
        self.on_abort = on_abort
        self._max_buffered_outputs = max_buffered_outputs
        self._outputs: list[TokenOutput] = []
        self._changed = asyncio.Event()
        self._on_outputs: Callable[[], None] = self._changed.set

    async def next_outputs(self) -> list[TokenOutput]:
        while not self._outputs and not self.request.is_finished:
            self._changed.clear()
            await self._changed.wait()
        return self.take_outputs()

    def take_outputs(self) -> list[TokenOutput]:
        outputs = self._outputs
        if not outputs:
            return outputs
        if outputs[-1].error is None:  # an error is the last output
            self._outputs = []
        elif len(outputs) > 1:  # it is raised by the next call
            self._outputs = [outputs.pop()]
            self._on_outputs()
        else:
            self._outputs = []
            raise outputs[0].error  # type: ignore[misc]
        return outputs

    def notify(self, on_outputs: Callable[[], None]) -> None:
        self._on_outputs = on_outputs
        if self._outputs:
            on_outputs()

    def abort(self) -> None:
        self.finish_with(RequestCancelledError("the request was cancelled"))

    def put(self, output: TokenOutput) -> None:
        """Add an output; nothing comes after the end."""
        if self.request.is_finished:
            return
        self.request.add(output)
        self._outputs.append(output)
        if len(self._outputs) > self._max_buffered_outputs and not self.request.is_finished:
            self._outputs.clear()
            message = f"the output was not read: {self._max_buffered_outputs} tokens were waiting"
            self.finish_with(RequestCancelledError(message))
        self._on_outputs()

    def finish_with(self, error: WorkerError) -> None:
        """End the request with an error, and drop it from its engine."""
        if not self.request.is_finished:
            self.put(TokenOutput(self.request.id, [], "error", error=error))
            self.on_abort(self.request)


def take_result(result: StepResult, streams: dict[int, QueuedStream]) -> None:
    """Pass events and outputs to the streams of their requests; finished streams leave `streams`."""
    for event in result.events:
        if (stream := streams.get(event.id)) is not None:
            stream.request.apply(event)
    for output in result.outputs:
        if (stream := streams.get(output.id)) is not None:
            if output.finish_reason is not None:
                del streams[output.id]
            stream.put(output)
