"""Which device the backend computes on, and how numbers of the host get there.

Under Triton's interpreter (TRITON_INTERPRET=1) every tensor is the CPU's, so that the whole backend runs without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from ... import machine
from ...errors import InvalidRequestError, MissingDependencyError

SHARED_KB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}  # by compute capability
LEAST_SHARED_KB = 99
_chosen: list[torch.device] = []


def interpreting() -> bool:
    """Whether kernels run under the interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def use(index: int) -> None:
    """Compute on GPU `index` from now on."""
    if interpreting():
        _chosen[:] = [torch.device("cpu")]
        return
    if not torch.cuda.is_available():
        raise MissingDependencyError("device 'cuda': PyTorch finds no NVIDIA GPU: use device cpu, or install a driver")
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise InvalidRequestError(
            f"device 'cuda:{index}': there are {count} GPUs, cuda:0 to cuda:{count - 1}", "device"
        )
    torch.cuda.set_device(index)
    _chosen[:] = [torch.device("cuda", index)]


def current() -> torch.device:
    """The device in use: the first GPU where none was chosen."""
    if not _chosen:
        use(0)
    return _chosen[0]


def activate() -> None:
    """Make it the calling thread's: PyTorch has a current GPU for each thread, and it begins with the first."""
    where = current()
    if where.type == "cuda" and torch.cuda.current_device() != where.index:
        torch.cuda.set_device(where)


def shared_memory() -> int:
    """Bytes of shared memory that a program may have."""
    if current().type == "cpu":
        return 1 << 20
    return SHARED_KB.get(torch.cuda.get_device_capability(current()), LEAST_SHARED_KB) << 10


def upload(ints: NDArray[Any], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Numbers of the host, on the device; the host does not wait."""
    device = current()
    if device.type == "cpu":
        return torch.tensor(ints, dtype=dtype)
    pinned = torch.empty(ints.shape, dtype=dtype, pin_memory=True)
    pinned.copy_(torch.from_numpy(np.ascontiguousarray(ints)))
    return pinned.to(device, non_blocking=True)


@contextmanager
def memory_errors() -> Iterator[None]:
    """A device without room is told as a host without: with MemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from None


def is_lost() -> bool:
    """Whether the device computes no more: an illegal access, say, ends all that a process can do on it."""
    if current().type == "cpu":
        return False
    try:
        torch.cuda.synchronize(current())
    except Exception:  # whatever it says, nothing will come
        return True
    return False


def give_back() -> None:
    """Memory that the allocator keeps for later goes back to the device."""
    if current().type == "cuda":
        torch.cuda.empty_cache()


def allocated_bytes() -> int:
    """Memory of the device that our tensors take."""
    return int(torch.cuda.memory_allocated(current())) if current().type == "cuda" else 0


def free_bytes() -> int:
    """Memory of the device that nobody has, with what the allocator keeps for us."""
    device = current()
    if device.type == "cpu":
        return machine.memory()[1] or 0
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


OLDEST_FP8 = (8, 9)  # e4m3 in the tensor cores
OLDEST = (8, 0)  # compute capability: bfloat16 products, and the instructions of intrinsics.py


def require(index: int | None) -> int:
    """The number of the GPU to use: that one, or the one with most free memory."""
    if interpreting():
        return index or 0
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
        there = "1 GPU, cuda:0" if count == 1 else f"{count} GPUs, cuda:0 to cuda:{count - 1}"
        raise InvalidRequestError(f"device 'cuda:{index}' is not there: this machine has {there}", "device")
    _require_new(index)
    return index


def _require_new(index: int) -> None:
    found = torch.cuda.get_device_capability(index)
    if found < OLDEST:
        raise MissingDependencyError(
            f"device 'cuda:{index}': {torch.cuda.get_device_name(index)} has compute capability "
            f"{found[0]}.{found[1]}, and the kernels need {OLDEST[0]}.{OLDEST[1]} or newer: use device cpu"
        )


def require_fp8() -> None:
    """Refuse `quantize fp8` where the GPU in use does not multiply e4m3."""
    if interpreting():
        return
    found, name = torch.cuda.get_device_capability(current()), torch.cuda.get_device_name(current())
    if found < OLDEST_FP8:
        raise InvalidRequestError(
            f"quantize fp8 needs a GPU of compute capability {OLDEST_FP8[0]}.{OLDEST_FP8[1]} or newer, and {name} has "
            f"{found[0]}.{found[1]}: use quantize Q8_0",
            "quantize",
        )
