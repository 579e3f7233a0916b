"""A worker process and the signals that end it: while it loads, before it serves, after its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import DEVICE
from tests.helpers.process import spawn as spawn_child

LIMIT_S = 60
Spawn = Callable[..., "subprocess.Popen[str]"]
# the command, with something done at the very end of its process
AT_EXIT = "import atexit, os, signal; atexit.register({}); from llm_worker_rbee.cli import main; main()"


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    begun: list[subprocess.Popen[str]] = []

    def start(*args: str | Path, at_exit: str | None = None) -> subprocess.Popen[str]:
        how = ["-m", "llm_worker_rbee"] if at_exit is None else ["-c", AT_EXIT.format(at_exit)]
        line = [sys.executable, *how, "serve", "--port", "0", "--device", DEVICE, *map(str, args)]
        env = {**os.environ, "LLORCH_LOG_FORMAT": "json"}
        begun.append(spawn_child(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
        return begun[-1]

    yield start
    for process in begun:
        if process.poll() is None:
            process.kill()
        process.communicate()


def base_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    found = re.search(r"http://[^ ,]+", process.stdout.readline())
    assert found is not None
    return found[0]


def until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    next(line for line in process.stdout if "curl" in line)


@pytest.fixture
def stuck(tmp_path: Path) -> Path:
    """A FIFO as chat template, so that loading never ends."""
    os.mkfifo(tmp_path / "template")
    return tmp_path / "template"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_loading_exits_with_0(spawn: Spawn, model_file: Path, stuck: Path, number: signal.Signals) -> None:
    """Clients that wait for the model get the stopping event after those of the phases until then."""
    process = spawn("-m", model_file, "--chat-template", stuck)
    url = base_url(process)
    with httpx.stream("GET", f"{url}/v1/loading/progress", timeout=LIMIT_S) as waiting:
        assert httpx.get(f"{url}/health").json()["status"] == "loading"
        refused = httpx.post(f"{url}/v1/jobs", json={"prompt": "x", "max_tokens": 1})
        assert (refused.status_code, refused.json()["code"]) == (503, "MODEL_LOADING")
        assert int(refused.headers["retry-after"]) > 0
        process.send_signal(number)
        assert waiting.read().endswith(b'data: {"stage":"stopping"}\n\ndata: [DONE]\n\n')
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert all(json.loads(line)["level"] in ("info", "warning") for line in said.splitlines())


def test_signal_before_serving_exits_with_0(spawn: Spawn, model_file: Path, stuck: Path) -> None:
    process = spawn("-m", model_file, "--chat-template", stuck)
    base_url(process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0


def test_signals_after_shutdown_are_ignored(spawn: Spawn, model_file: Path) -> None:
    """At exit neither Python's handlers nor the worker's may run."""
    both = "lambda: [os.kill(os.getpid(), n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM)]"
    process = spawn("-m", model_file, at_exit=both)
    until_ready(process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert "Traceback" not in said


def test_closed_stdout_does_not_stop_worker(spawn: Spawn, model_file: Path, stuck: Path) -> None:
    process = spawn("-m", model_file, "--chat-template", stuck)
    url = base_url(process)
    assert process.stdout is not None
    assert "no API key" in process.stdout.readline()
    process.stdout.close()  # before it is ready
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        stuck.write_text("{{ messages[0].content }}")
        progress = client.get("/v1/loading/progress").text
        assert progress.index('"warm-up","done":0') > progress.index('"weights"')
        assert progress.endswith('data: {"stage":"ready"}\n\ndata: [DONE]\n\n')
        assert client.get("/health").json()["status"] == "healthy"
        reply = client.post("/v1/jobs", json={"prompt": "#", "max_tokens": 2, "stream": False})
        assert reply.json()["tokens_out"] == 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0


def test_unread_stderr_does_not_block_worker(spawn: Spawn, model_file: Path) -> None:
    """A pipe holds 64 KiB; past that a write would block."""
    process = spawn("-m", model_file)
    url = base_url(process)
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        for _ in range(600):
            assert client.get(f"/{'x' * 190}").status_code == 404
        assert client.get("/openapi.json").status_code == 200
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert len(said) > 1 << 16
    assert "Traceback" not in said
