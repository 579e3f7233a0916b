"""A pooling model in a child process that is restarted when it dies; what was not computed goes to the next process.

The requests that a dead process had are suspects: they are submitted one at a time, and one that ends two processes
while it is alone is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from ..backends.ops import Ints
from ..engine.pooling_engine import Floats
from ..errors import InferenceError, InvalidRequestError, WorkerError, copy_error
from .pooling_loop import join_rows
from .protocol import Abort, Pool, PooledRows, PoolingInfo, PoolingStep
from .supervised_process import SupervisedProcess
from .wire import MAX_FRAME_BYTES, FromEngine, ProtocolError

TOKEN_BYTES = 4
MAX_MESSAGE_BYTES = MAX_FRAME_BYTES - (1 << 20)  # of tokens
INLINE_BYTES = 256 << 10  # of tokens that are packed in the event loop
DEATHS_TO_REFUSE = 2  # alone
EMA_WEIGHT = 0.1


@dataclass(slots=True, eq=False)
class PoolingRequest:
    """Sequences of one request, and the rows that came."""

    sequences: Sequence[Ints]
    token_types: Sequence[Ints] | None
    result: asyncio.Future[None]
    rows: Floats
    missing: dict[int, None]  # indices of sequences without a row, in order
    submitted: list[int] = field(default_factory=list)  # indices, in the order in which the process got them
    num_deaths_alone: int = 0


@dataclass(slots=True)
class PoolingStats:
    """Counters of all processes, and gauges."""

    num_steps: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    seconds: float = 0.0  # of steps
    seconds_per_token: float = 0.0  # moving average
    process_bytes: int | None = None


class SupervisedPooling(SupervisedProcess[PoolingInfo]):
    """An engine of a pooling model in a child process."""

    label = "the engine of the pooling model"

    def __init__(self, *given: object, **options: object) -> None:
        super().__init__(*given, **options)  # type: ignore[arg-type]
        self._requests: dict[int, PoolingRequest] = {}  # all open ones, in the order in which they came
        self._numbers = count(1)
        self._suspects: list[int] = []  # submitted one at a time
        self.stats = PoolingStats()

    def _planned_options(self) -> dict[str, object]:
        return {"model": self.info.path, "device": self.info.device}

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    async def compute(self, sequences: Sequence[Ints], token_types: Sequence[Ints] | None = None) -> Floats:
        """Return a row for each sequence; cancelling the task drops the request."""
        num_bytes = TOKEN_BYTES * sum(map(len, sequences)) * (1 if token_types is None else 2)
        if num_bytes > MAX_MESSAGE_BYTES:
            raise InvalidRequestError(
                f"the tokens of the request have {num_bytes} bytes: at most {MAX_MESSAGE_BYTES} "
                "are accepted, send fewer inputs at a time",
                "input",
            )
        packed = None
        if num_bytes > INLINE_BYTES:
            packed = await asyncio.to_thread(_pack, sequences, token_types)
        self._require_alive()
        if not self._requests:
            self._last_message_at = time.monotonic()
        rows = np.zeros((len(sequences), self.info.output_dim), np.float32)
        result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request = PoolingRequest(sequences, token_types, result, rows, dict.fromkeys(range(len(sequences))))
        number = next(self._numbers)
        self._requests[number] = request
        if self._state == "ready" and not self._suspects:
            self._send(number, packed)
        packed = None
        try:
            await request.result
        finally:
            self._remove(number)
        return request.rows

    def _send(self, number: int, packed: tuple[bytes, bytes] | None = None) -> None:
        """Submit what is missing of a request; `packed` are all its sequences."""
        request = self._requests[number]
        indices = request.submitted = list(request.missing)
        sequences, types = [request.sequences[i] for i in indices], request.token_types
        if packed is None:
            packed = _pack(sequences, None if types is None else [types[i] for i in indices])
        self._child.send(Pool(number, list(map(len, sequences)), *packed))

    def _remove(self, number: int) -> None:
        request = self._requests.pop(number, None)
        if request is not None and request.submitted and request.missing:
            self._child.send(Abort(number))
        if number in self._suspects:
            is_first = self._suspects[0] == number
            self._suspects.remove(number)
            if is_first and self._state == "ready":
                self._submit_all()

    def _submit_all(self) -> None:
        for number in self._suspects[:1] or list(self._requests):
            if not self._requests[number].submitted:
                self._send(number)

    def _take_output(self, message: FromEngine) -> None:
        if not isinstance(message, PoolingStep):
            raise ProtocolError(f"{type(message).__name__} of a pooling model")
        self._observe_message(bool(message.outputs))
        stats = self.stats
        stats.num_steps += 1
        stats.num_sequences += message.num_sequences
        stats.num_tokens += message.num_tokens
        stats.seconds += message.seconds
        stats.process_bytes = message.process_bytes
        new = message.seconds / max(1, message.num_tokens)
        stats.seconds_per_token += (EMA_WEIGHT if stats.seconds_per_token else 1) * (new - stats.seconds_per_token)
        for output in message.outputs:
            self._take_rows(output)

    def _take_rows(self, output: PooledRows) -> None:
        request = self._requests.get(output.id)
        if request is None or request.result.done():
            return
        if output.error is not None:
            request.missing.clear()
            request.result.set_exception(output.error)
            return
        width = self.info.output_dim
        rows = np.frombuffer(output.rows, "<f4")
        if rows.size != width * len(output.indices) or max(output.indices, default=0) >= len(request.submitted):
            raise ProtocolError(f"{rows.size} values for {len(output.indices)} rows of {width}")
        indices = [request.submitted[i] for i in output.indices]
        request.rows[indices] = rows.reshape(-1, width)
        for i in indices:
            request.missing.pop(i, None)
        if not request.missing:
            request.result.set_result(None)

    def _lose_process(self, how: str | None) -> None:
        held = [number for number, request in self._requests.items() if request.submitted and request.missing]
        for number in held:
            request = self._requests[number]
            request.submitted = []
            request.num_deaths_alone += how is not None and len(held) == 1
            if request.num_deaths_alone >= DEATHS_TO_REFUSE and not request.result.done():
                message = f"{self.label} {how} twice while it computed this request alone: it is not tried again"
                request.result.set_exception(InferenceError(message))
        if how is not None:
            self._suspects += [number for number in held if number not in self._suspects]

    def _finish_all(self, error: WorkerError) -> None:
        for request in self._requests.values():
            if not request.result.done():
                request.result.set_exception(copy_error(error))


def _pack(sequences: Sequence[Ints], token_types: Sequence[Ints] | None) -> tuple[bytes, bytes]:
    """Return sequences and segments as they travel."""
    return join_rows(sequences), b"" if token_types is None else join_rows(token_types)
