"""Memory and CPU time of processes, and the part of a file in the page cache.

Linux tells all of it through /proc; elsewhere only the peak memory of this process is known. Unknown values are None.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np


def memory_of(pid: int | str) -> Mapping[str, int]:
    """Return bytes in memory now (`VmRSS`) and at most (`VmHWM`); empty where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines if line.startswith(("VmRSS:", "VmHWM:")))
    return {name.rstrip(":"): int(count) * 1024 for name, count, *_ in pairs}


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU time of all threads of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def resident_memory() -> int | None:
    """Return the bytes of this process in memory now."""
    return memory_of("self").get("VmRSS")


def peak_memory() -> int:
    """Return the largest memory use of this process, ever or since `reset_peak_memory`."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return memory_of("self").get("VmHWM") or (peak if sys.platform == "darwin" else peak * 1024)


def reset_peak_memory() -> bool:
    """Restart the peak from the present use; return False where the system cannot."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


def can_drop_pages() -> bool:
    """Return whether files can be dropped from the page cache here."""
    return hasattr(os, "posix_fadvise")


def drop_pages(files: list[Path]) -> None:
    """Ask the system to drop the cached pages of these files; needs no privileges."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                os.fsync(handle)  # dirty pages cannot be dropped
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def cached_fraction(files: list[Path]) -> float | None:
    """Return which part of these files is in the page cache, 0 to 1."""
    total = sum(file.stat().st_size for file in files)
    found = [_cached_bytes(file) for file in files]
    return None if not total or None in found else sum(filter(None, found)) / total


def _cached_bytes(file: Path) -> int | None:
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
