"""The server under load, seen from outside: started by us with `--spawn`, its health, CPU time and memory.

`ServerProcess` starts `serve` on a free port, which its first line names, waits until it is healthy and always ends it
with SIGTERM. `ServerMonitor` observes a server, started by us or not; what the system does not tell of a process is
left out. Nothing of the server is imported: what is measured is what an orchestrator would start.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO
from urllib.parse import urlsplit

import numpy as np

from ...errors import WorkerError
from .. import processes
from ..http_client import BlockingClient, Client, RequestFailedError
from ..processes import package_environment
from ..results import Result

URL = re.compile(rb"https?://[^\s,]+")
API_KEY_VARIABLES = ("LLM_WORKER_API_KEY", "LLORCH_API_TOKEN")  # where the server finds its key
HEALTH_POLL_S = 0.05
SHUTDOWN_S = 45.0  # the server itself drains for 30 s
MAX_ERROR_LINES = 8
HEALTH_CHILD_END_S = 30
MAX_METRICS_BYTES = 4 << 20
METRIC_SAMPLE = re.compile(r"(?:llm_worker_)?([a-z0-9_]+) ([0-9.eE+-]+)")
# metric of the server -> result name and unit
METRIC_RESULTS = {
    "e2e_request_latency_seconds_count": ("server/requests", "requests"),
    "num_requests_running": ("server/running", "requests"),
    "kv_cache_usage_perc": ("server/kv_cache_in_use", "of 1"),
    "num_preemptions_total": ("server/preemptions", "requests"),
}


class ServingError(WorkerError):
    """The server cannot be measured: it does not start, is not reached, or rejects the requests."""

    code = "SERVER_UNAVAILABLE"
    status = 503


class ServerProcess:
    """Run `serve` as a child process for the length of a block; `url` is set on entry."""

    def __init__(self, args: Sequence[str] = (), api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self._command = [sys.executable, "-m", "llm_worker_rbee", "serve", "--port", "0", *args]
        self._env = server_environment(api_key)
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> ServerProcess:
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors, env=self._env,
                start_new_session=True,  # Ctrl-C ends the benchmark; SIGTERM ends the server
            )  # fmt: skip
            deadline = time.monotonic() + self._timeout_s
            self.url = self._read_url(deadline)
            client = BlockingClient(urlsplit(self.url).netloc)
            while not client.is_healthy():
                self.require_alive()
                if time.monotonic() > deadline:
                    raise ServingError(f"the server was not healthy within {self._timeout_s:g} s{self._last_lines()}")
                time.sleep(HEALTH_POLL_S)
            client.close()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(SHUTDOWN_S)
            except BaseException:  # it does not end, or Ctrl-C
                process.kill()
                process.wait()
                raise
            finally:
                assert process.stdout is not None
                process.stdout.close()
                self._errors.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def require_alive(self) -> None:
        """Raise with the last lines of standard error if the server has ended."""
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            how = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
            raise ServingError(f"the server {how}{self._last_lines()}")

    def _read_url(self, deadline: float) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        source, output = self._process.stdout.fileno(), b""
        while not (found := URL.search(output)) or b"\n" not in output[found.end() :]:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([source], [], [], remaining)[0]:
                raise ServingError(f"the server printed no URL within {self._timeout_s:g} s{self._last_lines()}")
            part = os.read(source, 1 << 12)
            if not part:
                self._process.wait(SHUTDOWN_S)
                self.require_alive()
            output += part
        return found[0].decode()

    def _last_lines(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()[-MAX_ERROR_LINES:]
        return f": {' | '.join(line.strip()[:300] for line in lines)}" if lines else ""


def server_environment(api_key: str | None) -> dict[str, str]:
    """Return this process's environment with this API key or none."""
    kept = {name: value for name, value in package_environment().items() if name not in API_KEY_VARIABLES}
    return kept if api_key is None else kept | {API_KEY_VARIABLES[0]: api_key}


@dataclass(slots=True)
class ServerMonitor:
    """Observe one server; `pid` if it is a known process of this machine."""

    authority: str
    pid: int | None = None
    _health_child: subprocess.Popen[bytes] | None = None
    _began: float = 0.0
    _cpu_seconds: float | None = None
    _results: list[Result] = field(default_factory=list)

    def open(self) -> None:
        """Start the health checks; they count from `begin` on."""
        command = [sys.executable, "-m", f"{__package__}.health_child", self.authority]
        self._health_child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=package_environment(), start_new_session=True
        )
        assert self._health_child.stdout is not None
        self._health_child.stdout.readline()  # it is ready

    def begin(self) -> None:
        """Mark the start of the load."""
        self._began = time.monotonic()
        self._cpu_seconds = None if self.pid is None else processes.cpu_seconds(self.pid)

    def end(self) -> None:
        """Mark the end of the load."""
        ended = time.monotonic()
        if self.pid is not None:
            used = processes.cpu_seconds(self.pid)
            if used is not None and self._cpu_seconds is not None:
                spent = used - self._cpu_seconds
                share = spent / max(ended - self._began, 1e-9)
                self._results.append(Result.exact("server_processor", "s", spent, of_a_core=share))
            peak = processes.memory_of(self.pid).get("VmHWM")
            if peak is not None:
                self._results.append(Result.exact("server_peak_memory", "B", peak))
        self._results += self._collect_health(self._began, ended)

    def close(self) -> None:
        """Stop the health checks."""
        if self._health_child is not None:
            self._health_child.kill()
            self._health_child.communicate()
            self._health_child = None

    def results(self) -> list[Result]:
        """Return what was observed between `begin` and `end`."""
        return list(self._results)

    def _collect_health(self, began: float, ended: float) -> Iterator[Result]:
        if self._health_child is None:
            return
        output, _ = self._health_child.communicate(timeout=HEALTH_CHILD_END_S)
        self._health_child = None
        found = json.loads(output)
        seconds = np.array([took for moment, took in found["seen"] if began <= moment <= ended])
        if seconds.size:
            for name, quantile in (("median", 0.5), ("p99", 0.99), ("max", 1.0)):
                value = float(np.quantile(seconds, quantile))
                yield Result.exact(f"health/{name}", "s", value, count=seconds.size)
        yield Result.exact("health/failed", "requests", found["failed"])


async def read_metrics(client: Client) -> list[Result]:
    """Return the server's own figures from /metrics, if it has any."""
    root = Client(replace(client.address, base=""), client.headers)
    try:
        async with root.request("GET", "/metrics") as response:
            text = await response.text(MAX_METRICS_BYTES)
            found = parse_metrics(text) if response.status == 200 else {}
    except RequestFailedError:
        found = {}
    finally:
        root.close()
    return [Result.exact(*METRIC_RESULTS[name], found[name]) for name in METRIC_RESULTS if name in found]


def parse_metrics(text: str) -> Mapping[str, float]:
    """Parse Prometheus samples without labels, by name without our prefix."""
    return {found[1]: float(found[2]) for line in text.splitlines() if (found := METRIC_SAMPLE.fullmatch(line))}
