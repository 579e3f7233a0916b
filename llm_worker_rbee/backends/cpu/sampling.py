"""Fast sampling: the same tokens as `../reference_sampling.py`, which defines them and the order of the filters.

The kernels (kernels/sampling.py) add up probabilities in another order than the reference, so the last digits differ:
where a decision is so close that it might come out otherwise they return UNDECIDED, and the reference sampler decides.

A row of a batch has integers (`RowInt`) and floats (`RowFloat`), in two tables that the step points at; the tokens that
penalties look at are given by address. The settings of a row never change, so the tables are kept from step to step:
the next token of the same request needs its position. A program samples all rows at once, one piece per row: a program
of its own, or the last task of a model's step.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import reference_sampling
from ..ops import NO_TOKENS, Ints, Logprobs, SampleRow, TokenMask
from .jit import TaskKernel
from .kernels import sampling as kernels
from .kernels.program import Step, Task, pack_args
from .kernels.sampling import RowFloat, RowInt, SampleArg
from .program import Program, new_step

Floats = NDArray[np.float32]
SAMPLE = Task(kernels.SAMPLE, pack_args(0, 0), 1, Step.NUM_SAMPLED, 1)
# As plain integers: to look a member of an enum up takes six times as long.
MASK, HAS_PENALTIES, POSITION = int(RowInt.MASK), int(RowInt.HAS_PENALTIES), int(RowInt.POSITION)
WINDOW, ROW_INTS, NUM_SAMPLED = int(RowInt.WINDOW), int(RowInt.COUNT), int(Step.NUM_SAMPLED)
PENALTIES = "repetition_penalty", "presence_penalty", "frequency_penalty"
FLOATS = attrgetter("temperature", "top_p", "min_p", "typical_p", *PENALTIES)  # in the order of RowFloat
_local = threading.local()  # of a Python thread: `tables`, of the rows that it sampled last without a model's step


def sample(logits: Floats, rows: Sequence[SampleRow], threads: int) -> Ints:
    """Sample one token for each row: (N, vocabulary) -> (N,)."""
    assert len(logits) == len(rows), "each row of logits has its settings"
    logits = np.ascontiguousarray(logits, np.float32)
    tokens = np.array(sample_with_kernels(logits, rows, threads), np.int64)
    for i in np.flatnonzero(tokens < 0).tolist():  # undecided; or not finite, which the reference raises for
        tokens[i] = reference_sampling.sample_row(logits[i], rows[i])
    return tokens


def sample_with_kernels(logits: Floats, rows: Sequence[SampleRow], threads: int) -> list[int]:
    """Sample contiguous rows; a token may be `kernels.UNDECIDED` or `kernels.NOT_FINITE`."""
    if not hasattr(_local, "tables"):
        _local.tables = RowTables()
    tables, step = _local.tables, new_step()
    tables.allow_all(logits.shape[1])
    tables.set_rows(rows, step.data)
    step[Step.VOCABULARY], step[Step.LOGITS] = logits.shape[1], logits.ctypes.data
    Program([SAMPLE]).run(step, threads if len(rows) > 1 else 1)
    return list(tables.token_ids[: len(rows)])


def use_when_compiled(place: SampleArg, kernel: TaskKernel) -> None:
    """Let steps sample such rows by their kernel; while another process compiles it, they are undecided."""
    if not kernel.is_compiling:
        SAMPLE.args[place] = kernel.address


def all_allowed(vocabulary: int) -> TokenMask:
    """Return a mask that allows every token."""
    return np.full(vocabulary // 32 + 2, -1, np.int32)  # read 64 bits at a time


class RowTables:
    """The settings and the tokens of the rows that are sampled together; they are kept from step to step."""

    def __init__(self, vocabulary: int = 0) -> None:
        self._reserve(0)
        self._vocabulary = -1
        self.allow_all(vocabulary)

    def allow_all(self, vocabulary: int) -> None:
        """Let rows without a mask have one that covers a vocabulary."""
        if vocabulary > self._vocabulary:
            self._vocabulary, self._all_allowed = vocabulary, all_allowed(vocabulary)
            self._all_allowed_address = self._all_allowed.ctypes.data

    def _reserve(self, count: int) -> None:
        self._rows: list[SampleRow | None] = [None] * count  # whose settings are in the tables
        self._is_plain = [False] * count  # the row changes no logit
        self._pointed_at: dict[int, list[NDArray[Any]]] = {}  # arrays that a row's numbers point at
        arrays = np.zeros(count * ROW_INTS, np.uint64), np.zeros((count, RowFloat.COUNT)), np.zeros(count, np.int64)
        self._addresses = [array.ctypes.data for array in arrays]
        # memory views write and read single numbers in half the time of arrays
        self._ints, self._floats, self.token_ids = arrays[0].data, arrays[1], arrays[2].data

    def set_rows(self, rows: Sequence[SampleRow], step: memoryview) -> None:
        """Set what has changed since these rows were sampled last, and let a step sample them."""
        if len(rows) > len(self._rows):
            self._reserve(2 * len(rows))
        ints = self._ints
        for i, row in enumerate(rows):
            if self._rows[i] is not row:
                self._rows[i] = None  # until all has succeeded
                self._set_settings(i, row)
                self._rows[i] = row
            ints[i * ROW_INTS + POSITION] = row.position
            ints[i * ROW_INTS + MASK] = self._all_allowed_address if row.mask is None else row.mask.ctypes.data
            if not self._is_plain[i]:
                self._set_penalties(i, row)
            if row.temperature and not SAMPLE.args[SampleArg.DRAWN]:
                use_when_compiled(SampleArg.DRAWN, kernels.DRAWN)
        step[NUM_SAMPLED] = len(rows)
        step[NUM_SAMPLED + 1], step[NUM_SAMPLED + 2], step[NUM_SAMPLED + 3] = self._addresses

    def _set_settings(self, i: int, row: SampleRow) -> None:
        """Set what stays as it is while the row is sampled."""
        bias_ids = np.array([token for token, _ in row.logit_bias], np.int64)
        biases = np.array([bias for _, bias in row.logit_bias], np.float64)
        self._pointed_at[i] = [bias_ids, biases]
        settings = 0, 0, row.top_k, row.seed, row.sample_index, 0, 0, 0, 0, 0
        bias = bias_ids.ctypes.data, biases.ctypes.data, bias_ids.size
        for at, value in enumerate((*settings, *bias), i * ROW_INTS):
            self._ints[at] = value
        self._floats[i] = FLOATS(row)
        counts_tokens = row.repetition_penalty != 1.0 or row.presence_penalty or row.frequency_penalty
        self._is_plain[i] = not (row.logit_bias or counts_tokens)

    def _set_penalties(self, i: int, row: SampleRow) -> None:
        """Set the tokens that penalties look at."""
        if not SAMPLE.args[SampleArg.PENALIZED]:
            use_when_compiled(SampleArg.PENALIZED, kernels.PENALIZED)
        window = row.penalty_window if row.repetition_penalty != 1.0 else NO_TOKENS
        output_ids = row.output_ids if row.presence_penalty or row.frequency_penalty else NO_TOKENS
        self._pointed_at[i][2:] = arrays = [np.ascontiguousarray(ids, np.int64) for ids in (window, output_ids)]
        self._ints[i * ROW_INTS + HAS_PENALTIES] = bool(row.logit_bias or window.size or output_ids.size)
        for at, ids in enumerate(arrays):
            place = i * ROW_INTS + WINDOW + 2 * at
            self._ints[place], self._ints[place + 1] = ids.ctypes.data if ids.size else 0, ids.size


def logprobs(
    logits: Floats, chosen: Ints, k: int, threads: int, masks: Sequence[TokenMask | None] | None = None
) -> Logprobs:
    """Return the log-softmax of the raw logits at the chosen tokens, and the k likeliest (ties: lowest id first).

    With masks it is over the tokens that they allow.
    """
    if kernels.LOGPROBS.is_compiling:
        return reference_sampling.logprobs(logits, chosen, k, masks)
    rows, k = len(logits), min(k, logits.shape[-1])
    logprobs = np.empty(rows, np.float32)
    top_ids, top = np.empty((rows, k), np.int64), np.empty((rows, k), np.float32)
    logits, chosen = np.ascontiguousarray(logits, np.float32), np.ascontiguousarray(chosen, np.int64)
    allowed, everything = [None] * rows if masks is None else masks, all_allowed(logits.shape[1])
    addresses = np.array([(everything if mask is None else mask).ctypes.data for mask in allowed], np.int64)
    args = pack_args(k, addresses, top_ids, top, logprobs)
    step = new_step()
    step[Step.NUM_SAMPLED], step[Step.VOCABULARY] = logits.shape
    step[Step.LOGITS], step[Step.SAMPLED_IDS] = logits.ctypes.data, chosen.ctypes.data
    Program([Task(kernels.LOGPROBS, args, 1, Step.NUM_SAMPLED, 1)]).run(step, threads if rows > 1 else 1)
    for i in np.flatnonzero(logprobs != logprobs).tolist():
        reference_sampling.require_finite(reference_sampling.apply_mask(logits[i], allowed[i]))
    return Logprobs(logprobs, top_ids, top)
