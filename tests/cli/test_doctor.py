"""`doctor`: a report on this machine, and what it says where something is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llm_worker_rbee.cli import machine
from llm_worker_rbee.cli.doctor import _optional, _package

from .conftest import Run


def test_the_report(spawn: Run, tmp_path: Path) -> None:
    done = spawn("doctor", "--json", env={"XDG_CACHE_HOME": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, b"")
    told = json.loads(done.stdout)
    checks = {check["name"]: check for check in told["checks"]}
    assert told["healthy"] is True
    for name in ("processor", "cores", "memory", "GPU", "Python", "numpy", "tokenizers", "torch", "OpenMP", "cache"):
        assert checks[name]["status"] in ("ok", "warn", "missing")
        assert checks[name]["found"]
    assert str(tmp_path) in checks["cache"]["found"]
    assert checks["default model"]["status"] == "missing"
    assert "llm-worker-rbee pull" in checks["default model"]["remedy"]
    assert not (tmp_path / "llm-worker-rbee").exists()  # looking changes nothing


def test_a_broken_package_makes_it_fail(spawn: Run, tmp_path: Path) -> None:
    (tmp_path / "jinja2").mkdir()
    (tmp_path / "jinja2" / "__init__.py").write_text("raise ImportError('half of it is gone')")
    root = str(Path(__file__).parents[2])
    done = spawn("doctor", env={"PYTHONPATH": f"{tmp_path}:{root}"})
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.decode().splitlines() if " jinja2 " in line]
    assert line.startswith("missing")
    assert "half of it is gone -> pip install" in line


def test_absent_packages() -> None:
    required = _package("no_such_package")
    assert (required.status, required.required) == ("missing", True)
    assert required.remedy is not None
    optional = _optional("no_such_package", "pip install it")
    assert (optional.status, optional.required, optional.remedy) == ("missing", False, "pip install it")


def test_the_machine_is_read_within_reason() -> None:
    assert machine.usable_cores() >= 1
    assert machine.cpu_name()
    quota = machine.cpu_quota()
    assert quota is None or quota > 0
    total, available = machine.memory()
    assert total is None or available is None or 0 < available <= total


def test_a_machine_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_read", lambda path: "")
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.cpu_features() == []
    assert machine.physical_cores() is None
    assert machine.cpu_quota() is None
    assert machine.memory_limit() == (None, 0)
    assert machine.gpus() == []


@pytest.mark.parametrize(("text", "quota"), [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None)])
def test_the_quota_of_a_cgroup(monkeypatch: pytest.MonkeyPatch, text: str, quota: float | None) -> None:
    files = {"/proc/self/cgroup": "0::/box/inner\n", "/sys/fs/cgroup/box/cpu.max": text}
    monkeypatch.setattr(machine, "_read", lambda path: files.get(str(path), ""))
    assert machine.cpu_quota() == quota
