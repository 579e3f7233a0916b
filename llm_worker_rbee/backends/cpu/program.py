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
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numba as nb
import numpy as np
from numba.np.ufunc import parallel as numba_parallel
from numpy.typing import NDArray

from ...errors import InferenceError, MissingDependencyError
from .. import cpu_info
from .kernels import program as kernels
from .kernels.pointers import aligned
from .kernels.program import Step, Table, Task

LAYERS = ["omp", "tbb", "workqueue"]  # best first
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


def new_step(num_entries: int = Step.END) -> Table:
    """Return a step of zeros."""
    return np.zeros(num_entries, np.int64)


@cache
def ticks_per_second() -> float:
    """Return the rate of that counter, measured."""
    kernels.ticks_now()
    ticks, start = kernels.ticks_now(), time.perf_counter()
    time.sleep(CALIBRATION_S)
    return float(kernels.ticks_now() - ticks) / (time.perf_counter() - start)


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
    return (2 + threads) * kernels.CACHE_LINE_BYTES


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
        self._table: Table = np.array(rows, np.int64).reshape(-1, kernels.TASK_FIELDS)
        self._address = self._table.ctypes.data

    def run(self, step: Table, threads: int, address: int = 0) -> None:
        """Run one step. Several Python threads may run the same program, each with a step of its own.

        `address`: of the step, if it is known; to ask an array for it takes 3 to 10 us.
        """
        program = self._address, len(self.tasks), address or step.ctypes.data, _zero_counters(threads)
        with launch(threads):
            if threads == 1:
                kernels.worker_loop(*program, 0, 1)
            else:
                kernels.run_parallel(*program, threads)

    def run_timed(self, step: Table, threads: int, address: int = 0) -> NDArray[np.float64]:
        """Do the same, and return the seconds of each task: from the end of the one before it to its own.

        So waiting for the last thread of a task is a part of it, and the sum is the time of the whole program.
        """
        before = _counters_bytes(threads)
        counters = aligned(np.zeros, before + 8 * (1 + len(self.tasks)), np.uint8)
        program = self._address, len(self.tasks), address or step.ctypes.data, counters.ctypes.data
        with launch(threads):
            if threads == 1:
                kernels.timed_worker_loop(*program, 0, 1)
            else:
                kernels.timed_run_parallel(*program, threads)
        ends: Table = np.maximum.accumulate(counters[before:].view(np.int64))  # a task without pieces has no end
        return np.diff(ends) / ticks_per_second()


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
