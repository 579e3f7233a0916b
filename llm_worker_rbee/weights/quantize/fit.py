"""Scales by least squares: for each group of values, the scale (and minimum) whose levels miss them least.

Given the levels, the best scale follows from sums; given the scale, the best levels follow by rounding. Each start is a
range a little wider or narrower than the group's own; one round of both from every start, and the best one stays. The
error is the plain sum of squares: without activations to look at, every weight counts the same.

Values are (group size, groups), a group a column: NumPy adds rows of thousands of numbers at full speed, and pays 7 ns
for each short one.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

MIN_NORMAL = np.float32(2.0**-126)  # what is smaller has no reciprocal in float32, and is 0 in float16

# Steps that the range of a group is divided into, beyond the number of levels; of equals the first stays, for its
# scale is the likeliest to be a round number.
AFFINE_STARTS = (0.0, -1.0, -0.6, -0.3, 0.3, 0.6, 0.9, 1.3, 1.8)
LINEAR_STARTS = (0.0, -3.0, -2.25, -1.5, -1.0, -0.5, 0.75, 1.5, 2.25)
MIN_GAIN = np.float32(1 + 1e-6)  # by more than float32 sums are uncertain


class Sums(NamedTuple):
    """Over each group: levels, levels times values, levels squared."""

    q: Floats
    qx: Floats
    qq: Floats


def reciprocal(values: Floats) -> Floats:
    """1 / values, and 0 for a value that has no finite one."""
    return np.where(np.abs(values) < MIN_NORMAL, np.float32(0), np.float32(1) / values)


def sums(q: Floats, x: Floats, spare: Floats) -> Sums:
    """The sums that least squares needs; `spare` is overwritten."""
    return Sums(q.sum(0), np.multiply(q, x, out=spare).sum(0), np.multiply(q, q, out=spare).sum(0))


def affine_codes(x: Floats, scale: Floats, minimum: Floats, top: int, out: Floats) -> Floats:
    """The nearest of the levels 0 .. top, where x = scale * level - minus."""
    np.add(x, minimum, out=out)
    out *= reciprocal(scale)
    np.rint(out, out=out)
    return np.clip(out, 0, top, out=out)


def linear_codes(x: Floats, scale: Floats, half_range: int, out: Floats) -> Floats:
    """The nearest of the levels -half_range .. half_range - 1, where x = scale * level."""
    np.multiply(x, reciprocal(scale), out=out)
    np.rint(out, out=out)
    return np.clip(out, -half_range, half_range - 1, out=out)


def fit_affine(x: Floats, top: int) -> tuple[Floats, Floats]:
    """Scale and minimum of each group, neither below 0: x = scale * level - minus."""
    low, high = np.minimum(x.min(0), 0), x.max(0)
    q, spare = np.empty_like(x), np.empty_like(x)
    total = x.sum(0)
    best, scale, minimum = np.zeros_like(low), np.zeros_like(low), -low
    for start in AFFINE_STARTS:
        affine_codes(x, (high - low) * np.float32(1 / (top + start)), -low, top, q)
        found = sums(q, x, spare)
        s, m = _affine_solution(found, total, len(x))
        gain = s * found.qx - m * total  # how much of the sum of squares it explains
        better = (gain > best * MIN_GAIN) & (s > 0)
        best, scale, minimum = (np.where(better, *pair) for pair in ((gain, best), (s, scale), (m, minimum)))
    return scale, minimum


def _affine_solution(found: Sums, total: Floats, count: int) -> tuple[Floats, Floats]:
    """The line through the levels; where its minimum would be above 0, the best one through 0."""
    over = reciprocal(count * found.qq - found.q * found.q)
    minimum = (found.q * found.qx - found.qq * total) * over
    through_zero = (over <= 0) | (minimum < 0)
    scale = np.where(through_zero, found.qx * reciprocal(found.qq), (count * found.qx - found.q * total) * over)
    return scale, np.where(through_zero, np.float32(0), minimum)


def fit_linear(x: Floats, half_range: int) -> Floats:
    """Scale of each group, of either sign: x = scale * level."""
    low, high = x.min(0), x.max(0)
    peak = np.where(-low > high, low, high)
    q, spare = np.empty_like(x), np.empty_like(x)
    best, scale = np.zeros_like(low), np.zeros_like(low, np.float32)
    for start in LINEAR_STARTS:
        linear_codes(x, peak * np.float32(-1 / (half_range + start)), half_range, q)
        found = sums(q, x, spare)
        s = found.qx * reciprocal(found.qq)
        gain = s * found.qx
        better = gain > best * MIN_GAIN
        best, scale = np.where(better, gain, best), np.where(better, s, scale)
    return scale
