"""Random packed weights on a device."""

from __future__ import annotations

import torch

from llm_worker_rbee.backends.cuda.packed_weight import PAIRED_SCALES, WeightPart, empty_planes


def random_planes(kind: str, rows: int, columns: int, device: torch.device | str, std: float = 0.02) -> WeightPart:
    """Make random codes, with scales that give values about this deviation."""
    part = empty_planes(kind, rows, columns // 32, device)
    part.low.random_(-(2**31), 2**31 - 1)
    part.high.random_(torch.iinfo(part.high.dtype).min, torch.iinfo(part.high.dtype).max)
    spread = {"q4": 4.6, "q4m": 4.6, "q4mm": 4.6, "q5": 9.2, "q5m": 9.2, "q6": 18.5, "q8": 74.0, "q8d": 74.0}[kind]
    s = (0.5 + torch.rand(rows, columns // 32, 2, device=device)) * std / spread
    if kind in ("q4m", "q5m"):
        s[..., 1] *= -7.5
    if kind == "q4mm":
        part.high[:] = (-7.5 * s).half().view(torch.int32).transpose(1, 2)
    part.scales = s.half().view(torch.int32)[..., 0] if kind in PAIRED_SCALES else s[..., 0].half()
    return part
