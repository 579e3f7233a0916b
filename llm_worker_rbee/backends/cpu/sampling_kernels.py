"""Typical-p, top-p, min-p and the draw over the candidates of one row: kernels on a few float64, by ascending ids.

A filter keeps the fewest candidates, best first, whose chances add up to some mass: the last of them is found by
partitioning, as the k-th largest of a list is. `../sampling.py` says what is meant; UNSURE says that it must be asked.

Which tokens of one row come into question: kernels that look through all logits as few times as they can.

The largest of each block of 64 logits tells which blocks to look at; nothing is sorted. What is found, ids (ascending)
and scaled logits, goes to filters.py. `../sampling.py` says what is meant; UNSURE says that it must be asked.
"""

from __future__ import annotations

import math

import numpy as np

from . import simd_f32 as f
from . import simd_f64 as w
from .jit import kernel, variant

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
