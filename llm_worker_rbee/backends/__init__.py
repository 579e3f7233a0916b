"""The op table, and who implements it.

`Ops` lists every op; a backend is a module that has them all. `layers/` and `models/` touch arrays through
these ops alone. `reference.py` says what each op means.
"""

from __future__ import annotations

import importlib
import importlib.util

from ..config import KV_AUTO, KV_DEFAULT
from ..errors import InvalidRequestError, MissingDependencyError
from . import cores, reference
from .types import KV_TYPES, OPS, Ops

__all__ = ["BACKENDS", "DEVICES", "OPS", "Ops", "kv_type_for", "pick"]

BACKENDS = ("auto", "reference", "cpu")
DEVICES = ("auto", "cpu")


def pick(device: str = "auto", backend: str = "auto", threads: int | None = None) -> Ops:
    """The backend for a device; `auto` takes the fastest that is there. `threads` is how many its kernels use."""
    if device.split(":")[0] == "cuda":
        raise MissingDependencyError("device 'cuda' is not available yet in this version: use device cpu")
    if device not in DEVICES:
        raise InvalidRequestError(f"unknown device {device!r}: use one of {', '.join(DEVICES)}", "device")
    if backend not in BACKENDS:
        raise InvalidRequestError(f"unknown backend {backend!r}: use one of {', '.join(BACKENDS)}", "backend")
    if backend == "reference" or (backend == "auto" and not _has_numba()):
        if threads is not None:
            raise InvalidRequestError(
                "threads is for the kernels: how many the reference uses is NumPy's own setting, OPENBLAS_NUM_THREADS",
                "threads",
            )
        return reference
    return _kernels(threads)


def kv_type_for(ops: Ops, asked: str = KV_AUTO) -> str:
    """How a backend keeps keys and values: as it is told, or `auto`."""
    if asked == KV_AUTO:
        return "float32" if ops is reference else KV_DEFAULT
    if asked not in KV_TYPES:
        known = ", ".join((KV_AUTO, *KV_TYPES))
        raise InvalidRequestError(f"unknown kv_type {asked!r}: use one of {known}", "kv_type")
    return asked


def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None and importlib.util.find_spec("llvmlite") is not None


def _kernels(threads: int | None) -> Ops:
    """The Numba kernels: importing Numba takes half a second, so only who asks for them pays."""
    cores.choose(threads)  # what cannot be is said before
    try:
        module: Ops = importlib.import_module(f"{__name__}.cpu")
    except ModuleNotFoundError as error:
        if error.name not in ("numba", "llvmlite"):
            raise
        raise MissingDependencyError("the cpu backend needs Numba: pip install numba") from None
    importlib.import_module(f"{__name__}.cpu.threads").use(threads)
    return module
