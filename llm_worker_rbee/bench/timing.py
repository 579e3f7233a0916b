"""The stopwatch: warm-up, calibrated iterations, samples; several functions in turn, so that noise falls on all alike.

A sample is the time of one call, taken over as many calls as make it longer than the clock's grain. The collector of
garbage rests while a sample is taken.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Function = Callable[[], object]
SAMPLE_S = 0.002  # a shorter sample would measure the loop and the clock


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to measure each function: at least `fewest` samples, at most `most`, about `seconds` in between."""

    seconds: float = 1.0
    fewest: int = 10
    most: int = 100
    warm_up: float = 0.2


@dataclass(slots=True)
class Measured:
    """What was taken of one function, in seconds a call."""

    iterations: int
    samples: list[float] = field(default_factory=list)


def measure(functions: Sequence[Function], plan: Plan, tick: Callable[[float], None] | None = None) -> list[Measured]:
    """Samples of each function, taken in turn; the order is reversed every other round.

    `tick` hears which part of the time is over. Ctrl-C ends the measuring as any exception does.
    """
    taken = [Measured(calibrate(function, plan)) for function in functions]
    budget, start = plan.seconds * len(functions), time.perf_counter()
    was_on = gc.isenabled()
    gc.disable()
    try:
        while True:
            pairs = list(zip(functions, taken, strict=True))
            count = len(taken[0].samples)
            for function, one in reversed(pairs) if count % 2 else pairs:
                one.samples.append(sample(function, one.iterations))
            spent = time.perf_counter() - start
            if tick is not None:
                tick(min(1.0, max(spent / budget if budget else 1.0, count / plan.most)))
            if count + 1 >= plan.most or (spent >= budget and count + 1 >= plan.fewest):
                return taken
    finally:
        if was_on:
            gc.enable()


def sample(function: Function, iterations: int) -> float:
    """Seconds a call, over so many calls."""
    clock = time.perf_counter
    start = clock()
    for _ in range(iterations):
        function()
    return (clock() - start) / iterations


def calibrate(function: Function, plan: Plan) -> int:
    """Warm up, and find how many calls make a sample long enough; all samples together should fill the time."""
    iterations, start = 1, time.perf_counter()
    while True:
        took = sample(function, iterations) * iterations
        spent = time.perf_counter() - start
        if spent >= plan.warm_up and took >= SAMPLE_S / 10:
            break
        if took < SAMPLE_S:
            iterations *= 2
    wanted = max(SAMPLE_S, plan.seconds / plan.most)
    return max(1, round(iterations * wanted / took))
