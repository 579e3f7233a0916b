"""Decoders of the K types: super-blocks of 256 values, in groups of 16 or 32 with small integer scales of their own.

A decoder maps (blocks, block_bytes) uint8 to (blocks, 256) float32. Layouts list the fields of a block with sizes in
bytes; `d` and `dmin` are float16 unless noted.
"""

import numpy as np

from .basic import Bytes, Floats, apply_scale, field, join_bits, read_f16, to_signed, unpack_bits


def q2_k(blocks: Bytes) -> Floats:
    """16 bytes min << 4 | scale, one a group of 16 | 64 bytes of 2 bits in runs of 32 | d 2 | dmin 2.

    x = (d * scale) * q - dmin * min.
    """
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
    """d, dmin, scales, minima 16 | 128 bytes of nibbles, in 32-byte runs: group 2k low, group 2k+1 high.

    x = (d * scale) * q - dmin * min.
    """
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
    return apply_scale(blocks[:, 4:260].view(np.int8), field(blocks, 0, 4).view("<f4"))
