"""Without a GPU the kernels run under Triton's interpreter, which must be said before they are imported: while tests
are collected, and then while those of this folder run. Nobody else's tests are told of it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

INTERPRET = "TRITON_INTERPRET"
HIDDEN = "CUDA_VISIBLE_DEVICES"
SEEN = os.environ.get(HIDDEN)  # before other tests hide the GPU
GPU = Path("/dev/nvidia0").exists()
TRITON = importlib.util.find_spec("triton") is not None and importlib.util.find_spec("torch") is not None

collect_ignore_glob = [] if TRITON else ["test_*.py"]
if not GPU:
    os.environ[INTERPRET] = "1"


def _interpret_no_more() -> None:
    if not GPU:
        os.environ.pop(INTERPRET, None)


def pytest_collection_finish() -> None:
    _interpret_no_more()


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> Iterator[None]:
    hidden = os.environ.pop(HIDDEN, None)
    if SEEN is not None:
        os.environ[HIDDEN] = SEEN
    if not GPU:
        os.environ[INTERPRET] = "1"
    yield
    _interpret_no_more()
    if hidden is not None:
        os.environ[HIDDEN] = hidden
