"""Every GGML block type: name, id (of ggml.h), size, NumPy decoder to float32, and where a NaN would stand.

A tensor is rows of blocks; a block holds `block_size` neighbours of the last axis in `block_bytes` bytes. A non-finite
scale decodes to non-finite values without a warning: the loader checks for them. Encoders are in `quantize`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from math import prod

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelFileError
from . import decoders

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
    ("F32", 0, 1, 4, decoders.decode_plain("<f4")),
    ("F16", 1, 1, 2, decoders.f16),
    ("Q4_0", 2, 32, 18, decoders.q4_0),
    ("Q4_1", 3, 32, 20, decoders.q4_1),
    ("Q5_0", 6, 32, 22, decoders.q5_0),
    ("Q5_1", 7, 32, 24, decoders.q5_1),
    ("Q8_0", 8, 32, 34, decoders.q8_0),
    ("Q8_1", 9, 32, 36, decoders.q8_1),
    ("Q2_K", 10, 256, 84, decoders.q2_k),
    ("Q3_K", 11, 256, 110, decoders.q3_k),
    ("Q4_K", 12, 256, 144, decoders.q4_k),
    ("Q5_K", 13, 256, 176, decoders.q5_k),
    ("Q6_K", 14, 256, 210, decoders.q6_k),
    ("Q8_K", 15, 256, 292, decoders.q8_k),
    ("IQ2_XXS", 16, 256, 66, decoders.iq2_xxs),
    ("IQ2_XS", 17, 256, 74, decoders.iq2_xs),
    ("IQ3_XXS", 18, 256, 98, decoders.iq3_xxs),
    ("IQ1_S", 19, 256, 50, decoders.iq1_s),
    ("IQ4_NL", 20, 32, 18, decoders.iq4_nl),
    ("IQ3_S", 21, 256, 110, decoders.iq3_s),
    ("IQ2_S", 22, 256, 82, decoders.iq2_s),
    ("IQ4_XS", 23, 256, 136, decoders.iq4_xs),
    ("I8", 24, 1, 1, decoders.decode_plain("<i1")),
    ("I16", 25, 1, 2, decoders.decode_plain("<i2")),
    ("I32", 26, 1, 4, decoders.decode_plain("<i4")),
    ("I64", 27, 1, 8, decoders.decode_plain("<i8")),
    ("F64", 28, 1, 8, decoders.decode_plain("<f8")),
    ("IQ1_M", 29, 256, 56, decoders.iq1_m),
    ("BF16", 30, 1, 2, decoders.bf16),
    ("TQ1_0", 34, 256, 54, decoders.tq1_0),
    ("TQ2_0", 35, 256, 66, decoders.tq2_0),
    ("MXFP4", 39, 32, 17, decoders.mxfp4),
    ("NVFP4", 40, 64, 36, decoders.nvfp4),
    ("Q1_0", 41, 128, 18, decoders.q1_0),
    ("Q2_0", 42, 64, 18, decoders.q2_0),
)

BLOCK_TYPES: dict[str, BlockType] = {row[0]: BlockType(*row[:4], _quiet(row[4])) for row in _TABLE}
# Types of quantized safetensors, which GGUF does not have; what makes their blocks refuses NaN.
NO_GGUF_ID = -2
_GROUP_TABLE: tuple[tuple[str, int, Decoder], ...] = (
    ("INT4", 20, decoders.int4),
    ("INT4_ZP", 24, decoders.int4_zp),
    ("INT8", 36, decoders.int8),
    ("FP8", 36, decoders.fp8),
    ("NVFP4_F32", 24, decoders.nvfp4_f32),
)
GROUP_TYPES = {name: BlockType(name, NO_GGUF_ID, 32, size, _quiet(decode)) for name, size, decode in _GROUP_TABLE}
ALL_TYPES = BLOCK_TYPES | GROUP_TYPES
BY_ID: dict[int, BlockType] = {kind.id: kind for kind in BLOCK_TYPES.values()}

# Ids of old files that ggml itself no longer reads.
REMOVED_TYPES = {
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


# Where a block shows that a scale is NaN or infinite, without decoding: every exponent bit is set, in one or two bytes,
# ((byte, mask), ...). Types without an entry cannot hold such a scale (NVFP4 decodes its only NaN as 0).
Bits = tuple[tuple[int, int], ...]
NAN_SLAB_BLOCKS = 1 << 18  # bounds the temporary arrays, so that they fit a cache


def _halves(*offsets: int) -> tuple[Bits, ...]:
    """Return the exponent bits of float16 numbers: bits 2 to 6 of the upper byte."""
    return tuple(((at + 1, 0x7C),) for at in offsets)


SCALE_BITS: dict[str, tuple[Bits, ...]] = {
    **dict.fromkeys(("F16", "Q1_0", "Q2_0", "Q4_0", "Q5_0", "Q8_0", "Q8_1", "IQ4_NL", "IQ4_XS"), _halves(0)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), _halves(0)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), _halves(0, 2)),
    "Q2_K": _halves(80, 82),
    "Q3_K": _halves(108),
    "Q6_K": _halves(208),
    "TQ1_0": _halves(52),
    "TQ2_0": _halves(64),
    **dict.fromkeys(("F32", "Q8_K"), (((3, 0x7F), (2, 0x80)),)),
    "BF16": (((1, 0x7F), (0, 0x80)),),
    "F64": (((7, 0x7F), (6, 0xF0)),),
    "IQ1_M": (((55, 0x70), (53, 0xC0)),),  # its float16 lies in the top nibbles of four words
    "MXFP4": (((0, 0xFF),),),  # E8M0: 255 is NaN
}


def find_nonfinite_block(kind: BlockType, data: NDArray[np.uint8]) -> int | None:
    """Return the first block with a NaN or infinite scale (or value, in a plain type), or None."""
    blocks = data.reshape(-1, kind.block_bytes)
    first_nonfinite = _first_nonfinite_value if kind.block_size == 1 else _first_nonfinite
    for bits in SCALE_BITS.get(kind.name, ()):
        for start in range(0, len(blocks), NAN_SLAB_BLOCKS):
            index = first_nonfinite(blocks[start : start + NAN_SLAB_BLOCKS], bits)
            if index is not None:
                return start + index
    return None


def _first_nonfinite(blocks: NDArray[np.uint8], bits: Bits) -> int | None:
    bad = np.ones(len(blocks), np.bool_)
    for byte, mask in bits:
        bad &= (blocks[:, byte] & np.uint8(mask)) == mask
        if not bad.any():
            return None
    return int(bad.argmax())


def _first_nonfinite_value(blocks: NDArray[np.uint8], bits: Bits) -> int | None:
    """Check values of a plain type as integers: NumPy has SIMD loops for these, and none for one byte in several."""
    words = np.ascontiguousarray(blocks).view(f"<u{blocks.shape[1]}")[:, 0]
    exponent = words.dtype.type(sum(mask << (8 * byte) for byte, mask in bits))
    exponents = words & exponent
    return int((exponents == exponent).argmax()) if exponents.max() == exponent else None
