"""Random packed weights on a device."""

from __future__ import annotations

import torch

from llm_worker_rbee.backends.cuda.kernels.compact_kinds import COMPACT_KINDS
from llm_worker_rbee.backends.cuda.packed_weight import PAIRED_SCALES, WeightPart, dequantize_rows, empty_planes

SPREAD = {
    "e4m3": 0.0025,
    "mxfp4": 5.9,
    "nvfp4": 5.9,
    "q4": 4.6,
    "q4m": 4.6,
    "q5": 9.2,
    "q5m": 9.2,
    "q6": 18.5,
    "q8": 74.0,
}  # deviation of the codes


def random_planes(kind: str, rows: int, columns: int, device: torch.device | str, std: float = 0.02) -> WeightPart:
    """Make random codes, with scales that give values about this deviation."""
    part = empty_planes(kind, rows, columns // 32, device)
    for plane in (part.low, part.high, part.small):
        if plane is not None:
            limits = torch.iinfo(plane.dtype)
            plane.random_(limits.min, limits.max)
    if kind == "e4m3":
        part.low &= -0x40404041  # numbers below 2, none of them NaN
    s = 0.5 + torch.rand(*part.scales.shape, 2, device=device)
    if kind in COMPACT_KINDS:
        return _with_random_scales(part, s, std)
    s *= std / SPREAD[kind]
    if kind in ("q4m", "q5m"):
        s[..., 1] *= -7.5
    part.scales.copy_(s.half().view(torch.int32)[..., 0] if kind in PAIRED_SCALES else s[..., 0].half())
    return part


def _with_random_scales(part: WeightPart, s: torch.Tensor, std: float) -> WeightPart:
    """Set scales of a compact kind, and the unit that gives its first rows the deviation."""
    if part.kind == "q2_k":
        s[..., 1] *= -1.5
    part.scales = s.half().view(torch.int32)[..., 0] if COMPACT_KINDS[part.kind].has_pairs else s[..., 0].half()
    sample = torch.empty(min(part.rows, 16), part.columns, device=s.device)
    dequantize_rows(part, 0, sample)
    part.unit = std / float(sample.std())
    return part
