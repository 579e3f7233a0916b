"""Rotary embedding with the cache write, and attention, as tasks of a program: which piece is what, and where it lies.

The arithmetic of one piece is in rotary.py and attention.py. What the cache holds (float32, float16, int8 with scales)
is known when a task is compiled.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba as nb
import numpy as np

from ..types import AttentionParams, RopeTable
from . import attention, dealing, rotary
from .compile import Task, kernel
from .memory import f32, f64, i8, i64, ints_at, u16
from .program import Instruction, doubles, table_of
from .step import Step, Table

FEW = 4  # tokens of a piece of the rotation
S_TOKENS, S_REQUESTS, S_TILES, S_SINGLES, S_POSITIONS, S_SLOTS = map(
    int, (Step.TOKENS, Step.REQUESTS, Step.TILES, Step.SINGLES, Step.POSITIONS, Step.SLOTS)
)
S_QUERY_START, S_TABLE, S_WIDTH, S_SIZE, S_KV, S_WORK = map(
    int, (Step.QUERY_START, Step.BLOCK_TABLE, Step.TABLE_WIDTH, Step.BLOCK_SIZE, Step.KV, Step.WORK)
)
S_QKV, S_QUERIES, S_MIXED, S_WORKERS = map(int, (Step.QKV, Step.QUERIES, Step.MIXED, Step.WORKERS))
ANGLES, FREQUENCIES, PAIRS, ANGLE_SCALE = range(4)
LAYER, ROPE, HALF, HEADS, KV_HEADS, DIM, PADDED, WINDOW, SCALE, CAP = range(10)
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


@kernel
def apart(piece, tokens, workers):
    """Which tokens a piece is: pieces that are worked on at the same time lie far from each other.

    The keys of 16 neighbouring positions share lines of the cache, for which two threads would fight.
    """
    pieces = (tokens + FEW - 1) // FEW
    each, more = pieces // workers, pieces % workers
    worker = piece % workers
    return (worker * each + min(worker, more) + piece // workers) * FEW


def rope_store(args, step, piece):
    """Some tokens: q, k and v of one lie one after the other."""
    a, s = i64(args), i64(step)
    heads, kv_heads, dim, padded, half = a[HEADS], a[KV_HEADS], a[DIM], a[PADDED], a[HALF]
    kv, at = i64(s[S_KV]), PLACES * a[LAYER]
    keys, values, k_scales, v_scales = CACHED(kv[at]), CACHED(kv[at + 1]), f32(kv[at + 2]), f32(kv[at + 3])
    x, cos, sin, head = f32(s[S_QKV]), f32(s[a[ROPE]]), f32(s[a[ROPE] + 1]), np.empty(padded, np.float32)
    first = apart(piece, s[S_TOKENS], s[S_WORKERS])
    for t in range(first, min(s[S_TOKENS], first + FEW)):
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
    scores = attention.aligned(attention.scratch(ROWS, positions[token + (ROWS - 1) * ALONG] + 1))
    ATTEND(
        q, (token * heads + head) * dim, heads * dim if ALONG else dim, keys, values, k_scales, v_scales, positions,
        token, blocks, size, head // (heads // kv_heads), kv_heads, dim, scale, cap, window, scores, out,
    )  # fmt: skip


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


def arguments(layer: int, rope: int, pairs: int, heads: int, kv_heads: int, dim: int, params: AttentionParams) -> Table:
    """What the tasks of one layer are told; `rope` is the number of its rotary table."""
    args = table_of(layer, Step.ANGLES + 2 * rope, pairs, heads, kv_heads, dim, padded(dim), params.window, 0, 0)
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
