"""Programs on several threads: every piece once, several Python threads, and forks, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from llm_worker_rbee import machine
from llm_worker_rbee.backends.cpu import program
from llm_worker_rbee.backends.cpu.kernels.elementwise import copy_task
from llm_worker_rbee.backends.cpu.kernels.program import Step
from tests.cli.conftest import write_model
from tests.conftest import with_kernels

ROOT = Path(__file__).parents[3]
SEVERAL = min(2, machine.usable_cores())


@pytest.mark.parametrize("threads", [1, SEVERAL])
def test_run_timed_computes_the_same_and_times_each_task(threads: int, rng: np.random.Generator) -> None:
    """Copies of a matrix, one after the other; the second has no rows."""
    step, end, rows, width = Step, Step.END, 500, 64
    arrays = [rng.standard_normal((rows, width)).astype(np.float32), *(np.zeros((rows, width), np.float32),) * 2]
    arrays[2] = arrays[1].copy()
    tasks = [
        copy_task(step.TOKENS, end, end + 1, 1, width, width),
        copy_task(step.REQUESTS, end, end + 1, 1, width, width),
        copy_task(step.TOKENS, end + 1, end + 2, 1, width, width),
    ]
    table = program.new_step(end + len(arrays))
    table[step.TOKENS] = rows
    table[end:] = [array.ctypes.data for array in arrays]
    start = time.perf_counter()
    seconds = program.Program(tasks).run_timed(table, threads)
    wall = time.perf_counter() - start
    np.testing.assert_array_equal(arrays[2], arrays[0])
    assert seconds[1] == 0
    assert min(seconds[0], seconds[2]) > 0
    assert seconds.sum() < wall


CONCURRENT = """
import sys
from concurrent.futures import ThreadPoolExecutor
from llm_worker_rbee import LLM
models = [LLM(sys.argv[1], threads=int(sys.argv[2])) for _ in range(2)]
def generate(seed):
    return models[seed % 2].generate("hello", max_tokens=24, seed=seed, ignore_eos=True).tokens
alone = [generate(seed) for seed in range(6)]
with ThreadPoolExecutor(4) as pool:
    assert list(pool.map(generate, list(range(6)) * 3)) == alone * 3
print(len(alone[0]))
"""
FORK = """
import os, sys
from llm_worker_rbee import LLM

def answer():
    return LLM(sys.argv[1], threads=int(sys.argv[2])).generate("hello", max_tokens=8, seed=1, ignore_eos=True).tokens

def in_child():
    pid = os.fork()
    if pid == 0:
        print(len(answer()), flush=True)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

statuses = [in_child()]
first = answer()
statuses.append(in_child())
print(statuses, answer() == first, flush=True)
"""

PIECES = """
import sys
import numba  # to compile a kernel that no library has
import numpy as np
from llm_worker_rbee.backends.cpu.jit import TaskKernel
from llm_worker_rbee.backends.cpu.kernels.pointers import atomic_add, i64
from llm_worker_rbee.backends.cpu.kernels.program import Step, Task, pack_args
from llm_worker_rbee.backends.cpu.program import Program, new_step

def count_runs(args, step, piece):
    before, length, own, early = i64(args)[0], i64(args)[1], i64(args)[2], i64(args)[3]
    for i in range(length):
        if i64(before)[i] <= i64(own)[piece]:  # a piece of the task before had not run
            atomic_add(early, 1)
    atomic_add(own + 8 * piece, 1)

kernel, step, early = TaskKernel(count_runs), new_step(), np.zeros(1, np.int64)
step[Step.TOKENS] = 1
pieces = [1 + i * 7 % 20 for i in range(64)]
runs = [np.zeros(n, np.int64) for n in pieces]
tasks = []
for i, n in enumerate(pieces):
    before = runs[i - 1] if i else runs[0][:0]
    tasks.append(Task(kernel, pack_args(before, len(before), runs[i], early), n))
    tasks.append(Task(kernel, pack_args(before, 0, runs[i], early), 1, Step.NUM_LOGITS))  # without pieces
program = Program(tasks)
for turn in range(1, 51):
    program.run(step, int(sys.argv[1]))
    assert all((array == turn).all() for array in runs), (turn, runs)
print(int(early[0]))
"""

LATE = """
import numba  # as above
import numpy as np
from llm_worker_rbee.backends.cpu.jit import TaskKernel
from llm_worker_rbee.backends.cpu.kernels.pointers import atomic_add, i64
from llm_worker_rbee.backends.cpu.kernels.program import WORKER_LOOP, Step, Task, pack_args
from llm_worker_rbee.backends.cpu.program import Program, _zero_counters, new_step

def count_runs(args, step, piece):
    atomic_add(i64(args)[0], 1)

def write_units(args, step, piece):
    i64(step)[Step.REQUESTS] = i64(args)[0]

count, write, step, runs = TaskKernel(count_runs), TaskKernel(write_units), new_step(), np.zeros((2, 1), np.int64)
step[Step.TOKENS] = 1
tasks = []
for units, own in zip((2, 5), runs):
    tasks += Task(write, pack_args(units)), Task(count, pack_args(own), 1, Step.REQUESTS)
program = Program(tasks)
counters = _zero_counters(2)
for thread, length in enumerate((3, 4)):
    WORKER_LOOP(program._address, length, step.ctypes.data, counters, thread, 2)
print(*runs[:, 0])
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_kernels(write_model(tmp_path_factory.mktemp("threads") / "tiny.gguf"))


def run(script: str, *args: object, **env: str) -> list[str]:
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, "-c", script, *map(str, args)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("threads", [2, 16])
def test_every_piece_runs_once_and_after_the_task_before(threads: int) -> None:
    """More threads than cores: some come late, and their pieces are taken by others."""
    assert run(PIECES, threads) == ["0"]


def test_late_thread_does_not_read_the_units_of_a_later_task() -> None:
    """One thread has done the first three tasks before the other comes: by then their number of units is another."""
    assert run(LATE) == ["2 5"]


def test_several_python_threads_generate_at_once(tiny: Path) -> None:
    assert run(CONCURRENT, tiny, SEVERAL) == ["24"]


def test_forked_children_compute_before_and_after_the_kernels_are_used(tiny: Path) -> None:
    assert run(FORK, tiny, SEVERAL) == ["8", "8", "[0, 0] True"]
