"""The built wheel, installed outside the checkout into an environment of its own, with torch absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def run(command: list[str | Path], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=280, **options)  # type: ignore[call-overload,no-any-return]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    built = run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT])
    assert built.returncode == 0, built.stderr
    (path,) = out.glob("llm_worker_rbee-*.whl")
    return path


def test_wheel_holds_package_and_licences(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "llm_worker_rbee/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("licenses/NOTICE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "docs", "tools"))]
    missing = {str(p.relative_to(ROOT)) for p in (ROOT / "llm_worker_rbee").rglob("*.py")} - set(names)
    assert not missing


def test_installed_wheel_generates_without_torch(wheel: Path, default_model: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    installed = run([*pip, "install", "-q", "--no-compile", wheel])
    assert installed.returncode == 0, installed.stderr
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    assert run([python, "-c", "import torch"], cwd=tmp_path, env=environment).returncode == 1
    command = [python.parent / "llm-worker-rbee", "run", "--temperature", "0", "--max-tokens", "8", "--json"]
    answer = run([*command, "--raw", "The capital of France is"], cwd=tmp_path, env=environment)
    assert answer.returncode == 0, answer.stderr
    assert "Paris" in json.loads(answer.stdout)["text"]
