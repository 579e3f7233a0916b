"""Decoders of the IQ types: super-blocks of 256 values, stored as indices into a codebook of rows of 4 or 8 values.

A decoder maps (blocks, block_bytes) uint8 to (blocks, 256) float32. Layouts list the fields of a block with sizes in
bytes; `d` is float16. x = group scale * codebook value * sign, unless noted.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .basic import Bytes, Floats, apply_scale, f16_to_f32, field, join_bits, read_f16, to_signed, unpack_bits
from .codebooks import IQ4_VALUES, even_sign_rows, grid, sign_rows, value_table

HALF, QUARTER = np.float32(0.5), np.float32(0.25)
IQ1_DELTA = np.float32(0.125)

Codes = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]
Number = TypeVar("Number", np.float32, np.int8)


def _rows(table: NDArray[Number], index: Codes) -> NDArray[Number]:
    """Gather rows of a table, side by side: (blocks, n) -> (blocks, n * width)."""
    return table.take(index, axis=0).reshape(len(index), index.shape[1] * table.shape[1])


def _signed_rows(book: Floats, index: Codes, sign_table: NDArray[np.int8], signs: Codes) -> Floats:
    values = _rows(book, index)
    values *= _rows(sign_table, signs)
    return values


def _wide_index(high: Codes, low: Bytes) -> NDArray[np.uint16]:
    """Return high << 8 | low."""
    index = high.astype(np.uint16)
    index <<= np.uint16(8)
    index |= low
    return index


def _scales_and_signs(words: NDArray[np.uint32]) -> tuple[Floats, Codes]:
    """(blocks, 8) words of a group of 32: ssss ggggggg fffffff eeeeeee ddddddd = 4-bit scale, 4 x 7 bits of signs."""
    signs = (words[..., None] >> np.array([0, 7, 14, 21], np.uint32)) & np.uint32(127)
    return (words >> np.uint32(28)).astype(np.float32), signs.reshape(len(words), 32)


def iq2_xxs(blocks: Bytes) -> Floats:
    """d 2 | for each of 8 groups of 32: 4 bytes of indices, then a word of scale and signs."""
    words = field(blocks, 2, 64).view("<u4")
    scale, signs = _scales_and_signs(words[:, 1::2])
    index = np.ascontiguousarray(words[:, 0::2]).view(np.uint8)
    values = _signed_rows(grid("IQ2_XXS"), index, even_sign_rows(), signs)
    return apply_scale(values, read_f16(blocks, 0) * (HALF + scale) * QUARTER)


def iq2_xs(blocks: Bytes) -> Floats:
    """d 2 | 32 uint16, each 7 bits of signs << 9 | 9 bits of index | 8 bytes of two 4-bit scales, one a group of 16."""
    codes = field(blocks, 2, 64).view("<u2")
    values = _signed_rows(grid("IQ2_XS"), codes & np.uint16(511), even_sign_rows(), codes >> np.uint16(9))
    scale = unpack_bits(field(blocks, 66, 8), 1, 4)
    return apply_scale(values, read_f16(blocks, 0) * (HALF + scale) * QUARTER)


def iq2_s(blocks: Bytes) -> Floats:
    """d 2 | 32 low bytes of indices | 32 bytes of signs | 8 bytes of 4 x 2 high bits | 8 bytes of two 4-bit scales."""
    index = _wide_index(unpack_bits(field(blocks, 66, 8), 1, 2), field(blocks, 2, 32))
    values = _signed_rows(grid("IQ2_S"), index, sign_rows(), field(blocks, 34, 32))
    scale = unpack_bits(field(blocks, 74, 8), 1, 4)
    return apply_scale(values, read_f16(blocks, 0) * (HALF + scale) * QUARTER)


def iq3_xxs(blocks: Bytes) -> Floats:
    """d 2 | 64 bytes of indices to rows of 4 | 8 words of scale and signs, one a group of 32."""
    scale, signs = _scales_and_signs(field(blocks, 66, 32).view("<u4"))
    values = _signed_rows(grid("IQ3_XXS"), field(blocks, 2, 64), even_sign_rows(), signs)
    return apply_scale(values, read_f16(blocks, 0) * (HALF + scale) * HALF)


def iq3_s(blocks: Bytes) -> Floats:
    """d 2 | 64 low bytes of indices to rows of 4 | 8 bytes of ninth bits | 32 bytes of signs | 4 bytes of 4-bit scales.

    Scale of a group of 32: d * (1 + 2 * s).
    """
    index = _wide_index(unpack_bits(field(blocks, 66, 8), 1, 1), field(blocks, 2, 64))
    values = _signed_rows(grid("IQ3_S"), index, sign_rows(), field(blocks, 74, 32))
    scale = unpack_bits(field(blocks, 106, 4), 1, 4)
    return apply_scale(values, read_f16(blocks, 0) * (np.uint8(1) + np.uint8(2) * scale))


def _shifted_rows(index: Codes, downward: NDArray[np.bool_]) -> Floats:
    """Gather rows of IQ1's codebook (-1, 0, 1), shifted by an eighth up or down: (blocks, 32) -> (blocks, 256)."""
    values = grid("IQ1_S").take(index, axis=0)
    values += np.where(downward, -IQ1_DELTA, IQ1_DELTA)[..., None]
    return values.reshape(len(index), 256)


def iq1_s(blocks: Bytes) -> Floats:
    """d 2 | 32 low bytes of indices | 8 uint16, one a group of 32: x'sss'ccc'bbb'aaa'999.

    999 .. ccc: high 3 bits of the group's 4 indices, in order; sss: scale d * (1 + 2 * s); x: the shift is downward.
    """
    words: NDArray[np.uint16] = field(blocks, 34, 16).view("<u2")
    high = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16)) & np.uint16(7)
    index = _wide_index(high.reshape(len(blocks), 32), field(blocks, 2, 32))
    scale = np.uint16(2) * (words >> np.uint16(12) & np.uint16(7)) + np.uint16(1)
    values = _shifted_rows(index, np.repeat(words > 0x7FFF, 4, axis=1))
    return apply_scale(values, read_f16(blocks, 0) * scale)


def iq1_m(blocks: Bytes) -> Floats:
    """32 low bytes of indices | 16 bytes of nibbles x'hhh | 4 uint16 e'ddd'ccc'bbb'aaa.

    x: the shift is downward; hhh: high 3 bits of the index. aaa .. ddd: scales of 4 groups of 16, as in IQ1_S.
    The four e, 4 bits each, lowest first, are the float16 d.
    """
    words: NDArray[np.uint16] = field(blocks, 48, 8).view("<u2")
    parts = (words >> np.uint16(12)) << np.array([0, 4, 8, 12], np.uint16)
    d = f16_to_f32(np.bitwise_or.reduce(parts, axis=1, keepdims=True))
    scale = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16)) & np.uint16(7)
    high = unpack_bits(field(blocks, 32, 16), 1, 4)
    index = _wide_index(high & np.uint8(7), field(blocks, 0, 32))
    values = _shifted_rows(index, high > 7)
    return apply_scale(values, d * (np.uint16(2) * scale.reshape(len(blocks), 16) + np.uint16(1)))


def iq4_xs(blocks: Bytes) -> Floats:
    """d 2 | 2 bytes of 2 high scale bits | 4 bytes of 4 low scale bits | 8 groups of 16 bytes of nibbles as in IQ4_NL.

    Scale of a group of 32: d * (s - 32).
    """
    scale = join_bits(unpack_bits(field(blocks, 2, 2), 1, 2), unpack_bits(field(blocks, 4, 4), 1, 4), 4)
    values = value_table(IQ4_VALUES).take(unpack_bits(field(blocks, 8, 128), 16, 4))
    return apply_scale(values, read_f16(blocks, 0) * to_signed(scale, 32))
