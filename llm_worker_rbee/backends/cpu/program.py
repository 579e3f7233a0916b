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

How many threads a backend uses is its own field. The threads belong to one pool (`ThreadPool`) for the process: a
program that is run while another runs waits for it. A region starts in about 1 us while the threads of the pool spin,
and the calling thread works from the first moment. A forked child makes a pool of its own.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InferenceError
from ..ops import StepStopped
from .jit import NativeKernel
from .kernels import program as kernels
from .kernels.pointers import aligned
from .kernels.program import Pool, Step, Table, Task

CALIBRATION_S = 0.02
NUM_PARTS = 8  # of a step that may be stopped; after each, threads must be scheduled again on a busy machine

_local = threading.local()  # of a Python thread: `counters` of its programs, zeros for them, and their address


class ThreadPool:
    """Threads that take part in programs beside the calling one. They run compiled code only, and end with the process.

    Their memory is never freed: they may still read it when the interpreter has ended.
    """

    def __init__(self) -> None:
        self.num_threads = 1
        self.lock = threading.Lock()  # held while a program runs
        self._c = ctypes.CDLL(None)
        self._c.pthread_create.argtypes = [ctypes.c_void_p] * 4
        for name in ("pthread_mutex_init", "pthread_cond_init"):
            getattr(self._c, name).argtypes = [ctypes.c_void_p] * 2
        memory = aligned(np.zeros, Pool.SIZE, np.uint8)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        self.address = int(memory.ctypes.data)
        memory[Pool.NUM_THREADS] = 1
        self._c.pthread_mutex_init(self.address + Pool.MUTEX, None)
        self._c.pthread_cond_init(self.address + Pool.CONDITION, None)

    def run(self, loop: int, program: tuple[int, int, int, int], threads: int) -> None:
        """Run the loop of a program on `threads` threads."""
        with self.lock:
            if threads > self.num_threads:
                self._grow(threads)
            kernels.RUN_REGION(self.address, loop, *program, threads)

    def _grow(self, threads: int) -> None:
        for _ in range(self.num_threads, threads):
            thread = ctypes.c_uint64()
            status = self._c.pthread_create(ctypes.byref(thread), None, kernels.POOL_LOOP.address, self.address)
            if status:
                raise InferenceError(f"no thread could be started for the kernels: {os.strerror(status)}")
            self._c.pthread_detach(thread)
            self.num_threads += 1


_pool = ThreadPool()


def _after_fork() -> None:
    """In the child, make a new pool: a fork copies no threads but the calling one."""
    global _pool
    _pool = ThreadPool()


os.register_at_fork(after_in_child=_after_fork)


def new_step(num_entries: int = Step.END) -> Table:
    """Return a step of zeros."""
    return np.zeros(num_entries, np.int64)


@cache
def ticks_per_second() -> float:
    """Return the rate of that counter, measured."""
    kernels.TICKS_NOW()
    ticks, start = kernels.TICKS_NOW(), time.perf_counter()
    time.sleep(CALIBRATION_S)
    return float(kernels.TICKS_NOW() - ticks) / (time.perf_counter() - start)


def _zero_counters(threads: int) -> int:
    """Return the address of zeroed counters for one run: a Python thread runs one program at a time."""
    size = _counters_bytes(threads)
    counters, zeros, address = getattr(_local, "counters", (memoryview(b""), b"", 0))
    if len(zeros) < size:
        array = aligned(np.zeros, size, np.uint8)
        counters, zeros, address = _local.counters = array.data, bytes(size), int(array.ctypes.data)
    counters[:] = zeros
    return address


def _counters_bytes(threads: int) -> int:
    return (2 + threads) * kernels.CACHE_LINE_BYTES


def _run(loop: NativeKernel, program: tuple[int, int, int, int], threads: int) -> None:
    if threads == 1:
        loop(*program, 0, 1)
    else:
        _pool.run(loop.address, program, threads)


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
        _run(kernels.WORKER_LOOP, program, threads)

    def run_unless(self, should_stop: Callable[[], bool], step: Table, threads: int, address: int) -> None:
        """Do the same in a few parts, unless `should_stop`, which is called before each, says to give it up."""
        size = -(-len(self.tasks) // NUM_PARTS)
        for first in range(0, len(self.tasks), size):
            if should_stop():
                raise StepStopped
            count, at = min(size, len(self.tasks) - first), self._address + first * self._table.strides[0]
            _run(kernels.WORKER_LOOP, (at, count, address, _zero_counters(threads)), threads)

    def run_timed(self, step: Table, threads: int, address: int = 0) -> NDArray[np.float64]:
        """Do the same, and return the seconds of each task: from the end of the one before it to its own.

        So waiting for the last thread of a task is a part of it, and the sum is the time of the whole program.
        """
        before = _counters_bytes(threads)
        counters = aligned(np.zeros, before + 8 * (1 + len(self.tasks)), np.uint8)
        program = self._address, len(self.tasks), address or step.ctypes.data, counters.ctypes.data
        _run(kernels.TIMED_LOOP, program, threads)
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
