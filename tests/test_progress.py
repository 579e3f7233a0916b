"""Progress of many answers: silent where nobody looks, plain lines where they are wanted. The bar: cli/test_many.py."""

from __future__ import annotations

import io
import re
import sys

import pytest

from llm_worker_rbee.errors import human_bytes
from llm_worker_rbee.progress import request_progress, supports_ansi


def test_nothing_unless_a_terminal_looks(capsys: pytest.CaptureFixture[str]) -> None:
    for show in (None, False):
        with request_progress(4, show) as advance:
            advance(requests=4, tokens=9)
    with request_progress(0, True) as advance:
        advance(tokens=1)
    assert capsys.readouterr() == ("", "")


def test_a_line_at_each_quarter(capsys: pytest.CaptureFixture[str]) -> None:
    with request_progress(8, True) as advance:
        for _ in range(8):
            advance(tokens=100)
            advance(requests=1, tokens=25)
    out, err = capsys.readouterr()
    assert out == ""
    found = [
        re.fullmatch(r"(\d) of 8 answers · ([\d,]+) tokens · [\d,]+\.\d tokens/s", line) for line in err.splitlines()
    ]
    assert [line and line.groups() for line in found] == [("2", "250"), ("4", "500"), ("6", "750"), ("8", "1,000")]


def test_no_sum_where_the_caller_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    with request_progress(2, True, last_line=False) as advance:
        advance(requests=1, tokens=5)
        advance(requests=1, tokens=5)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("1 of 2 answers · 5 tokens · ")


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "0.0 kB"), (1234, "1.2 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB"), (10**9 - 1, "1.00 GB"),
     (45 * 10**10, "450.00 GB")],
)  # fmt: skip
def test_sizes(count: int, told: str) -> None:
    assert human_bytes(count) == told


def test_a_process_without_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert not supports_ansi(sys.stderr)
    assert not supports_ansi(io.StringIO())
    with request_progress(2) as advance:
        advance(requests=1, tokens=3)
