"""Activations laid out for the tensor cores, and their product with packed matrices: which tile, how many parts.

A table and a rule, both measured on an H200 (docs/decisions.md). With `fixed` the number of parts does not depend on
that of the tokens: then a token's sums are the same in any company, because a tile's size changes no order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton import cdiv, next_power_of_2

from . import device
from .matmul import matmul, matmul_numbers
from .planes import FP8, Part

FIXED = 64  # tokens that parts are chosen for, whatever there are
HOPPER_SHARED = 200 << 10  # bytes, about
PROGRAMS = 264  # that run at a time: two for each multiprocessor
COUNTS = (1, 2, 3, 4, 6, 8)  # of parts
MOST_PARTS = 8
PART_COSTS = 0.05  # to write and to read again, in runs of all columns
GROUP = 16  # blocks that lie together: matmul.py
FACTOR_BITS = 10  # float16 activations are at most 2**10


class Tile(NamedTuple):
    """How a product is cut: rows and tokens of a program, warps, stages."""

    rows: int
    tokens: int
    warps: int
    stages: int


USUAL = Tile(128, 64, 8, 3)
TILES = {16: Tile(64, 16, 4, 4), 32: Tile(64, 32, 4, 4), 64: USUAL}  # by the most tokens
MANY = Tile(128, 128, 8, 3)
SMALL = Tile(64, 64, 4, 2)  # of 33 and more where shared memory is less than a Hopper's
LARGE = {"q4": Tile(128, 256, 8, 3), "q4m": Tile(128, 256, 8, 3)}  # of more than 128; others lack the shared memory
MOST_TOKENS = 256  # for which this is faster than the vendor's product of a matrix written out


def tile_for(tokens: int, kind: str) -> Tile:
    """Fifth bits are taken two words at a time, which needs more shared memory a stage."""
    if device.interpreting():
        return Tile(256, min(64, max(16, next_power_of_2(tokens))), 4, 2)  # few and large programs
    if tokens > SMALL.tokens // 2 and device.shared_memory() < HOPPER_SHARED:
        return SMALL
    large = LARGE.get(kind, MANY) if tokens > MANY.tokens else MANY
    tile = next((tile for most, tile in TILES.items() if tokens <= most), large)
    return tile._replace(stages=tile.stages - 1) if kind in ("q5", "q5m") else tile


def parts_for(rows: int, columns: int, tokens: int, tile: Tile, most: int = MOST_PARTS) -> int:
    """Into how many parts the columns are cut: programs run PROGRAMS at a time, and nobody likes the last few."""
    programs = cdiv(rows, tile.rows) * cdiv(tokens, tile.tokens)
    most = min(most, max(1, columns // (32 * GROUP)))
    counts = [n for n in COUNTS if n <= most]
    best: int = min(counts, key=lambda n: cdiv(programs * n, PROGRAMS) / n + PART_COSTS * n)
    return best


def padded(columns: int) -> int:
    """Numbers of a token, spread."""
    return int(cdiv(columns, 32 * GROUP)) * 32 * GROUP


def product(x: torch.Tensor, factors: torch.Tensor, w: Any, tokens: int, most: int = MOST_PARTS, fixed: bool = False,
            pdl: bool = False) -> torch.Tensor:  # fmt: skip
    """(parts, tokens, rows) float32, whose sum is the product of spread activations with all parts of a matrix."""
    largest = max(w.parts, key=lambda part: part.rows)
    usual = FIXED if fixed else tokens
    count = parts_for(largest.rows, w.columns, usual, tile_for(usual, largest.kind), most)
    out = torch.empty(count, tokens, w.rows, device=x.device)
    first = 0
    for part in w.parts:
        _launch(x, factors, part, out.view(-1)[first:], tokens, count, w.rows, pdl)
        first += part.rows
    return out


def _launch(x: torch.Tensor, factors: torch.Tensor, part: Part, out: torch.Tensor, tokens: int, count: int,
            stride: int, pdl: bool) -> None:  # fmt: skip
    tile = tile_for(tokens, part.kind)
    matmul[(cdiv(part.rows, tile.rows), cdiv(tokens, tile.tokens), count)](
        x, factors, part.unit, part.low, part.high, part.scales, out, tokens, part.rows, part.blocks,
        part.kind, tile.rows, tile.tokens, stride, pdl,
        num_warps=tile.warps, num_stages=tile.stages, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def numbers_product(x: torch.Tensor, part: Part, most: int = MOST_PARTS) -> torch.Tensor:
    """(parts, tokens, rows) of numbers of any kind, in a fixed order: slower than the vendor's for many tokens."""
    assert part.values is not None
    tokens, columns = x.shape
    tile = tile_for(tokens, part.kind)._replace(stages=3)
    count = parts_for(part.rows, columns, FIXED, tile_for(FIXED, part.kind), most)
    out = torch.empty(count, tokens, part.rows, device=x.device)
    values = part.values
    if device.interpreting():  # which multiplies bfloat16 wrongly
        x, values = x.float(), values.float()
    matmul_numbers[(cdiv(part.rows, tile.rows), cdiv(tokens, tile.tokens), count)](
        x, values, part.scales, out, tokens, part.rows, columns, tile.rows, tile.tokens,
        32 if x.dtype == torch.float32 else 64, part.kind == FP8, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def spread_halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of numbers, spread, and the power of two that each was divided by: the slow way."""
    halves, factors = as_halves(x)
    rows = torch.nn.functional.pad(halves, (0, padded(x.shape[1]) - x.shape[1]))
    shape = (len(x), -1, 4, 4, 2, 4, 2, 2)  # group, lane, n, last, word, r, p
    return rows.view(shape).permute(5, 0, 1, 3, 7, 4, 2, 6).contiguous(), factors


def as_halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float16 rows and the power of two that each was divided by."""
    most = x.abs().amax(1).clamp_min(1e-30)
    factors = torch.exp2(torch.ceil(torch.log2(most)) - FACTOR_BITS)
    return (x / factors[:, None]).half(), factors
