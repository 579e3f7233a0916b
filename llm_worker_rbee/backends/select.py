"""Choosing a backend: `--device` picks the hardware, `--backend` the implementation, `auto` the fastest that works.

Numba and PyTorch are imported only for the backend that is chosen. Placing a model on a device is load.py's.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from ..config import KV_AUTO, KV_ON_CPU, KV_ON_CUDA
from ..errors import InvalidRequestError, MissingDependencyError
from . import cuda_probe, thread_count
from .ops import Backend
from .reference import ReferenceBackend

BACKENDS = ("auto", "reference", "cpu", "cuda")
DEVICES = ("auto", "cpu", "cuda")


def select_backend(
    device: str = "auto", backend: str = "auto", threads: int | None = None, *, deterministic: bool = False
) -> Backend:
    """Return the backend for a device; `auto` takes the fastest that works.

    `threads` is the number of CPU threads of its kernels. `deterministic` asks for batch-invariant results, which is a
    slower mode on a GPU and always so on a CPU.
    """
    _require_known(device, backend)
    is_cuda = device.startswith("cuda")
    if is_cuda and backend not in ("auto", "cuda"):
        raise InvalidRequestError(f"backend {backend!r} computes on the CPU: it does not go with {device!r}", "backend")
    if device == "cpu" and backend == "cuda":
        raise InvalidRequestError("backend 'cuda' computes on a GPU: it does not go with device 'cpu'", "backend")
    if is_cuda or backend == "cuda":
        if threads is not None:
            raise InvalidRequestError("threads sets the threads of CPU kernels: a GPU has its own", "threads")
        wanted = f"device {device!r}" if is_cuda else "backend 'cuda'"
        return load_cuda_backend(cuda_probe.parse_gpu_index(device), wanted, deterministic=deterministic)
    if is_automatic(device, backend, threads) and cuda_probe.has_driver() and not cuda_probe.missing_packages():
        try:
            return load_cuda_backend(None, deterministic=deterministic)
        except MissingDependencyError:  # no usable GPU: `doctor` reports why
            pass
    return _cpu_backend(backend, threads)


def is_automatic(device: str, backend: str, threads: int | None = None) -> bool:
    """Return whether a GPU is used where there is one: nothing else was requested, and threads are the CPU's."""
    return device == "auto" and backend == "auto" and threads is None


def fallback_to_cpu(backend: Backend, needed: int) -> tuple[Backend, str | None]:
    """Return the backend that `auto` chose, or the CPU's if `needed` bytes do not fit on the GPU; and a note on it."""
    if not backend.has_device_memory:
        return backend, cuda_probe.missing_packages_note() if cuda_probe.has_driver() else None
    shortage = cuda_probe.shortage_note(backend.free_memory() or 0, needed)
    return (backend, None) if shortage is None else (_cpu_backend("auto", None), shortage)


def load_cuda_backend(index: int | None, wanted: str = "device 'cuda'", *, deterministic: bool = False) -> Backend:
    """Return the CUDA backend on GPU `index`, by default the one with most free memory."""
    missing = cuda_probe.missing_packages()
    if missing:
        raise MissingDependencyError(f"{wanted} needs {' and '.join(missing)}: {cuda_probe.INSTALL_COMMAND}")
    module: Any = importlib.import_module(f"{__package__}.cuda")
    backend: Backend = module.CudaBackend(index, deterministic=deterministic)
    return backend


def resolve_kv_type(backend: Backend, kv_type: str = KV_AUTO) -> str:
    """Return the type of keys and values on a backend: the requested one, or its default for `auto`."""
    if kv_type == KV_AUTO:
        return backend.default_kv_type
    if kv_type in backend.kv_types:
        return kv_type
    remedy = f"use one of {', '.join((KV_AUTO, *backend.kv_types))}"
    if kv_type in (*KV_ON_CPU, *KV_ON_CUDA):
        where = "a GPU" if backend.has_device_memory else "the CPU"
        raise InvalidRequestError(f"kv_type {kv_type} is not for {where}: {remedy}", "kv_type")
    raise InvalidRequestError(f"unknown kv_type {kv_type!r}: {remedy}", "kv_type")


def _require_known(device: str, backend: str) -> None:
    if device.partition(":")[0] not in DEVICES or (":" in device and not device.startswith("cuda:")):
        raise InvalidRequestError(f"unknown device {device!r}: use one of {', '.join(DEVICES)}, cuda:N", "device")
    if backend not in BACKENDS:
        raise InvalidRequestError(f"unknown backend {backend!r}: use one of {', '.join(BACKENDS)}", "backend")


def _cpu_backend(backend: str, threads: int | None) -> Backend:
    if backend == "reference" or (backend == "auto" and not _has_numba()):
        if threads is not None:
            raise InvalidRequestError(
                "threads is for the kernels: how many the reference uses is NumPy's own setting, OPENBLAS_NUM_THREADS",
                "threads",
            )
        return ReferenceBackend()
    thread_count.choose(threads)  # refuse an impossible number before Numba is imported
    try:
        module: Any = importlib.import_module(f"{__package__}.cpu")
    except ModuleNotFoundError as error:
        if error.name not in ("numba", "llvmlite"):
            raise
        raise MissingDependencyError("the cpu backend needs Numba: pip install numba") from None
    made: Backend = module.CpuBackend(threads)
    return made


def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None and importlib.util.find_spec("llvmlite") is not None
