"""Decoders of all block types: plain numbers, Q4_0 .. Q8_1, 1- and 2-bit, ternary, FP4, then K types, then IQ types.

A decoder maps (blocks, block_bytes) uint8 to (blocks, block_size) float32. Layouts list the fields of a block with
sizes in bytes; `d` is the scale, `m` and `dmin` minima, float16 unless noted. NumPy costs about 7 ns per inner loop, so
runs of 16 or 32 bytes are moved as one opaque (void) item.
"""

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from . import codebooks
from .codebooks import FP4_VALUES, IQ4_VALUES, e4m3_halves, e8m0_halves, even_sign_rows, grid, sign_rows, value_table

Bytes = NDArray[np.uint8]
Codes = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]
Floats = NDArray[np.float32]
Number = TypeVar("Number", np.float32, np.int8)

HALF, QUARTER = np.float32(0.5), np.float32(0.25)
IQ1_DELTA = np.float32(0.125)


def field(blocks: Bytes, start: int, size: int) -> Bytes:
    """Return bytes start .. start+size of every block, contiguous: (blocks, size)."""
    items = np.ascontiguousarray(blocks[:, start : start + size].view(f"V{size}"))
    return items.view(np.uint8).reshape(len(blocks), size)


@cache
def _half_table() -> Floats:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def f16_to_f32(bits: NDArray[np.uint16]) -> Floats:
    """Convert float16 bits by table: 0.9 ns each; `astype` takes 1.2, and 11 for subnormals."""
    return _half_table().take(bits)


def read_f16(blocks: Bytes, start: int, count: int = 1) -> Floats:
    """Return `count` float16 numbers at `start` of every block: (blocks, count)."""
    return f16_to_f32(field(blocks, start, 2 * count).view("<u2"))


def read_f32(blocks: Bytes, start: int, count: int = 1) -> Floats:
    """Return `count` float32 numbers at `start` of every block: (blocks, count)."""
    return field(blocks, start, 4 * count).view("<f4")


def unpack_bits(packed: Bytes, width: int, bits: int) -> Bytes:
    """Unpack codes of `bits` bits; each run of `width` bytes holds 8/bits runs of `width` codes.

    bits=4, width=16:  byte i = (value i+16) << 4 | value i        -> 0..15 are low nibbles, 16..31 high nibbles
    bits=2, width=32:  byte i = v[i+96] << 6 | v[i+64] << 4 | v[i+32] << 2 | v[i]
    bits=4, width=1:   byte i = (value 2i+1) << 4 | value 2i       -> neighbours share a byte
    """
    blocks, size = packed.shape
    steps, mask, run = 8 // bits, np.uint8((1 << bits) - 1), f"V{width}"
    out = np.empty((blocks, size // width, steps), run)
    for step in range(steps):
        plane = packed >> np.uint8(step * bits) if step else packed & mask
        if 0 < step < steps - 1:
            plane &= mask
        out[..., step] = plane.view(run)
    return out.view(np.uint8).reshape(blocks, size * steps)


def join_bits(high: Bytes, low: Bytes, bits: int) -> Bytes:
    """Return high << bits | low, in place. Multiplies, as NumPy's uint8 << has no SIMD loop (nine times slower)."""
    high *= np.uint8(1 << bits)
    high |= low
    return high


def to_signed(values: Bytes, offset: int) -> NDArray[np.int8]:
    """Return values - offset, in place, as int8."""
    values -= np.uint8(offset)
    return values.view(np.int8)


def apply_scale(values: Bytes | NDArray[np.int8] | Floats, scale: Floats, minimum: Floats | None = None) -> Floats:
    """Return values * scale [- minimum]; each of the (blocks, groups) scales serves an equal run of values."""
    groups = (*scale.shape, values.shape[1] // scale.shape[1])
    out = values.astype(np.float32, order="C", copy=values.dtype != np.float32)
    grouped = out.reshape(groups)
    grouped *= scale[..., None]
    if minimum is not None:
        grouped -= minimum[..., None]
    return out


def decode_plain(dtype: str) -> Callable[[Bytes], Floats]:
    """Return a decoder of one number per block; float32 stays a view, copied only if unaligned."""

    def decode(blocks: Bytes) -> Floats:
        numbers = np.ascontiguousarray(blocks).view(dtype).astype(np.float32, copy=False)
        return np.require(numbers, requirements="A")

    return decode


def f16(blocks: Bytes) -> Floats:
    """A float16."""
    return f16_to_f32(np.ascontiguousarray(blocks).view("<u2"))


def bf16(blocks: Bytes) -> Floats:
    """The upper half of a float32."""
    wide = np.ascontiguousarray(blocks).view("<u2").astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def q4_0(blocks: Bytes) -> Floats:
    """d 2 | 16 bytes of nibbles, values i and i+16 in byte i. x = d * (q - 8)."""
    return apply_scale(to_signed(unpack_bits(field(blocks, 2, 16), 16, 4), 8), read_f16(blocks, 0))


def q4_1(blocks: Bytes) -> Floats:
    """d 2 | m 2 | 16 bytes of nibbles as in Q4_0. x = d * q + m."""
    dm = read_f16(blocks, 0, 2)
    out = apply_scale(unpack_bits(field(blocks, 4, 16), 16, 4), dm[:, :1])
    out += dm[:, 1:]
    return out


def _five_bits(blocks: Bytes, start: int) -> Bytes:
    """4 bytes of fifth bits (bit i of the little-endian uint32 belongs to value i) | 16 bytes of nibbles as in Q4_0."""
    high = np.unpackbits(field(blocks, start, 4), axis=1, bitorder="little")
    return join_bits(high, unpack_bits(field(blocks, start + 4, 16), 16, 4), 4)


def q5_0(blocks: Bytes) -> Floats:
    """d 2 | 5-bit values 20. x = d * (q - 16)."""
    return apply_scale(to_signed(_five_bits(blocks, 2), 16), read_f16(blocks, 0))


def q5_1(blocks: Bytes) -> Floats:
    """d 2 | m 2 | 5-bit values 20. x = d * q + m."""
    dm = read_f16(blocks, 0, 2)
    out = apply_scale(_five_bits(blocks, 4), dm[:, :1])
    out += dm[:, 1:]
    return out


def q8_0(blocks: Bytes) -> Floats:
    """d 2 | 32 int8. x = d * q."""
    return apply_scale(blocks[:, 2:].view(np.int8), read_f16(blocks, 0))


def q8_1(blocks: Bytes) -> Floats:
    """d 2 | s 2 (d * sum of q, a help to dot products) | 32 int8. x = d * q."""
    return apply_scale(blocks[:, 4:].view(np.int8), read_f16(blocks, 0))


def q1_0(blocks: Bytes) -> Floats:
    """d 2 | 128 bits, value i in bit i%8 of byte i/8. x = d where the bit is set, else -d."""
    bits = np.unpackbits(field(blocks, 2, 16), axis=1, bitorder="little")
    bits *= np.uint8(2)
    return apply_scale(to_signed(bits, 1), read_f16(blocks, 0))


def q2_0(blocks: Bytes) -> Floats:
    """d 2 | 64 values of 2 bits, value i in bits 2*(i%4).. of byte i/4. x = d * (q - 1)."""
    return apply_scale(to_signed(unpack_bits(field(blocks, 2, 16), 1, 2), 1), read_f16(blocks, 0))


def tq1_0(blocks: Bytes) -> Floats:
    """48 bytes of 5 trits | 4 bytes of 4 trits | d 2. x = d * (trit - 1).

    A byte b stands for the fraction b / 256 and its trits are that fraction's digits in base 3, the first one first:
    trit n = (b * 3**n mod 256) * 3 >> 8. Bytes 0..31 give values 0..159 (trit 0 of all 32 bytes, then trit 1, ...),
    bytes 32..47 give 160..239, bytes 48..51 give 240..255.
    """
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    parts = [
        (field(blocks, start, size)[:, None, :] * powers[:trits]).reshape(len(blocks), trits * size)
        for start, size, trits in ((0, 32, 5), (32, 16, 5), (48, 4, 4))
    ]
    thirds = np.concatenate(parts, axis=1).astype(np.uint16)
    thirds *= np.uint16(3)
    thirds >>= np.uint16(8)
    return apply_scale(to_signed(thirds.astype(np.uint8), 1), read_f16(blocks, 52))


def tq2_0(blocks: Bytes) -> Floats:
    """Twice 32 bytes, each holding 4 runs of 32 values of 2 bits | d 2. x = d * (q - 1)."""
    return apply_scale(to_signed(unpack_bits(field(blocks, 0, 64), 32, 2), 1), read_f16(blocks, 64))


def iq4_nl(blocks: Bytes) -> Floats:
    """d 2 | 16 bytes of nibbles as in Q4_0, each an index into IQ4_VALUES. x = d * value."""
    return apply_scale(value_table(IQ4_VALUES).take(unpack_bits(field(blocks, 2, 16), 16, 4)), read_f16(blocks, 0))


def mxfp4(blocks: Bytes) -> Floats:
    """E8M0 scale 1 | 16 bytes of nibbles as in Q4_0, each an E2M1 number."""
    values = value_table(FP4_VALUES).take(unpack_bits(field(blocks, 1, 16), 16, 4))
    return apply_scale(values, e8m0_halves().take(blocks[:, :1]))


def nvfp4(blocks: Bytes) -> Floats:
    """4 E4M3 scales 4 | for each of the 4 groups of 16: 8 bytes of nibbles, values i and i+8 in byte i, E2M1."""
    values = value_table(FP4_VALUES).take(unpack_bits(field(blocks, 4, 32), 8, 4))
    return apply_scale(values, e4m3_halves().take(blocks[:, :4]))


# Types of quantized safetensors: blocks of 32 columns whose scales are float32.


def int4(blocks: Bytes) -> Floats:
    """d 4 | 16 bytes of nibbles as in Q4_0. x = d * (q - 8)."""
    return apply_scale(to_signed(unpack_bits(field(blocks, 4, 16), 16, 4), 8), read_f32(blocks, 0))


def int4_zp(blocks: Bytes) -> Floats:
    """d 4 | zero point 4 | 16 bytes of nibbles as in Q4_0. x = d * (q - zero point)."""
    q = unpack_bits(field(blocks, 8, 16), 16, 4).astype(np.float32)
    q -= read_f32(blocks, 4)
    return apply_scale(q, read_f32(blocks, 0))


def int8(blocks: Bytes) -> Floats:
    """d 4 | 32 int8. x = d * q."""
    return apply_scale(blocks[:, 4:].view(np.int8), read_f32(blocks, 0))


def fp8(blocks: Bytes) -> Floats:
    """d 4 | 32 E4M3 numbers."""
    return apply_scale(codebooks.e4m3_values().take(blocks[:, 4:]), read_f32(blocks, 0))


def nvfp4_f32(blocks: Bytes) -> Floats:
    """Scales of 16 values 2 x 4, halved as in NVFP4 | 16 bytes of nibbles as in Q4_0, each an E2M1 number."""
    return apply_scale(value_table(FP4_VALUES).take(unpack_bits(field(blocks, 8, 16), 16, 4)), read_f32(blocks, 0, 2))


# K types: super-blocks of 256 values, in groups of 16 or 32 with small integer scales of their own.
# x = (d * scale) * q - dmin * min, unless noted.


def q2_k(blocks: Bytes) -> Floats:
    """16 bytes min << 4 | scale, one a group of 16 | 64 bytes of 2 bits in runs of 32 | d 2 | dmin 2."""
    dm = read_f16(blocks, 80, 2)
    groups = field(blocks, 0, 16)
    scale = dm[:, :1] * (groups & np.uint8(15))
    minimum = dm[:, 1:] * (groups >> np.uint8(4))
    return apply_scale(unpack_bits(field(blocks, 16, 64), 32, 2), scale, minimum)


def q3_k(blocks: Bytes) -> Floats:
    """32 bytes of high bits | 64 bytes of 2 low bits in runs of 32 | 12 bytes of scales | d 2. x = d * scale * (q - 4).

    High bits: bit k of byte i belongs to value 32k + i. The 16 scales have 6 bits, less 32:
        byte 0..7    ssss'rrrr    low 4 bits of scale i (r) and of scale i+8 (s)
        byte 8..11   uu'tt'ss'rr  high 2 bits of scales i (r), i+4 (s), i+8 (t), i+12 (u)
    """
    scale = join_bits(unpack_bits(field(blocks, 104, 4), 4, 2), unpack_bits(field(blocks, 96, 8), 8, 4), 4)
    q = join_bits(unpack_bits(field(blocks, 0, 32), 32, 1), unpack_bits(field(blocks, 32, 64), 32, 2), 2)
    return apply_scale(to_signed(q, 4), read_f16(blocks, 108) * to_signed(scale, 32))


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """d 2 | dmin 2 | 12 bytes of 8 scales and 8 minima of 6 bits -> d * scale and dmin * min, (blocks, 8) each.

    byte 0..3    SS'ssssss   s: scale i          S: high 2 bits of scale i+4
    byte 4..7    MM'mmmmmm   m: min i            M: high 2 bits of min i+4
    byte 8..11   MMMM'SSSS   low 4 bits of scale i+4 and of min i+4
    """
    first = field(blocks, 4, 8)  # four scales, four minima
    last = first >> np.uint8(2)
    last &= np.uint8(48)
    last |= unpack_bits(field(blocks, 12, 4), 4, 4)
    four = np.empty((len(blocks), 2, 2), "V4")  # (blocks, scales and minima, first and last four)
    four[..., 0] = (first & np.uint8(63)).view("V4")
    four[..., 1] = last.view("V4")
    both = apply_scale(four.view(np.uint8).reshape(len(blocks), 16), read_f16(blocks, 0, 2))
    return both[:, :8], both[:, 8:]


def q4_k(blocks: Bytes) -> Floats:
    """d, dmin, scales, minima 16 | 128 bytes of nibbles, in 32-byte runs: group 2k low, group 2k+1 high."""
    return apply_scale(unpack_bits(field(blocks, 16, 128), 32, 4), *_scales_and_minima(blocks))


def q5_k(blocks: Bytes) -> Floats:
    """As Q4_K with 32 bytes of fifth bits (bit k of byte i belongs to value 32k + i) before the nibbles."""
    q = join_bits(unpack_bits(field(blocks, 16, 32), 32, 1), unpack_bits(field(blocks, 48, 128), 32, 4), 4)
    return apply_scale(q, *_scales_and_minima(blocks))


def q6_k(blocks: Bytes) -> Floats:
    """128 bytes of low nibbles in 64-byte runs | 64 bytes of 2 high bits in 32-byte runs | 16 int8 scales | d 2.

    x = (d * scale) * (q - 32), one scale a group of 16.
    """
    q = join_bits(unpack_bits(field(blocks, 128, 64), 32, 2), unpack_bits(field(blocks, 0, 128), 64, 4), 4)
    return apply_scale(to_signed(q, 32), read_f16(blocks, 208) * blocks[:, 192:208].view(np.int8))


def q8_k(blocks: Bytes) -> Floats:
    """d 4 (float32) | 256 int8 | 16 int16 sums of 16 values each, a help to dot products. x = d * q."""
    return apply_scale(blocks[:, 4:260].view(np.int8), read_f32(blocks, 0))


# IQ types: super-blocks of 256 values, stored as indices into a codebook of rows of 4 or 8 values.
# x = group scale * codebook value * sign, unless noted.


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
