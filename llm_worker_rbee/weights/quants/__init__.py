"""Every GGML block type: name, id (of ggml.h), size, and a NumPy decoder to float32. Encoders are in `quantize`.

A tensor is rows of blocks; a block holds `block_size` neighbours of the last axis in `block_bytes` bytes. A non-finite
scale decodes to non-finite values without a warning: the loader checks for them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from math import prod

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelFileError
from . import basic, iq, k

Decoder = Callable[[NDArray[np.uint8]], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class BlockType:
    """One block type; `decode` maps (blocks, block_bytes) uint8 to (blocks, block_size) float32."""

    name: str
    id: int
    block_size: int
    block_bytes: int
    decode: Decoder

    def row_bytes(self, n: int) -> int:
        """Return the bytes of a row of n values."""
        if n % self.block_size:
            raise ModelFileError(f"a row of {n} values is not a multiple of the {self.name} block of {self.block_size}")
        return n // self.block_size * self.block_bytes


def _quiet(decode: Decoder) -> Decoder:
    @wraps(decode)
    def decode_quietly(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
        with np.errstate(all="ignore"):
            return decode(blocks)

    return decode_quietly


_TABLE: tuple[tuple[str, int, int, int, Decoder], ...] = (
    ("F32", 0, 1, 4, basic.decode_plain("<f4")),
    ("F16", 1, 1, 2, basic.f16),
    ("Q4_0", 2, 32, 18, basic.q4_0),
    ("Q4_1", 3, 32, 20, basic.q4_1),
    ("Q5_0", 6, 32, 22, basic.q5_0),
    ("Q5_1", 7, 32, 24, basic.q5_1),
    ("Q8_0", 8, 32, 34, basic.q8_0),
    ("Q8_1", 9, 32, 36, basic.q8_1),
    ("Q2_K", 10, 256, 84, k.q2_k),
    ("Q3_K", 11, 256, 110, k.q3_k),
    ("Q4_K", 12, 256, 144, k.q4_k),
    ("Q5_K", 13, 256, 176, k.q5_k),
    ("Q6_K", 14, 256, 210, k.q6_k),
    ("Q8_K", 15, 256, 292, k.q8_k),
    ("IQ2_XXS", 16, 256, 66, iq.iq2_xxs),
    ("IQ2_XS", 17, 256, 74, iq.iq2_xs),
    ("IQ3_XXS", 18, 256, 98, iq.iq3_xxs),
    ("IQ1_S", 19, 256, 50, iq.iq1_s),
    ("IQ4_NL", 20, 32, 18, basic.iq4_nl),
    ("IQ3_S", 21, 256, 110, iq.iq3_s),
    ("IQ2_S", 22, 256, 82, iq.iq2_s),
    ("IQ4_XS", 23, 256, 136, iq.iq4_xs),
    ("I8", 24, 1, 1, basic.decode_plain("<i1")),
    ("I16", 25, 1, 2, basic.decode_plain("<i2")),
    ("I32", 26, 1, 4, basic.decode_plain("<i4")),
    ("I64", 27, 1, 8, basic.decode_plain("<i8")),
    ("F64", 28, 1, 8, basic.decode_plain("<f8")),
    ("IQ1_M", 29, 256, 56, iq.iq1_m),
    ("BF16", 30, 1, 2, basic.bf16),
    ("TQ1_0", 34, 256, 54, basic.tq1_0),
    ("TQ2_0", 35, 256, 66, basic.tq2_0),
    ("MXFP4", 39, 32, 17, basic.mxfp4),
    ("NVFP4", 40, 64, 36, basic.nvfp4),
    ("Q1_0", 41, 128, 18, basic.q1_0),
    ("Q2_0", 42, 64, 18, basic.q2_0),
)

BLOCK_TYPES: dict[str, BlockType] = {row[0]: BlockType(*row[:4], _quiet(row[4])) for row in _TABLE}
BY_ID: dict[int, BlockType] = {kind.id: kind for kind in BLOCK_TYPES.values()}

# Ids of old files that ggml itself no longer reads.
REMOVED_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


def dequantize(kind: BlockType, data: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Decode bytes into a float32 tensor of this shape (NumPy order).

    `data` may have any shape and may be a read-only view of a mapped file. F32 data is returned as a view.
    """
    rows, row = prod(shape[:-1]), shape[-1] if shape else 1
    expected = rows * kind.row_bytes(row)
    if data.size != expected:
        raise ModelFileError(f"a {kind.name} tensor of shape {shape} takes {expected} bytes, not {data.size}")
    blocks = np.ascontiguousarray(data).view(np.ndarray).reshape(expected // kind.block_bytes, kind.block_bytes)
    return kind.decode(blocks).reshape(shape)
