"""Raw blocks of a file -> codes and scales, in torch, for every type but the IQ ones (those are in pack_iq.py).

A rule takes (rows, blocks of the file, bytes) uint8. weights/quants draws the blocks; planes.py says what kinds hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import frexp, ldexp
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...weights import Tensor
from ...weights.checkpoint import release_pages
from ...weights.quants.codebooks import (
    FP4_VALUES,
    IQ4_VALUES,
    e4m3_halves,
    e8m0_halves,
    even_sign_rows,
    grid,
    sign_rows,
)
from . import device, fp8
from .packed_weight import FP8, HIGH, LOW, NUMBERS, PAIRS, Part, empty_planes, high_places, values


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


def _shorts(raw: torch.Tensor, at: int, count: int) -> torch.Tensor:
    return cut(raw, at, 2 * count).view(torch.int16).int() & 0xFFFF


def _int32s(raw: torch.Tensor, at: int, count: int) -> torch.Tensor:
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
    words = _int32s(raw, 2, 16)[..., 1::2]
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
    words = _int32s(raw, 66, 8)
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


SLAB = 1 << 24  # codes unpacked at a time
CHUNK = 1 << 25  # bytes on their way to the device at a time
MINIMA = 64  # a minimum may be so many times the largest scale before it counts instead


class Rule(NamedTuple):
    """How a type of the file is packed; the rule takes (rows, blocks of the file, bytes) uint8."""

    kind: str
    codes: Callable[[torch.Tensor], Codes]


RULES: dict[str, Rule] = {
    "Q4_0": Rule("q4", q4_0),
    "Q4_1": Rule("q4m", q4_1),
    "Q5_0": Rule("q5", q5_0),
    "Q5_1": Rule("q5m", q5_1),
    "Q8_0": Rule("q8", q8_0),
    "Q8_1": Rule("q8", q8_1),
    "Q1_0": Rule("q4", q1_0),
    "Q2_0": Rule("q4", q2_0),
    "TQ1_0": Rule("q4", tq1_0),
    "TQ2_0": Rule("q4", tq2_0),
    "MXFP4": Rule("q5", mxfp4),
    "NVFP4": Rule("q6", nvfp4),
    "Q2_K": Rule("q4mm", q2_k),
    "Q3_K": Rule("q6", q3_k),
    "Q4_K": Rule("q4m", q4_k),
    "Q5_K": Rule("q5m", q5_k),
    "Q6_K": Rule("q6", q6_k),
    "Q8_K": Rule("q8", q8_k),
    "IQ1_S": Rule("q5", iq1_s),
    "IQ1_M": Rule("q6", iq1_m),
    "IQ2_XXS": Rule("q8", iq2_xxs),
    "IQ2_XS": Rule("q8d", iq2_xs),
    "IQ2_S": Rule("q8d", iq2_s),
    "IQ3_XXS": Rule("q8", iq3_xxs),
    "IQ3_S": Rule("q5", iq3_s),
    "IQ4_NL": Rule("q8", iq4_nl),
    "IQ4_XS": Rule("q8", iq4_xs),
}
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}  # other types of numbers become float32


def shape_of(tensor: Tensor) -> str:
    """What neighbouring tensors must share to be one part."""
    if tensor.pack_as:
        return tensor.pack_as
    rule = RULES.get(tensor.kind.name)
    return rule.kind if rule else str(DTYPES.get(tensor.kind.name, torch.float32))


def pack(tensors: Sequence[Tensor], to: torch.device | str | None = None) -> Part:
    """Tensors of one kind, stacked by rows."""
    assert len({shape_of(t) for t in tensors}) == 1, "a stack has one kind"
    where = device.current() if to is None else torch.device(to)
    if tensors[0].pack_as == FP8:
        return _fp8(tensors, where)
    if tensors[0].kind.name not in RULES:
        return _numbers(tensors, where)
    raws = [_on_device(t.rows, where).view(t.shape[0], -1, t.kind.block_bytes) for t in tensors]
    kind = RULES[tensors[0].kind.name].kind
    part = empty_planes(kind, sum(t.shape[0] for t in tensors), tensors[0].shape[1] // 32, where)
    part.unit = unit_of(_largest(tensors, raws))
    at = 0
    for found in _unpacked(tensors, raws):
        _write(part, at, found)
        at += len(found.codes)
    return part


def _on_device(rows: NDArray[np.uint8], where: torch.device) -> torch.Tensor:
    """Mapped bytes, through two pinned buffers: one is filled while the other travels."""
    flat = rows.reshape(-1)
    if where.type == "cpu":
        return torch.tensor(flat)
    out = torch.empty(flat.size, dtype=torch.uint8, device=where)
    pinned = [torch.empty(min(CHUNK, flat.size), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    stream = torch.cuda.current_stream(where)
    sent = [stream.record_event() for _ in range(2)]
    for turn, start in enumerate(range(0, flat.size, CHUNK)):
        piece = flat[start : start + CHUNK]
        buffer = pinned[turn % 2]
        sent[turn % 2].synchronize()  # the copy before the last
        np.copyto(buffer.numpy()[: piece.size], piece)
        out[start : start + piece.size].copy_(buffer[: piece.size], non_blocking=True)
        sent[turn % 2] = stream.record_event()
        release_pages(piece)
    stream.synchronize()
    return out


def _numbers(tensors: Sequence[Tensor], where: torch.device) -> Part:
    """Numbers as the file has them; types that the device does not multiply become float32 on the way."""
    out = torch.empty(
        sum(t.shape[0] for t in tensors), tensors[0].shape[1],
        dtype=DTYPES.get(tensors[0].kind.name, torch.float32), device=where,
    )  # fmt: skip
    for at, slab in _slabs(tensors, where):
        out[at : at + len(slab)] = slab
    none = torch.empty(1, dtype=torch.int32, device=where)
    return Part(NUMBERS, len(out), 0, none, none, none, 1.0, out)


def _fp8(tensors: Sequence[Tensor], where: torch.device) -> Part:
    """Numbers rounded to e4m3, the largest of each row to the largest there is."""
    rows = sum(t.shape[0] for t in tensors)
    out = torch.empty(rows, tensors[0].shape[1], dtype=fp8.E4M3, device=where)
    scales = torch.empty(rows, device=where)
    for at, slab in _slabs(tensors, where):
        span = slice(at, at + len(slab))
        out[span], scales[span] = fp8.rounded(slab)
    none = torch.empty(1, dtype=torch.int32, device=where)
    return Part(FP8, rows, 0, none, none, scales, 1.0, out)


def _slabs(tensors: Sequence[Tensor], where: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """(the row it begins at, some rows as numbers on the device) of all tensors in order."""
    at = 0
    for tensor in tensors:
        step = max(1, SLAB // max(1, tensor.shape[1]))
        for start in range(0, tensor.shape[0], step):
            slab = tensor.take_rows(slice(start, start + step))
            if tensor.kind.name in (*DTYPES, "F32"):
                numbers = _on_device(slab.rows, where).view(DTYPES.get(tensor.kind.name, torch.float32))
            else:
                numbers = torch.tensor(slab.dequantize()).to(where)
            yield at, numbers.view(slab.shape)
            at += slab.shape[0]


def _unpacked(tensors: Sequence[Tensor], raws: Sequence[torch.Tensor]) -> Iterator[Codes]:
    """Codes and scales of all rows in order, a slab at a time."""
    for tensor, raw in zip(tensors, raws, strict=True):
        rule = RULES[tensor.kind.name]
        for slab in torch.split(raw, max(1, SLAB // tensor.shape[1])):
            yield rule.codes(slab)


def _largest(tensors: Sequence[Tensor], raws: Sequence[torch.Tensor]) -> float:
    """The largest scale, in absolute value, or what minima ask for."""
    most = 0.0
    for found in _unpacked(tensors, raws):
        most = max(most, float(found.scales.abs().max()))
        if found.minima is not None:
            most = max(most, float(found.minima.abs().max()) / MINIMA)
    return most


def unit_of(largest: float) -> float:
    """The power of two that brings the largest scale to 2**7 .. 2**8."""
    return ldexp(1.0, max(frexp(largest)[1] - 8, -126)) if largest else 1.0


def _write(part: Part, at: int, found: Codes) -> None:
    """One slab, at a row of the part."""
    kind, span = part.kind, slice(at, at + len(found.codes))
    part.low[span] = _low_plane(kind, found.codes)
    scales, minima = found.scales, found.minima
    if kind == "q4mm":
        assert minima is not None
        part.high[span] = _pairs(minima / part.unit)[:, None]
    elif kind in HIGH:
        part.high[span] = _high_plane(kind, found.codes)
    if kind in PAIRS:
        both = scales if minima is None or kind == "q4mm" else torch.cat((scales, minima), -1)
        part.scales[span] = _pairs(both / part.unit)
    else:
        part.scales[span] = (scales[..., 0] / part.unit).half()


def _pairs(numbers: torch.Tensor) -> torch.Tensor:
    """(rows, blocks, 2) -> two float16 in an int32."""
    return numbers.half().clone(memory_format=torch.contiguous_format).view(torch.int32)[..., 0]


def _words(codes: torch.Tensor) -> torch.Tensor:
    """(rows, blocks, 4 n) bytes -> (rows, n, blocks) int32."""
    return codes.clone(memory_format=torch.contiguous_format).view(torch.int32).transpose(1, 2)


def _low_plane(kind: str, codes: torch.Tensor) -> torch.Tensor:
    if kind in LOW:
        return _words(codes)
    return _words((codes[..., :16] & 15) | ((codes[..., 16:] & 15) << 4))


def _high_plane(kind: str, codes: torch.Tensor) -> torch.Tensor:
    """Bits above the fourth: see matvec.py."""
    place, half, _ = high_places(kind, codes.device)
    bits = (codes >> 4).int() << place.int()  # (rows, blocks, 32)
    found = torch.zeros(*codes.shape[:2], HIGH[kind], dtype=torch.int32, device=codes.device)
    return found.index_add_(-1, half, bits).to(torch.int16).transpose(1, 2)


__all__ = ["Matrix", "Part", "prepare"]


@dataclass(slots=True, eq=False)
class Matrix:
    """Rows of all parts, one after the other; all have the same columns."""

    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """Of all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def columns(self) -> int:
        """Values of a row."""
        return self.parts[0].columns

    @property
    def nbytes(self) -> int:
        """Memory on the device."""
        return sum(part.nbytes for part in self.parts)

    def rows_at(self, index: torch.Tensor) -> torch.Tensor:
        """Some rows as float32, (n, columns)."""
        (part,) = self.parts
        return values(part.take(index))


def prepare(tensors: Sequence[Tensor]) -> Matrix:
    """Pack tensors of a file once; they become one matrix, their rows one after the other."""
    return Matrix(tuple(pack(list(group)) for _, group in groupby(tensors, shape_of)))
