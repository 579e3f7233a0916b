"""HTTP load on any OpenAI-compatible server: arrivals at a rate or at a concurrency, answers streamed.

Arrivals are fixed before the run: a slow server cannot delay them, and the time that a request waits here for a free
connection is part of its latency from arrival (`queue_delay`, `*_from_arrival`). Latencies without that suffix begin
when a request is sent, connecting included.
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
from .latencies import LoadStatistics
from .openai_client import Answer, Target, list_models
from .server_process import ServerMonitor, ServingError, read_metrics

MAX_IN_FLIGHT = 4096
REFRESH_S = 0.2
OTHER_OPEN_FILES = 64  # beside connections
HINTS = {
    "connect": ": is the server running there?",
    "http 401": ": give its key with --api-key",
    "http 404": ": is it the right path? --model NAME goes without the list",
}

Progress = Callable[[str, float, float], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """How many requests are in flight, and for how long."""

    concurrency: int = MAX_IN_FLIGHT
    timeout: float = 600.0  # of one request, in seconds
    duration: float = math.inf  # seconds after which nothing is sent
    warm_up: int = 1


@dataclass(slots=True)
class Load:
    """One run in progress."""

    target: Target
    workload: Workload
    limits: Limits
    progress: Progress
    totals: LoadStatistics = field(default_factory=LoadStatistics)
    in_flight: dict[int, Answer] = field(default_factory=dict)
    monitor: ServerMonitor | None = None
    server_results: list[Result] = field(default_factory=list)  # from /metrics, afterwards
    sent: int = 0
    start: float = 0.0
    last: float = 0.0  # when the last request completed or failed
    cpu_s: float = 0.0  # CPU time of this client

    async def execute(self) -> None:
        """Warm up, then send all requests and wait for the last answer."""
        try:
            for job in self.workload.warm_up(self.limits.warm_up):
                self.progress("warming up", 0, self.workload.requests)
                await self._warm_up(job)
            await self._measure()
            self._report()
            if self.monitor is not None:
                self.server_results = await read_metrics(self.target.client)
        finally:
            self.target.client.close()

    async def _measure(self) -> None:
        if self.monitor is not None:
            self.monitor.begin()
        self.start = self.last = time.perf_counter()
        used = time.process_time()
        ticker = asyncio.create_task(self._report_periodically())
        try:
            await self._send_all()
        finally:
            ticker.cancel()
            self.cpu_s = time.process_time() - used
            if self.monitor is not None:
                self.monitor.end()

    async def _warm_up(self, job: Job) -> None:
        try:
            async with asyncio.timeout(self.limits.timeout):
                await self.target.request(job, Answer())
        except TimeoutError:
            raise ServingError(f"no answer to the warm-up request within {self.limits.timeout:g} s") from None
        except RequestFailedError as error:
            raise ServingError(f"the warm-up request failed ({error.kind}): {error}") from None

    async def _send_all(self) -> None:
        slots = asyncio.Semaphore(self.limits.concurrency)
        async with asyncio.TaskGroup() as answers:
            for job in self.workload.jobs():
                await self._wait_until(job.arrival)
                await slots.acquire()
                if time.perf_counter() - self.start >= self.limits.duration:
                    break
                self.sent += 1
                answers.create_task(self._request(job, slots))

    async def _wait_until(self, arrival: float | None) -> None:
        due = self.start if arrival is None else min(self.start + arrival, self.start + self.limits.duration)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))

    async def _request(self, job: Job, slots: asyncio.Semaphore) -> None:
        sent, answer = time.perf_counter(), Answer()
        self.in_flight[job.index] = answer
        try:
            async with asyncio.timeout(self.limits.timeout):
                await self.target.request(job, answer)
            self.totals.add_answer(job, answer, self.start, sent)
            self.last = max(self.last, answer.ended)
        except TimeoutError:
            self._count_failure("timeout", f"no complete answer within {self.limits.timeout:g} s")
        except RequestFailedError as error:
            self._count_failure(error.kind, str(error))
        finally:
            del self.in_flight[job.index]
            slots.release()

    def _count_failure(self, kind: str, detail: str) -> None:
        self.totals.add_failure(kind, detail)
        self.last = max(self.last, time.perf_counter())

    async def _report_periodically(self) -> None:
        while True:
            self._report()
            await asyncio.sleep(REFRESH_S)

    def _report(self) -> None:
        totals, requests = self.totals, self.workload.requests
        passed = max(time.perf_counter() - self.start, 1e-9)
        done = totals.completed + totals.errors.total()
        by_time = math.isfinite(self.limits.duration)
        tokens = totals.output_tokens + sum(len(answer.arrivals) for answer in self.in_flight.values())
        parts = [
            f"{done} done" if by_time else f"{done}/{requests} done",
            f"{len(self.in_flight)} in flight",
            f"{tokens / passed:.0f} tok/s",
            f"{totals.errors.total()} errors",
        ]
        part = max(done / requests, min(1.0, passed / self.limits.duration))
        self.progress(" · ".join(parts), part * requests, requests)


def connect(make_target: Callable[[str], Target], name: str | None, timeout: float) -> Target:
    """Check that the server answers; without a name, take the first model that it lists."""
    probe = make_target(name or "")
    listed: list[str] = []
    try:
        listed = asyncio.run(_list_models(probe, min(timeout, 30.0)))
    except TimeoutError:
        raise ServingError(f"{probe.client.address} does not answer: is it the right port?") from None
    except RequestFailedError as error:
        if name is None or not error.kind.startswith("http ") or error.kind in ("http 401", "http 403"):
            where = "" if error.kind == "connect" else f"{probe.client.address}/models: {error.kind}: "
            raise ServingError(f"{where}{error}{HINTS.get(error.kind, '')}") from None
    if name is None and not listed:
        raise ServingError(f"{probe.client.address} lists no model: name one with --model")
    return make_target(name or listed[0])


async def _list_models(probe: Target, seconds: float) -> list[str]:
    try:
        async with asyncio.timeout(seconds):
            return await list_models(probe.client)
    finally:
        probe.client.close()


def run(
    recorder: Recorder,
    progress: Progress,
    target: Target,
    workload: Workload,
    limits: Limits,
    monitor: ServerMonitor | None = None,
) -> None:
    """Run the load and observe the server; record the results however it ends."""
    raise_file_limit(min(limits.concurrency, workload.requests))
    recorder.model = {"name": target.model}
    load = Load(target, workload, limits, progress, monitor=monitor)
    try:
        if monitor is not None:
            monitor.open()
        run_event_loop(load.execute())
    finally:
        if monitor is not None:
            monitor.close()
        if load.totals.completed or load.totals.errors:
            _record(recorder, load)


def run_event_loop(act: Coroutine[Any, Any, None]) -> None:
    """Run in the fastest event loop: on a small machine the server lacks the CPU time that the client takes."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(act)


def _record(recorder: Recorder, load: Load) -> None:
    seconds = load.last - load.start
    for result in latencies.make_results(load.totals, seconds):
        recorder.add_result(result)
    if math.isfinite(load.limits.duration) and math.isfinite(load.workload.rate):
        waiting = load.workload.count_arrivals(load.limits.duration) - load.sent
        recorder.add_result(Result.exact("unsent", "requests", max(0, waiting)))
    share = load.cpu_s / max(seconds, 1e-9)
    recorder.add_result(Result.exact("client_processor", "s", load.cpu_s, of_a_core=share))
    for result in [*(load.monitor.results() if load.monitor is not None else ()), *load.server_results]:
        recorder.add_result(result)
    recorder.details.update(latencies.make_details(load.totals, seconds))
    recorder.details["connections"] = load.target.client.opened


def raise_file_limit(connections: int) -> None:
    """Raise the limit of open files; raise an error before the load if it stays too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + OTHER_OPEN_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
        if soft < needed:
            raise ServingError(f"{connections} connections need more open files than {soft}: lower --concurrency")
