"""Least-squares fit of scales: for each group of values, the scale (and minimum) with the smallest squared error.

Given the codes, the best scale follows from sums; given the scale, the best codes follow by rounding. Each start is a
range a little wider or narrower than the group's own; one round of both from every start, and the best is kept. All
weights count the same, as no activations are known.

Values are (group size, groups), one group per column: NumPy adds long rows at full speed and pays 7 ns per short one.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

MIN_NORMAL = np.float32(2.0**-126)  # smaller values have no float32 reciprocal, and are 0 in float16

# Steps that the range of a group is divided into, beyond the number of codes. Of equal fits the first is kept: its
# scale is the likeliest to be a round number.
AFFINE_STARTS = (0.0, -1.0, -0.6, -0.3, 0.3, 0.6, 0.9, 1.3, 1.8)
LINEAR_STARTS = (0.0, -3.0, -2.25, -1.5, -1.0, -0.5, 0.75, 1.5, 2.25)
MIN_GAIN = np.float32(1 + 1e-6)  # more than the rounding error of float32 sums


class Sums(NamedTuple):
    """Sums over each group: codes, codes * values, codes squared."""

    q: Floats
    qx: Floats
    qq: Floats


def reciprocal(values: Floats) -> Floats:
    """Return 1 / values, and 0 where that is not finite."""
    return np.where(np.abs(values) < MIN_NORMAL, np.float32(0), np.float32(1) / values)


def sums(q: Floats, x: Floats, spare: Floats) -> Sums:
    """Return the sums that least squares needs; overwrites `spare`."""
    return Sums(q.sum(0), np.multiply(q, x, out=spare).sum(0), np.multiply(q, q, out=spare).sum(0))


def affine_codes(x: Floats, scale: Floats, minimum: Floats, top: int, out: Floats) -> Floats:
    """Return the nearest codes of 0 .. top, where x = scale * code - minimum."""
    np.add(x, minimum, out=out)
    out *= reciprocal(scale)
    np.rint(out, out=out)
    return np.clip(out, 0, top, out=out)


def linear_codes(x: Floats, scale: Floats, half_range: int, out: Floats) -> Floats:
    """Return the nearest codes of -half_range .. half_range - 1, where x = scale * code."""
    np.multiply(x, reciprocal(scale), out=out)
    np.rint(out, out=out)
    return np.clip(out, -half_range, half_range - 1, out=out)


def fit_affine(x: Floats, top: int) -> tuple[Floats, Floats]:
    """Return scale and minimum of each group, neither below 0: x = scale * code - minimum."""
    low, high = np.minimum(x.min(0), 0), x.max(0)
    q, spare = np.empty_like(x), np.empty_like(x)
    total = x.sum(0)
    best, scale, minimum = np.zeros_like(low), np.zeros_like(low), -low
    for start in AFFINE_STARTS:
        affine_codes(x, (high - low) * np.float32(1 / (top + start)), -low, top, q)
        found = sums(q, x, spare)
        s, m = _affine_solution(found, total, len(x))
        gain = s * found.qx - m * total  # the part of the sum of squares that it explains
        better = (gain > best * MIN_GAIN) & (s > 0)
        best, scale, minimum = (np.where(better, *pair) for pair in ((gain, best), (s, scale), (m, minimum)))
    return scale, minimum


def _affine_solution(found: Sums, total: Floats, count: int) -> tuple[Floats, Floats]:
    """Return the least-squares line through the codes; through 0 where its minimum would be negative."""
    over = reciprocal(count * found.qq - found.q * found.q)
    minimum = (found.q * found.qx - found.qq * total) * over
    through_zero = (over <= 0) | (minimum < 0)
    scale = np.where(through_zero, found.qx * reciprocal(found.qq), (count * found.qx - found.q * total) * over)
    return scale, np.where(through_zero, np.float32(0), minimum)


def fit_linear(x: Floats, half_range: int) -> Floats:
    """Return the scale of each group, of either sign: x = scale * code."""
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
