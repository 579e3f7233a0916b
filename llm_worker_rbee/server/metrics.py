"""What a server tells Prometheus: counters read from the engine's books when asked, histograms fed by answers.

No registry of the process is used: one worker, one set. Observing costs a bisection; the text is made on demand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

if TYPE_CHECKING:
    from .worker import Worker

PREFIX = "llm_worker_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """How often a duration fell under each bound."""

    def __init__(self, name: str, told: str, bounds: tuple[float, ...]) -> None:
        self._name, self._told, self._bounds = name, told, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Once, or several times the same."""
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._sum += seconds * times

    def family(self) -> Metric:
        """As Prometheus has it: counts that include all lower ones."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(PREFIX + self._name, self._told, buckets=buckets, sum_value=self._sum)


class Observed:
    """What answers tell of themselves, all of it in the event loop."""

    def __init__(self) -> None:
        self.first_token = Histogram("time_to_first_token_seconds", "From the request to its first token.", LONG)
        self.between = Histogram("inter_token_latency_seconds", "Between two tokens of an answer.", SHORT)
        self.whole = Histogram("e2e_request_latency_seconds", "From the request to its end.", LONG)
        self.queue = Histogram("request_queue_time_seconds", "From the request to its first step.", LONG)
        self.num_tokens = 0

    def outputs(self, seconds: float, count: int) -> None:
        """Tokens that came together, so long after those before."""
        self.num_tokens += count
        self.between.observe(seconds / count, count)

    def first(self, seconds: float, count: int, queued: float) -> None:
        """The first ones; what came with the very first came at once."""
        self.num_tokens += count
        self.first_token.observe(seconds)
        self.queue.observe(max(0.0, queued))
        if count > 1:
            self.between.observe(0.0, count - 1)


def exposition(worker: Worker) -> bytes:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(worker))
    return generate_latest(registry)


class _Collector:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        worker, observed = self._worker, self._worker.observed
        load = worker.admission.load
        yield _gauge("num_requests_running", "Requests being computed.", load.running)
        yield _gauge("num_requests_waiting", "Requests that are not computed yet, or not at present.", load.waiting)
        yield _counter("generation_tokens", "Tokens generated.", observed.num_tokens)
        for histogram in (observed.first_token, observed.between, observed.whole, observed.queue):
            yield histogram.family()
        if worker.is_loaded:
            yield from _of_engine(worker)


def _of_engine(worker: Worker) -> Iterator[Metric]:
    scheduler = worker.loaded.engine.scheduler
    counts, pool = scheduler.stats, scheduler.pool
    used = 1 - pool.num_free / pool.n_blocks
    yield _gauge("kv_cache_usage_perc", "The part of the KV cache that requests hold, 0 to 1.", used)
    told = "Tokens of prompts {} in the prefix cache."
    queried = counts.num_queried_tokens if pool.caching else 0
    yield _counter("prefix_cache_queries", told.format("looked up"), queried)
    yield _counter("prefix_cache_hits", told.format("found"), counts.num_hit_tokens)
    yield _counter("num_preemptions", "Requests that gave their blocks to others.", counts.num_preemptions)
    yield _counter("prompt_tokens", "Tokens of prompts taken on.", counts.num_queried_tokens)
    if worker.loaded.device_bytes:
        yield _gauge("device_memory_bytes", "Memory of the GPU that tensors take.", worker.loaded.device_bytes)
        yield _gauge("device_graph_bytes", "Memory of the GPU that CUDA graphs take.", worker.loaded.graph_bytes)
    phases = GaugeMetricFamily(
        PREFIX + "startup_phase_seconds", "How long each part of loading took.", labels=["phase"]
    )
    for phase, seconds in worker.loaded.phases.items():
        phases.add_metric([phase], seconds)
    yield phases


def _gauge(name: str, told: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, told, value=value)


def _counter(name: str, told: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, told, value=value)  # _total is added
