"""Processes of engines that are started ahead of their load options: used once, and only where they fit."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm_worker_rbee.token_engine import spawn
from tests.helpers.process import is_alive
from tests.helpers.process import spawn as spawn_process
from tests.helpers.serve_process import LIMIT_S, MARK, command, marked_processes, until
from tests.helpers.server import write_model


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    yield
    spawn._discard()


def ahead() -> spawn.SpawnedProcess:
    spawn.spawn_ahead(["serve", "--port", "0"])
    return spawn._ahead[0]


def test_process_that_was_started_ahead_is_taken_once() -> None:
    first = ahead()
    taken = [spawn.take(), spawn.take()]
    assert taken[0] is first
    assert taken[1].process.pid != first.process.pid
    for one in taken:
        assert is_alive(one.process.pid)
        one.kill()
        assert not is_alive(one.process.pid)


def test_process_with_another_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options such as --cpu-isa are passed on in the environment; what typer sets is not."""
    first = ahead()
    monkeypatch.setenv("_TYPER_FORCE_DISABLE_TERMINAL", "1")
    assert first.environment == spawn._environment()
    monkeypatch.setenv("LLM_WORKER_CPU_ISA", "baseline")
    taken = spawn.take()
    assert (taken is first, is_alive(first.process.pid)) == (False, False)
    assert taken.environment["LLM_WORKER_CPU_ISA"] == "baseline"
    taken.kill()


def test_process_that_has_ended_is_not_used() -> None:
    first = ahead()
    first.process.kill()
    first.process.wait()
    taken = spawn.take()
    assert is_alive(taken.process.pid)
    taken.kill()


def test_process_ends_with_the_socket_and_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it registered for its end, such as removing a temporary folder of kernels, is done."""
    register = f"import atexit, os; atexit.register(os.mkdir, {str(tmp_path / 'x')!r})"
    (tmp_path / "sitecustomize.py").write_text(register)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = spawn.spawn()
    started.socket.close()
    assert started.process.wait(LIMIT_S) == 0
    assert (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "arguments", [["run", "serve"], ["serve", "--help"], ["serve", "--engine-process", "off"], ["--version"], []]
)
def test_other_commands_start_none(arguments: list[str]) -> None:
    spawn.spawn_ahead(arguments)
    assert spawn._ahead == []


def test_serve_with_closed_streams_loads_its_model(tmp_path: Path) -> None:
    """The descriptors that are free then must not become the engine's socket."""
    model = write_model(tmp_path / "tiny.gguf")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        callback = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        line = [sys.executable, "-m", "llm_worker_rbee", "serve", "-m", str(model), "--port", "0", "--backend",
                "reference", "--callback-url", callback]  # fmt: skip
        front = spawn_process(["sh", "-c", f"exec {shlex.join(line)} <&- >&- 2>&-"])
        try:
            listener.accept()[0].close()  # it is ready
        finally:
            front.kill()
            front.wait()


def test_command_that_fails_leaves_no_process() -> None:
    """A usage error is found after the engine's process was started."""
    line = [sys.executable, "-m", "llm_worker_rbee", "serve", "--port", "none"]
    mark = f"{os.getpid()}-spawn"
    done = subprocess.run(line, capture_output=True, timeout=LIMIT_S, check=False, env={**os.environ, MARK: mark})
    assert (done.returncode, marked_processes(mark)) == (2, []), done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_front_that_ends_while_it_imports_takes_the_process_along(number: signal.Signals) -> None:
    """The engine's process imports at the same time; neither has handled a message."""
    mark = f"{os.getpid()}-{number.name}"
    line = [sys.executable, "-m", "llm_worker_rbee", "serve", "--port", "0"]
    front = spawn_process(line, stdout=subprocess.DEVNULL, env={**os.environ, MARK: mark})
    until(lambda: any("token_engine.child" in command(pid) for pid in marked_processes(mark)))
    front.send_signal(number)
    assert front.wait(LIMIT_S) == (-number if number == signal.SIGKILL else 0)
    until(lambda: not marked_processes(mark), 2.0)
