"""Encoders of the plain numbers and of the 32-value types: the largest value sets the scale, no search.

Each takes (blocks, block_size) float32 and gives (blocks, block_bytes) uint8; layouts as in `quants.basic`. Levels are
made with the float32 scale, before it is rounded to float16: so the definition of these types has it.
"""

import numpy as np

from .packing import Bytes, Floats, half_bytes, packed, reciprocal


def f32(blocks: Floats) -> Bytes:
    """As they are."""
    return blocks.astype("<f4", copy=False).view(np.uint8)


def f16(blocks: Floats) -> Bytes:
    """The nearest float16, ties to even."""
    return blocks.astype("<f2").view(np.uint8)


def bf16(blocks: Floats) -> Bytes:
    """The upper half of the float32, rounded to nearest, ties to even."""
    wide = blocks.view(np.uint32)
    rounded = wide + (np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype("<u2").view(np.uint8)


def _signed_peak(blocks: Floats) -> Floats:
    """The value of largest size, with its sign; of equals the first: (blocks, 1)."""
    return np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)


def _levels(scaled: Floats, offset: float, top: int) -> Bytes:
    """Whole numbers from 0 to `top`, halves upwards."""
    scaled += np.float32(offset + 0.5)
    return np.minimum(scaled, np.float32(top)).astype(np.uint8)


def _symmetric(blocks: Floats, half_range: int) -> tuple[Floats, Bytes]:
    """x = d * (q - half_range): the peak becomes the lowest level, of which there is one more than above zero."""
    d = _signed_peak(blocks) / np.float32(-half_range)
    return d, _levels(blocks * reciprocal(d), half_range, 2 * half_range - 1)


def _from_minimum(blocks: Floats, top: int) -> tuple[Floats, Floats, Bytes]:
    """x = d * q + m."""
    m = blocks.min(axis=1, keepdims=True)
    d = (blocks.max(axis=1, keepdims=True) - m) / np.float32(top)
    return d, m, _levels((blocks - m) * reciprocal(d), 0, top)


def _five_bits(levels: Bytes) -> tuple[Bytes, Bytes]:
    high = np.packbits(levels >> np.uint8(4), axis=1, bitorder="little")
    return high, packed(levels & np.uint8(15), 16, 4)


def q4_0(blocks: Floats) -> Bytes:
    """x = d * (q - 8)."""
    d, levels = _symmetric(blocks, 8)
    return np.concatenate([half_bytes(d), packed(levels, 16, 4)], axis=1)


def q4_1(blocks: Floats) -> Bytes:
    """x = d * q + m."""
    d, m, levels = _from_minimum(blocks, 15)
    return np.concatenate([half_bytes(d), half_bytes(m), packed(levels, 16, 4)], axis=1)


def q5_0(blocks: Floats) -> Bytes:
    """x = d * (q - 16)."""
    d, levels = _symmetric(blocks, 16)
    return np.concatenate([half_bytes(d), *_five_bits(levels)], axis=1)


def q5_1(blocks: Floats) -> Bytes:
    """x = d * q + m."""
    d, m, levels = _from_minimum(blocks, 31)
    return np.concatenate([half_bytes(d), half_bytes(m), *_five_bits(levels)], axis=1)


def q8_0(blocks: Floats) -> Bytes:
    """x = d * q, halves away from zero."""
    d = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * reciprocal(d)
    scaled += np.copysign(np.float32(0.5), scaled)
    return np.concatenate([half_bytes(d), scaled.astype(np.int8).view(np.uint8)], axis=1)
