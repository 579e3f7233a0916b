"""The soak for 30 seconds on a tiny model; each of its checks can fail."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import ROOT, environment
from tests.conftest import with_kernels
from tests.helpers.openai_server import serving
from tests.helpers.server import write_model

SCRIPTS = ROOT / "benchmarks"
LIMIT_S = 240


def soak(*args: str | Path) -> tuple[int, dict[str, Any], str]:
    """Return exit status, the JSON line and the whole output."""
    command = [sys.executable, str(SCRIPTS / "soak.py"), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=LIMIT_S)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def test_soak_of_12_seconds_passes(tmp_path: Path) -> None:
    """Memory is not judged, as caches fill in the first minute; nor is the latency of /health."""
    model = with_kernels(write_model(tmp_path / "tiny.gguf"))
    status, found, said = soak(
        "--minutes", "0.2", "-m", model, "--concurrency", "12", "--health-ms", "0", "--kv-memory", "16M",
        "--visit-limit", "100",
    )  # fmt: skip
    assert status == 0, said
    assert found["visits"] > 20
    assert found["checks"] == {
        "no error of the server's": True, "visitors were let in": True, "nothing is left": True, "always healthy": True,
        "health is quick": None, "memory does not grow": None,
    }  # fmt: skip
    assert found["growth"] is not None or not Path("/proc/self/status").exists()


def test_soak_of_server_with_errors_fails() -> None:
    with serving("busy") as server:
        status, found, said = soak("--minutes", "0.01", "--url", server.url, "--concurrency", "2")
    assert status == 1
    assert not found["checks"]["no error of the server's"]
    assert "ServerFaultError: POST" in said


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return the two modules; they are scripts, not a package."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import soak
    import soak_clients

    return soak, soak_clients


STARTED, TOKEN, END, DONE = '{"type":"started"}', '{"type":"token","t":"x","i":0}', '{"type":"end"}', "[DONE]"
CANCELLED = '{"type":"error","code":"CANCELLED"}'


@pytest.mark.parametrize(
    ("events", "is_sound"),
    [
        ([STARTED, TOKEN, END, DONE], True),
        ([STARTED, CANCELLED, DONE], True),
        (['{"choices":[]}', DONE], True),
        ([STARTED, TOKEN, DONE], False),
        ([TOKEN, STARTED, END, DONE], False),
        ([STARTED, END, CANCELLED, DONE], False),
        ([STARTED, '{"type":"error","code":"INFERENCE_FAILED"}', DONE], False),
        (['{"choices":[]}', '{"error":{"code":"TIMEOUT"}}', DONE], False),
    ],
)
def test_check_stream_accepts_only_proper_ends(scripts: tuple[Any, Any], events: list[str], is_sound: bool) -> None:
    _, soak_clients = scripts
    if is_sound:
        soak_clients.check_stream(events, ["CANCELLED"])
    else:
        with pytest.raises(soak_clients.ServerFaultError):
            soak_clients.check_stream(events, ["CANCELLED"])


@pytest.mark.parametrize(
    ("check", "changes", "health"),
    [
        ("memory does not grow", {"memory": [(30.0, 100), (90.0, 106), (119.0, 101)]}, {}),
        (
            "nothing is left",
            {"left": {"num_requests_running": 0.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.01}},
            {},
        ),
        ("nothing is left", {"left": {}}, {}),
        ("always healthy", {}, {"health/failed": 1}),
        ("health is quick", {}, {"health/p99": 0.011}),
        ("no error of the server's", {"failed": Counter(x=1)}, {}),
        ("visitors were let in", {"refused": Counter(x=6)}, {}),
    ],
)
def test_checks_fail_one_by_one(
    scripts: tuple[Any, Any], check: str, changes: dict[str, Any], health: dict[str, float]
) -> None:
    module, _ = scripts
    valid = {
        "done": Counter(x=10),
        "memory": [(30.0, 100), (90.0, 104)],
        "left": dict.fromkeys(module.ZERO_AT_END, 0.0),
        "seconds": 120.0,
    }
    options = argparse.Namespace(health_ms=10.0)

    def judged(changes: dict[str, Any], health: dict[str, float]) -> dict[str, bool | None]:
        run = module.Soak(None, 1, options, **(valid | changes))
        found = module.checks(run, {"health/failed": 0, "health/p99": 0.009} | health)
        return {name: outcome for name, (outcome, _) in found.items()}

    assert set(judged({}, {}).values()) == {True}
    assert {name for name, outcome in judged(changes, health).items() if not outcome} == {check}
