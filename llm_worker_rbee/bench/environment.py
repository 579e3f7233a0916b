"""Where a run took place: machine, versions, commit, model. What two runs must share to be comparable.

The fingerprint is a short hash of the parts of a machine that decide its speed; baselines are kept apart by it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from .. import __version__, machine

PACKAGES = ("numpy", "numba", "llvmlite", "tokenizers", "torch", "triton", "transformers", "matplotlib")
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
HASHED_AT_ONCE = 1 << 22


@cache
def machine_description() -> dict[str, Any]:
    """Processor, memory, GPU and system, and the fingerprint."""
    total, _ = machine.memory()
    lasting: dict[str, Any] = {
        "cpu": machine.cpu_name(),
        "features": machine.cpu_features(),
        "cores": machine.usable_cores(),
        "quota": machine.cpu_quota(),
        "memory_gib": None if total is None else round(total / (1 << 30)),
        "gpus": machine.gpus(),
        "architecture": platform.machine(),
    }
    fingerprint = hashlib.sha256(repr(sorted(lasting.items())).encode()).hexdigest()[:12]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    passing = {"system": platform.platform(terse=True), "load_at_start": load, "threads": thread_settings()}
    return {**lasting, **passing, "fingerprint": fingerprint}


def thread_settings() -> dict[str, str]:
    """The environment variables that say how many threads libraries use."""
    return {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}


@cache
def versions() -> dict[str, str]:
    """Of this program, of Python, and of the packages that speed depends on, where they are installed."""
    found = {"llm-worker-rbee": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@cache
def commit() -> dict[str, Any] | None:
    """The commit that this code is checked out at, and whether files differ from it; None for an installed package."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    known = _git(root, "log", "-1", "--format=%H %cI")
    if known is None:
        return None
    identity, date = known.split()
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {"id": identity, "date": date, "dirty": bool(changed)}


def _git(root: Path, *args: str) -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10, check=False, errors="replace"
        )
        return done.stdout.strip() if done.returncode == 0 else None
    return None


def model_description(path: Path, progress: Callable[[str, int, int | None], None] | None = None) -> dict[str, Any]:
    """Name, size and SHA-256 of a model file; of a folder, the hash over its weight files and their names."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else _split_set(path)
    total, done = sum(file.stat().st_size for file in files), 0
    whole = hashlib.sha256()
    for file in files:
        if path.is_dir() or len(files) > 1:
            whole.update(file.name.encode())
        with file.open("rb") as source:
            while part := source.read(HASHED_AT_ONCE):
                whole.update(part)
                done += len(part)
                if progress is not None:
                    progress(f"hashing {path.name}", done, total)
    return {"name": path.name, "bytes": total, "sha256": whole.hexdigest()}


def _split_set(path: Path) -> list[Path]:
    stem, dash, count = path.stem.rpartition("-of-")
    if not dash or not count.isdigit():
        return [path]
    return sorted(path.parent.glob(f"{stem.rpartition('-')[0]}-*-of-{count}.gguf"))
