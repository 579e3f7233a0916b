"""Repacking: tensors of a file -> planes on a device (kernels/gemv.py draws them). Torch unpacks uploaded bytes.

A slab of rows at a time: its codes (a byte each), then the planes; nothing is dequantized. Scales and minima are
float16 times one power of two for the whole matrix, the unit: the largest scale is 2**7 to 2**8 of it, so that a
weight still fits float16. A float16 of the file stays exact (down to 2**-22 of the largest); a product (a K type's
float16 times its small integer) is rounded once, by at most 2**-11 of itself, except in compact kinds, which keep both.
Codes are exact. unpack_blocks.py has the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import frexp, ldexp

import numpy as np
import torch
from numpy.typing import NDArray

from ...weights import Tensor
from ...weights.checkpoint import release_pages, shared_order
from . import packed_weight
from .kernels.compact_kinds import COMPACT_KINDS, MAX_SMALL_SCALE
from .kernels.gemm import FLOAT4
from .packed_weight import DENSE, E4M3, FP8, HIGH_WORDS, LOW_WORDS, PAIRED_SCALES, PackedWeight, WeightPart
from .unpack_blocks import REPACK_RULES, CompactBlocks, UnpackedBlocks

SLAB_CODES = 1 << 24  # unpacked at a time
UPLOAD_CHUNK_BYTES = 1 << 25
FLOAT4_FACTOR = 256  # of the unit of E2M1: kernels multiply scales by 2**15
MAX_MINIMUM_RATIO = 64  # of a minimum to the largest scale; above it the minimum determines the unit
DENSE_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}  # other dense types become float32


def part_key(tensor: Tensor) -> str:
    """Return the properties that neighbouring tensors must share to be one part."""
    if tensor.pack_as:
        return tensor.pack_as
    rule = REPACK_RULES.get(tensor.kind.name)
    return rule[0] if rule else str(DENSE_DTYPES.get(tensor.kind.name, torch.float32))


def pack_weight(tensors: Sequence[Tensor], device: torch.device) -> PackedWeight:
    """Pack tensors into one matrix, their rows one after the other; neighbours of one kind become one part."""
    order = shared_order(tensors)
    return PackedWeight(
        tuple(_pack_part(list(group), device) for _, group in groupby(tensors, part_key)),
        order=None if order is None else torch.tensor(order, device=device),
    )


def _pack_part(tensors: Sequence[Tensor], device: torch.device) -> WeightPart:
    if tensors[0].pack_as == FP8:
        return _pack_fp8(tensors, device)
    if tensors[0].kind.name not in REPACK_RULES:
        return _pack_dense(tensors, device)
    raws = [_upload_bytes(t.rows, device).view(t.shape[0], -1, t.kind.block_bytes) for t in tensors]
    kind, _ = REPACK_RULES[tensors[0].kind.name]
    part = packed_weight.empty_planes(kind, sum(t.shape[0] for t in tensors), tensors[0].shape[1] // 32, device)
    has_small_scales = kind in COMPACT_KINDS and COMPACT_KINDS[kind].has_small_scales
    factor = MAX_SMALL_SCALE if has_small_scales else FLOAT4_FACTOR if kind in FLOAT4 else 1
    part.unit = scale_unit(_largest_scale(tensors, raws) * factor)
    first = 0
    for unpacked in _unpack_slabs(tensors, raws):
        span = slice(first, first + len(unpacked.scales))
        if isinstance(unpacked, CompactBlocks):
            _store_compact(part, span, unpacked)
        else:
            _store_slab(part, span, unpacked)
        first = span.stop
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
    shape = sum(t.shape[0] for t in tensors), tensors[0].shape[1]
    out = torch.empty(shape, dtype=DENSE_DTYPES.get(tensors[0].kind.name, torch.float32), device=device)
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


def _unpack_slabs(tensors: Sequence[Tensor], raws: Sequence[torch.Tensor]) -> Iterator[UnpackedBlocks | CompactBlocks]:
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


def _store_slab(part: WeightPart, span: slice, unpacked: UnpackedBlocks) -> None:
    kind, scales, minima = part.kind, unpacked.scales, unpacked.minima
    part.low[span] = _low_plane(kind, unpacked.codes)
    if kind in HIGH_WORDS:
        part.high[span] = _high_plane(kind, unpacked.codes)
    part.scales[span] = _scale_plane(scales, minima, part.unit, in_pairs=kind in PAIRED_SCALES)


def _store_compact(part: WeightPart, span: slice, unpacked: CompactBlocks) -> None:
    part.low[span] = _as_words(unpacked.low)
    if unpacked.high is not None:
        part.high[span] = unpacked.high
    if unpacked.small is not None:
        assert part.small is not None
        part.small[span] = unpacked.small
    in_pairs = COMPACT_KINDS[part.kind].has_pairs
    part.scales[span] = _scale_plane(unpacked.scales, unpacked.minima, part.unit, in_pairs=in_pairs)


def _scale_plane(scales: torch.Tensor, minima: torch.Tensor | None, unit: float, *, in_pairs: bool) -> torch.Tensor:
    """Return scales as float16, or two of them, or a scale and a minimum, in an int32."""
    if not in_pairs:
        return (scales[..., 0] / unit).half()
    return _pack_pairs((scales if minima is None else torch.cat((scales, minima), -1)) / unit)


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
    """Pack the bits above the fourth as kernels/gemv.py draws them."""
    shift, half, _ = packed_weight.high_bit_layout(kind, codes.device)
    shifted = (codes >> 4).int() << shift.int()  # (rows, blocks, 32)
    plane = torch.zeros(*codes.shape[:2], HIGH_WORDS[kind], dtype=torch.int32, device=codes.device)
    return plane.index_add_(-1, half, shifted).to(torch.int16).transpose(1, 2)
