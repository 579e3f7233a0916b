"""Tensors of a file -> planes on a device (matvec.py draws them). The raw bytes travel; torch unpacks them there.

A slab of rows at a time: its codes (a byte each), then the planes; nothing is ever dequantized. Scales and minima are
float16 times one power of two for the whole matrix, the unit: the largest scale is 2**7 to 2**8 of it, so that a weight
still fits a float16. What is a float16 in the file stays exact (but for what is 2**-22 of the largest); a product (a K
type's float16 times its small integer) is rounded once, by at most 2**-11 of itself. Codes are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import frexp, ldexp
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...weights import Tensor
from ...weights.checkpoint import release_pages
from . import device, fp8, pack_iq, pack_rules
from .pack_rules import Codes
from .planes import FP8, HIGH, LOW, NUMBERS, PAIRS, Part, empty_planes, high_places

SLAB = 1 << 24  # codes unpacked at a time
CHUNK = 1 << 25  # bytes on their way to the device at a time
MINIMA = 64  # a minimum may be so many times the largest scale before it counts instead


class Rule(NamedTuple):
    """How a type of the file is packed; the rule takes (rows, blocks of the file, bytes) uint8."""

    kind: str
    codes: Callable[[torch.Tensor], Codes]


RULES: dict[str, Rule] = {
    "Q4_0": Rule("q4", pack_rules.q4_0),
    "Q4_1": Rule("q4m", pack_rules.q4_1),
    "Q5_0": Rule("q5", pack_rules.q5_0),
    "Q5_1": Rule("q5m", pack_rules.q5_1),
    "Q8_0": Rule("q8", pack_rules.q8_0),
    "Q8_1": Rule("q8", pack_rules.q8_1),
    "Q1_0": Rule("q4", pack_rules.q1_0),
    "Q2_0": Rule("q4", pack_rules.q2_0),
    "TQ1_0": Rule("q4", pack_rules.tq1_0),
    "TQ2_0": Rule("q4", pack_rules.tq2_0),
    "MXFP4": Rule("q5", pack_rules.mxfp4),
    "NVFP4": Rule("q6", pack_rules.nvfp4),
    "Q2_K": Rule("q4mm", pack_rules.q2_k),
    "Q3_K": Rule("q6", pack_rules.q3_k),
    "Q4_K": Rule("q4m", pack_rules.q4_k),
    "Q5_K": Rule("q5m", pack_rules.q5_k),
    "Q6_K": Rule("q6", pack_rules.q6_k),
    "Q8_K": Rule("q8", pack_rules.q8_k),
    "IQ1_S": Rule("q5", pack_iq.iq1_s),
    "IQ1_M": Rule("q6", pack_iq.iq1_m),
    "IQ2_XXS": Rule("q8", pack_iq.iq2_xxs),
    "IQ2_XS": Rule("q8d", pack_iq.iq2_xs),
    "IQ2_S": Rule("q8d", pack_iq.iq2_s),
    "IQ3_XXS": Rule("q8", pack_iq.iq3_xxs),
    "IQ3_S": Rule("q5", pack_iq.iq3_s),
    "IQ4_NL": Rule("q8", pack_iq.iq4_nl),
    "IQ4_XS": Rule("q8", pack_iq.iq4_xs),
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
