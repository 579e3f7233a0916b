"""Typical-p, top-p, min-p and the draw over the candidates of one row: kernels on a few float64, by ascending ids.

A filter keeps the fewest candidates, best first, whose chances add up to some mass: the last of them is found by
partitioning, as the k-th largest of a list is. `../sampling.py` says what is meant; UNSURE says that it must be asked.
"""

from __future__ import annotations

import math

import numpy as np

from . import doubles as w
from .compile import kernel

LANES = 16
MANY, BUCKETS, FINENESS = 256, 512, 16  # keys that are worth buckets, how many those are, how many for a distance of 1
CLOSE = 1e-10  # how near to each other two sums or keys may be before their order is left to the meaning
UNSURE = -1


@kernel
def kth_largest(values, k):
    """The k-th largest; the values change places."""
    low, high, k = 0, values.shape[0] - 1, k - 1
    while low < high:
        pivot = values[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while values[i] > pivot:
                i += 1
            while values[j] < pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if k <= j:
            high = j
        elif k >= i:
            low = i
        else:
            break
    return values[k]


@kernel
def copy_of(values, count):
    """The first `count` of them."""
    made = np.empty(count, values.dtype)
    for i in range(count):
        made[i] = values[i]
    return made


@kernel
def chances_of(s, count):
    """e to each of the first `count`."""
    made, whole = np.empty(count, np.float64), count - count % LANES
    for i in range(0, whole, LANES):
        w.put(made, i, w.exp(w.get(s, i)))
    for i in range(whole, count):
        made[i] = math.exp(s[i]) if s[i] >= w.LOWEST else 0.0
    return made


@kernel
def distances(s, count, center, likely):
    """How far each is from the center, on either side, or below the likeliest."""
    made = np.empty(count, np.float64)
    for i in range(count):
        made[i] = -s[i] if likely else abs(s[i] - center)
    return made


@kernel
def boundary(keys, e, mass):
    """The key at which the sum of e, by ascending keys, reaches `mass`, and the sum of those before it."""
    low, high, before = 0, keys.shape[0] - 1, 0.0
    while low <= high:
        pivot, less, same = keys[(low + high) // 2], 0.0, 0.0
        i, j, end = low, low, high
        while j <= end:  # smaller ones to the left of i, larger ones behind `end`
            if keys[j] < pivot:
                less += e[j]
                keys[i], keys[j], e[i], e[j] = keys[j], keys[i], e[j], e[i]
                i += 1
                j += 1
            elif keys[j] == pivot:
                same += e[j]
                j += 1
            else:
                keys[j], keys[end], e[j], e[end] = keys[end], keys[j], e[end], e[j]
                end -= 1
        if before + less >= mass:
            high = i - 1
        elif before + less + same >= mass:
            return pivot, before + less
        else:
            before += less + same
            low = end + 1
    return np.inf, before


@kernel
def bucket_of(key):
    """Keys are 0 or more; the last bucket has no end."""
    return int(key * FINENESS) if key * FINENESS < BUCKETS - 1 else BUCKETS - 1


@kernel
def boundary_among(keys, e, count, mass):
    """The same of the first `count`, which stay as they are; of many keys only those of one bucket are looked at."""
    if count < MANY:
        return boundary(copy_of(keys, count), copy_of(e, count), mass)
    sums = np.zeros(BUCKETS, np.float64)
    for i in range(count):
        sums[bucket_of(keys[i])] += e[i]
    chosen, before = 0, 0.0
    while chosen < BUCKETS - 1 and before + sums[chosen] < mass:
        before += sums[chosen]
        chosen += 1
    some, their, found = np.empty(count, np.float64), np.empty(count, np.float64), 0
    for i in range(count):
        some[found], their[found] = keys[i], e[i]
        found += bucket_of(keys[i]) == chosen
    last, inside = boundary(some[:found], their[:found], mass - before)
    return last, before + inside


@kernel
def keep_until(keys, ids, s, e, count, mass, reach, close):
    """The candidates with the smallest keys whose e add up to `mass`, moved to the front; their number, or UNSURE."""
    mass = max(mass, 1e-300)  # at least one is kept
    last, sum_before = boundary_among(keys, e, count, mass)
    near = CLOSE * (1 + abs(last))
    if not last < reach - 2 * near:
        return UNSURE
    kept, taken, before, tie = 0, sum_before, 0.0, np.nan
    for i in range(count):
        if abs(keys[i] - last) < near and keys[i] != last:
            return UNSURE
        if keys[i] == last:
            if tie == tie and tie != s[i]:
                return UNSURE
            tie = s[i]
            if taken >= mass:
                continue
            before = taken
            taken += e[i]
        elif keys[i] > last:
            continue
        ids[kept], s[kept], e[kept] = ids[i], s[i], e[i]
        kept += 1
    return kept if (kept == 1 or before < mass - close) and taken > mass + close else UNSURE


@kernel
def keep_likely(ids, s, e, count, min_p):
    """Those at least `min_p` times as likely as the likeliest, moved to the front; their number, or UNSURE."""
    best, kept, least = s[0], 0, math.log(min_p)
    for i in range(1, count):
        best = max(best, s[i])
    for i in range(count):
        over = s[i] - best - least
        if abs(over) < CLOSE and s[i] != best:
            return UNSURE
        if over > 0 or s[i] == best:
            ids[kept], s[kept], e[kept] = ids[i], s[i], e[i]
            kept += 1
    return kept


@kernel
def draw(ids, e, count, point):
    """The token at `point` of the whole of the cumulative sum, or UNSURE."""
    if count == 1:
        return ids[0]
    total, after = 0.0, 0.0
    for i in range(count):
        total += e[i]
    point *= total
    for i in range(count):
        before, after = after, after + e[i]
        if after > point:
            clear = after - point > CLOSE * total and (i == 0 or point - before > CLOSE * total)
            return ids[i] if clear else UNSURE
    return UNSURE


@kernel
def finish(ids, s, total, center, reach, top_p, min_p, typical_p, point):
    """The token that is drawn from the candidates: ids, ascending, and their scaled logits.

    `total` is the sum of all chances, 0 where the candidates are all there are. Typical-p looks at the distance from
    `center`, the mean of the scaled logits; candidates further away than `reach` are not among them.
    """
    count = ids.shape[0]
    e = chances_of(s, count)
    if typical_p < 1:
        if total == 0:
            moment = 0.0
            for i in range(count):
                total += e[i]
                moment += e[i] * max(s[i], -1e9)
            center = moment / total
        keys = distances(s, count, center, False)
        count = keep_until(keys, ids, s, e, count, typical_p * total, reach, CLOSE * total)
        total, reach = 0.0, np.inf
    if top_p < 1 and count > 0:
        for i in range(count if total == 0 else 0):
            total += e[i]
        keys = distances(s, count, 0.0, True)
        count = keep_until(keys, ids, s, e, count, top_p * total, reach, CLOSE * total)
    if min_p > 0 and count > 0:
        count = keep_likely(ids, s, e, count, min_p)
    return draw(ids, e, count, point) if count > 0 else UNSURE


@kernel
def uniform(seed, choice, position):
    """A number in [0, 1): Philox4x32-10, as in `../sampling.py`."""
    mask, low = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1 = np.uint64(position) & mask, np.uint64(choice) & mask
    c2, c3 = np.uint64(position) >> low, np.uint64(0)
    k0, k1 = seed & mask, seed >> low
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> low) ^ c1 ^ k0, p1 & mask, (p0 >> low) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    return np.float64((c0 << np.uint64(21)) | (c1 >> np.uint64(11))) * 2.0**-53
