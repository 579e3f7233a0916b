"""`make browser`: Chromium is installed under CI as root where it is missing only; a failure is reported."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .cli.conftest import ROOT, environment

pytestmark = [
    pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed"),
    pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="this is not a checkout: there is no Makefile"),
]


def make_browser(
    folder: Path, *, ci: str | None, user: int, present: bool, apt_status: int = 0
) -> tuple[str, list[str]]:
    """(what make wrote, the calls of apt-get), with commands of the system that only note that they were called."""
    commands = folder / "bin"
    commands.mkdir()
    scripts = {"apt-get": f'echo "$@" >>"{folder}/calls"; exit {apt_status}', "id": f"echo {user}"}
    for name, script in scripts.items():
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)
    if present:
        shutil.copy(commands / "id", folder / "chromium")
    env = {key: value for key, value in environment().items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "CI")}
    env |= {"PATH": f"{commands}:{os.environ['PATH']}"} | ({} if ci is None else {"CI": ci})
    command = ["make", "-C", str(ROOT), "--no-print-directory", "browser", f"CHROMIUM={folder}/chromium"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return done.stdout + done.stderr, calls


def test_browser_under_ci_as_root_is_installed_once(tmp_path: Path) -> None:
    output, calls = make_browser(tmp_path, ci="true", user=0, present=False)
    assert "Installing chromium" in output
    assert "warning" not in output
    assert [call.split()[0] for call in calls] == ["update", "-o"]
    assert "install -y -qq --no-install-recommends chromium" in calls[1]


@pytest.mark.parametrize(
    ("ci", "user", "present"), [("true", 0, True), ("true", 1000, False), (None, 0, False), ("false", 0, False)]
)
def test_browser_outside_ci_is_not_installed(tmp_path: Path, ci: str | None, user: int, present: bool) -> None:
    assert make_browser(tmp_path, ci=ci, user=user, present=present) == ("", [])


def test_browser_install_failure_is_a_warning(tmp_path: Path) -> None:
    output, calls = make_browser(tmp_path, ci="true", user=0, present=False, apt_status=100)
    assert "warning: chromium could not be installed: the tests of pages will be skipped" in output
    assert len(calls) == 1
