"""Our own server as a process of its own: begun, waited for until it is healthy, and ended with SIGTERM in every case.

It is told to take a free port and its first line says which. What it says on standard error is kept in a file, and
shown where it fails. Nothing of the server is imported here: what is measured is what an orchestrator would start.
"""

from __future__ import annotations

import http.client
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
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import numpy as np

from ...errors import WorkerError
from ..http_client import Client, RequestFailedError
from ..results import Result

URL = re.compile(rb"https?://[^\s,]+")
KEYS = ("LLM_WORKER_API_KEY", "LLORCH_API_TOKEN")  # what the server would take for its key
PAUSE_S = 0.05
END_S = 45.0  # it lets running requests finish for 30 s by itself
SHOWN_LINES = 8


class ServingError(WorkerError):
    """The server cannot be measured: not begun, not reached, or it refuses what is asked."""

    code = "SERVER_UNAVAILABLE"
    status = 503


class Spawned:
    """A server of ours; `url` is where it is reached once it has been entered."""

    def __init__(self, args: Sequence[str] = (), api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self._command = [sys.executable, "-m", "llm_worker_rbee", "serve", "--port", "0", *args]
        self._env = environment(api_key)
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Spawned:
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors, env=self._env,
                start_new_session=True,  # Ctrl-C is for us, and SIGTERM for it
            )  # fmt: skip
            end = time.monotonic() + self._timeout_s
            self.url = self._told(end)
            while not self._is_healthy():
                self.require_alive()
                if time.monotonic() > end:
                    raise ServingError(f"the server was not healthy within {self._timeout_s:g} s{self._last_words()}")
                time.sleep(PAUSE_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(END_S)
            except BaseException:  # it does not end, or somebody is out of patience
                process.kill()
                process.wait()
                raise
            finally:
                assert process.stdout is not None
                process.stdout.close()
                self._errors.close()

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None
        return self._process.pid

    def require_alive(self) -> None:
        """One that has ended by itself is an error that shows its last words."""
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            how = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
            raise ServingError(f"the server {how}{self._last_words()}")

    def _told(self, end: float) -> str:
        """The address in its first lines."""
        assert self._process is not None
        assert self._process.stdout is not None
        source, said = self._process.stdout.fileno(), b""
        while not (found := URL.search(said)) or b"\n" not in said[found.end() :]:
            left = end - time.monotonic()
            if left <= 0 or not select.select([source], [], [], left)[0]:
                raise ServingError(f"the server told no address within {self._timeout_s:g} s{self._last_words()}")
            part = os.read(source, 1 << 12)
            if not part:
                self._process.wait(END_S)
                self.require_alive()
            said += part
        return found[0].decode()

    def _is_healthy(self) -> bool:
        host = urlsplit(self.url).netloc
        link = http.client.HTTPConnection(host, timeout=10)
        try:
            link.request("GET", "/health")
            return link.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            link.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()[-SHOWN_LINES:]
        return f": {' | '.join(line.strip()[:300] for line in lines)}" if lines else ""


def environment(api_key: str | None) -> dict[str, str]:
    """Ours, with this key or none, and with this package first of all."""
    kept = {name: value for name, value in os.environ.items() if name not in KEYS}
    here = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (here, kept.get("PYTHONPATH"))))
    return kept | {"PYTHONPATH": path} | ({} if api_key is None else {KEYS[0]: api_key})


def processor_seconds(pid: int) -> float | None:
    """What all threads of a process have used; None where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def memory_of(pid: int) -> Mapping[str, int]:
    """Bytes in memory now (`VmRSS`) and at most (`VmHWM`); empty where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines if line.startswith(("VmRSS:", "VmHWM:")))
    return {name.rstrip(":"): int(count) * 1024 for name, count, *_ in pairs}


CHILD = Path(__file__).with_name("health_child.py")
HEALTH_END_S = 30
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
        told, _ = self._asking.communicate(timeout=HEALTH_END_S)
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
