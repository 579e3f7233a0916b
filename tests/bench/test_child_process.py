"""Child processes: the environment they get, how their end is described, replies out of protocol."""

from __future__ import annotations

import os
import sys

import pytest

from llm_worker_rbee.bench.child_process import (
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
    child = ChildProcess("someone", [sys.executable, "-c", program])
    try:
        assert child.start() == {"version": "1"}
        with pytest.raises(ChildFailedError, match=r"^someone: bad$"):
            child.request({}, "seconds")
    finally:
        child.close()


def test_environments_differ_by_import_path_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    ours, theirs = package_environment(3), library_environment(2)
    assert ours["PYTHONPATH"] == os.pathsep.join([str(PACKAGE_ROOT), "/elsewhere"])
    assert "PYTHONPATH" not in theirs
    assert (ours["OMP_NUM_THREADS"], theirs["OMP_NUM_THREADS"]) == ("3", "2")
