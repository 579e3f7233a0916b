"""Mixture of experts: products in which each token is multiplied by its own experts (kernels/experts.py routes them).

A slot is one of the k experts of a token: slot s is of token s // k. Few slots take GEMV, each for itself; more are
grouped by expert into tiles (`group_slots`), so that a tile of tokens reads the weights of one expert once. Results are
in the order of slots. A stack of experts is packed like one matrix, with the rows of expert e after the rows of e - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from triton import cdiv

from ...errors import UnsupportedModelError
from ...weights import Tensor
from ...weights.checkpoint import refuse_order
from .device import HOPPER_SHARED_BYTES, is_interpreted, pdl_options, shared_memory_bytes
from .kernels.compact_kinds import COMPACT_KINDS
from .kernels.elementwise import WeightedExperts, launch_add_norm, launch_convert
from .kernels.experts import SlotTiles, launch_gather, launch_group
from .kernels.gemm import FLOAT4, gemm_dense, gemm_packed
from .kernels.gemm_hopper import ExpertTiles, launch_gemm
from .kernels.gemv import GATED, STORE, gemv_packed
from .linear import (
    GROUP_COLUMNS,
    LARGE_TILE,
    GemmTile,
    gemm_tile,
    hopper_tile,
    norm_parts,
    takes_hopper_kernel,
)
from .packed_weight import Activations, GemvActivations, Int8Activations, PackedExperts, WeightPart, kernel_outputs
from .repack import pack_weight, part_key

# By the slots of an expert: measured on an H200 with 128 experts in Q4_K and 32 in MXFP4.
TILES_BY_SLOTS = {
    8: GemmTile(64, 16, 4, 3),
    24: GemmTile(64, 32, 4, 3),
    64: GemmTile(128, 64, 4, 3),
    1 << 30: GemmTile(128, 128, 8, 3),
}
# Tiles and columns for which kernels/gemm_hopper.py is faster, although activations are gathered for it
# (docs/decisions/gpu.md#d117). Its results have the same bits as results of `gemm_packed`.
MAX_GATHERED_TILE, MIN_GATHERED_COLUMNS = 32, 2560


def pack_experts(experts: Sequence[Sequence[Tensor]], device: torch.device) -> PackedExperts:
    """Pack the tensors of all experts, stacked by rows within an expert; neighbours of one kind become one part."""
    parts: list[WeightPart] = []
    refuse_order([tensor for tensors in experts for tensor in tensors])
    for _, group in groupby(range(len(experts[0])), lambda i: part_key(experts[0][i])):
        chosen = list(group)
        packed = pack_weight([tensors[i] for tensors in experts for i in chosen], device).parts
        if len(packed) > 1:
            raise UnsupportedModelError(f"tensor {experts[0][chosen[0]].name!r}: experts have different types")
        parts += packed
    if len({part.values is None for part in parts}) > 1:
        raise UnsupportedModelError(f"tensor {experts[0][0].name!r}: experts have packed and unpacked matrices")
    return PackedExperts(tuple(parts), len(experts))


def expert_tile(slots: int, w: PackedExperts) -> GemmTile:
    """Return the tile of a grouped product, by the slots of an expert if all have as many."""
    if is_interpreted():
        return GemmTile(256, 16, 4, 2)
    tile = next(tile for limit, tile in TILES_BY_SLOTS.items() if slots <= limit * w.count)
    if any(part.kind in ("q5", "q5m") or part.kind in COMPACT_KINDS for part in w.parts):
        tile = tile._replace(stages=2)
    device = w.parts[0].low.device
    is_small = shared_memory_bytes(device) < HOPPER_SHARED_BYTES
    few = [part for part in w.parts if is_small or part.kind in COMPACT_KINDS]  # whose largest tiles do not fit
    fitting = [gemm_tile(LARGE_TILE.tokens, part.kind, part.rows // w.count, device) for part in few]
    return min([tile, *fitting], key=lambda choice: choice.rows * choice.tokens)


def grouped_gemv(
    x: GemvActivations,
    w: PackedExperts,
    experts: torch.Tensor,
    out: Int8Activations | torch.Tensor,
    per_row: int,
    *,
    activation: str = "silu",
    bias: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Multiply few activations by their experts, a slot at a time: to floats (slots, rows), or, with gate and up rows,
    to activation(gate) * up as int8. Row r of `x` serves `per_row` slots; `bias` is (experts, rows)."""
    values, first, is_gated = x.values, 0, isinstance(out, Int8Activations)
    assert isinstance(values, Int8Activations)
    for part in w.parts:
        rows, unused = part.rows // w.count, values.scales
        tile_rows, warps, prefetch = _gemv_tile(part.kind, is_gated=is_gated)
        to = kernel_outputs(out) if isinstance(out, Int8Activations) else (out.view(-1)[first:],) * 3
        gemv_packed[(cdiv(rows, tile_rows), experts.numel())](
            values.codes, values.scales, values.sums, unused if x.squares is None else x.squares, x.eps, part.unit,
            part.low, part.high, part.scales, to[0], unused, unused, to[1], to[2], unused, rows, part.blocks, 1,
            part.kind, tile_rows, warps, prefetch, GATED if is_gated else STORE, *norm_parts(x), is_gated, pdl,
            w.rows, activation, part.small, part.table, experts, per_row,
            None if bias is None else bias.view(-1)[first:], num_warps=warps, **pdl_options(pdl),
        )  # fmt: skip
        first += rows


def _gemv_tile(kind: str, *, is_gated: bool) -> tuple[int, int, int]:
    """Return the rows of a program, its warps, and the rows that a warp loads ahead."""
    if is_interpreted():
        return (64, 32, 1) if is_gated else (32, 32, 1)
    if is_gated:
        return (64, 8, 1) if kind in FLOAT4 or kind in COMPACT_KINDS else (64, 8, 2)
    return (16, 4, 1) if kind in COMPACT_KINDS else (16, 4, 2)


def empty_expert_activations(w: PackedExperts, count: int) -> Activations:
    """Allocate the input of a grouped product: interleaved for packed weights, else rows."""
    device = w.parts[0].low.device
    if w.is_packed:
        columns = cdiv(w.columns, GROUP_COLUMNS) * GROUP_COLUMNS
        values = torch.empty(count, columns, dtype=torch.float16, device=device)
        return Activations(values, torch.empty(count, device=device), True)
    values = torch.empty(count, w.columns, dtype=w.dense_dtype, device=device)
    return Activations(values, torch.empty(count, device=device) if w.dense_dtype == torch.float16 else None)


def _takes_hopper_kernel(part: WeightPart, slots: int) -> bool:
    is_faster = slots <= MAX_GATHERED_TILE or part.columns >= MIN_GATHERED_COLUMNS
    return is_faster and takes_hopper_kernel(part.kind, part.low.device)


def grouped_gemm(
    x: Activations, w: PackedExperts, tiles: SlotTiles, slots: int, per_row: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply activations by their experts: (slots, rows) float32. Row r of `x` serves `per_row` slots; `bias` is
    (experts, rows)."""
    out = torch.empty(slots, w.rows, device=x.values.device)
    tile, first = expert_tile(slots, w), 0
    gathered: Activations | None = None
    for part in w.parts:
        rows = part.rows // w.count
        grid, to = (cdiv(rows, tile.rows), len(tiles.experts), 1), out.view(-1)[first:]
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        own_bias = None if bias is None else bias.view(-1)[first:]
        if _takes_hopper_kernel(part, tiles.size):
            if gathered is None:
                gathered = x._replace(values=launch_gather(x.values, tiles, per_row))
            of_experts = ExpertTiles(w.count, tiles, per_row, own_bias)
            launch_gemm(gathered, part, to, w.rows, 1, hopper_tile(tiles.size, part.kind)[:4], of_experts)
        elif part.values is None:
            gemm_packed[grid](
                x.values, x.factors, part.unit, part.low, part.high, part.scales, to, len(x.values), rows, w.rows,
                part.blocks, part.kind, tile.rows, tiles.size, part.small, part.table, tiles.experts, tiles.slots,
                per_row, own_bias, **options,
            )  # fmt: skip
        else:
            gemm_dense[grid](
                x.values, part.values, part.scales, to, len(x.values), rows, w.columns, tile.rows, tiles.size,
                32 if x.values.dtype == torch.float32 else 64, False, w.rows, x.factors, tiles.experts, tiles.slots,
                per_row, own_bias, **options,
            )  # fmt: skip
        first += rows
    return out


def grouped_linear(
    x: torch.Tensor, w: PackedExperts, experts: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply x (tokens, columns), or (tokens, k, columns), by the experts of each token: (tokens, k, rows)."""
    (tokens, k), rows = experts.shape, x.reshape(-1, x.shape[-1])
    activations = empty_expert_activations(w, len(rows))
    launch_convert(rows, activations)
    tiles = launch_group(experts, w.count, expert_tile(experts.numel(), w).tokens)
    return grouped_gemm(activations, w, tiles, experts.numel(), k if x.dim() == 2 else 1, bias).view(tokens, k, -1)


def combine(
    x: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None, shared_gate: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the weighted sum over the experts of each token, in their order, and the shared expert's part, by the
    kernel of fused steps, with zeros as the residual stream."""
    tokens, k, width = x.shape
    total, unused = torch.zeros(tokens, width, device=x.device), torch.empty(tokens, width, device=x.device)
    parts = WeightedExperts(weights.contiguous(), k, shared, shared_gate)
    ones = torch.ones(width, device=x.device)
    launch_add_norm(x.reshape(1, tokens * k, width), total, ones, 1e-6, Activations(unused), experts=parts)
    return total
