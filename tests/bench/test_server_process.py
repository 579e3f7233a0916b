"""A server in a process of its own, and what is seen of it from outside: health, CPU time, memory, metrics."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llm_worker_bench.processes import cpu_seconds, memory_of
from llm_worker_bench.server_process import ServerMonitor, ServingError, parse_metrics, worker_server


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_server_process_ends_with_its_block(tiny_file: Path) -> None:
    with suppress(ZeroDivisionError), worker_server(["-m", str(tiny_file)]) as server:
        pid = server.pid
        assert is_there(pid)
        assert memory_of(pid) == {} or 0 < memory_of(pid)["VmRSS"] <= memory_of(pid)["VmHWM"]
        assert cpu_seconds(pid) is None or cpu_seconds(pid)
        raise ZeroDivisionError
    assert not is_there(pid)
    with worker_server(["-m", str(tiny_file)]) as server:
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
    monitor = ServerMonitor(f"127.0.0.1:{watched.server.server_port}", os.getpid())
    with monitor, monitor.observe():
        early = watched.requests
        assert watched.often.wait(60)
    found = {result.name: result for result in monitor.results}
    assert found["health/failed"].estimate == watched.requests // 3
    healthy = watched.requests - watched.requests // 3
    assert healthy - early <= found["health/p99"].fields["count"] <= healthy
    assert 0 < found["health/median"].estimate <= found["health/p99"].estimate <= found["health/max"].estimate


def test_parse_metrics_without_labels() -> None:
    text = '# HELP x\nllm_worker_num_preemptions_total 3.0\nother{a="b"} 4\nplain 1e+06\n\nllm_worker_up NaN\n'
    assert parse_metrics(text) == {"num_preemptions_total": 3.0, "plain": 1e6}
