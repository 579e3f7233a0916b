"""Claim 1: the same decoder block through the modules of layers/, and as one function with everything inlined.

`DENSE` is the reference backend with float32 weights, so that a matrix product is one library call on both sides.
`run_block` calls nothing but NumPy: q and k are rotated together, the cache is contiguous and allocated once,
temporaries are reused, and causality is the bound of a loop over tiles of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...backends.ops import OPS, AttentionParams, Backend, Batch, Ints, KVLayer
from ...backends.reference import ReferenceBackend
from ...layers.attention import Attention
from ...layers.block import Block
from ...layers.linear import Linear
from ...layers.rms_norm import RMSNorm
from ...layers.swiglu import SwiGLU
from ...weights import Tensor
from .. import statistics
from ..results import quantity
from . import harness
from .harness import Finding, Floats, Harness, KVBuffers, Shape, random_array

RULE = (
    "confirmed if the one function is faster outside the noise at most lengths, refuted if the modules are; both sides "
    "use the same float32 weights and the same matrix library"
)
BLOCK_SIZE, TOLERANCE = 16, 1e-4
QUERY_TILE = 64  # queries that share one loop bound
FUTURE = np.triu(np.ones((QUERY_TILE, QUERY_TILE), np.bool_), 1)


def _prepare(tensors: Sequence[Tensor]) -> Floats:
    return np.concatenate([tensor.dequantize() for tensor in tensors])


def _embed(table: Floats, ids: Ints, scale: float = 1.0) -> Floats:
    return table[ids] * np.float32(scale)


def _linear(x: Floats, w: Floats, bias: Floats | None = None) -> Floats:
    out = x @ w.T
    return out if bias is None else out + bias


def _logits(x: Floats, head: Floats, soft_cap: float = 0.0) -> Floats:
    raw = x @ head.T
    return np.float32(soft_cap) * np.tanh(raw / np.float32(soft_cap)) if soft_cap else raw


def op_table(**replaced: Any) -> Backend:
    """Return the reference backend with some ops replaced."""
    backend = ReferenceBackend()
    for name, function in replaced.items():
        setattr(backend, name, function)
    return backend


DENSE_OPS = {"prepare": _prepare, "embed": _embed, "linear": _linear, "logits": _logits}
DENSE = op_table(**DENSE_OPS)


def normalize(x: Floats, norm: RMSNorm) -> Floats:
    """RMS norm with the weight applied in place."""
    x = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(norm.eps))
    x *= norm.weight
    return x


def run_block(b: Block, stream: Floats, cos: Floats, sin: Floats, kv: KVBuffers, start: int) -> tuple[Floats, Floats]:
    """Run one block over the tokens from `start` on: (what it adds last, the residual stream before that addition)."""
    a, tokens, half = b.attention, stream.shape[0], cos.shape[-1]
    end, rotated, group = start + tokens, a.n_heads + a.n_kv_heads, a.n_heads // a.n_kv_heads

    x = normalize(stream, b.attention_norm)
    heads = (x @ a.qkv.weight.T).reshape(tokens, rotated + a.n_kv_heads, a.head_dim)
    low, high = heads[:, :rotated, :half], heads[:, :rotated, half:]
    low_sin = low * sin
    low *= cos
    low -= high * sin
    high *= cos
    high += low_sin
    kv.k[start:end], kv.v[start:end] = heads[:, a.n_heads : rotated], heads[:, rotated:]

    q = heads[:, : a.n_heads].transpose(1, 0, 2).reshape(a.n_kv_heads, group, tokens, a.head_dim)
    mixed = np.empty((tokens, a.n_kv_heads, group, a.head_dim), np.float32)
    for first in range(0, tokens, QUERY_TILE):
        n = min(QUERY_TILE, tokens - first)
        seen = start + first + n  # keys that the last query of the tile sees: later ones are never touched
        tile = q[:, :, first : first + n].reshape(a.n_kv_heads, group * n, a.head_dim)
        scores = tile @ kv.k[:seen].transpose(1, 2, 0)
        scores *= np.float32(a.params.scale)
        if n > 1:
            corner = scores.reshape(a.n_kv_heads, group, n, seen)[..., seen - n :]
            np.copyto(corner, np.float32(-np.inf), where=FUTURE[:n, :n])
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        out = scores @ kv.v[:seen].transpose(1, 0, 2)
        mixed[first : first + n] = out.reshape(a.n_kv_heads, group, n, a.head_dim).transpose(2, 0, 1, 3)
    stream = mixed.reshape(tokens, -1) @ a.output.weight.T + stream

    both = normalize(stream, b.mlp_norm) @ b.mlp.gate_up.weight.T
    gate, up = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
    up *= gate
    np.negative(gate, out=gate)
    np.exp(gate, out=gate)
    gate += 1
    up /= gate
    return up @ b.mlp.down.weight.T, stream


def run(runner: Harness) -> Finding:
    """Time modules against one function, and the calls of the modules alone."""
    block = make_block(runner.shape)
    call_s = _call_cost(runner, block)
    table = [["tokens", "modules", "one function", "change", "99% interval", "calls alone"]]
    changes, shares = {}, []
    for length in runner.lengths((1, 8, 32), (128,)):
        sides = make_sides(block, random_array(np.random.default_rng(length), length, runner.shape.d_model))
        (added, stream), (fused_added, fused_stream) = sides["modules"](), sides["fused"]()
        harness.require_equal(added + stream, fused_added + fused_stream, TOLERANCE, f"block of {length} tokens")
        taken = runner.time_sides(length, sides)
        change = changes[length] = statistics.compare(taken["modules"], taken["fused"])
        shares.append(call_s / statistics.estimate(taken["modules"]).value)
        times = [harness.format_time(taken[side]) for side in ("modules", "fused")]
        table.append([str(length), *times, *harness.change_cells(change), f"{shares[-1]:.2%}"])
    summary = (
        f"one function against modules: {harness.format_by_length(changes)}; the calls of a block cost "
        f"{quantity(call_s, 's')}, {max(shares):.2%} of it at most"
    )
    return runner.finding(harness.majority([harness.vote_faster(c) for c in changes.values()]), summary, table)


def make_block(shape: Shape) -> Block:
    """Return a llama block with random float32 weights, as the dense op table takes them."""
    rng, width, inner = np.random.default_rng(1), shape.d_model, shape.n_heads * shape.head_dim

    def linear(rows: int, columns: int) -> Linear:
        return Linear(random_array(rng, rows, columns, scale=columns**-0.5))

    def norm() -> RMSNorm:
        return RMSNorm(np.abs(random_array(rng, width)) + np.float32(0.5), 1e-5)

    attention = Attention(
        qkv=linear(3 * inner, width), output=linear(width, inner),
        n_heads=shape.n_heads, n_kv_heads=shape.n_heads, head_dim=shape.head_dim,
        rope=harness.plain_rope(shape.head_dim), params=AttentionParams(shape.head_dim**-0.5),
    )  # fmt: skip
    return Block(norm(), attention, norm(), SwiGLU(linear(2 * shape.d_ff, width), linear(width, shape.d_ff)))


def prefill_batch(length: int) -> Batch:
    """Return the batch of one request of `length` new tokens, its blocks in order."""
    positions = np.arange(length)
    return Batch(
        ids=positions, positions=positions, slot_mapping=positions, query_start=np.array([0, length]),
        context_len=np.array([length]), block_table=np.arange(-(-length // BLOCK_SIZE))[None, :],
        logits_index=positions[-1:],
    )  # fmt: skip


def make_sides(block: Block, x: Floats) -> dict[str, Any]:
    """Return both sides, each to (what the block adds, the stream): layers on a paged cache, and the one function."""
    a, length = block.attention, len(x)
    paged = DENSE.empty_kv(-(-length // BLOCK_SIZE), BLOCK_SIZE, a.n_kv_heads, a.head_dim)
    buffers, batch = KVBuffers.zeros(length, a.n_kv_heads, a.head_dim), prefill_batch(length)
    return {
        "modules": lambda: block(DENSE, x, None, paged, batch),
        "fused": lambda: run_block(block, x, *harness.rope_tables(a.rope, 0, length), buffers, 0),
    }


def _call_cost(runner: Harness, block: Block) -> float:
    """Return the time of a block whose ops do nothing: the most that splitting it into modules can cost."""
    a = block.attention
    x = np.zeros((1, (a.n_heads + 2 * a.n_kv_heads) * a.head_dim), np.float32)
    empty: dict[str, Any] = dict.fromkeys(OPS, lambda *_: x) | {"add_rms_norm": lambda *_: (x, x)}
    ops, batch, kv = op_table(**empty), prefill_batch(1), KVLayer(x, x)
    taken = runner.time_sides("calls", {"modules": lambda: block(ops, x, None, kv, batch)})
    return statistics.estimate(taken["modules"]).value
