"""What the kernels of a program share: the tables that they read, the loop in which threads take pieces, the threads.

../program.py explains it, and runs programs.

A pool has a generation, which rises with each region. Its threads spin for a while after a region, then sleep until the
generation changes. A region is open until its caller has done all of its tasks: a thread that wakes later does not
enter, and is not waited for. The caller waits for the threads that have entered.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..jit import INT, VOID, NativeKernel, TaskKernel, kernel
from .pointers import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_loop,
    call_task,
    compare_and_swap,
    cpu_pause,
    full_fence,
    i64,
    lock_mutex,
    read_ticks,
    sched_yield,
    unlock_mutex,
    wait_for,
    wake_all,
)

Table = NDArray[np.int64]
TASK_FIELDS = 5
CACHE_LINE_BYTES = 64  # every counter has a cache line for itself
PIECE_BITS = 32
PIECE_MASK = (1 << PIECE_BITS) - 1
SPINS_BEFORE_STEAL = 1000  # of a thread without a range: there are fewer pieces than threads
SPINS_BEFORE_YIELD = 2000
SPINS_BEFORE_SLEEP = 10_000  # after a region: threads that spin for long starve a machine with something else to do
CLOSED = 1 << 31  # of the word that counts the threads in a region; the generation is above
TIMED = False  # set for the variant of the loop that profiles


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
    ROPE_POSITIONS = auto()
    SPANS = auto()  # or 0
    IMAGE_ROWS = auto()
    KV = auto()  # for each layer: keys, values, their scales; or the parts of its states
    LOGITS = auto()  # (N, vocabulary)
    PARTIALS = auto()  # results of blocks of keys, if decode attention may be split (attention.py); or 0
    # sampling (sampling.py): the number of rows, addresses of their settings and of their tokens
    NUM_SAMPLED = auto()
    SAMPLE_INTS = auto()
    SAMPLE_FLOATS = auto()
    SAMPLED_IDS = auto()
    END = auto()  # places of buffers follow


class Pool(IntEnum):
    """Byte offsets in the memory of a pool; each has cache lines of its own."""

    GENERATION, ENTERED, LEFT, SLEEPERS, NUM_THREADS, REGION = range(0, 6 * CACHE_LINE_BYTES, CACHE_LINE_BYTES)
    MUTEX, CONDITION, SIZE = 6 * CACHE_LINE_BYTES, 8 * CACHE_LINE_BYTES, 10 * CACHE_LINE_BYTES


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


@kernel
def enter_region(entered, generation):
    """Count the calling thread in, and return whether the region of this generation is still open."""
    seen = atomic_load(entered)
    while seen >> PIECE_BITS == generation and not seen & CLOSED:
        found = compare_and_swap(entered, seen, seen + 1)
        if found == seen:
            return True
        seen = found
    return False


@kernel
def close_region(entered):
    """Let no further thread in, and return how many are."""
    seen = atomic_load(entered)
    while True:
        found = compare_and_swap(entered, seen, seen | CLOSED)
        if found == seen:
            return seen & (CLOSED - 1)
        seen = found


@kernel
def sleep_until_next(pool, generation):
    """Sleep while the generation is this one."""
    lock_mutex(pool + Pool.MUTEX)
    atomic_add(pool + Pool.SLEEPERS, 1)
    full_fence()
    while atomic_load(pool + Pool.GENERATION) == generation:
        wait_for(pool + Pool.CONDITION, pool + Pool.MUTEX)
    atomic_add(pool + Pool.SLEEPERS, -1)
    unlock_mutex(pool + Pool.MUTEX)


def pool_loop(pool):
    """Take part in regions for ever: the whole life of a thread."""
    thread, generation = atomic_add(pool + Pool.NUM_THREADS, 1), 0
    region = i64(pool + Pool.REGION)
    while True:
        spins = 0
        while spins < SPINS_BEFORE_SLEEP and atomic_load(pool + Pool.GENERATION) == generation:
            spins += 1
            cpu_pause()
        if atomic_load(pool + Pool.GENERATION) == generation:
            sleep_until_next(pool, generation)
        generation = atomic_load(pool + Pool.GENERATION)
        if enter_region(pool + Pool.ENTERED, generation):
            if thread < region[5]:
                call_loop(region[0], region[1], region[2], region[3], region[4], thread, region[5])
            atomic_add(pool + Pool.LEFT, 1)


def run_region(pool, loop, program, length, step, counters, threads):
    """Run one program on the calling thread and on the threads of a pool."""
    region, generation, spins = i64(pool + Pool.REGION), atomic_load(pool + Pool.GENERATION) + 1, 0
    region[0], region[1], region[2], region[3], region[4], region[5] = loop, program, length, step, counters, threads
    atomic_store(pool + Pool.LEFT, 0)
    atomic_store(pool + Pool.ENTERED, generation << PIECE_BITS)
    atomic_store(pool + Pool.GENERATION, generation)
    full_fence()
    if atomic_load(pool + Pool.SLEEPERS):
        lock_mutex(pool + Pool.MUTEX)
        wake_all(pool + Pool.CONDITION)
        unlock_mutex(pool + Pool.MUTEX)
    call_loop(loop, program, length, step, counters, 0, threads)
    entered = close_region(pool + Pool.ENTERED)
    while atomic_load(pool + Pool.LEFT) < entered:
        spins += 1
        cpu_pause()
        if spins > SPINS_BEFORE_YIELD:
            sched_yield()


def ticks_now():
    """Return the counter that the timed loop reads."""
    return read_ticks()


WORKER_LOOP, TIMED_LOOP = (
    NativeKernel(worker_loop, VOID, *[INT] * 6, name=name, TIMED=name == "timed") for name in ("", "timed")
)
POOL_LOOP, RUN_REGION = NativeKernel(pool_loop, INT, INT), NativeKernel(run_region, VOID, *[INT] * 7)
TICKS_NOW = NativeKernel(ticks_now, INT)


def pack_args(*values: Any) -> Table:
    """Return the arguments of a task: integers, and addresses of arrays that the caller keeps alive."""
    return np.array([v.ctypes.data if isinstance(v, np.ndarray) else int(v) for v in values], np.int64)


def pack_floats(table: Table, at: int, values: Sequence[float]) -> Table:
    """Put float64 values into a table of arguments."""
    table[at : at + len(values)] = np.array(values, np.float64).view(np.int64)
    return table
