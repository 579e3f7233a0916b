"""Which tokens of one row come into question: kernels that look through all logits as few times as they can.

The largest of each block of 64 logits tells which blocks to look at; nothing is sorted. What is found, ids (ascending)
and scaled logits, goes to filters.py. `../sampling.py` says what is meant; UNSURE says that it must be asked.
"""

from __future__ import annotations

import math

import numpy as np

from . import doubles as w
from . import floats as f
from .compile import kernel, variant
from .filters import CLOSE, UNSURE, chances_of, copy_of, kth_largest

BLOCK, LANES = 64, 16
NOT_FINITE = -2
LOWEST = w.LOWEST
TOPS = None  # set for each variant


@kernel
def top_of(tops):
    """The largest."""
    best = tops[0]
    for b in range(1, tops.shape[0]):
        best = max(best, tops[b])
    return best


@kernel
def tops_of(x, tops):
    """The largest of each block of float32; gives the largest of all, NaN where there is one."""
    whole = x.shape[0] // BLOCK
    marks = f.splat(np.float32(0))
    for b in range(whole):
        i = b * BLOCK
        p, q, r, s = f.get(x, i), f.get(x, i + 16), f.get(x, i + 32), f.get(x, i + 48)
        marks = f.marked(f.marked(marks, p, q), r, s)
        tops[b] = f.highest(f.above(f.above(p, q), f.above(r, s)))
    best = f.total(marks)
    if whole < tops.shape[0]:
        tops[whole] = x[whole * BLOCK]
        for i in range(whole * BLOCK, x.shape[0]):
            tops[whole] = max(tops[whole], x[i])
            best = best if x[i] == x[i] else x[i]
    return best if best != best else top_of(tops)


@kernel
def wide_tops_of(x, tops):
    """The same of float64 that are numbers."""
    whole = x.shape[0] // BLOCK
    for b in range(whole):
        i = b * BLOCK
        tops[b] = w.highest(
            w.above(w.above(w.get(x, i), w.get(x, i + 16)), w.above(w.get(x, i + 32), w.get(x, i + 48)))
        )
    if whole < tops.shape[0]:
        tops[whole] = x[whole * BLOCK]
        for i in range(whole * BLOCK, x.shape[0]):
            tops[whole] = max(tops[whole], x[i])
    return top_of(tops)


@kernel
def first_of(x, tops, best):
    """The lowest id of the largest."""
    b = 0
    while tops[b] != best:
        b += 1
    i = b * BLOCK
    while x[i] != best:
        i += 1
    return i


@kernel
def gather(x, tops, low, high, ids):
    """The ids of logits in low .. high, ascending; gives their number."""
    count = 0
    for b in range(tops.shape[0]):
        if tops[b] >= low:
            for i in range(b * BLOCK, min(x.shape[0], b * BLOCK + BLOCK)):
                ids[count] = i  # where it is not one of them, the next one is written over it
                count += low <= x[i] <= high
    return count


@kernel
def scale_down(x, best, temperature, ids, count, s):
    """s = (x - best) / temperature of the first `count` ids."""
    for i in range(count):
        s[i] = (np.float64(x[ids[i]]) - best) / temperature


@kernel
def chances(x, best, temperature, sums):
    """e^s with s = (x - best) / temperature: the sum of each block; gives that of all, and that of all s * e^s."""
    rate, less = w.splat(1 / temperature), w.splat(-best)
    whole, total, moment = x.shape[0] // BLOCK, 0.0, w.splat(0.0)
    for b in range(whole):
        some = w.splat(0.0)
        for i in range(b * BLOCK, b * BLOCK + BLOCK, LANES):
            s = w.above(w.mul(w.add(w.get(x, i), less), rate), w.splat(2 * LOWEST))
            e = w.exp(s)
            some, moment = w.add(some, e), w.fma(e, s, moment)
        sums[b] = w.total(some)
        total += sums[b]
    rest = w.total(moment)
    if whole < sums.shape[0]:
        sums[whole] = 0
        for i in range(whole * BLOCK, x.shape[0]):
            s = (x[i] - best) / temperature
            if s > LOWEST:
                sums[whole] += math.exp(s)
                rest += math.exp(s) * s
        total += sums[whole]
    return total, rest


@kernel
def pick_block(x, best, temperature, sums, total, point):
    """The token at `point` of the cumulative sum of all chances."""
    close, before, b = CLOSE * total, 0.0, 0
    while b < sums.shape[0] - 1 and before + sums[b] <= point:
        before += sums[b]
        b += 1
    for i in range(b * BLOCK, min(x.shape[0], b * BLOCK + BLOCK)):
        after = before + math.exp((x[i] - best) / temperature)
        if after > point:
            return i if point - before > close and after - point > close else UNSURE
        before = after
    return UNSURE


@kernel
def best_k(x, tops, best, temperature, k, ids):
    """The k largest, the lowest ids among equals; ids ascending; gives their number, or UNSURE."""
    blockwise = 2 * k <= tops.shape[0]
    low = kth_largest(copy_of(tops, tops.shape[0]) if blockwise else copy_of(x, x.shape[0]), k)
    found = gather(x, tops, low, np.inf, ids)
    s = np.empty(found, np.float64)
    scale_down(x, best, temperature, ids, found, s)
    least = kth_largest(copy_of(s, found), k)
    below = np.nextafter(low, x.dtype.type(-np.inf))
    if least > -np.inf and (np.float64(below) - best) / temperature >= least:
        return UNSURE  # a smaller logit may be its equal after the division
    ties, count = k, 0
    for i in range(found):
        ties -= s[i] > least
    for i in range(found):
        if s[i] > least or (s[i] == least > -np.inf and ties > 0):
            ties -= s[i] == least
            ids[count] = ids[i]
            count += 1
    return count


@kernel
def nearest(x, tops, best, temperature, center, mass, ids, s):
    """Candidates around `center` (0: the likeliest) whose chances add up to `mass`; (number, how far they reach)."""
    reach = 2.0
    while reach < -2 * LOWEST:
        low, high = best + temperature * (center - reach), best + temperature * (center + reach)
        found, total = gather(x, tops, low, high, ids), 0.0
        scale_down(x, best, temperature, ids, found, s)
        for e in chances_of(s, found):
            total += e
        if total > mass:
            return found, reach
        reach *= 2
    return UNSURE, reach


@kernel
def greedy(x):
    """The lowest id of the largest."""
    tops = np.empty((x.shape[0] + BLOCK - 1) // BLOCK, x.dtype)
    best = tops_of(x, tops)
    return first_of(x, tops, best) if math.isfinite(best) else NOT_FINITE


def candidates(x, temperature, top_k, top_p, min_p, typical_p, point, ids, s):
    """(token, 0, ...) where it is clear, or (UNSURE, number of candidates, the sum of all chances, center, reach)."""
    tops = np.empty((x.shape[0] + BLOCK - 1) // BLOCK, x.dtype)
    best, count, total, center, reach = np.float64(TOPS(x, tops)), 0, 0.0, 0.0, np.inf
    if not math.isfinite(best):
        return NOT_FINITE, 0, total, center, reach
    if temperature < CLOSE * max(1.0, abs(best)):
        return UNSURE, 0, total, center, reach
    if 0 < top_k < x.shape[0]:
        count = best_k(x, tops, best, temperature, top_k, ids)
    elif typical_p < 1 or top_p < 1 or min_p == 0:
        sums = np.empty(tops.shape[0], np.float64)
        total, moment = chances(x, best, temperature, sums)
        if typical_p < 1 or top_p < 1:
            center = moment / total if typical_p < 1 else 0.0
            mass = (typical_p if typical_p < 1 else top_p) + 2 * CLOSE
            count, reach = nearest(x, tops, best, temperature, center, mass * total, ids, s)
        else:
            return pick_block(x, best, temperature, sums, total, point * total), 0, total, center, reach
    else:
        count = gather(x, tops, best + temperature * (math.log(min_p) - 1e-6), np.inf, ids)
    scale_down(x, best, temperature, ids, count, s)
    return UNSURE, count, total, center, reach


NARROW = kernel(variant(candidates, "f32", TOPS=tops_of))
WIDE = kernel(variant(candidates, "f64", TOPS=wide_tops_of))


@kernel
def log_chances(x, chosen, k, top_ids, top):
    """Log-softmax at `chosen`, and of the k likeliest, best first; NaN where the logits are not finite."""
    tops = np.empty((x.shape[0] + BLOCK - 1) // BLOCK, x.dtype)
    best = np.float64(tops_of(x, tops))
    if not math.isfinite(best):
        return np.float32(np.nan)
    total, _ = chances(x, best, 1.0, np.empty(tops.shape[0], np.float64))
    less = math.log(total)
    ids = np.empty(x.shape[0], np.int64)
    blockwise = 2 * k <= tops.shape[0]
    low = kth_largest(copy_of(tops, tops.shape[0]) if blockwise else copy_of(x, x.shape[0]), max(k, 1))
    found = gather(x, tops, low, np.inf, ids) if k else 0
    for rank in range(k):
        first = 0
        for i in range(1, found):
            if ids[first] < 0 or (ids[i] >= 0 and x[ids[i]] - best - less > x[ids[first]] - best - less):
                first = i
        top_ids[rank], top[rank] = ids[first], x[ids[first]] - best - less
        ids[first] = -1
    return np.float32(x[chosen] - best - less)
