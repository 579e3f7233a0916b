"""Quantize float32 values into GGML blocks, for the types that `convert` writes.

Plain types and Q4_0 .. Q8_0 follow the rule that defines them (the largest value sets the scale) and give the same
bytes as ggml; the K types search their scales (fit.py), so their bytes differ from ggml's.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelFileError, UnsupportedModelError
from ..quants import BlockType
from . import encode
from .fit import Bytes, Floats

Encoder = Callable[[Floats], Bytes]

# (blocks, block_size) float32 -> (blocks, block_bytes) uint8
ENCODERS: dict[str, Encoder] = {
    "F32": encode.f32,
    "F16": encode.f16,
    "BF16": encode.bf16,
    "Q4_0": encode.q4_0,
    "Q4_1": encode.q4_1,
    "Q5_0": encode.q5_0,
    "Q5_1": encode.q5_1,
    "Q8_0": encode.q8_0,
    "Q4_K": encode.q4_k,
    "Q5_K": encode.q5_k,
    "Q6_K": encode.q6_k,
}
# The largest value that each type can hold; types that are not listed have float16 scales.
MAX_VALUE = {"F32": 3.4028235e38, "BF16": 3.3895314e38}
MAX_F16 = 65504.0
SLAB_VALUES = 1 << 18  # fits a cache, and large enough that threads seldom wait for the GIL


def quantize(kind: BlockType, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return a matrix (rows, columns) as bytes of a block type: (nbytes,). Raises for NaN and values out of range."""
    if kind.name not in ENCODERS:
        raise UnsupportedModelError(f"{kind.name} can be read but not written: use one of {', '.join(ENCODERS)}")
    nbytes = values.size // max(values.shape[-1], 1) * kind.row_bytes(values.shape[-1])
    _check_range(kind, values)
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, kind.block_size)
    out = np.empty((nbytes // kind.block_bytes, kind.block_bytes), np.uint8)
    step = SLAB_VALUES // kind.block_size
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            out[start : start + step] = ENCODERS[kind.name](blocks[start : start + step])
    return out.reshape(-1)


def _check_range(kind: BlockType, values: NDArray[np.float32]) -> None:
    high, low = (float(find(values)) if values.size else 0.0 for find in (np.max, np.min))
    limit = MAX_VALUE.get(kind.name, MAX_F16)
    if not (high <= limit and low >= -limit):  # NaN compares false, so it is rejected too
        raise ModelFileError(f"a value of {high if not high <= limit else low:g} does not fit into {kind.name}")
