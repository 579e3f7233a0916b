"""What a step of a model does, as instructions, part by part: norm, qkv, rotation, attention, output, norm, MLP, head.

The parts follow each other as in layers/block.py; the tasks are those of the single ops, so the bits are the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..ops import BlockParts, ModelParts, RopeTable
from . import elementwise, heads
from .embedding import embed_rows
from .linear_op import Weight, products, to_bytes
from .program import Instruction, doubles, table_of
from .step import Step

Floats = NDArray[np.float32]
ACTIVATIONS = ("silu", "gelu_tanh")
Sections = list[tuple[str, list[Instruction]]]  # which part of the model, and what it does


def sections(model: ModelParts, kind: str) -> Sections:
    """A whole step, for a cache that holds this kind."""
    ropes = _ropes(model)
    made: Sections = [("scheduling", _first(model, ropes)), ("embedding", _embedding(model))]
    before = None  # the norm of what the layer before adds, in families that have one
    for layer, block in enumerate(model.blocks):
        number = next(i for i, rope in enumerate(ropes) if rope is block.rope)
        made.append(("norm", _norm(block.attention_norm, block.qkv, block.eps, before, joined=layer > 0)))
        made += _attention(block, layer, number, kind)
        made.append(("norm", _norm(block.mlp_norm, block.gate_up, block.eps, block.post_attention_norm)))
        made.append(("mlp", _mlp(block)))
        before = block.post_mlp_norm
    head = model.head.finely()
    made.append(("norm", _norm(model.norm, head, model.blocks[-1].eps, before, wanted=True)))
    return [*made, ("head", products(head, Step.WANTED, Step.NORMED, Step.LOGITS))]


def _ropes(model: ModelParts) -> list[RopeTable]:
    """The rotary tables there are: one, or one more for layers with a window."""
    found: list[RopeTable] = []
    for block in model.blocks:
        if not any(block.rope is rope for rope in found):
            found.append(block.rope)
    assert len(found) <= 2, "a step has room for the angles of two rotary tables"
    return found


def _first(model: ModelParts, ropes: list[RopeTable]) -> list[Instruction]:
    """What all layers share: the angles of each rotary table, and how attention is cut."""
    angles = [heads.angle_instruction(rope, i) for i, rope in enumerate(ropes)]
    return [*angles, heads.deal_instruction(_heads(model.blocks[0], 0, 0))]


def _embedding(model: ModelParts) -> list[Instruction]:
    (table,) = model.embedding.parts
    return [embed_rows(table, model.embedding_scale)]


def _heads(b: BlockParts, layer: int, rope: int, bytes_at: int = 0) -> NDArray[np.int64]:
    pairs, shape = len(b.rope.inv_freq), (b.n_heads, b.n_kv_heads, b.head_dim)
    return heads.arguments(layer, rope, pairs, *shape, b.attention, bytes_at)


def _norm(
    weight: Floats, then: Weight, eps: float, post: Floats | None, *, joined: bool = True, wanted: bool = False
) -> list[Instruction]:
    """Addition, norm, and the bytes for the product that follows."""
    count = Step.WANTED if wanted else Step.TOKENS
    bytes_at, index = Step.ACTIVATIONS if then.wants_bytes else 0, Step.INDEX if wanted else 0
    floats_at, own = Step.NORMED if then.wants_floats else 0, 0 if post is None else post
    args = table_of(
        count, Step.DELTA, Step.STREAM, floats_at, bytes_at, index, len(weight), weight, own, joined, 0, any(then.fine)
    )
    return [Instruction(elementwise.NORM, doubles(args, elementwise.EPS, [eps]), 1, count, elementwise.FEW)]


def _attention(b: BlockParts, layer: int, number: int, kind: str) -> Sections:
    whole, padded = b.output.wants_bytes and heads.whole_bytes(b.head_dim), heads.padded(b.head_dim)
    args = _heads(b, layer, number, Step.ACTIVATIONS if whole else 0)
    apart = to_bytes(Step.TOKENS, Step.MIXED, b.n_heads, b.head_dim, padded, b.output.wants_bytes)
    bytes_of = [] if whole else apart
    source = Step.MIXED if padded == b.head_dim else Step.COMPACT
    output = _products(b.output, source, Step.DELTA) + _bias(b.output_bias, Step.DELTA)
    return [
        ("qkv", _products(b.qkv, Step.NORMED, Step.QKV) + _bias(b.qkv_bias, Step.QKV)),
        ("rope_kv_write", [*_head_norms(b), heads.store_instruction(args, kind)]),
        ("attention", heads.attend_instructions(args, kind)),
        ("output", bytes_of + output),
    ]


def _head_norms(b: BlockParts) -> list[Instruction]:
    if b.q_norm is None or b.k_norm is None:
        return []
    args = table_of(Step.TOKENS, Step.QKV, 0, 0, 0, b.n_heads, b.head_dim, b.q_norm, b.k_norm, b.n_kv_heads, 0)
    doubles(args, elementwise.EPS, [b.eps])
    return [Instruction(elementwise.HEAD_NORMS, args, 1, Step.TOKENS, elementwise.FEW)]


def _mlp(b: BlockParts) -> list[Instruction]:
    half, kind = b.down.columns, ACTIVATIONS.index(b.activation)
    bytes_at, floats_at = Step.ACTIVATIONS if b.down.wants_bytes else 0, Step.HIDDEN if b.down.wants_floats else 0
    args = table_of(Step.TOKENS, Step.GATE_UP, 0, floats_at, bytes_at, 0, half, kind)
    return [
        *_products(b.gate_up, Step.NORMED, Step.GATE_UP),
        *_bias(b.gate_up_bias, Step.GATE_UP),
        Instruction(elementwise.GATED, args, -(-half // elementwise.WIDE), Step.TOKENS, elementwise.FEW),
        *_products(b.down, Step.HIDDEN, Step.DELTA),
        *_bias(b.down_bias, Step.DELTA),
    ]


def _products(w: Weight, source: int, output: int) -> list[Instruction]:
    return products(w, Step.TOKENS, source, output)


def _bias(bias: Floats | None, entry: int) -> list[Instruction]:
    if bias is None:
        return []
    args = table_of(Step.TOKENS, entry, 0, 0, 0, 0, len(bias), bias)
    return [Instruction(elementwise.ADD_BIAS, args, 1, Step.TOKENS, elementwise.FEW)]
