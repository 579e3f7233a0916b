"""How much memory this process uses and used at most, and what a file takes of the system's file cache.

Linux tells all of it through /proc; elsewhere only the highest use is known. What cannot be known is None.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import sys
from pathlib import Path

import numpy as np


def used() -> int | None:
    """Bytes of this process that are in memory now."""
    return _status("VmRSS")


def peak() -> int:
    """The most that it ever was, or since `reset_peak`."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _status("VmHWM") or (most if sys.platform == "darwin" else most * 1024)


def reset_peak() -> bool:
    """Let the highest use start again from the present one; False where the system cannot."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


def _status(key: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None


def can_drop() -> bool:
    """Whether files can be put out of the file cache here."""
    return hasattr(os, "posix_fadvise")


def drop(files: list[Path]) -> None:
    """Ask the system to forget the cached pages of these files; no rights are needed."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                os.fsync(handle)  # pages that are not written yet cannot be forgotten
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def resident_part(files: list[Path]) -> float | None:
    """Which part of these files is in the file cache, 0 to 1."""
    total = sum(file.stat().st_size for file in files)
    found = [_resident(file) for file in files]
    return None if not total or None in found else sum(filter(None, found)) / total


def _resident(file: Path) -> int | None:
    size = file.stat().st_size
    if not size:
        return 0
    with file.open("rb") as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages: np.ndarray[tuple[int], np.dtype[np.uint8]] = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        mincore = getattr(ctypes.CDLL(None), "mincore", None)
        failed = mincore is None or mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        )
        del view  # or the mapping cannot be closed
    return None if failed else min(size, int((pages & 1).sum()) * mmap.PAGESIZE)
