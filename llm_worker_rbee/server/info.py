"""What `/info` tells: the model, what it runs on, the memory it takes, the versions of what it is made of."""

from __future__ import annotations

import os
import platform
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from .worker import Worker

PACKAGES = ("numpy", "numba")
OF_A_GPU = ("torch", "triton")


def info(worker: Worker) -> dict[str, Any]:
    """All of it; the model must be here."""
    llm = worker.llm
    return {
        "model": worker.settings.names[0], "architecture": llm.config.family.name, "quant": llm.quant,
        "parameters": sum(tensor.size for tensor in llm.checkpoint.tensors.values()),
        "context_length": llm.max_context, "backend": llm.backend, "device": llm.device, "kv_type": llm.kv_type,
        "memory": {
            "weights_bytes": llm.checkpoint.nbytes, "kv_cache_bytes": llm.capacity.bytes,
            "process_bytes": resident_bytes(), "device_bytes": llm.device_bytes, "graph_bytes": llm.graph_bytes,
        },
        "worker_id": worker.settings.worker_id, "versions": _versions(llm.backend),
    }  # fmt: skip


def resident_bytes() -> int | None:
    """Memory of this process that is in use now; not everywhere known."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


@cache
def _versions(backend: str) -> dict[str, str]:
    found = {"worker": __version__, "python": platform.python_version()}
    for name in (*PACKAGES, *(OF_A_GPU if backend == "cuda" else ())):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # the reference needs no Numba
            continue
    return found
