"""Without a GPU the kernels run under Triton's interpreter. The variable must be set before they are imported: while
tests are collected, and while those of this folder run, but not for others.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

INTERPRET = "TRITON_INTERPRET"
HIDDEN = "CUDA_VISIBLE_DEVICES"
VISIBLE = os.environ.get(HIDDEN)  # before other tests hide the GPU
GPU = Path("/dev/nvidia0").exists()
TRITON = importlib.util.find_spec("triton") is not None and importlib.util.find_spec("torch") is not None

collect_ignore_glob = [] if TRITON else ["test_*.py"]
if not GPU:
    os.environ[INTERPRET] = "1"
    if TRITON:
        importlib.import_module("tests.helpers.triton_interpreter").install()


def _stop_interpreting() -> None:
    if not GPU:
        os.environ.pop(INTERPRET, None)


def pytest_collection_finish() -> None:
    _stop_interpreting()


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> Iterator[None]:
    hidden = os.environ.pop(HIDDEN, None)
    if VISIBLE is not None:
        os.environ[HIDDEN] = VISIBLE
    if not GPU:
        os.environ[INTERPRET] = "1"
    yield
    _stop_interpreting()
    if hidden is not None:
        os.environ[HIDDEN] = hidden
