"""Released pages of mapped bytes read the same again; unmapped bytes are left alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llm_worker_rbee.weights.checkpoint import map_file, release_pages

SIZE = 32 << 20


def mapped_memory() -> int:
    """Return the bytes of mapped files that are resident in this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile"))


def test_release_pages_bytes_are_read_again(tmp_path: Path) -> None:
    content = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    content.tofile(tmp_path / "weights")
    view = np.frombuffer(map_file(tmp_path / "weights", 1), np.uint8)
    part = view[12_345 : SIZE - 777].reshape(-1)
    for _ in range(2):
        np.testing.assert_array_equal(part, content[12_345 : SIZE - 777])
        release_pages(part)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell a process's memory")
def test_release_pages_frees_memory(tmp_path: Path) -> None:
    np.ones(SIZE, np.uint8).tofile(tmp_path / "weights")
    view = np.frombuffer(map_file(tmp_path / "weights", 1), np.uint8)
    assert int(view.sum(dtype=np.int64)) == SIZE
    before = mapped_memory()
    release_pages(view)
    assert before - mapped_memory() > SIZE * 0.9


def test_release_pages_unmapped_bytes_stay(tmp_path: Path) -> None:
    own = np.arange(1 << 20, dtype=np.uint8)
    release_pages(own[5:])
    np.testing.assert_array_equal(own, np.arange(1 << 20, dtype=np.uint8))
