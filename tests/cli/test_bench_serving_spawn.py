"""`bench serving --spawn`: a server of ours for the time of the load, and what is seen of it from outside."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee.bench.processes import cpu_seconds, memory_of
from llm_worker_rbee.bench.server_process import (
    ServerMonitor,
    ServingError,
    parse_metrics,
    worker_server,
)

from .conftest import Run

SMALL = ("-n", "6", "-c", "2", "--input-len", "3", "--output-len", "5", "--json")


def by_name(stdout: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    run = json.loads(stdout)
    return run, {result["name"]: result for result in run["results"]}


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_spawn_server_is_started_measured_and_ended(cli: Run, tiny: Path) -> None:
    served = ("-m", tiny, "--serve-args", "--served-model-name 'mine' --kv-memory 8M", "--api-key", "secret")
    done = cli("bench", "serving", "--spawn", *served, *SMALL)
    assert done.returncode == 0, done.stderr
    run, found = by_name(done.stdout)
    assert run["model"] == {"name": "mine"}
    assert found["completed"]["estimate"] == 6
    assert found["server/requests"]["estimate"] == 7  # with the one that warms up
    assert (found["server/running"]["estimate"], found["server/kv_cache_in_use"]["estimate"]) == (0, 0)
    assert found["event_throughput"]["estimate"] > 0
    assert found["health/failed"]["estimate"] == 0
    assert found["client_processor"]["of_a_core"] > 0
    if Path("/proc/self/stat").exists():
        assert found["server_peak_memory"]["estimate"] > 1 << 20
        assert found["server_processor"]["estimate"] >= 0
    assert b"secret" not in done.stdout + done.stderr


def test_spawn_null_engine_prints_a_table(cli: Run, tiny: Path) -> None:
    done = cli("bench", "serving", "--spawn", "--engine", "null", "-m", tiny, *SMALL[:-1])
    assert done.returncode == 0, done.stderr
    for title in ("output tokens", "client's processor time", "requests, as it counts", "KV cache still in use"):
        assert title in done.stdout.decode()


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["--spawn", "-m", "/no/such.gguf"], 1, "exit status 1: error: no such file or folder: '/no/such.gguf'"),
        (["--spawn", "--serve-args", "--unheard-of"], 1, "No such option: --unheard-of"),
        (["--spawn", "http://localhost:1"], 2, "not both"),
        (["--spawn", "--serve-args", "'"], 2, "--serve-args cannot be parsed"),
        (["http://localhost:1", "--engine", "null"], 2, "go with --spawn"),
        ([], 2, "give the URL of a server, or --spawn"),
    ],
)
def test_spawn_invalid_options_fail(cli: Run, args: list[str], status: int, message: str) -> None:
    done = cli("bench", "serving", *args)
    assert (done.returncode, done.stdout) == (status, b"")
    assert message in " ".join(done.stderr.decode().split())


def test_server_process_ends_with_its_block(tiny: Path) -> None:
    with suppress(ZeroDivisionError), worker_server(["-m", str(tiny)]) as server:
        pid = server.pid
        assert is_there(pid)
        assert memory_of(pid) == {} or 0 < memory_of(pid)["VmRSS"] <= memory_of(pid)["VmHWM"]
        assert cpu_seconds(pid) is None or cpu_seconds(pid)
        raise ZeroDivisionError
    assert not is_there(pid)
    with worker_server(["-m", str(tiny)]) as server:
        os.kill(server.pid, signal.SIGKILL)
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ServingError, match="was ended by SIGKILL"):
            server.require_alive()


class Watched:
    """A server that counts, and is ill every third time."""

    def __init__(self) -> None:
        self.requests = 0
        self.often = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.requests += 1
                self.send_response(503 if outer.requests % 3 == 0 else 200)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")
                if outer.requests >= 7:
                    outer.often.set()

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_server_monitor_counts_health_checks(watched: Watched) -> None:
    watch = ServerMonitor(f"127.0.0.1:{watched.server.server_port}", os.getpid())
    watch.begin()
    watch.open()
    try:
        assert watched.often.wait(60)
        watch.end()
    finally:
        watch.close()
    found = {result.name: result for result in watch.results}
    assert found["health/failed"].estimate == watched.requests // 3
    assert found["health/p99"].fields["count"] == watched.requests - watched.requests // 3
    assert 0 < found["health/median"].estimate <= found["health/p99"].estimate <= found["health/max"].estimate


def test_parse_metrics_without_labels() -> None:
    text = '# HELP x\nllm_worker_num_preemptions_total 3.0\nother{a="b"} 4\nplain 1e+06\n\nllm_worker_up NaN\n'
    assert parse_metrics(text) == {"num_preemptions_total": 3.0, "plain": 1e6}
