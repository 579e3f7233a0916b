"""Mixture of experts: the router, and slots grouped by expert for the products of ../experts.py.

A slot is one of the k experts of a token: slot s is of token s // k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton import cdiv, next_power_of_2

from ...ops import RouteParams
from ..device import is_interpreted, pdl_options
from ..packed_weight import WeightPart
from .intrinsics import launch_next, wait_for_previous

SLOTS_PER_STEP = tl.constexpr(1024)  # that a program of `group_slots` reads at a time
ROUTER_ROWS = 4  # experts of a program of `router_rows`
MAX_ROUTER_PROGRAMS = 4096  # for more, a norm and a product by cuBLAS are faster (on an H200)
IS_SIGMOID = {"softmax": False, "sigmoid": True}


@triton.jit
def router_rows(
    residual,
    norm,
    eps,
    weights,
    bias,
    out,
    experts,
    width: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply the norm of the residual stream by the router's weights: program (ROWS experts, token)."""
    t = tl.program_id(1)
    e = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    launch_next(PDL)
    wait_for_previous(PDL)
    total = tl.zeros((ROWS, TILE), tl.float32)
    squares = tl.zeros((TILE,), tl.float32)
    for start in tl.static_range(0, width, TILE):
        c = start + tl.arange(0, TILE)
        x = tl.load(residual + t * width + c, mask=c < width, other=0.0)
        squares += x * x
        x = x * tl.load(norm + c, mask=c < width, other=0.0)
        at = weights + e[:, None] * width + c[None, :]
        w = tl.load(at, mask=(e < experts)[:, None] & (c < width)[None, :], other=0.0)
        total += w.to(tl.float32) * x[None, :]
    y = tl.sum(total, 1) * tl.rsqrt(tl.sum(squares, 0) / width + eps)
    if bias is not None:
        y += tl.load(bias + e, mask=e < experts, other=0.0)
    tl.store(out + t * experts + e, y, mask=e < experts)


@triton.jit
def route_rows(
    logits,
    bias,
    experts,
    weights,
    num_experts,
    scale,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr = False,
    expert_scales=None,
):
    """Choose the K experts of a token, best first, the lower number first where scores are equal.

    `expert_scales` (experts) multiply the weights of their experts in the end."""
    t = tl.program_id(0)
    launch_next(PDL)
    wait_for_previous(PDL)
    e = tl.arange(0, SIZE)
    z = tl.load(logits + t * num_experts + e, mask=e < num_experts, other=float("-inf"))
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-z))
    else:
        exps = tl.exp(z - tl.max(z, 0))
        score = exps / tl.sum(exps, 0)
    choice = score
    if bias is not None:
        choice += tl.load(bias + e, mask=e < num_experts, other=0.0)
    choice = tl.where(e < num_experts, choice, float("-inf"))
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.int32)
    picked = tl.zeros((SLOTS,), tl.float32)
    for k in tl.static_range(K):
        best = tl.minimum(tl.argmax(choice, 0, tie_break_left=True), num_experts - 1)  # rows of padding may be NaN
        chosen = tl.where(slot == k, best, chosen)
        picked = tl.where(slot == k, tl.sum(tl.where(e == best, score, 0.0), 0), picked)
        choice = tl.where(e == best, float("-inf"), choice)
    is_slot = slot < K
    if RENORMALIZE:
        picked = picked / (tl.sum(picked, 0) + 1e-20)
    tl.store(experts + t * K + slot, chosen, mask=is_slot)
    picked *= scale
    if expert_scales is not None:
        picked *= tl.load(expert_scales + chosen)
    tl.store(weights + t * K + slot, picked, mask=is_slot)


@triton.jit(do_not_specialize=["slots", "max_tiles"])
def group_slots(experts, tile_experts, tile_slots, slots, max_tiles, num_experts, SIZE: tl.constexpr, BM: tl.constexpr):
    """List the slots of an expert, one program each, in tiles of BM; the last program fills the tiles that are left."""
    own = tl.program_id(0)
    e = tl.arange(0, SIZE)
    i = tl.arange(0, SLOTS_PER_STEP)
    counts = tl.zeros((SIZE,), tl.int32)
    for start in range(0, slots, SLOTS_PER_STEP):
        found = tl.load(experts + start + i, mask=start + i < slots, other=SIZE - 1)
        counts += tl.histogram(found, SIZE)
    tiles = tl.where(e < num_experts, (counts + BM - 1) // BM, 0)
    first = tl.sum(tl.where(e < own, tiles, 0), 0)
    last = first + tl.sum(tl.where(e == own, tiles, 0), 0)
    if own == num_experts:
        for tile in range(first, max_tiles):
            tl.store(tile_experts + tile, -1)
        return
    for tile in range(first, last):
        tl.store(tile_experts + tile, own)
    place = first * BM
    for start in range(0, slots, SLOTS_PER_STEP):
        found = tl.load(experts + start + i, mask=start + i < slots, other=SIZE - 1)
        is_own = found == own
        rank = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(tile_slots + place + rank - 1, start + i, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), 0)
    rest = tl.arange(0, BM)
    tl.store(tile_slots + place + rest, -1, mask=place + rest < last * BM)


@triton.jit(do_not_specialize=["tokens", "places"])
def gather_slots(
    x, tile_experts, tile_slots, out, tokens, places, width, BM: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy interleaved activations, `width` of a token and word, to the place of each slot that has one in the tiles:
    program (place, word)."""
    place, word = tl.program_id(0), tl.program_id(1)
    if tl.load(tile_experts + place // BM) < 0:
        return
    slot = tl.load(tile_slots + place)
    if slot < 0:
        return
    c = tl.arange(0, BLOCK)
    values = tl.load(x + (word * tokens + slot // SLOTS) * width + c, mask=c < width)
    tl.store(out + (word * places + place).to(tl.int64) * width + c, values, mask=c < width)


class SlotTiles(NamedTuple):
    """Slots grouped by expert, in tiles of which the device knows the number."""

    experts: torch.Tensor  # (tiles,), -1: no tile
    slots: torch.Tensor  # (tiles * size,), -1: none
    size: int


def router_is_fused(tokens: int, router: WeightPart) -> bool:
    """Return whether `launch_router` is faster than a norm and a product by cuBLAS."""
    return bool(tokens * cdiv(router.rows, ROUTER_ROWS) <= MAX_ROUTER_PROGRAMS)


def launch_router(
    residual: torch.Tensor, norm: torch.Tensor, eps: float, router: WeightPart, bias: torch.Tensor | None, *, pdl: bool
) -> torch.Tensor:
    """Return the router's logits, (tokens, experts), from the residual stream."""
    (tokens, width), (rows, tile, warps) = residual.shape, (32, 1024, 4) if is_interpreted() else (ROUTER_ROWS, 1024, 8)
    out = torch.empty(tokens, router.rows, device=residual.device)
    router_rows[(cdiv(router.rows, rows), tokens)](
        residual, norm, eps, router.values, bias, out, router.rows, width, rows, min(tile, next_power_of_2(width)),
        pdl, num_warps=warps, **pdl_options(pdl),
    )  # fmt: skip
    return out


def launch_route(
    logits: torch.Tensor,
    params: RouteParams,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts and the weights of each token: (tokens, k)."""
    tokens, count = logits.shape
    experts = torch.empty(tokens, params.k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, params.k, device=logits.device)
    route_rows[(tokens,)](
        logits, bias, experts, weights, count, params.scale, params.k, next_power_of_2(count),
        next_power_of_2(params.k), IS_SIGMOID[params.scoring], params.renormalize, pdl, scales,
        num_warps=1, enable_fp_fusion=False, **pdl_options(pdl),
    )  # fmt: skip
    return experts, weights


def launch_group(experts: torch.Tensor, num_experts: int, size: int) -> SlotTiles:
    """Group slots into tiles; as many as there may be at most."""
    slots = experts.numel()
    max_tiles = min(slots, slots // size + num_experts)
    tiles = SlotTiles(
        torch.empty(max_tiles, dtype=torch.int32, device=experts.device),
        torch.empty(max_tiles * size, dtype=torch.int32, device=experts.device),
        size,
    )
    group_slots[(num_experts + 1,)](
        experts,
        tiles.experts,
        tiles.slots,
        slots,
        max_tiles,
        num_experts,
        next_power_of_2(num_experts + 1),
        size,
        num_warps=4,
    )
    return tiles


def launch_gather(x: torch.Tensor, tiles: SlotTiles, per_row: int) -> torch.Tensor:
    """Return interleaved activations (rows, columns) in the order of the slots in the tiles; row r serves `per_row`
    slots. What no slot has a place for is not written."""
    (tokens, columns), places = x.shape, len(tiles.slots)
    out = torch.empty(places, columns, dtype=x.dtype, device=x.device)
    gather_slots[(places, 4)](
        x,
        tiles.experts,
        tiles.slots,
        out,
        tokens,
        places,
        columns // 4,
        tiles.size,
        per_row,
        next_power_of_2(columns // 4),
        num_warps=4,
    )
    return out
