"""A server looked at from outside while it is under load: its health, and the time and memory of its process.

Health is asked for by a process of its own (health_child.py). What the system does not tell of a process is left out;
the server's own figures are read once afterwards.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ..results import Result
from .http_client import Client, RequestFailedError
from .spawn import memory_of, processor_seconds

CHILD = Path(__file__).with_name("health_child.py")
END_S = 30
LONGEST_METRICS = 4 << 20
SAMPLE = re.compile(r"(?:llm_worker_)?([a-z0-9_]+) ([0-9.eE+-]+)")
# Their names with the server -> what they are called here, and their unit.
TOLD = {
    "e2e_request_latency_seconds_count": ("server/requests", "requests"),
    "num_requests_running": ("server/running", "requests"),
    "kv_cache_usage_perc": ("server/kv_cache_in_use", "of 1"),
    "num_preemptions_total": ("server/preemptions", "requests"),
}


@dataclass(slots=True)
class Watch:
    """One server; `pid` where it is a process of this machine that we know."""

    host: str
    pid: int | None = None
    _asking: subprocess.Popen[bytes] | None = None
    _began: float = 0.0
    _used: float | None = None
    _figures: list[Result] = field(default_factory=list)

    def open(self) -> None:
        """Begin to ask; what is seen counts from `begin` on."""
        command = [sys.executable, str(CHILD), self.host]
        self._asking = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._asking.stdout is not None
        self._asking.stdout.readline()  # it is there

    def begin(self) -> None:
        """The load begins."""
        self._began = time.monotonic()
        self._used = None if self.pid is None else processor_seconds(self.pid)

    def end(self) -> None:
        """The load has ended."""
        ended = time.monotonic()
        if self.pid is not None:
            used = processor_seconds(self.pid)
            if used is not None and self._used is not None:
                spent = used - self._used
                share = spent / max(ended - self._began, 1e-9)
                self._figures.append(Result.exact("server_processor", "s", spent, of_a_core=share))
            most = memory_of(self.pid).get("VmHWM")
            if most is not None:
                self._figures.append(Result.exact("server_peak_memory", "B", most))
        self._figures += self._health(self._began, ended)

    def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.kill()
            self._asking.communicate()
            self._asking = None

    def results(self) -> list[Result]:
        """What was seen between `begin` and `end`."""
        return list(self._figures)

    def _health(self, began: float, ended: float) -> Iterator[Result]:
        if self._asking is None:
            return
        told, _ = self._asking.communicate(timeout=END_S)
        self._asking = None
        found = json.loads(told)
        seconds = np.array([took for moment, took in found["seen"] if began <= moment <= ended])
        if seconds.size:
            for name, part in (("median", 0.5), ("p99", 0.99), ("max", 1.0)):
                value = float(np.quantile(seconds, part))
                yield Result.exact(f"health/{name}", "s", value, count=seconds.size)
        yield Result.exact("health/failed", "requests", found["failed"])


async def told_by(client: Client) -> list[Result]:
    """The server's own figures, where it has such."""
    root = Client(replace(client.address, base=""), client.headers)
    try:
        async with root.request("GET", "/metrics") as response:
            text = await response.text(LONGEST_METRICS)
            found = samples(text) if response.status == 200 else {}
    except RequestFailedError:
        found = {}
    finally:
        root.close()
    return [Result.exact(*TOLD[name], found[name]) for name in TOLD if name in found]


def samples(text: str) -> Mapping[str, float]:
    """Figures without labels of Prometheus's text, by name without our prefix."""
    return {found[1]: float(found[2]) for line in text.splitlines() if (found := SAMPLE.fullmatch(line))}
