"""`bench serving --spawn`: a server of ours for the time of the load, and what is seen of it from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.process import spawn
from tests.helpers.serve_process import LIMIT_S, MARK, marked_processes, until

from .conftest import Run

SMALL = ("-n", "6", "-c", "2", "--input-len", "3", "--output-len", "5", "--json")


def by_name(stdout: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    run = json.loads(stdout)
    return run, {result["name"]: result for result in run["results"]}


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
    assert found["server_start"]["estimate"] > 0
    assert found["health/failed"]["estimate"] == 0
    assert found["client_processor"]["of_a_core"] > 0
    if Path("/proc/self/stat").exists():
        assert found["server_peak_memory"]["estimate"] > 1 << 20
        assert found["server_processor"]["estimate"] >= 0
    assert b"secret" not in done.stdout + done.stderr


def test_spawn_synthetic_model_has_exact_lengths(cli: Run) -> None:
    model = ("--synthetic", "smollm2-135m:Q8_0:1", "--ignore-eos", "--serve-args", "--kv-memory 8M")
    done = cli("bench", "serving", "--spawn", *model, *SMALL, "--input-len", "27")
    assert done.returncode == 0, done.stderr
    run, found = by_name(done.stdout)
    assert found["completed"]["estimate"] == 6
    assert (run["details"]["prompt_tokens"], run["details"]["output_tokens"]) == (6 * 27, 6 * 5)
    assert run["settings"]["synthetic"] == "smollm2-135m:Q8_0:1"


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_benchmark_that_is_ended_ends_its_server(tiny: Path, number: signal.Signals) -> None:
    arguments = ["bench", "serving", "--spawn", "--engine", "null", "-m", str(tiny), "--duration", "60"]
    env = {**os.environ, MARK: (mark := f"bench-{os.getpid()}-{number}")}
    process = spawn([sys.executable, "-m", "llm_worker_rbee", *arguments], stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, env=env)  # fmt: skip
    until(lambda: len(marked_processes(mark)) >= 3)  # itself, the front and the engine
    process.send_signal(number)
    assert process.wait(LIMIT_S) == 128 + number
    until(lambda: not marked_processes(mark))
