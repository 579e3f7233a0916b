"""Blocks of every quantization type, raw bytes on the device, to codes and scales or to the planes of a compact kind.

A function takes (rows, blocks of the file, bytes) uint8; weights/quants/decoders.py draws the bytes. Codes keep their
bits and are only moved; scales become float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...weights.quants import codebooks


class UnpackedBlocks(NamedTuple):
    """(rows, blocks, 32) uint8 codes, signed if of eight bits; float32 (rows, blocks, 1 or 2) scales and minima."""

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None


class CompactBlocks(NamedTuple):
    """The planes of a compact kind (kernels/compact_kinds.py): (rows, blocks, bytes of its words) uint8 of `low`;
    float32 (rows, groups, 1 or 2) scales, and minima; `high` and `small` (rows, blocks) of their own dtype."""

    low: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None
    high: torch.Tensor | None = None
    small: torch.Tensor | None = None


def slice_bytes(raw: torch.Tensor, first: int, size: int) -> torch.Tensor:
    """Copy bytes of every block, so that they can be viewed as a wider dtype."""
    return raw[..., first : first + size].clone(memory_format=torch.contiguous_format)


def read_f16(raw: torch.Tensor, first: int, count: int = 1) -> torch.Tensor:
    """Return the float16 values at a byte of every block, as float32."""
    return slice_bytes(raw, first, 2 * count).view(torch.float16).float()


def read_f32(raw: torch.Tensor, first: int = 0, count: int = 1) -> torch.Tensor:
    """Return the float32 values at a byte of every block."""
    return slice_bytes(raw, first, 4 * count).view(torch.float32)


def unpack_nibbles(raw: torch.Tensor, first: int, size: int, run: int) -> torch.Tensor:
    """Unpack runs of `run` bytes, each of which holds `run` low nibbles, then `run` high ones."""
    packed = torch.unflatten(raw[..., first : first + size], -1, (-1, 1, run))
    return torch.cat((packed & 15, packed >> 4), -2).flatten(-3)


def unpack_bits(raw: torch.Tensor, first: int, size: int, width: int, run: int | None = None) -> torch.Tensor:
    """Unpack runs of bytes (by default one of `size`) that hold 8 / width runs of values, the first in the low bits."""
    packed = torch.unflatten(raw[..., first : first + size], -1, (-1, 1, run or size))
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=raw.device)[:, None]
    return ((packed >> shifts) & ((1 << width) - 1)).flatten(-3)


def table_on(raw: torch.Tensor, table: NDArray[np.generic]) -> torch.Tensor:
    """Copy a codebook to the device of `raw`."""
    return torch.tensor(np.asarray(table), device=raw.device)


def to_blocks32(codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None = None) -> UnpackedBlocks:
    """Split (rows, blocks of the file, values) into blocks of 32; repeat a scale of more than 32 values."""
    rows, supers, size = codes.shape

    def spread(x: torch.Tensor) -> torch.Tensor:
        repeats = max(1, size // 32 // x.shape[-1])
        return x.repeat_interleave(repeats, -1).reshape(rows, supers * (size // 32), -1)

    return UnpackedBlocks(codes.reshape(rows, -1, 32), spread(scales), None if minima is None else spread(minima))


def per_block(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return (rows, blocks of the file, n) as (rows, blocks of 32, count)."""
    return x.reshape(len(x), -1, count)


def pack_fields(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Pack codes of `width` bits as kernels/compact_kinds.py draws fields: (rows, blocks, 4 * width) bytes."""
    fields = torch.unflatten(per_block(codes, 32), -1, (-1, 8 // width, 4))
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)[:, None]
    return (fields << shifts).sum(-2, dtype=torch.uint8).flatten(-2)


def _join_bytes(*parts: torch.Tensor) -> torch.Tensor:
    """Join two bytes of every block, each (rows, blocks, 1), or both (rows, blocks, 2), to int16 (rows, blocks)."""
    return torch.cat(parts, -1).clone(memory_format=torch.contiguous_format).view(torch.int16)[..., 0]


def _five_bits(raw: torch.Tensor, first: int) -> torch.Tensor:
    """Unpack Q5_0 and Q5_1: a word whose bit i is the fifth bit of value i, then the nibbles."""
    return unpack_nibbles(raw, first + 4, 16, 16) | unpack_bits(raw, first, 4, 1, 1) << 4


def q1_0(raw: torch.Tensor) -> CompactBlocks:
    """x = 2 d * (bit - 1/2)."""
    return CompactBlocks(pack_fields(unpack_bits(raw, 2, 16, 1, 1), 1), 2 * read_f16(raw, 0))


def q2_0(raw: torch.Tensor) -> CompactBlocks:
    """x = d * (q - 1), d of two blocks of 32."""
    scales = read_f16(raw, 0).repeat_interleave(2, 1)
    return CompactBlocks(pack_fields(unpack_bits(raw, 2, 16, 2, 1), 2), scales)


def tq1_0(raw: torch.Tensor) -> CompactBlocks:
    """x = d * (trit - 1). Of a block the trits are packed again: four bytes of five, three bytes of four."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=raw.device)[:, None]
    fields = ((0, 32, 5), (32, 16, 5), (48, 4, 4))
    fractions = [(raw[..., a : a + n].unsqueeze(-2) * powers[:trits]).flatten(-2) for a, n, trits in fields]
    trits = per_block(torch.cat(fractions, -1).short() * 3 >> 8, 32)
    words = torch.unflatten(trits, -1, (8, 4))
    rest = torch.cat((words[..., 5:, :3], words[..., None, 5:, 3]), -2)  # (4 digits, 3 bytes)
    low, rest = (_base_3(x) for x in (words[..., :5, :], rest))
    return CompactBlocks(low, read_f16(raw, 52), None, _join_bytes(rest[..., :2]), rest[..., 2].view(torch.int8))


def _base_3(digits: torch.Tensor) -> torch.Tensor:
    """Return (.., digits, bytes) as bytes, each a fraction of 256 with these digits in base 3, the first one first."""
    number = torch.zeros_like(digits[..., 0, :], dtype=torch.int32)
    for i in range(5):
        number = number * 3 + (digits[..., i, :] if i < digits.shape[-2] else 0)
    return ((number * 256 + 242) // 243).to(torch.uint8)


def tq2_0(raw: torch.Tensor) -> CompactBlocks:
    """x = d * (q - 1)."""
    return CompactBlocks(pack_fields(unpack_bits(raw, 0, 64, 2, 32), 2), read_f16(raw, 64))


def mxfp4(raw: torch.Tensor) -> UnpackedBlocks:
    """x = 2**(e - 128) * value; scales far below the largest become zero."""
    return UnpackedBlocks(unpack_nibbles(raw, 1, 16, 16), _byte_scales(raw, 1, codebooks.e8m0_halves))


def nvfp4(raw: torch.Tensor) -> UnpackedBlocks:
    """x = d of 16 values * value."""
    scales = _byte_scales(raw, 4, codebooks.e4m3_halves)
    return UnpackedBlocks(per_block(unpack_nibbles(raw, 4, 32, 8), 32), per_block(scales, 2))


def _byte_scales(raw: torch.Tensor, count: int, table: Callable[[], NDArray[np.float32]]) -> torch.Tensor:
    """Look up scales that are a byte each, at the head of a block."""
    return table_on(raw, table())[raw[..., :count].int()]


def int4_zp(raw: torch.Tensor) -> UnpackedBlocks:
    """x = d * q - d * zero point."""
    scales = read_f32(raw)
    return UnpackedBlocks(unpack_nibbles(raw, 8, 16, 16), scales, -scales * read_f32(raw, 4))


def q2_k(raw: torch.Tensor) -> CompactBlocks:
    """x = (d * scale) * q - dmin * min, of 16 values each: a byte min << 4 | scale."""
    low = pack_fields(unpack_bits(raw, 16, 64, 2, 32), 2)
    return CompactBlocks(low, read_f16(raw, 80), -read_f16(raw, 82), None, _join_bytes(per_block(raw[..., :16], 2)))


def q3_k(raw: torch.Tensor) -> CompactBlocks:
    """x = d * (scale - 32) * (q - 4), of 16 values."""
    scales = (unpack_bits(raw, 104, 4, 2) << 4 | unpack_nibbles(raw, 96, 8, 8)) - 32
    low = (pack_fields(unpack_bits(raw, 32, 64, 2, 32), 2), pack_fields(unpack_bits(raw, 0, 32, 1), 1))
    return CompactBlocks(torch.cat(low, -1), read_f16(raw, 108), None, None, _join_bytes(per_block(scales, 2)))


def _k_scales(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4_K, Q5_K: d * scale and -dmin * min of 8 groups, from 6-bit numbers (weights/quants/decoders.py draws them)."""
    first, rest = raw[..., 4:12], raw[..., 12:16]
    low = first & 63
    top = (first >> 2) & 48
    scale = torch.cat((low[..., :4], top[..., :4] | (rest & 15)), -1).float() * read_f16(raw, 0)
    return scale, torch.cat((low[..., 4:], top[..., 4:] | (rest >> 4)), -1).float() * -read_f16(raw, 2)


def q5_k(raw: torch.Tensor) -> UnpackedBlocks:
    """As Q4_K, with a fifth bit."""
    return to_blocks32(unpack_nibbles(raw, 48, 128, 32) | unpack_bits(raw, 16, 32, 1) << 4, *_k_scales(raw))


def q6_k(raw: torch.Tensor) -> UnpackedBlocks:
    """x = (d * scale) * (q - 32), of 16 values each."""
    scale = slice_bytes(raw, 192, 16).view(torch.int8).float() * read_f16(raw, 208)
    return to_blocks32(unpack_nibbles(raw, 0, 128, 64) | unpack_bits(raw, 128, 64, 2, 32) << 4, scale)


def _bit_fields(words: torch.Tensor, *shifts: int, mask: int) -> torch.Tensor:
    """Extract bit fields: (..., n) words -> (..., n * fields)."""
    return ((words[..., None] >> torch.tensor(shifts, dtype=torch.int32, device=words.device)) & mask).flatten(-2)


def _scale_and_signs(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split words of a 4-bit scale, returned as the odd number that it stands for, and four indices of sign rows."""
    scales = (((words >> 28) & 15) * 2 + 1).to(torch.int8)
    return scales.flatten(1), _bit_fields(words, 0, 7, 14, 21, mask=127)


def _with_signs(index: torch.Tensor, per_word: int, signs: torch.Tensor, *, even: bool) -> torch.Tensor:
    """Return the low bytes of indices, `per_word` a block, and a field of one bit for each sign."""
    table = codebooks.even_sign_rows() if even else codebooks.sign_rows()
    is_minus = table_on(index, (table < 0).astype(np.uint8))[signs.int()]
    return torch.cat((per_block(index.to(torch.uint8), per_word), pack_fields(is_minus.flatten(-2), 1)), -1)


def iq2_xxs(raw: torch.Tensor) -> CompactBlocks:
    """x = d / 8 * (2 scale + 1) * value: indices, then 4-bit scale and signs in the second word of a group of 32."""
    small, signs = _scale_and_signs(slice_bytes(raw, 2, 64).view(torch.int32)[..., 1::2])
    index = torch.unflatten(raw[..., 2:66], -1, (8, 8))[..., :4].flatten(-2)
    return CompactBlocks(_with_signs(index, 4, signs, even=True), read_f16(raw, 0) / 8, None, None, small)


def iq2_xs(raw: torch.Tensor) -> CompactBlocks:
    """9-bit index and 7 sign bits; a scale per 16 values."""
    codes = slice_bytes(raw, 2, 64).view(torch.int16).int() & 0xFFFF
    low = _with_signs(codes & 255, 4, codes >> 9, even=True)
    ninth = per_block(codes >> 8 & 1, 4) << torch.arange(4, device=raw.device)
    small = _join_bytes(per_block(raw[..., 66:74], 1), ninth.sum(-1, keepdim=True, dtype=torch.uint8))
    return CompactBlocks(low, read_f16(raw, 0) / 8, None, None, small)


def iq2_s(raw: torch.Tensor) -> CompactBlocks:
    """10-bit index, 8 sign bits; a scale per 16 values."""
    low = _with_signs(raw[..., 2:34], 4, raw[..., 34:66], even=False)
    small = _join_bytes(per_block(raw[..., 74:82], 1), per_block(raw[..., 66:74], 1))
    return CompactBlocks(low, read_f16(raw, 0) / 8, None, None, small)


def iq3_xxs(raw: torch.Tensor) -> CompactBlocks:
    """x = d / 4 * (2 scale + 1) * value: rows of four; a word of scale and signs per 32 values."""
    small, signs = _scale_and_signs(slice_bytes(raw, 66, 32).view(torch.int32))
    return CompactBlocks(_with_signs(raw[..., 2:66], 8, signs, even=True), read_f16(raw, 0) / 4, None, None, small)


def iq3_s(raw: torch.Tensor) -> CompactBlocks:
    """x = d * (2 scale + 1) * value: 9-bit index of rows of four; a scale per 32 values, twice here."""
    low = _with_signs(raw[..., 2:66], 8, raw[..., 74:106], even=False)
    scale = per_block(unpack_nibbles(raw, 106, 4, 1), 1)
    small = _join_bytes(scale | scale << 4, per_block(raw[..., 66:74], 1))
    return CompactBlocks(low, read_f16(raw, 0), None, None, small)


def iq1_s(raw: torch.Tensor) -> CompactBlocks:
    """x = d / 8 * (2 scale + 1) * eighths: 11-bit index; scale and shift per 32 values."""
    small = _join_bytes(per_block(raw[..., 34:50], 2))
    return CompactBlocks(per_block(raw[..., 2:34], 4), read_f16(raw, 0) / 8, None, None, small)


def iq1_m(raw: torch.Tensor) -> CompactBlocks:
    """As IQ1_S, with a scale per 16 values, a shift per 8, and a float16 in four nibbles."""
    words = slice_bytes(raw, 48, 8).view(torch.int16).int() & 0xFFFF
    pieces = ((words >> 12) << torch.arange(0, 16, 4, device=raw.device)).sum(-1, keepdim=True)
    d = pieces.to(torch.int32).view(torch.int16)[..., ::2].contiguous().view(torch.float16).float()
    scales = per_block(_bit_fields(words, 0, 3, 6, 9, mask=7), 2)
    small = (scales[..., 0] | scales[..., 1] << 3).to(torch.int8)
    return CompactBlocks(per_block(raw[..., :32], 4), d / 8, None, _join_bytes(per_block(raw[..., 32:48], 2)), small)


def iq4_nl(raw: torch.Tensor) -> CompactBlocks:
    """x = d * value."""
    return CompactBlocks(pack_fields(unpack_nibbles(raw, 2, 16, 16), 4), read_f16(raw, 0))


def iq4_xs(raw: torch.Tensor) -> CompactBlocks:
    """x = d * (scale - 32) * value."""
    small = (unpack_bits(raw, 2, 2, 2, 1) << 4 | unpack_nibbles(raw, 4, 4, 1)).view(torch.int8) - 32
    return CompactBlocks(
        pack_fields(unpack_nibbles(raw, 8, 128, 16), 4), read_f16(raw, 0), None, None, small.flatten(1)
    )


# Type -> the kind that it is packed as, and the function that unpacks its blocks.
REPACK_RULES: dict[str, tuple[str, Callable[[torch.Tensor], UnpackedBlocks | CompactBlocks]]] = {
    # x = d * (q - 8), d * q + m, d * (q - 16)
    "Q4_0": ("q4", lambda raw: UnpackedBlocks(unpack_nibbles(raw, 2, 16, 16), read_f16(raw, 0))),
    "Q4_1": ("q4m", lambda raw: UnpackedBlocks(unpack_nibbles(raw, 4, 16, 16), read_f16(raw, 0), read_f16(raw, 2))),
    "Q5_0": ("q5", lambda raw: UnpackedBlocks(_five_bits(raw, 2), read_f16(raw, 0))),
    "Q5_1": ("q5m", lambda raw: UnpackedBlocks(_five_bits(raw, 4), read_f16(raw, 0), read_f16(raw, 2))),
    # x = d * q; Q8_1 has a sum too, which is not needed
    "Q8_0": ("q8", lambda raw: UnpackedBlocks(raw[..., 2:], read_f16(raw, 0))),
    "Q8_1": ("q8", lambda raw: UnpackedBlocks(raw[..., 4:], read_f16(raw, 0))),
    "Q8_K": ("q8", lambda raw: to_blocks32(raw[..., 4:260], read_f32(raw))),
    # of quantized safetensors; x = d * (q - zero point) = d * q + m
    "INT4": ("q4", lambda raw: UnpackedBlocks(unpack_nibbles(raw, 4, 16, 16), read_f32(raw))),
    "INT4_ZP": ("q4m", int4_zp),
    "INT8": ("q8", lambda raw: UnpackedBlocks(raw[..., 4:], read_f32(raw))),
    "FP8": ("e4m3", lambda raw: UnpackedBlocks(raw[..., 4:], 256 * read_f32(raw))),  # of 2**-8 times the number
    "NVFP4_F32": ("nvfp4", lambda raw: UnpackedBlocks(unpack_nibbles(raw, 8, 16, 16), read_f32(raw, 0, 2))),
    # x = (d * scale) * q - dmin * min
    "Q4_K": ("q4m", lambda raw: to_blocks32(unpack_nibbles(raw, 16, 128, 32), *_k_scales(raw))),
    "Q5_K": ("q5m", q5_k), "Q6_K": ("q6", q6_k), "MXFP4": ("mxfp4", mxfp4), "NVFP4": ("nvfp4", nvfp4),
    # compact kinds
    "Q1_0": ("q1_0", q1_0), "Q2_0": ("q2_0", q2_0), "TQ1_0": ("tq1_0", tq1_0), "TQ2_0": ("tq2_0", tq2_0),
    "Q2_K": ("q2_k", q2_k), "Q3_K": ("q3_k", q3_k),
    "IQ1_S": ("iq1_s", iq1_s), "IQ1_M": ("iq1_m", iq1_m), "IQ2_XXS": ("iq2_xxs", iq2_xxs),
    "IQ2_XS": ("iq2_xs", iq2_xs), "IQ2_S": ("iq2_s", iq2_s), "IQ3_XXS": ("iq3_xxs", iq3_xxs),
    "IQ3_S": ("iq3_s", iq3_s), "IQ4_NL": ("iq4_nl", iq4_nl), "IQ4_XS": ("iq4_xs", iq4_xs),
}  # fmt: skip
