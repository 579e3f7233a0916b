"""A step of the model as a program: a list of instructions that all threads work through inside one parallel region.

An instruction is one task (a compiled function) over so many pieces. Each thread has a range of neighbouring pieces: it
reads memory in order, and what it writes lies far from what others write. It takes the next piece of its range that
nobody has, then what is left of the other ranges; when all are taken it waits until all are done, then goes on to the
next instruction. Whoever comes late finds the work done: no thread is waited for that does not hold a piece, so it does
not matter how many threads really came.

    instruction: address of the task, address of its arguments, n, count, per   -> n * ceil(step[count] / per) pieces
    step:        a table of integers that all tasks see: counts of the step, and the addresses of its buffers

The entries of a step: a table of integers that all tasks of a program see (program.py).

Counts come first, then addresses: of what the batch holds, and of the buffers that tasks hand on to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum, auto
from functools import lru_cache
from typing import Any, NamedTuple

import numba as nb
import numpy as np
from numpy.typing import NDArray

from . import threads
from .jit import Task, kernel, parallel
from .pointers import call, fetch, fetch_add, i64, pause, sched_yield

FIELDS = 5
COUNTERS = 8  # integers an instruction has for itself: a line of the cache
RANGES = 7  # at most: each has a line of the cache to count in, in every instruction; more threads share them
PATIENCE = 2000  # looks at a counter before the core is offered to others


class Instruction(NamedTuple):
    """A task with its arguments, and how it is cut into pieces."""

    task: Task
    args: Table
    n: int = 1
    count: int = 0  # type: ignore[assignment]  # which entry of the step is shared out
    per: int = 1  # so many of it make one piece


@kernel
def work(program, length, step, counters, me, ranges):
    """What each thread does: the pieces of its own range, then what is left of the others'."""
    table, steps = i64(program), i64(step)
    for i in range(length):
        task, args = table[i * FIELDS], table[i * FIELDS + 1]
        per = table[i * FIELDS + 4]
        pieces = table[i * FIELDS + 2] * ((steps[table[i * FIELDS + 3]] + per - 1) // per)
        if pieces == 0:
            continue
        done = counters + i * COUNTERS * 8 * (ranges + 1)
        mine = 0
        for turn in range(ranges):
            whose = (me + turn) % ranges
            taken, first = done + (whose + 1) * COUNTERS * 8, whose * pieces // ranges
            many = (whose + 1) * pieces // ranges - first
            if fetch(taken) >= many:
                continue
            piece = fetch_add(taken, 1)
            while piece < many:
                call(task, args, step, first + piece)
                mine += 1
                piece = fetch_add(taken, 1)
        if mine:
            fetch_add(done, mine)
        looks = 0
        while fetch(done) < pieces:
            looks += 1
            pause()
            if looks > PATIENCE:
                sched_yield()


@parallel
def run_together(program, length, step, counters, workers):
    """All threads of the region on one program."""
    ranges = min(workers, RANGES)
    for i in nb.prange(workers):
        work(program, length, step, counters, i * ranges // workers, ranges)


class Program:
    """Instructions, ready to run again and again."""

    def __init__(self, instructions: Iterable[Instruction]) -> None:
        self.instructions = tuple(instructions)
        rows = [(i.task.address, i.args.ctypes.data, i.n, i.count, i.per) for i in self.instructions]
        self._table: Table = np.array(rows, np.int64).reshape(-1, FIELDS)

    def run(self, step: Table) -> None:
        """One step. Several Python threads may run the same program, each with a step of its own."""
        workers = threads.count()
        ranges = min(workers, RANGES)
        counters = np.zeros(len(self._table) * COUNTERS * (ranges + 1), np.int64)
        where = self._table.ctypes.data, len(self._table), step.ctypes.data, counters.ctypes.data
        with threads.launching():
            if workers == 1:
                work(*where, 0, 1)
            else:
                run_together(*where, workers)


def table_of(*values: Any) -> Table:
    """Arguments of a task: integers, and the addresses of arrays. Who makes it keeps the arrays alive."""
    return np.array([v.ctypes.data if isinstance(v, np.ndarray) else int(v) for v in values], np.int64)


def doubles(table: Table, at: int, values: Sequence[float]) -> Table:
    """Put floats into a table of arguments."""
    table[at : at + len(values)] = np.array(values, np.float64).view(np.int64)
    return table


@lru_cache(maxsize=1024)
def _single(task: Task, args: tuple[int, ...], n: int, per: int) -> Program:
    return Program([Instruction(task, np.array(args, np.int64), n, Step.TOKENS, per)])


def run_one(
    task: Task, args: tuple[int, ...], n: int, per: int, tokens: int, entries: Mapping[int, NDArray[Any]]
) -> None:
    """One task on so many tokens, as a program of its own; `entries` are the arrays that the step points at."""
    step = new_step()
    step[Step.TOKENS] = tokens
    for entry, array in entries.items():
        step[entry] = array.ctypes.data
    _single(task, args, n, per).run(step)


Table = NDArray[np.int64]


class Step(IntEnum):
    """Which entry is what."""

    TOKENS = 0
    WANTED = auto()  # tokens whose logits are wanted
    TILES = auto()  # pieces of attention: tiles of tokens
    SINGLES = auto()  # and tokens one by one
    BLOCK_SIZE = auto()
    TABLE_WIDTH = auto()  # blocks in a row of the block table
    REQUESTS = auto()
    VOCABULARY = auto()  # logits of a row, for sampling
    # addresses: the batch
    IDS = auto()
    POSITIONS = auto()
    SLOTS = auto()
    QUERY_START = auto()
    BLOCK_TABLE = auto()
    INDEX = auto()  # which tokens' logits are wanted
    KV = auto()  # for each layer: keys, values, their scales
    # addresses: buffers
    WORK = auto()  # which piece of attention is what
    ANGLES = auto()  # (T, pairs) cos of the first rotary table, then its sin, then those of a second table
    SIN = auto()
    SECOND_COS = auto()
    SECOND_SIN = auto()
    STREAM = auto()  # (T, width) the residual stream
    DELTA = auto()  # (T, width) what is to be added to it
    NORMED = auto()  # (T, width)
    ACTIVATIONS = auto()  # (T, columns) as bytes, and what goes with them: activations.py
    SCALE = auto()
    SUMS = auto()
    SUMS16 = auto()
    SCALED = auto()
    SCALED16 = auto()
    QKV = auto()  # (T, (heads + 2 kv_heads) * dim)
    QUERIES = auto()  # (T, heads, padded dim)
    MIXED = auto()  # (T, heads, padded dim)
    COMPACT = auto()  # (T, heads * dim), where heads are padded
    GATE_UP = auto()  # (T, 2 * d_ff)
    HIDDEN = auto()  # (T, d_ff)
    LOGITS = auto()  # (N, vocabulary)
    # addresses: how the token of each row is chosen (draws.py)
    CHOICES = auto()  # integers
    CHANCES = auto()  # floats
    END = auto()


def new_step() -> Table:
    """A table of zeros."""
    return np.zeros(Step.END, np.int64)
