"""A step of the model as a program: a list of tasks that all threads work through inside one parallel region.

A task is one kernel over some pieces. Each thread has a range of adjacent pieces: it reads memory in order, and writes
far from the other threads. It takes the next free piece of its range, then those left in the other ranges; when all
are taken it waits until all are done, and goes on to the next task. A thread that comes late finds the work done:
only threads that hold a piece are waited for, so any number of threads may really run.

    task:  address of the kernel, address of its arguments, pieces_per_unit, unit_slot, units_per_piece
           -> pieces_per_unit * ceil(step[unit_slot] / units_per_piece) pieces
    step:  a table of integers that all tasks see (`Step`): counts first, then addresses of the batch and of buffers
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum, auto
from functools import lru_cache
from typing import Any, NamedTuple

import numba as nb
import numpy as np
from numpy.typing import NDArray

from .jit import TaskKernel, kernel, parallel
from .pointers import atomic_add, atomic_load, call_task, cpu_pause, i64, sched_yield
from .threads import launch

Table = NDArray[np.int64]
TASK_FIELDS = 5
CACHE_LINE_BYTES = 64  # every counter has a cache line for itself
MAX_RANGES = 7  # more threads share ranges
SPINS_BEFORE_YIELD = 2000


class Step(IntEnum):
    """Entries of a step."""

    TOKENS = 0
    NUM_LOGITS = auto()
    PREFILL_TILES = auto()  # pieces of attention: tiles of adjacent tokens
    DECODE_TILES = auto()  # pieces of attention: heads of one token
    BLOCK_SIZE = auto()
    TABLE_WIDTH = auto()  # blocks in a row of the block table
    REQUESTS = auto()
    VOCABULARY = auto()  # logits per row, for sampling
    # addresses: the batch
    TOKEN_IDS = auto()
    POSITIONS = auto()
    SLOT_MAPPING = auto()
    QUERY_START = auto()
    BLOCK_TABLE = auto()
    LOGITS_INDEX = auto()
    KV = auto()  # for each layer: keys, values, their scales
    # addresses: buffers
    ATTENTION_WORK = auto()  # (first token, tokens, request, head) of each piece of attention
    ROPE_COS = auto()  # (T, pairs) of the first rope table
    ROPE_SIN = auto()
    ROPE2_COS = auto()  # of a second rope table
    ROPE2_SIN = auto()
    RESIDUAL = auto()  # (T, width)
    RESIDUAL_DELTA = auto()  # (T, width) to be added to it
    NORMED = auto()  # (T, width)
    ACTIVATIONS = auto()  # (T, columns) int8, and five more: quantize_activations.py
    SCALE = auto()
    SUMS = auto()
    SUMS16 = auto()
    SCALED = auto()
    SCALED16 = auto()
    QKV = auto()  # (T, (heads + 2 kv_heads) * dim)
    QUERIES = auto()  # (T, heads, padded dim)
    ATTN_OUT = auto()  # (T, heads, padded dim)
    ATTN_OUT_PACKED = auto()  # (T, heads * dim), if heads are padded
    GATE_UP = auto()  # (T, 2 * d_ff)
    HIDDEN = auto()  # (T, d_ff)
    LOGITS = auto()  # (N, vocabulary)
    # addresses: sampling settings of each row (sampling.py)
    SAMPLE_INTS = auto()
    SAMPLE_FLOATS = auto()
    END = auto()


def new_step() -> Table:
    """Return a step of zeros."""
    return np.zeros(Step.END, np.int64)


class Task(NamedTuple):
    """A kernel with its arguments, and how its work is split into pieces."""

    kernel: TaskKernel
    args: Table
    pieces_per_unit: int = 1
    unit_slot: int = 0  # entry of the step that holds the number of units
    units_per_piece: int = 1


@kernel
def worker_loop(program, length, step, counters, thread, ranges):
    """Do the pieces of the thread's own range, then what is left of the others', for every task."""
    table, steps = i64(program), i64(step)
    for i in range(length):
        task, args = table[i * TASK_FIELDS], table[i * TASK_FIELDS + 1]
        units_per_piece = table[i * TASK_FIELDS + 4]
        units = steps[table[i * TASK_FIELDS + 3]]
        pieces = table[i * TASK_FIELDS + 2] * ((units + units_per_piece - 1) // units_per_piece)
        if pieces == 0:
            continue
        done = counters + i * CACHE_LINE_BYTES * (ranges + 1)
        own_done = 0
        for turn in range(ranges):
            number = (thread + turn) % ranges
            taken, first = done + (number + 1) * CACHE_LINE_BYTES, number * pieces // ranges
            count = (number + 1) * pieces // ranges - first
            if atomic_load(taken) >= count:
                continue
            piece = atomic_add(taken, 1)
            while piece < count:
                call_task(task, args, step, first + piece)
                own_done += 1
                piece = atomic_add(taken, 1)
        if own_done:
            atomic_add(done, own_done)
        spins = 0
        while atomic_load(done) < pieces:
            spins += 1
            cpu_pause()
            if spins > SPINS_BEFORE_YIELD:
                sched_yield()


@parallel
def run_parallel(program, length, step, counters, threads):
    """Run one program on all threads of a parallel region."""
    ranges = min(threads, MAX_RANGES)
    for i in nb.prange(threads):
        worker_loop(program, length, step, counters, i * ranges // threads, ranges)


class Program:
    """Tasks, ready to run again and again."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks = tuple(tasks)
        rows = [
            (t.kernel.address, t.args.ctypes.data, t.pieces_per_unit, t.unit_slot, t.units_per_piece)
            for t in self.tasks
        ]
        self._table: Table = np.array(rows, np.int64).reshape(-1, TASK_FIELDS)

    def run(self, step: Table, threads: int) -> None:
        """Run one step. Several Python threads may run the same program, each with a step of its own."""
        ranges = min(threads, MAX_RANGES)
        counters = np.zeros(len(self._table) * CACHE_LINE_BYTES // 8 * (ranges + 1), np.int64)
        program = self._table.ctypes.data, len(self._table), step.ctypes.data, counters.ctypes.data
        with launch(threads):
            if threads == 1:
                worker_loop(*program, 0, 1)
            else:
                run_parallel(*program, threads)


def pack_args(*values: Any) -> Table:
    """Return the arguments of a task: integers, and addresses of arrays that the caller keeps alive."""
    return np.array([v.ctypes.data if isinstance(v, np.ndarray) else int(v) for v in values], np.int64)


def pack_floats(table: Table, at: int, values: Sequence[float]) -> Table:
    """Put float64 values into a table of arguments."""
    table[at : at + len(values)] = np.array(values, np.float64).view(np.int64)
    return table


@lru_cache(maxsize=1024)
def _single_task(task_kernel: TaskKernel, args: tuple[int, ...], pieces_per_unit: int, units_per_piece: int) -> Program:
    return Program([Task(task_kernel, np.array(args, np.int64), pieces_per_unit, Step.TOKENS, units_per_piece)])


def run_step(program: Program, entries: Mapping[Step, NDArray[Any]], counts: Mapping[Step, int], threads: int) -> None:
    """Run a program on a new step with these arrays (of int64 or float32) and counts."""
    held = {entry: np.ascontiguousarray(array) for entry, array in entries.items()}
    step = new_step()
    for entry, array in held.items():
        step[entry] = array.ctypes.data
    for entry, count in counts.items():
        step[entry] = count
    program.run(step, threads)


def run_task(
    task_kernel: TaskKernel,
    args: tuple[int, ...],
    entries: Mapping[Step, NDArray[Any]],
    tokens: int,
    threads: int,
    *,
    pieces_per_unit: int = 1,
    units_per_piece: int = 1,
) -> None:
    """Run one task on `tokens` tokens as a program of its own; `entries` are the arrays of the step."""
    program = _single_task(task_kernel, args, pieces_per_unit, units_per_piece)
    run_step(program, entries, {Step.TOKENS: tokens}, threads)
