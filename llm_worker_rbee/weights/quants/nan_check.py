"""Search for NaN and infinite scales without decoding a tensor.

A number is non-finite if every exponent bit is set, which one or two bytes of the block show: ((byte, mask), ...),
non-finite where all masked bits are set. Types without an entry cannot hold one (NVFP4 decodes its only NaN as 0).
"""

import numpy as np
from numpy.typing import NDArray

from . import BlockType

Bits = tuple[tuple[int, int], ...]
SLAB_BLOCKS = 1 << 20  # bounds the temporary arrays


def _halves(*offsets: int) -> tuple[Bits, ...]:
    """Return the exponent bits of float16 numbers: bits 2 to 6 of the upper byte."""
    return tuple(((at + 1, 0x7C),) for at in offsets)


SCALE_BITS: dict[str, tuple[Bits, ...]] = {
    "F16": _halves(0), "Q4_0": _halves(0), "Q4_1": _halves(0, 2), "Q5_0": _halves(0), "Q5_1": _halves(0, 2),
    "Q8_0": _halves(0), "Q8_1": _halves(0), "Q2_K": _halves(80, 82), "Q3_K": _halves(108), "Q4_K": _halves(0, 2),
    "Q5_K": _halves(0, 2), "Q6_K": _halves(208), "IQ2_XXS": _halves(0), "IQ2_XS": _halves(0), "IQ2_S": _halves(0),
    "IQ3_XXS": _halves(0), "IQ3_S": _halves(0), "IQ1_S": _halves(0), "IQ4_NL": _halves(0), "IQ4_XS": _halves(0),
    "TQ1_0": _halves(52), "TQ2_0": _halves(64), "Q1_0": _halves(0), "Q2_0": _halves(0),
    "BF16": (((1, 0x7F), (0, 0x80)),),
    "F32": (((3, 0x7F), (2, 0x80)),),
    "Q8_K": (((3, 0x7F), (2, 0x80)),),
    "F64": (((7, 0x7F), (6, 0xF0)),),
    "IQ1_M": (((55, 0x70), (53, 0xC0)),),  # its float16 lies in the top nibbles of four words
    "MXFP4": (((0, 0xFF),),),  # E8M0: 255 is NaN
}  # fmt: skip


def find_nonfinite_block(kind: BlockType, data: NDArray[np.uint8]) -> int | None:
    """Return the first block with a NaN or infinite scale (or value, in a plain type), or None."""
    blocks = data.reshape(-1, kind.block_bytes)
    for bits in SCALE_BITS.get(kind.name, ()):
        for start in range(0, len(blocks), SLAB_BLOCKS):
            found = _first_nonfinite(blocks[start : start + SLAB_BLOCKS], bits)
            if found is not None:
                return start + found
    return None


def _first_nonfinite(blocks: NDArray[np.uint8], bits: Bits) -> int | None:
    bad: NDArray[np.bool_] | None = None
    for byte, mask in bits:
        here = (blocks[:, byte] & np.uint8(mask)) == mask
        bad = here if bad is None else bad & here
        if not bad.any():
            return None
    return None if bad is None else int(bad.argmax())
