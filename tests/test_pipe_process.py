"""A child process over pipes: large requests and replies, its end, its silence."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial

import pytest

from llm_worker_rbee.pipe_process import PIPE_BYTES, PipeProcess

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
