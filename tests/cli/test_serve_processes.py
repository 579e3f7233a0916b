"""`serve` as two processes: what the front imports, an engine that is killed under load, ends that leave no orphan."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import DEVICE, ON_CPU, with_kernels
from tests.helpers.process import is_alive, spawn
from tests.helpers.server import write_model

LIMIT_S = 60
Serve = Callable[..., "Running"]


class Running:
    """A `serve` process and its engine's."""

    def __init__(self, *args: str | Path) -> None:
        line = [sys.executable, "-m", "llm_worker_rbee", "serve", "--port", "0", "--device", DEVICE, *map(str, args)]
        env = {**os.environ, "LLORCH_LOG_FORMAT": "json"}
        self.process = spawn(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        found = re.search(r"http://[^ ,]+", self.process.stdout.readline())
        assert found is not None, self.process.communicate(timeout=LIMIT_S)
        self.http = httpx.Client(base_url=found[0], timeout=LIMIT_S)

    def ready(self) -> Running:
        assert self.http.get("/v1/loading/progress").text.endswith('{"stage":"ready"}\n\ndata: [DONE]\n\n')
        return self

    def engine(self) -> int:
        """Return the process id of the engine."""
        found = [pid for pid in children(self.process.pid) if "token_engine.child" in command(pid)]
        assert len(found) == 1, found
        return found[0]

    def complete(self, seed: int, max_tokens: int = 300, **fields: Any) -> Any:
        body = {"prompt": "?", "temperature": 1.0, "seed": seed, "max_tokens": max_tokens, **fields}
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def until(holds: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that goes on with random digits after `?`."""
    return with_kernels(write_model(tmp_path_factory.mktemp("digits") / "digits.gguf"))


@pytest.fixture
def serve(digits: Path) -> Iterator[Serve]:
    started: list[Running] = []

    def start(*args: str) -> Running:
        started.append(Running("-m", digits, "--kv-memory", "16M", *args))
        return started[-1]

    yield start
    for running in started:
        running.http.close()
        if running.process.poll() is None:
            running.process.kill()
        running.process.communicate()


@ON_CPU
def test_front_loads_neither_kernels_nor_weights(serve: Serve) -> None:
    running = serve().ready()
    engine = running.engine()
    front_maps = Path(f"/proc/{running.process.pid}/maps").read_text()
    assert "llvmlite" not in front_maps
    assert "torch" not in front_maps
    assert "llvmlite" in Path(f"/proc/{engine}/maps").read_text()


def test_engine_killed_under_16_streams_fails_none(serve: Serve) -> None:
    """Each stream has the text, stop string included, that it has alone; deaths are narrated, counted and logged."""
    running = serve("--engine-restarts", "100").ready()
    bodies = [{"seed": seed, "stop": ["999"] if seed % 2 else None, "n": 1 + (seed == 3)} for seed in range(16)]
    expected = [running.complete(**body) for body in bodies]
    job = running.http.post("/v1/jobs", json={"prompt": "?", "max_tokens": 60_000}).json()["job_id"]
    with ThreadPoolExecutor(16) as pool:
        for times in range(1, 4):
            found = [pool.submit(running.complete, **body) for body in bodies]
            os.kill(running.engine(), signal.SIGKILL)
            assert [task.result() for task in found] == expected
            metrics = running.http.get("/metrics").text
            assert f"llm_worker_engine_restarts_total {times}.0" in metrics.splitlines()
    running.http.delete(f"/v1/jobs/{job}")
    actions = re.findall(r'"action":"(\w+)"', running.http.get(f"/v1/jobs/{job}/stream").text)
    assert actions[:2] == ["queued", "reading"]
    assert actions.count("restarted") == 3
    assert running.http.get("/health").json()["status"] == "healthy"
    running.process.send_signal(signal.SIGTERM)
    _, said = running.process.communicate(timeout=LIMIT_S)
    messages = [json.loads(line)["message"] for line in said.splitlines()]
    assert sum("the engine was killed by SIGKILL: restart in" in message for message in messages) == 3
    assert running.process.returncode == 0


def test_health_while_engine_restarts_is_loading(serve: Serve) -> None:
    running = serve().ready()
    os.kill(running.engine(), signal.SIGKILL)
    until(lambda: running.http.get("/health").json()["status"] == "loading")
    assert running.complete(1, 3)  # it waits, and is answered
    until(lambda: running.http.get("/health").status_code == 200)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("is_ready", [False, True])
def test_front_that_ends_takes_its_engine_along(serve: Serve, number: signal.Signals, is_ready: bool) -> None:
    running = serve()
    if is_ready:
        running.ready()
    engine = running.engine()
    running.process.send_signal(number)
    running.process.wait(LIMIT_S)
    until(lambda: not is_alive(engine), 2.0)
    assert running.process.returncode == (-number if number == signal.SIGKILL else 0)


def test_signal_to_both_processes_drains(serve: Serve) -> None:
    """As a service manager does at a stop: the running request is answered, and no engine is restarted."""
    running = serve().ready()
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(running.complete, 1, 3000)
        until(lambda: "num_requests_running 1.0" in running.http.get("/metrics").text)
        for pid in (running.engine(), running.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert len(reply.result()[0]["text"]) == 3000
    _, said = running.process.communicate(timeout=LIMIT_S)
    assert (running.process.returncode, "restart" in said) == (0, False)


def test_engine_process_off_has_no_child(serve: Serve) -> None:
    running = serve("--engine-process", "off").ready()
    assert not any("token_engine.child" in command(pid) for pid in children(running.process.pid))
    assert running.complete(1, 5)


def test_engine_process_wrong_value_is_a_usage_error(digits: Path) -> None:
    line = [sys.executable, "-m", "llm_worker_rbee", "serve", "-m", str(digits), "--engine-process", "maybe"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, "use on or off" in done.stderr) == (2, True)
