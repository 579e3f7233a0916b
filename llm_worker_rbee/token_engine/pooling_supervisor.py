"""A pooling model in a child process that is restarted when it dies; the next process computes the missing rows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import numpy as np

from ..backends.ops import Ints
from ..engine.pooling_engine import Floats
from ..errors import InvalidRequestError, WorkerError
from .protocol import Load, Pool, PooledRows, PoolingInfo, PoolingStep
from .supervised_process import OpenRequest, SupervisedProcess
from .wire import MAX_DATA_BYTES, FromEngine, ProtocolError, pack_sequences

TOKEN_BYTES = 4
INLINE_BYTES = 256 << 10  # of tokens that are packed in the event loop
EMA_WEIGHT = 0.1


@dataclass(slots=True, eq=False)
class PoolingRequest(OpenRequest):
    """Sequences of one request, and the rows that came."""

    sequences: Sequence[Ints]
    token_types: Sequence[Ints] | None
    packed: Pool | None  # all of them, for the first submission
    result: asyncio.Future[None]
    rows: Floats
    missing: dict[int, None]  # indices of sequences without a row, in order
    submitted: list[int] = field(default_factory=list)  # indices, in the order in which the process got them

    @property
    def progress(self) -> int:
        return len(self.sequences) - len(self.missing)

    def finish_with(self, error: WorkerError) -> None:
        if not self.result.done():
            self.result.set_exception(error)


@dataclass(slots=True)
class PoolingStats:
    """Counters of all processes, and gauges."""

    num_steps: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    seconds: float = 0.0  # of steps
    seconds_per_token: float = 0.0  # moving average
    process_bytes: int | None = None


class SupervisedPooling(SupervisedProcess[PoolingInfo, PoolingRequest]):
    """An engine of a pooling model in a child process."""

    def __init__(self, load: Load, **options: Any) -> None:
        """Start the process at once; `SupervisedProcess` gets the options."""
        super().__init__(load, **options)
        self._ids = count(1)
        self.stats = PoolingStats()

    async def compute(self, sequences: Sequence[Ints], token_types: Sequence[Ints] | None = None) -> Floats:
        """Return a row for each sequence; cancelling the task drops the request."""
        num_bytes = TOKEN_BYTES * sum(map(len, sequences)) * (1 if token_types is None else 2)
        if num_bytes > MAX_DATA_BYTES:
            raise InvalidRequestError(
                f"the tokens of the request have {num_bytes} bytes: at most {MAX_DATA_BYTES} "
                "are accepted, send fewer inputs at a time",
                "input",
            )
        packed = None
        if num_bytes > INLINE_BYTES:
            packed = await asyncio.to_thread(pack_sequences, sequences, token_types)
        self._require_alive()
        rows = np.zeros((len(sequences), self.info.output_dim), np.float32)
        result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        missing = dict.fromkeys(range(len(sequences)))
        request = PoolingRequest(sequences, token_types, packed, result, rows, missing, id=next(self._ids))
        packed = None
        self._add(request)
        try:
            await result
        finally:
            self._drop(request)
        return rows

    def _encode(self, request: PoolingRequest) -> Pool:
        """Return the inputs of a request that lack a result."""
        indices = request.submitted = list(request.missing)
        packed, request.packed = request.packed, None
        if packed is None:
            types = request.token_types
            part = None if types is None else [types[i] for i in indices]
            packed = pack_sequences([request.sequences[i] for i in indices], part)
        return msgspec.structs.replace(packed, id=request.submission)

    def _take_output(self, message: FromEngine) -> bool:
        if not isinstance(message, PoolingStep):
            raise ProtocolError(f"{type(message).__name__} of a pooling model")
        stats = self.stats
        stats.num_steps += 1
        stats.num_sequences += message.num_sequences
        stats.num_tokens += message.num_tokens
        stats.seconds += message.seconds
        stats.process_bytes = message.process_bytes
        new = message.seconds / max(1, message.num_tokens)
        stats.seconds_per_token += (EMA_WEIGHT if stats.seconds_per_token else 1) * (new - stats.seconds_per_token)
        for output in message.outputs:
            if (request := self._submitted.get(output.id)) is not None:
                self._take_rows(output, request)
        return bool(message.outputs)

    def _take_rows(self, output: PooledRows, request: PoolingRequest) -> None:
        if output.error is not None:
            request.finish_with(output.error)
            self._end(request)
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
            self._end(request)
