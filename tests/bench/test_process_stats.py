"""Memory of this process, and the page cache, as the system tells them."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from llm_worker_rbee.bench import load, process_stats


def test_cached_fraction_follows_reads_and_drops(tmp_path: Path) -> None:
    file, empty = tmp_path / "file", tmp_path / "empty"
    file.write_bytes(bytes(3_000_001))
    empty.write_bytes(b"")
    load._read_files([file, empty])
    part = process_stats.cached_fraction([file, empty])
    if part is None:
        pytest.skip("this system does not tell what is in its file cache")
    assert part > 0.9
    assert process_stats.cached_fraction([empty]) is None
    if process_stats.can_drop_pages():
        process_stats.drop_pages([file, empty])
        after = process_stats.cached_fraction([file])
        assert after is not None
        assert 0 <= after <= 1  # a file system in memory keeps all of it


def test_reset_peak_memory_restarts_the_peak() -> None:
    if not process_stats.reset_peak_memory():
        pytest.skip("this system cannot reset the highest use of memory")
    before = process_stats.peak_memory()
    block = np.ones(64 << 20, np.uint8)
    assert process_stats.peak_memory() >= before + block.nbytes / 2
    del block
    gc.collect()
    assert process_stats.reset_peak_memory()
    used = process_stats.resident_memory()
    assert used is not None
    assert process_stats.peak_memory() < before + (48 << 20)
