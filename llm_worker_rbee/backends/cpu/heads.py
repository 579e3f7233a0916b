"""Rotary embedding with the cache write, and attention, as tasks of a program: which piece is what, and where it lies.

The arithmetic of one piece is in rotary.py and attention.py. What the cache holds (float32, float16, int8 with scales)
is known when a task is compiled.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba as nb
import numpy as np

from ..ops import AttentionParams, RopeTable
from . import attention, dealing, rotary
from .activations import quantize
from .compile import Task
from .memory import f32, f64, i8, i64, ints_at, scratch, u16
from .program import Instruction, doubles, table_of
from .step import Step, Table

FEW = 4  # tokens of a piece of the rotation
S_TOKENS, S_REQUESTS, S_TILES, S_SINGLES, S_POSITIONS, S_SLOTS = map(
    int, (Step.TOKENS, Step.REQUESTS, Step.TILES, Step.SINGLES, Step.POSITIONS, Step.SLOTS)
)
S_QUERY_START, S_TABLE, S_WIDTH, S_SIZE, S_KV, S_WORK = map(
    int, (Step.QUERY_START, Step.BLOCK_TABLE, Step.TABLE_WIDTH, Step.BLOCK_SIZE, Step.KV, Step.WORK)
)
S_QKV, S_QUERIES, S_MIXED = map(int, (Step.QKV, Step.QUERIES, Step.MIXED))
ANGLES, FREQUENCIES, PAIRS, ANGLE_SCALE = range(4)
LAYER, ROPE, HALF, HEADS, KV_HEADS, DIM, PADDED, WINDOW, SCALE, CAP, BYTES = range(11)
PLACES = 4  # addresses a layer has in the table of the cache: keys, values, their scales
HELD: dict[str, Any] = {"float32": f32, "float16": u16, "int8": i8}  # how a task sees what the cache holds
PART = ROWS = ALONG = ATTEND = CACHED = None  # set for each variant


def angles(args, step, piece):
    """cos and sin of some tokens' positions: (tokens, pairs)."""
    a, s = i64(args), i64(step)
    half, scale, first = a[PAIRS], np.float32(f64(args)[ANGLE_SCALE]), piece * FEW
    count = min(s[S_TOKENS] - first, FEW)
    rotary.angles(
        i64(s[S_POSITIONS] + first * 8), count, f32(a[FREQUENCIES]), half, scale,
        f32(s[a[ANGLES]] + first * half * 4), f32(s[a[ANGLES] + 1] + first * half * 4),
    )  # fmt: skip


def rope_store(args, step, piece):
    """Some tokens: q, k and v of one lie one after the other."""
    a, s = i64(args), i64(step)
    heads, kv_heads, dim, padded, half = a[HEADS], a[KV_HEADS], a[DIM], a[PADDED], a[HALF]
    kv, at = i64(s[S_KV]), PLACES * a[LAYER]
    keys, values, k_scales, v_scales = CACHED(kv[at]), CACHED(kv[at + 1]), f32(kv[at + 2]), f32(kv[at + 3])
    x, cos, sin, head = f32(s[S_QKV]), f32(s[a[ROPE]]), f32(s[a[ROPE] + 1]), scratch(padded)
    for t in range(piece * FEW, min(s[S_TOKENS], piece * FEW + FEW)):
        q = t * (heads + 2 * kv_heads) * dim
        k = q + heads * dim
        rotary.one_token(
            x, q, x, k, x, k + kv_heads * dim, cos, sin, t * half, half, heads, kv_heads, dim, padded, keys, values,
            k_scales, v_scales, i64(s[S_SLOTS])[t], s[S_SIZE], head, f32(s[S_QUERIES]), t * heads * padded,
        )  # fmt: skip


def deal(args, step, piece):
    """Cut attention into pieces and count them."""
    a, s = i64(args), i64(step)
    starts = nb.carray(ints_at(s[S_QUERY_START]), (s[S_REQUESTS] + 1,))
    s[S_TILES], s[S_SINGLES] = dealing.deal(starts, a[HEADS], PART, i64(s[S_WORK]))


def attend(args, step, piece):
    """One piece: a tile of tokens (ALONG), or a token alone with ROWS heads."""
    a, s = i64(args), i64(step)
    work, kv, at = i64(s[S_WORK]), i64(s[S_KV]), PLACES * a[LAYER]
    i = 4 * (piece if ALONG else s[S_TILES] + piece)
    token, request, head = work[i], work[i + 2], work[i + 3]
    keys, values, k_scales, v_scales = CACHED(kv[at]), CACHED(kv[at + 1]), f32(kv[at + 2]), f32(kv[at + 3])
    q, out, positions = f32(s[S_QUERIES]), f32(s[S_MIXED]), i64(s[S_POSITIONS])
    blocks = i64(s[S_TABLE] + request * s[S_WIDTH] * 8)
    heads, kv_heads, dim, size, window = a[HEADS], a[KV_HEADS], a[PADDED], s[S_SIZE], a[WINDOW]
    scale, cap = np.float32(f64(args)[SCALE]), np.float32(f64(args)[CAP])
    scores = scratch(attention.score_room(ROWS, positions[token + (ROWS - 1) * ALONG] + 1))
    ATTEND(
        q, (token * heads + head) * dim, heads * dim if ALONG else dim, keys, values, k_scales, v_scales, positions,
        token, blocks, size, head // (heads // kv_heads), kv_heads, dim, scale, cap, window, scores, out,
    )  # fmt: skip
    if a[BYTES]:  # heads that are whole pairs of blocks: their bytes are made while they are near
        for r in range(ROWS if ALONG else 1):
            at = ((token + r) * heads + head) * dim
            quantize(out, at, s, a[BYTES], at // 32, (at + (dim if ALONG else ROWS * dim)) // 32)


ANGLES_TASK = Task(angles)


@cache
def store_for(kind: str) -> Task:
    """Rotation and cache write, for what the cache holds."""
    return Task(rope_store, kind, CACHED=HELD[kind])


@cache
def deal_for(group: int) -> Task:
    """How attention is cut, where so many heads share a KV head."""
    part = attention.part_of(group)
    return Task(deal, str(part), PART=part)


@cache
def tiles_for(kind: str) -> Task:
    """Attention of tiles of tokens."""
    rows = attention.rows_for(attention.TILE, 1)
    return Task(attend, f"tiles,{kind}", ROWS=attention.TILE, ALONG=1, CACHED=HELD[kind], ATTEND=rows)


@cache
def singles_for(group: int, kind: str) -> Task:
    """Attention of tokens alone, where so many heads share a KV head."""
    part = attention.part_of(group)
    rows = attention.rows_for(part, 0)
    return Task(attend, f"{part},{kind}", ROWS=part, ALONG=0, CACHED=HELD[kind], ATTEND=rows)


def padded(dim: int) -> int:
    """Values of a head in the cache."""
    return -(-dim // attention.LANES) * attention.LANES


def angle_instruction(rope: RopeTable, number: int) -> Instruction:
    """The angles of all tokens, for the rotary table of this number."""
    args = table_of(Step.ANGLES + 2 * number, rope.inv_freq, len(rope.inv_freq), 0)
    return Instruction(ANGLES_TASK, doubles(args, ANGLE_SCALE, [rope.scale]), 1, Step.TOKENS, FEW)


def whole_bytes(dim: int) -> bool:
    """Whether attention can make the bytes of its heads: they share no pair of blocks, and none is padded."""
    return dim % 64 == 0


def arguments(
    layer: int, rope: int, pairs: int, heads: int, kv_heads: int, dim: int, params: AttentionParams, bytes_at: int = 0
) -> Table:
    """What the tasks of one layer are told: the number of its rotary table, the entry of the bytes that they make."""
    angles = Step.ANGLES + 2 * rope
    args = table_of(layer, angles, pairs, heads, kv_heads, dim, padded(dim), params.window, 0, 0, bytes_at)
    return doubles(args, SCALE, [params.scale, params.soft_cap])


def store_instruction(args: Table, kind: str) -> Instruction:
    """Rotation and cache write of all tokens."""
    return Instruction(store_for(kind), args, 1, Step.TOKENS, FEW)


def deal_instruction(args: Table) -> Instruction:
    """To come once in a step, before attention."""
    return Instruction(deal_for(int(args[HEADS] // args[KV_HEADS])), args, 1, Step.TOKENS, 1 << 40)


def attend_instructions(args: Table, kind: str) -> list[Instruction]:
    """Attention of all tokens."""
    singles = singles_for(int(args[HEADS] // args[KV_HEADS]), kind)
    return [Instruction(tiles_for(kind), args, 1, Step.TILES, 1), Instruction(singles, args, 1, Step.SINGLES, 1)]
