"""The op table, and who implements it.

`Ops` lists every op; a backend is a module that has them all. `layers/` and `models/` touch arrays through
these ops alone. `reference.py` says what each op means.
"""

from __future__ import annotations

import importlib
import importlib.util

from ..config import KV_AUTO, KV_CUDA, KV_DEFAULT
from ..errors import InvalidRequestError, MissingDependencyError
from . import cuda_probe, reference, thread_count
from .ops import CUDA_KV_TYPES, KV_TYPES, OPS, Ops

__all__ = ["BACKENDS", "DEVICES", "OPS", "Ops", "fitting", "is_automatic", "kv_type_for", "pick"]

BACKENDS = ("auto", "reference", "cpu", "cuda")
DEVICES = ("auto", "cpu", "cuda")


def pick(device: str = "auto", backend: str = "auto", threads: int | None = None) -> Ops:
    """The backend for a device; `auto` takes the fastest that is there. `threads` is how many its kernels use."""
    _require_known(device, backend)
    is_cuda = device.startswith("cuda")
    if is_cuda and backend not in ("auto", "cuda"):
        raise InvalidRequestError(f"backend {backend!r} computes on the CPU: it does not go with {device!r}", "backend")
    if device == "cpu" and backend == "cuda":
        raise InvalidRequestError("backend 'cuda' computes on a GPU: it does not go with device 'cpu'", "backend")
    if is_cuda or backend == "cuda":
        if threads is not None:
            raise InvalidRequestError("threads is for the kernels of the CPU: a GPU has its own", "threads")
        return cuda_probe.take(cuda_probe.index_of(device), f"device {device!r}" if is_cuda else "backend 'cuda'")
    if is_automatic(device, backend, threads) and cuda_probe.is_seen() and not cuda_probe.missing_packages():
        try:
            return cuda_probe.take(None)
        except MissingDependencyError:  # no GPU after all, or one that is too old: doctor tells
            pass
    return _on_cpu(backend, threads)


def is_automatic(device: str, backend: str, threads: int | None = None) -> bool:
    """Whether a GPU is taken where there is one: nobody asked for anything else. Threads are the CPU's."""
    return device == "auto" and backend == "auto" and threads is None


def fitting(ops: Ops, needed: int) -> tuple[Ops, str | None]:
    """What `auto` took, or the CPU where the model does not fit on the GPU; and what there is to say of it."""
    if not cuda_probe.is_cuda(ops):
        return ops, cuda_probe.unused() if cuda_probe.is_seen() else None
    told = cuda_probe.shortage(ops, needed)
    return (ops, None) if told is None else (_on_cpu("auto", None), told)


def kv_type_for(ops: Ops, asked: str = KV_AUTO) -> str:
    """How a backend keeps keys and values: as it is told, or `auto`."""
    is_cuda = cuda_probe.is_cuda(ops)
    if asked == KV_AUTO:
        return KV_CUDA if is_cuda else "float32" if ops is reference else KV_DEFAULT
    known = CUDA_KV_TYPES if is_cuda else KV_TYPES
    if asked in known:
        return asked
    named = f"use one of {', '.join((KV_AUTO, *known))}"
    if asked in (*KV_TYPES, *CUDA_KV_TYPES):
        where = "a GPU" if is_cuda else "the CPU"
        raise InvalidRequestError(f"kv_type {asked} is not for {where}: {named}", "kv_type")
    raise InvalidRequestError(f"unknown kv_type {asked!r}: {named}", "kv_type")


def _require_known(device: str, backend: str) -> None:
    if device.partition(":")[0] not in DEVICES or (":" in device and not device.startswith("cuda:")):
        raise InvalidRequestError(f"unknown device {device!r}: use one of {', '.join(DEVICES)}, cuda:N", "device")
    if backend not in BACKENDS:
        raise InvalidRequestError(f"unknown backend {backend!r}: use one of {', '.join(BACKENDS)}", "backend")


def _on_cpu(backend: str, threads: int | None) -> Ops:
    if backend == "reference" or (backend == "auto" and not _has_numba()):
        if threads is not None:
            raise InvalidRequestError(
                "threads is for the kernels: how many the reference uses is NumPy's own setting, OPENBLAS_NUM_THREADS",
                "threads",
            )
        return reference
    return _kernels(threads)


def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None and importlib.util.find_spec("llvmlite") is not None


def _kernels(threads: int | None) -> Ops:
    """The Numba kernels: importing Numba takes half a second, so only who asks for them pays."""
    thread_count.choose(threads)  # what cannot be is said before
    try:
        module: Ops = importlib.import_module(f"{__name__}.cpu")
    except ModuleNotFoundError as error:
        if error.name not in ("numba", "llvmlite"):
            raise
        raise MissingDependencyError("the cpu backend needs Numba: pip install numba") from None
    importlib.import_module(f"{__name__}.cpu.threads").use(threads)
    return module
