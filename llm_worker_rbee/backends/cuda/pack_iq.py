"""The rules of the IQ types: codebook rows times signs become codes of the kind that holds them exactly.

IQ2_*, IQ3_XXS and IQ4_* have levels up to 127 (eight bits), IQ3_S odd ones up to 15 (q5, less 16), IQ1_* eighths: one
and an eighth is nine of them (q5, q6). weights/quants/iq.py draws the blocks.
"""

from __future__ import annotations

import numpy as np
import torch

from ...weights.quants.codebooks import IQ4_VALUES, even_sign_rows, grid, sign_rows
from .pack_rules import Codes, bits, cut, halves, in_blocks, nibbles, on


def _shorts(raw: torch.Tensor, at: int, count: int) -> torch.Tensor:
    return cut(raw, at, 2 * count).view(torch.int16).int() & 0xFFFF


def _words(raw: torch.Tensor, at: int, count: int) -> torch.Tensor:
    return cut(raw, at, 4 * count).view(torch.int32)


def _fields(words: torch.Tensor, *shifts: int, mask: int) -> torch.Tensor:
    """(..., n) words -> (..., n * fields)."""
    return ((words[..., None] >> torch.tensor(shifts, dtype=torch.int32, device=words.device)) & mask).flatten(-2)


def _signed(name: str, index: torch.Tensor, signs: torch.Tensor, *, even: bool) -> torch.Tensor:
    """Codebook rows with their signs: (rows, blocks, 256) int8."""
    table = on(index, grid(name).astype(np.int8))
    rows = table[index.int()].flatten(-2)
    return rows * on(index, even_sign_rows() if even else sign_rows())[signs.int()].flatten(-2)


def _eight(codes: torch.Tensor, scales: torch.Tensor) -> Codes:
    return in_blocks(codes.view(torch.uint8), scales)


def iq2_xxs(raw: torch.Tensor) -> Codes:
    """A scale of 4 bits and signs in the second word of a group of 32."""
    words = _words(raw, 2, 16)[..., 1::2]
    index = torch.unflatten(raw[..., 2:66], -1, (8, 8))[..., :4].flatten(-2)
    scale = ((words >> 28) & 15).float()
    signs = _fields(words, 0, 7, 14, 21, mask=127)
    return _eight(_signed("IQ2_XXS", index, signs, even=True), halves(raw, 0) * (0.5 + scale) * 0.25)


def iq2_xs(raw: torch.Tensor) -> Codes:
    """Nine bits of index and seven of signs; a scale a group of 16."""
    codes = _shorts(raw, 2, 32)
    scale = nibbles(raw, 66, 8, 1).float()
    return _eight(_signed("IQ2_XS", codes & 511, codes >> 9, even=True), halves(raw, 0) * (0.5 + scale) * 0.25)


def iq2_s(raw: torch.Tensor) -> Codes:
    """Ten bits of index, eight of signs; a scale a group of 16."""
    index = bits(raw, 66, 8, 2, 1).int() << 8 | raw[..., 2:34].int()
    scale = nibbles(raw, 74, 8, 1).float()
    return _eight(_signed("IQ2_S", index, raw[..., 34:66], even=False), halves(raw, 0) * (0.5 + scale) * 0.25)


def iq3_xxs(raw: torch.Tensor) -> Codes:
    """Rows of four; a word of scale and signs a group of 32."""
    words = _words(raw, 66, 8)
    scale = ((words >> 28) & 15).float()
    signs = _fields(words, 0, 7, 14, 21, mask=127)
    return _eight(_signed("IQ3_XXS", raw[..., 2:66], signs, even=True), halves(raw, 0) * (0.5 + scale) * 0.5)


def iq3_s(raw: torch.Tensor) -> Codes:
    """Nine bits of index to rows of four; levels are odd and at most 15."""
    index = bits(raw, 66, 8, 1, 1).int() << 8 | raw[..., 2:66].int()
    codes = _signed("IQ3_S", index, raw[..., 74:106], even=False) + 16
    return _eight(codes, halves(raw, 0) * (1 + 2 * nibbles(raw, 106, 4, 1).float()))


def _eighths(index: torch.Tensor, minus: torch.Tensor, offset: int) -> torch.Tensor:
    """Rows of -1, 0, 1, each moved by an eighth, up or down: in eighths."""
    rows = on(index, grid("IQ1_S").astype(np.int8))[index.int()] * 8
    return (rows + torch.where(minus, offset - 1, offset + 1).to(torch.int8)[..., None]).flatten(-2)


def iq1_s(raw: torch.Tensor) -> Codes:
    """Eleven bits of index; scale and shift a group of 32."""
    words = _shorts(raw, 34, 8)
    index = _fields(words, 0, 3, 6, 9, mask=7) << 8 | raw[..., 2:34].int()
    scale = 2 * (words >> 12 & 7).float() + 1
    codes = _eighths(index, (words > 0x7FFF).repeat_interleave(4, -1), 16)
    return _eight(codes, halves(raw, 0) * scale / 8)


def iq1_m(raw: torch.Tensor) -> Codes:
    """The same with scales of 16 values, a shift of 8, and a float16 in four pieces."""
    words = _shorts(raw, 48, 4)
    places = torch.tensor([0, 4, 8, 12], dtype=torch.int32, device=raw.device)
    pieces = ((words >> 12) << places).sum(-1, keepdim=True)
    d = pieces.to(torch.int32).view(torch.int16)[..., ::2].contiguous().view(torch.float16).float()
    scale = 2 * _fields(words, 0, 3, 6, 9, mask=7).float() + 1
    high = nibbles(raw, 32, 16, 1)
    codes = _eighths((high & 7).int() << 8 | raw[..., :32].int(), high > 7, 32)
    return _eight(codes, d * scale / 8)


def _iq4(raw: torch.Tensor, at: int, size: int) -> torch.Tensor:
    table = on(raw, np.array(IQ4_VALUES, np.int8))
    return table[nibbles(raw, at, size, 16).int()]


def iq4_nl(raw: torch.Tensor) -> Codes:
    """x = d * value."""
    return _eight(_iq4(raw, 2, 16), halves(raw, 0))


def iq4_xs(raw: torch.Tensor) -> Codes:
    """x = d * (scale - 32) * value."""
    small = bits(raw, 2, 2, 2, 1) << 4 | nibbles(raw, 4, 4, 1)
    return _eight(_iq4(raw, 8, 128), halves(raw, 0) * (small.float() - 32))
