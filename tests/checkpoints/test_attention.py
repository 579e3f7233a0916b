"""Checkpoints: QKV, scores and attention output 1e-4, softmax 1e-6, KV cache exact, against torch and transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama as llama

from llm_worker_rbee.backends.ops import AttentionParams, Batch
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.layers.attention import Attention
from llm_worker_rbee.layers.rope import rope_table
from llm_worker_rbee.models.kv_cache import KVCache
from tests.helpers.layer_inputs import (
    BlockTables,
    Floats,
    assert_caught,
    assert_checkpoint,
    hf_model_config,
    linear,
    normal,
)

ops = ReferenceBackend()

DynamicCache: Any = transformers.DynamicCache
QKV = SCORES = OUTPUT = 1e-4
SOFTMAX = 1e-6
SHAPES = {"SmolLM2": (576, 9, 3, 64), "wide": (2048, 16, 4, 128), "odd": (45, 3, 1, 10), "all heads": (96, 4, 4, 24)}


def their_attention(shape: str, bias: bool = False) -> Any:
    hidden, heads, kv_heads, dim = SHAPES[shape]
    config: Any = transformers.AutoConfig.for_model(
        "llama",
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        intermediate_size=2 * hidden,
        attention_bias=bias,
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    torch.manual_seed(5)
    module = llama.LlamaAttention(config, 0).float().eval()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.copy_(torch.randn_like(weight) * (0.5 if name.endswith("bias") else 1.5 / hidden**0.5))
    return module


def our_attention(module: Any) -> Attention:
    c = hf_model_config(module.config)
    return Attention(
        linear(module.q_proj, module.k_proj, module.v_proj),
        linear(module.o_proj),
        c.n_heads,
        c.n_kv_heads,
        c.head_dim,
        rope_table(c, local=False, max_context=2048),
        AttentionParams(c.attention_scale),
    )


def split(layer: Attention, qkv: Floats) -> tuple[Floats, Floats, Floats]:
    return ops.split_heads(qkv, layer.n_heads, layer.n_kv_heads, layer.head_dim)


def their_output(module: Any, x: Floats) -> Floats:
    """The whole request at once, with a causal mask."""
    n = len(x)
    mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
    hidden = torch.from_numpy(x)[None]
    with torch.no_grad():
        positions = llama.LlamaRotaryEmbedding(module.config)(hidden, torch.arange(n)[None])
        return np.asarray(module(hidden, position_embeddings=positions, attention_mask=mask)[0][0])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 6])
def test_qkv_equals_transformers(shape: str, bias: bool, tokens: int, rng: np.random.Generator) -> None:
    module = their_attention(shape, bias)
    ours, x = our_attention(module), normal(rng, tokens, SHAPES[shape][0])
    for i, projection in enumerate((module.q_proj, module.k_proj, module.v_proj)):
        expected = projection(torch.from_numpy(x)).detach().numpy().reshape(tokens, -1, ours.head_dim)
        assert_checkpoint(lambda i=i: split(ours, ours.qkv(ops, x))[i], expected, QKV)  # type: ignore[misc]


def test_qkv_with_a_wrong_head_count_is_caught(rng: np.random.Generator) -> None:
    module = their_attention("SmolLM2")
    x = normal(rng, 4, 576)
    wrong = replace(our_attention(module), n_heads=7, n_kv_heads=4)  # the same number of rows
    k = split(wrong, wrong.qkv(ops, x))[1][:, :3]
    assert_caught(k, module.k_proj(torch.from_numpy(x)).detach().numpy().reshape(4, 3, 64), QKV)


def test_kv_cache_is_exact(rng: np.random.Generator) -> None:
    """Three requests written in steps equal transformers' cache bitwise, and nothing else is written."""
    lengths, config = [11, 1, 6], hf_model_config(their_attention("SmolLM2").config)
    pages, theirs = BlockTables(lengths, rng), [DynamicCache() for _ in lengths]
    cache = KVCache(ops, replace(config, n_layers=2), pages.n_blocks, pages.block_size)
    for spans in ([(0, 0, 5), (1, 0, 1)], [(2, 0, 6), (0, 5, 10)], [(0, 10, 11)]):
        batch = pages.batch(spans)
        k, v = normal(rng, len(batch.ids), 3, 64), normal(rng, len(batch.ids), 3, 64)
        ops.store(k, v, cache.layers[1], batch.slot_mapping)
        for (r, _, _), start, end in zip(spans, batch.query_start[:-1], batch.query_start[1:], strict=True):
            theirs[r].update(*(torch.from_numpy(x[start:end]).transpose(0, 1)[None] for x in (k, v)), 0)
    used: Any = 0
    for r, length in enumerate(lengths):
        slots = cache.slots(pages.table[r], np.arange(length))
        for ours, layer in zip(cache.layers[1], (theirs[r].layers[0].keys, theirs[r].layers[0].values), strict=True):
            assert np.array_equal(ours.reshape(-1, 3, 64)[slots], layer[0].transpose(0, 1).numpy())
            used += np.count_nonzero(ours.reshape(-1, 3, 64)[slots])
    assert used == sum(np.count_nonzero(part) for part in cache.layers[1]), "something was written elsewhere"
    assert not any(part.any() for part in cache.layers[0])


def test_kv_cache_read_at_a_wrong_position_is_caught(rng: np.random.Generator) -> None:
    pages = BlockTables([9], rng)
    kv, k = ops.empty_kv(pages.n_blocks, 4, 3, 64), normal(rng, 9, 3, 64)
    ops.store(k, k, kv, pages.slots(0, np.arange(9)))
    rows = kv.k.reshape(-1, 3, 64)
    assert np.array_equal(rows[pages.slots(0, np.arange(9))], k)
    assert not np.array_equal(rows[pages.slots(0, np.arange(1, 10))], k)
    assert not np.array_equal(rows[:9], k), "the blocks are shuffled: reading them in storage order must not work"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens", "length", "dim"), [(9, 3, 5, 5, 64), (8, 8, 1, 33, 128), (6, 1, 3, 7, 10)]
)
def test_attention_scores_equal_transformers(
    heads: int, kv_heads: int, tokens: int, length: int, dim: int, rng: np.random.Generator
) -> None:
    q, k = normal(rng, heads, tokens, dim), normal(rng, kv_heads, length, dim)
    full = llama.repeat_kv(torch.from_numpy(k)[None], heads // kv_heads)[0]
    expected = (torch.from_numpy(q).double() @ full.double().transpose(1, 2) * dim**-0.5).numpy()
    assert_checkpoint(lambda: ops.attention_scores(q, k, AttentionParams(dim**-0.5)), expected, SCORES)
    assert_caught(ops.attention_scores(q, k, AttentionParams(1 / dim)), expected, SCORES)
    if 1 < kv_heads < heads:
        regrouped = (
            q.reshape(-1, kv_heads, tokens, dim).swapaxes(0, 1).reshape(q.shape)
        )  # heads h, h + kv, ... share instead
        assert_caught(ops.attention_scores(regrouped, k, AttentionParams(dim**-0.5)), expected, SCORES)


@pytest.mark.parametrize(("shape", "scale"), [((1, 1), 1.0), ((3, 7, 129), 1.0), ((2, 49152), 5.0), ((4, 33), 1e4)])
def test_softmax_equals_torch(shape: tuple[int, ...], scale: float, rng: np.random.Generator) -> None:
    x = normal(rng, *shape, scale=scale)
    expected = torch.softmax(torch.from_numpy(x).double(), -1).numpy()
    assert_checkpoint(lambda: ops.softmax(x), expected, SOFTMAX)
    assert np.allclose(ops.softmax(x).sum(-1), 1, atol=1e-5)
    if shape[-1] > 1 and scale < 100:  # beyond, one probability is 1
        assert_caught(ops.softmax(x * np.float32(1.1)), expected, SOFTMAX)


def test_softmax_masked_equals_torch(rng: np.random.Generator) -> None:
    x = normal(rng, 5, 5)
    x[~ops.causal_mask(np.arange(5), np.arange(5))] = -np.inf
    assert_checkpoint(lambda: ops.softmax(x), torch.softmax(torch.from_numpy(x).double(), -1).numpy(), SOFTMAX)
    assert not np.triu(ops.softmax(x), 1).any()


# Each list is one step: (request, from, to). Requests of 11, 1 and 6 tokens.
STEPS: dict[str, list[list[tuple[int, int, int]]]] = {
    "one by one": [[(0, 0, 11)], [(1, 0, 1)], [(2, 0, 6)]],
    "one ragged batch": [[(2, 0, 6), (0, 0, 11), (1, 0, 1)]],
    "chunks mixed with decode": [[(0, 0, 5), (2, 0, 2)], [(0, 5, 10), (1, 0, 1), (2, 2, 3)], [(2, 3, 6), (0, 10, 11)]],
}
LENGTHS = [11, 1, 6]


def run_steps(
    layer: Attention,
    xs: list[Floats],
    steps: list[list[tuple[int, int, int]]],
    change: Any = lambda batch, pages: batch,
) -> Floats:
    """Return the outputs of all requests, computed in these steps over a shuffled paged cache."""
    pages = BlockTables(LENGTHS, np.random.default_rng(2))
    kv = ops.empty_kv(pages.n_blocks, pages.block_size, layer.n_kv_heads, layer.head_dim)
    outs = [np.empty_like(x) for x in xs]
    for spans in steps:
        batch = change(pages.batch(spans), pages)
        out = layer(ops, np.concatenate([xs[r][start:end] for r, start, end in spans]), kv, batch)
        for (r, start, end), at in zip(spans, batch.query_start, strict=False):
            outs[r][start:end] = out[at : at + end - start]
    return np.concatenate(outs)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_output_equals_transformers(shape: str, steps: str, rng: np.random.Generator) -> None:
    module = their_attention(shape)
    layer, xs = our_attention(module), [normal(rng, n, SHAPES[shape][0]) for n in LENGTHS]
    expected = np.concatenate([their_output(module, x) for x in xs])
    assert_checkpoint(lambda: run_steps(layer, xs, STEPS[steps]), expected, OUTPUT)


def positions_from_zero(batch: Batch, pages: BlockTables) -> Batch:
    fresh = [np.arange(n) for n in np.diff(batch.query_start)]
    return replace(batch, positions=np.concatenate(fresh))


WRONG_BATCH = {
    "positions counted from 0": positions_from_zero,
    "keys written one slot too far": lambda b, pages: replace(
        b, slot_mapping=(b.slot_mapping + 1) % (pages.n_blocks * 4)
    ),
    "another request's blocks": lambda b, pages: replace(
        b, block_table=np.roll(pages.table, 1, 0)[: len(b.block_table)]
    ),
    "context one token short": lambda b, pages: replace(b, context_len=np.maximum(b.context_len - 1, 1)),
}


@pytest.mark.parametrize("mistake", WRONG_BATCH)
def test_attention_at_a_wrong_cache_position_is_caught(mistake: str, rng: np.random.Generator) -> None:
    module = their_attention("SmolLM2")
    layer, xs = our_attention(module), [normal(rng, n, 576) for n in LENGTHS]
    expected = np.concatenate([their_output(module, x) for x in xs])
    steps = STEPS["chunks mixed with decode"]
    assert_caught(run_steps(layer, xs, steps, WRONG_BATCH[mistake]), expected, OUTPUT)


def test_attention_with_wrong_parameters_is_caught(rng: np.random.Generator) -> None:
    module = their_attention("SmolLM2")
    layer, xs = our_attention(module), [normal(rng, n, 576) for n in LENGTHS]
    expected = np.concatenate([their_output(module, x) for x in xs])
    wrong = {
        "scale": replace(layer, params=AttentionParams(1 / 64)),
        "window": replace(layer, params=AttentionParams(64**-0.5, window=3)),
        "soft cap": replace(layer, params=AttentionParams(64**-0.5, soft_cap=2.0)),
        "head size": replace(
            layer, n_heads=18, n_kv_heads=6, head_dim=32, rope=layer.rope._replace(inv_freq=layer.rope.inv_freq[:16])
        ),
    }
    for broken in wrong.values():
        assert_caught(run_steps(broken, xs, STEPS["one ragged batch"]), expected, OUTPUT)
