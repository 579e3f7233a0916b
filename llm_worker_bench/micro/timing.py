"""Timing functions in turn: seconds per call, over enough calls to exceed the clock's resolution."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .. import ROUNDS

Function = Callable[[], object]
TRIAL_CALLS, MAX_GRAPH_CALLS, GRAPH_S = 10, 500, 0.002
MIN_SAMPLE_S = 0.002  # a shorter sample would measure the loop and the clock


@dataclass(frozen=True, slots=True)
class TimingPlan:
    """How long to measure each function: about `seconds`, within the bounds on samples."""

    seconds: float = 1.0
    min_samples: int = 10
    max_samples: int = 100
    warm_up_s: float = 0.2


@dataclass(frozen=True, slots=True)
class RepeatedCalls:
    """A function that makes several calls and waits for their results: the replay of a CUDA graph."""

    run: Function
    count: int

    def __call__(self) -> object:
        return self.run()


def repeated_calls(function: Function, prepare: Callable[[Function, int], Function]) -> RepeatedCalls:
    """Return so many calls, prepared by the backend, that waiting for the device takes little of the time."""
    trial = RepeatedCalls(prepare(function, TRIAL_CALLS), TRIAL_CALLS)
    seconds = min(seconds_per_call(trial, 1) for _ in range(3))
    count = max(1, min(MAX_GRAPH_CALLS, round(GRAPH_S / seconds)))
    return RepeatedCalls(prepare(function, count), count)


@dataclass(slots=True)
class Measurement:
    """The samples of one function: seconds per call, over enough calls to exceed the clock's resolution."""

    iterations: int
    samples: list[float] = field(default_factory=list)
    calls_each: int = 1  # of an iteration


def measure(
    functions: Sequence[Function], plan: TimingPlan, on_progress: Callable[[float], None] | None = None
) -> list[Measurement]:
    """Sample the functions in turn, so that all have the same noise; the order is reversed every other round.

    Garbage collection is off while samples are taken. `on_progress` gets the fraction done.
    """
    taken = [Measurement(calibrate(function, plan), calls_each=calls_each(function)) for function in functions]
    budget, start = plan.seconds * len(functions), time.perf_counter()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        while True:
            pairs = list(zip(functions, taken, strict=True))
            count = len(taken[0].samples)
            for function, record in reversed(pairs) if count % 2 else pairs:
                record.samples.append(seconds_per_call(function, record.iterations))
            spent = time.perf_counter() - start
            if on_progress is not None:
                on_progress(min(1.0, max(spent / budget if budget else 1.0, count / plan.max_samples)))
            if count + 1 >= plan.max_samples or (spent >= budget and count + 1 >= plan.min_samples):
                return taken
    finally:
        if was_enabled:
            gc.enable()


def seconds_per_call(function: Function, iterations: int) -> float:
    """Return the mean over so many calls; of `RepeatedCalls`, over so many repetitions."""
    clock = time.perf_counter
    start = clock()
    for _ in range(iterations):
        function()
    return (clock() - start) / iterations / calls_each(function)


def calls_each(function: Function) -> int:
    """Return how many calls it makes when it is called."""
    return function.count if isinstance(function, RepeatedCalls) else 1


def calibrate(function: Function, plan: TimingPlan) -> int:
    """Warm up, and return the calls per sample that make it long enough; all samples together should fill the time."""
    iterations, start = 1, time.perf_counter()
    while True:
        took = seconds_per_call(function, iterations) * iterations * calls_each(function)
        if time.perf_counter() - start >= plan.warm_up_s and took >= MIN_SAMPLE_S / 10:
            break
        if took < MIN_SAMPLE_S:
            iterations *= 2
    return max(1, round(iterations * max(MIN_SAMPLE_S, plan.seconds / plan.max_samples) / took))


def round_plan(seconds: float, rounds: int = ROUNDS) -> TimingPlan:
    """Return the plan of one round, so that all rounds of a case together take so long."""
    return TimingPlan(seconds=seconds / rounds, min_samples=2, max_samples=25, warm_up_s=min(0.02, seconds / 5))
