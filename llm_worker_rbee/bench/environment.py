"""Where a run took place: machine, versions, commit, model.

The fingerprint is a short hash of the parts of a machine that decide its speed: runs are comparable if it is the same.
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
HASH_CHUNK_BYTES = 1 << 22


@cache
def describe_machine() -> dict[str, Any]:
    """Return processor, memory, GPU and system, and the fingerprint."""
    total, _ = machine.memory()
    hardware: dict[str, Any] = {
        "cpu": machine.cpu_name(),
        "features": machine.cpu_features(),
        "cores": machine.usable_cores(),
        "quota": machine.cpu_quota(),
        "memory_gib": None if total is None else round(total / (1 << 30)),
        "gpus": machine.gpus(),
        "architecture": platform.machine(),
    }
    fingerprint = hashlib.sha256(repr(sorted(hardware.items())).encode()).hexdigest()[:12]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    state = {"system": platform.platform(terse=True), "load_at_start": load, "threads": thread_settings()}
    return {**hardware, **state, "fingerprint": fingerprint}


def thread_settings() -> dict[str, str]:
    """Return the environment variables that set the threads of libraries."""
    return {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of this program, of Python and of the installed packages that speed depends on."""
    found = {"llm-worker-rbee": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@cache
def describe_commit() -> dict[str, Any] | None:
    """Return the commit of this checkout and whether files differ from it; None for an installed package."""
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


def describe_model(path: Path, progress: Callable[[str, int, int | None], None] | None = None) -> dict[str, Any]:
    """Return name, size and SHA-256 of a model file; of a folder, the hash over its weight files and their names."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else _split_files(path)
    total, done = sum(file.stat().st_size for file in files), 0
    digest = hashlib.sha256()
    for file in files:
        if path.is_dir() or len(files) > 1:
            digest.update(file.name.encode())
        with file.open("rb") as source:
            while part := source.read(HASH_CHUNK_BYTES):
                digest.update(part)
                done += len(part)
                if progress is not None:
                    progress(f"hashing {path.name}", done, total)
    return {"name": path.name, "bytes": total, "sha256": digest.hexdigest()}


def _split_files(path: Path) -> list[Path]:
    stem, dash, count = path.stem.rpartition("-of-")
    if not dash or not count.isdigit():
        return [path]
    return sorted(path.parent.glob(f"{stem.rpartition('-')[0]}-*-of-{count}.gguf"))
