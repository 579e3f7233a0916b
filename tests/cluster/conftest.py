"""A local Ray cluster and applications in it. `make test-extra` runs these tests; the usual run has no Ray and leaves
the folder out (`norecursedirs`)."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve

from llm_worker_rbee import LLM
from llm_worker_rbee.cluster import app, reports
from llm_worker_rbee.cluster.reports import EngineReport
from llm_worker_rbee.weights.hub import locate_model

from .streams import bodies, expected

LIMIT_S = 120
NAME = "llm"
OPTIONS = {"threads": 1, "kv_memory": "128M", "device": "cpu", "keyless": True}


def until(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Wait until a condition holds, and return its value."""
    end = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return value


@pytest.fixture(scope="session")
def model() -> Path:
    return locate_model(None)


@pytest.fixture(scope="session")
def llm(model: Path) -> LLM:
    """The same model in this process: what every answer is compared with."""
    return LLM(model, device="cpu", threads=1, kv_memory=64 << 20)


@pytest.fixture(scope="session")
def texts(llm: LLM) -> list[str]:
    """What the streams of `streams.bodies` must say."""
    return expected(llm, bodies())


@pytest.fixture(scope="session")
def ray_url(llm: LLM) -> Iterator[str]:
    """Start Ray and its proxy; return the URL. Kernels are compiled before (`llm`)."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    os.environ["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "1"
    ray.init("local", num_cpus=8, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


class Cluster:
    """An application in the cluster."""

    def __init__(self, url: str, model: Path, **arguments: Any) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=LIMIT_S)
        self.arguments = {"model": str(model), **OPTIONS, **arguments}

    def deploy(self, **changes: Any) -> None:
        """Deploy it with changed arguments, and wait until all its replicas run."""
        self.arguments |= changes
        serve.run(app(self.arguments), name=NAME, blocking=False)
        self.handle = serve.get_deployment_handle("Engine", NAME)
        self.handle.describe.remote().result()  # from now on this process gets the reports of replicas
        self.until_healthy(int(self.arguments["engines"]))

    def until_healthy(self, num_engines: int) -> None:
        until(lambda: self.health()["status"] == "healthy" and len(self.reports()) == self.num_running() == num_engines)

    def delete(self) -> None:
        self.http.close()
        serve.delete(NAME)

    def health(self) -> dict[str, Any]:
        return dict(self.http.get("/health").json())

    def reports(self) -> dict[str, EngineReport]:
        """Return the last reports of the engines."""
        return reports.latest

    def num_running(self) -> int:
        """Return how many replicas of the engine run."""
        deployment = serve.status().applications[NAME].deployments["Engine"]
        return deployment.replica_states.get("RUNNING", 0)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        reply = self.http.post("/v1/completions", json={"prompt": prompt, "temperature": 0, **fields})
        assert reply.status_code == 200, reply.text
        return dict(reply.json())


@pytest.fixture(scope="module")
def cluster(ray_url: str, model: Path) -> Iterator[Cluster]:
    """Two engines and a front."""
    made = Cluster(ray_url, model, engines=2)
    made.deploy()
    yield made
    made.delete()


def actor_ids() -> list[int]:
    """Return the process ids of the actors of `Engine`."""
    return [pid for pid, command in _processes() if command.startswith(f"ray::ServeReplica:{NAME}:Engine")]


def child_ids() -> list[int]:
    """Return those of their child processes."""
    parents = set(actor_ids())
    found = [pid for pid, command in _processes() if "llm_worker_rbee.token_engine.child" in command]
    return [pid for pid in found if _parent(pid) in parents]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _processes() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has ended
                continue


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
