"""Claim 1: the same decoder block through the modules of layers/, and as one function with everything inlined."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...backends.ops import OPS, AttentionParams, Batch, KVLayer, RopeTable
from ...layers.attention import Attention
from ...layers.block import Block
from ...layers.linear import Linear
from ...layers.rms_norm import RMSNorm
from ...layers.rope import inverse_frequencies
from ...layers.swiglu import SwiGLU
from .. import statistics
from ..format import quantity
from . import dense
from .harness import (
    Finding,
    Floats,
    Lab,
    Shape,
    Verdict,
    by_length,
    figure,
    in_percent,
    most,
    normal,
    same,
    vote_faster,
)

RULE = (
    "confirmed if the one function is faster outside the noise at most lengths, refuted if the modules are; both sides "
    "use the same float32 weights and the same matrix library"
)
ROPE_BASE, BLOCK_SIZE, TOLERANCE = 10000.0, 16, 1e-4


def run(lab: Lab) -> Finding:
    """Modules against one function, and what the calls alone cost."""
    made = make_block(lab.shape)
    call = _call_cost(lab, made)
    table = [["tokens", "modules", "one function", "change", "99% interval", "calls alone"]]
    changes, shares = {}, []
    for length in lab.lengths((1, 8, 32), (128,)):
        x = normal(np.random.default_rng(length), length, lab.shape.d_model)
        sides = two_sides(made, x)
        (added, stream), (added_too, stream_too) = sides["modules"](), sides["fused"]()
        same(added + stream, added_too + stream_too, TOLERANCE, f"block of {length} tokens")
        taken = lab.race(length, sides)
        change = changes[length] = statistics.compare(taken["modules"], taken["fused"])
        shares.append(call / statistics.estimate(taken["modules"]).value)
        low_high = f"{change.low:+.1%} to {change.high:+.1%}"
        table.append([str(length), figure(taken["modules"]), figure(taken["fused"]), f"{change.change:+.1%}", low_high,
                      f"{shares[-1]:.2%}"])  # fmt: skip
    verdict = most([vote_faster(change) for change in changes.values()])
    told = (
        f"one function against modules: {by_length(changes, in_percent)}; the calls of a block cost "
        f"{quantity(call, 's')}, {max(shares):.2%} of it at most"
    )
    return Finding(Verdict.of(lab.claim, verdict, told), table)


def make_block(shape: Shape) -> Block:
    """A llama block with random float32 weights, as the dense op table takes them."""
    rng, width = np.random.default_rng(1), shape.d_model
    inner = shape.n_heads * shape.head_dim

    def linear(rows: int, columns: int) -> Linear:
        return Linear(normal(rng, rows, columns, scale=columns**-0.5))

    def norm() -> RMSNorm:
        return RMSNorm(np.abs(normal(rng, width)) + np.float32(0.5), 1e-5)

    attention = Attention(
        qkv=linear(3 * inner, width),
        output=linear(width, inner),
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_heads,
        head_dim=shape.head_dim,
        rope=RopeTable(inverse_frequencies(ROPE_BASE, shape.head_dim), 1.0),
        params=AttentionParams(shape.head_dim**-0.5),
    )
    return Block(norm(), attention, norm(), SwiGLU(linear(2 * shape.d_ff, width), linear(width, shape.d_ff)))


def one_batch(length: int) -> Batch:
    """One request of `length` new tokens, its blocks in order."""
    positions = np.arange(length)
    return Batch(
        ids=positions,
        positions=positions,
        slot_mapping=positions,
        query_start=np.array([0, length]),
        context_len=np.array([length]),
        block_table=np.arange(-(-length // BLOCK_SIZE))[None, :],
        logits_index=positions[-1:],
    )


def two_sides(made: Block, x: Floats) -> dict[str, Any]:
    """Both give (what the block adds, the stream): the layers on a paged cache, and the one function on its own."""
    a, length = made.attention, len(x)
    kv = dense.DENSE.empty_kv(-(-length // BLOCK_SIZE), BLOCK_SIZE, a.n_kv_heads, a.head_dim)
    room, batch = dense.Room.of(length, a.n_kv_heads, a.head_dim), one_batch(length)
    return {
        "modules": lambda: made(dense.DENSE, x, None, kv, batch),
        "fused": lambda: dense.block(made, x, *dense.angles(a.rope, 0, length), room, 0),
    }


def _call_cost(lab: Lab, made: Block) -> float:
    """The time of a block whose ops do nothing: what splitting it into modules can cost at most."""
    a = made.attention
    x = np.zeros((1, (a.n_heads + 2 * a.n_kv_heads) * a.head_dim), np.float32)
    empty: dict[str, Any] = dict.fromkeys(OPS, lambda *_: x) | {"add_rms_norm": lambda *_: (x, x)}
    ops, batch, kv = dense.op_table(**empty), one_batch(1), KVLayer(x, x)
    taken = lab.race("calls", {"modules": lambda: made(ops, x, None, kv, batch)})
    return statistics.estimate(taken["modules"]).value
