"""Raw blocks of a file -> codes and scales, in torch, for every type but the IQ ones (those are in pack_iq.py).

A rule takes (rows, blocks of the file, bytes) uint8. weights/quants draws the blocks; planes.py says what kinds hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...weights.quants.codebooks import FP4_VALUES, e4m3_halves, e8m0_halves


class Codes(NamedTuple):
    """(rows, blocks, 32) uint8 codes, of eight bits signed ones; float32 (rows, blocks, 1 or 2) scales, and minima."""

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None


def cut(raw: torch.Tensor, at: int, size: int) -> torch.Tensor:
    """Bytes of every block, in memory of their own, so that they can be looked at as wider numbers."""
    return raw[..., at : at + size].clone(memory_format=torch.contiguous_format)


def halves(raw: torch.Tensor, at: int, count: int = 1) -> torch.Tensor:
    """float16 numbers at a byte of every block, as float32."""
    return cut(raw, at, 2 * count).view(torch.float16).float()


def nibbles(raw: torch.Tensor, at: int, size: int, run: int) -> torch.Tensor:
    """Runs of `run` bytes, each of which holds `run` low nibbles, then `run` high ones."""
    packed = torch.unflatten(raw[..., at : at + size], -1, (-1, 1, run))
    return torch.cat((packed & 15, packed >> 4), -2).flatten(-3)


def bits(raw: torch.Tensor, at: int, size: int, width: int, run: int | None = None) -> torch.Tensor:
    """Runs of bytes (one of `size`, if nothing is said) that hold 8 / width runs of numbers, the first lowest."""
    packed = torch.unflatten(raw[..., at : at + size], -1, (-1, 1, run or size))
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=raw.device)[:, None]
    return ((packed >> shifts) & ((1 << width) - 1)).flatten(-3)


def on(raw: torch.Tensor, table: NDArray[np.generic]) -> torch.Tensor:
    """A table of the format, beside the bytes."""
    return torch.tensor(np.asarray(table), device=raw.device)


def in_blocks(codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None = None) -> Codes:
    """(rows, blocks of the file, values) -> blocks of 32; a scale that serves more than 32 is repeated."""
    rows, supers, size = codes.shape

    def spread(numbers: torch.Tensor) -> torch.Tensor:
        few = max(1, size // 32 // numbers.shape[-1])
        return numbers.repeat_interleave(few, -1).reshape(rows, supers * (size // 32), -1)

    return Codes(codes.reshape(rows, -1, 32), spread(scales), None if minima is None else spread(minima))


def q4_0(raw: torch.Tensor) -> Codes:
    """x = d * (q - 8)."""
    return Codes(nibbles(raw, 2, 16, 16), halves(raw, 0))


def q4_1(raw: torch.Tensor) -> Codes:
    """x = d * q + m."""
    return Codes(nibbles(raw, 4, 16, 16), halves(raw, 0), halves(raw, 2))


def _fifths(raw: torch.Tensor, at: int) -> torch.Tensor:
    """32 bits, bit i of the little-endian word belongs to value i, as the fifth bit of a code."""
    return bits(raw, at, 4, 1, 1) << 4


def q5_0(raw: torch.Tensor) -> Codes:
    """x = d * (q - 16)."""
    return Codes(nibbles(raw, 6, 16, 16) | _fifths(raw, 2), halves(raw, 0))


def q5_1(raw: torch.Tensor) -> Codes:
    """x = d * q + m."""
    return Codes(nibbles(raw, 8, 16, 16) | _fifths(raw, 4), halves(raw, 0), halves(raw, 2))


def q8_0(raw: torch.Tensor) -> Codes:
    """x = d * q."""
    return Codes(raw[..., 2:], halves(raw, 0))


def q8_1(raw: torch.Tensor) -> Codes:
    """The same; the sum beside it is not needed."""
    return Codes(raw[..., 4:], halves(raw, 0))


def q1_0(raw: torch.Tensor) -> Codes:
    """x = d or -d: codes 9 and 7."""
    return in_blocks(bits(raw, 2, 16, 1, 1) * 2 + 7, halves(raw, 0))


def q2_0(raw: torch.Tensor) -> Codes:
    """x = d * (q - 1): codes q + 7."""
    return in_blocks(bits(raw, 2, 16, 2, 1) + 7, halves(raw, 0))


def tq1_0(raw: torch.Tensor) -> Codes:
    """x = d * (trit - 1): codes trit + 7."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=raw.device)[:, None]
    fields = ((0, 32, 5), (32, 16, 5), (48, 4, 4))
    fractions = [(raw[..., a : a + n].unsqueeze(-2) * powers[:trits]).flatten(-2) for a, n, trits in fields]
    trits = (torch.cat(fractions, -1).short() * 3 >> 8).to(torch.uint8)
    return in_blocks(trits + 7, halves(raw, 52))


def tq2_0(raw: torch.Tensor) -> Codes:
    """x = d * (q - 1): codes q + 7."""
    return in_blocks(bits(raw, 0, 64, 2, 32) + 7, halves(raw, 64))


def _fp4(raw: torch.Tensor, at: int, size: int, run: int, offset: int) -> torch.Tensor:
    """E2M1 numbers, doubled, plus the kind's offset."""
    table = on(raw, (np.array(FP4_VALUES) + offset).astype(np.uint8))
    return table[nibbles(raw, at, size, run).int()]


def _of_bytes(raw: torch.Tensor, count: int, table: Callable[[], NDArray[np.float32]]) -> torch.Tensor:
    """Scales that are a byte each, at the head of a block."""
    return on(raw, table())[raw[..., :count].int()]


def mxfp4(raw: torch.Tensor) -> Codes:
    """x = 2**(e - 128) * (code - 16); scales far below the largest become zero."""
    return Codes(_fp4(raw, 1, 16, 16, 16), _of_bytes(raw, 1, e8m0_halves))


def nvfp4(raw: torch.Tensor) -> Codes:
    """x = scale of 16 * (code - 32)."""
    return in_blocks(_fp4(raw, 4, 32, 8, 32), _of_bytes(raw, 4, e4m3_halves))


def q2_k(raw: torch.Tensor) -> Codes:
    """x = (d * scale) * q - dmin * min, of 16 values each."""
    groups = raw[..., :16]
    scales, minima = (groups & 15).float() * halves(raw, 80), (groups >> 4).float() * -halves(raw, 82)
    return in_blocks(bits(raw, 16, 64, 2, 32), scales, minima)


def q3_k(raw: torch.Tensor) -> Codes:
    """x = d * scale * (q - 4), of 16 values: codes q + 28."""
    small = bits(raw, 104, 4, 2) << 4 | nibbles(raw, 96, 8, 8)
    q = bits(raw, 0, 32, 1) << 2 | bits(raw, 32, 64, 2, 32)
    return in_blocks(q + 28, (small.float() - 32) * halves(raw, 108))


def _k_scales(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4_K, Q5_K: d * scale and -dmin * min of 8 groups, from 6-bit numbers (weights/quants/k.py draws them)."""
    first, rest = raw[..., 4:12], raw[..., 12:16]
    low = first & 63
    top = (first >> 2) & 48
    scale = torch.cat((low[..., :4], top[..., :4] | (rest & 15)), -1).float() * halves(raw, 0)
    return scale, torch.cat((low[..., 4:], top[..., 4:] | (rest >> 4)), -1).float() * -halves(raw, 2)


def q4_k(raw: torch.Tensor) -> Codes:
    """x = (d * scale) * q - dmin * min."""
    return in_blocks(nibbles(raw, 16, 128, 32), *_k_scales(raw))


def q5_k(raw: torch.Tensor) -> Codes:
    """The same with a fifth bit."""
    return in_blocks(nibbles(raw, 48, 128, 32) | bits(raw, 16, 32, 1) << 4, *_k_scales(raw))


def q6_k(raw: torch.Tensor) -> Codes:
    """x = (d * scale) * (q - 32), of 16 values each."""
    scale = cut(raw, 192, 16).view(torch.int8).float() * halves(raw, 208)
    return in_blocks(nibbles(raw, 0, 128, 64) | bits(raw, 128, 64, 2, 32) << 4, scale)


def q8_k(raw: torch.Tensor) -> Codes:
    """x = d * q; d is a float32."""
    return in_blocks(raw[..., 4:260], cut(raw, 0, 4).view(torch.float32))
