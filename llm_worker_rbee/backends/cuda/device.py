"""Choosing a GPU, its memory, and copies from the host. Functions take the device: nothing here is remembered.

Under Triton's interpreter (TRITON_INTERPRET=1) the device is the CPU, so that the whole backend runs without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from ...errors import InvalidRequestError, MissingDependencyError

MIN_CAPABILITY = (8, 0)  # compute capability: bfloat16 products, and the instructions of kernels/intrinsics.py
MIN_FP8_CAPABILITY = (8, 9)  # e4m3: conversions and tensor cores
MIN_PDL_CAPABILITY = (9, 0)  # programmatic dependent launch
SHARED_KB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}  # by compute capability
MIN_SHARED_KB = 99
HOPPER_SHARED_BYTES = 200 << 10  # what the larger tiles need


def is_interpreted() -> bool:
    """Return whether kernels run under the interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def open_device(index: int | None) -> torch.device:
    """Return GPU `index`, or the one with most free memory, and make it the calling thread's."""
    if is_interpreted():
        return torch.device("cpu")
    number = select_gpu(index)
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def select_gpu(index: int | None) -> int:
    """Return the number of the GPU to use; raise with a remedy if there is none, or the kernels do not run on it."""
    if torch.version.cuda is None:
        raise MissingDependencyError(
            f"device 'cuda': PyTorch {torch.__version__} is a build without CUDA: install one with it "
            "(pip install --force-reinstall torch), or use device cpu"
        )
    if not torch.cuda.is_available():
        raise MissingDependencyError(
            f"device 'cuda': PyTorch {torch.__version__} finds no NVIDIA GPU: check the driver (nvidia-smi) and "
            "CUDA_VISIBLE_DEVICES, or use device cpu"
        )
    count = torch.cuda.device_count()
    if index is None:
        index = max(range(count), key=lambda i: torch.cuda.mem_get_info(i)[0])
    if index >= count:
        available = "1 GPU, cuda:0" if count == 1 else f"{count} GPUs, cuda:0 to cuda:{count - 1}"
        raise InvalidRequestError(f"device 'cuda:{index}' does not exist: this machine has {available}", "device")
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        raise MissingDependencyError(
            f"device 'cuda:{index}': {torch.cuda.get_device_name(index)} has compute capability "
            f"{capability[0]}.{capability[1]}, and the kernels need {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or newer: "
            "use device cpu"
        )
    return index


def has_fp8(device: torch.device) -> bool:
    """Return whether the GPU has instructions for e4m3: products and conversions."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= MIN_FP8_CAPABILITY


@cache
def has_wgmma(device: torch.device) -> bool:
    """Return whether the GPU runs kernels/gemm_hopper.py, whose instructions only capability 9.0 has."""
    capability = (9, 0) if device.type == "cpu" else torch.cuda.get_device_capability(device)
    return capability == (9, 0) and not is_interpreted()


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of the GPU; under the interpreter, of an H200."""
    return 132 if device.type == "cpu" else int(torch.cuda.get_device_properties(device).multi_processor_count)


def require_fp8(device: torch.device) -> None:
    """Raise if the tensor cores of the GPU do not multiply e4m3."""
    if not has_fp8(device):
        capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
        raise InvalidRequestError(
            f"quantize fp8 needs a GPU of compute capability {MIN_FP8_CAPABILITY[0]}.{MIN_FP8_CAPABILITY[1]} or newer, "
            f"and {name} has {capability[0]}.{capability[1]}: use quantize Q8_0",
            "quantize",
        )


@cache
def has_pdl(device: torch.device) -> bool:
    """Return whether a kernel may start before the previous one has ended (PDL)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_PDL_CAPABILITY


def pdl_options(pdl: bool) -> dict[str, Any]:
    """Return the launch option of a kernel that waits for the previous one itself."""
    return {"launch_pdl": True} if pdl else {}


def activate(device: torch.device) -> None:
    """Make it the current GPU of the calling thread: PyTorch has one per thread, initially the first."""
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        torch.cuda.set_device(device)


def shared_memory_bytes(device: torch.device) -> int:
    """Return the shared memory that a program may have."""
    if device.type == "cpu":
        return 1 << 20
    return SHARED_KB.get(torch.cuda.get_device_capability(device), MIN_SHARED_KB) << 10


def upload(array: NDArray[Any] | torch.Tensor, device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Copy an array to the device; the host does not wait. A tensor is there already."""
    if isinstance(array, torch.Tensor):
        return array.to(dtype)
    if device.type == "cpu":
        return torch.tensor(array, dtype=dtype)
    pinned = torch.empty(array.shape, dtype=dtype, pin_memory=True)
    pinned.copy_(torch.from_numpy(np.ascontiguousarray(array)))
    return pinned.to(device, non_blocking=True)


@contextmanager
def copying_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Copy on this stream: on that of the steps, each copy would wait for the steps that are launched."""
    with torch.cuda.stream(stream):  # None: no other one
        yield
    if stream is not None:
        stream.synchronize()


@contextmanager
def as_memory_error() -> Iterator[None]:
    """Raise MemoryError if the device runs out of memory, as the host does."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from None
