"""Real model files behind a real server: `LLM_WORKER_REAL_MODELS=DIR make test-real`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.serve_process import ServeProcess

FOLDER = os.environ.get("LLM_WORKER_REAL_MODELS")
CODER = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"


@pytest.fixture(scope="session")
def coder() -> Path:
    """Return the file of a small model that writes code and calls tools."""
    path = Path(FOLDER or ".") / CODER
    if FOLDER is None or not path.is_file():
        pytest.skip(f"LLM_WORKER_REAL_MODELS names no folder with {CODER}")
    return path


@pytest.fixture(scope="session")
def server(coder: Path) -> Iterator[ServeProcess]:
    """Serve it."""
    process = ServeProcess("--model", coder, "--served-model-name", "coder", "--max-context", "4096")
    yield process.ready()
    process.close()
