"""How many files of the package one streamed chat request runs through: what a reader opens to follow it."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import pytest

import llm_worker_rbee
from llm_worker_rbee.backends.cpu import program
from llm_worker_rbee.backends.cpu.jit import NativeKernel
from tests.budgets import COUNTS
from tests.conftest import ON_CPU
from tests.helpers.server import CHAT, Server, events
from tests.server.conftest import Start

PACKAGE = Path(llm_worker_rbee.__file__).parent
MAX_FILES = COUNTS["files of a streamed chat"].now
IN_CHILD = {"tokenizer/chat/template_worker.py"}  # its process is not traced


class PathTrace:
    """The files of the package whose functions are called while it is enabled, in all threads that start after it."""

    def __init__(self) -> None:
        self.enabled = False
        self.files: set[str] = set()
        self.kernels: set[FunctionType] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.enabled or event != "call":
            return
        self._add(frame.f_code.co_filename)
        if frame.f_code is program.Program.run.__code__:
            self.kernels |= {task.kernel.function for task in frame.f_locals["self"].tasks}
        elif frame.f_code is NativeKernel.__call__.__code__:
            self.kernels.add(frame.f_locals["self"].function)

    def _add(self, filename: str) -> bool:
        path = Path(filename)
        if inside := path.is_relative_to(PACKAGE):
            self.files.add(path.relative_to(PACKAGE).as_posix())
        return inside

    def add_kernel_files(self) -> None:
        """Add the files of the kernels that ran, and of the functions compiled into them."""
        reached: set[FunctionType] = set()
        pending = list(self.kernels)
        while pending:
            function = pending.pop()
            if function in reached or not self._add(function.__code__.co_filename):
                continue
            reached.add(function)
            called = (function.__globals__.get(name) for name in function.__code__.co_names)
            pending += [f for one in called if isinstance(f := python_function(one), FunctionType)]


def python_function(compiled: Any) -> Any:
    """Return the Python function behind a Numba dispatcher or intrinsic, else the object itself."""
    return getattr(compiled, "py_func", None) or inspect.unwrap(getattr(compiled, "_defn", compiled))


@pytest.fixture
def trace() -> Iterator[PathTrace]:
    made = PathTrace()
    before = sys.getprofile()
    threading.setprofile(made)
    yield made
    threading.setprofile(before)


def stream_chat(server: Server) -> list[Any]:
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 5, "stream": True}
    return events(server.post("/v1/chat/completions", body).text)


@ON_CPU
def test_streamed_chat_crosses_a_bounded_number_of_files(trace: PathTrace, start: Start) -> None:
    server = start()
    stream_chat(server)  # what only the first request runs is not the path of a request
    trace.enabled = True
    chunks = stream_chat(server)
    trace.enabled = False
    trace.add_kernel_files()
    assert len(chunks) > 2
    assert {"server/app.py", "generation.py", "engine/scheduler.py", "backends/cpu/kernels/attention.py"} <= trace.files
    path = sorted(trace.files | IN_CHILD)
    assert MAX_FILES - 2 <= len(path) <= MAX_FILES, "\n".join(path)
