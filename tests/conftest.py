"""What several folders share: the real default model, seeded numbers, and one folder for compiled kernels.

That folder is this checkout's own, for all test processes and those that they start, and stays from run to run: a test
with a home of its own would compile everything anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from llm_worker_rbee.backends import kernels, pick
from llm_worker_rbee.models import describe
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.hub import locate

os.environ.setdefault("LLM_WORKER_KERNEL_CACHE", str(Path(__file__).parents[1] / ".pytest_cache" / "kernels"))


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The built-in model, fetched once into the user's cache; its kernels are compiled."""
    return with_kernels(locate(None))


def with_kernels(path: Path) -> Path:
    """Compile what a model needs, so that no command under test tells of it."""
    checkpoint = open_checkpoint(path)
    kernels.get_ready_for(pick("cpu"), kernels.Needs.of(checkpoint, describe(checkpoint)))
    return path


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1234)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutations", type=int, default=20_000, help="how many damaged files the GGUF fuzz test opens")
