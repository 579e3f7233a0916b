"""Estimates with confidence intervals, outliers, and whether two sets of samples differ.

The estimate is the mean of the middle half of the samples (the midmean): nearly as sharp as a mean, and a quarter of
the samples on either side may be outliers without moving it. Intervals are bootstrap percentiles, widened for few.
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
NOISE = 0.03  # smaller changes are never reported as changes: memory placement alone makes as much
MAX_CACHED_SAMPLES = 250  # up to which the weights of resamples are cached: 4 MB each
LOWER_HALF_SD = 0.6  # standard deviation of the lower half of a normal distribution divided by the whole's
MIN_SAMPLES = 3  # for an interval


class Estimate(NamedTuple):
    """A value and its interval with 95% confidence; with too few samples, the smallest and the largest."""

    value: float
    low: float
    high: float


class Outliers(NamedTuple):
    """Samples beyond Tukey's fences: 1.5 and 3 times the interquartile range outside the quartiles."""

    low_severe: int
    low_mild: int
    high_mild: int
    high_severe: int


class Change(NamedTuple):
    """after / before - 1, its interval with 99% confidence, and the verdict."""

    change: float
    low: float
    high: float
    verdict: Verdict


def midmean(samples: Floats) -> Floats:
    """Return the mean of the middle half along the last axis; the samples at its edges count by the part inside."""
    n = samples.shape[-1]
    place = np.arange(n)
    weights = np.clip(np.minimum(place + 1, n - place) - n / 4, 0.0, 1.0)
    return np.asarray(np.sort(samples, axis=-1) @ (weights / weights.sum()))


def estimate(samples: Sequence[float], rounds: Sequence[int] = ()) -> Estimate:
    """Return the midmean and its interval; non-finite samples are ignored, and no samples give NaN.

    `rounds` are the numbers of samples taken together, of the quieter half of all rounds in order. Where rounds differ,
    the machine drifted, and the interval is wider than the samples alone would make it.
    """
    values = _finite_values(samples)
    if not values.size:
        return Estimate(math.nan, math.nan, math.nan)
    middle = float(midmean(values))
    if values.size < MIN_SAMPLES:
        return Estimate(middle, float(values.min()), float(values.max()))
    low, high = interval(_resample_midmeans(values, 0), values.size)
    return Estimate(middle, *_widen(middle, low, high, _drift(_round_means(samples, rounds), CONFIDENCE)))


def outliers(samples: Sequence[float]) -> Outliers:
    """Count the samples beyond each fence."""
    values = _finite_values(samples)
    if not values.size:
        return Outliers(0, 0, 0, 0)
    first, third = np.percentile(values, [25, 75])
    step = 1.5 * (third - first)
    (low, low_severe), (high, high_severe) = (
        [int((beyond > fence).sum()) for fence in (step, 2 * step)] for beyond in (first - values, values - third)
    )
    return Outliers(low_severe, low - low_severe, high - high_severe, high_severe)


def compare(
    before: Samples,
    after: Samples,
    *,
    lower_is_better: bool = True,
    noise: float = NOISE,
    rounds: tuple[Sequence[int], Sequence[int]] = ((), ()),
    paired: bool = False,
) -> Change:
    """Compare two sides: a change counts if its interval excludes zero and it exceeds the noise.

    `paired` rounds were taken in turn: only how they move against each other is drift.
    """
    means = [_round_means(side, sizes) for side, sizes in zip((before, after), rounds, strict=True)]
    if paired and means[0].size == means[1].size > 0:
        before, after = (np.asarray(s) / np.repeat(means[0], n) for s, n in zip((before, after), rounds, strict=True))
        means = [means[1] / means[0]]
    old, new = _finite_values(before), _finite_values(after)
    n = min(old.size, new.size)
    if not n:
        return Change(math.nan, -math.inf, math.inf, "within noise")
    middle = float(_change(midmean(new), midmean(old)))
    if n < MIN_SAMPLES:
        return Change(middle, -math.inf, math.inf, "within noise")
    changes = _change(_resample_midmeans(new, 2), _resample_midmeans(old, 1))
    low, high = interval(changes, n, CHANGE_CONFIDENCE)
    drift = math.hypot(*(_drift(side, CHANGE_CONFIDENCE) for side in means))
    low, high = (end - 1 for end in _widen(1 + middle, 1 + low, 1 + high, drift)) if drift else (low, high)
    low, high = min(low, middle), max(high, middle)
    return Change(middle, low, high, judge(middle, low, high, lower_is_better, noise))


def judge(change: float, low: float, high: float, lower_is_better: bool, noise: float = NOISE) -> Verdict:
    """Return the verdict on a change with its interval."""
    if not (low > 0 or high < 0) or abs(change) <= noise:  # NaN is no change either
        return "within noise"
    return "improved" if (change < 0) == lower_is_better else "regressed"


def change(before: float, after: float) -> float:
    """Return after / before - 1."""
    return float(_change(np.float64(after), np.float64(before)))


def _change(new: Floats | np.float64, old: Floats | np.float64) -> Floats:
    """Return new / old - 1; from zero to more is infinity, from zero to zero no change."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(new == old, 0.0, new / old - 1)


def _round_means(samples: Samples, rounds: Sequence[int]) -> Floats:
    """Return the midmean of each round; empty if the samples were not taken in rounds."""
    if sum(rounds) != len(samples) or len(rounds) < 2:
        return np.empty(0)
    parts = np.split(np.asarray(samples, np.float64), np.cumsum(rounds)[:-1])
    return np.array([float(midmean(part)) for part in parts if part.size])


def _drift(means: Floats, confidence: float) -> float:
    """Return how far the mean of these rounds may be off, as a fraction of it."""
    center = float(np.mean(means)) if means.size else 0.0
    if means.size < 2 or not center or not math.isfinite(center):
        return 0.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    spread = float(np.std(means, ddof=1)) / LOWER_HALF_SD
    return _student_t(z, means.size - 1) * spread / math.sqrt(means.size) / abs(center)


def _widen(value: float, low: float, high: float, drift: float) -> tuple[float, float]:
    """Widen the interval by the drift, a fraction; as factors, so that no end of a time crosses zero."""
    if not drift or not 0 < low <= value <= high < math.inf:
        return low, high
    down, up = (min(700.0, math.hypot(math.log(end / value), math.log1p(drift))) for end in (low, high))
    return value * math.exp(-down), value * math.exp(up)


def _finite_values(samples: Samples) -> Floats:
    values = np.asarray(samples, np.float64)
    return values[np.isfinite(values)]


def _generator(stream: int) -> np.random.Generator:
    return np.random.default_rng((20261115, stream))  # the same samples always give the same interval


def _resample_midmeans(values: Floats, stream: int) -> Floats:
    """Return the midmean of each resample. Its weights do not depend on the values: for few samples they are cached."""
    n, ordered = values.size, np.sort(values)
    if n <= MAX_CACHED_SAMPLES:
        return np.asarray(_cached_weights(n, stream) @ ordered)
    rng, rows_per_chunk = _generator(stream), max(1, MAX_CACHED_SAMPLES * RESAMPLES // n)
    parts = [min(rows_per_chunk, RESAMPLES - start) for start in range(0, RESAMPLES, rows_per_chunk)]
    return np.concatenate([_weights(rng, rows, n) @ ordered for rows in parts])


@lru_cache(maxsize=8)
def _cached_weights(n: int, stream: int) -> Floats:
    return _weights(_generator(stream), RESAMPLES, n)


def _weights(rng: np.random.Generator, rows: int, n: int) -> Floats:
    """Return (rows, n): how much of each sorted sample lies in the middle half of each resample."""
    drawn = rng.integers(0, n, (rows, n)) + n * np.arange(rows)[:, None]
    counts = np.bincount(drawn.reshape(-1), minlength=rows * n).reshape(rows, n)
    inside = np.clip(np.cumsum(counts, axis=1), n / 4, 3 * n / 4)
    return np.diff(inside, axis=1, prepend=n / 4) / (n / 2)


def interval(resampled: Floats, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the interval of a statistic from its values on many resamples of n samples.

    Its ends are percentiles further out the fewer samples there are: a resample of few spreads less than they do.
    """
    normal = NormalDist()
    z = normal.inv_cdf((1 + confidence) / 2)
    tail = normal.cdf(-math.sqrt(n / (n - 1)) * _student_t(z, n - 1))
    # a value that exists, not one between two: between infinities there is none
    low, high = np.percentile(resampled, [100 * tail, 100 * (1 - tail)], method="nearest")
    return float(low), float(high)


def _student_t(z: float, freedom: int) -> float:
    """Return Student's t for a normal z, by the Cornish-Fisher expansion (within 2% from 4 degrees of freedom on)."""
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return z + (z**3 + z) / (4 * freedom) + second + third
