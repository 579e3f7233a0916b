"""Claim 1: the same decoder block through the modules of layers/, and as one function with everything inlined."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np

from ...backends.ops import OPS, AttentionParams, Backend, Batch, Ints, KVLayer, RopeTable
from ...backends.reference import ReferenceBackend
from ...config import ModelConfig
from ...errors import UnsupportedModelError
from ...layers.attention import Attention
from ...layers.block import Block
from ...layers.linear import Linear
from ...layers.rms_norm import RMSNorm
from ...layers.rope import inverse_frequencies
from ...layers.swiglu import SwiGLU
from ...models import Transformer
from ...weights import Tensor
from .. import statistics
from ..format import quantity
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
    kv = DENSE.empty_kv(-(-length // BLOCK_SIZE), BLOCK_SIZE, a.n_kv_heads, a.head_dim)
    room, batch = Room.of(length, a.n_kv_heads, a.head_dim), one_batch(length)
    return {
        "modules": lambda: made(DENSE, x, None, kv, batch),
        "fused": lambda: block(made, x, *angles(a.rope, 0, length), room, 0),
    }


def _call_cost(lab: Lab, made: Block) -> float:
    """The time of a block whose ops do nothing: what splitting it into modules can cost at most."""
    a = made.attention
    x = np.zeros((1, (a.n_heads + 2 * a.n_kv_heads) * a.head_dim), np.float32)
    empty: dict[str, Any] = dict.fromkeys(OPS, lambda *_: x) | {"add_rms_norm": lambda *_: (x, x)}
    ops, batch, kv = op_table(**empty), one_batch(1), KVLayer(x, x)
    taken = lab.race("calls", {"modules": lambda: made(ops, x, None, kv, batch)})
    return statistics.estimate(taken["modules"]).value


TILE = 64  # queries that share one bound
FUTURE = np.triu(np.ones((TILE, TILE), np.bool_), 1)


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


def op_table(**changed: Any) -> Backend:
    """The reference backend with some ops replaced."""
    return cast(Backend, SimpleNamespace(**({name: getattr(ReferenceBackend(), name) for name in OPS} | changed)))


DENSE_OPS = {"prepare": _prepare, "embed": _embed, "linear": _linear, "logits": _logits}
DENSE = op_table(**DENSE_OPS)


class Room(NamedTuple):
    """Keys and values of one layer, made beforehand: (capacity, kv_heads, head_dim)."""

    k: Floats
    v: Floats

    @staticmethod
    def of(capacity: int, kv_heads: int, head_dim: int) -> Room:
        """Room for so many tokens."""
        return Room(*(np.zeros((capacity, kv_heads, head_dim), np.float32) for _ in range(2)))


def angles(table: RopeTable, start: int, end: int) -> tuple[Floats, Floats]:
    """cos and sin at each position: (T, 1, half)."""
    angle = np.arange(start, end, dtype=np.float32)[:, None, None] * table.inv_freq
    return np.float32(table.scale) * np.cos(angle), np.float32(table.scale) * np.sin(angle)


def block(b: Block, stream: Floats, cos: Floats, sin: Floats, room: Room, start: int) -> tuple[Floats, Floats]:
    """One decoder block over the tokens from `start` on: (what it adds last, the stream before that addition)."""
    a, tokens, half = b.attention, stream.shape[0], cos.shape[-1]
    end, turning, group = start + tokens, a.n_heads + a.n_kv_heads, a.n_heads // a.n_kv_heads

    x = stream / np.sqrt(np.mean(np.square(stream), axis=-1, keepdims=True) + np.float32(b.attention_norm.eps))
    x *= b.attention_norm.weight
    heads = (x @ a.qkv.weight.T).reshape(tokens, turning + a.n_kv_heads, a.head_dim)
    low, high = heads[:, :turning, :half], heads[:, :turning, half:]
    kept = low * sin
    low *= cos
    low -= high * sin
    high *= cos
    high += kept
    room.k[start:end], room.v[start:end] = heads[:, a.n_heads : turning], heads[:, turning:]

    q = heads[:, : a.n_heads].transpose(1, 0, 2).reshape(a.n_kv_heads, group, tokens, a.head_dim)
    mixed = np.empty((tokens, a.n_kv_heads, group, a.head_dim), np.float32)
    for first in range(0, tokens, TILE):
        n = min(TILE, tokens - first)
        seen = start + first + n  # keys that the last query of the tile sees: later ones are never touched
        tile = q[:, :, first : first + n].reshape(a.n_kv_heads, group * n, a.head_dim)
        scores = tile @ room.k[:seen].transpose(1, 2, 0)
        scores *= np.float32(a.params.scale)
        if n > 1:
            corner = scores.reshape(a.n_kv_heads, group, n, seen)[..., seen - n :]
            np.copyto(corner, np.float32(-np.inf), where=FUTURE[:n, :n])
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        got = scores @ room.v[:seen].transpose(1, 0, 2)
        mixed[first : first + n] = got.reshape(a.n_kv_heads, group, n, a.head_dim).transpose(2, 0, 1, 3)
    stream = mixed.reshape(tokens, -1) @ a.output.weight.T + stream

    x = stream / np.sqrt(np.mean(np.square(stream), axis=-1, keepdims=True) + np.float32(b.mlp_norm.eps))
    x *= b.mlp_norm.weight
    both = x @ b.mlp.gate_up.weight.T
    gate, up = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
    up *= gate
    np.negative(gate, out=gate)
    np.exp(gate, out=gate)
    gate += 1
    up /= gate
    return up @ b.mlp.down.weight.T, stream


def forward(model: Transformer, ids: Ints, cos: Floats, sin: Floats, rooms: Sequence[Room], start: int) -> Floats:
    """The logits after the last of these tokens: (1, vocabulary); cos and sin hold every position."""
    stream = model.embedding[ids]
    end = start + len(ids)
    for b, room in zip(model.blocks, rooms, strict=True):
        added, stream = block(b, stream, cos[start:end], sin[start:end], room, start)
        stream = stream + added
    x = stream[-1:]
    x = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(model.norm.eps)) * model.norm.weight
    return np.asarray(x @ model.head.T, np.float32)


def require_plain(config: ModelConfig) -> None:
    """The one function knows the plain llama only: what it would leave out is refused."""
    family = config.family
    extras = {
        "biases": family.qkv_bias,
        "q/k norms": family.qk_norm,
        "post norms": family.post_norms,
        "a scaled embedding": family.scaled_embedding,
        "a window": any(config.windows),
        "soft caps": config.attention_cap or config.final_cap,
        "a partial rotation": config.rope_dim != config.head_dim,
        f"activation {config.activation}": config.activation != "silu",
    }
    found = [name for name, there in extras.items() if there]
    if found:
        raise UnsupportedModelError(f"the experiment for claim 4 needs a plain llama: this model has {found[0]}")
