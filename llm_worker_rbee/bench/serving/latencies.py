"""The tally of a load run, and the figures it gives: throughput, latencies with intervals, errors by kind.

Intervals are bootstrap ones over requests: a request drawn twice counts with all its gaps between tokens twice, since
gaps of one answer resemble each other. Of very many gaps a seeded, uniform choice is kept, so that memory has a bound.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import statistics
from ..results import Result
from ..workload import Job
from .openai_client import Answer

STATISTICS = {"mean": None, "median": 0.5, "p95": 0.95, "p99": 0.99}  # the mean comes first
MOST_GAPS = 1_000_000
MOST_SHOWN = 2_000  # values of a latency that a saved run keeps
RESAMPLED_VALUES = 20_000_000  # resamples become fewer where there are very many values
FEWEST_RESAMPLES = 200
BIN_S, SLICES = 0.1, 20
EXAMPLES = 3  # of each kind of error

Floats = NDArray[np.float64]


def _doubles() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Gaps:
    """Time between pieces of text: values, and the request that each belongs to."""

    values: array[float] = field(default_factory=_doubles)
    owners: array[int] = field(default_factory=lambda: array("q"))
    seen: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(20261115))

    def add(self, value: float, owner: int) -> None:
        """Keep it, in place of another where there is no more room."""
        self.seen += 1
        if len(self.values) < MOST_GAPS:
            self.values.append(value)
            self.owners.append(owner)
        elif (place := int(self.rng.integers(self.seen))) < MOST_GAPS:
            self.values[place], self.owners[place] = value, owner


@dataclass(slots=True)
class Tally:
    """What requests have given so far. A failed one is counted by its kind and nowhere else."""

    latencies: dict[str, array[float]] = field(default_factory=dict)
    gaps: Gaps = field(default_factory=Gaps)
    completed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    events: int = 0
    counted: Counter[str] = field(default_factory=Counter)  # answers by who counted their tokens
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    ends: array[float] = field(default_factory=_doubles)  # seconds after the start
    pieces: array[int] = field(default_factory=lambda: array("q"))  # of text, in bins of BIN_S

    def complete(self, job: Job, answer: Answer, start: float, sent: float) -> None:
        """Take a whole answer; times are clock readings, `start` that of the run."""
        first = answer.arrivals[0] if answer.arrivals else answer.ended
        tokens = len(answer.arrivals) if answer.output_tokens is None else answer.output_tokens
        self._add("ttft", first - sent)
        self._add("e2e", answer.ended - sent)
        if tokens > 1:
            self._add("tpot", (answer.ended - first) / (tokens - 1))
        if job.arrival is not None:
            due = start + job.arrival
            self._add("queue_delay", sent - due)
            self._add("ttft_from_arrival", first - due)
            self._add("e2e_from_arrival", answer.ended - due)
        for before, after in zip(answer.arrivals, answer.arrivals[1:], strict=False):
            self.gaps.add(after - before, self.completed)
        for arrival in answer.arrivals:
            self._count_piece(arrival - start)
        self.ends.append(answer.ended - start)
        self.completed += 1
        self.output_tokens += tokens
        self.events += answer.events
        self.prompt_tokens += job.prompt.words if answer.prompt_tokens is None else answer.prompt_tokens
        self.counted["chunks" if answer.output_tokens is None else "usage"] += 1

    def fail(self, kind: str, detail: str) -> None:
        """Take a failure."""
        self.errors[kind] += 1
        known = self.examples.setdefault(kind, [])
        if detail not in known and len(known) < EXAMPLES:
            known.append(detail)

    def _add(self, name: str, seconds: float) -> None:
        self.latencies.setdefault(name, _doubles()).append(seconds)

    def _count_piece(self, seconds: float) -> None:
        place = max(0, int(seconds / BIN_S))
        while len(self.pieces) <= place:
            self.pieces.append(0)
        self.pieces[place] += 1

    @property
    def counted_by(self) -> str:
        """Who counted the tokens: the server (usage), we (chunks), or some of each (both)."""
        return "both" if len(self.counted) > 1 else next(iter(self.counted), "nobody")


def results(tally: Tally, seconds: float) -> list[Result]:
    """Every figure of the run, which lasted so long."""
    made = _throughputs(tally, seconds) if tally.completed and seconds > 0 else []
    for name in ("ttft", "tpot", "itl", "e2e", "queue_delay", "ttft_from_arrival", "e2e_from_arrival"):
        values = np.array(tally.gaps.values if name == "itl" else tally.latencies.get(name, ()), np.float64)
        owners = np.array(tally.gaps.owners, np.int64) if name == "itl" else np.arange(values.size)
        if values.size:
            estimates = summarise(values, owners)
            for which, estimate in estimates.items():
                over = estimate.value / middle if (middle := estimates["median"].value) else None
                fields = {"count": values.size, "over_median": over}
                made.append(Result(f"{name}/{which}", "s", *estimate, fields=fields))
    made.append(Result.exact("completed", "requests", tally.completed, "higher"))
    made.append(Result.exact("errors", "requests", tally.errors.total(), by_kind=dict(tally.errors.most_common())))
    return made


def details(tally: Tally, seconds: float) -> dict[str, Any]:
    """What a saved run keeps beside the figures: totals, a few thousand latencies, what errors said."""
    kept = {**tally.latencies, "itl": tally.gaps.values}
    return {
        "duration_s": round(seconds, 6),
        "prompt_tokens": tally.prompt_tokens,
        "output_tokens": tally.output_tokens,
        "counted_by": tally.counted_by,
        "errors": dict(tally.examples),
        "latencies": {name: _chosen(values) for name, values in kept.items()},
    }


def summarise(values: Floats, owners: NDArray[np.int64]) -> dict[str, statistics.Estimate]:
    """Mean, median and high percentiles, each with its interval over resampled owners.

    A high percentile lies among the few largest values, which resamples repeat and never exceed: its own spread over
    resamples is too small. So the share of values below it is resampled, and the ends of that interval turned back.
    """
    ordered = np.sort(values)
    plain = {k: float(values.mean() if q is None else np.quantile(ordered, q)) for k, q in STATISTICS.items()}
    known, owner = np.unique(owners[np.argsort(values, kind="stable")], return_inverse=True)
    n = known.size
    if n < statistics.MIN_SAMPLES:
        return {k: statistics.Estimate(v, float(ordered[0]), float(ordered[-1])) for k, v in plain.items()}
    below = np.searchsorted(ordered, list(plain.values()), side="right")
    made = {}
    for (name, value), column in zip(plain.items(), _resampled(ordered, owner, n, below).T, strict=True):
        ends = statistics.interval(column, n)
        low, high = ends if name == "mean" else np.quantile(ordered, np.clip(ends, 0, 1))
        made[name] = statistics.Estimate(value, min(float(low), value), max(float(high), value))
    return made


def _resampled(ordered: Floats, owner: NDArray[np.int64], n: int, below: NDArray[np.int64]) -> Floats:
    """(resamples, statistics): means, and shares of the first `below` values; each weighs as its owner is drawn."""
    rng = np.random.default_rng((20261115, n))
    count = int(np.clip(RESAMPLED_VALUES // ordered.size, FEWEST_RESAMPLES, statistics.RESAMPLES))
    made = np.empty((count, len(STATISTICS)))
    for row in made:
        weights = np.bincount(rng.integers(0, n, n), minlength=n)[owner]
        row[:] = np.cumsum(weights)[below - 1] / weights.sum()
        row[0] = weights @ ordered / weights.sum()
    return made


def _throughputs(tally: Tally, seconds: float) -> list[Result]:
    """Whole counts over the whole time; how steady they were in its slices gives the interval."""
    bins = (np.arange(len(tally.pieces)) + 0.5) * BIN_S
    finished = np.histogram(tally.ends, SLICES, (0, seconds))[0]
    pieces = np.histogram(np.minimum(bins, seconds), SLICES, (0, seconds), weights=np.array(tally.pieces))[0]
    totals = {
        "request_throughput": ("req/s", tally.completed, finished),
        "output_throughput": ("tok/s", tally.output_tokens, pieces),
        "event_throughput": ("events/s", tally.events, pieces),
        "total_token_throughput": ("tok/s", tally.output_tokens + tally.prompt_tokens, pieces),
    }
    made = []
    for name, (unit, total, slices) in totals.items():
        value = total / seconds
        low, high = _steadiness(slices.astype(np.float64))
        fields = {"counted_by": tally.counted_by} if unit == "tok/s" else {}
        made.append(Result(name, unit, value, low * value, high * value, "higher", fields=fields))
    return made


def _steadiness(slices: Floats) -> tuple[float, float]:
    """The interval of the mean of slices, as a part of it."""
    mean = slices.mean()
    if not mean:
        return 1.0, 1.0
    rng = np.random.default_rng(20261115)
    resampled = slices[rng.integers(0, slices.size, (statistics.RESAMPLES, slices.size))].mean(axis=1)
    low, high = statistics.interval(resampled / mean, slices.size)
    return min(low, 1.0), max(high, 1.0)


def _chosen(values: array[float]) -> list[float]:
    """At most MOST_SHOWN of them, spread evenly over the order in which they came."""
    places = np.linspace(0, len(values) - 1, min(len(values), MOST_SHOWN)).astype(int) if len(values) else ()
    return [float(f"{values[i]:.6g}") for i in places]
