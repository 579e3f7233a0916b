"""Weights and activations in e4m3 (`--quantize fp8`): a float32 scale for each row of a matrix, and for each token.

Up to FEW tokens stay the numbers they are, and weights are converted in registers (numbers.py). More are rounded too:
then the tensor cores multiply bytes by bytes, twice as many a second as bfloat16. Where the vendor's product does not
take a shape, the weights become bfloat16, which holds them exactly, for the time of one product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton import cdiv, next_power_of_2

from .device import interpreting
from .gemv import matvec_numbers, round_rows
from .packed_weight import FP8, Part

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
FEW = 4  # tokens that are not rounded
STEP = 16  # what rows and columns must be a multiple of for the vendor's product


class Tile(NamedTuple):
    """How numbers.py cuts a product: rows of a program, its warps, columns that a warp has at a time, turns ahead."""

    rows: int
    warps: int
    wide: int
    ahead: int


# By tokens: of one measured on an H200, of two and four what fits the registers (by what the compiler says for sm_90).
TILES: dict[int, dict[str, Tile]] = {
    1: {
        "qkv": Tile(8, 4, 512, 4), "o": Tile(32, 16, 256, 8), "gate_up": Tile(64, 16, 256, 8),
        "down": Tile(32, 16, 256, 8), "head": Tile(8, 8, 512, 8),
    },
    2: {
        "qkv": Tile(8, 4, 256, 4), "o": Tile(32, 16, 128, 8), "gate_up": Tile(64, 16, 128, 4),
        "down": Tile(32, 16, 128, 8), "head": Tile(8, 4, 256, 4),
    },
    4: {
        "qkv": Tile(8, 8, 256, 8), "o": Tile(32, 16, 128, 4), "gate_up": Tile(64, 16, 128, 2),
        "down": Tile(32, 16, 128, 4), "head": Tile(8, 8, 256, 8),
    },
}  # fmt: skip


def is_fp8(matrix: Any) -> bool:
    """Whether a matrix is of this kind."""
    return all(part.kind == FP8 for part in matrix.parts)


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, columns) -> e4m3 and the scales (n) that they are multiplied by; in plain torch."""
    numbers = x.float()
    scales = numbers.abs().amax(1).clamp_min(1e-30) / LARGEST
    return (numbers / scales[:, None]).to(E4M3), scales


def rounded_rows(x: torch.Tensor, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for activations, by one kernel. The interpreter rounds e4m3 wrongly (1.99 -> 1)."""
    if interpreting():
        return rounded(x)
    tokens, columns = x.shape
    out = torch.empty(tokens, columns, dtype=E4M3, device=x.device)
    scales = torch.empty(tokens, device=x.device)
    size = next_power_of_2(columns)
    options: Any = {"launch_pdl": True} if pdl else {}
    round_rows[(tokens,)](x, out, scales, columns, size, pdl, num_warps=max(1, min(16, size // 512)), **options)
    return out, scales


def fits(part: Part) -> bool:
    """Whether the vendor's product takes these weights."""
    return part.rows % STEP == 0 and part.columns % STEP == 0


def is_rounded_before(matrix: Any) -> bool:
    """Whether who writes activations for a matrix rounds them itself."""
    return is_fp8(matrix) and fits(matrix.parts[0]) and not interpreting()


def product(x: torch.Tensor, part: Part, factors: torch.Tensor | None = None, pdl: bool = False) -> torch.Tensor:
    """x (tokens, columns) of any floats, or e4m3 with their factors (tokens) @ weights.T -> (tokens, rows), bfloat16 as
    of other numbers."""
    assert part.values is not None
    if not fits(part):
        return unrounded(x, part)
    if x.dtype == E4M3 and factors is not None:
        rows, scales = x, factors
    else:
        rows, scales = rounded_rows(x.contiguous(), pdl)
    if interpreting():
        return (rows.float() * scales[:, None]) @ (part.values.float() * part.scales[:, None]).T
    return torch._scaled_mm(
        rows, part.values.T, scales[:, None], part.scales[None], out_dtype=torch.bfloat16, use_fast_accum=True
    )


def unrounded(x: torch.Tensor, part: Part) -> torch.Tensor:
    """The product in bfloat16, float32 out: for shapes that the vendor's e4m3 product does not take."""
    assert part.values is not None
    if interpreting():
        return x.float() @ part.values.float().T * part.scales
    sums = torch.mm(x.bfloat16(), part.values.bfloat16().T, out_dtype=torch.float32)
    return sums * part.scales


def times(x: torch.Tensor, part: Part) -> torch.Tensor:
    """x (tokens, columns) float32 -> (tokens, rows) float32, for any number of tokens."""
    return by_numbers(x, part) if len(x) <= FEW else product(x, part).float()


def by_numbers(x: torch.Tensor, part: Part) -> torch.Tensor:
    """Up to FEW tokens as they are: no norm before the product, nothing after it."""
    tokens, out = len(x), x.new_empty(len(x), part.rows)
    size = next_power_of_2(tokens)  # few kernels are compiled
    padded = torch.nn.functional.pad(x, (0, 0, 0, size - tokens)) if size > tokens else x
    sums = out if size == tokens else x.new_empty(size, part.rows)
    rows, warps, wide, ahead = TILES[size]["qkv"]
    if interpreting():  # few programs
        rows = warps = min(256, next_power_of_2(part.rows))
    matvec_numbers[(cdiv(part.rows, rows),)](
        padded, x, 0.0, part.values, sums, x, x, x, part.rows, part.columns, B=size, ROWS=rows, WARPS=warps, WIDE=wide,
        AHEAD=ahead, EPILOGUE=0, PARTS=0, SIZE=1, PDL=False, scales=part.scales,
        num_warps=8 if interpreting() else warps,
    )  # fmt: skip
    return sums[:tokens]
