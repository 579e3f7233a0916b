"""What can be known of a GPU without PyTorch: driver files, missing packages, the size of packed weights.

PyTorch takes seconds to import, so cuda/ is imported only where a driver is found or a GPU is requested.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping
from pathlib import Path

from ..config import DEVICE_SPARE_BYTES
from ..errors import InvalidRequestError, human_bytes
from ..weights import Checkpoint

DRIVER_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libcuda.so.1")
REQUIRED_PACKAGES = ("torch", "triton")
INSTALL_COMMAND = "pip install 'llm-worker-rbee[cuda]'"
# Bits per weight as cuda/repack.py packs it, with scales; every other type becomes float32.
PACKED_BITS = {
    name: bits
    for bits, names in {
        4.5: "Q4_0 Q1_0 Q2_0 TQ1_0 TQ2_0",
        5.0: "Q4_1 Q4_K",
        5.5: "Q5_0 MXFP4 IQ1_S IQ3_S",
        6.0: "Q5_1 Q5_K Q2_K",
        7.0: "Q6_K Q3_K NVFP4 IQ1_M",
        8.5: "Q8_0 Q8_1 Q8_K IQ2_XXS IQ3_XXS IQ4_NL IQ4_XS",
        9.0: "IQ2_XS IQ2_S",
        16.0: "F16 BF16",
        8.0: "fp8",  # the scale of a row is 32 bits more
    }.items()
    for name in names.split()
}


def has_driver() -> bool:
    """Return whether files of the NVIDIA driver exist and the environment does not hide its GPUs."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    return any(Path(name).exists() for name in DRIVER_FILES)


def parse_gpu_index(device: str) -> int | None:
    """Return the number of `cuda:N`; None for `cuda`."""
    _, colon, number = device.partition(":")
    if colon and not (number.isascii() and number.isdigit() and len(number) <= 4):
        raise InvalidRequestError(f"unknown device {device!r}: a GPU is cuda, or cuda:N with its number", "device")
    return int(number) if colon else None


def missing_packages() -> list[str]:
    """Return those of PyTorch and Triton that are not installed."""
    return [name for name in REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]


def packed_bytes(checkpoint: Checkpoint, kinds: Mapping[str, str] | None = None) -> int:
    """Return the bytes of a checkpoint's weights on a GPU; `kinds` overrides quantization types by name."""
    bits = 0.0
    for name, tensor in checkpoint.tensors.items():
        kind = (kinds or {}).get(name) or tensor.pack_as or tensor.kind.name
        each = PACKED_BITS.get(kind, 32.0) if len(tensor.shape) > 1 else 32.0
        bits += each * math.prod(tensor.shape)
    return int(bits / 8)


def missing_packages_note() -> str | None:
    """Return a note if the packages to use a GPU are missing."""
    missing = missing_packages()
    return f"there is an NVIDIA GPU; to compute on it: {INSTALL_COMMAND}" if missing else None


def shortage_note(free: int, needed: int) -> str | None:
    """Return a note if weights of `needed` bytes do not fit into `free` bytes beside what everything else takes."""
    total = needed + DEVICE_SPARE_BYTES
    if free >= total:
        return None
    sizes = f"the GPU has {human_bytes(free)} of memory free, and the model takes {human_bytes(total)}"
    return f"{sizes}: computing on the CPU"
