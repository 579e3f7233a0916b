"""The deployment `Engine`: an engine in an actor of Ray, and what its replicas report for routing and autoscaling.

The actor passes messages; the model is computed by a child process (`SupervisedEngine`). So a crash of the engine is
survived inside the replica, by the rules of `serve`, and what ends the actor is almost never a request. Ray replaces a
replica whose child process cannot be restarted any more (`check_health`), and lets the requests of one that it stops
finish.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import count, islice
from typing import Any

import msgspec

from ..config import LoadOptions
from ..errors import InferenceError, WorkerError
from ..token_engine.protocol import VERSION, Load, RequestEvent, RequestState, StepResult, Submit, TokenOutput
from ..token_engine.supervisor import SupervisedEngine
from ..token_engine.wire import FrameReader, ToEngine, encode
from . import reports
from .reports import EngineReport, shorten, split_hashes

MAX_HASHES = 16_384  # in one report: 128 KiB; a chain loses its end first, since its blocks are in their order
MESSAGE_S = 0.001  # of the actor's time: each of many streams sends less often, with more tokens a message


class Engine:
    """An engine for the fronts of a cluster. Messages travel as the frames of `wire`."""

    async def __init__(  # type: ignore[misc]
        self,
        options: LoadOptions,
        *,
        target_waiting_tokens: int,
        dummy_step_s: float | None = None,
        **supervision: Any,
    ) -> None:
        """Load the model; `supervision` are arguments of `SupervisedEngine`."""
        self._target_waiting_tokens = target_waiting_tokens
        self._open: set[_Request] = set()
        self._ids = count(1)
        load = Load(options=options, dummy_step_s=dummy_step_s, records_blocks=True)
        self._engine = SupervisedEngine(load, **supervision)
        await self._engine.start(lambda stage: None)

    async def describe(self) -> bytes:
        """Return the `ModelInfo`."""
        return encode(self._engine.info)

    async def generate(self, version: int, submitted: bytes, hashes: bytes, num_tokens: int) -> AsyncIterator[bytes]:
        """Yield the results of a `Submit` until its end; a stream that ends before was lost with its engine.

        The router reads `hashes`, of the prompt's full blocks, and `num_tokens`, of the prompt.
        """
        if version != VERSION:
            raise InferenceError(f"the engine speaks version {VERSION} of the protocol, the front {version}")
        if self._engine.status() == "failed":
            return
        (message,) = FrameReader[Submit](ToEngine).feed(submitted)
        request = _Request(msgspec.structs.replace(message, id=next(self._ids)))
        stream = self._engine.submit(request, split_hashes(hashes))
        self._open.add(request)
        last = None
        try:
            while last is None or last.finish_reason is None:  # the end may come during any of these waits
                await request.changed.wait()
                result = request.take()
                last = result.outputs[-1] if result.outputs else None
                if last is not None and last.error is not None and self._engine.status() == "failed":
                    return
                yield encode(result)
                if last is not None and last.finish_reason is None:
                    with suppress(WorkerError):  # it comes with the next result
                        stream.take_outputs()
                    await asyncio.sleep(MESSAGE_S * len(self._open))
        finally:
            self._open.discard(request)
            stream.abort()

    def check_health(self) -> None:
        """Raise if this replica must be replaced."""
        if self._engine.status() == "failed":
            raise InferenceError("the engine has failed")

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the report of this replica that fronts read."""
        engine = self._engine
        report = EngineReport(
            last_step_age_s=engine.last_step_age_s,
            status=engine.status(),  # in this order: the status is no older
            device=engine.info.device,
            block_size=engine.info.engine.block_size,
            load=engine.candidate(()).load,
            num_restarts=engine.num_restarts,
            num_requests=engine.num_requests,
            stats=engine.stats(),
            hashes=b"".join(map(shorten, islice(engine.prefix_index.hashes(), MAX_HASHES))),
        )
        return {reports.KEY: msgspec.msgpack.encode(report)}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the number of replicas for this one's work: running requests, and tokens waiting for prefill."""
        num_running = sum(request.is_running for request in self._open)
        occupancy = max(self._engine.stats().kv_cache_usage, num_running / self._engine.info.max_batch)
        waiting = sum(request.num_unprefilled_tokens for request in self._open if not request.is_running)
        return {"load": occupancy + waiting / self._target_waiting_tokens}


class _Request(RequestState):
    """A request whose events and outputs are collected for the next message."""

    def __init__(self, submitted: Submit) -> None:
        super().__init__(submitted)
        self.changed = asyncio.Event()
        self._outputs: list[TokenOutput] = []
        self._events: list[RequestEvent] = []

    def apply(self, event: RequestEvent) -> None:
        super().apply(event)
        self._events.append(event)
        self.changed.set()

    def add(self, output: TokenOutput) -> None:
        super().add(output)
        self._outputs.append(output)
        self.changed.set()

    def take(self) -> StepResult:
        """Return the collected outputs and events, and clear them."""
        result = StepResult(outputs=self._outputs, events=self._events)
        self._outputs, self._events = [], []
        self.changed.clear()
        return result
