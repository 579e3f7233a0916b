"""How many threads, who may start them, and what happens after a fork: in real processes where it matters."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numba
import pytest

from llm_worker_rbee import machine
from llm_worker_rbee.backends import thread_count
from llm_worker_rbee.backends.cpu import threads
from llm_worker_rbee.errors import InvalidRequestError
from tests.cli.conftest import write_model
from tests.conftest import with_kernels

ROOT = Path(__file__).parents[2]
SEVERAL = min(2, machine.usable_cores())


@pytest.fixture
def machine_of(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine of 8 physical cores of two threads each, and no word in the environment."""
    monkeypatch.setattr(machine, "usable_cores", lambda: 16)
    monkeypatch.setattr(machine, "usable_physical_cores", lambda: 8)
    monkeypatch.setattr(machine, "cpu_quota", lambda: None)
    for name in (thread_count.VARIABLE, thread_count.NUMBA_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("usable", "physical", "quota", "expected"),
    [(16, 8, None, 8), (4, 2, None, 2), (3, None, None, 3), (16, 8, 2.0, 2), (16, 8, 1.5, 2), (16, 8, 0.1, 1)],
)
def test_the_default(
    machine_of: pytest.MonkeyPatch, usable: int, physical: int | None, quota: float | None, expected: int
) -> None:
    machine_of.setattr(machine, "usable_cores", lambda: usable)
    machine_of.setattr(machine, "usable_physical_cores", lambda: physical)
    machine_of.setattr(machine, "cpu_quota", lambda: quota)
    assert thread_count.choose() == expected


def test_what_is_asked_for(machine_of: pytest.MonkeyPatch) -> None:
    assert thread_count.choose(16) == 16  # logical cores may be asked for
    with pytest.raises(InvalidRequestError, match=r"^threads is 17: it must be 1 to 16 \(16 cores that"):
        thread_count.choose(17)
    machine_of.setenv(thread_count.VARIABLE, "5")
    assert (thread_count.choose(), thread_count.choose(3)) == (5, 3)
    machine_of.setenv(thread_count.VARIABLE, "many")
    with pytest.raises(InvalidRequestError, match=r"^LLM_WORKER_THREADS is 'many'"):
        thread_count.choose()
    machine_of.setenv(thread_count.VARIABLE, "0")
    with pytest.raises(InvalidRequestError, match=r"^LLM_WORKER_THREADS is 0: it must be 1 to 16"):
        thread_count.choose()
    machine_of.setattr(machine, "cpu_quota", lambda: 2.5)
    with pytest.raises(InvalidRequestError, match=r"it must be 1 to 3 \(a quota of 2.5 cores\)"):
        thread_count.choose(4)
    machine_of.setenv(thread_count.NUMBA_VARIABLE, "1")
    assert thread_count.explain(1).why == "threads is 1"
    with pytest.raises(InvalidRequestError, match="NUMBA_NUM_THREADS=1"):
        thread_count.choose(2)


def test_physical_cores_are_counted_where_the_process_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    siblings = {0: "0,4\n", 1: "1,5\n", 4: "0,4\n", 5: "1,5\n", 2: "2,6\n"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5}, raising=False)
    monkeypatch.setattr(machine, "_read", lambda path: siblings[int(str(path).split("/cpu")[2].split("/")[0])])
    assert machine.usable_physical_cores() == 2


def test_every_python_thread_uses_the_number_that_was_chosen() -> None:
    before, seen = threads.count(), []

    def look() -> None:
        with threads.launching():
            seen.append(numba.get_num_threads())

    try:
        for wanted in (1, SEVERAL):
            assert threads.use(wanted) == threads.use(None) == wanted
            look()
            other = threading.Thread(target=look)
            other.start()
            other.join()
    finally:
        threads.use(before)
    assert seen == [1, 1, SEVERAL, SEVERAL]


TOGETHER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from llm_worker_rbee import LLM
from llm_worker_rbee.backends.cpu import threads
models = [LLM(sys.argv[1], threads=int(sys.argv[2])) for _ in range(2)]
def ask(seed):
    return models[seed % 2].generate("hello", max_tokens=24, seed=seed, ignore_eos=True).tokens
alone = [ask(seed) for seed in range(6)]
with ThreadPoolExecutor(4) as pool:
    assert list(pool.map(ask, list(range(6)) * 3)) == alone * 3
print(threads.layer(), len(alone[0]))
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
def test_several_python_threads_may_ask_at_once(tiny: Path, layer: str) -> None:
    if layer == "omp" and threads.layer() != "omp":
        pytest.skip("there is no libgomp here")
    assert run(TOGETHER, tiny, NUMBA_THREADING_LAYER=layer) == [f"{layer} 24"]


def test_after_a_fork_the_kernels_refuse_where_they_would_be_killed(tiny: Path) -> None:
    if threads.layer() != "omp":
        pytest.skip("there is no libgomp here: other layers survive a fork")
    early, late, parent = run(FORK, tiny)
    assert early == "8"  # before the kernels were used, a child may use them
    assert "'spawn'" in late
    assert parent == "[0, 0] True"
