"""Bit helpers of all block decoders, and decoders of plain numbers, Q4_0 .. Q8_1, 1- and 2-bit, ternary and FP4 types.

A decoder maps (blocks, block_bytes) uint8 to (blocks, block_size) float32. Layouts list the fields of a block with
sizes in bytes; `d` is the scale and `m` the minimum, float16 unless noted. NumPy costs about 7 ns per inner loop, so
runs of 16 or 32 bytes are moved as one opaque (void) item.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from .codebooks import FP4_VALUES, IQ4_VALUES, e4m3_halves, e8m0_halves, value_table

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


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
    """d 2 | 16 bytes of nibbles, value i beside value i+16. x = d * (q - 8)."""
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
    """4 E4M3 scales 4 | for each of the 4 groups of 16: 8 bytes of nibbles, value i beside value i+8, E2M1."""
    values = value_table(FP4_VALUES).take(unpack_bits(field(blocks, 4, 32), 8, 4))
    return apply_scale(values, e4m3_halves().take(blocks[:, :4]))
