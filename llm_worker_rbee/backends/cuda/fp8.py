"""Products with e4m3 weights (`--quantize fp8`): a float32 scale per row of the matrix, and per token.

Up to MAX_GEMV_TOKENS tokens keep their precision, and weights are converted in registers (gemv.py). More are quantized
too: then the tensor cores multiply e4m3 by e4m3, twice as fast as bfloat16. Where `torch._scaled_mm` does not take a
shape, the weights become bfloat16, which holds them exactly, for one product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton import cdiv, next_power_of_2

from .device import is_interpreted
from .gemv import gemv_dense, quantize_rows_e4m3
from .packed_weight import PackedWeight, WeightPart

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
MAX_GEMV_TOKENS = 4
SCALED_MM_ALIGNMENT = 16  # of rows and columns


class DenseGemvTile(NamedTuple):
    """Rows and warps of a program of `gemv_dense`, columns of a warp's iteration, iterations loaded ahead."""

    rows: int
    warps: int
    tile_k: int
    prefetch: int


# By tokens: for one measured on an H200, for two and four what fits the registers (by the compiler's report for sm_90).
GEMV_TILES: dict[int, dict[str, DenseGemvTile]] = {
    tokens: {name: DenseGemvTile(*tile) for name, tile in tiles.items()}
    for tokens, tiles in {
        1: {"qkv": (8, 4, 512, 4), "o": (32, 16, 256, 8), "gate_up": (64, 16, 256, 8), "down": (32, 16, 256, 8),
            "head": (8, 8, 512, 8)},
        2: {"qkv": (8, 4, 256, 4), "o": (32, 16, 128, 8), "gate_up": (64, 16, 128, 4), "down": (32, 16, 128, 8),
            "head": (8, 4, 256, 4)},
        4: {"qkv": (8, 8, 256, 8), "o": (32, 16, 128, 4), "gate_up": (64, 16, 128, 2), "down": (32, 16, 128, 4),
            "head": (8, 8, 256, 8)},
    }.items()
}  # fmt: skip


def quantize_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n, columns) as e4m3 and the scales (n) to multiply by; in plain torch."""
    values = x.float()
    scales = values.abs().amax(1).clamp_min(1e-30) / E4M3_MAX
    return (values / scales[:, None]).to(E4M3), scales


def quantize_activations_e4m3(x: torch.Tensor, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same by one kernel. The interpreter rounds e4m3 wrongly (1.99 -> 1)."""
    if is_interpreted():
        return quantize_e4m3(x)
    tokens, columns = x.shape
    out = torch.empty(tokens, columns, dtype=E4M3, device=x.device)
    scales = torch.empty(tokens, device=x.device)
    size = next_power_of_2(columns)
    options: Any = {"launch_pdl": True} if pdl else {}
    quantize_rows_e4m3[(tokens,)](x, out, scales, columns, size, pdl, num_warps=max(1, min(16, size // 512)), **options)
    return out, scales


def _fits_scaled_mm(part: WeightPart) -> bool:
    return part.rows % SCALED_MM_ALIGNMENT == 0 and part.columns % SCALED_MM_ALIGNMENT == 0


def takes_e4m3_activations(w: PackedWeight) -> bool:
    """Return whether the producer of activations for this matrix quantizes them itself."""
    return w.is_fp8 and _fits_scaled_mm(w.parts[0]) and not is_interpreted()


def matmul_fp8(
    x: torch.Tensor, part: WeightPart, factors: torch.Tensor | None = None, pdl: bool = False
) -> torch.Tensor:
    """Multiply x (tokens, columns), of any float type or e4m3 with factors (tokens), by weights.T: (tokens, rows)."""
    assert part.values is not None
    if not _fits_scaled_mm(part):
        return _matmul_bfloat16(x, part)
    if x.dtype == E4M3 and factors is not None:
        rows, scales = x, factors
    else:
        rows, scales = quantize_activations_e4m3(x.contiguous(), pdl)
    if is_interpreted():
        return (rows.float() * scales[:, None]) @ (part.values.float() * part.scales[:, None]).T
    return torch._scaled_mm(
        rows, part.values.T, scales[:, None], part.scales[None], out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _matmul_bfloat16(x: torch.Tensor, part: WeightPart) -> torch.Tensor:
    assert part.values is not None
    if is_interpreted():
        return x.float() @ part.values.float().T * part.scales
    sums = torch.mm(x.bfloat16(), part.values.bfloat16().T, out_dtype=torch.float32)
    return sums * part.scales


def linear_fp8(x: torch.Tensor, part: WeightPart) -> torch.Tensor:
    """Multiply x (tokens, columns) float32 by weights.T for any number of tokens: (tokens, rows) float32."""
    return _gemv(x, part) if len(x) <= MAX_GEMV_TOKENS else matmul_fp8(x, part).float()


def _gemv(x: torch.Tensor, part: WeightPart) -> torch.Tensor:
    tokens, out = len(x), x.new_empty(len(x), part.rows)
    size = next_power_of_2(tokens)  # fewer kernels to compile
    padded = torch.nn.functional.pad(x, (0, 0, 0, size - tokens)) if size > tokens else x
    sums = out if size == tokens else x.new_empty(size, part.rows)
    rows, warps, tile_k, prefetch = GEMV_TILES[size]["qkv"]
    if is_interpreted():  # few programs
        rows = warps = min(256, next_power_of_2(part.rows))
    gemv_dense[(cdiv(part.rows, rows),)](
        padded, x, 0.0, part.values, sums, x, x, x, part.rows, part.columns, B=size, ROWS=rows, WARPS=warps,
        TILE_K=tile_k, PREFETCH=prefetch, EPILOGUE=0, NORM_PARTS=0, NORM_SIZE=1, PDL=False, scales=part.scales,
        num_warps=8 if is_interpreted() else warps,
    )  # fmt: skip
    return sums[:tokens]
