"""Rows of a batch, each a piece of a program: all threads choose tokens at once. `../sampling.py` says what is meant.

A row has WHOLE integers and REAL floats, in two tables that the step points at; what penalties look at is told by its
address. The token is negative where the meaning must be asked (UNSURE) or there is nothing to choose from (NOT_FINITE).
"""

from __future__ import annotations

import math

import numpy as np

from ..reference_sampling import MOST
from .candidates import BLOCK, NARROW, NOT_FINITE, WIDE, first_of, greedy, tops_of, wide_tops_of
from .compile import Task, kernel, variant
from .filters import finish, uniform
from .memory import f32, f64, i64
from .step import Step

CHANGED, TOP_K, SEED, CHOICE, POSITION, RECENT, N_RECENT, MADE, N_MADE, BIASED, BIASES, N_BIASED = range(12)
WHOLE = 12
TEMPERATURE, TOP_P, MIN_P, TYPICAL_P, REPETITION, PRESENCE, FREQUENCY = range(7)
REAL = 7
FIND = None  # set for each variant
S_WIDTH, S_LOGITS, S_TOKENS, S_WHOLE, S_REAL = map(
    int, (Step.VOCABULARY, Step.LOGITS, Step.IDS, Step.CHOICES, Step.CHANCES)
)


@kernel
def repeated(y, whole, real):
    """Each recent token once: a positive logit is divided by the penalty, another multiplied."""
    seen, recent, penalty = np.zeros(y.shape[0], np.uint8), i64(whole[RECENT]), real[REPETITION]
    for i in range(whole[N_RECENT]):
        token = recent[i]
        if not seen[token]:
            seen[token] = 1
            value = y[token] / penalty if y[token] > 0 else y[token] * penalty
            y[token] = min(max(value, -MOST), MOST)


@kernel
def counted(y, whole, real):
    """Each generated token once: less by what its presence costs, and by what its number costs."""
    counts, made = np.zeros(y.shape[0], np.int32), i64(whole[MADE])
    for i in range(whole[N_MADE]):
        counts[made[i]] += 1
    for i in range(whole[N_MADE]):
        token = made[i]
        if counts[token]:
            y[token] -= real[PRESENCE] + real[FREQUENCY] * np.float64(counts[token])
            counts[token] = 0


@kernel
def penalized(x, whole, real):
    """Bias and penalties, on a copy of float64."""
    y = np.empty(x.shape[0], np.float64)
    for i in range(x.shape[0]):
        y[i] = x[i]
    ids, biases = i64(whole[BIASED]), f64(whole[BIASES])
    for i in range(whole[N_BIASED]):
        y[ids[i]] += biases[i]
    if whole[N_RECENT]:
        repeated(y, whole, real)
    if whole[N_MADE]:
        counted(y, whole, real)
    return y


@kernel
def wide_greedy(y):
    """The lowest id of the largest."""
    tops = np.empty((y.shape[0] + BLOCK - 1) // BLOCK, np.float64)
    return first_of(y, tops, wide_tops_of(y, tops))


@kernel
def is_finite(x):
    """Whether a token can be chosen."""
    return math.isfinite(tops_of(x, np.empty((x.shape[0] + BLOCK - 1) // BLOCK, np.float32)))


def drawn(x, whole, real):
    """A token by its chance."""
    ids, s = np.empty(x.shape[0], np.int64), np.empty(x.shape[0], np.float64)
    mass, least, typical = real[TOP_P], real[MIN_P], real[TYPICAL_P]
    point = uniform(np.uint64(whole[SEED]), whole[CHOICE], whole[POSITION])
    token, count, total, center, reach = FIND(x, real[TEMPERATURE], whole[TOP_K], mass, least, typical, point, ids, s)
    if count <= 0:
        return token
    return finish(ids[:count], s[:count], total, center, reach, mass, least, typical, point)


drawn_narrow = kernel(variant(drawn, "f32", FIND=NARROW))
drawn_wide = kernel(variant(drawn, "f64", FIND=WIDE))


@kernel
def chosen(x, whole, real):
    """The token of one row."""
    if whole[CHANGED]:
        if not is_finite(x):
            return NOT_FINITE
        y = penalized(x, whole, real)
        return wide_greedy(y) if real[TEMPERATURE] == 0 else drawn_wide(y, whole, real)
    return greedy(x) if real[TEMPERATURE] == 0 else drawn_narrow(x, whole, real)


def choose(args, step, piece):
    """One row."""
    s = i64(step)
    width = s[S_WIDTH]
    x = f32(s[S_LOGITS] + piece * width * 4)[:width]
    i64(s[S_TOKENS])[piece] = chosen(x, i64(s[S_WHOLE] + piece * WHOLE * 8), f64(s[S_REAL] + piece * REAL * 8))


CHOOSE = Task(choose)
