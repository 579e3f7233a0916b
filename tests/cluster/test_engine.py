"""The deployment `Engine` without Ray: every stream has its end, and a report tells of a process that hangs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llm_worker_rbee.cluster import reports
from llm_worker_rbee.cluster.engine import Engine
from llm_worker_rbee.cluster.reports import EngineReport
from llm_worker_rbee.config import LoadOptions
from llm_worker_rbee.errors import RequestCancelledError
from llm_worker_rbee.sampling_params import SamplingParams
from llm_worker_rbee.token_engine.protocol import VERSION, StepResult, Submit, TokenOutput
from llm_worker_rbee.token_engine.wire import FrameReader, FromEngine, encode

from .conftest import LIMIT_S

NUM_STREAMS = 32


@asynccontextmanager
async def started(path: Path, **options: Any) -> AsyncIterator[Engine]:
    """An engine whose model computes nothing; a step takes 2 ms."""
    load = LoadOptions(model=str(path), device="cpu", threads=1, kv_memory=64 << 20)
    engine = Engine.__new__(Engine)
    await engine.__init__(load, target_waiting_tokens=100, dummy_step_s=0.002, **options)  # type: ignore[misc]
    try:
        yield engine
    finally:
        await engine._engine.stop(RequestCancelledError("the test is over"))


async def outputs_of(engine: Engine, max_tokens: int, pause_s: float = 0.0) -> list[TokenOutput]:
    """Return the outputs of a request; its reader waits after each message."""
    reader, found = FrameReader[StepResult](FromEngine), []
    params = SamplingParams(temperature=0.0).resolve()
    submitted = Submit(id=1, prompt=[1], params=params, max_tokens=max_tokens, seed=0, eos_ids=[])
    async for frame in engine.generate(VERSION, encode(submitted), b"", 1):
        for result in reader.feed(frame):
            found += result.outputs
        await asyncio.sleep(pause_s)
    return found


def report_of(engine: Engine) -> EngineReport:
    return msgspec.msgpack.decode(engine.record_routing_stats()[reports.KEY], type=EngineReport)


async def until_status(engine: Engine, status: str) -> None:
    while report_of(engine).status != status:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("pause_s", [0.0, 0.005], ids=["at once", "slow reader"])
def test_every_stream_has_its_end(model: Path, pause_s: float) -> None:
    """Streams pause between messages, longer when there are many: the last token comes during any of the pauses."""

    async def run() -> list[list[TokenOutput]]:
        async with started(model) as engine:
            return await asyncio.gather(*(outputs_of(engine, n, pause_s) for n in range(1, NUM_STREAMS + 1)))

    for max_tokens, outputs in enumerate(asyncio.run(asyncio.wait_for(run(), LIMIT_S)), 1):
        assert sum(len(output.tokens) for output in outputs) == max_tokens
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]


def test_report_tells_of_a_process_that_hangs(model: Path) -> None:
    async def run() -> None:
        async with started(model, stall_timeout_s=0.2) as engine:
            process = engine._engine._child.process
            reading = asyncio.ensure_future(outputs_of(engine, 500))
            while not report_of(engine).stats.num_steps:
                await asyncio.sleep(0.01)
            os.kill(process.pid, signal.SIGSTOP)
            await until_status(engine, "stalled")
            assert report_of(engine).last_step_age_s > 0.2
            os.kill(process.pid, signal.SIGCONT)
            assert (await reading)[-1].finish_reason == "length"
            assert (report_of(engine).status, report_of(engine).num_restarts) == ("healthy", 0)

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_process_that_hangs_is_restarted_on_request(model: Path) -> None:
    async def run() -> None:
        async with started(model, stall_timeout_s=0.5, restart_on_stall=True) as engine:
            reading = asyncio.ensure_future(outputs_of(engine, 500))
            while not report_of(engine).stats.num_steps:
                await asyncio.sleep(0.01)
            os.kill(engine._engine._child.process.pid, signal.SIGSTOP)
            outputs = await reading
            assert (sum(len(output.tokens) for output in outputs), outputs[-1].finish_reason) == (500, "length")
            assert report_of(engine).num_restarts == 1

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))
