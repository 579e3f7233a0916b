"""Checkpoints: RMSNorm within 1e-5 (mean 1e-6), RoPE within 1e-5, of transformers' own modules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama as llama

from llm_worker_rbee.backends.ops import Ints, RopeTable
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.layers.norm import RMSNorm
from llm_worker_rbee.layers.rope import rope_table
from tests.helpers.layer_inputs import BlockTables, Floats, assert_caught, assert_checkpoint, hf_model_config, normal

ops = ReferenceBackend()

NORM, NORM_MEAN, ROPE = 1e-5, 1e-6, 1e-5


def their_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    module = llama.LlamaRMSNorm(weight.size, eps=eps)
    module.weight.data = torch.from_numpy(weight)
    return np.asarray(module(torch.from_numpy(x)).detach())


@pytest.mark.parametrize(("tokens", "width"), [(1, 576), (17, 576), (5, 4096), (3, 37), (1, 1)])
@pytest.mark.parametrize("scale", [0.01, 1.0, 300.0])
def test_rms_norm_equals_transformers(tokens: int, width: int, scale: float, rng: np.random.Generator) -> None:
    x, weight = normal(rng, tokens, width, scale=scale), rng.uniform(0.5, 1.5, width).astype(np.float32)
    norm = RMSNorm(ops.prepare_vector(weight), 1e-5)
    assert_checkpoint(lambda: norm(ops, x), their_norm(x, weight, 1e-5), NORM, NORM_MEAN)


def test_add_and_norm_equals_transformers(rng: np.random.Generator) -> None:
    x, residual, weight = normal(rng, 7, 576), normal(rng, 7, 576), rng.uniform(0.5, 1.5, 576).astype(np.float32)
    norm = RMSNorm(weight, 1e-6)
    total = (torch.from_numpy(x) + torch.from_numpy(residual)).numpy()
    assert_checkpoint(lambda: norm.add_and_norm(ops, x, residual)[0], their_norm(total, weight, 1e-6), NORM, NORM_MEAN)
    assert np.array_equal(norm.add_and_norm(ops, x, residual)[1], total)


@pytest.mark.parametrize("wrong", [1e-6, 1e-4, 0.0])
def test_rms_norm_with_a_wrong_epsilon_is_caught(wrong: float, rng: np.random.Generator) -> None:
    x, weight = normal(rng, 4, 576, scale=0.05), np.ones(576, np.float32)
    assert_caught(RMSNorm(weight, wrong)(ops, x), their_norm(x, weight, 1e-5), NORM)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert not RMSNorm(np.ones(8, np.float32), 1e-5)(ops, np.zeros((2, 8), np.float32)).any()


def llama_config(head_dim: int, base: float) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )


def their_rope(q: Floats, k: Floats, positions: Ints, config: transformers.LlamaConfig) -> tuple[Floats, Floats]:
    """q and k (tokens, heads, dim) through LlamaRotaryEmbedding and apply_rotary_pos_emb."""
    tq, tk = (torch.from_numpy(x.transpose(1, 0, 2).copy())[None] for x in (q, k))
    cos, sin = llama.LlamaRotaryEmbedding(config)(tq, torch.from_numpy(positions)[None])
    rq, rk = llama.apply_rotary_pos_emb(tq, tk, cos, sin)
    return rq[0].transpose(0, 1).numpy(), rk[0].transpose(0, 1).numpy()


def our_rope(q: Floats, k: Floats, positions: Ints, table: RopeTable) -> tuple[Floats, Floats]:
    """Run the op alone: return q, and k from the cache."""
    pages = BlockTables([len(q)], np.random.default_rng(3))
    kv = ops.empty_kv(pages.n_blocks, pages.block_size, *k.shape[1:])
    slots = pages.slots(0, np.arange(len(q)))
    rotated = ops.rope_store(q, k, np.zeros_like(k), positions, table, kv, slots)
    return rotated, kv.k.reshape(-1, *k.shape[1:])[slots]


POSITIONS = {"one token": [0], "prompt": list(range(128)), "decode": [777], "far apart": [5, 1999, 0, 640, 4, 1023]}


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize(("head_dim", "base"), [(64, 100000.0), (128, 10000.0), (80, 500000.0)])
def test_rope_equals_transformers(head_dim: int, base: float, where: str, rng: np.random.Generator) -> None:
    positions, config = np.array(POSITIONS[where]), llama_config(head_dim, base)
    q, k = normal(rng, len(positions), 4, head_dim), normal(rng, len(positions), 2, head_dim)
    table = rope_table(hf_model_config(config), local=False, max_context=8192)
    expected = their_rope(q, k, positions, config)
    for i in range(2):
        assert_checkpoint(lambda i=i: our_rope(q, k, positions, table)[i], expected[i], ROPE)  # type: ignore[misc]


def test_rope_wrong_variant_is_caught(rng: np.random.Generator) -> None:
    positions, config = np.arange(16), llama_config(64, 100000.0)
    q, k = normal(rng, 16, 4, 64), normal(rng, 16, 2, 64)
    shape = hf_model_config(config)
    table = rope_table(shape, local=False, max_context=8192)
    expected = their_rope(q, k, positions, config)[0]
    assert_caught(our_rope(q, k, positions + 1, table)[0], expected, ROPE)
    other_base = rope_table(replace(shape, rope_base=10000.0), local=False, max_context=8192)
    assert_caught(our_rope(q, k, positions, other_base)[0], expected, ROPE)
    assert_caught(our_rope(q, k, positions, table._replace(scale=1.001))[0], expected, ROPE)
    neighbours = q.reshape(16, 4, 32, 2).swapaxes(2, 3).reshape(q.shape)  # the other pairing convention
    assert_caught(our_rope(neighbours, k, positions, table)[0], expected, ROPE)
