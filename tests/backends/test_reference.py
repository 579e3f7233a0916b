"""What the ops mean, on odd shapes: quantized tables, stacked matrices, paged and ragged attention, rope, gates."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from llm_worker_rbee.backends import reference as ops
from llm_worker_rbee.backends.ops import AttentionParams, KVLayer, RopeTable, rotated_values
from llm_worker_rbee.layers.rope import inverse_frequencies
from tests.helpers.layer_inputs import BlockTables, Floats, normal, quantized, tensor

KINDS = ("Q8_0", "Q4_1", "Q5_0", "F16", "F32")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F32"])
@pytest.mark.parametrize("scale", [1.0, 24.0])
def test_embed_is_dequantize_and_take(kind: str, scale: float, rng: np.random.Generator) -> None:
    table = quantized(kind, normal(rng, 37, 64)) if kind != "F32" else tensor(normal(rng, 37, 64))
    ids = np.array([36, 0, 5, 5, 12])
    expected = table.dequantize()[ids] * np.float32(scale)
    assert np.array_equal(ops.embed(ops.prepare([table]), ids, scale), expected)
    assert ops.embed(ops.prepare([table]), np.array([7])).shape == (1, 64)


@pytest.mark.parametrize("rows", [[1], [3, 64, 1], [5, 7, 2, 9, 4]])
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_over_a_stack_of_block_types(rows: list[int], tokens: int, bias: bool, rng: np.random.Generator) -> None:
    parts = [
        quantized(KINDS[i], normal(rng, n, 96)) if KINDS[i] != "F32" else tensor(normal(rng, n, 96))
        for i, n in enumerate(rows)
    ]
    x, b = normal(rng, tokens, 96), normal(rng, sum(rows)) if bias else None
    whole = np.concatenate([p.dequantize() for p in parts])
    expected = x.astype(np.float64) @ whole.T.astype(np.float64) + (0 if b is None else b)
    found = ops.linear(x, ops.prepare(parts), b)
    assert found.dtype == np.float32
    assert found.shape == (tokens, sum(rows))
    assert np.abs(found - expected).max() < 1e-4


def test_linear_in_many_slabs_equals_one(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = quantized("Q4_1", normal(rng, 101, 64)), normal(rng, 3, 64)
    whole = ops.linear(x, ops.prepare([weight]))
    for slab in (1, 64, 64 * 7, 64 * 100):
        monkeypatch.setattr(ops, "SLAB", slab)
        assert np.abs(ops.linear(x, ops.prepare([weight])) - whole).max() < 1e-5


def test_a_weight_is_not_copied(rng: np.random.Generator) -> None:
    weight: Any = quantized("Q8_0", normal(rng, 8, 64))
    (kept,) = ops.prepare([weight]).parts
    assert kept is weight


def test_logits_soft_cap(rng: np.random.Generator) -> None:
    head, x = ops.prepare([tensor(normal(rng, 11, 16))]), normal(rng, 2, 16, scale=4.0)
    raw = torch.from_numpy(ops.linear(x, head)).double()
    assert np.array_equal(ops.logits(x, head), ops.linear(x, head))
    assert np.abs(ops.logits(x, head, 5.0) - (5 * torch.tanh(raw / 5)).numpy()).max() < 1e-5


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
def test_gated(activation: str, rng: np.random.Generator) -> None:
    gate_up = normal(rng, 5, 2 * 33, scale=4.0)
    gate_up[0, :4] = [-1e4, 1e4, -88.0, 0.0]  # far out, nothing overflows
    wide = torch.from_numpy(gate_up).double()
    gate, up = wide[:, :33], wide[:, 33:]
    silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu
    act = silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        act = gate * torch.sigmoid(1.702 * gate)
    found = ops.gated(gate_up, activation)
    assert np.isfinite(found).all()
    assert np.allclose(found, (act * up).numpy(), rtol=1e-5, atol=1e-5)


def test_take(rng: np.random.Generator) -> None:
    x = normal(rng, 6, 4)
    assert np.array_equal(ops.take(x, np.array([5, 0])), x[[5, 0]])
    assert ops.take(x, np.empty(0, np.int64)).shape == (0, 4)


@pytest.mark.parametrize("rope_dim", [2, 12, 16])
def test_rope_over_a_part_of_the_head(rope_dim: int, rng: np.random.Generator) -> None:
    """Complex multiplication in float64 as the reference; what is beyond rope_dim stays as it is."""
    x, positions = normal(rng, 5, 3, 16), np.array([0, 1, 7, 100, 3])
    table = RopeTable(inverse_frequencies(10000.0, rope_dim), 1.25)
    half = rope_dim // 2
    turned = (
        (x[..., :half] + 1j * x[..., half:rope_dim].astype(np.float64))
        * 1.25
        * np.exp(1j * positions[:, None, None] * table.inv_freq.astype(np.float64))
    )
    found = ops.rope(x, positions, table)
    assert np.abs(found[..., :half] - turned.real).max() < 1e-4
    assert np.abs(found[..., half:rope_dim] - turned.imag).max() < 1e-4
    assert np.array_equal(found[..., rope_dim:], x[..., rope_dim:])


# ---- attention over pages

LENGTHS = [13, 1, 8]
PARAMS = {
    "plain": AttentionParams(0.25),
    "window": AttentionParams(0.25, window=3),
    "window of one": AttentionParams(0.25, window=1),
    "soft cap": AttentionParams(0.25, soft_cap=1.5),
    "window and soft cap": AttentionParams(0.3, window=5, soft_cap=2.0),
}


def naive(q: Floats, k: Floats, v: Floats, start: int, p: AttentionParams) -> Floats:
    """One request, one query and one head at a time, in float64, straight from the definition."""
    tokens, heads, dim = q.shape
    out = np.zeros((tokens, heads, dim))
    for t in range(tokens):
        first = max(0, start + t + 1 - p.window) if p.window else 0
        for h in range(heads):
            shared = h // (heads // k.shape[1])
            keys, values = (c[first : start + t + 1, shared].astype(np.float64) for c in (k, v))
            scores = keys @ q[t, h].astype(np.float64) * p.scale
            scores = p.soft_cap * np.tanh(scores / p.soft_cap) if p.soft_cap else scores
            weights = np.exp(scores - scores.max())
            out[t, h] = weights / weights.sum() @ values
    return out.reshape(tokens, -1).astype(np.float32)


def filled(rng: np.random.Generator, kv_heads: int, dim: int) -> tuple[BlockTables, KVLayer, list[Any]]:
    """A cache that holds three requests, and noise in free blocks."""
    pages = BlockTables(LENGTHS, rng)
    kv = KVLayer(*(normal(rng, pages.n_blocks, 4, kv_heads, dim, scale=100.0) for _ in "kv"))
    content = [(normal(rng, n, kv_heads, dim), normal(rng, n, kv_heads, dim)) for n in LENGTHS]
    for r, (k, v) in enumerate(content):
        ops.store(k, v, kv, pages.slots(r, np.arange(len(k))))
    return pages, kv, content


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 8), (6, 2, 16), (5, 1, 3)])
def test_attention_of_a_ragged_batch(
    params: str, heads: int, kv_heads: int, dim: int, rng: np.random.Generator
) -> None:
    pages, kv, content = filled(rng, kv_heads, dim)
    spans = [(2, 3, 8), (0, 12, 13), (1, 0, 1)]
    batch, p = pages.batch(spans), PARAMS[params]
    q = normal(rng, len(batch.positions), heads, dim)
    found = ops.attention(q, kv, batch, p)
    for (r, start, end), at in zip(spans, batch.query_start, strict=False):
        mine = slice(int(at), int(at) + end - start)
        assert np.abs(found[mine] - naive(q[mine], content[r][0], content[r][1], start, p)).max() < 1e-5
        alone = ops.attention(q[mine], kv, pages.batch([(r, start, end)]), p)
        assert np.array_equal(alone, found[mine]), "the rest of the batch must not matter"


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_paged_equals_contiguous(block_size: int, rng: np.random.Generator) -> None:
    k, v, q = normal(rng, 29, 2, 8), normal(rng, 29, 2, 8), normal(rng, 4, 6, 8)
    outputs: list[Floats] = []
    for pages in (BlockTables([29], rng, block_size), BlockTables([29], rng, block_size)):
        if not outputs:  # contiguous: blocks 0, 1, 2, ...
            pages.table[0] = np.arange(pages.table.shape[1])
        kv = ops.empty_kv(pages.n_blocks, block_size, 2, 8)
        ops.store(k, v, kv, pages.slots(0, np.arange(29)))
        outputs.append(ops.attention(q, kv, pages.batch([(0, 25, 29)]), AttentionParams(0.3)))
    assert np.array_equal(outputs[0], outputs[1])


def test_attention_never_sees_the_future_or_a_neighbour(rng: np.random.Generator) -> None:
    """NaN in every slot that a query may not see leaves its output finite and unchanged."""
    pages, kv, _ = filled(rng, 2, 8)
    q, batch = normal(rng, 1, 4, 8), pages.batch([(0, 6, 7)])
    before = ops.attention(q, kv, batch, AttentionParams(0.3))
    visible = pages.slots(0, np.arange(7))
    for cache in kv:
        rows = cache.reshape(-1, 2, 8)
        rows[np.setdiff1d(np.arange(len(rows)), visible)] = np.nan
    assert np.array_equal(ops.attention(q, kv, batch, AttentionParams(0.3)), before)


def test_causal_mask_of_a_chunk() -> None:
    seen = ops.causal_mask(np.array([3, 4]), np.arange(6))
    assert seen.tolist() == [[True] * 4 + [False] * 2, [True] * 5 + [False]]
    assert ops.causal_mask(np.array([4]), np.arange(6), 2).tolist() == [[False] * 3 + [True] * 2 + [False]]


@pytest.mark.parametrize("dim", [20, 64, 80, 96, 128, 256])
def test_int8_keys_survive_one_large_channel(dim: int, rng: np.random.Generator) -> None:
    """Rotated heads have the same products; the error of int8 keys falls where a channel is far larger than others."""
    q, k = (rng.standard_normal((40, 3, dim), np.float32) for _ in range(2))
    k[:, :, 5] += 100
    exact = np.sum(q * k, axis=-1, dtype=np.float64)
    rotated = np.sum(ops.hadamard(q) * ops.hadamard(k), axis=-1, dtype=np.float64)
    np.testing.assert_allclose(rotated, exact, atol=1e-3)

    def error(q: Floats, k: Floats) -> float:
        codes, scales = ops.quantize_int8(k)
        return float(np.std(np.sum(q * codes * scales[..., None], axis=-1) - exact))

    size = rotated_values(dim)
    assert size == {20: 1, 64: 64, 80: 16, 96: 32, 128: 128, 256: 256}[dim]
    if size >= 64:
        assert error(ops.hadamard(q), ops.hadamard(k)) < 0.6 * error(q, k)


def test_rope_store_writes_only_its_slots(rng: np.random.Generator) -> None:
    kv = ops.empty_kv(3, 4, 2, 8)
    q, k, v = normal(rng, 3, 4, 8), normal(rng, 3, 2, 8), normal(rng, 3, 2, 8)
    table, positions, slots = RopeTable(inverse_frequencies(1e4, 8), 1.0), np.array([5, 6, 7]), np.array([9, 2, 4])
    assert np.array_equal(ops.rope_store(q, k, v, positions, table, kv, slots), ops.rope(q, positions, table))
    assert np.array_equal(kv.k.reshape(-1, 2, 8)[slots], ops.rope(k, positions, table))
    assert np.array_equal(kv.v.reshape(-1, 2, 8)[slots], v)
    others = np.setdiff1d(np.arange(12), slots)
    assert not kv.k.reshape(-1, 2, 8)[others].any()
    assert not kv.v.reshape(-1, 2, 8)[others].any()


def test_a_batch_is_not_changed_by_attention(rng: np.random.Generator) -> None:
    pages, kv, _ = filled(rng, 2, 8)
    batch = pages.batch([(0, 0, 13)])
    before = deepcopy(batch)
    ops.attention(normal(rng, 13, 4, 8), kv, replace(batch), AttentionParams(0.3))
    assert all(np.array_equal(getattr(batch, one.name), getattr(before, one.name)) for one in fields(batch))
