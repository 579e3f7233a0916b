"""Parts of ops as programs of their own, for benchmarks: what a step fuses with others, or does not need.

They are made of the functions that the ops are made of. The causal mask is no part of any op: causality is the bound of
a loop there.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_worker_rbee.backends.cpu.jit import TaskKernel
from llm_worker_rbee.backends.cpu.kernels import attention
from llm_worker_rbee.backends.cpu.kernels import simd as f
from llm_worker_rbee.backends.cpu.kernels.attention import AttentionArg
from llm_worker_rbee.backends.cpu.kernels.attention_key_blocks import KEY_BLOCK, SPAN, TILE_ROWS, Rows
from llm_worker_rbee.backends.cpu.kernels.kv_layout import empty_layer, layer_addresses, padded_dim
from llm_worker_rbee.backends.cpu.kernels.pointers import aligned, f32, f64, i64, scratch
from llm_worker_rbee.backends.cpu.kernels.program import Step, Task, pack_args, pack_floats
from llm_worker_rbee.backends.cpu.kernels.rope import TOKENS_PER_PIECE, angles_task, rope_store_task, rotate_head
from llm_worker_rbee.backends.cpu.program import Program, prepare_step, run_step
from llm_worker_rbee.backends.ops import Ints, KVLayer, RopeTable

Floats = NDArray[np.float32]
SCORE_TOKENS = 64  # of a piece, as in prefill
SCORE_ROWS_PADDED = -(-(SCORE_TOKENS + TILE_ROWS) // f.LANES) * f.LANES  # room for whole tiles
KV_BLOCK = 16  # positions
SCORE: Any = None  # set for each variant
SCORE_ROWS: Any = None

# COS is the entry of cos, the next one is sin. MASK and the others are entries too, but for COUNT: values of a head.
RotateArg = IntEnum("RotateArg", "COS PAIRS HEADS DIM SOURCE OUT", start=0)
MaskArg = IntEnum("MaskArg", "MASK SCORES OUT COUNT", start=0)


def rotate_heads(args, step, piece):
    """Rotate all heads of some tokens."""
    a, s = i64(args), i64(step)
    heads, dim, pairs = a[RotateArg.HEADS], a[RotateArg.DIM], a[RotateArg.PAIRS]
    cos, sin = f32(s[a[RotateArg.COS]]), f32(s[a[RotateArg.COS] + 1])
    x, out, first = f32(s[a[RotateArg.SOURCE]]), f32(s[a[RotateArg.OUT]]), piece * TOKENS_PER_PIECE
    for t in range(first, min(s[Step.TOKENS], first + TOKENS_PER_PIECE)):
        for at in range(t * heads * dim, (t + 1) * heads * dim, dim):
            rotate_head(x, at, cos, sin, t * pairs, pairs, dim, dim, out, at)


def score_heads(args, step, piece):
    """Write the scores of some tokens of one head with all keys."""
    a, s = i64(args), i64(step)
    heads, tokens = a[AttentionArg.HEADS], s[Step.TOKENS]
    first, layer = piece // heads * SCORE_TOKENS, i64(s[Step.KV])
    view = attention.view_of(a, s, f32(layer[0]), f32(layer[1]), 0, piece % heads)
    count, at = min(SCORE_TOKENS, tokens - first), piece * SCORE_ROWS_PADDED
    q, scores = s[a[AttentionArg.QUERIES]] + 4 * at * view.dim, s[a[AttentionArg.OUT]] + 4 * at * KEY_BLOCK
    scale = np.float32(f64(args)[AttentionArg.SCALE])
    if tokens < attention.MIN_PREFILL_TOKENS:
        for r in range(count):
            SCORE(view, f32(q), r * view.dim, scale, 0, tokens, f32(scores + 4 * r * KEY_BLOCK))
    else:
        rows = Rows(i64(s[Step.POSITIONS]), first, count, 1, 0, 0, i64(s[Step.POSITIONS]), False)
        SCORE_ROWS(view, rows, count, f32(q), scale, 0, tokens, f32(scores), scratch(SPAN * (view.dim + 1)))


def make_mask(args, step, piece):
    """Write one row of the mask: 0, and -inf for keys after the query."""
    a, s = i64(args), i64(step)
    tokens, mask = s[Step.TOKENS], f32(s[a[MaskArg.MASK]])
    for j in range(tokens):
        mask[piece * tokens + j] = np.float32(0) if j <= piece else np.float32(-np.inf)


def add_mask(args, step, piece):
    """Add the mask to the scores of one head."""
    a, s = i64(args), i64(step)
    count, mask = a[MaskArg.COUNT], f32(s[a[MaskArg.MASK]])
    scores, out, first = f32(s[a[MaskArg.SCORES]]), f32(s[a[MaskArg.OUT]]), piece * a[MaskArg.COUNT]
    whole = count - count % f.LANES
    for i in range(0, whole, f.LANES):
        f.store(out, first + i, f.add(f.load(scores, first + i), f.load(mask, i)))
    for i in range(whole, count):
        out[first + i] = scores[first + i] + mask[i]


ROTATE_HEADS, MAKE_MASK, ADD_MASK = map(TaskKernel, (rotate_heads, make_mask, add_mask))


@cache
def score_heads_kernel() -> TaskKernel:
    """Return the kernel of the scores of heads that have a KV head each."""
    return TaskKernel(score_heads, SCORE=attention.score_kernel(1), SCORE_ROWS=attention.score_rows_kernel())


class CpuParts:
    """Programs of single parts, with their arrays."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def rope(self, q: Floats, k: Floats, positions: Ints, table: RopeTable) -> Callable[[], tuple[Floats, Floats]]:
        (tokens, heads, dim), pairs = q.shape, len(table.inv_freq)
        x = np.concatenate((q, k), axis=1, dtype=np.float32)
        out, (cos, sin) = np.empty_like(x), np.empty((2, tokens, pairs), np.float32)
        buffers = dict(enumerate((cos, sin, x, out), Step.END))
        at_cos, _, source, to = buffers
        args = pack_args(at_cos, pairs, x.shape[1], dim, source, to)
        rotate = Task(ROTATE_HEADS, args, 1, Step.TOKENS, TOKENS_PER_PIECE)
        entries: dict[int, Any] = {Step.POSITIONS: positions.astype(np.int64), **buffers}
        program = Program([angles_task(table, at_cos), rotate])
        run = prepare_step(program, entries, {Step.TOKENS: tokens}, self.threads)

        def rotate_both() -> tuple[Floats, Floats]:
            run()
            return out[:, :heads], out[:, heads:]

        return rotate_both

    def attention_scores(self, q: Floats, k: Floats, scale: float) -> Callable[[], Floats]:
        """The scores are a view, (heads, tiles, SCORE_TOKENS, S): rows of KEY_BLOCK, as the kernel writes them."""
        tokens, heads, dim = q.shape
        assert k.shape == q.shape
        assert tokens <= KEY_BLOCK
        kv, tiles, padded = self._stored(k), -(-tokens // SCORE_TOKENS), padded_dim(dim)
        queries = aligned(np.zeros, (tiles, heads, SCORE_ROWS_PADDED, padded), np.float32)
        for tile in range(tiles):
            some = q[tile * SCORE_TOKENS : (tile + 1) * SCORE_TOKENS]
            queries[tile, :, : len(some), :dim] = some.transpose(1, 0, 2)
        out: Floats = aligned(np.empty, (tiles, heads, SCORE_ROWS_PADDED, KEY_BLOCK), np.float32)
        args = pack_args(0, heads, heads, padded, 0, 0, 0, Step.END, Step.END + 1, 0, 0)
        pack_floats(args, AttentionArg.SCALE, [scale, 0.0])
        entries = {
            Step.POSITIONS: np.full(tokens, tokens - 1),
            Step.BLOCK_TABLE: np.arange(kv.v.shape[0]),
            Step.KV: layer_addresses([kv]),
            Step.END: queries,
            Step.END + 1: out,
        }
        counts: dict[int, int] = {
            Step.TOKENS: tokens,
            Step.BLOCK_SIZE: KV_BLOCK,
            Step.TABLE_WIDTH: kv.v.shape[0],
            Step.REQUESTS: 1,
        }
        program = Program([Task(score_heads_kernel(), args, heads, Step.TOKENS, SCORE_TOKENS)])
        run = prepare_step(program, entries, counts, self.threads)

        def score(keys: KVLayer = kv) -> Floats:  # which it keeps alive
            run()
            return out.transpose(1, 0, 2, 3)[:, :, :SCORE_TOKENS, :tokens]

        return score

    def _stored(self, k: Floats) -> KVLayer:
        """Return keys in a KV cache; at position 0 RoPE changes nothing."""
        tokens, heads, dim = k.shape
        kv = empty_layer(-(-tokens // KV_BLOCK), KV_BLOCK, heads, dim, "float32")
        cos, sin = np.ones((tokens, 1), np.float32), np.zeros((tokens, 1), np.float32)
        queries = np.empty((tokens, heads, padded_dim(dim)), np.float32)
        qkv = np.concatenate((k, k, k), axis=1, dtype=np.float32)
        buffers = dict(enumerate((cos, sin, qkv, queries), Step.END))
        at_cos, _, source, to = buffers
        store = rope_store_task(0, at_cos, 1, heads, heads, dim, "float32", source, to)
        entries = {Step.SLOT_MAPPING: np.arange(tokens), Step.KV: layer_addresses([kv]), **buffers}
        counts: dict[int, int] = {Step.TOKENS: tokens, Step.BLOCK_SIZE: KV_BLOCK}
        run_step(Program([store]), entries, counts, self.threads)
        return kv

    def causal_mask(self, scores: Floats, *, cached: bool) -> Callable[[], Floats]:
        heads, tokens = scores.shape[-3:-1]
        out, mask = np.empty_like(scores), np.empty((tokens, tokens), np.float32)
        entries = dict(enumerate((mask, scores, out), Step.END))
        args, counts = pack_args(*entries, tokens * tokens), {int(Step.TOKENS): tokens}
        make, add = Task(MAKE_MASK, args), Task(ADD_MASK, args, heads, Step.TOKENS, KEY_BLOCK)
        assert tokens <= KEY_BLOCK
        run_step(Program([make]), entries, counts, self.threads)
        run = prepare_step(Program([add] if cached else [make, add]), entries, counts, self.threads)

        def apply_mask() -> Floats:
            run()
            return out

        return apply_mask
