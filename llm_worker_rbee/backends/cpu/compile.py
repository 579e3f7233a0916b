"""How kernels are compiled: once, kept on disk, and never run stale.

Numba's disk cache sees neither an edit in another file nor a changed global. So its folder is keyed by everything that
the machine code depends on: all files of this folder, the instruction set, the processor, and the versions of Numba
and LLVM. A kernel is a template: the names in capitals that it uses are set for each variant (`variant`).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite
import numba as nb
from llvmlite import binding

from .. import isa

FOLDER = Path(__file__).parent


def fingerprint() -> str:
    """A hash of what the machine code depends on."""
    found = hashlib.sha256()
    for path in [Path(isa.__file__), *sorted(FOLDER.glob("*.py"))]:
        found.update(path.name.encode() + path.read_bytes())
    about = (isa.current(), nb.__version__, llvmlite.__version__, binding.get_host_cpu_name())
    found.update(repr(about).encode())
    return found.hexdigest()[:16]


def cache_folder() -> Path:
    """Where the machine code is kept: the user's cache, or a folder of our own where that cannot be written."""
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache"
        folder = base / "llm-worker-rbee" / "kernels" / fingerprint()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):
        return Path(tempfile.mkdtemp(prefix="llm-worker-rbee-kernels-"))


# Threads that spin for long between regions starve a machine that has something else to do; libgomp reads this once.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
nb.config.CACHE_DIR = str(cache_folder())
_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy"}
kernel: Callable[[Callable[..., Any]], Any] = nb.njit(**_OPTIONS)
parallel: Callable[[Callable[..., Any]], Any] = nb.njit(parallel=True, **_OPTIONS)


def variant(template: Any, name: str, **values: Any) -> FunctionType:
    """The function with its capitals set; `name` tells its machine code from that of other variants."""
    made = FunctionType(template.__code__, {**template.__globals__, **values}, template.__name__)
    made.__qualname__ = f"{template.__name__}[{name}]"
    made.__module__ = template.__module__
    return made
