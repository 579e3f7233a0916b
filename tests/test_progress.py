"""Progress: silent, plain lines or a bar, by what standard error is. The bar of requests: cli/test_run_batch.py."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llm_worker_rbee.progress import request_progress, step_progress, supports_ansi, transfer_progress

ROOT = Path(__file__).parents[1]


def test_request_progress_without_terminal_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    for show in (None, False):
        with request_progress(4, show) as advance:
            advance(requests=4, tokens=9)
    with request_progress(0, True) as advance:
        advance(tokens=1)
    assert capsys.readouterr() == ("", "")


def test_request_progress_prints_each_quarter(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_request_progress_without_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    with request_progress(2, True, last_line=False) as advance:
        advance(requests=1, tokens=5)
        advance(requests=1, tokens=5)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("1 of 2 answers · 5 tokens · ")


def test_request_progress_without_stderr_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert not supports_ansi(sys.stderr)
    assert not supports_ansi(io.StringIO())
    with request_progress(2) as advance:
        advance(requests=1, tokens=3)


def test_transfer_progress_without_terminal_prints_each_quarter(capsys: pytest.CaptureFixture[str]) -> None:
    with transfer_progress() as progress:
        for done in range(0, 1001):
            progress("fetching", done * 1_000_000, 1_000_000_000)
        progress("waiting", 0, None)
        progress("waiting", 0, None)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 6
    assert captured.err.splitlines()[-1] == "waiting"
    assert "fetching: 250.0 MB of 1.00 GB" in captured.err


def shown_on_a_terminal(term: str) -> bytes:
    script = """
from llm_worker_rbee.progress import transfer_progress
with transfer_progress() as progress:
    for done in (0, 50, 100):
        progress("fetching [x]", done * 10**6, 10**8)
"""
    master, slave = pty.openpty()
    env = os.environ | {"PYTHONPATH": str(ROOT), "TERM": term, "COLUMNS": "100"}
    child = subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, stderr=slave)
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 4096):
            shown += part
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(master)
    assert child.communicate()[0] == b""
    assert child.returncode == 0
    return shown


def test_transfer_progress_on_terminal_draws_bar() -> None:
    shown = shown_on_a_terminal("xterm")
    assert b"fetching [x]" in shown
    assert b"100.0/100.0 MB" in shown


def test_transfer_progress_on_dumb_terminal_prints_lines() -> None:
    lines = [
        "fetching [x]: 0.0 kB of 100.0 MB",
        "fetching [x]: 50.0 MB of 100.0 MB",
        "fetching [x]: 100.0 MB of 100.0 MB",
    ]
    assert shown_on_a_terminal("dumb").decode() == "".join(f"{line}\r\n" for line in lines)


def test_step_progress_without_terminal_prints_each_quarter(capsys: pytest.CaptureFixture[str]) -> None:
    with step_progress() as report:
        for done in range(9):
            report(f"part {done}", done, 8)
        report("next", 0, 8)
        report("next", 4, 8)
    assert capsys.readouterr().err.splitlines() == [
        "25%: part 2",
        "50%: part 4",
        "75%: part 6",
        "100%: part 8",
        "50%: next",
    ]
