"""Sampling kernels for one row: penalties, candidates by top-k, top-p, min-p and typical-p, the draw, log-softmax.

Finding candidates reads all logits as few times as possible: the maximum of each block of 64 logits tells which blocks
to look at; nothing is sorted. Filters then keep the fewest candidates, best first, whose probabilities add up to some
mass: the last of them is found by partitioning, as the k-th largest of a list is. `../../reference_sampling.py` defines
the result; UNDECIDED leaves a near tie to it.

A mask says which tokens are allowed (see simd.py): all of them where a row has none, so that one variant is compiled.
Rows with a temperature have a kernel of their own, and so have those with penalties or biases, whose logits are
float64. Both are compiled behind the first answer (../precompile.py); until then such rows are UNDECIDED.
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np

from ...reference_sampling import MAX_LOGIT
from ..jit import TaskKernel
from ..jit import simple_kernel as kernel
from . import simd as f
from .pointers import call_task, f32, f64, i32, i64
from .program import Step
from .simd import LANES
from .simd import MIN_EXPONENT_F64 as MIN_EXPONENT

BLOCK, WIDE_BLOCK = 64, 1024  # logits whose largest is known; the second where only one token is looked for
MIN_BUCKETED_KEYS, BUCKETS, BUCKETS_PER_UNIT = 256, 512, 16  # more keys are worth buckets; a unit of distance
TIE_TOLERANCE = 1e-10  # two sums or keys nearer than this are left to the reference
UNDECIDED, NOT_FINITE = -1, -2
# Integers and floats of a row; MASK, WINDOW, OUTPUT_IDS, BIAS_IDS and BIAS_VALUES are addresses.
RowInt = IntEnum(
    "RowInt",
    "MASK HAS_PENALTIES TOP_K SEED SAMPLE_INDEX POSITION WINDOW WINDOW_SIZE OUTPUT_IDS OUTPUT_SIZE "
    "BIAS_IDS BIAS_VALUES BIAS_SIZE COUNT",
    start=0,
)
SampleArg = IntEnum("SampleArg", "DRAWN PENALIZED", start=0)  # addresses of kernels, 0 until they are compiled
LogprobArg = IntEnum("LogprobArg", "K MASKS TOP_IDS TOP CHOSEN", start=0)
RowFloat = IntEnum("RowFloat", "TEMPERATURE TOP_P MIN_P TYPICAL_P REPETITION PRESENCE FREQUENCY COUNT", start=0)


@kernel
def kth_largest(values, k):
    """Return the k-th largest; the values change places."""
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
def exp_all(s, count):
    """Return exp of each of the first `count` values."""
    made, whole = np.empty(count, np.float64), count - count % LANES
    for i in range(0, whole, LANES):
        f.store(made, i, f.exp(f.load_f64(s, i)))
    for i in range(whole, count):
        made[i] = math.exp(s[i]) if s[i] >= MIN_EXPONENT else 0.0
    return made


@kernel
def find_boundary(keys, e, mass):
    """Return the key at which the sum of e, by ascending keys, reaches `mass`, and the sum before it."""
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
    """Return the bucket of a key of 0 or more; the last bucket has no end."""
    return int(key * BUCKETS_PER_UNIT) if key * BUCKETS_PER_UNIT < BUCKETS - 1 else BUCKETS - 1


@kernel
def find_boundary_bucketed(keys, e, count, mass):
    """Do the same for the first `count` without moving them; of many keys only one bucket is partitioned."""
    if count < MIN_BUCKETED_KEYS:
        return find_boundary(keys[:count].copy(), e[:count].copy(), mass)
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
    last, inside = find_boundary(some[:found], their[:found], mass - before)
    return last, before + inside


@kernel
def keep_mass(keys, ids, s, e, count, mass, radius, close):
    """Move the candidates with the smallest keys whose e add up to `mass` to the front; return their number."""
    mass = max(mass, 1e-300)  # at least one is kept
    last, sum_before = find_boundary_bucketed(keys, e, count, mass)
    near = TIE_TOLERANCE * (1 + abs(last))
    if not last < radius - 2 * near:
        return UNDECIDED
    kept, taken, before, tie = 0, sum_before, 0.0, np.nan
    for i in range(count):
        if abs(keys[i] - last) < near and keys[i] != last:
            return UNDECIDED
        if keys[i] == last:
            if tie == tie and tie != s[i]:
                return UNDECIDED
            tie = s[i]
            if taken >= mass:
                continue
            before = taken
            taken += e[i]
        elif keys[i] > last:
            continue
        ids[kept], s[kept], e[kept] = ids[i], s[i], e[i]
        kept += 1
    return kept if (kept == 1 or before < mass - close) and taken > mass + close else UNDECIDED


@kernel
def keep_min_p(ids, s, e, count, min_p):
    """Move those at min_log `min_p` times as likely as the likeliest to the front; return their number or UNDECIDED."""
    best, kept, min_log = s[0], 0, math.log(min_p)
    for i in range(1, count):
        best = max(best, s[i])
    for i in range(count):
        over = s[i] - best - min_log
        if abs(over) < TIE_TOLERANCE and s[i] != best:
            return UNDECIDED
        if over > 0 or s[i] == best:
            ids[kept], s[kept], e[kept] = ids[i], s[i], e[i]
            kept += 1
    return kept


@kernel
def draw_candidate(ids, e, count, point):
    """Return the token at `point` (0 to 1) of the cumulative sum, or UNDECIDED."""
    if count == 1:
        return ids[0]
    total, after = 0.0, 0.0
    for i in range(count):
        total += e[i]
    point *= total
    for i in range(count):
        before, after = after, after + e[i]
        if after > point:
            clear = after - point > TIE_TOLERANCE * total and (i == 0 or point - before > TIE_TOLERANCE * total)
            return ids[i] if clear else UNDECIDED
    return UNDECIDED


@kernel
def filter_and_draw(ids, s, total, center, radius, top_p, min_p, typical_p, point):
    """Return the token drawn from the candidates: ids, ascending, and their scaled logits.

    `total` is the sum over all tokens, 0 if the candidates are all there are. Typical-p sorts by the distance from
    `center`, the mean of the scaled logits; tokens further away than `radius` are not among the candidates.
    """
    count = ids.shape[0]
    e = exp_all(s, count)
    if typical_p < 1:
        if total == 0:
            moment = 0.0
            for i in range(count):
                total += e[i]
                moment += e[i] * max(s[i], -1e9)
            center = moment / total
        keys = np.abs(s - center)
        count = keep_mass(keys, ids, s, e, count, typical_p * total, radius, TIE_TOLERANCE * total)
        total, radius = 0.0, np.inf
    if top_p < 1 and count > 0:
        for i in range(count if total == 0 else 0):
            total += e[i]
        count = keep_mass(-s, ids, s, e, count, top_p * total, radius, TIE_TOLERANCE * total)
    if min_p > 0 and count > 0:
        count = keep_min_p(ids, s, e, count, min_p)
    return draw_candidate(ids, e, count, point) if count > 0 else UNDECIDED


@kernel
def uniform(seed, choice, position):
    """Return a number in [0, 1) by Philox4x32-10, as the reference does."""
    mask, low = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1 = np.uint64(position) & mask, np.uint64(choice) & mask
    c2, c3 = np.uint64(position) >> low, np.uint64(0)
    k0, k1 = seed & mask, seed >> low
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> low) ^ c1 ^ k0, p1 & mask, (p0 >> low) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    return np.float64((c0 << np.uint64(21)) | (c1 >> np.uint64(11))) * 2.0**-53


@kernel
def block_max(x, mask):
    """Return the maximum of each block, and the largest of all, NaN if there is one among float32."""
    maxima, whole = np.empty((x.shape[0] + BLOCK - 1) // BLOCK, x.dtype), x.shape[0] // BLOCK
    marks, top = f.splat(x.dtype.type(0)), f.splat(x.dtype.type(-np.inf))
    for b in range(whole):
        i = b * BLOCK
        if not f.allows_any(mask, i):
            maxima[b] = -np.inf
            continue
        p, q = f.load_allowed(x, i, mask), f.load_allowed(x, i + 16, mask)
        r, s = f.load_allowed(x, i + 32, mask), f.load_allowed(x, i + 48, mask)
        if x.itemsize == 4:  # float64 logits were made of finite float32 ones
            marks = f.nan_mask(f.nan_mask(marks, p, q), r, s)
        highest = f.max_nan_second(f.max_nan_second(p, q), f.max_nan_second(r, s))
        maxima[b], top = f.hmax(highest), f.max_nan_second(highest, top)
    mark, best = f.hsum(marks), f.hmax(top)
    if whole < maxima.shape[0]:
        maxima[whole] = -np.inf
        for i in range(whole * BLOCK, x.shape[0]):
            if f.is_allowed(mask, i):
                maxima[whole] = max(maxima[whole], x[i])
                mark = mark if x[i] == x[i] else x[i]
        best = max(best, maxima[whole])
    return maxima, best if mark == mark else mark


@kernel
def gather_above(x, maxima, low, high, ids, mask):
    """Write the ids of logits in low .. high, ascending; return their number."""
    count = 0
    for b in range(maxima.shape[0]):
        if maxima[b] >= low:
            for i in range(b * BLOCK, min(x.shape[0], b * BLOCK + BLOCK)):
                ids[count] = i  # where it is not one of them, the next one is written over it
                count += low <= x[i] <= high and f.is_allowed(mask, i)
    return count


@kernel
def gather_top(x, maxima, k, ids, mask):
    """Write the ids of logits from a lower bound of the k-th largest on, ascending; return their number and it."""
    some = maxima.copy() if 2 * k <= maxima.shape[0] else x.copy()
    for i in range(x.shape[0] if some.shape[0] == x.shape[0] else 0):
        some[i] = some[i] if f.is_allowed(mask, i) else -np.inf
    low = kth_largest(some, k)
    return gather_above(x, maxima, low, np.inf, ids, mask), low


@kernel
def scale_logits(x, best, temperature, ids, count, s):
    """Write s = (x - best) / temperature of the first `count` ids."""
    for i in range(count):
        s[i] = (np.float64(x[ids[i]]) - best) / temperature


@kernel
def exp_sums(x, best, temperature, sums, mask):
    """Write the sum of e^s, s = (x - best) / temperature, of each block; return the sums of e^s and of s * e^s."""
    rate, less = f.splat(1 / temperature), f.splat(-best)
    whole, total, moment = x.shape[0] // BLOCK, 0.0, f.splat(0.0)
    for b in range(whole):
        some = f.splat(0.0)
        for i in range(b * BLOCK, b * BLOCK + BLOCK if f.allows_any(mask, b * BLOCK) else 0, LANES):
            scaled = f.mul(f.add(f.load_allowed_f64(x, i, mask), less), rate)
            s = f.max_nan_second(scaled, f.splat(2 * MIN_EXPONENT))
            e = f.exp(s)
            some, moment = f.add(some, e), f.fma(e, s, moment)
        sums[b] = f.hsum(some)
        total += sums[b]
    rest = f.hsum(moment)
    if whole < sums.shape[0]:
        sums[whole] = 0
        for i in range(whole * BLOCK, x.shape[0]):
            s = (x[i] - best) / temperature
            if s > MIN_EXPONENT and f.is_allowed(mask, i):
                sums[whole] += math.exp(s)
                rest += math.exp(s) * s
        total += sums[whole]
    return total, rest


@kernel
def draw_from_blocks(x, best, temperature, sums, total, point, mask):
    """Return the token at `point` of the cumulative sum over all tokens, or UNDECIDED."""
    close, before, b = TIE_TOLERANCE * total, 0.0, 0
    while b < sums.shape[0] - 1 and before + sums[b] <= point:
        before += sums[b]
        b += 1
    for i in range(b * BLOCK, min(x.shape[0], b * BLOCK + BLOCK)):
        if not f.is_allowed(mask, i):
            continue
        after = before + math.exp((x[i] - best) / temperature)
        if after > point:
            return i if point - before > close and after - point > close else UNDECIDED
        before = after
    return UNDECIDED


@kernel
def select_top_k(x, maxima, best, temperature, k, ids, mask):
    """Write the ids of the k largest, ascending, lowest ids among equals; return their number or UNDECIDED."""
    found, low = gather_top(x, maxima, k, ids, mask)
    k = min(k, found)
    s = np.empty(found, np.float64)
    scale_logits(x, best, temperature, ids, found, s)
    kth = kth_largest(s.copy(), k)
    below = np.nextafter(low, x.dtype.type(-np.inf))
    if kth > -np.inf and (np.float64(below) - best) / temperature >= kth:
        return UNDECIDED  # a smaller logit may be its equal after the division
    ties, count = k, 0
    for i in range(found):
        ties -= s[i] > kth
    for i in range(found):
        if s[i] > kth or (s[i] == kth > -np.inf and ties > 0):
            ties -= s[i] == kth
            ids[count] = ids[i]
            count += 1
    return count


@kernel
def widen_until_mass(x, maxima, best, temperature, center, mass, ids, s, mask):
    """Gather candidates around `center` (0: the likeliest) that add up to `mass`; return (number, radius)."""
    radius = 2.0
    while radius < -2 * MIN_EXPONENT:
        low, high = best + temperature * (center - radius), best + temperature * (center + radius)
        found, total = gather_above(x, maxima, low, high, ids, mask), 0.0
        scale_logits(x, best, temperature, ids, found, s)
        for e in exp_all(s, found):
            total += e
        if total > mass:
            return found, radius
        radius *= 2
    return UNDECIDED, radius


@kernel
def greedy(x, mask):
    """Return the lowest id of the largest logit, or NOT_FINITE."""
    marks, best, first = f.splat(x.dtype.type(0)), x.dtype.type(-np.inf), 0
    whole = x.shape[0] // WIDE_BLOCK * WIDE_BLOCK
    for start in range(0, whole, WIDE_BLOCK):
        a = b = c = d = f.splat(x.dtype.type(-np.inf))
        for i in range(start, start + WIDE_BLOCK, BLOCK):
            if not f.allows_any(mask, i):
                continue
            p, q = f.load_allowed(x, i, mask), f.load_allowed(x, i + 16, mask)
            r, s = f.load_allowed(x, i + 32, mask), f.load_allowed(x, i + 48, mask)
            if x.itemsize == 4:  # float64 logits were made of finite float32 ones
                marks = f.nan_mask(f.nan_mask(marks, p, q), r, s)
            a, b, c, d = f.max_nan_second(p, a), f.max_nan_second(q, b), f.max_nan_second(r, c), f.max_nan_second(s, d)
        largest = f.hmax(f.max_nan_second(f.max_nan_second(a, b), f.max_nan_second(c, d)))
        if largest > best:
            best, first = largest, start
    mark = f.hsum(marks)
    for i in range(whole, x.shape[0]):
        if f.is_allowed(mask, i):
            mark = mark if x[i] == x[i] else x[i]
            if x[i] > best:
                best, first = x[i], i
    if not (mark == mark and math.isfinite(best)):
        return NOT_FINITE
    while not (x[first] == best and f.is_allowed(mask, first)):
        first += 1
    return first


@kernel
def find_candidates(x, temperature, top_k, top_p, min_p, typical_p, point, ids, s, mask):
    """Return (token, 0, ...) if it is clear, or (UNDECIDED, number of candidates, sum over all, center, radius)."""
    maxima, largest = block_max(x, mask)
    best, count, total, center, radius = np.float64(largest), 0, 0.0, 0.0, np.inf
    if not math.isfinite(best):
        return NOT_FINITE, 0, total, center, radius
    if temperature < TIE_TOLERANCE * max(1.0, abs(best)):
        return UNDECIDED, 0, total, center, radius
    if 0 < top_k < x.shape[0]:
        count = select_top_k(x, maxima, best, temperature, top_k, ids, mask)
    elif typical_p < 1 or top_p < 1 or min_p == 0:
        sums = np.empty(maxima.shape[0], np.float64)
        total, moment = exp_sums(x, best, temperature, sums, mask)
        if typical_p < 1 or top_p < 1:
            center = moment / total if typical_p < 1 else 0.0
            mass = (typical_p if typical_p < 1 else top_p) + 2 * TIE_TOLERANCE
            count, radius = widen_until_mass(x, maxima, best, temperature, center, mass * total, ids, s, mask)
        else:
            token = draw_from_blocks(x, best, temperature, sums, total, point * total, mask)
            return token, 0, total, center, radius
    else:
        count = gather_above(x, maxima, best + temperature * (math.log(min_p) - 1e-6), np.inf, ids, mask)
    scale_logits(x, best, temperature, ids, count, s)
    return UNDECIDED, count, total, center, radius


@kernel
def draw_token(x, temperature, top_k, top_p, min_p, typical_p, point, mask):
    """Return the token at `point` (0 to 1) of the candidates' cumulative probability, UNDECIDED or NOT_FINITE."""
    ids, s = np.empty(x.shape[0], np.int64), np.empty(x.shape[0], np.float64)
    token, count, total, center, radius = find_candidates(
        x, temperature, top_k, top_p, min_p, typical_p, point, ids, s, mask
    )
    if count <= 0:
        return token
    return filter_and_draw(ids[:count], s[:count], total, center, radius, top_p, min_p, typical_p, point)


@kernel
def log_softmax(x, chosen, k, top_ids, top, mask):
    """Return the log-softmax at `chosen` and write the k likeliest, best first; NaN if logits are not finite."""
    maxima, largest = block_max(x, mask)
    best = np.float64(largest)
    if not math.isfinite(best):
        return np.float32(np.nan)
    total, _ = exp_sums(x, best, 1.0, np.empty(maxima.shape[0], np.float64), mask)
    less, ids = math.log(total), np.empty(x.shape[0], np.int64)
    found = gather_top(x, maxima, k, ids, mask)[0] if k else 0
    for rank in range(found, k):
        top_ids[rank], top[rank] = 0, -np.inf
    for rank in range(min(k, found)):
        first = 0
        for i in range(1, found):
            if ids[first] < 0 or (ids[i] >= 0 and x[ids[i]] - best - less > x[ids[first]] - best - less):
                first = i
        top_ids[rank], top[rank] = ids[first], x[ids[first]] - best - less
        ids[first] = -1
    return np.float32(x[chosen] - best - less if f.is_allowed(mask, chosen) else -np.inf)


@kernel
def penalize_repetition(y, ints, floats):
    """Penalize each token of the window once: a positive logit is divided by the penalty, another multiplied."""
    seen, window, penalty = np.zeros(y.shape[0], np.uint8), i64(ints[RowInt.WINDOW]), floats[RowFloat.REPETITION]
    for i in range(ints[RowInt.WINDOW_SIZE]):
        token = window[i]
        if not seen[token]:
            seen[token] = 1
            value = y[token] / penalty if y[token] > 0 else y[token] * penalty
            y[token] = min(max(value, -MAX_LOGIT), MAX_LOGIT)


@kernel
def penalize_output(y, ints, floats):
    """Subtract the presence penalty and the frequency penalty times the count, once for each output token."""
    counts, output_ids = np.zeros(y.shape[0], np.int32), i64(ints[RowInt.OUTPUT_IDS])
    for i in range(ints[RowInt.OUTPUT_SIZE]):
        counts[output_ids[i]] += 1
    for i in range(ints[RowInt.OUTPUT_SIZE]):
        token = output_ids[i]
        if counts[token]:
            y[token] -= floats[RowFloat.PRESENCE] + floats[RowFloat.FREQUENCY] * np.float64(counts[token])
            counts[token] = 0


@kernel
def apply_penalties(x, ints, floats):
    """Return the logits as float64 with bias and penalties, and -inf for what the mask does not allow."""
    y = np.empty(x.shape[0], np.float64)
    for i in range(x.shape[0]):
        y[i] = x[i]
    ids, biases = i64(ints[RowInt.BIAS_IDS]), f64(ints[RowInt.BIAS_VALUES])
    for i in range(ints[RowInt.BIAS_SIZE]):
        y[ids[i]] += biases[i]
    if ints[RowInt.WINDOW_SIZE]:
        penalize_repetition(y, ints, floats)
    if ints[RowInt.OUTPUT_SIZE]:
        penalize_output(y, ints, floats)
    mask = i32(ints[RowInt.MASK])
    for i in range(x.shape[0]):
        y[i] = y[i] if f.is_allowed(mask, i) else -np.inf
    return y


@kernel
def draw_row(x, ints, floats, mask):
    """Draw a token by its probability."""
    point = uniform(np.uint64(ints[RowInt.SEED]), ints[RowInt.SAMPLE_INDEX], ints[RowInt.POSITION])
    top_p, min_p, typical_p = floats[RowFloat.TOP_P], floats[RowFloat.MIN_P], floats[RowFloat.TYPICAL_P]
    temperature, top_k = floats[RowFloat.TEMPERATURE], ints[RowInt.TOP_K]
    return draw_token(x, temperature, top_k, top_p, min_p, typical_p, point, mask)


@kernel
def row_logits(s, piece):
    """Return the logits of a row."""
    return f32(s[Step.LOGITS] + piece * s[Step.VOCABULARY] * 4)[: s[Step.VOCABULARY]]


@kernel
def row_settings(s, piece):
    """Return the integers, the floats and the mask of a row."""
    ints = i64(s[Step.SAMPLE_INTS] + piece * RowInt.COUNT * 8)
    return ints, f64(s[Step.SAMPLE_FLOATS] + piece * RowFloat.COUNT * 8), i32(ints[RowInt.MASK])


def sample_task(args, step, piece):
    """Sample one row: the likeliest token, or by the kernel of rows with penalties or a temperature."""
    s, a = i64(step), i64(args)
    (ints, floats, mask), tokens = row_settings(s, piece), i64(s[Step.SAMPLED_IDS])
    if ints[RowInt.HAS_PENALTIES]:
        kernel = a[SampleArg.PENALIZED]
    elif floats[RowFloat.TEMPERATURE] != 0:
        kernel = a[SampleArg.DRAWN]
    else:
        tokens[piece] = greedy(row_logits(s, piece), mask)
        return
    if kernel:
        call_task(kernel, args, step, piece)
    else:
        tokens[piece] = UNDECIDED


def drawn_task(args, step, piece):
    """Sample one row with a temperature."""
    s = i64(step)
    (ints, floats, mask), tokens = row_settings(s, piece), i64(s[Step.SAMPLED_IDS])
    tokens[piece] = draw_row(row_logits(s, piece), ints, floats, mask)


def penalized_task(args, step, piece):
    """Sample one row with bias or penalties."""
    s, x = i64(step), row_logits(i64(step), piece)
    (ints, floats, mask), tokens = row_settings(s, piece), i64(s[Step.SAMPLED_IDS])
    if not math.isfinite(block_max(x, mask)[1]):
        tokens[piece] = NOT_FINITE
        return
    y = apply_penalties(x, ints, floats)
    tokens[piece] = greedy(y, mask) if floats[RowFloat.TEMPERATURE] == 0 else draw_row(y, ints, floats, mask)


def logprobs_task(args, step, piece):
    """Write the log-softmax of one row at its chosen token, and its k likeliest tokens."""
    s, a = i64(step), i64(args)
    k = a[LogprobArg.K]
    x, chosen, mask = row_logits(s, piece), i64(s[Step.SAMPLED_IDS])[piece], i32(i64(a[LogprobArg.MASKS])[piece])
    top_ids, top = i64(a[LogprobArg.TOP_IDS] + piece * k * 8)[:k], f32(a[LogprobArg.TOP] + piece * k * 4)[:k]
    chosen_logprobs = f32(a[LogprobArg.CHOSEN])
    chosen_logprobs[piece] = log_softmax(x, chosen, k, top_ids, top, mask)


SAMPLE, DRAWN, PENALIZED, LOGPROBS = map(TaskKernel, (sample_task, drawn_task, penalized_task, logprobs_task))
