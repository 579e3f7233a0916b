"""What every encoder shares: numbers of few bits into bytes, float16 fields, a division that cannot fail.

The layouts are those of the decoders in `quants`, read backwards.
"""

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

TINY = np.float32(2.0**-126)  # what is smaller has no reciprocal in float32, and is 0 in float16

SMALLEST_HALF = np.float32(2.0**-24)


def reciprocal(values: Floats) -> Floats:
    """1 / values, and 0 for a value that has no finite one."""
    return np.where(np.abs(values) < TINY, np.float32(0), np.float32(1) / values)


def as_half(values: Floats) -> Floats:
    """The float32 that a float16 field will be read back as; the smallest there is rather than nothing."""
    half = values.astype(np.float16).astype(np.float32)
    return np.where((half == 0) & (values != 0), np.copysign(SMALLEST_HALF, values), half)


def half_bytes(values: Floats) -> Bytes:
    """float16 fields: (blocks,) or (blocks, n) -> (blocks, 2n)."""
    return values.astype("<f2").reshape(len(values), -1).view(np.uint8)


def packed(levels: Bytes, width: int, bits: int) -> Bytes:
    """The inverse of `quants.bits.planes`: each run of `width` bytes takes 8/bits runs of `width` levels."""
    blocks, count = levels.shape
    steps = 8 // bits
    runs = levels.reshape(blocks, count // (width * steps), steps, width)
    out = runs[:, :, 0].copy()
    for step in range(1, steps):  # multiplied, because NumPy's uint8 << has no SIMD loop
        out |= runs[:, :, step] * np.uint8(1 << (step * bits))
    return out.reshape(blocks, count // steps)
