"""A child process over pipes: large requests and replies, its end, its silence."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from llm_worker_rbee.pipe_process import PIPE_BYTES, ROOT, PipeProcess, ProgramError, describe_exit, package_command
from tests.helpers.process import is_alive
from tests.helpers.serve_process import until

# Replies to a line `SIZE\\n` and so many bytes with the line and the bytes in capital letters; `0` ends it, `-1` hangs.
PROGRAM = """
import sys, time
while line := sys.stdin.buffer.readline():
    if int(line) == 0:
        sys.exit(5)
    if int(line) < 0:
        time.sleep(600)
    sys.stdout.buffer.write(line + sys.stdin.buffer.read(int(line)).upper())
    sys.stdout.buffer.flush()
"""


@pytest.fixture
def process() -> Iterator[PipeProcess]:
    made = PipeProcess([sys.executable, "-c", PROGRAM])
    yield made
    made.kill()
    made.stop()


def soon() -> float:
    return time.monotonic() + 30


@pytest.mark.parametrize("size", [1, 1000, PIPE_BYTES, 5 * PIPE_BYTES + 3])
def test_requests_of_any_size_are_answered(process: PipeProcess, size: int) -> None:
    for letter in (b"a", b"b"):
        process.write(b"%d\n" % size, soon())
        process.write(letter * size, soon())
        assert process.read_line(soon(), 100) == b"%d\n" % size
        assert process.read(size, soon()) == letter.upper() * size


def test_long_line_is_read_to_its_limit(process: PipeProcess) -> None:
    process.write(b"300\n" + b"x" * 299 + b"\n", soon())
    assert process.read_line(soon(), 10) == b"300\n"
    assert process.read_line(soon(), 1000) == b"X" * 299 + b"\n"
    process.write(b"%d\n" % (2 * PIPE_BYTES) + b"x" * 2 * PIPE_BYTES, soon())
    process.read_line(soon(), 100)
    with pytest.raises(OSError, match="more than 100 bytes"):
        process.read_line(soon(), 100)


def test_end_of_process_raises_and_has_its_status(process: PipeProcess) -> None:
    process.write(b"0\n", soon())
    with pytest.raises(BrokenPipeError):
        process.read(1, soon())
    assert (process.stop(), process.poll()) == (5, 5)


@pytest.mark.parametrize("is_writing", [True, False])
def test_silent_process_times_out(process: PipeProcess, is_writing: bool) -> None:
    process.write(b"-1\n", soon())
    wait = partial(process.write, b"x" * 8 * PIPE_BYTES) if is_writing else partial(process.read, 1)
    with pytest.raises(TimeoutError):
        wait(time.monotonic() + 0.1)
    assert process.stop() is None


@pytest.mark.parametrize(("line", "status", "how"), [(b"0\n", 5, "ended with status 5"), (b"-1\n", None, "in time")])
def test_program_that_does_not_answer_has_ended(
    process: PipeProcess, line: bytes, status: int | None, how: str
) -> None:
    answer = process.ask([b"1\n", b"a"], lambda end: (process.read_line(end, 100), process.read(1, end)), 30)
    assert answer == (b"1\n", b"A")
    with pytest.raises(ProgramError, match=how) as caught:
        process.ask([line], partial(process.read, 1), 0.5 if status is None else 30)
    assert caught.value.status == status
    assert isinstance(caught.value.__cause__, BrokenPipeError if status else TimeoutError)
    assert not is_alive(process.pid)


def test_program_that_cannot_be_started() -> None:
    with pytest.raises(ProgramError, match="could not be started \\(No such file"):
        PipeProcess(["/no/such/program"])


def test_program_of_the_package_ends_with_what_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports the package, in whatever folder, and gets arguments and variables."""
    (tmp_path / "llm_worker_rbee.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    program = """
import os, subprocess, sys
from llm_worker_rbee.machine import usable_cores
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
print(child.pid, sys.argv[1], os.environ["MARK"], flush=True)
child.wait()
"""
    process = PipeProcess(package_command(program, 7), {"MARK": "x"})
    pid, *words = process.read_line(soon(), 100).split()
    assert words == [b"7", b"x"]
    process.kill()
    assert process.stop() == -signal.SIGKILL
    until(lambda: not is_alive(int(pid)))


@pytest.mark.parametrize(
    ("status", "text"),
    [(-9, "was killed by SIGKILL"), (70, "ended with status 70"), (-200, "was killed by signal 200")],
)
def test_describe_exit(status: int, text: str) -> None:
    assert describe_exit(status) == text


def test_process_that_may_outlive_its_parent_finishes(tmp_path: Path) -> None:
    """It waits for the end of its parent, which closes its input."""
    out, program = tmp_path / "out", "import pathlib, sys; sys.stdin.read(); pathlib.Path(sys.argv[1]).touch()"
    parent = (
        "from llm_worker_rbee.pipe_process import PipeProcess, package_command\n"
        f"PipeProcess(package_command({program!r}, {str(out)!r}, ends_with_parent=False))"
    )
    subprocess.run([sys.executable, "-c", parent], check=True, timeout=60, cwd=ROOT)
    until(out.exists)
