"""What samples say: an estimate with its interval, outliers named, and whether two sides differ.

The estimate is the mean of the middle half of the samples (the midmean): nearly as sharp as a mean, and a quarter of
the samples on either side may be wild without moving it. Intervals are bootstrap percentiles, widened for few samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Samples = Sequence[float] | Floats
Verdict = Literal["improved", "regressed", "within noise"]

RESAMPLES = 2000
CONFIDENCE = 0.95  # of an estimate's interval
CHANGE_CONFIDENCE = 0.99  # of a change's interval: a verdict should seldom be wrong
NOISE = 0.03  # smaller changes are never called changes: where the arrays of one program lie makes as much
KEPT = 250  # samples up to which the weights of resamples are kept: 4 MB each
QUIETER_HALF = 0.6  # the standard deviation of the lower half of a normal distribution, over that of the whole
FEWEST = 3  # samples that an interval needs


class Estimate(NamedTuple):
    """A value and the interval it lies in with 95% confidence; without enough samples the interval is the value."""

    value: float
    low: float
    high: float


class Outliers(NamedTuple):
    """Samples beyond Tukey's fences: 1.5 and 3 times the interquartile range outside the quartiles."""

    low_severe: int
    low_mild: int
    high_mild: int
    high_severe: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


class Change(NamedTuple):
    """after / before - 1, its interval with 99% confidence, and what that means."""

    change: float
    low: float
    high: float
    verdict: Verdict


def midmean(samples: Floats) -> Floats:
    """Mean of the middle half along the last axis; the two samples at its edges count by the part inside."""
    n = samples.shape[-1]
    place = np.arange(n)
    weights = np.clip(np.minimum(place + 1, n - place) - n / 4, 0.0, 1.0)
    return np.asarray(np.sort(samples, axis=-1) @ (weights / weights.sum()))


def estimate(samples: Sequence[float], rounds: Sequence[int] = ()) -> Estimate:
    """The midmean and its interval; samples that are no numbers do not count, and nothing gives NaN.

    `rounds` says how many of the samples were taken together: those of the quieter half of all rounds, one after the
    other. Where rounds differ, the machine drifted, and the interval is wider than the samples alone would have it.
    """
    values = _finite(samples)
    if not values.size:
        return Estimate(math.nan, math.nan, math.nan)
    middle = float(midmean(values))
    if values.size < FEWEST:
        return Estimate(middle, float(values.min()), float(values.max()))
    low, high = _percentiles(_resampled(values, 0), CONFIDENCE, values.size)
    return Estimate(middle, *_widened(middle, low, high, _drift(_round_means(samples, rounds), CONFIDENCE)))


def interval(resampled: Floats, n: int) -> tuple[float, float]:
    """Where a statistic lies with 95% confidence, from its values on many resamples of n samples."""
    return _percentiles(resampled, CONFIDENCE, n)


def outliers(samples: Sequence[float]) -> Outliers:
    """How many samples lie beyond each fence."""
    values = _finite(samples)
    if not values.size:
        return Outliers(0, 0, 0, 0)
    first, third = np.percentile(values, [25, 75])
    step = 1.5 * (third - first)
    below, above = first - values, values - third
    return Outliers(
        int((below > 2 * step).sum()),
        int(((below > step) & (below <= 2 * step)).sum()),
        int(((above > step) & (above <= 2 * step)).sum()),
        int((above > 2 * step).sum()),
    )


def compare(
    before: Samples,
    after: Samples,
    *,
    lower_is_better: bool = True,
    noise: float = NOISE,
    rounds: tuple[Sequence[int], Sequence[int]] = ((), ()),
    paired: bool = False,
) -> Change:
    """Whether `after` differs from `before`: its interval must leave out zero, and the change must exceed the noise.

    `paired` rounds were taken in turn: only what they change against each other is drift.
    """
    means = [_round_means(side, sizes) for side, sizes in zip((before, after), rounds, strict=True)]
    if paired and means[0].size == means[1].size > 0:
        before, after = (np.asarray(s) / np.repeat(means[0], n) for s, n in zip((before, after), rounds, strict=True))
        means = [means[1] / means[0]]
    old, new = _finite(before), _finite(after)
    fewest = min(old.size, new.size)
    if not fewest:
        return Change(math.nan, -math.inf, math.inf, "within noise")
    middle = float(_change(midmean(new), midmean(old)))
    if fewest < FEWEST:
        return Change(middle, -math.inf, math.inf, "within noise")
    changes = _change(_resampled(new, 2), _resampled(old, 1))
    low, high = _percentiles(changes, CHANGE_CONFIDENCE, fewest)
    apart = math.hypot(*(_drift(side, CHANGE_CONFIDENCE) for side in means))
    low, high = (end - 1 for end in _widened(1 + middle, 1 + low, 1 + high, apart)) if apart else (low, high)
    low, high = min(low, middle), max(high, middle)
    return Change(middle, low, high, judge(middle, low, high, lower_is_better, noise))


def judge(change: float, low: float, high: float, lower_is_better: bool, noise: float = NOISE) -> Verdict:
    """What a change with its interval means."""
    if not (low > 0 or high < 0) or abs(change) <= noise:  # written so that NaN is no change either
        return "within noise"
    return "improved" if (change < 0) == lower_is_better else "regressed"


def change(before: float, after: float) -> float:
    """after / before - 1 of two figures."""
    return float(_change(np.float64(after), np.float64(before)))


def _change(new: Floats | np.float64, old: Floats | np.float64) -> Floats:
    """new / old - 1; from nothing to something is infinitely more, from nothing to nothing no change."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(new == old, 0.0, new / old - 1)


def _round_means(samples: Samples, rounds: Sequence[int]) -> Floats:
    """The midmean of each round; nothing where the samples were not taken in rounds."""
    if sum(rounds) != len(samples) or len(rounds) < 2:
        return np.empty(0)
    parts = np.split(np.asarray(samples, np.float64), np.cumsum(rounds)[:-1])
    return np.array([float(midmean(part)) for part in parts if part.size])


def _drift(means: Floats, confidence: float) -> float:
    """How far from the truth the mean of these rounds may be, as a fraction of it."""
    center = float(np.mean(means)) if means.size else 0.0
    if means.size < 2 or not center or not math.isfinite(center):
        return 0.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    spread = float(np.std(means, ddof=1)) / QUIETER_HALF
    return _student(z, means.size - 1) * spread / math.sqrt(means.size) / abs(center)


def _widened(value: float, low: float, high: float, apart: float) -> tuple[float, float]:
    """The interval, wider by what drift makes, a fraction; as factors, so that no end of a time crosses zero."""
    if not apart or not 0 < low <= value <= high < math.inf:
        return low, high
    down, up = (min(700.0, math.hypot(math.log(end / value), math.log1p(apart))) for end in (low, high))
    return value * math.exp(-down), value * math.exp(up)


def _finite(samples: Samples) -> Floats:
    values = np.asarray(samples, np.float64)
    return values[np.isfinite(values)]


def _generator(stream: int) -> np.random.Generator:
    return np.random.default_rng((20261115, stream))  # the same samples always give the same interval


def _resampled(values: Floats, stream: int) -> Floats:
    """The midmean of each resample. Its weights do not depend on the values: for few samples they are kept."""
    n, ordered = values.size, np.sort(values)
    if n <= KEPT:
        return np.asarray(_kept_weights(n, stream) @ ordered)
    rng, at_once = _generator(stream), max(1, KEPT * RESAMPLES // n)
    parts = [min(at_once, RESAMPLES - start) for start in range(0, RESAMPLES, at_once)]
    return np.concatenate([_weights(rng, rows, n) @ ordered for rows in parts])


@lru_cache(maxsize=8)
def _kept_weights(n: int, stream: int) -> Floats:
    return _weights(_generator(stream), RESAMPLES, n)


def _weights(rng: np.random.Generator, rows: int, n: int) -> Floats:
    """(rows, n): how much of the sorted samples lies in the middle half of each resample."""
    drawn = rng.integers(0, n, (rows, n)) + n * np.arange(rows)[:, None]
    counts = np.bincount(drawn.reshape(-1), minlength=rows * n).reshape(rows, n)
    inside = np.clip(np.cumsum(counts, axis=1), n / 4, 3 * n / 4)
    return np.diff(inside, axis=1, prepend=n / 4) / (n / 2)


def _percentiles(resampled: Floats, confidence: float, n: int) -> tuple[float, float]:
    """Percentiles further out the fewer samples there are: a resample of few spreads less than they do."""
    normal = NormalDist()
    z = normal.inv_cdf((1 + confidence) / 2)
    tail = normal.cdf(-math.sqrt(n / (n - 1)) * _student(z, n - 1))
    # a value that is there, not one between two: between infinities there is none
    low, high = np.percentile(resampled, [100 * tail, 100 * (1 - tail)], method="nearest")
    return float(low), float(high)


def _student(z: float, freedom: int) -> float:
    """Student's t for a normal z, by the Cornish-Fisher expansion (within 2% from 4 degrees of freedom on)."""
    terms = (
        z,
        (z**3 + z) / (4 * freedom),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3),
    )
    return sum(terms)
