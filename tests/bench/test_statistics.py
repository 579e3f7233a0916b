"""Estimates, intervals, outliers and verdicts, against distributions whose truth is known."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llm_worker_bench import statistics
from llm_worker_bench.statistics import Change, Outliers, compare, estimate, judge, midmean, outliers

TRIALS = 1000
FLOATS = st.floats(-1e9, 1e9, allow_subnormal=False)


@pytest.fixture(autouse=True)
def no_warning_of_numpy() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def noisy(rng: np.random.Generator, mean: float, count: int = 100) -> NDArray[np.float64]:
    """Times with a standard deviation of 5%, and 3% of them 1.5 to 3 times as long."""
    times = mean * rng.normal(1.0, 0.05, count)
    outlying = rng.random(count) < 0.03
    times[outlying] *= rng.uniform(1.5, 3.0, int(outlying.sum()))
    return times


def verdicts(slowdown: float, *, count: int = 100, seed: int, **more: bool) -> list[str]:
    rng = np.random.default_rng(seed)
    pairs = ((noisy(rng, 1.0, count), noisy(rng, 1.0 + slowdown, count)) for _ in range(TRIALS))
    return [compare(list(before), list(after), **more).verdict for before, after in pairs]


def test_compare_slowdown_of_5_percent_is_regressed() -> None:
    found = verdicts(0.05, seed=1)
    assert found.count("regressed") >= 0.95 * TRIALS
    assert found.count("improved") == 0


def test_compare_gain_of_5_percent_is_improved() -> None:
    assert verdicts(-0.05, seed=2).count("improved") >= 0.95 * TRIALS


@pytest.mark.parametrize("count", [5, 20, 100])
def test_compare_equal_distributions_is_within_noise(count: int) -> None:
    assert verdicts(0.0, count=count, seed=3).count("within noise") >= 0.95 * TRIALS


def test_compare_higher_is_better_growth_is_improved() -> None:
    assert compare([1.0] * 5, [2.0] * 5, lower_is_better=False) == Change(1.0, 1.0, 1.0, "improved")
    assert compare([1.0] * 5, [2.0] * 5).verdict == "regressed"
    assert compare([1.0] * 5, [0.5] * 5, lower_is_better=False).verdict == "regressed"


@pytest.mark.parametrize("count", [5, 10, 30, 100])
@pytest.mark.parametrize("name", ["normal", "uniform", "skewed"])
def test_estimate_interval_coverage_matches_confidence(name: str, count: int) -> None:
    rng = np.random.default_rng(count)
    draw = {
        "normal": lambda n: rng.normal(10.0, 1.0, n),
        "uniform": lambda n: rng.uniform(5.0, 15.0, n),
        "skewed": lambda n: rng.lognormal(0.0, 0.5, n),
    }[name]
    truth = float(midmean(np.asarray(draw(1_000_000))))
    estimates = [estimate(list(draw(count))) for _ in range(TRIALS)]
    inside = sum(one.low <= truth <= one.high for one in estimates) / TRIALS
    assert 0.91 <= inside <= 0.995, f"{inside:.1%} of the intervals hold {truth}"


def test_estimate_more_samples_narrow_the_interval() -> None:
    rng = np.random.default_rng(4)
    values = list(rng.normal(10.0, 1.0, 400))
    widths = [one.high - one.low for one in (estimate(values[:n]) for n in (10, 40, 400))]
    assert widths[0] > 1.5 * widths[1] > 3 * widths[2]


def test_estimate_outliers_hardly_move_it() -> None:
    regular = list(np.random.default_rng(5).normal(1.0, 0.01, 100))
    outlying = [100.0] * 10 + regular[10:]
    assert estimate(outlying).value == pytest.approx(estimate(regular).value, rel=0.01)
    assert estimate(outlying).high < 1.05


@given(st.lists(FLOATS, min_size=1, max_size=40))
def test_midmean_is_the_mean_of_the_middle_half(values: list[float]) -> None:
    fine = np.sort(np.repeat(values, 4))  # four parts of each sample: the middle half has whole parts
    middle = fine[len(values) : 3 * len(values)].mean()
    assert float(midmean(np.array(values))) == pytest.approx(middle, rel=1e-9, abs=1e-3)


@given(st.lists(FLOATS, min_size=1, max_size=30))
def test_estimate_lies_in_its_interval_within_the_samples(values: list[float]) -> None:
    value, low, high = estimate(values)
    slack = 1e-9 * max(map(abs, values)) + 1e-12
    assert min(values) - slack <= low <= value <= high <= max(values) + slack


def test_estimate_is_deterministic() -> None:
    values = list(np.random.default_rng(6).normal(1.0, 0.1, 50))
    assert estimate(values) == estimate(values[::-1])
    assert compare(values, values[:30]) == compare(values, values[:30])


def test_resample_cached_and_new_weights_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    values = list(np.random.default_rng(7).normal(1.0, 0.1, 80))
    kept = estimate(values)
    monkeypatch.setattr(statistics, "MAX_CACHED_SAMPLES", 10)  # what very many samples use: parts, and nothing kept
    assert estimate(values) == pytest.approx(kept)


def test_resample_weights_equal_sorting() -> None:
    rng, values = np.random.default_rng(8), np.sort(np.random.default_rng(9).normal(size=13))
    drawn = np.random.default_rng(8).integers(0, 13, (50, 13))
    np.testing.assert_allclose(statistics._weights(rng, 50, 13) @ values, midmean(values[drawn]), rtol=1e-12)


def test_outliers_are_counted_on_each_side() -> None:
    middle = list(
        np.linspace(10.0, 20.0, 101)
    )  # with the planted ones, quartiles near 12.5 and 17.5, fences near 5 and 25
    planted = [-10.0] * 2 + [3.0] * 3 + [27.0] * 4 + [60.0] * 1
    found = outliers(middle + planted)
    assert found == Outliers(low_severe=2, low_mild=3, high_mild=4, high_severe=1)
    assert sum(found) == 10
    assert sum(outliers(middle)) == 0


@pytest.mark.parametrize("values", [[5.0], [5.0, 7.0]])
def test_estimate_few_samples_give_their_range_without_verdict(values: list[float]) -> None:
    assert estimate(values) == (sum(values) / len(values), min(values), max(values))
    change = compare(values, [100.0] * 50)
    assert change.verdict == "within noise"
    assert (change.low, change.high) == (-math.inf, math.inf)
    assert change.change == pytest.approx(100.0 / (sum(values) / len(values)) - 1)


@pytest.mark.parametrize(
    ("before", "after", "change", "verdict"),
    [
        ([0.0] * 5, [0.0] * 5, 0.0, "within noise"),
        ([0.0] * 5, [1.0] * 5, math.inf, "regressed"),
        ([1.0] * 5, [0.0] * 5, -1.0, "improved"),
        ([1.0] * 5, [1.019] * 5, 0.019, "within noise"),  # smaller than two runs of one program differ
    ],
)
def test_compare_zeros_and_constant_samples(
    before: Sequence[float], after: Sequence[float], change: float, verdict: str
) -> None:
    found = compare(before, after)
    assert found.change == found.low == found.high
    assert (pytest.approx(found.change), found.verdict) == (change, verdict)


def test_compare_some_zeros_before_is_finite() -> None:
    found = compare([0.0, 0.0, 0.0, 1.0, 1.0, 1.0], [1.0] * 6)
    assert found.verdict == "within noise"
    assert found.high == math.inf


def test_estimate_ignores_non_finite_samples() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    spoilt = [math.nan, *values, math.inf, -math.inf]
    assert estimate(spoilt) == estimate(values)
    assert outliers(spoilt) == outliers(values)
    assert compare(spoilt, values) == compare(values, values)


@pytest.mark.parametrize("values", [[], [math.nan]])
def test_estimate_without_samples_is_nan(values: list[float]) -> None:
    assert all(math.isnan(x) for x in estimate(values))
    assert sum(outliers(values)) == 0
    assert compare(values, [1.0] * 5).verdict == compare([1.0] * 5, values).verdict == "within noise"


@pytest.mark.parametrize(
    ("low", "change", "high", "verdict"),
    [
        (0.01, 0.05, 0.09, "regressed"),
        (-0.01, 0.05, 0.11, "within noise"),  # the interval holds zero
        (0.001, 0.015, 0.03, "within noise"),  # sure, and too small
        (-0.09, -0.05, -0.01, "improved"),
        (math.nan, 0.5, math.nan, "within noise"),
    ],
)
def test_judge_requires_interval_without_zero_and_change_above_noise(
    low: float, change: float, high: float, verdict: str
) -> None:
    assert judge(change, low, high, lower_is_better=True) == verdict


def in_rounds(rng: np.random.Generator, drift: float, shift: float = 1.0) -> tuple[list[float], list[int]]:
    """Six rounds of ten samples, each round slower or faster as a whole: the quieter half of twelve."""
    speeds = np.sort(np.exp(drift * rng.standard_normal(12)))[:6]
    samples = [shift * speed * rng.normal(1, 0.01, 10) for speed in rng.permutation(speeds)]
    return np.concatenate(samples).tolist(), [10] * 6


def test_compare_drift_between_rounds_is_within_noise() -> None:
    """Rounds that differ by 10%, samples within one by 1%: taken as one heap, most pairs would be called different."""
    rng = np.random.default_rng(5)
    as_heap = as_rounds = 0
    for _ in range(300):
        (a, rounds), (b, _) = in_rounds(rng, 0.1), in_rounds(rng, 0.1)
        as_heap += statistics.compare(a, b).verdict != "within noise"
        as_rounds += statistics.compare(a, b, rounds=(rounds, rounds)).verdict != "within noise"
    assert as_heap > 100
    assert as_rounds <= 15


def test_compare_change_beyond_drift_is_found() -> None:
    rng = np.random.default_rng(6)
    found = 0
    for _ in range(300):
        (a, rounds), (b, _) = in_rounds(rng, 0.02), in_rounds(rng, 0.02, shift=1.15)
        found += statistics.compare(a, b, rounds=(rounds, rounds)).verdict == "regressed"
    assert found >= 285


def test_compare_paired_rounds_share_drift() -> None:
    rng = np.random.default_rng(7)
    speeds = np.repeat([1.0, 1.3, 1.1, 1.6], 10)
    a, b = (speeds * rng.normal(1, 0.01, 40) * shift for shift in (1.0, 1.08))
    sizes = ([10] * 4, [10] * 4)
    assert statistics.compare(a, b, rounds=sizes).verdict == "within noise"
    paired = statistics.compare(a, b, rounds=sizes, paired=True)
    assert paired.verdict == "regressed"
    assert paired.change == pytest.approx(0.08, abs=0.01)


def test_compare_extreme_rounds_keep_times_positive() -> None:
    rng, speeds = np.random.default_rng(8), np.repeat([1.0, 1.1, 9.0, 1.2], 5)
    a, b = (speeds * rng.normal(1, 0.01, 20) * shift for shift in (1.0, 100.0))
    one = statistics.estimate(a, [5] * 4)
    assert 0 < one.low < one.value / 2
    found = statistics.compare(a, b, rounds=([5] * 4, [5] * 4))
    assert found.verdict == "regressed"
    assert statistics.compare(b, a, rounds=([5] * 4, [5] * 4)).low > -1


def test_estimate_interval_widens_with_drift() -> None:
    quiet = [1.0, 1.01, 0.99, 1.0] * 3
    drifting = [1.0, 1.01, 0.99, 1.0, 1.1, 1.11, 1.09, 1.1, 1.2, 1.21, 1.19, 1.2]
    plain, wide = statistics.estimate(drifting), statistics.estimate(drifting, [4, 4, 4])
    assert wide.low < plain.low < plain.high < wide.high
    same = statistics.estimate(quiet, [4, 4, 4])
    assert same.high - same.low < 0.05
    assert statistics.estimate(drifting, [4, 4]) == plain  # rounds that do not fit the samples say nothing
