"""What a step of a model does, as instructions, part by part: norm, qkv, rotation, attention, output, norm, MLP, head.

The parts follow each other as in layers/block.py; the tasks are those of the single ops, so the bits are the same.

A whole step of the model as one program: every thread walks through all layers inside one parallel region.

plan.py says what a step does. Buffers are kept from step to step and grow with the largest batch; one step at a time
runs (a lock), its logits are the caller's own.

The ops of the heads one by one: programs of a few instructions, with a step of their own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InferenceError
from ..ops import Array, AttentionParams, Batch, BlockParts, Ints, KVLayer, ModelParts, Profiler, RopeTable
from . import elementwise, quantize_activations, rope, threads
from .attention import arguments, attend_instructions, deal_instruction, whole_bytes
from .embedding import embed_rows
from .kv_layout import kind_of, places
from .linear import Weight, products, to_bytes
from .program import Instruction, Program, Step, Table, doubles, new_step, table_of

Floats = NDArray[np.float32]
ACTIVATIONS = ("silu", "gelu_tanh")
Sections = list[tuple[str, list[Instruction]]]  # which part of the model, and what it does


def sections(model: ModelParts, kind: str) -> Sections:
    """A whole step, for a cache that holds this kind."""
    ropes = _ropes(model)
    made: Sections = [("scheduling", _first(model, ropes)), ("embedding", _embedding(model))]
    before = None  # the norm of what the layer before adds, in families that have one
    for layer, block in enumerate(model.blocks):
        number = next(i for i, one in enumerate(ropes) if one is block.rope)
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
        if not any(block.rope is one for one in found):
            found.append(block.rope)
    assert len(found) <= 2, "a step has room for the angles of two rotary tables"
    return found


def _first(model: ModelParts, ropes: list[RopeTable]) -> list[Instruction]:
    """What all layers share: the angles of each rotary table, and how attention is cut."""
    angles = [rope.angle_instruction(one, i) for i, one in enumerate(ropes)]
    return [*angles, deal_instruction(_heads(model.blocks[0], 0, 0))]


def _embedding(model: ModelParts) -> list[Instruction]:
    (table,) = model.embedding.parts
    return [embed_rows(table, model.embedding_scale)]


def _heads(b: BlockParts, layer: int, rope: int, bytes_at: int = 0) -> NDArray[np.int64]:
    pairs, shape = len(b.rope.inv_freq), (b.n_heads, b.n_kv_heads, b.head_dim)
    return arguments(layer, rope, pairs, *shape, b.attention, bytes_at)


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
    whole, padded = b.output.wants_bytes and whole_bytes(b.head_dim), rope.padded(b.head_dim)
    args = _heads(b, layer, number, Step.ACTIVATIONS if whole else 0)
    apart = to_bytes(Step.TOKENS, Step.MIXED, b.n_heads, b.head_dim, padded, b.output.wants_bytes)
    bytes_of = [] if whole else apart
    source = Step.MIXED if padded == b.head_dim else Step.COMPACT
    output = _products(b.output, source, Step.DELTA) + _bias(b.output_bias, Step.DELTA)
    return [
        ("qkv", _products(b.qkv, Step.NORMED, Step.QKV) + _bias(b.qkv_bias, Step.QKV)),
        ("rope_kv_write", [*_head_norms(b), rope.store_instruction(args, kind)]),
        ("attention", attend_instructions(args, kind)),
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


class Model:
    """A decoder whose steps are one call."""

    def __init__(self, parts: ModelParts) -> None:
        self._parts = parts
        self._whole: dict[str, Program] = {}  # by what the cache holds
        self._parted: dict[str, list[tuple[str, Program]]] = {}
        self._step = new_step()
        self._buffers: dict[int, NDArray[Any]] = {}
        self._room = 0
        self._kv: tuple[weakref.ref[Any], Table] | None = None  # the first layer's keys stand for the whole cache
        self._lock = threading.Lock()

    def __call__(self, batch: Batch, kv: Sequence[KVLayer]) -> Array:
        """One step: writes the cache, gives the logits at `batch.logits_index`: (N, vocabulary)."""
        kind = kind_of(kv[0])
        if kind not in self._whole:
            self._whole[kind] = Program(one for _, some in sections(self._parts, kind) for one in some)
        return self._run(batch, kv, self._whole[kind].run)

    graph_bytes = 0

    def run_profiled(self, batch: Batch, kv: Sequence[KVLayer], profiler: Profiler) -> Array:
        """The same, each part of the model as a program of its own, for who wants to know where the time goes."""
        kind = kind_of(kv[0])
        if kind not in self._parted:
            self._parted[kind] = [(part, Program(some)) for part, some in sections(self._parts, kind)]

        def run(step: Table) -> None:
            for part, program in self._parted[kind]:
                profiler(part, program.run)(step)

        return self._run(batch, kv, run)

    def _run(self, batch: Batch, kv: Sequence[KVLayer], run: Callable[[Table], None]) -> Array:
        p, step, b = self._parts, self._step, batch
        tokens, wanted = len(b.ids), len(b.logits_index)
        if tokens and not 0 <= b.ids.min() <= b.ids.max() < p.embedding.rows:
            raise InferenceError(f"a token id is outside the vocabulary of {p.embedding.rows}")
        logits = np.empty((wanted, p.head.rows), np.float32)
        given = b.ids, b.positions, b.slot_mapping, b.query_start, b.block_table, b.logits_index
        held = [np.ascontiguousarray(array, np.int64) for array in given]
        threads.launching()  # in a forked child this is an error, where the lock might never open
        with self._lock:
            self._make_room(max(tokens, wanted))
            step[Step.TOKENS], step[Step.WANTED] = tokens, wanted
            step[Step.TILES] = step[Step.SINGLES] = 0  # nobody counts them where there are no tokens
            step[Step.BLOCK_SIZE], step[Step.TABLE_WIDTH] = kv[0].v.shape[2], b.block_table.shape[1]
            step[Step.REQUESTS] = len(b.context_len)
            step[Step.IDS : Step.INDEX + 1] = [array.ctypes.data for array in held]
            step[Step.KV] = self._places(kv).ctypes.data
            step[Step.LOGITS] = logits.ctypes.data
            run(step)
        return np.float32(p.soft_cap) * np.tanh(logits / np.float32(p.soft_cap)) if p.soft_cap else logits

    def _places(self, kv: Sequence[KVLayer]) -> Table:
        """Where the keys and values of each layer lie; asked again for the same cache in each step."""
        if self._kv is None or self._kv[0]() is not kv[0].k:
            self._kv = weakref.ref(kv[0].k), places(kv)
        return self._kv[1]

    def _make_room(self, tokens: int) -> None:
        """Buffers for so many tokens."""
        if tokens <= self._room:
            return
        p, b = self._parts, self._parts.blocks[0]
        width, queries = p.head.columns, b.n_heads * rope.padded(b.head_dim)
        widest = max(w.columns for w in (b.qkv, b.output, b.gate_up, b.down, p.head))
        sizes: dict[int, int] = {
            Step.STREAM: width, Step.DELTA: width, Step.NORMED: width, Step.QKV: b.qkv.rows, Step.QUERIES: queries,
            Step.MIXED: queries, Step.COMPACT: b.n_heads * b.head_dim, Step.GATE_UP: b.gate_up.rows,
            Step.HIDDEN: b.down.columns,
            **dict.fromkeys(range(Step.ANGLES, Step.SECOND_SIN + 1), b.head_dim),
        }  # fmt: skip
        made: dict[int, NDArray[Any]] = {entry: np.zeros(tokens * n, np.float32) for entry, n in sizes.items()}
        made[Step.WORK] = np.empty(tokens * b.n_heads * 4, np.int64)
        room: tuple[NDArray[Any], ...] = quantize_activations.room(2 * tokens, widest)
        made |= dict(enumerate(room, Step.ACTIVATIONS))
        for entry, buffer in made.items():
            self._step[entry] = buffer.ctypes.data
        self._buffers, self._room = made, tokens  # only now that there was memory for all of it


NO_PARAMS = AttentionParams(1.0)


def unfused_rope_store(
    q: Floats, k: Floats, v: Floats, positions: Ints, table: RopeTable, kv: KVLayer, slot_mapping: Ints
) -> Floats:
    """Rotate q and k, write k and v into the cache, give back q: (T, heads, head_dim), a view of padded heads."""
    tokens, n_heads, dim = q.shape
    half, n_kv = len(table.inv_freq), k.shape[1]
    out = np.empty((tokens, n_heads, rope.padded(dim)), np.float32)
    args = arguments(0, 0, half, n_heads, n_kv, dim, NO_PARAMS)
    program = Program([rope.angle_instruction(table, 0), rope.store_instruction(args, kind_of(kv))])
    cos, sin = (np.empty(tokens * half, np.float32) for _ in range(2))
    entries = {
        Step.POSITIONS: positions.astype(np.int64), Step.SLOTS: slot_mapping.astype(np.int64), Step.KV: places([kv]),
        Step.ANGLES: cos, Step.SIN: sin,
        Step.QKV: np.concatenate((q, k, v), axis=1, dtype=np.float32), Step.QUERIES: out,
    }  # fmt: skip
    _run(program, entries, {Step.TOKENS: tokens, Step.BLOCK_SIZE: kv.v.shape[2]})
    return out[:, :, :dim]


def unfused_attention(q: Floats, kv: KVLayer, batch: Batch, params: AttentionParams) -> Floats:
    """Each query over its own request's cached keys: (T, heads, head_dim) -> (T, heads * head_dim)."""
    tokens, n_heads, dim = q.shape
    n_kv, size, padded = kv.v.shape[1:]
    wide = np.zeros((tokens, n_heads, padded), np.float32)
    wide[:, :, :dim] = q
    out = np.empty_like(wide)
    args = arguments(0, 0, 0, n_heads, n_kv, dim, params)
    program = Program([deal_instruction(args), *attend_instructions(args, kind_of(kv))])
    entries = {
        Step.POSITIONS: batch.positions, Step.QUERY_START: batch.query_start, Step.BLOCK_TABLE: batch.block_table,
        Step.KV: places([kv]), Step.WORK: np.empty(tokens * n_heads * 4, np.int64), Step.QUERIES: wide, Step.MIXED: out,
    }  # fmt: skip
    counts = {
        Step.TOKENS: tokens, Step.BLOCK_SIZE: size, Step.TABLE_WIDTH: batch.block_table.shape[1],
        Step.REQUESTS: len(batch.context_len),
    }  # fmt: skip
    _run(program, entries, counts)
    return out[:, :, :dim].reshape(tokens, n_heads * dim)


def _run(program: Program, entries: dict[Step, NDArray[Any]], counts: dict[Step, int]) -> None:
    held = {entry: np.ascontiguousarray(array) for entry, array in entries.items()}  # of int64 or float32
    step = new_step()
    for entry, array in held.items():
        step[entry] = array.ctypes.data
    for entry, count in counts.items():
        step[entry] = count
    program.run(step)
