"""Fixtures that several folders share: the real default model, and seeded numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llm_worker_rbee.weights.hub import locate


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The built-in model, fetched once into the user's cache."""
    return locate(None)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1234)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutations", type=int, default=20_000, help="how many damaged files the GGUF fuzz test opens")
