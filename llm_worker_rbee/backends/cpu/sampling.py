"""Fast sampling: the same tokens as `../reference_sampling.py`, which defines them and the order of the filters.

The kernels (sampling_kernels.py) add up probabilities in another order than the reference, so the last digits differ:
where a decision is so close that it might come out otherwise they return UNDECIDED, and the reference sampler decides.

A row of a batch has integers (`RowInt`) and floats (`RowFloat`), in two tables that the step points at; the tokens that
penalties look at are given by address. A program samples all rows at once, one piece per row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import Any

import numba as nb
import numpy as np
from numpy.typing import NDArray

from .. import reference_sampling
from ..ops import Ints, Logprobs, SampleRow, TokenMask
from ..reference_sampling import MAX_LOGIT
from .jit import PythonKernel, TaskKernel
from .jit import simple_kernel as kernel
from .kernels import sampling as kernels
from .kernels import simd as f
from .kernels.pointers import f32, f64, i32, i64
from .program import Program, Step, Task, new_step, pack_args, threads_in_use

Floats = NDArray[np.float32]
MAX_GREEDY_ROWS = 4  # without a program


# Integers and floats of a row; MASK, WINDOW, OUTPUT_IDS, BIAS_IDS and BIAS_VALUES are addresses.
RowInt = IntEnum(
    "RowInt",
    "MASK HAS_PENALTIES TOP_K SEED SAMPLE_INDEX POSITION WINDOW WINDOW_SIZE OUTPUT_IDS OUTPUT_SIZE "
    "BIAS_IDS BIAS_VALUES BIAS_SIZE COUNT",
    start=0,
)
RowFloat = IntEnum("RowFloat", "TEMPERATURE TOP_P MIN_P TYPICAL_P REPETITION PRESENCE FREQUENCY COUNT", start=0)


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
    for i in range(x.shape[0] if ints[RowInt.MASK] else 0):
        y[i] = y[i] if f.is_allowed(mask, i) else -np.inf
    return y


@kernel
def draw_row(x, ints, floats, mask):
    """Draw a token by its probability."""
    point = kernels.uniform(np.uint64(ints[RowInt.SEED]), ints[RowInt.SAMPLE_INDEX], ints[RowInt.POSITION])
    top_p, min_p, typical_p = floats[RowFloat.TOP_P], floats[RowFloat.MIN_P], floats[RowFloat.TYPICAL_P]
    temperature, top_k = floats[RowFloat.TEMPERATURE], ints[RowInt.TOP_K]
    return kernels.draw_token(x, temperature, top_k, top_p, min_p, typical_p, point, mask)


@kernel
def sample_penalized(x, ints, floats):
    """Return the token of a row with bias or penalties."""
    largest = kernels.block_max(x, i32(ints[RowInt.MASK]))[1] if ints[RowInt.MASK] else kernels.block_max(x, None)[1]
    if not math.isfinite(largest):
        return kernels.NOT_FINITE
    y = apply_penalties(x, ints, floats)
    return kernels.greedy(y, None) if floats[RowFloat.TEMPERATURE] == 0 else draw_row(y, ints, floats, None)


@kernel
def sample_row(x, ints, floats, mask):
    """Return the token of a row without penalties."""
    return kernels.greedy(x, mask) if floats[RowFloat.TEMPERATURE] == 0 else draw_row(x, ints, floats, mask)


def sample_task(args, step, piece):
    """Sample one row."""
    s = i64(step)
    width = s[Step.VOCABULARY]
    x = f32(s[Step.LOGITS] + piece * width * 4)[:width]
    ints = i64(s[Step.SAMPLE_INTS] + piece * RowInt.COUNT * 8)
    floats, tokens = f64(s[Step.SAMPLE_FLOATS] + piece * RowFloat.COUNT * 8), i64(s[Step.TOKEN_IDS])
    if ints[RowInt.HAS_PENALTIES]:
        tokens[piece] = sample_penalized(x, ints, floats)
    elif ints[RowInt.MASK]:
        tokens[piece] = sample_row(x, ints, floats, i32(ints[RowInt.MASK]))
    else:
        tokens[piece] = sample_row(x, ints, floats, None)


SAMPLE = TaskKernel(sample_task)


def sample(logits: Floats, rows: Sequence[SampleRow], threads: int) -> Ints:
    """Sample one token for each row: (N, vocabulary) -> (N,)."""
    assert len(logits) == len(rows), "each row of logits has its settings"
    logits = np.ascontiguousarray(logits, np.float32)
    if _is_faster_alone(rows):
        found = [_sample_alone(line, row) for line, row in zip(logits, rows, strict=True)]
        tokens = np.array(found, np.int64)
        if min(found, default=0) >= 0:
            return tokens
    else:
        tokens = _sample_batch(logits, rows, threads)
    for i in np.flatnonzero(tokens < 0).tolist():  # undecided; or not finite, which the reference raises for
        tokens[i] = reference_sampling.sample_row(logits[i], rows[i])
    return tokens


def _is_faster_alone(rows: Sequence[SampleRow]) -> bool:
    """Return whether starting a program would take longer than the rows."""
    if len(rows) == 1:
        return not rows[0].has_penalties
    return len(rows) <= MAX_GREEDY_ROWS and all(row.temperature == 0 and not row.has_penalties for row in rows)


def _sample_alone(logits: Floats, row: SampleRow) -> int:
    return int(kernels.greedy(logits, row.mask)) if row.temperature == 0 else draw(logits, row)


def _sample_batch(logits: Floats, rows: Sequence[SampleRow], threads: int) -> Ints:
    """Sample all rows as one program."""
    row_ints: list[int] = []
    row_floats: list[float] = []
    held: list[NDArray[Any]] = []
    for row in rows:
        row_ints += _pack_ints(row, held)
        row_floats += (
            row.temperature, row.top_p, row.min_p, row.typical_p, row.repetition_penalty, row.presence_penalty,
            row.frequency_penalty,
        )  # fmt: skip
    tokens, step = np.empty(len(rows), np.int64), new_step()
    ints, floats = np.array(row_ints, np.uint64), np.array(row_floats, np.float64)
    assert ints.size == len(rows) * RowInt.COUNT
    assert floats.size == len(rows) * RowFloat.COUNT
    step[Step.TOKENS], step[Step.VOCABULARY] = len(rows), logits.shape[-1]
    step[Step.LOGITS], step[Step.TOKEN_IDS] = logits.ctypes.data, tokens.ctypes.data
    step[Step.SAMPLE_INTS], step[Step.SAMPLE_FLOATS] = ints.ctypes.data, floats.ctypes.data
    _sample_program().run(step, threads_in_use(threads))
    return tokens


def _pack_ints(row: SampleRow, held: list[NDArray[Any]]) -> tuple[int, ...]:
    """Return the integers of a row; arrays that it points at are added to `held`."""
    settings = row.top_k, row.seed, row.sample_index, row.position
    mask = 0 if row.mask is None else row.mask.ctypes.data
    if not row.has_penalties:
        return (mask, 0, *settings, 0, 0, 0, 0, 0, 0, 0)
    window = row.penalty_window if row.repetition_penalty != 1.0 else row.penalty_window[:0]
    output_ids = row.output_ids if row.presence_penalty or row.frequency_penalty else row.output_ids[:0]
    arrays = [
        np.ascontiguousarray(window, np.int64),
        np.ascontiguousarray(output_ids, np.int64),
        np.array([token for token, _ in row.logit_bias], np.int64),
        np.array([bias for _, bias in row.logit_bias], np.float64),
    ]
    held += arrays
    a, b, c, d = (array.ctypes.data for array in arrays)
    return (mask, 1, *settings, a, len(window), b, len(output_ids), c, d, len(row.logit_bias))


@cache
def _sample_program() -> Program:
    return Program([Task(SAMPLE, pack_args(0), 1, Step.TOKENS, 1)])


def draw(x: NDArray[Any], row: SampleRow) -> int:
    """Draw a token of one row without penalties; it may be UNDECIDED or kernels.NOT_FINITE."""
    temperature, top_p, min_p, typical_p = map(float, (row.temperature, row.top_p, row.min_p, row.typical_p))
    point = kernels.uniform(np.uint64(row.seed), row.sample_index, row.position)
    return int(kernels.draw_token(x, temperature, row.top_k, top_p, min_p, typical_p, point, row.mask))


def logprobs(logits: Floats, chosen: Ints, k: int, masks: Sequence[TokenMask | None] | None = None) -> Logprobs:
    """Return the log-softmax of the raw logits at the chosen tokens, and the k likeliest (ties: lowest id first).

    With masks it is over the tokens that they allow.
    """
    rows, k = len(logits), min(k, logits.shape[-1])
    found = np.empty(rows, np.float32)
    top_ids, top = np.empty((rows, k), np.int64), np.empty((rows, k), np.float32)
    logits = np.ascontiguousarray(logits)
    for i, token in enumerate(chosen.tolist()):
        mask = None if masks is None else masks[i]
        found[i] = kernels.log_softmax(logits[i], token, k, top_ids[i], top[i], mask)
        if found[i] != found[i]:
            reference_sampling.require_finite(reference_sampling.apply_mask(logits[i], mask))
    return Logprobs(found, top_ids, top)


_F32S, _IDS, _FLOAT, _INT = nb.float32[::1], nb.int64[::1], nb.float64, nb.int64
_MASKS = nb.none, nb.int32[::1]
PYTHON_KERNELS = (
    PythonKernel(kernels.uniform, nb.uint64, _INT, _INT),
    *(PythonKernel(kernels.greedy, _F32S, mask) for mask in _MASKS),
    *(PythonKernel(kernels.draw_token, _F32S, _FLOAT, _INT, *[_FLOAT] * 4, mask) for mask in _MASKS),
    *(PythonKernel(kernels.log_softmax, _F32S, _INT, _INT, _IDS, _F32S, mask) for mask in _MASKS),
)
