"""What encoders have between products, on the CPU: against the reference, and the same bits alone and in a batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llm_worker_rbee.backends import reference
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.cpu.forward import CpuForward
from llm_worker_rbee.backends.cpu.kernels import encoder
from llm_worker_rbee.backends.cpu.lowering import REWRITES
from llm_worker_rbee.backends.graph import op_names, record
from llm_worker_rbee.backends.ops import AttentionParams, Batch, RopeTable
from llm_worker_rbee.errors import InferenceError
from llm_worker_rbee.layers.attention import Attention
from llm_worker_rbee.layers.encoder import Dense, Embeddings, EncoderBlock, Pooler
from llm_worker_rbee.layers.linear import Linear
from llm_worker_rbee.layers.mlp import MLP
from llm_worker_rbee.layers.norm import LayerNorm
from llm_worker_rbee.models.pooling import make_batch
from tests.backends.cpu.test_attention import filled, step
from tests.helpers.random_tensors import random_tensor

Floats = NDArray[np.float32]
STILL = RopeTable(np.empty(0, np.float32), 1.0)
ENCODER_REWRITES = ("layer_norm", "activate")
cpu = CpuBackend()


def normal(*shape: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (9, 384), (2, 7)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norms_agree_with_reference(rows: int, width: int, has_bias: bool) -> None:
    x, residual, weight = 3 + normal(rows, width), normal(rows, width, seed=2), normal(width, seed=3)
    bias = normal(width, seed=4) if has_bias else None
    found, wanted = (ops.layer_norm(x, weight, bias, 1e-12) for ops in (cpu, reference))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=3e-6)
    pairs = (ops.add_layer_norm(x, residual, weight, bias, 1e-12) for ops in (cpu, reference))
    for one, other in zip(*pairs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=3e-6)
    np.testing.assert_array_equal(cpu.layer_norm(x[-1:], weight, bias, 1e-12), found[-1:])


@pytest.mark.parametrize("activation", encoder.ACTIVATIONS)
@pytest.mark.parametrize(("rows", "width"), [(1, 48), (5, 530)])
def test_activations_agree_with_reference(activation: str, rows: int, width: int) -> None:
    x = 4 * normal(rows, width)
    x[0, :5] = (-200, 200, 0, np.inf, np.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        found, wanted = cpu.activate(x, activation), reference.activate(x, activation)
    np.testing.assert_allclose(found, wanted, rtol=3e-6, atol=2e-5 if activation == "gelu_tanh" else 1e-6)
    np.testing.assert_array_equal(cpu.activate(x[-1:], activation), found[-1:])


def test_gelu_is_exact_to_the_last_place() -> None:
    x = np.linspace(-8, 8, 4096, dtype=np.float32)[None]
    wanted = [v * 0.5 * math.erfc(-v / math.sqrt(2)) for v in x[0].tolist()]
    error = np.abs(cpu.activate(x, "gelu")[0] - wanted)
    assert (error <= 1.2e-7 + np.abs(x[0]) * 2.0**-24).all()


@pytest.mark.parametrize("half", [48, 50])
def test_gated_gelu_agrees_with_reference(half: int) -> None:
    x = 3 * normal(6, 2 * half)
    np.testing.assert_allclose(cpu.gated(x, "gelu"), reference.gated(x, "gelu"), rtol=3e-6, atol=1e-6)


def test_mean_rows_has_the_bits_of_each_sequence_alone() -> None:
    x, starts = normal(30, 70), np.array([0, 1, 18, 30])
    batch, empty = step([1, 17, 12], [1, 17, 12])[0], np.empty(0, np.int64)
    found = cpu.mean_rows(x, batch)
    np.testing.assert_allclose(found, reference.mean_rows(x, batch), rtol=1e-6, atol=1e-6)
    for r, (first, last) in enumerate(itertools.pairwise(starts)):
        own = Batch(empty, empty, empty, np.array([0, last - first]), np.array([last - first]), empty, empty)
        np.testing.assert_array_equal(cpu.mean_rows(x[first:last], own)[0], found[r])


@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize("window", [0, 1, 6, 40])
def test_attention_in_both_directions_agrees_with_reference(kind: str, window: int) -> None:
    """Also of sequences with few tokens and of more than one block of keys."""
    params = AttentionParams(0.2, window=window, causal=False)
    lengths = [37, 3, 1, 530] if window == 0 else [37, 70, 3, 1]
    batch, blocks = step(lengths, lengths)
    q = normal(batch.ids.size, 4, 32)
    caches = [filled(ops, batch, blocks, kind, 4, 32) for ops in (cpu, reference)]
    found, wanted = (ops.attention(q, kv, batch, params) for ops, kv in zip((cpu, reference), caches, strict=True))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=5e-6)
    for r in range(len(lengths)):
        span = slice(int(batch.query_start[r]), int(batch.query_start[r + 1]))
        arrays = batch.ids[span], batch.positions[span], batch.slot_mapping[span]
        start, context = np.array([0, lengths[r]]), batch.context_len[r : r + 1]
        own = Batch(*arrays, start, context, batch.block_table[r : r + 1], start[1:] - 1)
        np.testing.assert_array_equal(cpu.attention(q[span], caches[0], own, params), found[span])


def tiny_encoder(kind: str, *, takes_mean: bool) -> Callable[..., Any]:
    """The forward pass of an encoder with two blocks of 64 values, 2 heads and an MLP of 128."""
    rng = np.random.default_rng(5)

    def matrix(rows: int, columns: int) -> Any:
        return cpu.prepare([random_tensor(kind, rows, columns, rng, 0.1)])

    def linear(rows: int, columns: int) -> Linear:
        return Linear(matrix(rows, columns), normal(rows, seed=rows))

    def norm(seed: int) -> LayerNorm:
        return LayerNorm(1 + normal(64, seed=seed) / 4, normal(64, seed=seed + 1), 1e-12)

    def block(params: AttentionParams) -> EncoderBlock:
        attention = Attention(linear(192, 64), linear(64, 64), 2, 2, 32, STILL, params)
        return EncoderBlock(attention, norm(1), MLP(linear(128, 64), linear(64, 128), "gelu"), norm(3))

    blocks = [block(AttentionParams(0.2, window, causal=False)) for window in (0, 8)]
    embeddings = Embeddings(matrix(50, 64), 1.0, matrix(96, 64), matrix(2, 64), norm(5))
    pooler = Pooler(takes_mean, (Dense(linear(64, 64), "tanh"), Dense(linear(3, 64))))

    def forward(ops: Any, batch: Batch, kv: Any) -> tuple[Any, None]:
        x = embeddings(ops, batch)
        for one, layer in zip(blocks, kv, strict=True):
            x, _ = one(ops, x, None, layer, batch)
        x = x if takes_mean else ops.take(x, batch.logits_index)
        return pooler(ops, x, batch), None

    return forward


@pytest.mark.parametrize(("kind", "takes_mean"), [("Q8_0", True), ("Q8_0", False), ("F32", True)])
def test_a_fused_encoder_has_the_bits_of_single_ops_and_of_each_sequence_alone(kind: str, takes_mean: bool) -> None:
    forward = tiny_encoder(kind, takes_mean=takes_mean)
    graph = record(forward, 2)
    fused = CpuForward(graph, cpu.threads)
    sequences = [np.arange(n) * 7 % 50 for n in (20, 1, 67, 5)]
    types = [np.arange(len(ids)) % 2 for ids in sequences]
    batch = make_batch(sequences, types, takes_first=True)
    kv = [cpu.empty_kv(int(batch.block_table.max()) + 1, 16, 2, 32)] * 2
    found = fused(batch, kv)
    assert found.shape == (4, 3)
    np.testing.assert_array_equal(found, forward(cpu, batch, kv)[0])
    for r, ids in enumerate(sequences):
        np.testing.assert_array_equal(fused(make_batch([ids], types[r : r + 1], takes_first=True), kv)[0], found[r])
    if kind == "Q8_0":
        used = {(node.op, op_names(node)) for node in fused.graph.nodes if node.fused}
        for rewrite in (one for one in REWRITES if one.into in ENCODER_REWRITES):
            needed = {name.rstrip("*") for name in rewrite.pattern.split() if not name.endswith("?")}
            assert any(op == rewrite.into and needed <= set(ops.split(" + ")) for op, ops in used), rewrite.pattern
    with pytest.raises(InferenceError, match="positions are outside the table of 96"):
        fused(make_batch([np.zeros(97, np.int64)], None, takes_first=True), kv)
