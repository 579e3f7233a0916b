"""Benchmarks of ops beyond the Rust worker's suite: attention of one token, norms, KV cache, a block, sampling, every
weight type."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from llm_worker_rbee.backends.ops import AttentionParams, SampleRow
from llm_worker_rbee.layers.attention import Attention
from llm_worker_rbee.layers.block import Block
from llm_worker_rbee.layers.linear import Linear
from llm_worker_rbee.layers.mlp import SwiGLU
from llm_worker_rbee.layers.norm import RMSNorm
from llm_worker_rbee.weights import Tensor
from llm_worker_rbee.weights.quants import BLOCK_TYPES, BlockType

from ..backends import prepare_attention
from ..roofline import Work
from ..synthetic import random_tensor
from .cases import (
    BLOCK_BYTES,
    BLOCK_SHAPES,
    D_FF,
    DEFAULT_MODEL_SHAPE,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    VOCABULARY,
    Case,
    F,
    consecutive_batch,
    family,
    filled_kv,
    random_array,
    rope_table,
)
from .timing import Function

LINEAR_ROWS, LINEAR_COLUMNS = 1024, 4096
DEQUANTIZED_SHAPE = (256, 4096)
WEIGHT_TYPES = [kind for kind in BLOCK_TYPES.values() if kind.name not in ("F64", "I8", "I16", "I32", "I64")]


def op_cases() -> Iterator[Case]:
    """Yield the benchmarks of ops, in the order in which they run."""
    ends = (1, 128)

    def attention_decode(n: int) -> Work:
        return Work(F * HIDDEN * 2 * (1 + n), 4 * n * HIDDEN)

    yield from family("attention_decode", (128, 2048), partial(_attention, 1), attention_decode)
    yield from family("rms_norm", ends, _rms_norm, lambda n: Work(F * HIDDEN * (2 * n + 1), 4 * n * HIDDEN))
    yield from family("swiglu", ends, _swiglu, lambda n: Work(F * 3 * n * D_FF, 5 * n * D_FF))
    yield from family("kv_cache_write", ends, _kv_write, lambda n: Work(4 * F * n * HIDDEN), "store")
    yield from family("kv_cache_read", (128, 2048), _kv_read, lambda n: Work(4 * F * n * HIDDEN), "gather")
    yield from family("block", (1, 32, 128), _block, _block_work)
    for method, row in SAMPLE_ROWS.items():
        yield Case(f"sampling/{method}", partial(_sampling, row), Work(F * VOCABULARY, VOCABULARY), on_host=True)
    for kind in WEIGHT_TYPES:
        yield from family(f"linear/{kind.name}", ends, partial(_linear, kind), partial(_linear_work, kind))
    for kind in WEIGHT_TYPES:
        yield _dequantize(kind)


def _attention(tokens: int, context: int, ops: Any) -> Function:
    q, kv = random_array(ops, tokens, HEADS, HEAD_DIM), filled_kv(ops, context, HEADS, HEAD_DIM)
    attend: Function = prepare_attention(
        ops, q, kv, consecutive_batch(tokens, context), AttentionParams(HEAD_DIM**-0.5)
    )
    return attend


def _rms_norm(tokens: int, ops: Any) -> Function:
    return partial(ops.rms_norm, random_array(ops, tokens, HIDDEN), random_array(ops, HIDDEN), 1e-5)


def _swiglu(tokens: int, ops: Any) -> Function:
    return partial(ops.gated, random_array(ops, tokens, 2 * D_FF), "silu")


def _kv_write(tokens: int, ops: Any) -> Function:
    kv, (k, v) = ops.empty_kv(128, 16, HEADS, HEAD_DIM), random_array(ops, 2, tokens, HEADS, HEAD_DIM)
    return partial(ops.store, k, v, kv, np.random.default_rng(3).permutation(128 * 16)[:tokens])


def _kv_read(context: int, ops: Any) -> Function:
    kv = filled_kv(ops, context, HEADS, HEAD_DIM)
    table = np.random.default_rng(3).permutation(context // 16)
    return lambda: [np.ascontiguousarray(ops.gather(half, table, context)) for half in kv]


def _block(tokens: int, ops: Any) -> Function:
    width, heads, kv_heads, head_dim = DEFAULT_MODEL_SHAPE
    kind, params = BLOCK_TYPES["Q4_1"], AttentionParams(head_dim**-0.5)
    qkv, output, gate_up, down = (Linear(ops.prepare([random_tensor(kind, s)])) for s in BLOCK_SHAPES)
    norm = RMSNorm(ops.prepare_vector(np.ones(width, np.float32)), 1e-5)
    attention = Attention(qkv, output, heads, kv_heads, head_dim, rope_table(head_dim), params)
    block = Block(norm, attention, norm, SwiGLU(gate_up, down))
    kv, x = ops.empty_kv(-(-tokens // 16), 16, kv_heads, head_dim), random_array(ops, tokens, width)
    return partial(block, ops, x, x, kv, consecutive_batch(tokens, tokens))


def _block_work(tokens: int) -> Work:
    operations = 2 * tokens * sum(rows * columns for rows, columns in BLOCK_SHAPES)
    return Work(BLOCK_BYTES + 4 * F * tokens * DEFAULT_MODEL_SHAPE[0], operations, arithmetic="int8")


SAMPLE_ROWS = {
    "greedy": SampleRow(temperature=0.0),
    "temperature": SampleRow(temperature=0.8, seed=1),
    "top_k": SampleRow(temperature=0.8, top_k=40, seed=1),
    "top_p": SampleRow(temperature=0.8, top_p=0.95, seed=1),
    "penalties": SampleRow(temperature=0.8, repetition_penalty=1.1, penalty_window=np.arange(128), seed=1),
}


def _sampling(row: SampleRow, ops: Any) -> Function:
    return partial(ops.sample, 3 * random_array(ops, 1, VOCABULARY), [row])


def _linear(kind: BlockType, tokens: int, ops: Any) -> Function:
    weight = ops.prepare([random_tensor(kind, (LINEAR_ROWS, LINEAR_COLUMNS))])
    return partial(ops.linear, random_array(ops, tokens, LINEAR_COLUMNS), weight)


def _linear_work(kind: BlockType, tokens: int) -> Work:
    moved = LINEAR_ROWS * kind.row_bytes(LINEAR_COLUMNS) + F * tokens * (LINEAR_ROWS + LINEAR_COLUMNS)
    arithmetic = "float32" if kind.block_size == 1 else "int8"
    return Work(moved, 2 * tokens * LINEAR_ROWS * LINEAR_COLUMNS, arithmetic=arithmetic)


def _dequantize(kind: BlockType) -> Case:
    def make(_: Any) -> Function:
        tensor: Tensor = random_tensor(kind, DEQUANTIZED_SHAPE)
        return tensor.dequantize if kind.name != "F32" else tensor.dequantize().copy

    rows, columns = DEQUANTIZED_SHAPE
    work = Work(rows * kind.row_bytes(columns) + F * rows * columns, rows * columns)
    return Case(f"dequantize/{kind.name}", make, work, needs="dequantize")
