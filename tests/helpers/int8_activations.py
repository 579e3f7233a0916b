"""Int8 quantization of activations in plain torch: the twin of the CUDA kernels."""

from __future__ import annotations

import torch

from llm_worker_rbee.backends.cuda.packed_weight import Int8Activations


def quantize(x: torch.Tensor) -> Int8Activations:
    """Round each block of 32 of x (B, columns) to steps of its largest value / 127."""
    b = x.reshape(x.shape[0], -1, 32)
    d = b.abs().amax(-1) / 127
    q = torch.floor(b * torch.where(d > 0, 1 / d, 0)[..., None] + 0.5)
    words = q.to(torch.int8).view(torch.int32)  # (B, blocks, 8)
    sums = q.view(*q.shape[:2], 2, 16).sum(-1) * d[..., None]
    return Int8Activations(words.transpose(1, 2).contiguous(), d, sums.transpose(1, 2).contiguous())


def dequantize(x: Int8Activations) -> torch.Tensor:
    """Return (B, columns) float32."""
    codes = x.codes.transpose(1, 2).clone(memory_format=torch.contiguous_format).view(torch.int8).float()
    return (codes.view(*x.scales.shape, 32) * x.scales[..., None]).view(x.scales.shape[0], -1)
