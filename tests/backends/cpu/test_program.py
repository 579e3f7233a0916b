"""Kernel launches: the mask on Numba's pool, several Python threads, and forks, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numba
import pytest

from llm_worker_rbee import machine
from llm_worker_rbee.backends.cpu import program
from tests.cli.conftest import write_model
from tests.conftest import with_kernels

ROOT = Path(__file__).parents[3]
SEVERAL = min(2, machine.usable_cores())


def test_launch_masks_the_pool_in_every_python_thread() -> None:
    seen = []

    def look(count: int) -> None:
        with program.launch(count):
            seen.append(numba.get_num_threads())

    for count in (1, SEVERAL):
        look(count)
        other = threading.Thread(target=look, args=(count,))
        other.start()
        other.join()
    assert seen == [1, 1, SEVERAL, SEVERAL]


CONCURRENT = """
import sys
from concurrent.futures import ThreadPoolExecutor
from llm_worker_rbee import LLM
from llm_worker_rbee.backends.cpu import program
models = [LLM(sys.argv[1], threads=int(sys.argv[2])) for _ in range(2)]
def generate(seed):
    return models[seed % 2].generate("hello", max_tokens=24, seed=seed, ignore_eos=True).tokens
alone = [generate(seed) for seed in range(6)]
with ThreadPoolExecutor(4) as pool:
    assert list(pool.map(generate, list(range(6)) * 3)) == alone * 3
print(program.threading_layer(), len(alone[0]))
"""
FORK = """
import os, sys
from llm_worker_rbee import LLM
from llm_worker_rbee.errors import WorkerError

def answer():
    return LLM(sys.argv[1], threads=int(sys.argv[2])).generate("hello", max_tokens=8, seed=1, ignore_eos=True).tokens

def in_child():
    pid = os.fork()
    if pid == 0:
        try:
            print(len(answer()), flush=True)
        except WorkerError as error:
            print(error, flush=True)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

statuses = [in_child()]
first = answer()
statuses.append(in_child())
print(statuses, answer() == first, flush=True)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_kernels(write_model(tmp_path_factory.mktemp("threads") / "tiny.gguf"))


def run(script: str, tiny: Path, **env: str) -> list[str]:
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, "-c", script, str(tiny), str(SEVERAL)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("layer", ["workqueue", "omp"])
def test_several_python_threads_generate_at_once(tiny: Path, layer: str) -> None:
    if layer == "omp" and program.threading_layer() != "omp":
        pytest.skip("there is no libgomp here")
    assert run(CONCURRENT, tiny, NUMBA_THREADING_LAYER=layer) == [f"{layer} 24"]


def test_launch_in_a_forked_child_raises_instead_of_ending_the_process(tiny: Path) -> None:
    if program.threading_layer() != "omp":
        pytest.skip("there is no libgomp here: other layers survive a fork")
    early, late, parent = run(FORK, tiny)
    assert early == "8"  # before the kernels were used, a child may use them
    assert "'spawn'" in late
    assert parent == "[0, 0] True"
