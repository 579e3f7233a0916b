"""The fused forward pass: a model as tasks, one program per step.

Every thread walks through all layers inside one parallel region. Kernels are called by address; this is where they are:

    component      task                    kernel
    scheduling     rope.angles_task        rope.rope_angles, then attention.split_work
    embedding      elementwise.embed_task  elementwise.embed
    norm           _norm                   elementwise.norm (residual add, RMSNorm, quantization)
    qkv, output    linear.linear_tasks     linear.linear_int8 or linear_float; elementwise.add_bias
    rope_kv_write  rope.rope_store_task    elementwise.head_norms, rope.rope_store
    attention      attention_tasks         attention.attend (prefill tiles, decode tiles)
    mlp            _mlp                    linear.*, elementwise.gated, linear.*
    head           linear.linear_tasks     linear.* with two-term activations

The tasks follow each other as in layers/block.py and are those of the single ops, so the bits are the same.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InferenceError
from ..ops import Array, Batch, BlockParts, KVLayer, ModelParts, Profiler, RopeTable
from . import elementwise, quantize_activations
from .attention import attention_tasks, can_quantize_output, split_work_task
from .elementwise import ACTIVATIONS, TOKENS_PER_PIECE, HeadNormArg, NormArg, embed_task
from .kv_layout import kv_type_of, layer_addresses, padded_dim
from .linear import PackedWeight, linear_tasks, quantize_tasks
from .program import Program, Step, Table, Task, new_step, pack_args, pack_floats, require_not_forked
from .rope import angles_task, rope_store_task

Floats = NDArray[np.float32]
Components = list[tuple[str, list[Task]]]  # name of a part of the model, and its tasks


def lower_model(model: ModelParts, kv_type: str, threads: int) -> Components:
    """Return a whole step as tasks, for a cache of this KV type."""
    ropes = _distinct_ropes(model)
    first = model.blocks[0]
    scheduling = [angles_task(rope, i) for i, rope in enumerate(ropes)]
    scheduling.append(split_work_task(first.n_heads, first.n_kv_heads))
    (table,) = model.embedding.parts
    parts: Components = [("scheduling", scheduling), ("embedding", [embed_task(table, model.embedding_scale)])]
    post = None  # the norm of what the block before adds, in families that have one
    for layer, block in enumerate(model.blocks):
        number = next(i for i, rope in enumerate(ropes) if rope is block.rope)
        parts.append(("norm", _norm(block.attention_norm, block.qkv, block.eps, post, add_delta=layer > 0)))
        parts += _attention(block, layer, number, kv_type, threads)
        parts.append(("norm", _norm(block.mlp_norm, block.gate_up, block.eps, block.post_attention_norm)))
        parts.append(("mlp", _mlp(block, threads)))
        post = block.post_mlp_norm
    head = model.head.two_term()
    parts.append(("norm", _norm(model.norm, head, model.blocks[-1].eps, post, for_logits=True)))
    return [*parts, ("head", linear_tasks(head, Step.NUM_LOGITS, Step.NORMED, Step.LOGITS, threads))]


def _distinct_ropes(model: ModelParts) -> list[RopeTable]:
    """Return the rope tables of a model: one, or one more for layers with a window."""
    found: list[RopeTable] = []
    for block in model.blocks:
        if not any(block.rope is rope for rope in found):
            found.append(block.rope)
    assert len(found) <= 2, "a step has room for the angles of two rope tables"
    return found


def _norm(
    weight: Floats,
    consumer: PackedWeight,
    eps: float,
    post: Floats | None,
    *,
    add_delta: bool = True,
    for_logits: bool = False,
) -> list[Task]:
    """Return the residual add, the norm, and the quantization for the product that follows."""
    count = Step.NUM_LOGITS if for_logits else Step.TOKENS
    floats, activations = Step.NORMED if consumer.needs_floats else 0, Step.ACTIVATIONS if consumer.needs_int8 else 0
    outputs = floats, activations, Step.LOGITS_INDEX if for_logits else 0
    weights, two_term = (weight, 0 if post is None else post), any(consumer.residual_activations)
    args = pack_args(count, Step.RESIDUAL_DELTA, Step.RESIDUAL, *outputs, len(weight), *weights, add_delta, 0, two_term)
    return [Task(elementwise.NORM, pack_floats(args, NormArg.EPS, [eps]), 1, count, TOKENS_PER_PIECE)]


def _attention(b: BlockParts, layer: int, rope_number: int, kv_type: str, threads: int) -> Components:
    heads, padded = (b.n_heads, b.n_kv_heads, b.head_dim), padded_dim(b.head_dim)
    in_place = b.output.needs_int8 and can_quantize_output(b.head_dim)
    activations = Step.ACTIVATIONS if in_place else 0
    quantize = quantize_tasks(Step.TOKENS, Step.ATTN_OUT, b.n_heads, b.head_dim, padded, b.output.needs_int8)
    source = Step.ATTN_OUT if padded == b.head_dim else Step.ATTN_OUT_PACKED
    output = _linear(b.output, b.output_bias, source, Step.RESIDUAL_DELTA, threads)
    rope = rope_store_task(layer, rope_number, len(b.rope.inv_freq), *heads, kv_type)
    return [
        ("qkv", _linear(b.qkv, b.qkv_bias, Step.NORMED, Step.QKV, threads)),
        ("rope_kv_write", [*_head_norms(b), rope]),
        ("attention", attention_tasks(layer, *heads, b.attention, kv_type, activations)),
        ("output", output if in_place else quantize + output),
    ]


def _head_norms(b: BlockParts) -> list[Task]:
    if b.q_norm is None or b.k_norm is None:
        return []
    args = pack_args(Step.TOKENS, Step.QKV, b.n_heads, b.n_kv_heads, b.head_dim, b.q_norm, b.k_norm, 0)
    pack_floats(args, HeadNormArg.EPS, [b.eps])
    return [Task(elementwise.HEAD_NORMS, args, 1, Step.TOKENS, TOKENS_PER_PIECE)]


def _mlp(b: BlockParts, threads: int) -> list[Task]:
    half, activation = b.down.columns, ACTIVATIONS.index(b.activation)
    activations, floats = Step.ACTIVATIONS if b.down.needs_int8 else 0, Step.HIDDEN if b.down.needs_floats else 0
    args = pack_args(Step.TOKENS, Step.GATE_UP, floats, activations, half, activation)
    pieces = -(-half // elementwise.GATE_COLUMNS)
    return [
        *_linear(b.gate_up, b.gate_up_bias, Step.NORMED, Step.GATE_UP, threads),
        Task(elementwise.GATED, args, pieces, Step.TOKENS, TOKENS_PER_PIECE),
        *_linear(b.down, b.down_bias, Step.HIDDEN, Step.RESIDUAL_DELTA, threads),
    ]


def _linear(w: PackedWeight, bias: Floats | None, source: int, output: int, threads: int) -> list[Task]:
    tasks = linear_tasks(w, Step.TOKENS, source, output, threads)
    if bias is not None:
        args = pack_args(Step.TOKENS, output, len(bias), bias)
        tasks.append(Task(elementwise.ADD_BIAS, args, 1, Step.TOKENS, TOKENS_PER_PIECE))
    return tasks


class CpuForward:
    """The fused forward pass of a model.

    Buffers are kept from step to step and grow with the largest batch; one step runs at a time (a lock), and its logits
    are the caller's own.
    """

    graph_bytes = 0

    def __init__(self, model: ModelParts, threads: int) -> None:
        self._model, self.threads = model, threads
        self._programs: dict[str, Program] = {}  # by KV type
        self._components: dict[str, list[tuple[str, Program]]] = {}
        self._step = new_step()
        self._buffers: dict[int, NDArray[Any]] = {}
        self._max_tokens = 0  # that the buffers hold
        self._kv: tuple[weakref.ref[Any], Table] | None = None  # the first layer's keys stand for the whole cache
        self._lock = threading.Lock()

    def __call__(self, batch: Batch, kv: Sequence[KVLayer]) -> Array:
        """Run one step: write the cache, return the logits at `batch.logits_index`: (N, vocabulary)."""
        kv_type = kv_type_of(kv[0])
        if kv_type not in self._programs:
            components = lower_model(self._model, kv_type, self.threads)
            self._programs[kv_type] = Program(task for _, tasks in components for task in tasks)
        return self._run(batch, kv, lambda step: self._programs[kv_type].run(step, self.threads))

    def run_profiled(self, batch: Batch, kv: Sequence[KVLayer], profiler: Profiler) -> Array:
        """Run one step with each component as a program of its own."""
        kv_type = kv_type_of(kv[0])
        if kv_type not in self._components:
            components = lower_model(self._model, kv_type, self.threads)
            self._components[kv_type] = [(name, Program(tasks)) for name, tasks in components]

        def run(step: Table) -> None:
            for name, program in self._components[kv_type]:
                profiler(name, program.run)(step, self.threads)

        return self._run(batch, kv, run)

    def _run(self, batch: Batch, kv: Sequence[KVLayer], run: Callable[[Table], None]) -> Array:
        model, step, b = self._model, self._step, batch
        tokens, n_logits = len(b.ids), len(b.logits_index)
        if tokens and not 0 <= b.ids.min() <= b.ids.max() < model.embedding.rows:
            raise InferenceError(f"a token id is outside the vocabulary of {model.embedding.rows}")
        logits = np.empty((n_logits, model.head.rows), np.float32)
        arrays = b.ids, b.positions, b.slot_mapping, b.query_start, b.block_table, b.logits_index
        held = [np.ascontiguousarray(array, np.int64) for array in arrays]
        require_not_forked()  # before the lock, which a forked child might find locked for ever
        with self._lock:
            self._grow_buffers(max(tokens, n_logits))
            step[Step.TOKENS], step[Step.NUM_LOGITS] = tokens, n_logits
            step[Step.PREFILL_TILES] = step[Step.DECODE_TILES] = 0  # not counted in a step without tokens
            step[Step.BLOCK_SIZE], step[Step.TABLE_WIDTH] = kv[0].v.shape[2], b.block_table.shape[1]
            step[Step.REQUESTS] = len(b.context_len)
            step[Step.TOKEN_IDS : Step.LOGITS_INDEX + 1] = [array.ctypes.data for array in held]
            step[Step.KV] = self._kv_addresses(kv).ctypes.data
            step[Step.LOGITS] = logits.ctypes.data
            run(step)
        return np.float32(model.soft_cap) * np.tanh(logits / np.float32(model.soft_cap)) if model.soft_cap else logits

    def _kv_addresses(self, kv: Sequence[KVLayer]) -> Table:
        if self._kv is None or self._kv[0]() is not kv[0].k:
            self._kv = weakref.ref(kv[0].k), layer_addresses(kv)
        return self._kv[1]

    def _grow_buffers(self, tokens: int) -> None:
        if tokens <= self._max_tokens:
            return
        model, b = self._model, self._model.blocks[0]
        width, queries = model.head.columns, b.n_heads * padded_dim(b.head_dim)
        max_columns = max(w.columns for w in (b.qkv, b.output, b.gate_up, b.down, model.head))
        sizes: dict[int, int] = {
            Step.RESIDUAL: width, Step.RESIDUAL_DELTA: width, Step.NORMED: width, Step.QKV: b.qkv.rows,
            Step.QUERIES: queries, Step.ATTN_OUT: queries, Step.ATTN_OUT_PACKED: b.n_heads * b.head_dim,
            Step.GATE_UP: b.gate_up.rows, Step.HIDDEN: b.down.columns,
            **dict.fromkeys(range(Step.ROPE_COS, Step.ROPE2_SIN + 1), b.head_dim),
        }  # fmt: skip
        made: dict[int, NDArray[Any]] = {entry: np.zeros(tokens * n, np.float32) for entry, n in sizes.items()}
        made[Step.ATTENTION_WORK] = np.empty(tokens * b.n_heads * 4, np.int64)
        made |= dict(enumerate(quantize_activations.allocate(2 * tokens, max_columns), Step.ACTIVATIONS))
        for entry, buffer in made.items():
            self._step[entry] = buffer.ctypes.data
        self._buffers, self._max_tokens = made, tokens  # only now that there was memory for all of it
