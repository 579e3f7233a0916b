"""The kernels on disk: found again by the next process, never after an edit or for another instruction set."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llm_worker_rbee import machine
from llm_worker_rbee.backends import isa
from llm_worker_rbee.backends.cpu import compile as compiling

pytestmark = pytest.mark.skipif(not machine.is_x86(), reason="the CPU kernels have not been run on Arm yet")
PACKAGE = Path(__file__).parents[2] / "llm_worker_rbee"
RUN = """
import numpy as np
from llm_worker_rbee.backends.cpu import elementwise
out = np.empty(16, np.float32)
elementwise.gated_few(np.full(32, 2, np.float32), out, 1, 16, False)
stats = elementwise.gated_few.stats
print(out[0], sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def run(root: Path, cache: Path, **env: str) -> tuple[float, int, int]:
    """(result, found on disk, compiled) of a small kernel in a process of its own."""
    settings = {**os.environ, "PYTHONPATH": str(root), "XDG_CACHE_HOME": str(cache), "NUMBA_NUM_THREADS": "1", **env}
    done = subprocess.run(
        [sys.executable, "-c", RUN], env=settings, cwd=root, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    value, found, compiled = done.stdout.split()
    return float(value), int(found), int(compiled)


def test_kernels_are_found_again_and_never_stale(tmp_path: Path) -> None:
    root, cache = tmp_path / "code", tmp_path / "cache"
    shutil.copytree(PACKAGE, root / "llm_worker_rbee", ignore=shutil.ignore_patterns("__pycache__"))
    first = run(root, cache)
    assert first[1:] == (0, 1)
    assert run(root, cache) == (first[0], 1, 0)
    edited = root / "llm_worker_rbee" / "backends" / "cpu" / "floats.py"  # not the kernel's own file
    text = edited.read_text()
    assert "lambda context, b, sig, args: b.fdiv(*args)" in text
    edited.write_text(
        text.replace("lambda context, b, sig, args: b.fdiv(*args)", "lambda context, b, sig, args: b.fadd(*args)")
    )
    changed = run(root, cache)
    assert changed[0] != pytest.approx(first[0])
    assert changed[1:] == (0, 1)
    edited.write_text(text)
    assert run(root, cache) == (first[0], 1, 0)
    assert run(root, cache, **{isa.VARIABLE: "portable"}) == (first[0], 0, 1)


def test_a_cache_that_cannot_be_written_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    folder = compiling.cache_folder()
    assert folder.is_dir()
    assert not folder.is_relative_to(blocked)
    folder.rmdir()
