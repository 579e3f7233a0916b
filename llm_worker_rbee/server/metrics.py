"""The Prometheus metrics: counters read from the engine's state on demand, histograms fed by generations.

No process-wide registry is used: one worker, one set. An observation costs one bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..token_engine.protocol import EngineStats, TokenEngine

if TYPE_CHECKING:
    from .batches import BatchService
    from .model_pool import Member

PREFIX = "llm_worker_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
STEP_TIME_COUNTERS = (  # name, help, field of StepTimes
    ("engine_steps", "Steps with a predicted time.", "num_steps"),
    ("step_seconds", "Seconds of these steps.", "measured_s"),
    ("step_predicted_seconds", "Predicted seconds of these steps.", "predicted_s"),
    ("step_prediction_error_seconds", "Sum of absolute differences of measured and predicted.", "error_s"),
)
REQUEST_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """Counts of durations by their upper bounds, in seconds."""

    def __init__(self, name: str, help_text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._help, self._bounds = name, help_text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count a duration, once or several times."""
        self._counts[bisect_left(self._bounds, seconds)] += times
        self.sum += seconds * times

    def family(self) -> Metric:
        """Return the histogram as Prometheus has it."""
        return HistogramMetricFamily(PREFIX + self._name, self._help, buckets=self.buckets(), sum_value=self.sum)

    def buckets(self) -> list[tuple[str, float]]:
        """Return the counts by upper bound: each includes all lower ones."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


class LatencyHistograms:
    """Latencies of generations, observed in the event loop."""

    def __init__(self) -> None:
        self.ttft = Histogram("time_to_first_token_seconds", "From the request to its first token.", REQUEST_BOUNDS)
        self.itl = Histogram("inter_token_latency_seconds", "Between two tokens of a request.", TOKEN_BOUNDS)
        self.e2e = Histogram("e2e_request_latency_seconds", "From the request to its end.", REQUEST_BOUNDS)
        self.queue = Histogram("request_queue_time_seconds", "From the request to its first step.", REQUEST_BOUNDS)
        self.num_tokens = 0

    def observe_first(self, seconds: float, num_tokens: int, queue_s: float) -> None:
        """Record the first tokens of a request; those that come with the very first have no latency."""
        self.num_tokens += num_tokens
        self.ttft.observe(seconds)
        self.queue.observe(max(0.0, queue_s))
        if num_tokens > 1:
            self.itl.observe(0.0, num_tokens - 1)

    def observe_outputs(self, seconds: float, num_tokens: int) -> None:
        """Record tokens that came together, `seconds` after the previous ones."""
        self.num_tokens += num_tokens
        self.itl.observe(seconds / num_tokens, num_tokens)


def chat_families(
    latencies: LatencyHistograms, num_running: int, num_waiting: int, engine: TokenEngine | None
) -> Iterator[Metric]:
    """Yield the metrics of a chat model; `engine` is None until it is loaded."""
    yield _gauge("num_requests_running", "Requests in the running batch.", num_running)
    yield _gauge("num_requests_waiting", "Requests that wait, preempted ones included.", num_waiting)
    yield _counter("generation_tokens", "Output tokens.", latencies.num_tokens)
    yield from (histogram.family() for histogram in (latencies.ttft, latencies.itl, latencies.e2e, latencies.queue))
    if engine is not None:
        yield from _engine_metrics(engine)


def batch_metrics(batches: BatchService | None) -> Iterator[Metric]:
    """Yield the metrics of batches."""
    if batches is not None:
        yield _gauge("batches_open", "Batches that have not ended.", len(batches.open))
        yield _gauge("batch_lines_running", "Lines of batches at work.", batches.num_running)
        yield _gauge(
            "batch_storage_full", "1 while batches wait because nothing can be written.", bool(batches.problem)
        )
        yield _counter("batch_lines_finished", "Lines of batches that have a result on disk.", batches.num_lines)
        yield _counter("batch_lines_failed", "Of these, lines with an error.", batches.num_failed)
        yield _gauge("files_bytes", "Bytes of the files of clients and of results.", batches.store.num_bytes)


def pool_metrics(members: Iterable[Member]) -> list[Metric]:
    """Return the metrics about the models of a pool, loaded or not."""
    states = GaugeMetricFamily(f"{PREFIX}model_state", "1 in the state of a model.", labels=["model", "state"])
    sizes = GaugeMetricFamily(f"{PREFIX}model_memory_bytes", "Planned memory of a model.", labels=["model"])
    loads = CounterMetricFamily(f"{PREFIX}model_loads", "How often a model was loaded.", labels=["model"])
    waiting = GaugeMetricFamily(f"{PREFIX}model_waiting", "Requests that wait for its load.", labels=["model"])
    for member in members:
        states.add_metric([member.name, member.state], 1)
        sizes.add_metric([member.name], member.size_bytes)
        loads.add_metric([member.name], member.num_loads)
        waiting.add_metric([member.name], len(member.waiters))
    return [states, sizes, loads, waiting]


def merge_families(groups: Iterable[tuple[dict[str, str], Iterable[Metric]]]) -> list[Metric]:
    """Return the metrics of several models, each with its name and help once, with the labels of each model."""
    merged: dict[str, Metric] = {}
    for labels, group in groups:
        for family in group:
            samples = [sample._replace(labels={**labels, **sample.labels}) for sample in family.samples]
            empty = Metric(family.name, family.documentation, family.type, family.unit)
            merged.setdefault(family.name, empty).samples.extend(samples)
    return list(merged.values())


def encode_families(families: list[Metric]) -> bytes:
    """Return the text of metrics."""
    return generate_latest(_Collector(families))


class _Collector(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _engine_metrics(engine: TokenEngine) -> Iterator[Metric]:
    stats, info = engine.stats(), engine.info
    yield _gauge("kv_cache_usage_perc", "The part of the KV cache that requests hold, 0 to 1.", stats.kv_cache_usage)
    num_queried = stats.num_queried_tokens if info.engine.prefix_cache else 0
    yield _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", num_queried)
    yield _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.num_hit_tokens)
    if stats.num_state_slots:
        yield _gauge("num_state_slots", "Slots for states in addition to the KV cache.", stats.num_state_slots)
        yield _gauge("num_used_state_slots", "Slots of states that requests hold.", stats.num_used_state_slots)
        yield _gauge("num_snapshots", "States that the prefix cache can find.", stats.num_snapshots)
        yield _counter("snapshot_hits", "Requests that started from a snapshot of a state.", stats.num_snapshot_hits)
    if (disk := stats.kv_disk) is not None:
        yield _counter("kv_disk_read_blocks", "Blocks that were read from --kv-dir.", disk.num_read_blocks)
        yield _counter("kv_disk_written_blocks", "Blocks that were written to it.", disk.num_written_blocks)
        yield _counter("kv_disk_failed_blocks", "Blocks that did not verify: computed again.", disk.num_failed_blocks)
        yield _counter("kv_disk_read_bytes", "Bytes of blocks that were read.", disk.read_bytes)
        yield _counter("kv_disk_written_bytes", "Bytes of blocks that were written.", disk.written_bytes)
        yield _counter("kv_disk_read_seconds", "Seconds of reading and verifying.", disk.read_s)
        yield _counter("kv_disk_evicted_segments", "Files that made room for others.", disk.num_evicted_segments)
        yield _gauge("kv_disk_waiting_blocks", "Blocks that wait to be written.", disk.num_waiting_blocks)
        yield _gauge("kv_ram_blocks", "Blocks of a GPU that the host's memory keeps.", disk.num_ram_blocks)
        yield _counter("kv_ram_read_blocks", "Blocks that came back from there.", disk.num_ram_read_blocks)
        yield _counter("kv_ram_read_bytes", "Bytes of these blocks.", disk.ram_read_bytes)
    yield _counter("num_preemptions", "Requests whose blocks went to other requests.", stats.num_preemptions)
    yield _counter("engine_restarts", "Restarts of an engine that died.", engine.num_restarts)
    num_serving = sum(replica.is_serving for replica in engine.replicas)
    yield _gauge("num_engines_serving", "Engines that serve; less than --replicas while one is restarted.", num_serving)
    paused = "Engines whose speculative decoding is paused: they decode faster without drafts."
    yield _gauge("num_paused_drafters", paused, stats.num_paused_drafters)
    yield _counter("spec_decode_num_draft_tokens", "Tokens that were drafted.", stats.num_drafted_tokens)
    yield _counter("spec_decode_num_accepted_tokens", "Drafted tokens of answers.", stats.num_accepted_tokens)
    yield _counter("prompt_tokens", "Prompt tokens of admitted requests.", stats.num_queried_tokens)
    if stats.device_bytes:
        yield _gauge("device_memory_bytes", "GPU memory that tensors take.", stats.device_bytes)
        yield _gauge("device_graph_bytes", "GPU memory that CUDA graphs take.", stats.graph_bytes)
    yield from _step_time_metrics(stats)
    labels = {"block_size": str(info.engine.block_size), "num_gpu_blocks": str(stats.num_blocks)}
    cache = GaugeMetricFamily(PREFIX + "cache_config_info", "Sizes of the KV cache.", labels=list(labels))
    cache.add_metric(list(labels.values()), 1.0)
    yield cache
    phases = GaugeMetricFamily(PREFIX + "startup_phase_seconds", "Duration of each phase of loading.", labels=["phase"])
    for phase, seconds in info.phases.items():
        phases.add_metric([phase], seconds)
    yield phases


def _step_time_metrics(stats: EngineStats) -> Iterator[Metric]:
    """Yield the seconds of steps, measured and predicted, by kind; and the coefficients of the prediction."""
    for name, help_text, field in STEP_TIME_COUNTERS:
        counter = CounterMetricFamily(PREFIX + name, help_text, labels=["kind"])
        for kind, times in stats.step_times.items():
            counter.add_metric([kind], getattr(times, field))
        yield counter
    if stats.step_time_model is not None:
        terms = GaugeMetricFamily(
            PREFIX + "step_time_model_seconds", "Predicted seconds: of a step, a token, a key read.", labels=["term"]
        )
        for term, seconds in stats.step_time_model._asdict().items():
            terms.add_metric([term], seconds)
        yield terms


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, help_text, value=value)  # the library appends _total
