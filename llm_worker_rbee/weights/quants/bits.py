"""The three moves that every block decoder is made of: cut out a field, widen a half, split packed bits into planes.

Blocks are (blocks, block_bytes) uint8. NumPy pays some 7 ns for each inner loop, so rows of 16 or 32 bytes are moved as
one opaque (void) item each instead of byte by byte; arithmetic on bytes runs over whole contiguous arrays.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def field(blocks: Bytes, start: int, size: int) -> Bytes:
    """Bytes start .. start+size of every block, contiguous: (blocks, size)."""
    items = np.ascontiguousarray(blocks[:, start : start + size].view(f"V{size}"))
    return items.view(np.uint8).reshape(len(blocks), size)


@cache
def _half_table() -> Floats:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def widen(halves: NDArray[np.uint16]) -> Floats:
    """float16 bits -> float32, by table: 0.9 ns a number where `astype` takes 1.2, and 11 if it is subnormal."""
    return _half_table().take(halves)


def halves(blocks: Bytes, start: int, count: int = 1) -> Floats:
    """`count` float16 numbers at `start` of every block: (blocks, count)."""
    return widen(field(blocks, start, 2 * count).view("<u2"))


def planes(packed: Bytes, width: int, bits: int) -> Bytes:
    """Split bytes into numbers of `bits` bits, where each run of `width` bytes holds 8/bits runs of `width` values.

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


def joined(high: Bytes, low: Bytes, bits: int) -> Bytes:
    """high << bits | low, in place. Multiplied, because NumPy's uint8 << has no SIMD loop: nine times slower."""
    high *= np.uint8(1 << bits)
    high |= low
    return high


def signed(values: Bytes, offset: int) -> NDArray[np.int8]:
    """values - offset, in place, as int8."""
    values -= np.uint8(offset)
    return values.view(np.int8)


def scaled(values: Bytes | NDArray[np.int8] | Floats, scale: Floats, minus: Floats | None = None) -> Floats:
    """values * scale [- minus], where each of the (blocks, groups) scales serves an equal run of values."""
    groups = (*scale.shape, values.shape[1] // scale.shape[1])
    out = values.astype(np.float32, order="C", copy=values.dtype != np.float32)
    grouped = out.reshape(groups)
    grouped *= scale[..., None]
    if minus is not None:
        grouped -= minus[..., None]
    return out
