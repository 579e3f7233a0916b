"""The largest logits of a row, and log-probabilities: kernels with one program for each row."""

from __future__ import annotations

import triton
import triton.language as tl

from .filters import INF

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
