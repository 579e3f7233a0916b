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
from itertools import count
from typing import Any

import msgspec

from ..errors import InferenceError, WorkerError
from ..load import split_settings
from ..token_engine.protocol import (
    VERSION,
    Load,
    ModelInfo,
    RequestEvent,
    RequestState,
    StepResult,
    Submit,
    TokenOutput,
)
from ..token_engine.supervisor import SupervisedEngine
from ..token_engine.wire import FrameReader, FromEngine, ToEngine, encode
from . import reports
from .reports import EngineReport, shorten, split_hashes

MAX_HASHES = 16_384  # of the blocks used last, in one report
MESSAGE_S = 0.001  # of the actor's time: each of many streams sends less often, with more tokens a message


class Engine:
    """An engine for the fronts of a cluster. Messages travel as the frames of `wire`."""

    async def __init__(  # type: ignore[misc]
        self, arguments: dict[str, Any], *, max_restarts: int, target_waiting_tokens: int, dummy_step_s: float | None
    ) -> None:
        """Load the model; `arguments` are those of `LLM`."""
        self._target_waiting_tokens = target_waiting_tokens
        self._open: dict[_Request, bytes] = {}  # with the hashes of their prompts
        self._ids = count(1)
        load = Load(options=split_settings(arguments), dummy_step_s=dummy_step_s, records_blocks=True)
        self._engine = _RecordingEngine(load, max_restarts=max_restarts)
        await self._engine.start(lambda stage: None)

    async def describe(self) -> bytes:
        """Return the `ModelInfo`."""
        return encode(self._engine.info)

    async def generate(self, version: int, submitted: bytes, hashes: bytes, num_tokens: int) -> AsyncIterator[bytes]:
        """Yield the results of a `Submit` until its end; a stream that ends before was lost with its engine.

        The router reads `hashes`, those of the prompt's blocks, and `num_tokens`, of the prompt.
        """
        if version != VERSION:
            raise InferenceError(f"the engine speaks version {VERSION} of the protocol, the front {version}")
        if self._engine.status() == "failed":
            return
        (message,) = FrameReader[Submit](ToEngine).feed(submitted)
        request = _Request(msgspec.structs.replace(message, id=next(self._ids)))
        stream = self._engine.submit(request)
        self._open[request] = hashes
        self._engine.touch(split_hashes(hashes))
        try:
            while not request.is_finished:
                await request.changed.wait()
                result = request.take()
                if request.is_finished and self._engine.status() == "failed":
                    return
                yield encode(result)
                if result.outputs:
                    with suppress(WorkerError):  # it is in the message
                        await stream.next_outputs()
                    await asyncio.sleep(MESSAGE_S * len(self._open))
        finally:
            del self._open[request]
            stream.abort()

    def check_health(self) -> None:
        """Raise if this replica must be replaced."""
        if self._engine.status() == "failed":
            raise InferenceError("the engine has failed")

    def record_routing_stats(self) -> dict[str, Any]:
        """Return what fronts know of this replica."""
        engine, requests = self._engine, list(self._open)
        report = EngineReport(
            status=engine.status(), num_restarts=engine.num_restarts, last_step_age_s=engine.last_step_age_s,
            stats=engine.stats(), block_size=engine.info.engine.block_size,
            load=sum(one.num_prompt_tokens - max(0, one.num_cached_tokens) + len(one.tokens) for one in requests),
            hashes=b"".join([*list(engine.hashes)[-MAX_HASHES:], *self._open.values()]),
        )  # fmt: skip
        return {reports.KEY: msgspec.msgpack.encode(report)}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return how many replicas the work of this one needs: what is running, and what waits for prefill."""
        num_running = sum(request.is_running for request in self._open)
        occupancy = max(self._engine.stats().kv_cache_usage, num_running / self._engine.info.engine.max_batch)
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
        """Return what was collected."""
        result = StepResult(outputs=self._outputs, events=self._events)
        self._outputs, self._events = [], []
        self.changed.clear()
        return result


class _RecordingEngine(SupervisedEngine):
    """A supervised engine that knows the blocks in its prefix cache."""

    def __init__(self, load: Load, **options: Any) -> None:
        super().__init__(load, **options)
        self.hashes: dict[bytes, None] = {}  # shortened, the last used at the end

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, StepResult):
            for block_hash in map(shorten, message.removed):
                self.hashes.pop(block_hash, None)
            self.hashes.update(dict.fromkeys(map(shorten, message.stored)))
        elif isinstance(message, ModelInfo):
            self.hashes.clear()
        super()._take(message)

    def touch(self, hashes: list[bytes]) -> None:
        """Move blocks that a request will use to the end."""
        for block_hash in hashes:
            if block_hash in self.hashes:
                del self.hashes[block_hash]
                self.hashes[block_hash] = None
