"""Child processes: environment, end, replies out of protocol; memory of this process, and the page cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llm_worker_bench import load, processes
from llm_worker_bench.processes import (
    PACKAGE_ROOT,
    ChildFailedError,
    ChildProcess,
    describe_exit,
    library_environment,
    package_environment,
)


def test_describe_exit_of_signals_and_statuses() -> None:
    assert describe_exit("x", -9, b"") == "x was ended by SIGKILL"
    assert describe_exit("x", -200, b"") == "x was ended by signal 200"
    assert (
        describe_exit("x", 1, b"first\nlast \xff\n\n") == "x ended with exit status 1: last \N{REPLACEMENT CHARACTER}"
    )


def test_child_process_error_reply_is_raised_with_its_text() -> None:
    program = 'print(\'{"version": "1"}\', flush=True); input(); print(\'{"error": "bad"}\', flush=True); input()'
    child = ChildProcess("the child", [sys.executable, "-c", program])
    try:
        assert child.start() == {"version": "1"}
        with pytest.raises(ChildFailedError, match=r"^the child: bad$"):
            child.request({}, "seconds")
    finally:
        child.close()


def test_environments_differ_by_import_path_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    ours, theirs = package_environment(3), library_environment(2)
    assert ours["PYTHONPATH"] == os.pathsep.join([str(PACKAGE_ROOT), "/elsewhere"])
    assert "PYTHONPATH" not in theirs
    assert (ours["OMP_NUM_THREADS"], theirs["OMP_NUM_THREADS"]) == ("3", "2")


def test_cached_fraction_follows_reads_and_drops(tmp_path: Path) -> None:
    file, empty = tmp_path / "file", tmp_path / "empty"
    file.write_bytes(bytes(3_000_001))
    empty.write_bytes(b"")
    load._prepare_page_cache([file, empty], "warm", {})
    part = processes.cached_fraction([file, empty])
    if part is None:
        pytest.skip("this system does not tell what is in its file cache")
    assert part > 0.9
    assert processes.cached_fraction([empty]) is None
    if processes.can_drop_pages():
        processes.drop_pages([file, empty])
        after = processes.cached_fraction([file])
        assert after is not None
        assert 0 <= after <= 1  # a file system in memory keeps all of it


RESET_PEAK = """
import numpy as np
from llm_worker_bench import processes
assert processes.reset_peak_memory()
before = processes.peak_memory()
block = np.ones(64 << 20, np.uint8)
assert processes.peak_memory() >= before + block.nbytes / 2
del block
assert processes.reset_peak_memory()
assert processes.resident_memory() is not None
assert processes.peak_memory() < before + (48 << 20)
"""


def test_reset_peak_memory_restarts_the_peak() -> None:
    """In a process of its own: in this one threads of earlier tests may free memory meanwhile."""
    if not processes.reset_peak_memory():
        pytest.skip("this system cannot reset the highest use of memory")
    subprocess.run([sys.executable, "-c", RESET_PEAK], check=True, timeout=60)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux tells how busy its cores are")
def test_busy_cores_counts_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            assert 0.3 < (processes.busy_cores() or 0.0) <= (os.cpu_count() or 1) + 0.2
        finally:
            busy.kill()
    monkeypatch.setattr(processes, "_busy_ticks", lambda: None)
    assert processes.busy_cores(0.0) is None
