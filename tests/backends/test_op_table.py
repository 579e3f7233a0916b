"""The op table is complete, and layers, models and engine call nothing beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import llm_worker_rbee
from llm_worker_rbee.backends import BACKENDS, OPS, Backend, reference, select_backend
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.errors import InvalidRequestError

PACKAGE = Path(llm_worker_rbee.__file__).parent
CALLERS = sorted(p for room in ("layers", "cache", "models", "engine") for p in (PACKAGE / room).rglob("*.py"))


def ops_used(source: str) -> Iterator[str]:
    """Yield x of every `ops.x` and `<anything>.ops.x`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else None
            if name == "ops":
                yield node.attr


@pytest.mark.parametrize("name", OPS)
def test_every_op_is_in_the_reference(name: str) -> None:
    assert callable(getattr(ReferenceBackend(), name))
    assert name == "fuse" or getattr(reference, name).__doc__


def test_the_op_table_has_no_doubles() -> None:
    assert len(set(OPS)) == len(OPS)


@pytest.mark.parametrize("path", CALLERS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_nothing_beside_the_table_is_called(path: Path) -> None:
    assert set(ops_used(path.read_text())) <= set(dir(Backend)) | set(Backend.__annotations__)


def test_every_op_is_called_somewhere() -> None:
    used = {name for path in CALLERS for name in ops_used(path.read_text())}
    assert used >= set(OPS)


def test_the_search_sees_a_stray_op() -> None:
    assert set(ops_used("ops.stray(x); self.ops.other(y); a.b.c")) == {"stray", "other"}


def packages_imported(source: str) -> Iterator[str]:
    """Yield the first name of every absolute import, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module).partition(".")[0]


def test_layers_and_models_touch_no_array_in_their_forward_pass() -> None:
    """NumPy is for tables and loading only: no file with a `__call__` or `forward` over arrays imports it."""
    layers = [f"layers/{name}.py" for name in ("norm", "linear", "attention", "mlp", "block", "encoder")]
    for path in (*layers, "models/decoder.py"):
        assert "numpy" not in packages_imported((PACKAGE / path).read_text())
    assert list(packages_imported("import numpy.typing as npt\nfrom numpy import ones\nfrom .numpy import x")) == [
        "numpy",
        "numpy",
    ]


def test_select_backend_by_name_and_threads() -> None:
    assert BACKENDS[:2] == ("auto", "reference")
    assert isinstance(select_backend("cpu", "reference"), ReferenceBackend)
    assert select_backend("cpu").name == select_backend("cpu", "cpu").name == "cpu"
    with pytest.raises(InvalidRequestError, match="threads is for the kernels"):
        select_backend("cpu", "reference", threads=2)
    with pytest.raises(InvalidRequestError, match=r"threads is 0: it must be 1 to \d"):
        select_backend("cpu", "cpu", threads=0)
    with pytest.raises(InvalidRequestError, match="unknown backend 'tpu'"):
        select_backend("cpu", "tpu")
    with pytest.raises(InvalidRequestError, match="unknown device 'toaster'"):
        select_backend("toaster")
