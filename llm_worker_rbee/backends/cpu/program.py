"""A step of the model as a program: a list of tasks that all threads work through inside one parallel region.

A task is one kernel over some pieces. Each thread has a range of adjacent pieces: it reads memory in order, and writes
far from the other threads. It takes the next free piece of its range, then those left in the other ranges; when all
are taken it waits until all are done, and goes on to the next task. A thread that comes late finds the work done:
only threads that hold a piece are waited for, so any number of threads may really run. A task may write how many units
later ones have; it does so again only after a task with pieces, so that a late thread sees whether what it read is old.

Threads share few cache lines: one for each range, which its thread alone writes unless others help; one that counts
finished pieces, written once by each thread in a task; and one with the last finished task, which waiting threads
read and which is written once in a task.

Profiles run a variant of the loop (TIMED) that also notes when each task ends; the plain one has none of its code.

    task:  address of the kernel, address of its arguments, pieces_per_unit, unit_slot, units_per_piece
           -> pieces_per_unit * ceil(step[unit_slot] / units_per_piece) pieces
    step:  a table of integers that all tasks see (`Step`): counts first, then addresses of the batch and of buffers

How many threads a backend uses is its own field; a launch masks Numba's pool to that number. Process-wide by nature are
Numba's pool and layer, its mask per Python thread, the launch lock of `workqueue` and the state after a fork.

Of Numba's layers `omp` starts a region in 2 us where `workqueue` takes 34, so it comes first; `workqueue`, which needs
nothing, ends the process when two Python threads start kernels at once, so launches go through a lock. GNU's OpenMP
does not survive a fork: in such a child a launch raises, where Numba would end the process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum, auto
from functools import cache
from typing import Any, NamedTuple

import numba as nb
import numpy as np
from numba.np.ufunc import parallel as numba_parallel
from numpy.typing import NDArray

from ...errors import InferenceError, MissingDependencyError
from .. import cpu_info
from .jit import TaskKernel, kernel, parallel, simple_kernel, variant
from .kernels.pointers import (
    aligned,
    atomic_load,
    atomic_store,
    call_task,
    compare_and_swap,
    cpu_pause,
    i64,
    read_ticks,
    sched_yield,
)

Table = NDArray[np.int64]
TASK_FIELDS = 5
CACHE_LINE_BYTES = 64  # every counter has a cache line for itself
PIECE_BITS = 32
PIECE_MASK = (1 << PIECE_BITS) - 1
SPINS_BEFORE_STEAL = 1000  # of a thread without a range: there are fewer pieces than threads
SPINS_BEFORE_YIELD = 2000
LAYERS = ["omp", "tbb", "workqueue"]  # best first
TIMED = False  # set for the variant of the loop that profiles
CALIBRATION_S = 0.02
FORKED = (
    "the kernels cannot run in a process that was forked after they had been used: "
    "start processes with multiprocessing's 'spawn' method, or load the model in the child"
)

_numba: Any = nb
_parallel: Any = numba_parallel

# Threads that spin for long between regions starve a machine that has something else to do; libgomp reads this once.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
if "NUMBA_THREADING_LAYER_PRIORITY" not in os.environ:
    _numba.config.THREADING_LAYER_PRIORITY = LAYERS

_local = threading.local()  # of a Python thread: `threads`, Numba's mask; `counters` of its programs, and their address
_launch_lock = threading.Lock()
_guard: AbstractContextManager[object] | None = None  # what a launch holds; None: the layer is not known yet
_forked = False


class Step(IntEnum):
    """Entries of a step."""

    TOKENS = 0
    NUM_LOGITS = auto()
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
    STATE_IN = auto()
    STATE_OUT = auto()
    TOKEN_TYPES = auto()
    KV = auto()  # for each layer: keys, values, their scales; or the parts of its states
    LOGITS = auto()  # (N, vocabulary)
    PARTIALS = auto()  # results of blocks of keys, if decode attention may be split (attention.py); or 0
    # addresses: sampling settings of each row (sampling.py)
    SAMPLE_INTS = auto()
    SAMPLE_FLOATS = auto()
    END = auto()  # places of buffers follow


def new_step(num_entries: int = Step.END) -> Table:
    """Return a step of zeros."""
    return np.zeros(num_entries, np.int64)


class Task(NamedTuple):
    """A kernel with its arguments, and how its work is split into pieces."""

    kernel: TaskKernel
    args: Table
    pieces_per_unit: int = 1
    unit_slot: int = 0  # entry of the step that holds the number of units
    units_per_piece: int = 1
    callee: TaskKernel | None = None  # a kernel that it calls: its address is the first argument


@kernel
def take_piece(word, number, count):
    """Return the next free piece of a range in task `number`, or -1.

    The word of a range holds the task that last took a piece of it, and how many pieces are taken: it needs no reset.
    """
    seen = atomic_load(word)
    while True:
        last = seen >> PIECE_BITS
        taken = seen & PIECE_MASK if last == number else 0
        if last > number or taken >= count:  # a late thread may find the word of a later task
            return -1
        found = compare_and_swap(word, seen, number << PIECE_BITS | taken + 1)
        if found == seen:
            return taken
        seen = found


@kernel
def run_pieces(task, args, step, pieces, number, words, released, thread, ranges):
    """Do the pieces of the thread's own range, then what is left of the others'; return how many."""
    done = 0
    for turn in range(ranges):
        own = (thread + turn) % ranges
        first = own * pieces // ranges
        count = (own + 1) * pieces // ranges - first
        if turn and atomic_load(released) >= number:
            break
        piece = take_piece(words + own * CACHE_LINE_BYTES, number, count)
        while piece >= 0:
            call_task(task, args, step, first + piece)
            done += 1
            piece = take_piece(words + own * CACHE_LINE_BYTES, number, count)
    return done


@kernel
def add_finished(word, number, done):
    """Add finished pieces of task `number`, and return how many there are; the word needs no reset either."""
    seen = atomic_load(word)
    while True:
        count = done + (seen & PIECE_MASK if seen >> PIECE_BITS == number else 0)
        found = compare_and_swap(word, seen, number << PIECE_BITS | count)
        if found == seen:
            return count
        seen = found


@kernel
def worker_loop(program, length, step, counters, thread, threads):
    """Work through all tasks as one of `threads` threads."""
    table = i64(program)
    finished, released, words = counters, counters + CACHE_LINE_BYTES, counters + 2 * CACHE_LINE_BYTES
    if TIMED:  # the first thread that comes begins
        compare_and_swap(words + threads * CACHE_LINE_BYTES, 0, read_ticks())
    for i in range(length):
        units_per_piece = table[i * TASK_FIELDS + 4]
        units = atomic_load(step + 8 * table[i * TASK_FIELDS + 3])
        if atomic_load(released) > i:  # a later task may have written another number of units before it was read
            continue
        pieces = table[i * TASK_FIELDS + 2] * ((units + units_per_piece - 1) // units_per_piece)
        if pieces == 0:
            continue
        ranges, spins = min(threads, pieces), 0
        task, args = table[i * TASK_FIELDS], table[i * TASK_FIELDS + 1]
        if thread >= ranges:  # leave the pieces to their threads, unless one of these comes late
            while atomic_load(released) <= i and spins < SPINS_BEFORE_STEAL:
                spins += 1
                cpu_pause()
        done = run_pieces(task, args, step, pieces, i + 1, words, released, thread, ranges)
        if done and add_finished(finished, i + 1, done) == pieces:
            if TIMED:
                i64(words + threads * CACHE_LINE_BYTES)[i + 1] = read_ticks()
            atomic_store(released, i + 1)
        while atomic_load(released) <= i:
            spins += 1
            cpu_pause()
            if spins > SPINS_BEFORE_YIELD:
                sched_yield()


@parallel
def run_parallel(program, length, step, counters, threads):
    """Run one program on all threads of a parallel region."""
    for i in nb.prange(threads):
        worker_loop(program, length, step, counters, i, threads)


@simple_kernel
def ticks_now():
    """Return the counter that `timed_worker_loop` reads."""
    return read_ticks()


@cache
def ticks_per_second() -> float:
    """Return the rate of that counter, measured."""
    ticks_now()
    ticks, start = ticks_now(), time.perf_counter()
    time.sleep(CALIBRATION_S)
    return float(ticks_now() - ticks) / (time.perf_counter() - start)


timed_worker_loop = kernel(variant(worker_loop.py_func, "timed", TIMED=True))
timed_run_parallel = parallel(variant(run_parallel.py_func, "timed", worker_loop=timed_worker_loop))


def choose_threads(requested: int | None = None) -> int:
    """Return how many threads a backend uses: `requested`, or the default, at most Numba's pool; raise if too many."""
    return min(cpu_info.choose_thread_count(requested), int(_numba.config.NUMBA_NUM_THREADS))


def threading_layer() -> str:
    """Return the threading layer in use, loading it if needed."""
    try:
        _parallel._launch_threads()
    except (ValueError, ImportError, OSError) as error:
        reason = " ".join(str(error).split())
        raise MissingDependencyError(
            f"Numba finds no threading layer ({reason}): unset NUMBA_THREADING_LAYER"
        ) from None
    return str(_numba.threading_layer())


def require_not_forked() -> None:
    """Raise in a child that was forked after kernels had been used."""
    if _forked:
        raise InferenceError(FORKED)


def launch(threads: int) -> AbstractContextManager[object]:
    """Mask Numba's pool to `threads` and return what to hold while a kernel runs: `with launch(n): kernel(...)`."""
    require_not_forked()
    if getattr(_local, "threads", 0) != threads:
        threading_layer()
        _numba.set_num_threads(threads)
        _local.threads = threads
    return _guard or _choose_guard()


def _zero_counters(threads: int) -> int:
    """Return the address of zeroed counters for one run: a Python thread runs one program at a time."""
    size = _counters_bytes(threads)
    counters, address = getattr(_local, "counters", (None, 0))
    if counters is None or counters.size < size:
        counters = aligned(np.zeros, size, np.uint8)
        address = counters.ctypes.data
        _local.counters = counters, address
    counters.fill(0)
    return int(address)


def _counters_bytes(threads: int) -> int:
    return (2 + threads) * CACHE_LINE_BYTES


def threads_in_use(limit: int) -> int:
    """Return the threads of the last program of this Python thread, at most `limit`: another number costs time."""
    return min(limit, getattr(_local, "threads", limit))


def _choose_guard() -> AbstractContextManager[object]:
    global _guard
    _guard = _launch_lock if threading_layer() == "workqueue" else nullcontext()
    return _guard


def _after_fork() -> None:
    """In the child, replace the lock: a thread of the parent may have held it."""
    global _launch_lock, _guard, _forked
    _launch_lock, _guard = threading.Lock(), None
    _forked = _forked or (_parallel._is_initialized and _numba.threading_layer() == "omp")


os.register_at_fork(after_in_child=_after_fork)


class Program:
    """Tasks, ready to run again and again."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks = tuple(tasks)
        for task in self.tasks:
            if task.callee is not None:
                task.args[0] = task.callee.address
        rows = [
            (t.kernel.address, t.args.ctypes.data, t.pieces_per_unit, t.unit_slot, t.units_per_piece)
            for t in self.tasks
        ]
        self._table: Table = np.array(rows, np.int64).reshape(-1, TASK_FIELDS)
        self._address = self._table.ctypes.data

    def run(self, step: Table, threads: int, address: int = 0) -> None:
        """Run one step. Several Python threads may run the same program, each with a step of its own.

        `address`: of the step, if it is known; to ask an array for it takes 3 to 10 us.
        """
        program = self._address, len(self.tasks), address or step.ctypes.data, _zero_counters(threads)
        with launch(threads):
            if threads == 1:
                worker_loop(*program, 0, 1)
            else:
                run_parallel(*program, threads)

    def run_timed(self, step: Table, threads: int, address: int = 0) -> NDArray[np.float64]:
        """Do the same, and return the seconds of each task: from the end of the one before it to its own.

        So waiting for the last thread of a task is a part of it, and the sum is the time of the whole program.
        """
        before = _counters_bytes(threads)
        counters = aligned(np.zeros, before + 8 * (1 + len(self.tasks)), np.uint8)
        program = self._address, len(self.tasks), address or step.ctypes.data, counters.ctypes.data
        with launch(threads):
            if threads == 1:
                timed_worker_loop(*program, 0, 1)
            else:
                timed_run_parallel(*program, threads)
        ends: Table = np.maximum.accumulate(counters[before:].view(np.int64))  # a task without pieces has no end
        return np.diff(ends) / ticks_per_second()


def pack_args(*values: Any) -> Table:
    """Return the arguments of a task: integers, and addresses of arrays that the caller keeps alive."""
    return np.array([v.ctypes.data if isinstance(v, np.ndarray) else int(v) for v in values], np.int64)


def pack_floats(table: Table, at: int, values: Sequence[float]) -> Table:
    """Put float64 values into a table of arguments."""
    table[at : at + len(values)] = np.array(values, np.float64).view(np.int64)
    return table


def prepare_step(
    program: Program, entries: Mapping[int, NDArray[Any]], counts: Mapping[int, int], threads: int
) -> Callable[[], None]:
    """Return a function that runs a program on one step with these arrays (of int64 or float32) and counts."""
    held = {entry: np.ascontiguousarray(array) for entry, array in entries.items()}
    step = new_step(max(Step.END, *entries) + 5)
    for entry, array in held.items():
        step[entry] = array.ctypes.data
    for entry, count in counts.items():
        step[entry] = count
    address = step.ctypes.data

    def run(arrays: object = held) -> None:  # which it keeps alive
        program.run(step, threads, address)

    return run


def run_step(program: Program, entries: Mapping[int, NDArray[Any]], counts: Mapping[int, int], threads: int) -> None:
    """Run a program once on a new step."""
    prepare_step(program, entries, counts, threads)()
