"""Which tokens survive: top-k, typical-p, top-p and min-p as parts of the kernel in choosing.py, one program a row.

Nothing is sorted: a filter finds where it cuts by bisection between numbers that are there. Sums come out in another
order than the meaning (`../sampling.py`) adds them, so a decision that is nearer than CLOSE is left open. Scratch of a
row: scaled logits s and e = exp(s), float64; what is dropped has s = -inf and e = 0. Every pass that writes ends with a
barrier, since other threads read it.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
