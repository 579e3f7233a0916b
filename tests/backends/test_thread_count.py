"""How many CPU threads are used: defaults, limits, options and variables."""

from __future__ import annotations

import os

import pytest

from llm_worker_rbee import machine
from llm_worker_rbee.backends import thread_count
from llm_worker_rbee.errors import InvalidRequestError


@pytest.fixture
def machine_of(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine of 8 physical cores of two threads each, without environment variables."""
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
def test_choose_defaults_to_usable_physical_cores(
    machine_of: pytest.MonkeyPatch, usable: int, physical: int | None, quota: float | None, expected: int
) -> None:
    machine_of.setattr(machine, "usable_cores", lambda: usable)
    machine_of.setattr(machine, "usable_physical_cores", lambda: physical)
    machine_of.setattr(machine, "cpu_quota", lambda: quota)
    assert thread_count.choose() == expected


def test_choose_honours_option_and_variable_within_limits(machine_of: pytest.MonkeyPatch) -> None:
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
    assert thread_count.explain(1).reason == "threads is 1"
    with pytest.raises(InvalidRequestError, match="NUMBA_NUM_THREADS=1"):
        thread_count.choose(2)


def test_usable_physical_cores_follow_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    siblings = {0: "0,4\n", 1: "1,5\n", 4: "0,4\n", 5: "1,5\n", 2: "2,6\n"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5}, raising=False)
    monkeypatch.setattr(machine, "_read", lambda path: siblings[int(str(path).split("/cpu")[2].split("/")[0])])
    assert machine.usable_physical_cores() == 2
