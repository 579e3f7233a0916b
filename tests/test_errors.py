"""Sizes in messages, and what every error class has."""

from __future__ import annotations

import pytest

from llm_worker_rbee import errors
from llm_worker_rbee.errors import WorkerError, human_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0.0 kB"), (1234, "1.2 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB"), (10**9 - 1, "1.00 GB"),
     (45 * 10**10, "450.00 GB")],
)  # fmt: skip
def test_human_bytes_rounds_to_unit(count: int, text: str) -> None:
    assert human_bytes(count) == text


ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, WorkerError)]


@pytest.mark.parametrize("kind", ERRORS)
def test_error_class_has_code_and_http_status(kind: type[WorkerError]) -> None:
    assert kind.code == kind.code.upper()
    assert 400 <= kind.status < 600
