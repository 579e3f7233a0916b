"""Each layer alone: shapes, biases, norms; inputs are not modified."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llm_worker_rbee.backends.ops import AttentionParams, RopeTable
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.layers.attention import Attention
from llm_worker_rbee.layers.block import Block
from llm_worker_rbee.layers.linear import Linear
from llm_worker_rbee.layers.mlp import SwiGLU
from llm_worker_rbee.layers.norm import RMSNorm
from llm_worker_rbee.layers.rope import inverse_frequencies
from tests.helpers.layer_inputs import BlockTables, linear, normal, pack_weights, quantized

ops = ReferenceBackend()

WIDTH, HEADS, KV_HEADS, DIM = 30, 3, 1, 8


def attention(rng: np.random.Generator) -> Attention:
    rows = (HEADS + 2 * KV_HEADS) * DIM
    return Attention(
        linear(normal(rng, rows, WIDTH)),
        linear(normal(rng, WIDTH, HEADS * DIM)),
        HEADS,
        KV_HEADS,
        DIM,
        RopeTable(inverse_frequencies(10000.0, DIM), 1.0),
        AttentionParams(DIM**-0.5),
    )


def test_linear_with_and_without_bias_equals_torch(rng: np.random.Generator) -> None:
    weight, bias, x = normal(rng, 5, WIDTH), normal(rng, 5), normal(rng, 2, WIDTH)
    plain = Linear(pack_weights(weight))(ops, x)
    assert np.allclose(plain, x @ weight.T, atol=1e-5)
    assert np.array_equal(Linear(pack_weights(weight), bias)(ops, x), plain + bias)


def test_linear_quantized_weight_equals_dequantized(rng: np.random.Generator) -> None:
    weight, x = quantized("Q4_1", normal(rng, 9, 64)), normal(rng, 1, 64)
    assert np.allclose(Linear(ops.prepare([weight]))(ops, x), x @ weight.dequantize().T, atol=1e-5)


def test_split_heads_returns_q_k_v() -> None:
    rows = np.arange((HEADS + 2 * KV_HEADS) * DIM, dtype=np.float32)[None]
    q, k, v = ops.split_heads(rows, HEADS, KV_HEADS, DIM)
    assert (q.shape, k.shape, v.shape) == ((1, HEADS, DIM), (1, KV_HEADS, DIM), (1, KV_HEADS, DIM))
    assert (q[0, 0, 0], k[0, 0, 0], v[0, 0, 0]) == (0, HEADS * DIM, (HEADS + KV_HEADS) * DIM)


def test_attention_qk_norm_is_applied_per_head(rng: np.random.Generator) -> None:
    """With norms of weight 1, scaling the q and k projections changes nothing."""
    pages, x = BlockTables([5], rng), normal(rng, 5, WIDTH)
    layer, norm = attention(rng), RMSNorm(np.ones(DIM, np.float32), 1e-12)
    normed = replace(layer, q_norm=norm, k_norm=norm)
    weight = layer.qkv.weight.parts[0].dequantize().copy()
    weight[: (HEADS + KV_HEADS) * DIM] *= 4
    kv = ops.empty_kv(pages.n_blocks, pages.block_size, KV_HEADS, DIM)
    batch = pages.batch([(0, 0, 5)])
    outputs = [
        model(ops, x, kv, batch)
        for model in (normed, replace(normed, qkv=linear(weight)), layer, replace(layer, qkv=linear(weight)))
    ]
    assert np.allclose(outputs[0], outputs[1], atol=1e-4)
    assert np.abs(outputs[2] - outputs[3]).max() > 1e-2


def test_block_with_post_norms_equals_definition(rng: np.random.Generator) -> None:
    """With norms after attention and MLP the delta of the block has a root mean square of 1."""
    norm = RMSNorm(np.ones(WIDTH, np.float32), 1e-6)
    mlp = SwiGLU(linear(normal(rng, 2 * 7, WIDTH)), linear(normal(rng, WIDTH, 7)))
    plain = Block(norm, attention(rng), norm, mlp)
    pages, x = BlockTables([4], rng), normal(rng, 4, WIDTH)
    kv, batch = ops.empty_kv(pages.n_blocks, pages.block_size, KV_HEADS, DIM), pages.batch([(0, 0, 4)])
    added, stream = replace(plain, post_attention_norm=norm, post_mlp_norm=norm)(ops, x, None, kv, batch)
    assert np.sqrt((added**2).mean(-1)) == pytest.approx(np.ones(4), abs=1e-3)
    assert np.sqrt(((stream - x) ** 2).mean(-1)) == pytest.approx(np.ones(4), abs=1e-3)
    assert not np.allclose(plain(ops, x, None, kv, batch)[0], added, atol=1e-2)


def test_layers_do_not_modify_their_input(rng: np.random.Generator) -> None:
    norm = RMSNorm(np.ones(WIDTH, np.float32), 1e-6)
    block = Block(norm, attention(rng), norm, SwiGLU(linear(normal(rng, 14, WIDTH)), linear(normal(rng, WIDTH, 7))))
    pages, x, residual = BlockTables([4], rng), normal(rng, 4, WIDTH), normal(rng, 4, WIDTH)
    copies = x.copy(), residual.copy()
    kv = ops.empty_kv(pages.n_blocks, pages.block_size, KV_HEADS, DIM)
    block(ops, x, residual, kv, pages.batch([(0, 0, 4)]))
    assert np.array_equal(x, copies[0])
    assert np.array_equal(residual, copies[1])
