"""What the experiments share: sides timed in turn, the rules for verdicts, number formats, attention in plain NumPy.

A verdict is confirmed, refuted or within noise. Each length votes by the rule of its claim; the majority decides, and
without one the longest length does: that is where the work is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...backends import reference
from ...backends.ops import AttentionParams, Ints, RopeTable
from ...errors import InferenceError
from ...progress import StepProgress
from .. import statistics
from ..micro import D_FF, HEAD_DIM, HEADS, HIDDEN, Function, TimingPlan, measure
from ..results import Recorder, Result, quantity
from ..statistics import Change

Floats = NDArray[np.float32]
VerdictName = Literal["confirmed", "refuted", "within noise"]
MIN_GAIN = 0.10  # a smaller gain is not worth a change
QUICK = TimingPlan(seconds=0.8, min_samples=20, max_samples=60, warm_up_s=0.1)
THOROUGH = TimingPlan(seconds=2.0, min_samples=30, max_samples=100, warm_up_s=0.3)


class Finding(NamedTuple):
    """The outcome of a claim; `line` is one line and never wrapped: `claim 3a: refuted - cached masks ...`."""

    verdict: VerdictName
    line: str
    table: list[list[str]]  # the first row is the header


class Shape(NamedTuple):
    """The layers under test: those of the suite in CLAIMS, and the MLP that goes with them."""

    d_model: int = HIDDEN
    n_heads: int = HEADS
    head_dim: int = HEAD_DIM
    d_ff: int = D_FF


@dataclass(slots=True)
class Harness:
    """Times the sides of an experiment and records the results."""

    recorder: Recorder
    progress: StepProgress
    model: Path
    thorough: bool = False
    plan: TimingPlan = QUICK
    shape: Shape = field(default_factory=Shape)
    only_lengths: tuple[int, ...] = ()  # in place of the experiment's own
    claim: str = ""
    position: tuple[int, int] = (0, 1)  # index of this experiment, number of experiments
    num_timed: int = 0  # calls of time_sides in this experiment

    def lengths(self, quick: Sequence[int], more: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the lengths to measure; `more` belongs to a thorough run."""
        return self.only_lengths or tuple(quick) + (tuple(more) if self.thorough else ())

    def report_progress(self, what: str, fraction: float) -> None:
        """The number of measurements is not known in advance, so each takes a quarter of what is left."""
        index, total = self.position
        self.progress(f"claim {self.claim}: {what}", index + 1 - 0.75 ** (self.num_timed + fraction), total)

    def time_sides(self, length: int | str, sides: Mapping[str, Function], **fields: Any) -> dict[str, Sequence[float]]:
        """Time functions in turn and return seconds per call of each. Results are named `claim1/modules/32`."""
        self.report_progress(f"{length}", 0)
        taken = measure(list(sides.values()), self.plan, lambda part: self.report_progress(f"{length}", part))
        self.num_timed += 1
        for name, one in zip(sides, taken, strict=True):
            full, more = f"claim{self.claim}/{name}/{length}", {**fields.get(name, {}), "iterations": one.iterations}
            self.recorder.add_result(Result.from_samples(full, "s", one.samples, **more))
        return {name: one.samples for name, one in zip(sides, taken, strict=True)}

    def finding(self, verdict: VerdictName, summary: str, table: list[list[str]]) -> Finding:
        return Finding(verdict, f"claim {self.claim}: {verdict} - {summary}", table)


def require_equal(one: Floats, other: Floats, tolerance: float, what: str) -> None:
    """Raise InferenceError if the two sides of an experiment do not compute the same."""
    gap = float(np.max(np.abs(one - other), initial=0.0)) if one.shape == other.shape else np.inf
    if not gap <= tolerance:
        raise InferenceError(f"{what}: the two sides of the experiment differ by {gap:.3g}, over {tolerance:g}")


def vote_faster(change: Change) -> VerdictName:
    """Judge "B is faster than A": outside the noise, one way or the other."""
    names: dict[str, VerdictName] = {"improved": "confirmed", "regressed": "refuted", "within noise": "within noise"}
    return names[change.verdict]


def vote_saves(change: Change, min_gain: float = MIN_GAIN) -> VerdictName:
    """Judge "B pays": it saves at least `min_gain`; refuted if the interval excludes that."""
    if change.change <= -min_gain and change.high < 0:
        return "confirmed"
    return "refuted" if change.low > -min_gain else "within noise"


def vote_speedup(change: Change, min_speedup: float) -> VerdictName:
    """Judge "B is so many times as fast": the whole interval must be on one side."""
    low, _, high = speedup(change)
    return "confirmed" if low >= min_speedup else "refuted" if high < min_speedup else "within noise"


def speedup(change: Change) -> tuple[float, float, float]:
    """Return how many times as fast: (low, middle, high)."""
    low, middle, high = (1 / (1 + x) if x > -1 else np.inf for x in (change.high, change.change, change.low))
    return low, middle, high


def majority(votes: Sequence[VerdictName]) -> VerdictName:
    """Return what most lengths say, or what the longest says if there is no majority."""
    name, count = Counter(votes).most_common(1)[0]
    return name if 2 * count > len(votes) else votes[-1]


def unanimous(votes: Sequence[VerdictName]) -> VerdictName:
    """Return confirmed if all votes are; one that refutes decides."""
    return "refuted" if "refuted" in votes else "within noise" if "within noise" in votes else "confirmed"


def change_cells(change: Change) -> list[str]:
    """Return the cells under `change` and `99% interval`."""
    return [f"{change.change:+.1%}", f"{change.low:+.1%} to {change.high:+.1%}"]


def format_change(change: Change) -> str:
    """`-2.1% (99% interval -3.0% to -1.2%)`."""
    return "{} (99% interval {})".format(*change_cells(change))


def speedup_cells(change: Change) -> list[str]:
    """Return the cells under `times as fast` and `99% interval`."""
    low, middle, high = speedup(change)
    return [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]


def format_speedup(change: Change) -> str:
    """`2.10 times (99% interval 2.01 to 2.20)`."""
    return "{} times (99% interval {})".format(*speedup_cells(change))


def format_by_length(changes: Mapping[int, Change], write: Callable[[Change], str] = format_change) -> str:
    """`1 token +0.3% (...), 8 tokens ...`."""
    return ", ".join(f"{n} token{'s' * (n != 1)} {write(change)}" for n, change in changes.items())


def format_time(samples: Sequence[float]) -> str:
    """Return the estimate of samples in seconds, for a table."""
    return quantity(statistics.estimate(samples).value, "s")


def random_array(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Floats:
    """Return normal values; large arrays repeat a draw whose length shares no factor with usual widths."""
    count = int(np.prod(shape))
    drawn = rng.standard_normal(min(count, 1_000_003), dtype=np.float32) * np.float32(scale)
    return np.resize(drawn, count).reshape(shape)


class KVBuffers(NamedTuple):
    """Contiguous keys and values of one layer, allocated once: (capacity, kv_heads, head_dim)."""

    k: Floats
    v: Floats

    @staticmethod
    def zeros(capacity: int, kv_heads: int, head_dim: int) -> KVBuffers:
        return KVBuffers(*(np.zeros((capacity, kv_heads, head_dim), np.float32) for _ in range(2)))


def rope_tables(table: RopeTable, start: int, end: int) -> tuple[Floats, Floats]:
    """Return cos and sin at each position: (T, 1, half)."""
    angle = np.arange(start, end, dtype=np.float32)[:, None, None] * table.inv_freq
    return np.float32(table.scale) * np.cos(angle), np.float32(table.scale) * np.sin(angle)


def additive_mask(length: int, queries: Ints | None = None) -> Floats:
    """Return 0 where a query may attend and minus infinity elsewhere: (queries, length); queries default to all."""
    keys = np.arange(length)
    seen = reference.causal_mask(keys if queries is None else queries, keys)
    return np.where(seen, np.float32(0), np.float32(-np.inf))


def masked_attention(q: Floats, k: Floats, v: Floats, mask: Floats, params: AttentionParams) -> Floats:
    """Attend with a materialised mask: q (T, heads, dim) over k and v (S, kv_heads, dim)."""
    length, kv_heads = k.shape[:2]
    scores = reference.attention_scores(q.transpose(1, 0, 2), k.transpose(1, 0, 2), params)
    scores += mask
    mixed = reference.softmax(scores).reshape(kv_heads, -1, length) @ v.transpose(1, 0, 2)
    return mixed.reshape(q.shape[1], -1, q.shape[2]).transpose(1, 0, 2)
