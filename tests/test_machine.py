"""What is read of this machine, and of one where nothing can be read."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llm_worker_rbee import machine


def test_machine_values_are_plausible() -> None:
    assert machine.usable_cores() >= 1
    assert machine.cpu_name()
    quota = machine.cpu_quota()
    assert quota is None or quota > 0
    total, available = machine.memory()
    assert total is None or available is None or 0 < available <= total


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", "Arm Neoverse-N1"),
        ("processor\t: 0\nCPU implementer\t: 0x99\nCPU part\t: 0x123\n", "Arm implementer 0x99, part 0x123"),
        ("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n", "Some CPU @ 2 GHz"),
    ],
)
def test_cpu_name(monkeypatch: pytest.MonkeyPatch, text: str, name: str) -> None:
    monkeypatch.setattr(machine, "_read", lambda path: text)
    monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
    assert machine.cpu_name() == name


def test_unreadable_machine_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_read", lambda path: "")
    monkeypatch.setattr(machine, "_arm_features", lambda: [])
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.cpu_features() == []
    assert machine.physical_cores() is None
    assert machine.cpu_quota() is None
    assert machine.memory_limit() == (None, 0)
    assert machine.gpus() == []


@pytest.mark.skipif(
    not machine.is_arm() or sys.platform != "linux", reason="the auxiliary vector is that of Linux on Arm"
)
def test_arm_features_are_those_of_cpuinfo() -> None:
    (words, *_) = [line for line in machine._read("/proc/cpuinfo").splitlines() if line.startswith("Features")]
    assert set(machine.cpu_features()) == set(words.split()) & set(machine.ARM_FEATURES)


@pytest.mark.parametrize(("text", "quota"), [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None)])
def test_cpu_quota_of_cgroup(monkeypatch: pytest.MonkeyPatch, text: str, quota: float | None) -> None:
    files = {"/proc/self/cgroup": "0::/box/inner\n", "/sys/fs/cgroup/box/cpu.max": text}
    monkeypatch.setattr(machine, "_read", lambda path: files.get(str(path), ""))
    assert machine.cpu_quota() == quota


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("4:cpu,cpuacct:/box/inner\n", {"box/cpu.cfs_quota_us": "250000\n", "box/cpu.cfs_period_us": "100000\n"}, 2.5),
        ("4:cpu,cpuacct:/not/here\n", {"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"}, 0.5),
        ("4:cpu,cpuacct:/\n", {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, None),
        ("4:memory:/box\n", {"box/cpu.cfs_quota_us": "50000\n", "box/cpu.cfs_period_us": "100000\n"}, None),
    ],
)
def test_cpu_quota_of_cgroup_version_1(
    monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, str], quota: float | None
) -> None:
    found = {f"/sys/fs/cgroup/cpu/{name}": text for name, text in files.items()} | {"/proc/self/cgroup": groups}
    monkeypatch.setattr(machine, "_read", lambda path: found.get(str(path), ""))
    assert machine.cpu_quota() == quota


@pytest.mark.parametrize(("text", "cores"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5\n", {5}), ("\n", set()), ("?", set())])
def test_parse_cpu_list(text: str, cores: set[int]) -> None:
    assert machine._parse_cpu_list(text) == cores


CORE = "/sys/devices/system/cpu/cpu{}/"
HYBRID_X86 = {"/sys/devices/cpu_core/cpus": "0-3\n", "/sys/devices/cpu_atom/cpus": "4-7\n"}  # two cores of two threads
BIG_LITTLE = {CORE.format(core) + "cpu_capacity": "1024\n" if core > 3 else "381\n" for core in range(8)}
THREE_KINDS = {
    CORE.format(core) + "cpu_capacity": f"{(250, 250, 250, 250, 800, 800, 800, 1024)[core]}" for core in range(8)
}
COMPACT_CORES = {CORE.format(core) + "cpufreq/cpuinfo_max_freq": f"{(5100, 3300)[core > 3]}000\n" for core in range(8)}
SLOW_CLOCK = {CORE.format(core) + "cpufreq/cpuinfo_max_freq": f"{(2400, 1100)[core > 3]}000\n" for core in range(8)}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the files and the affinity are Linux's")
@pytest.mark.parametrize(
    ("files", "affinity", "siblings", "expected"),
    [
        (HYBRID_X86, range(8), 2, 2),
        (HYBRID_X86, range(2, 6), 2, 1),
        (HYBRID_X86, range(4, 8), 2, None),
        (BIG_LITTLE, range(8), 1, 4),
        (BIG_LITTLE, range(4), 1, None),
        (THREE_KINDS, range(8), 1, 4),
        (COMPACT_CORES, range(8), 1, None),
        (SLOW_CLOCK, range(8), 1, 4),
        ({}, range(8), 1, None),
    ],
)
def test_usable_performance_cores(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], affinity: range, siblings: int, expected: int | None
) -> None:
    topology = {
        CORE.format(core) + "topology/thread_siblings_list": f"{core // siblings if core < 4 else core}\n"
        for core in range(8)
    }
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(affinity))
    monkeypatch.setattr(machine, "_read", lambda path: (files | topology).get(str(path), ""))
    assert machine.usable_performance_cores() == expected


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


def resident_code(library: str) -> int:
    """Return the resident kilobytes of a library's code."""
    total, is_code = 0, False
    for line in machine._read("/proc/self/smaps").splitlines():
        if "-" in line.split()[0]:
            is_code = " r-xp " in line and line.rpartition("/")[2].startswith(library)
        elif is_code and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is that of Linux")
def test_release_code_frees_pages_of_a_library_that_still_runs() -> None:
    library = next(line for line in machine._read("/proc/self/maps").splitlines() if "_multiarray_umath" in line)
    name = library.rpartition("/")[2]
    array = np.arange(1000.0)
    total, before = array.sum(), resident_code(name)
    machine.release_code(name)
    assert resident_code(name) < before
    assert array.sum() == total


@pytest.mark.parametrize("is_enabled", [True, False])
def test_without_collection_leaves_collector_as_it_was(is_enabled: bool) -> None:
    (gc.enable if is_enabled else gc.disable)()
    try:
        with machine.without_collection():
            assert not gc.isenabled()
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """Let the collector see the objects of tests/conftest.py too."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_resume_collection_still_finds_cycles_made_before() -> None:
    class Node:
        pass

    with machine.without_collection():
        node: Any = Node()
        node.itself = node
        is_alive = weakref.ref(node)
        del node
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert is_alive() is None
