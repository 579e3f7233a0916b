"""What several folders share: the device, the real default model, seeded numbers, and one folder for compiled kernels.

LLM_WORKER_TEST_DEVICE=cuda runs the tests of engine, server and LLM on a GPU; without it there is none for anybody but
tests/backends/cuda, whatever the machine has.
That folder is this checkout's own, for all test processes and those that they start, and stays from run to run: a test
with a home of its own would compile everything anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from llm_worker_rbee.backends import select_backend
from llm_worker_rbee.config import KV_DEFAULT
from llm_worker_rbee.models import read_model_config
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.hub import locate_model

os.environ.setdefault("LLM_WORKER_KERNEL_CACHE", str(Path(__file__).parents[1] / ".pytest_cache" / "kernels"))
DEVICE = os.environ.get("LLM_WORKER_TEST_DEVICE", "cpu")  # of a test that does not say which
HIDDEN = "CUDA_VISIBLE_DEVICES"
ON_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="it is about the CPU's backend")


@pytest.fixture(autouse=True, scope="session")
def _that_device_only() -> None:
    """Also for processes that tests start."""
    if DEVICE == "cpu":
        os.environ[HIDDEN] = ""
    else:
        select_backend(DEVICE)  # one line says what is missing


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The built-in model, fetched once into the user's cache; its kernels are compiled."""
    return with_kernels(locate_model(None))


def with_kernels(path: Path) -> Path:
    """Compile what a model needs, so that no command under test tells of it."""
    checkpoint = open_checkpoint(path)
    select_backend(DEVICE).load_kernels(checkpoint, read_model_config(checkpoint), KV_DEFAULT)
    return path


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1234)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutations", type=int, default=20_000, help="how many damaged files the GGUF fuzz test opens")
