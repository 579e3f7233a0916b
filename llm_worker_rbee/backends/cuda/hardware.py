"""Which GPUs PyTorch finds, and whether the kernels run on them; what is wrong is said in one line with a remedy."""

from __future__ import annotations

import torch

from ...errors import InvalidRequestError, MissingDependencyError
from .device import current, interpreting

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
