"""Real models behind real servers: `make test-real`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.serve_process import ServeProcess
from tests.real.models import ModelMissingError, locate

CODERS = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """Return the file of a model by its name in models.toml; skip the test where it cannot be had."""

    def find(name: str) -> Path:
        try:
            return locate(name)
        except ModelMissingError as error:
            pytest.skip(str(error))

    return find


@pytest.fixture(scope="session", params=CODERS)
def coder(request: pytest.FixtureRequest, real_model: Callable[[str], Path]) -> Path:
    """Return the file of a model that writes code and calls tools."""
    return real_model(request.param)


@pytest.fixture(scope="session")
def server(coder: Path) -> Iterator[ServeProcess]:
    """Serve it."""
    process = ServeProcess("--model", coder, "--served-model-name", "coder", "--max-context", "4096")
    yield process.ready()
    process.close()
