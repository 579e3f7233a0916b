"""An op added from outside the package, and the number of files that name an op inside it (CONTRIBUTING.md)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import llm_worker_rbee
from llm_worker_rbee.backends import Backend, reference
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.graph import Graph, Recorder, Value
from llm_worker_rbee.backends.ops import ARRAYS, SHAPES, TOKENS, Array, Ops, op
from llm_worker_rbee.backends.reference import ReferenceBackend

PACKAGE = Path(llm_worker_rbee.__file__).parent
MAX_FILES = 8


@pytest.fixture
def square(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Declare the op and define it, and forget it after the test."""

    @op(lambda x, scale: [x.shape])
    def square(self: Ops, x: Array, scale: float = 1.0) -> Array: ...

    def define(x: NDArray[np.float32], scale: float) -> NDArray[np.float32]:
        return np.square(x) * np.float32(scale)

    monkeypatch.setattr(Ops, "square", square, raising=False)
    monkeypatch.setattr(reference, "square", define, raising=False)
    yield
    del SHAPES["square"], ARRAYS["square"]


@pytest.mark.usefixtures("square")
def test_declared_and_defined_op_is_recorded_and_computed_by_every_backend() -> None:
    recorder: Any = Recorder()
    x = Value((TOKENS, 4), "x")
    out = recorder.square(x, scale=2.0)
    assert out.shape == x.shape
    assert Graph(tuple(recorder.nodes), out).nodes[0].args == {"x": x, "scale": 2.0}
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    backends: list[Any] = [ReferenceBackend(), CpuBackend()]
    for backend in backends:
        np.testing.assert_array_equal(backend.square(rows, 2.0), 2 * np.square(rows))


def files_that_name(name: str) -> list[str]:
    """Return the files of layers and backends with an identifier, of code or of a pattern of ops."""
    folders = (PACKAGE / "layers", PACKAGE / "backends")
    paths = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return [str(path.relative_to(PACKAGE)) for path in paths if re.search(rf"\b{name}\b", path.read_text())]


@pytest.mark.parametrize(
    "name", ["split_heads", "rms_norm", "add_layer_norm", "rope_store", "sigmoid_gate", "mean_rows", "per_layer_gate"]
)
def test_few_files_name_an_op(name: str) -> None:
    assert hasattr(Backend, name)
    assert len(files_that_name(name)) <= MAX_FILES, files_that_name(name)
