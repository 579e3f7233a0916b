"""Signals at any time after the start of the process, each sent by the process itself at a known point."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import environment, write_model
from tests.helpers.process import spawn

LIMIT_S = 120
# the command, with a signal sent when a module is imported
AT_IMPORT = """
import os, runpy, sys
name, number, *sys.argv[1:] = sys.argv[1:]

class Finder:
    def find_spec(self, wanted, *_):
        if wanted == name:
            print("sent", file=sys.stderr, flush=True)
            os.kill(os.getpid(), int(number))

sys.meta_path.insert(0, Finder())
runpy.run_module("llm_worker_rbee", run_name="__main__")
"""
# the command, with Ctrl-C inside a destructor once the model is loaded
IN_DESTRUCTOR = """
import os, signal, sys
from llm_worker_rbee.__main__ import main
from llm_worker_rbee.cli import loading

class Interrupted:
    def __del__(self):
        print("sent", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGINT)
        "".join("a place where Python calls the handler")

def load(*args, **more):
    model = LLM(*args, **more)
    Interrupted()
    return model

LLM, loading.LLM = loading.LLM, load
main()
"""


def finish(script: str, *args: str | Path) -> tuple[int, str]:
    """Run a script; return its status and standard error."""
    command = [sys.executable, "-c", script, *map(str, args)]
    process = spawn(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        _, report = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return process.returncode, report


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("module", ["llm_worker_rbee.cli", "typer", "numpy", "uvicorn", "llm_worker_rbee.server.serve"])
def test_signal_during_imports_of_serve_exits_with_0(module: str, number: signal.Signals) -> None:
    assert finish(AT_IMPORT, module, number, "--debug", "serve", "--port", "0") == (0, "sent\n")


@pytest.mark.parametrize("module", ["typer", "llm_worker_rbee.llm"])
def test_ctrl_c_during_imports_of_run_exits_with_130(module: str) -> None:
    assert finish(AT_IMPORT, module, signal.SIGINT, "run", "serve") == (130, "sent\n")


def test_sigterm_during_imports_of_run_ends_it_by_signal() -> None:
    assert finish(AT_IMPORT, "typer", signal.SIGTERM, "run", "serve") == (-signal.SIGTERM, "sent\n")


def test_ctrl_c_inside_destructor_is_not_lost(tmp_path: Path) -> None:
    """Python reports an exception of a destructor and drops it."""
    model = write_model(tmp_path / "model.gguf", context=1 << 16)
    args = ("run", "Hello", "-m", model, "--backend", "reference", "--ignore-eos", "-n", "60000", "-q")
    assert finish(IN_DESTRUCTOR, *args) == (130, "sent\n")
