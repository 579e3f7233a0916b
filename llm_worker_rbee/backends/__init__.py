"""The op table, and who implements it.

`Ops` lists every op; a backend is a module that has them all. `layers/` and `models/` touch arrays through
these ops alone. `reference.py` says what each op means.
"""

from __future__ import annotations

import importlib

from .. import machine
from ..errors import InvalidRequestError, MissingDependencyError
from . import reference
from .types import OPS, Ops

__all__ = ["BACKENDS", "DEVICES", "OPS", "Ops", "pick"]

# The kernels have not been run on Arm yet.
BACKENDS = ("auto", "reference", "cpu") if machine.is_x86() else ("auto", "reference")
DEVICES = ("auto", "cpu")


def pick(device: str = "auto", backend: str = "auto") -> Ops:
    """The backend for a device; `auto` takes the fastest that is there."""
    if device.split(":")[0] == "cuda":
        raise MissingDependencyError("device 'cuda' is not available yet in this version: use device cpu")
    if device not in DEVICES:
        raise InvalidRequestError(f"unknown device {device!r}: use one of {', '.join(DEVICES)}", "device")
    if backend not in BACKENDS:
        raise InvalidRequestError(f"unknown backend {backend!r}: use one of {', '.join(BACKENDS)}", "backend")
    if backend == "cpu":
        return _kernels()
    return reference


def _kernels() -> Ops:
    """The Numba kernels: importing Numba takes half a second, so only who asks for them pays."""
    try:
        module: Ops = importlib.import_module(f"{__name__}.cpu")
    except ModuleNotFoundError as error:
        if error.name not in ("numba", "llvmlite"):
            raise
        raise MissingDependencyError("the cpu backend needs Numba: pip install numba") from None
    return module
