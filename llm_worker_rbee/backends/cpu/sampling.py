"""Fast sampling: the same tokens as `../reference_sampling.py`, which defines them and the order of the filters.

The kernels (kernels/sampling.py) add up probabilities in another order than the reference, so the last digits differ:
where a decision is so close that it might come out otherwise they return UNDECIDED, and the reference sampler decides.

A row of a batch has integers (`RowInt`) and floats (`RowFloat`), in two tables that the step points at; the tokens that
penalties look at are given by address. A program samples all rows at once, one piece per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import reference_sampling
from ..ops import Ints, Logprobs, SampleRow, TokenMask
from .jit import TaskKernel
from .kernels import sampling as kernels
from .kernels.program import Step, Table, Task, pack_args
from .kernels.sampling import RowFloat, RowInt
from .program import Program, new_step

Floats = NDArray[np.float32]
MAX_GREEDY_ROWS = 4  # without a program


def sample(logits: Floats, rows: Sequence[SampleRow], threads: int) -> Ints:
    """Sample one token for each row: (N, vocabulary) -> (N,)."""
    assert len(logits) == len(rows), "each row of logits has its settings"
    logits = np.ascontiguousarray(logits, np.float32)
    tokens = sample_with_kernels(logits, rows, threads)
    if tokens.min(initial=0) < 0:
        for i in np.flatnonzero(tokens < 0).tolist():  # undecided; or not finite, which the reference raises for
            tokens[i] = reference_sampling.sample_row(logits[i], rows[i])
    return tokens


def sample_with_kernels(logits: Floats, rows: Sequence[SampleRow], threads: int) -> Ints:
    """Sample contiguous rows; a token may be `kernels.UNDECIDED` or `kernels.NOT_FINITE`."""
    row_ints: list[int] = []
    row_floats: list[float] = []
    held: list[NDArray[Any]] = []
    for row in rows:
        row_ints += _pack_ints(row, held)
        row_floats += (
            row.temperature,
            row.top_p,
            row.min_p,
            row.typical_p,
            row.repetition_penalty,
            row.presence_penalty,
            row.frequency_penalty,
        )
    ints, floats = np.array(row_ints, np.uint64), np.array(row_floats, np.float64)
    assert ints.size == len(rows) * RowInt.COUNT
    assert floats.size == len(rows) * RowFloat.COUNT
    tokens = np.empty(len(rows), np.int64)
    step = _step_of(logits, tokens)
    step[Step.SAMPLE_INTS], step[Step.SAMPLE_FLOATS] = ints.ctypes.data, floats.ctypes.data
    _run_rows(kernels.SAMPLE, pack_args(0), step, threads, _is_faster_alone(rows))
    return tokens


def _is_faster_alone(rows: Sequence[SampleRow]) -> bool:
    """Return whether starting a program would take longer than the rows."""
    return len(rows) <= MAX_GREEDY_ROWS and all(row.temperature == 0 and not row.has_penalties for row in rows)


def _step_of(logits: Floats, tokens: Ints) -> Table:
    step = new_step()
    step[Step.TOKENS], step[Step.VOCABULARY] = logits.shape
    step[Step.LOGITS], step[Step.TOKEN_IDS] = logits.ctypes.data, tokens.ctypes.data
    return step


def _run_rows(kernel: TaskKernel, args: Table, step: Table, threads: int, is_alone: bool) -> None:
    """Run a kernel on each row, on the calling thread alone or as a program."""
    rows = int(step[Step.TOKENS])
    if is_alone or rows == 1:
        for i in range(rows):
            kernel(args.ctypes.data, step.ctypes.data, i)
    else:
        Program([Task(kernel, args, 1, Step.TOKENS, 1)]).run(step, threads)


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


def logprobs(
    logits: Floats, chosen: Ints, k: int, threads: int, masks: Sequence[TokenMask | None] | None = None
) -> Logprobs:
    """Return the log-softmax of the raw logits at the chosen tokens, and the k likeliest (ties: lowest id first).

    With masks it is over the tokens that they allow.
    """
    rows, k = len(logits), min(k, logits.shape[-1])
    logprobs = np.empty(rows, np.float32)
    top_ids, top = np.empty((rows, k), np.int64), np.empty((rows, k), np.float32)
    logits, chosen = np.ascontiguousarray(logits, np.float32), np.ascontiguousarray(chosen, np.int64)
    allowed = [None] * rows if masks is None else masks
    addresses = np.array([0 if mask is None else mask.ctypes.data for mask in allowed], np.int64)
    args = pack_args(k, addresses, top_ids, top, logprobs)
    _run_rows(kernels.LOGPROBS, args, _step_of(logits, chosen), threads, is_alone=rows <= MAX_GREEDY_ROWS)
    for i in np.flatnonzero(logprobs != logprobs).tolist():
        reference_sampling.require_finite(reference_sampling.apply_mask(logits[i], allowed[i]))
    return Logprobs(logprobs, top_ids, top)
