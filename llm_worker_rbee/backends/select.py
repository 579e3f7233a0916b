"""Choosing a backend: `--device` picks the hardware, `--backend` the implementation, `auto` the fastest that works.

Numba and PyTorch are imported only for the backend that is chosen. PyTorch takes seconds, so this module finds what can
be known of a GPU without it: driver files, missing packages, the size of packed weights. memory_plan.py places a model.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import KV_AUTO, KV_ON_CPU, KV_ON_CUDA, ComputeOptions
from ..errors import InvalidRequestError, MissingDependencyError
from ..weights import Checkpoint
from . import cpu_info
from .ops import Backend
from .reference import ReferenceBackend

BACKENDS = ("auto", "reference", "cpu", "cuda")
DEVICES = ("auto", "cpu", "cuda")
DRIVER_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libcuda.so.1")
REQUIRED_PACKAGES = ("torch", "triton")
INSTALL_COMMAND, COMPILER_COMMAND = (f"pip install 'llm-worker-rbee[{extra}]'" for extra in ("cuda", "compile"))
# Bits per weight as cuda/repack.py packs it, with scales; every other type becomes float32.
PACKED_BITS = {
    name: bits
    for bits, names in {
        1.125: "Q1_0",
        1.5625: "IQ1_S",
        1.8125: "TQ1_0 IQ1_M",
        2.0625: "TQ2_0",
        2.3125: "IQ2_XXS",
        2.5: "Q2_0",
        2.5625: "IQ2_XS IQ2_S",
        2.625: "Q2_K",
        3.3125: "IQ3_XXS",
        3.5625: "Q3_K IQ3_S",
        4.3125: "IQ4_XS",
        4.5: "Q4_0 IQ4_NL MXFP4 INT4",
        5.0: "Q4_1 Q4_K NVFP4 INT4_ZP NVFP4_F32",
        5.5: "Q5_0",
        6.0: "Q5_1 Q5_K",
        7.0: "Q6_K",
        8.5: "Q8_0 Q8_1 Q8_K INT8 FP8",
        16.0: "F16 BF16",
        8.0: "fp8",  # the scale of a row is 32 bits more
    }.items()
    for name in names.split()
}


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
        option = f"device {device!r}" if is_cuda else "backend 'cuda'"
        return load_cuda_backend(_parse_gpu_index(device), option, deterministic=deterministic)
    is_automatic = ComputeOptions(device=device, backend=backend, threads=threads).is_automatic
    if is_automatic and has_driver() and not missing_packages():
        try:
            return load_cuda_backend(None, deterministic=deterministic)
        except MissingDependencyError:  # no usable GPU: `doctor` reports why
            pass
    return _cpu_backend(backend, threads)


def load_cuda_backend(index: int | None, option: str = "device 'cuda'", *, deterministic: bool = False) -> Backend:
    """Return the CUDA backend on GPU `index`, by default the one with most free memory."""
    missing = missing_packages()
    if missing:
        raise MissingDependencyError(f"{option} needs {' and '.join(missing)}: {INSTALL_COMMAND}")
    module: Any = importlib.import_module(f"{__package__}.cuda")
    backend: Backend = module.CudaBackend(index, deterministic=deterministic)
    return backend


def report_gpu() -> None:
    """Print a GPU and its free memory, for a process without the driver; the argument is the device."""
    gpu = load_cuda_backend(_parse_gpu_index(sys.argv[1]))
    print(json.dumps({"device": gpu.device, "free": gpu.free_memory()}))


def has_driver() -> bool:
    """Return whether files of the NVIDIA driver exist and the environment does not hide its GPUs."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    return any(Path(name).exists() for name in DRIVER_FILES)


def _parse_gpu_index(device: str) -> int | None:
    """Return the number of `cuda:N`; None for `cuda`."""
    _, colon, number = device.partition(":")
    if colon and not (number.isascii() and number.isdigit() and len(number) <= 4):
        raise InvalidRequestError(f"unknown device {device!r}: a GPU is cuda, or cuda:N with its number", "device")
    return int(number) if colon else None


def missing_packages(*packages: str) -> list[str]:
    """Return those packages that are not installed; by default PyTorch and Triton."""
    return [name for name in packages or REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]


def packed_bytes(checkpoint: Checkpoint, kinds: Mapping[str, str] | None = None) -> int:
    """Return the bytes of a checkpoint's weights on a GPU; `kinds` overrides quantization types by name."""
    bits = 0.0
    for name, tensor in checkpoint.tensors.items():
        kind = (kinds or {}).get(name) or tensor.pack_as or tensor.kind.name
        each = PACKED_BITS.get(kind, 32.0) if len(tensor.shape) > 1 else 32.0
        columns = tensor.shape[-1] if tensor.shape else 1
        if len(tensor.shape) > 1 and each < 16 and kind != "fp8":  # rows of planes have room for eight blocks of 32
            columns = -(-columns // 256) * 256
        bits += each * math.prod(tensor.shape[:-1]) * columns
    return int(bits / 8)


def resolve_kv_type(backend: Backend, kv_type: str = KV_AUTO) -> str:
    """Return the type of keys and values on a backend: the requested one, or its default for `auto`."""
    if kv_type == KV_AUTO:
        return backend.default_kv_type
    if kv_type in backend.kv_types:
        return kv_type
    remedy = f"use one of {', '.join((KV_AUTO, *backend.kv_types))}"
    if kv_type in (*KV_ON_CPU, *KV_ON_CUDA):
        where = "the CPU"
        if backend.has_device_memory:
            where = "this GPU" if kv_type in KV_ON_CUDA else "a GPU"
        raise InvalidRequestError(f"kv_type {kv_type} is not for {where}: {remedy}", "kv_type")
    raise InvalidRequestError(f"unknown kv_type {kv_type!r}: {remedy}", "kv_type")


def _require_known(device: str, backend: str) -> None:
    if device.partition(":")[0] not in DEVICES or (":" in device and not device.startswith("cuda:")):
        raise InvalidRequestError(f"unknown device {device!r}: use one of {', '.join(DEVICES)}, cuda:N", "device")
    if backend not in BACKENDS:
        raise InvalidRequestError(f"unknown backend {backend!r}: use one of {', '.join(BACKENDS)}", "backend")


def _cpu_backend(backend: str, threads: int | None) -> Backend:
    if backend == "reference":
        if threads is not None:
            raise InvalidRequestError(
                "threads is for the kernels: how many the reference uses is NumPy's own setting, OPENBLAS_NUM_THREADS",
                "threads",
            )
        return ReferenceBackend()
    if not cpu_info.prebuilt_isas() and not cpu_info.has_compiler():
        raise MissingDependencyError(
            f"this installation has no compiled kernels for this processor: {COMPILER_COMMAND} compiles them here "
            "(backend 'reference' computes without, many times slower)"
        )
    cpu_info.choose_thread_count(threads)  # refuse an impossible number before Numba is imported
    module = import_cpu_backend()
    cpu: Backend = module.CpuBackend(threads)
    return cpu


def import_cpu_backend() -> Any:
    """Return the module of the CPU backend; importing Numba takes half a second."""
    return importlib.import_module(f"{__package__}.cpu")
