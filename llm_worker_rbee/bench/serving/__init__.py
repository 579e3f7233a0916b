"""HTTP load against any OpenAI-compatible server: arrivals by a rate or as many at once as allowed, answers streamed.

Arrivals are fixed before the run: a slow server cannot hold them back, and what a request waits for room here is part
of its latency from arrival (`queue_delay`, `*_from_arrival`). Latencies without that suffix begin when a request is
sent, connecting included.
"""

from __future__ import annotations

import asyncio
import math
import resource
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import uvloop

from ..http_client import RequestFailedError
from ..results import Recorder, Result
from ..workload import Job, Workload
from . import latencies
from .latencies import Tally
from .openai_client import Answer, Target, models
from .server_process import ServingError, Watch, told_by

MOST_IN_FLIGHT = 4096
REFRESH_S = 0.2
OTHER_FILES = 64  # that a process has open beside its connections
HINTS = {
    "connect": ": is the server running there?",
    "http 401": ": give its key with --api-key",
    "http 404": ": is it the right path? --model NAME goes without the list",
}

Steps = Callable[[str, float, float], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is sent at once, and for how long."""

    concurrency: int = MOST_IN_FLIGHT
    timeout: float = 600.0  # of one request, in seconds
    duration: float = math.inf  # nothing new is sent afterwards
    warm_up: int = 1


@dataclass(slots=True)
class Load:
    """One run under way."""

    target: Target
    workload: Workload
    limits: Limits
    steps: Steps
    tally: Tally = field(default_factory=Tally)
    under_way: dict[int, Answer] = field(default_factory=dict)
    watch: Watch | None = None
    told: list[Result] = field(default_factory=list)  # by the server, afterwards
    sent: int = 0
    start: float = 0.0
    last: float = 0.0  # when the last answer, or failure, was complete
    processor_s: float = 0.0  # of this client

    async def go(self) -> None:
        """Warm up, then send everything and wait for the last answer."""
        try:
            for job in self.workload.warm_up(self.limits.warm_up):
                self.steps("warming up", 0, self.workload.requests)
                await self._warm_up(job)
            await self._measure()
            self._show()
            if self.watch is not None:
                self.told = await told_by(self.target.client)
        finally:
            self.target.client.close()

    async def _measure(self) -> None:
        if self.watch is not None:
            self.watch.begin()
        self.start = self.last = time.perf_counter()
        used = time.process_time()
        ticker = asyncio.create_task(self._tick())
        try:
            await self._send_all()
        finally:
            ticker.cancel()
            self.processor_s = time.process_time() - used
            if self.watch is not None:
                self.watch.end()

    async def _warm_up(self, job: Job) -> None:
        try:
            async with asyncio.timeout(self.limits.timeout):
                await self.target.ask(job, Answer())
        except TimeoutError:
            raise ServingError(f"no answer to a first request within {self.limits.timeout:g} s") from None
        except RequestFailedError as error:
            raise ServingError(f"a first request failed ({error.kind}): {error}") from None

    async def _send_all(self) -> None:
        room = asyncio.Semaphore(self.limits.concurrency)
        async with asyncio.TaskGroup() as answers:
            for job in self.workload.jobs():
                await self._wait_for(job.arrival)
                await room.acquire()
                if time.perf_counter() - self.start >= self.limits.duration:
                    break
                self.sent += 1
                answers.create_task(self._one(job, room))

    async def _wait_for(self, arrival: float | None) -> None:
        due = self.start if arrival is None else min(self.start + arrival, self.start + self.limits.duration)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))

    async def _one(self, job: Job, room: asyncio.Semaphore) -> None:
        sent, answer = time.perf_counter(), Answer()
        self.under_way[job.index] = answer
        try:
            async with asyncio.timeout(self.limits.timeout):
                await self.target.ask(job, answer)
            self.tally.complete(job, answer, self.start, sent)
            self.last = max(self.last, answer.ended)
        except TimeoutError:
            self._fail("timeout", f"no whole answer within {self.limits.timeout:g} s")
        except RequestFailedError as error:
            self._fail(error.kind, str(error))
        finally:
            del self.under_way[job.index]
            room.release()

    def _fail(self, kind: str, detail: str) -> None:
        self.tally.fail(kind, detail)
        self.last = max(self.last, time.perf_counter())

    async def _tick(self) -> None:
        while True:
            self._show()
            await asyncio.sleep(REFRESH_S)

    def _show(self) -> None:
        tally, requests = self.tally, self.workload.requests
        passed = max(time.perf_counter() - self.start, 1e-9)
        done = tally.completed + tally.errors.total()
        by_time = math.isfinite(self.limits.duration)
        tokens = tally.output_tokens + sum(len(answer.arrivals) for answer in self.under_way.values())
        parts = [
            f"{done} done" if by_time else f"{done}/{requests} done",
            f"{len(self.under_way)} in flight",
            f"{tokens / passed:.0f} tok/s",
            f"{tally.errors.total()} errors",
        ]
        part = max(done / requests, min(1.0, passed / self.limits.duration))
        self.steps(" · ".join(parts), part * requests, requests)


def reach(target_of: Callable[[str], Target], name: str | None, timeout: float) -> Target:
    """Look whether the server answers, and which model it has where none was named."""
    probe = target_of(name or "")
    told: list[str] = []
    try:
        told = asyncio.run(_listed(probe, min(timeout, 30.0)))
    except TimeoutError:
        raise ServingError(f"{probe.client.address} does not answer: is it the right port?") from None
    except RequestFailedError as error:
        if name is None or not error.kind.startswith("http ") or error.kind in ("http 401", "http 403"):
            where = "" if error.kind == "connect" else f"{probe.client.address}/models: {error.kind}: "
            raise ServingError(f"{where}{error}{HINTS.get(error.kind, '')}") from None
    if name is None and not told:
        raise ServingError(f"{probe.client.address} lists no model: name one with --model")
    return target_of(name or told[0])


async def _listed(probe: Target, seconds: float) -> list[str]:
    try:
        async with asyncio.timeout(seconds):
            return await models(probe.client)
    finally:
        probe.client.close()


def run(
    recorder: Recorder, steps: Steps, target: Target, workload: Workload, limits: Limits, watch: Watch | None = None
) -> None:
    """Put the load on the server, and look at it meanwhile; the figures are recorded however it ends."""
    allow_connections(min(limits.concurrency, workload.requests))
    recorder.model = {"name": target.model}
    load = Load(target, workload, limits, steps, watch=watch)
    try:
        if watch is not None:
            watch.open()
        drive(load.go())
    finally:
        if watch is not None:
            watch.close()
        if load.tally.completed or load.tally.errors:
            _record(recorder, load)


def drive(act: Coroutine[Any, Any, None]) -> None:
    """Run it in the fastest event loop there is: what the client takes of a small machine, the server lacks."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(act)


def _record(recorder: Recorder, load: Load) -> None:
    seconds = load.last - load.start
    for result in latencies.results(load.tally, seconds):
        recorder.add_result(result)
    if math.isfinite(load.limits.duration) and math.isfinite(load.workload.rate):
        waiting = load.workload.arrived(load.limits.duration) - load.sent
        recorder.add_result(Result.exact("unsent", "requests", max(0, waiting)))
    share = load.processor_s / max(seconds, 1e-9)
    recorder.add_result(Result.exact("client_processor", "s", load.processor_s, of_a_core=share))
    for result in [*(load.watch.results() if load.watch is not None else ()), *load.told]:
        recorder.add_result(result)
    recorder.details.update(latencies.details(load.tally, seconds))
    recorder.details["connections"] = load.target.client.opened


def allow_connections(wanted: int) -> None:
    """Raise the limit of open files as far as it may be; too low a one is said before the load, not in the middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
        if soft < needed:
            raise ServingError(f"{wanted} connections need more open files than {soft}: lower --concurrency")
