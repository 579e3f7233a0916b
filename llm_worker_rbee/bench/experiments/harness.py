"""What the experiments share: a race between functions, the ways to a verdict, and how figures are written in a line.

A verdict is confirmed, refuted or within noise. Each length votes by the rule of its claim; what most lengths say
counts, and where none has a majority the longest decides, for there the work is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import InferenceError
from .. import statistics, timing
from ..format import quantity
from ..results import Recorder, Result

Floats = NDArray[np.float32]
Steps = Callable[[str, float, float], None]
Name = Literal["confirmed", "refuted", "within noise"]
WORTH = 0.10  # a gain over this is worth a change
QUICK = timing.Plan(seconds=0.8, fewest=20, most=60, warm_up=0.1)
THOROUGH = timing.Plan(seconds=2.0, fewest=30, most=100, warm_up=0.3)


class Verdict(NamedTuple):
    """What came out, in one line that is never wrapped."""

    claim: str
    verdict: Name
    line: str

    @staticmethod
    def of(claim: str, verdict: Name, told: str) -> Verdict:
        """`claim 3a: refuted - cached masks ...`."""
        return Verdict(claim, verdict, f"claim {claim}: {verdict} - {told}")


class Finding(NamedTuple):
    """The verdict with the table behind it: the first row is the header."""

    verdict: Verdict
    table: list[list[str]]


class Shape(NamedTuple):
    """Of the layers under test: those of the benchmark suite in CLAIMS, and the MLP that goes with them."""

    d_model: int = 4096
    n_heads: int = 32
    head_dim: int = 128
    d_ff: int = 11008


@dataclass(slots=True)
class Lab:
    """What an experiment works with."""

    recorder: Recorder
    steps: Steps
    model: Path
    thorough: bool = False
    plan: timing.Plan = QUICK
    shape: Shape = field(default_factory=Shape)
    only_lengths: tuple[int, ...] = ()  # in place of the experiment's own
    claim: str = ""
    place: tuple[int, int] = (0, 1)  # this experiment's number, of how many
    races: int = 0  # of this experiment, until now

    def lengths(self, quick: Sequence[int], more: Sequence[int] = ()) -> tuple[int, ...]:
        """The lengths to measure; `more` are those of a thorough run."""
        return self.only_lengths or tuple(quick) + (tuple(more) if self.thorough else ())

    def tell(self, what: str, part: float) -> None:
        """Progress: nobody knows how many races an experiment runs, so each takes a quarter of what is left."""
        number, total = self.place
        self.steps(f"claim {self.claim}: {what}", number + 1 - 0.75 ** (self.races + part), total)

    def race(
        self, length: int | str, functions: Mapping[str, timing.Function], **fields: Any
    ) -> dict[str, Sequence[float]]:
        """Measure functions in turn; seconds a call of each. Results are `claim1/modules/32`."""
        self.tell(f"{length}", 0)
        taken = timing.measure(list(functions.values()), self.plan, lambda part: self.tell(f"{length}", part))
        self.races += 1
        for name, one in zip(functions, taken, strict=True):
            more = {**fields.get(name, {}), "iterations": one.iterations}
            self.recorder.put(Result.of(f"claim{self.claim}/{name}/{length}", "s", one.samples, **more))
        return {name: one.samples for name, one in zip(functions, taken, strict=True)}


def same(one: Floats, other: Floats, tolerance: float, what: str) -> None:
    """Two sides that do not compute the same cannot race."""
    gap = float(np.max(np.abs(one - other), initial=0.0)) if one.shape == other.shape else np.inf
    if not gap <= tolerance:
        raise InferenceError(f"{what}: the two sides of the experiment differ by {gap:.3g}, over {tolerance:g}")


def vote_faster(change: statistics.Change) -> Name:
    """For "B is faster than A": outside the noise, one way or the other."""
    names: dict[str, Name] = {"improved": "confirmed", "regressed": "refuted", "within noise": "within noise"}
    return names[change.verdict]


def vote_saves(change: statistics.Change, worth: float = WORTH) -> Name:
    """For "B pays": it saves more than is worth a change; refuted where the interval says that it does not."""
    if change.change <= -worth and change.high < 0:
        return "confirmed"
    return "refuted" if change.low > -worth else "within noise"


def vote_times(change: statistics.Change, wanted: float) -> Name:
    """For "B is so many times as fast": the whole interval must be on one side."""
    low, _, high = times(change)
    return "confirmed" if low >= wanted else "refuted" if high < wanted else "within noise"


def times(change: statistics.Change) -> tuple[float, float, float]:
    """How many times as fast: (low, middle, high)."""
    low, middle, high = (1 / (1 + x) if x > -1 else np.inf for x in (change.high, change.change, change.low))
    return low, middle, high


def most(votes: Sequence[Name]) -> Name:
    """What most lengths say, or the longest where none has a majority."""
    name, count = Counter(votes).most_common(1)[0]
    return name if 2 * count > len(votes) else votes[-1]


def in_percent(change: statistics.Change) -> str:
    """`-2.1% (99% interval -3.0% to -1.2%)`."""
    return f"{change.change:+.1%} (99% interval {change.low:+.1%} to {change.high:+.1%})"


def in_times(change: statistics.Change) -> str:
    """`2.10 times (99% interval 2.01 to 2.20)`."""
    low, middle, high = times(change)
    return f"{middle:.2f} times (99% interval {low:.2f} to {high:.2f})"


def by_length(changes: Mapping[int, statistics.Change], write: Callable[[statistics.Change], str] = in_percent) -> str:
    """`1 token +0.3% (...), 8 tokens ...`."""
    return ", ".join(f"{n} token{'s' * (n != 1)} {write(change)}" for n, change in changes.items())


def figure(samples: Sequence[float]) -> str:
    """The estimate of samples of seconds, for a table."""
    return quantity(statistics.estimate(samples).value, "s")


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Floats:
    """Random values; large arrays repeat a smaller draw, whose length shares no factor with usual widths."""
    count = int(np.prod(shape))
    drawn = rng.standard_normal(min(count, 1_000_003), dtype=np.float32) * np.float32(scale)
    return np.resize(drawn, count).reshape(shape)
