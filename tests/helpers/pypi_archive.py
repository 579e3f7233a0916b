"""Archives of PyPI that tests read and never install, kept in the cache folder of pytest."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / ".pytest_cache" / "archives"
LIMIT_S = 180


def fetch_archive(requirement: str, *options: str) -> Path:
    """Return the archive of `name==version`; without network the test is skipped, with the reason."""
    name, _, version = requirement.partition("==")
    kept = FOLDER / f"{name}-{version}"
    if not kept.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *options, requirement]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                pytest.skip(f"{requirement} could not be downloaded within {LIMIT_S} s")
            found = [path for path in Path(folder).iterdir() if path.is_file()]
            if done.returncode or len(found) != 1:
                pytest.skip(f"{requirement} could not be downloaded: {done.stderr.strip()[-300:]}")
            os.replace(found[0], kept)
    return kept
