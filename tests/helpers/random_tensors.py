"""Random tensors of every quantization type, with scales of a sensible size; the relative error of a result."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_worker_rbee.weights import Tensor
from llm_worker_rbee.weights.quants import ALL_TYPES, GROUP_TYPES

# Where a block's float16 scales lie: (byte, how many), where it is not one at byte 0.
HALVES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 2), "Q3_K": (108, 1), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208, 1),
    "TQ1_0": (52, 1), "TQ2_0": (64, 1),
}  # fmt: skip
NUMBERS: dict[str, Any] = {"F16": np.float16, "F32": np.float32, "F64": np.float64, "BF16": np.float32}
EXACT = (  # types that are packed without rounding
    "F16", "BF16", "F32", "F64", "I8", "I16", "I32", "I64", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q1_0",
    "Q2_0", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "IQ4_NL",
)  # fmt: skip


def random_tensor(name: str, rows: int, columns: int, rng: np.random.Generator, size: float = 1.0) -> Tensor:
    """Make random codes with scales of 0.1 to 1 times `size`."""
    kind = ALL_TYPES[name]
    if name in NUMBERS:
        numbers = (rng.standard_normal((rows * columns, 1)) * size).astype(NUMBERS[name]).view(np.uint8)
        return Tensor("w", kind, (rows, columns), _flat(numbers[:, 2:] if name == "BF16" else numbers))
    raw = rng.integers(0, 256, (rows * columns // kind.block_size, kind.block_bytes), dtype=np.uint8)
    if name == "Q8_K":
        raw[:, :4] = (_scales(rng, len(raw), 1) * size).astype(np.float32).view(np.uint8)
    elif name in GROUP_TYPES:
        count = 2 if name in ("INT4_ZP", "NVFP4_F32") else 1
        raw[:, : 4 * count] = (_scales(rng, len(raw), count) * size).astype(np.float32).view(np.uint8)
        if name == "INT4_ZP":
            raw[:, 4:8] = rng.integers(0, 16, (len(raw), 1)).astype(np.float32).view(np.uint8)
        if name == "FP8":
            raw[:, 4:] &= 0xBF  # numbers below 2, none of them NaN
    elif name == "MXFP4":
        raw[:, 0] = rng.integers(120, 130, len(raw))
    elif name == "NVFP4":
        raw[:, :4] = rng.integers(10, 0x7E, (len(raw), 4))
    elif name == "IQ1_M":  # the four upper nibbles are the float16 0x3C00 ..: about 1
        raw[:, 49::2] &= 15
        raw[:, 53] |= rng.integers(0, 16, len(raw), dtype=np.uint8) << 4
        raw[:, 55] |= 0x30
    elif not name.startswith("I") or name.startswith("IQ"):
        at, count = HALVES.get(name, (0, 1))
        raw[:, at : at + 2 * count] = (_scales(rng, len(raw), count) * size).astype(np.float16).view(np.uint8)
    return Tensor("w", kind, (rows, columns), _flat(raw))


def _scales(rng: np.random.Generator, blocks: int, count: int) -> NDArray[np.float64]:
    return 0.1 + 0.9 * rng.random((blocks, count))


def _flat(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(raw).reshape(-1)


def relative_error(found: Any, wanted: Any) -> float:
    """Return the norm of the difference relative to the norm."""
    found, wanted = (np.asarray(x.cpu() if hasattr(x, "cpu") else x, np.float64) for x in (found, wanted))
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
