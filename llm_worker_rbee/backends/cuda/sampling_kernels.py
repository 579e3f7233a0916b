"""How the next token is drawn, as a kernel: one program for each row of logits, in the order of `../sampling.py`.

Bias and penalties come as lists of tokens; chances are float64; filters.py keeps the best of them. Where the
choice is too close for sums in another order it says UNSURE, and the meaning itself is asked.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST = tl.constexpr(1e300)  # a penalized logit stays a number
WHOLE, REAL = tl.constexpr(13), tl.constexpr(7)  # numbers of a row


@triton.jit
def uniform(whole):
    """Philox4x32-10 keyed by (seed, choice, position): a number in [0, 1)."""
    k0, k1 = tl.load(whole + 2).to(tl.uint32, bitcast=True), tl.load(whole + 3).to(tl.uint32, bitcast=True)
    c0, c1 = tl.load(whole + 6).to(tl.uint32, bitcast=True), tl.load(whole + 4).to(tl.uint32, bitcast=True)
    c2 = tl.load(whole + 7).to(tl.uint32, bitcast=True)
    c3 = tl.zeros_like(c2)
    for _ in tl.static_range(10):
        a, b = tl.full((), 0xD2511F53, tl.uint32), tl.full((), 0xCD9E8D57, tl.uint32)
        high0, low0, high1, low1 = tl.umulhi(a, c0), a * c0, tl.umulhi(b, c2), b * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + tl.full((), 0x9E3779B9, tl.uint32), k1 + tl.full((), 0xBB67AE85, tl.uint32)
    return (c0.to(tl.float64) * 2097152.0 + (c1 >> 11).to(tl.float64)) * 1.1102230246251565e-16


@triton.jit
def draw(e, vocabulary, part, BLOCK: tl.constexpr):
    """The token at that part of the cumulative sum in id order; UNSURE where it is too near to its neighbours."""
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(e + i, mask=i < vocabulary, other=0.0)
    whole = tl.sum(total, 0)
    point, close = part * whole, CLOSE * whole
    token, before, after, sum_before = vocabulary, whole * 0.0, whole * 0.0, whole * 0.0
    start = 0
    while (start < vocabulary) & (token == vocabulary):
        i = start + tl.arange(0, BLOCK)
        w = tl.load(e + i, mask=i < vocabulary, other=0.0)
        sums = sum_before + tl.cumsum(w, 0)
        token = tl.min(tl.where((sums > point) & (w > 0.0), i, vocabulary), 0)
        after = tl.sum(tl.where(i == token, sums, 0.0), 0)
        before = after - tl.sum(tl.where(i == token, w, 0.0), 0)
        sum_before += tl.sum(w, 0)
        start += BLOCK
    is_sure = (token < vocabulary) & (point - before > close) & (after - point > close)
    return tl.where(is_sure, token, -1)


@triton.jit
def widen(x, s, vocabulary, BLOCK: tl.constexpr):
    """float32 -> float64, for what changes logits. Gives whether a token can be chosen from them."""
    best = tl.full((BLOCK,), -INF, tl.float32)
    odd = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        values = tl.load(x + i, mask=i < vocabulary, other=-INF)
        odd |= (values != values).to(tl.int32)
        best = tl.maximum(best, values)
        tl.store(s + i, values.to(tl.float64), mask=i < vocabulary)
    tl.debug_barrier()
    return is_fine(tl.max(best, 0), odd)


@triton.jit
def clear(e, vocabulary, BLOCK: tl.constexpr):
    """All zero."""
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(e + i, 0.0, mask=i < vocabulary)
    tl.debug_barrier()


@triton.jit
def change(s, e, ids, biases, whole, real, vocabulary, BLOCK: tl.constexpr, SOME: tl.constexpr):
    """Bias, then the repetition penalty, then presence and frequency; e counts how often a token is listed."""
    first, second, third, last = tl.load(whole + 8), tl.load(whole + 9), tl.load(whole + 10), tl.load(whole + 11)
    for start in range(first, second, SOME):
        i = start + tl.arange(0, SOME)
        at = s + tl.load(ids + i, mask=i < second, other=0)
        bias = tl.load(biases + i - first + tl.load(whole + 12), mask=i < second, other=0.0)
        tl.store(at, tl.load(at, mask=i < second, other=0.0) + bias, mask=i < second)
    tl.debug_barrier()
    if third > second:
        factor = tl.load(real + 4)
        clear(e, vocabulary, BLOCK)
        for start in range(second, third, SOME):
            i = start + tl.arange(0, SOME)
            tl.store(e + tl.load(ids + i, mask=i < third, other=0), 1.0, mask=i < third)
        tl.debug_barrier()
        for start in range(0, vocabulary, BLOCK):
            i = start + tl.arange(0, BLOCK)
            v = tl.load(s + i, mask=i < vocabulary, other=0.0)
            changed = tl.where(v > 0.0, v / factor, v * factor)
            changed = tl.minimum(tl.maximum(changed, -MOST), MOST)
            listed = tl.load(e + i, mask=i < vocabulary, other=0.0) > 0.0
            tl.store(s + i, changed, mask=listed & (i < vocabulary))
        tl.debug_barrier()
    if last > third:
        presence, frequency = tl.load(real + 5), tl.load(real + 6)
        clear(e, vocabulary, BLOCK)
        for start in range(third, last, SOME):
            i = start + tl.arange(0, SOME)
            one = tl.full((SOME,), 1.0, tl.float64)
            tl.atomic_add(e + tl.load(ids + i, mask=i < last, other=0), one, mask=i < last)
        tl.debug_barrier()
        for start in range(0, vocabulary, BLOCK):
            i = start + tl.arange(0, BLOCK)
            v = tl.load(s + i, mask=i < vocabulary, other=0.0)
            count = tl.load(e + i, mask=i < vocabulary, other=0.0)
            tl.store(s + i, v - (presence + frequency * count), mask=(count > 0.0) & (i < vocabulary))
        tl.debug_barrier()


@triton.jit
def best_of(s, vocabulary, BLOCK: tl.constexpr):
    """The largest, and the lowest id that has it."""
    best = tl.full((BLOCK,), -INF, tl.float64)
    at = tl.full((BLOCK,), 2147483647, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(s + i, mask=i < vocabulary, other=-INF)
        at = tl.where(v > best, i, at)
        best = tl.where(v > best, v, best)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, at, 2147483647), 0)


@triton.jit
def scale(s, e, vocabulary, top, temperature, BLOCK: tl.constexpr):
    """s = (s - top) / temperature and e = exp(s); what has no chance is dropped."""
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = (tl.load(s + i, mask=i < vocabulary, other=-INF) - top) / temperature
        w = tl.where(v > -745.0, tl.exp(v), 0.0)
        tl.store(s + i, tl.where(w > 0.0, v, -INF), mask=i < vocabulary)
        tl.store(e + i, w, mask=i < vocabulary)
    tl.debug_barrier()


@triton.jit
def choose(
    logits, stride, whole, real, ids, biases, scratch, some, out, vocabulary,
    BLOCK: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Program = row. whole (rows, WHOLE): top_k, seed, choice, position as pairs of int32; where in `ids` its biased,
    recent and generated tokens begin, and their end; where its biases begin. real (rows, REAL): temperature, top_p,
    min_p, typical_p, the three penalties. scratch (rows, 2, vocabulary) and some (rows, 2, BLOCK): float64."""
    row = tl.program_id(0).to(tl.int64)
    s, e = scratch + 2 * row * vocabulary, scratch + (2 * row + 1) * vocabulary
    few = some + 2 * row * BLOCK
    whole += row * WHOLE
    real += row * REAL
    fine = widen(logits + row * stride, s, vocabulary, BLOCK)
    change(s, e, ids, biases, whole, real, vocabulary, BLOCK, SOME)
    top, token = best_of(s, vocabulary, BLOCK)
    temperature = tl.load(real)
    if (temperature > 0.0) & fine:
        scale(s, e, vocabulary, top, temperature, BLOCK)
        top_k, mass, part, typical = tl.load(whole), tl.load(real + 1), tl.load(real + 2), tl.load(real + 3)
        is_open = 0
        if (top_k > 0) & (top_k < vocabulary):
            is_open |= keep_best(s, e, few, vocabulary, top_k.to(tl.float64), 0.0, COUNT, BLOCK)
        if typical < 1.0:
            center = mean_surprise(s, e, vocabulary, BLOCK)
            is_open |= keep_best(s, e, few, vocabulary, typical, center, SURPRISE, BLOCK)
        if mass < 1.0:
            is_open |= keep_best(s, e, few, vocabulary, mass, 0.0, MASS, BLOCK)
        if part > 0.0:
            is_open |= keep_likely(e, s, vocabulary, part, BLOCK)
        token = tl.where(is_open == 0, draw(e, vocabulary, uniform(whole), BLOCK), -1)
    tl.store(out + row, tl.where(fine, token, -2))


CLOSE = tl.constexpr(1e-10)  # of all chances: how near two sums may be before their order is left to the meaning
STEPS = tl.constexpr(100)
COUNT, MASS, SURPRISE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
INF = tl.constexpr(float("inf"))


@triton.jit
def key_of(v, center, BY: tl.constexpr):
    """What a filter goes by, the larger the better: the logit, or how near the surprise is to its mean."""
    if BY == SURPRISE:
        return tl.where(v > -INF, -tl.abs(center - v), -INF)
    else:
        return v


@triton.jit
def weight_of(v, w, BY: tl.constexpr):
    """What a filter adds up."""
    if BY == COUNT:
        return (v > -INF).to(tl.float64)
    else:
        return w


@triton.jit
def weigh(s, e, vocabulary, low, center, BY: tl.constexpr, BLOCK: tl.constexpr):
    """The weight and the number of all keys from `low` on, the least of them, the largest key below, the largest."""
    total = tl.zeros((BLOCK,), tl.float64)
    count = tl.zeros((BLOCK,), tl.int32)
    least = tl.full((BLOCK,), INF, tl.float64)
    below = tl.full((BLOCK,), -INF, tl.float64)
    best = tl.full((BLOCK,), -INF, tl.float64)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(s + i, mask=i < vocabulary, other=-INF)
        w = tl.load(e + i, mask=i < vocabulary, other=0.0)
        key = key_of(v, center, BY)
        over = (key >= low) & (key > -INF)
        total += tl.where(over, weight_of(v, w, BY), 0.0)
        count += over.to(tl.int32)
        least = tl.minimum(least, tl.where(over, key, INF))
        below = tl.maximum(below, tl.where(over, -INF, key))
        best = tl.maximum(best, key)
    return tl.sum(total, 0), tl.sum(count, 0), tl.min(least, 0), tl.max(below, 0), tl.max(best, 0)


@triton.jit
def collect(s, e, few, vocabulary, low, high, center, BY: tl.constexpr, BLOCK: tl.constexpr):
    """The keys in low .. high, at most BLOCK of them, and their weights: from now on without the memory."""
    before = 0
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(s + i, mask=i < vocabulary, other=-INF)
        w = tl.load(e + i, mask=i < vocabulary, other=0.0)
        key = key_of(v, center, BY)
        here = (key >= low) & (key <= high)
        at = before + tl.cumsum(here.to(tl.int32), 0) - 1
        tl.store(few + at, key, mask=here & (at < BLOCK))
        tl.store(few + BLOCK + at, weight_of(v, w, BY), mask=here & (at < BLOCK))
        before += tl.sum(here.to(tl.int32), 0)
    tl.debug_barrier()
    i = tl.arange(0, BLOCK)
    key = tl.load(few + i, mask=i < before, other=-INF)
    weight = tl.load(few + BLOCK + i, mask=i < before, other=0.0)
    tl.debug_barrier()  # before the next filter writes there
    return key, weight


@triton.jit
def look_at(s, e, vocabulary, cut, center, BY: tl.constexpr, BLOCK: tl.constexpr):
    """Of the keys that are the cut: the least and the largest weight; and how many others are too near to it."""
    large = tl.zeros((BLOCK,), tl.float64)
    small = tl.full((BLOCK,), INF, tl.float64)
    near = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(s + i, mask=i < vocabulary, other=-INF)
        w = weight_of(v, tl.load(e + i, mask=i < vocabulary, other=0.0), BY)
        key = key_of(v, center, BY)
        large = tl.maximum(large, tl.where(key == cut, w, 0.0))
        small = tl.minimum(small, tl.where(key == cut, w, INF))
        near += ((key != cut) & (tl.abs(key - cut) <= CLOSE * (1.0 + tl.abs(cut)))).to(tl.int32)
    return tl.min(small, 0), tl.max(large, 0), tl.sum(near, 0)


@triton.jit
def drop(s, e, vocabulary, cut, center, equals, BY: tl.constexpr, BLOCK: tl.constexpr):
    """Keep what is above the cut, and the first `equals` of those that are the cut."""
    before = 0
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(s + i, mask=i < vocabulary, other=-INF)
        key = key_of(v, center, BY)
        same = (key == cut).to(tl.int32)
        gone = (key < cut) | ((key == cut) & (before + tl.cumsum(same, 0) > equals))
        tl.store(s + i, -INF, mask=gone & (i < vocabulary))
        tl.store(e + i, 0.0, mask=gone & (i < vocabulary))
        before += tl.sum(same, 0)
    tl.debug_barrier()


@triton.jit
def halfway(low, high):
    """A number above low, at most high."""
    middle = (low + high) * 0.5
    return tl.where(middle <= low, high, middle)


@triton.jit
def keep_best(s, e, few, vocabulary, wanted, center, BY: tl.constexpr, BLOCK: tl.constexpr):
    """The fewest keys, best first and lowest id first among equals, whose weights reach `wanted` (a number of tokens,
    or a part of their chances). Gives whether that is left open."""
    total, count, low, _, high = weigh(s, e, vocabulary, -INF, center, BY, BLOCK)
    need = wanted if BY == COUNT else wanted * total
    is_open = 0
    if (BY != COUNT) | (total > need):
        above = total * 0.0  # the weight of all keys over `high`; the cut lies in low .. high
        above_count = 0
        step = 0
        while (low < high) & (count - above_count > BLOCK) & (step < STEPS):
            some, number, least, below, _ = weigh(s, e, vocabulary, halfway(low, high), center, BY, BLOCK)
            enough = some >= need
            low = tl.where(enough, least, low)
            count = tl.where(enough, number, count)
            high = tl.where(enough, high, below)
            above = tl.where(enough, above, some)
            above_count = tl.where(enough, above_count, number)
            step += 1
        if (low < high) & (count - above_count <= BLOCK):
            keys, weights = collect(s, e, few, vocabulary, low, high, center, BY, BLOCK)
            known = above
            while (low < high) & (step < 2 * STEPS):
                over = keys >= halfway(low, high)
                some = known + tl.sum(tl.where(over, weights, 0.0), 0)
                enough = some >= need
                low = tl.where(enough, tl.min(tl.where(over, keys, INF), 0), low)
                high = tl.where(enough, high, tl.max(tl.where(over, -INF, keys), 0))
                above = tl.where(enough, above, some)
                step += 1
        small, large, near = look_at(s, e, vocabulary, low, center, BY, BLOCK)
        equals = tl.maximum(tl.ceil((need - above) / large), 1.0)
        if BY != COUNT:
            close = CLOSE * total
            is_over = above + equals * large - need > close
            is_under = (need - above - (equals - 1.0) * large > close) | ((above == 0.0) & (equals == 1.0))
            is_open = tl.where(is_over & is_under & (small == large) & (near == 0), 0, 1)
        is_open = tl.where((low < high) | (total <= 0.0), 1, is_open)
        drop(s, e, vocabulary, low, center, tl.minimum(equals, 1e9).to(tl.int32), BY, BLOCK)
    return is_open


@triton.jit
def mean_surprise(s, e, vocabulary, BLOCK: tl.constexpr):
    """Where s is as surprising as the mean: -log(e / total) is log(total) - s, and its mean follows."""
    total = tl.zeros((BLOCK,), tl.float64)
    moment = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(s + i, mask=i < vocabulary, other=-INF)
        w = tl.load(e + i, mask=i < vocabulary, other=0.0)
        total += w
        moment += tl.where(w > 0.0, w * v, 0.0)
    return tl.sum(moment, 0) / tl.sum(total, 0)


@triton.jit
def keep_likely(e, s, vocabulary, part, BLOCK: tl.constexpr):
    """min-p: what is at least `part` as likely as the likeliest. Gives whether that is left open."""
    best = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(e + i, mask=i < vocabulary, other=0.0))
    top = tl.max(best, 0)
    least = part * top
    near = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        w = tl.load(e + i, mask=i < vocabulary, other=0.0)
        near += ((w != top) & (w > 0.0) & (tl.abs(w - least) <= CLOSE * least)).to(tl.int32)
        gone = (w < least) & (w < top)
        tl.store(s + i, -INF, mask=gone & (i < vocabulary))
        tl.store(e + i, 0.0, mask=gone & (i < vocabulary))
    tl.debug_barrier()
    return tl.minimum(tl.sum(near, 0), 1)


UNSURE, NOT_FINITE = -1, -2  # what is said in place of a token


@triton.jit
def is_fine(top, odd):
    """Whether a token can be chosen from logits whose largest is `top`; `odd` marks those that are no numbers."""
    return (tl.max(odd, 0) == 0) & (top > -INF) & (top < INF)


@triton.jit
def greedy(logits, stride, out, vocabulary, BLOCK: tl.constexpr):
    """The largest of each row, the lowest id among equals; NOT_FINITE where there is none."""
    row = tl.program_id(0)
    best = tl.full((BLOCK,), -INF, tl.float32)
    at = tl.full((BLOCK,), 2147483647, tl.int32)
    odd = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < vocabulary, other=-INF)
        odd |= (x != x).to(tl.int32)
        at = tl.where(x > best, i, at)
        best = tl.where(x > best, x, best)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, at, 2147483647), 0)
    tl.store(out + row, tl.where(is_fine(top, odd), token, -2))


@triton.jit
def next_best(x, value, token, vocabulary, BLOCK: tl.constexpr):
    """What follows (value, token) when the largest come first, the lowest ids first among equals."""
    best = tl.full((BLOCK,), -INF, tl.float32)
    at = tl.full((BLOCK,), 2147483647, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(x + i, mask=i < vocabulary, other=-INF)
        left = (i < vocabulary) & ((v < value) | ((v == value) & (i > token)))
        better = left & ((v > best) | (at == 2147483647))
        at = tl.where(better, i, at)
        best = tl.where(better, v, best)
    top = tl.max(tl.where(at == 2147483647, -INF, best), 0)
    return top, tl.min(tl.where(best == top, at, 2147483647), 0)


@triton.jit(do_not_specialize=["k"])
def score(logits, stride, chosen, out, top_ids, vocabulary, k, BLOCK: tl.constexpr):
    """Log-softmax in float64 at the chosen token and at the k largest (lowest id first among equals), program = row:
    out (rows, 1 + k) float32, NaN where no token can be chosen; top_ids (rows, k)."""
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    best = tl.full((BLOCK,), -INF, tl.float32)
    odd = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        values = tl.load(x + i, mask=i < vocabulary, other=-INF)
        odd |= (values != values).to(tl.int32)
        best = tl.maximum(best, values)
    top = tl.max(best, 0)
    fine = is_fine(top, odd)
    wide = top.to(tl.float64)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.exp(tl.load(x + i, mask=i < vocabulary, other=-INF).to(tl.float64) - wide)
    less = tl.log(tl.sum(total, 0))
    own = tl.load(x + tl.load(chosen + row)).to(tl.float64) - wide - less
    tl.store(out + row * (1 + k), tl.where(fine, own, float("nan")).to(tl.float32))
    value, token = INF, -1
    for n in range(k):
        value, token = next_best(x, value, token, vocabulary, BLOCK)
        tl.store(out + row * (1 + k) + 1 + n, (value.to(tl.float64) - wide - less).to(tl.float32))
        tl.store(top_ids + row * k + n, token)
