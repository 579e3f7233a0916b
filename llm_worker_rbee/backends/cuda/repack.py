"""Repacking: tensors of a file -> planes on a device (gemv.py draws them). Raw bytes are uploaded, torch unpacks them.

A slab of rows at a time: its codes (a byte each), then the planes; nothing is dequantized. Scales and minima are
float16 times one power of two for the whole matrix, the unit: the largest scale is 2**7 to 2**8 of it, so that a
weight still fits float16. A float16 of the file stays exact (down to 2**-22 of the largest); a product (a K type's
float16 times its small integer) is rounded once, by at most 2**-11 of itself. Codes are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import frexp, ldexp
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...weights import Tensor
from ...weights.checkpoint import release_pages
from ...weights.quants import codebooks
from . import packed_weight
from .packed_weight import DENSE, E4M3, FP8, HIGH_WORDS, LOW_WORDS, PAIRED_SCALES, PackedWeight, WeightPart


class UnpackedBlocks(NamedTuple):
    """(rows, blocks, 32) uint8 codes, signed if of eight bits; float32 (rows, blocks, 1 or 2) scales and minima."""

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None


def slice_bytes(raw: torch.Tensor, first: int, size: int) -> torch.Tensor:
    """Copy bytes of every block, so that they can be viewed as a wider dtype."""
    return raw[..., first : first + size].clone(memory_format=torch.contiguous_format)


def read_f16(raw: torch.Tensor, first: int, count: int = 1) -> torch.Tensor:
    """Return the float16 values at a byte of every block, as float32."""
    return slice_bytes(raw, first, 2 * count).view(torch.float16).float()


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


def _five_bits(raw: torch.Tensor, first: int) -> torch.Tensor:
    """Unpack Q5_0 and Q5_1: a word whose bit i is the fifth bit of value i, then the nibbles."""
    return unpack_nibbles(raw, first + 4, 16, 16) | unpack_bits(raw, first, 4, 1, 1) << 4


def tq1_0(raw: torch.Tensor) -> UnpackedBlocks:
    """x = d * (trit - 1): codes trit + 7."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=raw.device)[:, None]
    fields = ((0, 32, 5), (32, 16, 5), (48, 4, 4))
    fractions = [(raw[..., a : a + n].unsqueeze(-2) * powers[:trits]).flatten(-2) for a, n, trits in fields]
    trits = (torch.cat(fractions, -1).short() * 3 >> 8).to(torch.uint8)
    return to_blocks32(trits + 7, read_f16(raw, 52))


def _fp4(raw: torch.Tensor, first: int, size: int, run: int, offset: int) -> torch.Tensor:
    """Return E2M1 values, doubled, plus the kind's offset."""
    table = table_on(raw, (np.array(codebooks.FP4_VALUES) + offset).astype(np.uint8))
    return table[unpack_nibbles(raw, first, size, run).int()]


def _byte_scales(raw: torch.Tensor, count: int, table: Callable[[], NDArray[np.float32]]) -> torch.Tensor:
    """Look up scales that are a byte each, at the head of a block."""
    return table_on(raw, table())[raw[..., :count].int()]


def q2_k(raw: torch.Tensor) -> UnpackedBlocks:
    """x = (d * scale) * q - dmin * min, of 16 values each."""
    groups = raw[..., :16]
    scales, minima = (groups & 15).float() * read_f16(raw, 80), (groups >> 4).float() * -read_f16(raw, 82)
    return to_blocks32(unpack_bits(raw, 16, 64, 2, 32), scales, minima)


def q3_k(raw: torch.Tensor) -> UnpackedBlocks:
    """x = d * scale * (q - 4), of 16 values: codes q + 28."""
    small = unpack_bits(raw, 104, 4, 2) << 4 | unpack_nibbles(raw, 96, 8, 8)
    q = unpack_bits(raw, 0, 32, 1) << 2 | unpack_bits(raw, 32, 64, 2, 32)
    return to_blocks32(q + 28, (small.float() - 32) * read_f16(raw, 108))


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


def _uint16s(raw: torch.Tensor, first: int, count: int) -> torch.Tensor:
    return slice_bytes(raw, first, 2 * count).view(torch.int16).int() & 0xFFFF


def _int32s(raw: torch.Tensor, first: int, count: int) -> torch.Tensor:
    return slice_bytes(raw, first, 4 * count).view(torch.int32)


def _bit_fields(words: torch.Tensor, *shifts: int, mask: int) -> torch.Tensor:
    """Extract bit fields: (..., n) words -> (..., n * fields)."""
    return ((words[..., None] >> torch.tensor(shifts, dtype=torch.int32, device=words.device)) & mask).flatten(-2)


def _signed_rows(name: str, index: torch.Tensor, signs: torch.Tensor, *, even: bool) -> torch.Tensor:
    """Return codebook rows with their signs: (rows, blocks, 256) int8."""
    table = table_on(index, codebooks.grid(name).astype(np.int8))
    rows = table[index.int()].flatten(-2)
    sign_table = codebooks.even_sign_rows() if even else codebooks.sign_rows()
    return rows * table_on(index, sign_table)[signs.int()].flatten(-2)


def _scale_and_signs(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split words of a 4-bit scale and four indices of sign rows."""
    return ((words >> 28) & 15).float(), _bit_fields(words, 0, 7, 14, 21, mask=127)


def _as_bytes(codes: torch.Tensor, scales: torch.Tensor) -> UnpackedBlocks:
    return to_blocks32(codes.view(torch.uint8), scales)


def iq2_xxs(raw: torch.Tensor) -> UnpackedBlocks:
    """4-bit scale and signs in the second word of a group of 32."""
    scale, signs = _scale_and_signs(_int32s(raw, 2, 16)[..., 1::2])
    index = torch.unflatten(raw[..., 2:66], -1, (8, 8))[..., :4].flatten(-2)
    return _as_bytes(_signed_rows("IQ2_XXS", index, signs, even=True), read_f16(raw, 0) * (0.5 + scale) * 0.25)


def iq2_xs(raw: torch.Tensor) -> UnpackedBlocks:
    """9-bit index and 7 sign bits; a scale per 16 values."""
    codes = _uint16s(raw, 2, 32)
    rows = _signed_rows("IQ2_XS", codes & 511, codes >> 9, even=True)
    return _as_bytes(rows, read_f16(raw, 0) * (0.5 + unpack_nibbles(raw, 66, 8, 1).float()) * 0.25)


def iq2_s(raw: torch.Tensor) -> UnpackedBlocks:
    """10-bit index, 8 sign bits; a scale per 16 values."""
    index = unpack_bits(raw, 66, 8, 2, 1).int() << 8 | raw[..., 2:34].int()
    scale = unpack_nibbles(raw, 74, 8, 1).float()
    return _as_bytes(_signed_rows("IQ2_S", index, raw[..., 34:66], even=False), read_f16(raw, 0) * (0.5 + scale) * 0.25)


def iq3_xxs(raw: torch.Tensor) -> UnpackedBlocks:
    """Codebook rows of four; a word of scale and signs per 32 values."""
    scale, signs = _scale_and_signs(_int32s(raw, 66, 8))
    return _as_bytes(_signed_rows("IQ3_XXS", raw[..., 2:66], signs, even=True), read_f16(raw, 0) * (0.5 + scale) * 0.5)


def iq3_s(raw: torch.Tensor) -> UnpackedBlocks:
    """9-bit index of codebook rows of four; levels are odd and at most 15: codes level + 16."""
    index = unpack_bits(raw, 66, 8, 1, 1).int() << 8 | raw[..., 2:66].int()
    codes = _signed_rows("IQ3_S", index, raw[..., 74:106], even=False) + 16
    return _as_bytes(codes, read_f16(raw, 0) * (1 + 2 * unpack_nibbles(raw, 106, 4, 1).float()))


def _iq1_codes(index: torch.Tensor, minus: torch.Tensor, offset: int) -> torch.Tensor:
    """Return rows of -1, 0, 1, each shifted by an eighth up or down, in eighths: one and an eighth is 9."""
    rows = table_on(index, codebooks.grid("IQ1_S").astype(np.int8))[index.int()] * 8
    return (rows + torch.where(minus, offset - 1, offset + 1).to(torch.int8)[..., None]).flatten(-2)


def iq1_s(raw: torch.Tensor) -> UnpackedBlocks:
    """11-bit index; scale and shift per 32 values."""
    words = _uint16s(raw, 34, 8)
    index = _bit_fields(words, 0, 3, 6, 9, mask=7) << 8 | raw[..., 2:34].int()
    scale = 2 * (words >> 12 & 7).float() + 1
    codes = _iq1_codes(index, (words > 0x7FFF).repeat_interleave(4, -1), 16)
    return _as_bytes(codes, read_f16(raw, 0) * scale / 8)


def iq1_m(raw: torch.Tensor) -> UnpackedBlocks:
    """As IQ1_S, with a scale per 16 values, a shift per 8, and a float16 in four nibbles."""
    words = _uint16s(raw, 48, 4)
    pieces = ((words >> 12) << torch.arange(0, 16, 4, device=raw.device)).sum(-1, keepdim=True)
    d = pieces.to(torch.int32).view(torch.int16)[..., ::2].contiguous().view(torch.float16).float()
    scale = 2 * _bit_fields(words, 0, 3, 6, 9, mask=7).float() + 1
    high = unpack_nibbles(raw, 32, 16, 1)
    codes = _iq1_codes((high & 7).int() << 8 | raw[..., :32].int(), high > 7, 32)
    return _as_bytes(codes, d * scale / 8)


def _iq4(raw: torch.Tensor, first: int, size: int) -> torch.Tensor:
    table = table_on(raw, np.array(codebooks.IQ4_VALUES, np.int8))
    return table[unpack_nibbles(raw, first, size, 16).int()]


def iq4_xs(raw: torch.Tensor) -> UnpackedBlocks:
    """x = d * (scale - 32) * value."""
    small = unpack_bits(raw, 2, 2, 2, 1) << 4 | unpack_nibbles(raw, 4, 4, 1)
    return _as_bytes(_iq4(raw, 8, 128), read_f16(raw, 0) * (small.float() - 32))


# Type -> (the kind that it is packed as, the function that unpacks (rows, blocks of the file, bytes) uint8).
REPACK_RULES: dict[str, tuple[str, Callable[[torch.Tensor], UnpackedBlocks]]] = {
    # x = d * (q - 8); of one and two bits and of trits, q is 9 or 7, code + 7, trit + 7
    "Q4_0": ("q4", lambda raw: UnpackedBlocks(unpack_nibbles(raw, 2, 16, 16), read_f16(raw, 0))),
    "Q1_0": ("q4", lambda raw: to_blocks32(unpack_bits(raw, 2, 16, 1, 1) * 2 + 7, read_f16(raw, 0))),
    "Q2_0": ("q4", lambda raw: to_blocks32(unpack_bits(raw, 2, 16, 2, 1) + 7, read_f16(raw, 0))),
    "TQ1_0": ("q4", tq1_0),
    "TQ2_0": ("q4", lambda raw: to_blocks32(unpack_bits(raw, 0, 64, 2, 32) + 7, read_f16(raw, 64))),
    # x = d * q + m
    "Q4_1": ("q4m", lambda raw: UnpackedBlocks(unpack_nibbles(raw, 4, 16, 16), read_f16(raw, 0), read_f16(raw, 2))),
    "Q5_1": ("q5m", lambda raw: UnpackedBlocks(_five_bits(raw, 4), read_f16(raw, 0), read_f16(raw, 2))),
    # x = d * (q - 16); MXFP4: d = 2**(e - 128), and scales far below the largest become zero
    "Q5_0": ("q5", lambda raw: UnpackedBlocks(_five_bits(raw, 2), read_f16(raw, 0))),
    "MXFP4": ("q5", lambda raw: UnpackedBlocks(_fp4(raw, 1, 16, 16, 16), _byte_scales(raw, 1, codebooks.e8m0_halves))),
    # x = d of 16 values * (q - 32)
    "NVFP4": ("q6", lambda raw: to_blocks32(_fp4(raw, 4, 32, 8, 32), _byte_scales(raw, 4, codebooks.e4m3_halves))),
    # x = d * q; Q8_1 has a sum too, which is not needed
    "Q8_0": ("q8", lambda raw: UnpackedBlocks(raw[..., 2:], read_f16(raw, 0))),
    "Q8_1": ("q8", lambda raw: UnpackedBlocks(raw[..., 4:], read_f16(raw, 0))),
    "Q8_K": ("q8", lambda raw: to_blocks32(raw[..., 4:260], slice_bytes(raw, 0, 4).view(torch.float32))),
    "IQ4_NL": ("q8", lambda raw: _as_bytes(_iq4(raw, 2, 16), read_f16(raw, 0))),
    # x = (d * scale) * q - dmin * min
    "Q4_K": ("q4m", lambda raw: to_blocks32(unpack_nibbles(raw, 16, 128, 32), *_k_scales(raw))),
    "Q5_K": ("q5m", q5_k), "Q2_K": ("q4mm", q2_k), "Q3_K": ("q6", q3_k), "Q6_K": ("q6", q6_k),
    "IQ1_S": ("q5", iq1_s), "IQ1_M": ("q6", iq1_m), "IQ2_XXS": ("q8", iq2_xxs), "IQ2_XS": ("q8d", iq2_xs),
    "IQ2_S": ("q8d", iq2_s), "IQ3_XXS": ("q8", iq3_xxs), "IQ3_S": ("q5", iq3_s), "IQ4_XS": ("q8", iq4_xs),
}  # fmt: skip
SLAB_CODES = 1 << 24  # unpacked at a time
UPLOAD_CHUNK_BYTES = 1 << 25
MAX_MINIMUM_RATIO = 64  # of a minimum to the largest scale; above it the minimum determines the unit
DENSE_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}  # other dense types become float32


def part_key(tensor: Tensor) -> str:
    """Return what neighbouring tensors must share to be one part."""
    if tensor.pack_as:
        return tensor.pack_as
    rule = REPACK_RULES.get(tensor.kind.name)
    return rule[0] if rule else str(DENSE_DTYPES.get(tensor.kind.name, torch.float32))


def pack_weight(tensors: Sequence[Tensor], device: torch.device) -> PackedWeight:
    """Pack tensors into one matrix, their rows one after the other; neighbours of one kind become one part."""
    return PackedWeight(tuple(_pack_part(list(group), device) for _, group in groupby(tensors, part_key)))


def _pack_part(tensors: Sequence[Tensor], device: torch.device) -> WeightPart:
    if tensors[0].pack_as == FP8:
        return _pack_fp8(tensors, device)
    if tensors[0].kind.name not in REPACK_RULES:
        return _pack_dense(tensors, device)
    raws = [_upload_bytes(t.rows, device).view(t.shape[0], -1, t.kind.block_bytes) for t in tensors]
    kind, _ = REPACK_RULES[tensors[0].kind.name]
    part = packed_weight.empty_planes(kind, sum(t.shape[0] for t in tensors), tensors[0].shape[1] // 32, device)
    part.unit = scale_unit(_largest_scale(tensors, raws))
    first = 0
    for unpacked in _unpack_slabs(tensors, raws):
        _store_slab(part, first, unpacked)
        first += len(unpacked.codes)
    return part


def _upload_bytes(rows: NDArray[np.uint8], device: torch.device) -> torch.Tensor:
    """Copy mapped bytes through two pinned buffers: one is filled while the other is sent."""
    flat = rows.reshape(-1)
    if device.type == "cpu":
        return torch.tensor(flat)
    out = torch.empty(flat.size, dtype=torch.uint8, device=device)
    pinned = [torch.empty(min(UPLOAD_CHUNK_BYTES, flat.size), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    stream = torch.cuda.current_stream(device)
    sent = [stream.record_event() for _ in range(2)]
    for i, start in enumerate(range(0, flat.size, UPLOAD_CHUNK_BYTES)):
        piece = flat[start : start + UPLOAD_CHUNK_BYTES]
        buffer = pinned[i % 2]
        sent[i % 2].synchronize()  # the copy before the last
        np.copyto(buffer.numpy()[: piece.size], piece)
        out[start : start + piece.size].copy_(buffer[: piece.size], non_blocking=True)
        sent[i % 2] = stream.record_event()
        release_pages(piece)
    stream.synchronize()
    return out


def _pack_dense(tensors: Sequence[Tensor], device: torch.device) -> WeightPart:
    """Copy dense tensors; types that the device does not multiply become float32 on the host."""
    out = torch.empty(
        sum(t.shape[0] for t in tensors), tensors[0].shape[1],
        dtype=DENSE_DTYPES.get(tensors[0].kind.name, torch.float32), device=device,
    )  # fmt: skip
    for first, slab in _dense_slabs(tensors, device):
        out[first : first + len(slab)] = slab
    return WeightPart.from_values(DENSE, out)


def _pack_fp8(tensors: Sequence[Tensor], device: torch.device) -> WeightPart:
    """Quantize dense tensors to e4m3, the largest of each row to the largest e4m3."""
    rows = sum(t.shape[0] for t in tensors)
    out = torch.empty(rows, tensors[0].shape[1], dtype=E4M3, device=device)
    scales = torch.empty(rows, device=device)
    for first, slab in _dense_slabs(tensors, device):
        span = slice(first, first + len(slab))
        out[span], scales[span] = packed_weight.quantize_e4m3(slab)
    return WeightPart.from_values(FP8, out, scales)


def _dense_slabs(tensors: Sequence[Tensor], device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, some dense rows on the device) of all tensors in order."""
    first = 0
    for tensor in tensors:
        step = max(1, SLAB_CODES // max(1, tensor.shape[1]))
        for start in range(0, tensor.shape[0], step):
            slab = tensor.take_rows(slice(start, start + step))
            if tensor.kind.name in (*DENSE_DTYPES, "F32"):
                values = _upload_bytes(slab.rows, device).view(DENSE_DTYPES.get(tensor.kind.name, torch.float32))
            else:
                values = torch.tensor(slab.dequantize()).to(device)
            yield first, values.view(slab.shape)
            first += slab.shape[0]


def _unpack_slabs(tensors: Sequence[Tensor], raws: Sequence[torch.Tensor]) -> Iterator[UnpackedBlocks]:
    """Yield codes and scales of all rows in order, a slab at a time."""
    for tensor, raw in zip(tensors, raws, strict=True):
        _, unpack = REPACK_RULES[tensor.kind.name]
        for slab in torch.split(raw, max(1, SLAB_CODES // tensor.shape[1])):
            yield unpack(slab)


def _largest_scale(tensors: Sequence[Tensor], raws: Sequence[torch.Tensor]) -> float:
    """Return the largest scale, in absolute value, or what the minima need."""
    largest = 0.0
    for unpacked in _unpack_slabs(tensors, raws):
        largest = max(largest, float(unpacked.scales.abs().max()))
        if unpacked.minima is not None:
            largest = max(largest, float(unpacked.minima.abs().max()) / MAX_MINIMUM_RATIO)
    return largest


def scale_unit(largest: float) -> float:
    """Return the power of two that brings the largest scale to 2**7 .. 2**8."""
    return ldexp(1.0, max(frexp(largest)[1] - 8, -126)) if largest else 1.0


def _store_slab(part: WeightPart, first: int, unpacked: UnpackedBlocks) -> None:
    kind, span = part.kind, slice(first, first + len(unpacked.codes))
    part.low[span] = _low_plane(kind, unpacked.codes)
    scales, minima = unpacked.scales, unpacked.minima
    if kind == "q4mm":
        assert minima is not None
        part.high[span] = _pack_pairs(minima / part.unit)[:, None]
    elif kind in HIGH_WORDS:
        part.high[span] = _high_plane(kind, unpacked.codes)
    if kind in PAIRED_SCALES:
        both = scales if minima is None or kind == "q4mm" else torch.cat((scales, minima), -1)
        part.scales[span] = _pack_pairs(both / part.unit)
    else:
        part.scales[span] = (scales[..., 0] / part.unit).half()


def _pack_pairs(x: torch.Tensor) -> torch.Tensor:
    """Pack (rows, blocks, 2) as two float16 in an int32."""
    return x.half().clone(memory_format=torch.contiguous_format).view(torch.int32)[..., 0]


def _as_words(codes: torch.Tensor) -> torch.Tensor:
    """View (rows, blocks, 4 n) bytes as (rows, n, blocks) int32."""
    return codes.clone(memory_format=torch.contiguous_format).view(torch.int32).transpose(1, 2)


def _low_plane(kind: str, codes: torch.Tensor) -> torch.Tensor:
    if kind in LOW_WORDS:
        return _as_words(codes)
    return _as_words((codes[..., :16] & 15) | ((codes[..., 16:] & 15) << 4))


def _high_plane(kind: str, codes: torch.Tensor) -> torch.Tensor:
    """Pack the bits above the fourth as gemv.py draws them."""
    shift, half, _ = packed_weight.high_bit_layout(kind, codes.device)
    shifted = (codes >> 4).int() << shift.int()  # (rows, blocks, 32)
    plane = torch.zeros(*codes.shape[:2], HIGH_WORDS[kind], dtype=torch.int32, device=codes.device)
    return plane.index_add_(-1, half, shifted).to(torch.int16).transpose(1, 2)
