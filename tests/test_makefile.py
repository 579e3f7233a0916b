"""`make`: when it makes the environment anew, and when it leaves it alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .cli.conftest import ROOT, environment

pytestmark = [
    pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed"),
    pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="this is not a checkout: there is no Makefile"),
]


def make(folder: Path, *args: str) -> str:
    env = {key: value for key, value in environment().items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", *args, f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps(folder: Path) -> list[str]:
    """What `make demo` would do, without doing it."""
    output = make(folder, "-n", "demo")
    known = {"make": "Making the environment", "install": "Installing the core", "run": "-m llm_worker_rbee run"}
    return [step for step, text in known.items() if text in output]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The Makefile in a folder with a space in its name, and an environment that looks finished."""
    folder = tmp_path / "a checkout"
    (folder / ".venv").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / ".venv" / ".made").write_text(f"{sys.version}\n{sys.base_prefix}\n{folder.resolve()}\n")
    (folder / ".venv" / ".core").touch()
    return folder


def test_make_keeps_finished_environment(checkout: Path) -> None:
    assert steps(checkout) == ["run"]
    (checkout / ".venv" / ".core").unlink()  # the install was cut off
    assert steps(checkout) == ["install", "run"]


def test_make_recreates_environment_of_other_python_or_place(checkout: Path) -> None:
    moved = checkout.rename(checkout.with_name("moved"))
    assert steps(moved) == ["make", "install", "run"]
    checkout = moved.rename(checkout)
    assert steps(checkout) == ["run"]
    stamp = checkout / ".venv" / ".made"
    right = stamp.read_text()
    for wrong in (right.replace(sys.version, "3.10.0"), right.replace(sys.base_prefix, "/elsewhere"), ""):
        stamp.write_text(wrong)
        assert steps(checkout) == ["make", "install", "run"]
    stamp.unlink()
    assert steps(checkout) == ["make", "install", "run"]


def test_make_completes_partial_environment(checkout: Path) -> None:
    """What a venv that was killed while it fetched pip leaves: a Python that runs, and no pip."""
    pytest.importorskip("ensurepip", reason="this Python cannot make an environment with pip")
    venv = checkout / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(venv)], check=True)
    assert make(checkout, ".venv/.made") == "Making the environment in .venv ...\n"
    pip = subprocess.run([venv / "bin" / "python", "-m", "pip", "--version"], capture_output=True, text=True)
    assert pip.returncode == 0
    assert str(venv) in pip.stdout
    assert steps(checkout) == ["install", "run"]
    assert os.path.samefile((venv / ".made").read_text().splitlines()[2], checkout)
