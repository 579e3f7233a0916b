"""HTTP load on any OpenAI-compatible server: arrivals at a rate or at a concurrency, answers streamed.

Arrivals are fixed before the run: a slow server cannot delay them, and the time that a request waits here for a free
connection is part of its latency from arrival (`queue_delay`, `*_from_arrival`). Latencies without that suffix begin
when a request is sent, connecting included. Intervals are bootstrapped over requests: a request drawn twice counts with
all its inter-token latencies twice, since the latencies of one answer are alike.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_worker_rbee import machine
from llm_worker_rbee.progress import StepProgress

from . import statistics
from .http_client import Answer, RequestFailedError, Target, list_models, run_event_loop
from .results import Recorder, Result
from .server_process import ServerMonitor, ServingError, read_metrics
from .workload import Job, Workload

MAX_IN_FLIGHT = 4096
REFRESH_S = 0.2
OTHER_OPEN_FILES = 64  # other than connections
HINTS = {
    "connect": ": is the server running there?",
    "http 401": ": give its key with --api-key",
    "http 404": ": is it the right path? --model NAME goes without the list",
}
STATISTICS = {"mean": None, "median": 0.5, "p95": 0.95, "p99": 0.99}  # the mean comes first
MAX_ITLS = 1_000_000
MAX_SAVED_VALUES = 2_000  # of a latency
MAX_RESAMPLED_VALUES = 20_000_000  # fewer resamples of very many values
MIN_RESAMPLES = 200
BIN_S, SLICES = 0.1, 20
MAX_ERROR_EXAMPLES = 3  # of each kind
Floats = NDArray[np.float64]


@dataclass(slots=True)
class InterTokenLatencies:
    """Seconds between deltas, and the request that each belongs to: a reservoir sample."""

    values: array[float] = field(default_factory=lambda: array("d"))
    owners: array[int] = field(default_factory=lambda: array("q"))
    seen: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(20261115))

    def add(self, value: float, owner: int) -> None:
        """Add a value, in place of another if the reservoir is full."""
        self.seen += 1
        if len(self.values) < MAX_ITLS:
            self.values.append(value)
            self.owners.append(owner)
        elif (place := int(self.rng.integers(self.seen))) < MAX_ITLS:
            self.values[place], self.owners[place] = value, owner


@dataclass(slots=True)
class LoadStatistics:
    """Counts and latencies so far. A failed request is counted by its kind and nowhere else."""

    latencies: dict[str, array[float]] = field(default_factory=dict)
    itls: InterTokenLatencies = field(default_factory=InterTokenLatencies)
    completed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    events: int = 0
    counted: Counter[str] = field(default_factory=Counter)  # answers by the source of their token count
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    ends: array[float] = field(default_factory=lambda: array("d"))  # seconds after the start
    deltas: Counter[int] = field(default_factory=Counter)  # with text, by the number of their bin of BIN_S

    def add_answer(self, job: Job, answer: Answer, start: float, sent: float) -> None:
        """Add a complete answer; times are clock readings, `start` is when the run began."""
        first = answer.arrivals[0] if answer.arrivals else answer.ended
        tokens = len(answer.arrivals) if answer.output_tokens is None else answer.output_tokens
        latencies = {"ttft": first - sent, "e2e": answer.ended - sent}
        if tokens > 1:
            latencies["tpot"] = (answer.ended - first) / (tokens - 1)
        if job.arrival is not None:
            due = start + job.arrival
            latencies |= {"queue_delay": sent - due, "ttft_from_arrival": first - due}
            latencies["e2e_from_arrival"] = answer.ended - due
        for name, seconds in latencies.items():
            self.latencies.setdefault(name, array("d")).append(seconds)
        for before, after in zip(answer.arrivals, answer.arrivals[1:], strict=False):
            self.itls.add(after - before, self.completed)
        for arrival in answer.arrivals:
            self.deltas[max(0, int((arrival - start) / BIN_S))] += 1
        self.ends.append(answer.ended - start)
        self.completed += 1
        self.output_tokens += tokens
        self.events += answer.events
        self.prompt_tokens += job.prompt.words if answer.prompt_tokens is None else answer.prompt_tokens
        self.counted["chunks" if answer.output_tokens is None else "usage"] += 1

    def add_failure(self, kind: str, detail: str) -> None:
        self.errors[kind] += 1
        examples = self.examples.setdefault(kind, [])
        if detail not in examples and len(examples) < MAX_ERROR_EXAMPLES:
            examples.append(detail)

    @property
    def counted_by(self) -> str:
        """The source of token counts: the server (`usage`), this client (`chunks`), `both` or `none`."""
        return "both" if len(self.counted) > 1 else next(iter(self.counted), "none")


def make_results(totals: LoadStatistics, seconds: float) -> list[Result]:
    """Return every result of a run of `seconds`."""
    out = _throughput_results(totals, seconds) if totals.completed and seconds > 0 else []
    for name in ("ttft", "tpot", "itl", "e2e", "queue_delay", "ttft_from_arrival", "e2e_from_arrival"):
        values = np.array(totals.itls.values if name == "itl" else totals.latencies.get(name, ()), np.float64)
        owners = np.array(totals.itls.owners, np.int64) if name == "itl" else np.arange(values.size)
        if values.size:
            estimates = summarize(values, owners)
            for which, estimate in estimates.items():
                over = estimate.value / middle if (middle := estimates["median"].value) else None
                fields = {"count": values.size, "over_median": over}
                out.append(Result(f"{name}/{which}", "s", *estimate, fields=fields))
    out.append(Result.exact("completed", "requests", totals.completed, "higher"))
    out.append(Result.exact("errors", "requests", totals.errors.total(), by_kind=dict(totals.errors.most_common())))
    return out


def make_details(totals: LoadStatistics, seconds: float) -> dict[str, Any]:
    """Return the details of a saved run: totals, some thousand latencies, error messages."""
    kept = {**totals.latencies, "itl": totals.itls.values}
    return {
        "duration_s": round(seconds, 6),
        "prompt_tokens": totals.prompt_tokens,
        "output_tokens": totals.output_tokens,
        "counted_by": totals.counted_by,
        "errors": dict(totals.examples),
        "latencies": {name: _evenly_chosen(values) for name, values in kept.items()},
    }


def summarize(values: Floats, owners: NDArray[np.int64]) -> dict[str, statistics.Estimate]:
    """Return mean, median and high percentiles, each with its interval over resampled owners.

    A high percentile lies among the few largest values, which resamples repeat and never exceed: its own spread over
    resamples is too small. So the share of values below it is resampled, and the ends of that interval turned back.
    """
    ordered = np.sort(values)
    plain = {k: float(values.mean() if q is None else np.quantile(ordered, q)) for k, q in STATISTICS.items()}
    distinct, owner = np.unique(owners[np.argsort(values, kind="stable")], return_inverse=True)
    n = distinct.size
    if n < statistics.MIN_SAMPLES:
        return {k: statistics.Estimate(v, float(ordered[0]), float(ordered[-1])) for k, v in plain.items()}
    below = np.searchsorted(ordered, list(plain.values()), side="right")
    out = {}
    for (name, value), column in zip(plain.items(), _resampled(ordered, owner, n, below).T, strict=True):
        ends = statistics.interval(column, n)
        low, high = ends if name == "mean" else np.quantile(ordered, np.clip(ends, 0, 1))
        out[name] = statistics.Estimate(value, min(float(low), value), max(float(high), value))
    return out


def _resampled(ordered: Floats, owner: NDArray[np.int64], n: int, below: NDArray[np.int64]) -> Floats:
    """Return (resamples, statistics): means, shares of the first `below` values; weighted by their owners."""
    rng = np.random.default_rng((20261115, n))
    count = int(np.clip(MAX_RESAMPLED_VALUES // ordered.size, MIN_RESAMPLES, statistics.RESAMPLES))
    out = np.empty((count, len(STATISTICS)))
    for row in out:
        weights = np.bincount(rng.integers(0, n, n), minlength=n)[owner]
        row[:] = np.cumsum(weights)[below - 1] / weights.sum()
        row[0] = weights @ ordered / weights.sum()
    return out


def _throughput_results(totals: LoadStatistics, seconds: float) -> list[Result]:
    """Return counts over the whole time; their spread over its slices gives the interval."""
    bins, counts = (np.array(list(part)) for part in (totals.deltas.keys(), totals.deltas.values()))
    finished = np.histogram(totals.ends, SLICES, (0, seconds))[0]
    pieces = np.histogram(np.minimum((bins + 0.5) * BIN_S, seconds), SLICES, (0, seconds), weights=counts)[0]
    rates = {
        "request_throughput": ("req/s", totals.completed, finished),
        "output_throughput": ("tok/s", totals.output_tokens, pieces),
        "event_throughput": ("events/s", totals.events, pieces),
        "total_token_throughput": ("tok/s", totals.output_tokens + totals.prompt_tokens, pieces),
    }
    out = []
    for name, (unit, total, slices) in rates.items():
        value = total / seconds
        low, high = _relative_interval(slices.astype(np.float64))
        fields = {"counted_by": totals.counted_by} if unit == "tok/s" else {}
        out.append(Result(name, unit, value, low * value, high * value, "higher", fields=fields))
    return out


def _relative_interval(slices: Floats) -> tuple[float, float]:
    """Return the interval of the mean of slices, relative to it."""
    mean = slices.mean()
    if not mean:
        return 1.0, 1.0
    rng = np.random.default_rng(20261115)
    resampled = slices[rng.integers(0, slices.size, (statistics.RESAMPLES, slices.size))].mean(axis=1)
    low, high = statistics.interval(resampled / mean, slices.size)
    return min(low, 1.0), max(high, 1.0)


def _evenly_chosen(values: array[float]) -> list[float]:
    """Return at most MAX_SAVED_VALUES of them, spread evenly over their order."""
    places = np.linspace(0, len(values) - 1, min(len(values), MAX_SAVED_VALUES)).astype(int) if len(values) else ()
    return [float(f"{values[i]:.6g}") for i in places]


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
    progress: StepProgress
    monitor: ServerMonitor | None = None
    totals: LoadStatistics = field(default_factory=LoadStatistics)
    in_flight: dict[int, Answer] = field(default_factory=dict)
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
                self.monitor.results += await read_metrics(self.target.client)
        finally:
            self.target.client.close()

    async def _measure(self) -> None:
        with nullcontext() if self.monitor is None else self.monitor.observe():
            self.start = self.last = time.perf_counter()
            used = time.process_time()
            ticker = asyncio.create_task(self._report_periodically())
            try:
                await self._send_all()
            finally:
                ticker.cancel()
                self.cpu_s = time.process_time() - used

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
                due = self.start + min(job.arrival or 0.0, self.limits.duration)
                while (rest := due - time.perf_counter()) > 0:  # a timer of uvloop may fire early
                    await asyncio.sleep(rest)
                await slots.acquire()
                if time.perf_counter() - self.start >= self.limits.duration:
                    break
                self.sent += 1
                answers.create_task(self._request(job, slots))

    async def _request(self, job: Job, slots: asyncio.Semaphore) -> None:
        sent, answer = time.perf_counter(), Answer()
        self.in_flight[job.index] = answer
        try:
            async with asyncio.timeout(self.limits.timeout):
                await self.target.request(job, answer)
            self.totals.add_answer(job, answer, self.start, sent)
            self.last = max(self.last, answer.ended)
        except (TimeoutError, RequestFailedError) as error:
            late = ("timeout", f"no complete answer within {self.limits.timeout:g} s")
            self.totals.add_failure(*((error.kind, str(error)) if isinstance(error, RequestFailedError) else late))
            self.last = max(self.last, time.perf_counter())
        finally:
            del self.in_flight[job.index]
            slots.release()

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
        counts = f"{done} done" if by_time else f"{done}/{requests} done"
        rate, failed = f"{tokens / passed:.0f} tok/s", f"{totals.errors.total()} errors"
        part = max(done / requests, min(1.0, passed / self.limits.duration))
        text = f"{counts} · {len(self.in_flight)} in flight · {rate} · {failed}"
        self.progress(text, part * requests, requests)


def connect(make_target: Callable[[str], Target], name: str | None, timeout: float) -> Target:
    """Check that the server answers; without a name, take the first model that it lists."""
    probe = make_target(name or "")
    listed: list[str] = []
    try:
        listed = asyncio.run(list_models(probe.client, min(timeout, 30.0)))
    except TimeoutError:
        raise ServingError(f"{probe.client.address} does not answer: is it the right port?") from None
    except RequestFailedError as error:
        if name is None or not error.kind.startswith("http ") or error.kind in ("http 401", "http 403"):
            where = "" if error.kind == "connect" else f"{probe.client.address}/models: {error.kind}: "
            raise ServingError(f"{where}{error}{HINTS.get(error.kind, '')}") from None
    if name is None and not listed:
        raise ServingError(f"{probe.client.address} lists no model: name one with --model")
    return make_target(name or listed[0])


def run(recorder: Recorder, load: Load) -> None:
    """Run the load and observe the server; record the results however it ends."""
    raise_file_limit(min(load.limits.concurrency, load.workload.requests))
    recorder.model = {"name": load.target.model}
    try:
        with load.monitor or nullcontext():
            run_event_loop(load.execute())
    finally:
        if load.totals.completed or load.totals.errors:
            _record(recorder, load)


def _record(recorder: Recorder, load: Load) -> None:
    seconds = load.last - load.start
    for result in make_results(load.totals, seconds):
        recorder.add_result(result)
    if math.isfinite(load.limits.duration) and math.isfinite(load.workload.rate):
        waiting = load.workload.count_arrivals(load.limits.duration) - load.sent
        recorder.add_result(Result.exact("unsent", "requests", max(0, waiting)))
    share = load.cpu_s / max(seconds, 1e-9)
    recorder.add_result(Result.exact("client_processor", "s", load.cpu_s, of_a_core=share))
    for result in load.monitor.results if load.monitor is not None else ():
        recorder.add_result(result)
    recorder.details.update(make_details(load.totals, seconds))
    recorder.details["connections"] = load.target.client.opened


def raise_file_limit(connections: int) -> None:
    """Raise the limit of open files; raise an error before the load if it stays too low."""
    needed = connections + OTHER_OPEN_FILES
    limit = machine.raise_open_files(needed)
    if limit is not None and limit < needed:
        raise ServingError(f"{connections} connections need more open files than {limit}: lower --concurrency")
