"""Loaded models that several files of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_worker_rbee import LLM
from tests.conftest import DEVICE
from tests.helpers import tiny_models


@pytest.fixture(scope="session")
def default_llm(default_model: Path) -> LLM:
    return LLM(default_model, device=DEVICE, deterministic=True)


@pytest.fixture(scope="session")
def reference_llm(default_model: Path) -> LLM:
    """For tests that compare numbers: float32 throughout."""
    return LLM(default_model, backend="reference")


@pytest.fixture(scope="session")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama over bytes: every token depends on all those before."""
    return tiny_models.write_random(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_llm(tiny_file: Path) -> LLM:
    return LLM(tiny_file, device=DEVICE, deterministic=True)
