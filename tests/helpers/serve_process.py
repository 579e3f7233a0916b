"""`serve` as a process: its address, its engine's process, what it answers, and what is left of it at its end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from tests.conftest import DEVICE
from tests.helpers.process import is_alive, spawn

LIMIT_S = 60
MARK = "LLM_WORKER_TEST_MARK"  # inherited by every process that a worker starts
_numbers = count()


class ServeProcess:
    """A worker and its engine, once the port is known."""

    def __init__(self, *args: str | Path, stderr: int = subprocess.PIPE, **environment: str) -> None:
        line = [sys.executable, "-m", "llm_worker_rbee", "serve", "--port", "0", "--device", DEVICE, *map(str, args)]
        self.mark = f"{os.getpid()}-{next(_numbers)}"
        env = {**os.environ, "LLORCH_LOG_FORMAT": "json", MARK: self.mark, **environment}
        self.process = spawn(line, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env)
        assert self.process.stdout is not None
        found = re.search(r"http://[^ ,]+", self.process.stdout.readline())
        assert found is not None, self.process.communicate(timeout=LIMIT_S)
        self.url = found[0]
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.Client(base_url=self.url, timeout=LIMIT_S, limits=limits)

    def ready(self) -> ServeProcess:
        assert self.http.get("/v1/loading/progress").text.endswith('{"stage":"ready"}\n\ndata: [DONE]\n\n')
        return self

    def engine(self) -> int:
        """Return the process id of the engine."""
        found = self.engines()
        assert len(found) == 1, found
        return found[0]

    def engines(self) -> list[int]:
        """Return the process ids of all engines."""
        return [pid for pid in children(self.process.pid) if "token_engine.child" in command(pid)]

    def complete(self, seed: int, max_tokens: int = 300, **fields: Any) -> Any:
        body = {"prompt": "?", "temperature": 1.0, "seed": seed, "max_tokens": max_tokens, **fields}
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"]

    def metric(self, name: str) -> float:
        """Return the value of a metric without labels; its prefix is left out."""
        found = re.search(rf"^llm_worker_{name} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def processes(self) -> list[int]:
        """Return the processes of this worker that are there: itself, and whatever it started."""
        return marked_processes(self.mark)

    def close(self) -> None:
        """Kill it, unless it has ended."""
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def marked_processes(mark: str) -> list[int]:
    """Return the processes that have this mark in their environment."""
    entry = f"{MARK}={mark}".encode()
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if is_alive(pid) and entry in _environment(pid)]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def until(holds: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Wait until the condition holds; fail after `limit_s`."""
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.005)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
