"""Common parts of the experiments: sides timed in turn, votes, verdicts per backend and over all, number formats.

A comparison votes by the rule of its claim. The majority of the lengths decides for decode and for prefill, and without
one the longest length does: that is where the work is. Decode and prefill together decide the verdict of a backend, the
backends together decide the verdict of the claim; where they differ it is `mixed`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_worker_bench import statistics
from llm_worker_bench.micro import D_FF, HEAD_DIM, HEADS, HIDDEN, Function, TimingPlan, measure
from llm_worker_bench.results import Recorder, Result, quantity
from llm_worker_bench.statistics import Change
from llm_worker_rbee.errors import InferenceError
from llm_worker_rbee.progress import StepProgress

from .targets import Target, Timed, to_numpy

Floats = NDArray[np.float32]
Samples = Sequence[float]
VerdictName = Literal["confirmed", "refuted", "within noise", "mixed", "not judged"]
MIN_GAIN = 0.10  # a smaller gain is not worth a change
QUICK = TimingPlan(seconds=0.35, min_samples=10, max_samples=60, warm_up_s=0.05)
THOROUGH = TimingPlan(seconds=2.0, min_samples=30, max_samples=100, warm_up_s=0.3)
SPEED_SIZE, SPEED_REPEATS = 256, 100  # of the product whose time is the machine's speed
MAX_DRIFT = 0.10  # of the machine's speed during a run


class Step(NamedTuple):
    """What a model computes at once: a prompt of `length` tokens, or one token after so many."""

    phase: Literal["decode", "prefill"]
    length: int

    @property
    def start(self) -> int:
        return self.length if self.phase == "decode" else 0

    @property
    def tokens(self) -> int:
        return 1 if self.phase == "decode" else self.length

    @property
    def context(self) -> int:
        return self.start + self.tokens

    @property
    def name(self) -> str:
        return f"{self.phase}/{self.length}"

    def __str__(self) -> str:
        joined = "after" if self.phase == "decode" else "of"
        return f"{self.phase} {joined} {self.length} token{'s' * (self.length != 1)}"


class Row(NamedTuple):
    """One comparison and its vote."""

    backend: str
    step: Step
    change: Change
    vote: VerdictName


class Table(NamedTuple):
    """A table of the page; the first row is the header."""

    rows: list[list[str]]
    caption: str = ""


class Finding(NamedTuple):
    """The outcome of a claim. `backends`: the verdict of each with its `phases` and a `summary`."""

    verdict: VerdictName
    summary: str
    tables: list[Table]
    backends: dict[str, dict[str, Any]] = {}  # noqa: RUF012


class Shape(NamedTuple):
    """The layers under test: the layers of the suite in CLAIMS, and the MLP that goes with them."""

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
    targets: tuple[Target, ...]
    thorough: bool = False
    plan: TimingPlan = QUICK
    shape: Shape = field(default_factory=Shape)
    only_lengths: tuple[int, ...] = ()  # in place of the experiment's own
    claim: str = ""
    position: tuple[int, int] = (0, 1)  # index of this experiment, number of experiments
    num_timed: int = 0  # calls of time_sides in this experiment
    measured: dict[str, Any] = field(default_factory=dict)  # what several claims are judged by

    @property
    def kernels(self) -> list[Target]:
        """The backends other than the reference."""
        return [target for target in self.targets if not target.is_reference]

    @property
    def reference(self) -> Target | None:
        return next((target for target in self.targets if target.is_reference), None)

    def lengths(self, quick: Sequence[int], more: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the lengths to measure; `more` belongs to a thorough run."""
        return self.only_lengths or tuple(quick) + (tuple(more) if self.thorough else ())

    def steps(self, decode: Sequence[int], prefill: Sequence[int], more: Sequence[int] = ()) -> list[Step]:
        """Return the steps to measure; `more` are lengths of both in a thorough run."""
        found = [Step("decode", n) for n in self.lengths(decode, more)]
        return found + [Step("prefill", n) for n in self.lengths(prefill, more)]

    def report_progress(self, what: str, fraction: float) -> None:
        """The number of measurements is not known in advance, so each takes a quarter of what is left."""
        index, total = self.position
        self.progress(f"claim {self.claim}: {what}", index + 1 - 0.75 ** (self.num_timed + fraction), total)

    def time_sides(self, at: str, sides: Mapping[str, Function | Timed], **fields: Any) -> dict[str, Samples]:
        """Time functions in turn and return seconds per call of each.

        The side `cpu/modules` gives a result `claim1/modules/decode/32` of the backend cpu. `fields` of a side, by its
        name, are added to its result.
        """
        self.report_progress(at, 0)
        timed = [side if isinstance(side, Timed) else Timed(side) for side in sides.values()]
        taken = measure([one.function for one in timed], self.plan, lambda part: self.report_progress(at, part))
        self.num_timed += 1
        found: dict[str, Samples] = {}
        for name, (_, calls), one in zip(sides, timed, taken, strict=True):
            found[name] = [sample / calls for sample in one.samples]
            full, more = self.result_name(name, at)
            more |= {**fields.get(name, {}), "iterations": one.iterations * calls}
            self.recorder.add_result(Result.from_samples(full, "s", found[name], **more))
        return found

    def result_name(self, side: str, at: str) -> tuple[str, dict[str, Any]]:
        """Return the name of a result, and its backend as a field if the side begins with one."""
        backend, _, rest = side.partition("/")
        if backend.partition(":")[0] not in [target.name for target in self.targets]:
            return f"claim{self.claim}/{side}/{at}", {}
        return "/".join(filter(None, (f"claim{self.claim}", rest, at))), {"backend": backend}

    def record_exact(self, side: str, at: str, value: float, unit: str = "B") -> None:
        """Record a counted figure, not a timed one."""
        name, fields = self.result_name(side, at)
        self.recorder.add_result(Result.exact(name, unit, value, **fields))

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the value that `make` returned for an earlier claim, or call it now."""
        if key not in self.measured:
            self.measured[key] = make()
        return self.measured[key]


def judge(
    rows: Sequence[Row], tables: list[Table], write: Callable[[Change], str], summary: str = "",
    together: Callable[[Sequence[VerdictName]], VerdictName] | None = None,
) -> Finding:  # fmt: skip
    """Return the finding of votes on several backends; `together` makes a backend's verdict of decode and prefill."""
    backends: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row.backend for row in rows):
        own = [row for row in rows if row.backend == name]
        phases = {
            phase: majority([row.vote for row in own if row.step.phase == phase])
            for phase in dict.fromkeys(row.step.phase for row in own)
        }
        figures = ", ".join(f"{row.step} {write(row.change)}" for row in own)
        backends[name] = {
            "verdict": (together or agreed)(list(phases.values())), "phases": phases, "summary": figures,
        }  # fmt: skip
    return Finding(agreed([one["verdict"] for one in backends.values()]), summary, tables, backends)


def verdict_line(claim: str, verdict: str, summary: str, backends: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the one line of a claim: `claim 4: mixed - on reference refuted: ...; on cpu confirmed: ...`."""
    parts = [f"on {name} {one['verdict']}{_phases(one)}: {one['summary']}" for name, one in backends.items()]
    return f"claim {claim}: {verdict} - {'; '.join([*parts, summary] if summary else parts)}"


def _phases(one: Mapping[str, Any]) -> str:
    phases = one["phases"]
    return f" ({', '.join(f'{k} {v}' for k, v in phases.items())})" if len(set(phases.values())) > 1 else ""


def require_equal(one: Any, other: Any, tolerance: float, what: str) -> None:
    """Raise InferenceError if the two sides of an experiment do not compute the same; NumPy or device arrays."""
    one, other = to_numpy(one), to_numpy(other)
    gap = float(np.max(np.abs(one - other), initial=0.0)) if one.shape == other.shape else np.inf
    if not gap <= tolerance:
        raise InferenceError(f"{what}: the two sides of the experiment differ by {gap:.3g}, over {tolerance:g}")


def machine_seconds() -> float:
    """Return the least time of a fixed matrix product: the speed of the machine at this moment."""
    a = np.full((SPEED_SIZE, SPEED_SIZE), 0.5, np.float32)
    clock, best = time.perf_counter, np.inf
    for _ in range(SPEED_REPEATS):
        start = clock()
        a @ a
        best = min(best, clock() - start)
    return float(best)


def find_drift(speeds: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Return how much the machine's speed changed over (moment, seconds), and whether that is too much."""
    seconds = [one for _, one in speeds]
    change = max(seconds) / min(seconds) - 1
    slowest, fastest = (pick(speeds, key=lambda one: one[1])[0] for pick in (max, min))
    return {
        "change": change, "threshold": MAX_DRIFT, "drifted": change > MAX_DRIFT, "slowest": slowest,
        "fastest": fastest, "seconds": dict(speeds),
    }  # fmt: skip


def drift_line(drift: Mapping[str, Any]) -> str:
    """Return a line that says how much the machine's speed changed during the run."""
    said = f"by {drift['change']:.1%} during the run (a fixed matrix product, timed between the claims)"
    if not drift["drifted"]:
        return f"the machine's speed changed {said}: no drift over {drift['threshold']:.0%}"
    return (
        f"the machine drifted: its speed changed {said}, slowest {drift['slowest']} and fastest {drift['fastest']}; "
        "sides are timed in turn, so verdicts hold, but figures of different claims do not compare"
    )


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


def vote_share(change: Change, max_share: float) -> VerdictName:
    """Judge "B is at most this share of A": the whole interval must be on one side."""
    return "confirmed" if 1 + change.high <= max_share else "refuted" if 1 + change.low > max_share else "within noise"


def speedup(change: Change) -> tuple[float, float, float]:
    """Return how many times as fast: (low, middle, high)."""
    low, middle, high = (1 / (1 + x) if x > -1 else np.inf for x in (change.high, change.change, change.low))
    return low, middle, high


def majority(votes: Sequence[VerdictName]) -> VerdictName:
    """Return the verdict of most lengths, or of the longest if there is no majority."""
    name, count = Counter(votes).most_common(1)[0]
    return name if 2 * count > len(votes) else votes[-1]


def unanimous(votes: Sequence[VerdictName]) -> VerdictName:
    """Return confirmed if all votes are; one that refutes decides."""
    return "refuted" if "refuted" in votes else "within noise" if "within noise" in votes else "confirmed"


def agreed(votes: Sequence[VerdictName]) -> VerdictName:
    """Return the verdict that all votes share, or mixed; not judged without votes."""
    return votes[0] if len(set(votes)) == 1 else "mixed" if votes else "not judged"


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


def share_cells(change: Change) -> list[str]:
    """Return the cells under `share` and `99% interval` of B in A."""
    return [f"{1 + change.change:.2%}", f"{1 + change.low:.2%} to {1 + change.high:.2%}"]


def format_share(change: Change) -> str:
    """`4.10% (99% interval 4.00% to 4.20%)`."""
    return "{} (99% interval {})".format(*share_cells(change))


def format_time(samples: Samples) -> str:
    """Return the estimate of samples in seconds, for a table."""
    return quantity(statistics.estimate(samples).value, "s")


def random_array(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Floats:
    """Return normal values; large arrays repeat a draw whose length shares no factor with usual widths."""
    count = int(np.prod(shape))
    drawn = rng.standard_normal(min(count, 1_000_003), dtype=np.float32) * np.float32(scale)
    return np.resize(drawn, count).reshape(shape)
