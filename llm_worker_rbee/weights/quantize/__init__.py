"""Values -> blocks: the way back from `quants`, for the types that are worth writing. The front door of this folder.

The plain types and Q4_0 .. Q8_0 follow the rule that defines them (the largest value sets the scale) and give the same
bytes as everyone else's; the K types search their scales (fit.py), so that their bytes are ours.
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
# The largest value that each type is given: what its float16 numbers hold, for those that have them.
MAX_VALUE = {"F32": 3.4028235e38, "BF16": 3.3895314e38}
MAX_F16 = 65504.0
SLAB_VALUES = 1 << 18  # values worked on together: few enough for a cache, enough that threads seldom wait for the GIL


def quantize(kind: BlockType, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The bytes of a matrix (rows, columns) in a block type: (nbytes,). A value that is no number is refused."""
    if kind.name not in ENCODERS:
        raise UnsupportedModelError(f"{kind.name} cannot be written, only read: use one of {', '.join(ENCODERS)}")
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
    most, least = (float(find(values)) if values.size else 0.0 for find in (np.max, np.min))
    limit = MAX_VALUE.get(kind.name, MAX_F16)
    if not (most <= limit and least >= -limit):  # so is NaN
        raise ModelFileError(f"a value of {most if not most <= limit else least:g} does not fit into {kind.name}")
