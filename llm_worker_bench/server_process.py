"""A server under load, seen from outside: started for the length of a block, its health, CPU time and memory.

`ServerProcess` starts a server, waits until it is healthy and always ends it with SIGTERM. `ServerMonitor` observes a
server, started by us or not; what the system does not tell of a process is left out. Nothing of the server is imported:
what is measured is what an orchestrator would start. As a program this module makes the health checks: inside the load
generator a reply would wait for the generator.
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
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import IO
from urllib.parse import urlsplit

import numpy as np

from llm_worker_rbee.errors import WorkerError

from .http_client import BlockingClient, Client, RequestFailedError
from .processes import ChildProcess, cpu_seconds, describe_exit, last_lines, memory_of, package_environment
from .results import Result

URL = re.compile(rb"https?://[^\s,]+")
API_KEY_VARIABLES = ("LLM_WORKER_API_KEY", "LLORCH_API_TOKEN")  # where the server finds its key
HEALTH_POLL_S = 0.01
HEALTH_INTERVAL_S = 0.1
HEALTH_REPLY_S = 30.0
SHUTDOWN_S = 45.0  # the server itself drains for 30 s
MAX_ERROR_LINES = 8
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


@dataclass(eq=False)
class ServerProcess:
    """Run a server as a child process for the length of a block: on entry it is healthy, and `url` is known.

    Without a `url` the server prints it. `error` is raised if the server fails, with the last lines that it printed.
    """

    name: str
    command: Sequence[str]
    timeout_s: float
    url: str = ""
    env: Mapping[str, str] | None = None
    shutdown_s: float = SHUTDOWN_S
    max_error_lines: int = MAX_ERROR_LINES
    error: type[WorkerError] = ServingError
    start_s: float = 0.0  # from starting the process to the first healthy reply

    def __enter__(self) -> ServerProcess:
        started = time.monotonic()
        self._output: IO[bytes] = tempfile.TemporaryFile()
        stdout = self._output if self.url else subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=self._output,
                env=self.env,
                start_new_session=True,  # Ctrl-C ends the benchmark; SIGTERM ends the server
            )
        except OSError as error:
            self._output.close()
            raise self.error(f"{self.name} cannot be started: {error.strerror}") from None
        try:
            self._wait_until_healthy(started + self.timeout_s)
        except BaseException:
            self.__exit__()
            raise
        self.start_s = time.monotonic() - started
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(self.shutdown_s)
        except BaseException as error:  # it does not end, or Ctrl-C
            self._process.kill()
            self._process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise self.error(f"{self.name} did not end within {self.shutdown_s:g} s of SIGTERM") from None
        finally:
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._output.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def require_alive(self) -> None:
        """Raise with the last lines that it printed if the server has ended."""
        status = self._process.poll()
        if status is not None:
            raise self.error(describe_exit(self.name, status, self._printed(), self.max_error_lines))

    def _wait_until_healthy(self, deadline: float) -> None:
        self.url = self.url or self._read_url(deadline)
        client = BlockingClient(urlsplit(self.url).netloc, min(10.0, self.timeout_s))
        while not client.is_healthy():
            self.require_alive()
            if time.monotonic() > deadline:
                raise self._late("was not ready")
            time.sleep(HEALTH_POLL_S)
        client.close()

    def _read_url(self, deadline: float) -> str:
        assert self._process.stdout is not None
        source, output = self._process.stdout.fileno(), b""
        while not (match := URL.search(output)) or b"\n" not in output[match.end() :]:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([source], [], [], remaining)[0]:
                raise self._late("printed no URL")
            part = os.read(source, 1 << 12)
            if not part:
                self._process.wait(self.shutdown_s)
                self.require_alive()
            output += part
        return match[0].decode()

    def _late(self, what: str) -> WorkerError:
        lines = last_lines(self._printed(), self.max_error_lines)
        return self.error(f"{self.name} {what} within {self.timeout_s:g} s{lines}")

    def _printed(self) -> bytes:
        self._output.seek(0)
        return self._output.read()


def worker_server(args: Sequence[str] = (), api_key: str | None = None, timeout_s: float = 600.0) -> ServerProcess:
    """Return `serve` as a process, on a free port and with this API key or none."""
    command = [sys.executable, "-m", "llm_worker_rbee", "serve", "--port", "0", *args]
    env = {name: value for name, value in package_environment().items() if name not in API_KEY_VARIABLES}
    env |= {} if api_key is None else {API_KEY_VARIABLES[0]: api_key}
    return ServerProcess("the server", command, timeout_s, env=env)


@dataclass(slots=True)
class ServerMonitor:
    """Check the health of a server for the length of a block; of that, `observe` is what counts.

    `pid` is given if it is a known process of this machine.
    """

    authority: str
    pid: int | None = None
    results: list[Result] = field(default_factory=list)
    _health_child: ChildProcess = field(init=False)

    def __enter__(self) -> ServerMonitor:
        command = [sys.executable, "-m", __name__, self.authority]
        self._health_child = ChildProcess("the health check", command, package_environment(), HEALTH_REPLY_S)
        self._health_child.start("ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._health_child.close()

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Add the server's resources and health during the block to `results`."""
        began, used_before = time.monotonic(), None if self.pid is None else cpu_seconds(self.pid)
        try:
            yield
        finally:
            ended = time.monotonic()
            if self.pid is not None:
                used, peak = cpu_seconds(self.pid), memory_of(self.pid).get("VmHWM")
                if used is not None and used_before is not None:
                    spent = used - used_before
                    share = spent / max(ended - began, 1e-9)
                    self.results.append(Result.exact("server_processor", "s", spent, of_a_core=share))
                if peak is not None:
                    self.results.append(Result.exact("server_peak_memory", "B", peak))
            self.results += self._collect_health(began, ended)

    def _collect_health(self, began: float, ended: float) -> Iterator[Result]:
        answer = self._health_child.request({}, "seen")
        seconds = np.array([took for moment, took in answer["seen"] if began <= moment <= ended])
        if seconds.size:
            for name, quantile in (("median", 0.5), ("p99", 0.99), ("max", 1.0)):
                value = float(np.quantile(seconds, quantile))
                yield Result.exact(f"health/{name}", "s", value, count=seconds.size)
        yield Result.exact("health/failed", "requests", answer["failed"])


def probe_health(authority: str) -> None:
    """Request /health ten times a second until a line comes; print (monotonic time, seconds) of each healthy reply."""
    client = BlockingClient(authority)
    seen: list[tuple[float, float]] = []
    failed = 0
    print(json.dumps({"ready": True}), flush=True)
    while not select.select([sys.stdin], [], [], HEALTH_INTERVAL_S)[0]:
        start = time.monotonic()
        if client.is_healthy():
            seen.append((start, time.monotonic() - start))
        else:
            failed += 1
    print(json.dumps({"seen": seen, "failed": failed}), flush=True)


async def read_metrics(client: Client) -> list[Result]:
    """Return the server's own figures from /metrics, if it has any."""
    root = Client(replace(client.address, base=""), client.headers)
    metrics: Mapping[str, float] = {}
    with suppress(RequestFailedError), closing(root):
        async with root.request("GET", "/metrics") as response:
            text = await response.text(MAX_METRICS_BYTES)
            metrics = parse_metrics(text) if response.status == 200 else {}
    return [Result.exact(*METRIC_RESULTS[name], metrics[name]) for name in METRIC_RESULTS if name in metrics]


def parse_metrics(text: str) -> Mapping[str, float]:
    """Parse Prometheus samples without labels, by name without our prefix."""
    return {match[1]: float(match[2]) for line in text.splitlines() if (match := METRIC_SAMPLE.fullmatch(line))}


if __name__ == "__main__":
    probe_health(sys.argv[1])
