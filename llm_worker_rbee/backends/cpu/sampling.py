"""How the next token is chosen, fast: the same tokens as `../sampling.py`, which says what they are and in which order.

Kernels find the candidates (candidates.py), filter them and draw (filters.py). They add up chances in another order
than the meaning does, so the last digits differ: where a decision is so close that it might come out otherwise they
say UNSURE, and the meaning itself is asked.

Rows of a batch, each a piece of a program: all threads choose tokens at once. `../sampling.py` says what is meant.

A row has WHOLE integers and REAL floats, in two tables that the step points at; what penalties look at is told by its
address. The token is negative where the meaning must be asked (UNSURE) or there is nothing to choose from (NOT_FINITE).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numba as nb
import numpy as np
from numpy.typing import NDArray

from .. import reference_sampling as meaning
from ..ops import Ints, Logprobs, SampleRow
from ..reference_sampling import MAX_LOGIT
from .jit import Called, Task, kernel, variant
from .pointers import f32, f64, i64
from .program import Instruction, Program, Step, new_step, table_of
from .sampling_kernels import (
    BLOCK,
    NARROW,
    NOT_FINITE,
    WIDE,
    finish,
    first_of,
    greedy,
    log_chances,
    tops_of,
    uniform,
    wide_tops_of,
)

Floats = NDArray[np.float32]
FEW = 4  # rows of which the largest is wanted


def sample(logits: Floats, rows: Sequence[SampleRow]) -> Ints:
    """One token for each row: (N, vocabulary) -> (N,)."""
    assert len(logits) == len(rows), "each row of logits has its settings"
    logits = np.ascontiguousarray(logits, np.float32)
    if _are_easy(rows):
        tokens = np.array([_alone(line, row) for line, row in zip(logits, rows, strict=True)], np.int64)
    else:
        tokens = _together(logits, rows)
    if len(rows) and tokens.min() < 0:
        _ask(logits, rows, tokens)
    return tokens


def _are_easy(rows: Sequence[SampleRow]) -> bool:
    """Whether a program would take longer to begin than they take."""
    if len(rows) == 1:
        return not _is_changed(rows[0])
    return len(rows) <= FEW and all(row.temperature == 0 and not _is_changed(row) for row in rows)


def _alone(logits: Floats, row: SampleRow) -> int:
    return int(greedy(logits)) if row.temperature == 0 else _drawn(NARROW, logits, row)


def _ask(logits: Floats, rows: Sequence[SampleRow], tokens: Ints) -> None:
    """What the kernels left open."""
    for i in np.flatnonzero(tokens < 0).tolist():
        if tokens[i] == NOT_FINITE:
            meaning.require_finite(logits[i])
        tokens[i] = meaning.sample_row(logits[i], rows[i])


def _together(logits: Floats, rows: Sequence[SampleRow]) -> Ints:
    """All rows as one program."""
    whole: list[int] = []
    real: list[float] = []
    held: list[NDArray[Any]] = []
    for row in rows:
        whole += _whole(row, held)
        real += (
            row.temperature, row.top_p, row.min_p, row.typical_p, row.repetition_penalty, row.presence_penalty,
            row.frequency_penalty,
        )  # fmt: skip
    tokens, step = np.empty(len(rows), np.int64), new_step()
    choices, chances = np.array(whole, np.uint64), np.array(real, np.float64)
    assert choices.size == len(rows) * WHOLE
    assert chances.size == len(rows) * REAL
    step[Step.TOKENS], step[Step.VOCABULARY] = len(rows), logits.shape[-1]
    step[Step.LOGITS], step[Step.IDS] = logits.ctypes.data, tokens.ctypes.data
    step[Step.CHOICES], step[Step.CHANCES] = choices.ctypes.data, chances.ctypes.data
    _program().run(step)
    return tokens


def _whole(row: SampleRow, held: list[NDArray[Any]]) -> tuple[int, ...]:
    """The integers of a row; arrays that it points at are added to `held`."""
    plain = 0, row.top_k, row.seed, row.sample_index, row.position
    if not _is_changed(row):
        return (*plain, 0, 0, 0, 0, 0, 0, 0)
    recent = row.penalty_window if row.repetition_penalty != 1.0 else row.penalty_window[:0]
    made = row.output_ids if row.presence_penalty or row.frequency_penalty else row.output_ids[:0]
    biased, biases = (
        np.array([b[0] for b in row.logit_bias], np.int64),
        np.array([b[1] for b in row.logit_bias], np.float64),
    )
    arrays = [np.ascontiguousarray(recent, np.int64), np.ascontiguousarray(made, np.int64), biased, biases]
    held += arrays
    a, b, c, d = (array.ctypes.data for array in arrays)
    return (1, *plain[1:], a, len(recent), b, len(made), c, d, len(biased))


@cache
def _program() -> Program:
    return Program([Instruction(CHOOSE, table_of(0), 1, Step.TOKENS, 1)])


def _drawn(find: Any, x: NDArray[Any], row: SampleRow) -> int:
    ids, s = np.empty(x.size, np.int64), np.empty(x.size)
    heat, mass, typical, least = map(float, (row.temperature, row.top_p, row.typical_p, row.min_p))
    point = uniform(np.uint64(row.seed), row.sample_index, row.position)
    token, count, total, center, reach = find(x, heat, row.top_k, mass, least, typical, point, ids, s)
    if count <= 0:
        return int(token)
    return int(finish(ids[:count], s[:count], total, center, reach, mass, least, typical, point))


def _is_changed(row: SampleRow) -> bool:
    """Whether bias or penalties change a logit."""
    counted = (row.presence_penalty or row.frequency_penalty) and row.output_ids.size
    return bool(row.logit_bias or counted or (row.repetition_penalty != 1.0 and row.penalty_window.size))


def logprobs(logits: Floats, chosen: Ints, k: int) -> Logprobs:
    """Log-softmax of the raw logits: at the chosen tokens, and the k likeliest of each row (ties: lowest id first)."""
    rows, k = len(logits), min(k, logits.shape[-1])
    found = np.empty(rows, np.float32)
    top_ids, top = np.empty((rows, k), np.int64), np.empty((rows, k), np.float32)
    logits = np.ascontiguousarray(logits)
    for i, token in enumerate(chosen.tolist()):
        found[i] = log_chances(logits[i], token, k, top_ids[i], top[i])
        if found[i] != found[i]:
            meaning.require_finite(logits[i])
    return Logprobs(found, top_ids, top)


_NARROWS, _WIDES, _IDS = nb.float32[::1], nb.float64[::1], nb.int64[::1]
_ONE, _WHOLE = nb.float64, nb.int64
CALLED = (
    Called(greedy, _NARROWS),
    Called(uniform, nb.uint64, _WHOLE, _WHOLE),
    Called(NARROW, _NARROWS, _ONE, _WHOLE, *[_ONE] * 4, _IDS, _WIDES),
    Called(finish, _IDS, _WIDES, *[_ONE] * 7),
    Called(log_chances, _NARROWS, _WHOLE, _WHOLE, _IDS, _NARROWS),
)


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
            y[token] = min(max(value, -MAX_LOGIT), MAX_LOGIT)


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
