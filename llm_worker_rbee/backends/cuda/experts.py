"""Mixture of experts: routing, and products in which each token is multiplied by its own experts.

A slot is one of the k experts of a token: slot s is of token s // k. Few slots take GEMV, each for itself; more are
grouped by expert into tiles (`group_slots`), so that a tile of tokens reads the weights of one expert once. Results are
in the order of slots. A stack of experts is packed like one matrix, the rows of expert e after those of e - 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton import next_power_of_2

from .intrinsics import launch_next, wait_for_previous

SLOTS_PER_STEP = tl.constexpr(1024)  # that a program of `group_slots` reads at a time
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 0, 1, 2


@triton.jit
def router_rows(
    residual, norm, squares, eps, weights, bias, out, width: tl.constexpr, experts,
    ROWS: tl.constexpr, TILE: tl.constexpr, NORM_PARTS: tl.constexpr, NORM_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply the norm of the residual stream by the router's weights: program (ROWS experts, token)."""
    t = tl.program_id(1)
    e = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    launch_next(PDL)
    total = tl.zeros((ROWS, TILE), tl.float32)
    wait_for_previous(PDL)
    for start in tl.static_range(0, width, TILE):
        c = start + tl.arange(0, TILE)[None, :]
        mask = c < width
        x = tl.load(residual + t * width + c, mask=mask, other=0.0) * tl.load(norm + c, mask=mask, other=0.0)
        w = tl.load(weights + e * width + c, mask=mask & (e < experts), other=0.0)
        total += w.to(tl.float32) * x
    i = tl.arange(0, NORM_SIZE)
    mean = tl.sum(tl.load(squares + t * NORM_PARTS + i, mask=i < NORM_PARTS, other=0.0), 0) / width
    y = tl.sum(total, 1) * tl.rsqrt(mean + eps)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if bias is not None:
        y += tl.load(bias + row, mask=row < experts, other=0.0)
    tl.store(out + t * experts + row, y, mask=row < experts)


@triton.jit
def route_rows(
    logits, bias, experts, weights, num_experts, scale,
    K: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Choose the K experts of a token, best first, the lower number first where scores are equal."""
    t = tl.program_id(0)
    launch_next(PDL)
    wait_for_previous(PDL)
    e = tl.arange(0, SIZE)
    z = tl.load(logits + t * num_experts + e, mask=e < num_experts, other=float("-inf"))
    if SCORING == 1:
        score = 1.0 / (1.0 + tl.exp(-z))
    elif SCORING == 0:
        exps = tl.exp(z - tl.max(z, 0))
        score = exps / tl.sum(exps, 0)
    else:
        score = z
    choice = score
    if bias is not None:
        choice += tl.load(bias + e, mask=e < num_experts, other=0.0)
    choice = tl.where(e < num_experts, choice, float("-inf"))
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.int32)
    picked = tl.full((SLOTS,), float("-inf"), tl.float32)
    for k in tl.static_range(K):
        best = tl.argmax(choice, 0, tie_break_left=True)
        chosen = tl.where(slot == k, best, chosen)
        picked = tl.where(slot == k, tl.sum(tl.where(e == best, score, 0.0), 0), picked)
        choice = tl.where(e == best, float("-inf"), choice)
    is_slot = slot < K
    if SCORING == 2:
        exps = tl.exp(picked - tl.max(picked, 0))
        picked = exps / tl.sum(exps, 0)
    else:
        picked = tl.where(is_slot, picked, 0.0)
        if RENORMALIZE:
            picked = picked / tl.sum(picked, 0)
    tl.store(experts + t * K + slot, chosen, mask=is_slot)
    tl.store(weights + t * K + slot, picked * scale, mask=is_slot)


@triton.jit(do_not_specialize=["slots"])
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


class SlotTiles(NamedTuple):
    """Slots grouped by expert, in tiles of which the device knows the number."""

    experts: torch.Tensor  # (tiles,), -1: no tile
    slots: torch.Tensor  # (tiles * size,), -1: none
    size: int


def launch_group(experts: torch.Tensor, num_experts: int, size: int) -> SlotTiles:
    """Group slots into tiles; as many as there may be at most."""
    slots = experts.numel()
    max_tiles = min(slots, slots // size + num_experts)
    tiles = SlotTiles(
        torch.empty(max_tiles, dtype=torch.int32, device=experts.device),
        torch.empty(max_tiles * size, dtype=torch.int32, device=experts.device), size,
    )  # fmt: skip
    group_slots[(num_experts + 1,)](
        experts, tiles.experts, tiles.slots, slots, max_tiles, num_experts, next_power_of_2(num_experts + 1), size,
        num_warps=4,
    )  # fmt: skip
    return tiles
