"""How the next token is drawn, as a kernel: one program for each row of logits, in the order of `../sampling.py`.

Bias and penalties come as lists of tokens; chances are float64; filters.py keeps the best of them. Where the
choice is too close for sums in another order it says UNSURE, and the meaning itself is asked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .filters import CLOSE, COUNT, INF, MASS, SURPRISE, keep_best, keep_likely, mean_surprise
from .scoring import is_fine

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
