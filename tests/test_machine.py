"""What is read of this machine, and of one where nothing can be read."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llm_worker_rbee import machine


def test_machine_values_are_plausible() -> None:
    assert machine.usable_cores() >= 1
    assert machine.cpu_name()
    quota = machine.cpu_quota()
    assert quota is None or quota > 0
    total, available = machine.memory()
    assert total is None or available is None or 0 < available <= total


def test_unreadable_machine_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_read", lambda path: "")
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.cpu_features() == []
    assert machine.physical_cores() is None
    assert machine.cpu_quota() is None
    assert machine.memory_limit() == (None, 0)
    assert machine.gpus() == []


@pytest.mark.parametrize(("text", "quota"), [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None)])
def test_cpu_quota_of_cgroup(monkeypatch: pytest.MonkeyPatch, text: str, quota: float | None) -> None:
    files = {"/proc/self/cgroup": "0::/box/inner\n", "/sys/fs/cgroup/box/cpu.max": text}
    monkeypatch.setattr(machine, "_read", lambda path: files.get(str(path), ""))
    assert machine.cpu_quota() == quota


@pytest.mark.parametrize(
    ("status", "text"),
    [(-9, "was killed by SIGKILL"), (70, "ended with status 70"), (-200, "was killed by signal 200")],
)
def test_describe_exit(status: int, text: str) -> None:
    assert machine.describe_exit(status) == text


def test_raise_open_files_up_to_the_hard_limit() -> None:
    """In a process of its own: a limit that was raised stays so."""
    code = """
import resource
from llm_worker_rbee.machine import raise_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))
assert raise_open_files(32) == 64
assert raise_open_files(100) == 100
assert raise_open_files(4096) == 256
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, 256)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
