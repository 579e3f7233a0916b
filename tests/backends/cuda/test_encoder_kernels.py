"""Ops of encoders on the CUDA backend against the reference: odd widths, ragged batches, windows to both sides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from llm_worker_rbee.backends import reference
from llm_worker_rbee.backends.cuda import CudaBackend
from llm_worker_rbee.backends.cuda.kernels.encoder import ACTIVATIONS, MEAN_ROWS
from llm_worker_rbee.backends.ops import AttentionParams, RopeTable
from llm_worker_rbee.backends.reference import ReferenceBackend
from tests.helpers.layer_inputs import BlockTables, Floats, normal
from tests.helpers.random_tensors import relative_error

cuda, invariant = CudaBackend(), CudaBackend(deterministic=True)
DEVICE = cuda.torch_device


def on_device(x: Floats) -> torch.Tensor:
    return torch.tensor(x, device=DEVICE)


@pytest.mark.parametrize("ops", [cuda, invariant], ids=["default", "deterministic"])
@pytest.mark.parametrize("width", [5, 96, 1030])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norms_match_reference(ops: CudaBackend, width: int, has_bias: bool, rng: np.random.Generator) -> None:
    x, residual = normal(rng, 7, width) + 3, normal(rng, 7, width, scale=20.0)
    weight, bias = normal(rng, width), normal(rng, width) if has_bias else None
    given = on_device(weight), None if bias is None else on_device(bias), 1e-12
    assert relative_error(ops.layer_norm(on_device(x), *given), reference.layer_norm(x, weight, bias, 1e-12)) < 1e-6
    found = ops.add_layer_norm(on_device(x), on_device(residual), *given)
    for one, wanted in zip(found, reference.add_layer_norm(x, residual, weight, bias, 1e-12), strict=True):
        assert relative_error(one, wanted) < 1e-6


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activate_matches_reference(activation: str, rng: np.random.Generator) -> None:
    x = normal(rng, 3, 75, scale=4.0)
    x[0, 0], x[1, 1] = -200, 200
    np.testing.assert_allclose(
        cuda.activate(on_device(x), activation).cpu(), reference.activate(x, activation), 1e-5, 1e-6
    )
    x[2, 2] = np.nan
    assert torch.isnan(cuda.activate(on_device(x), activation)).sum() == 1


def test_means_have_the_same_bits_alone_and_in_a_batch(rng: np.random.Generator) -> None:
    counts = [1, MEAN_ROWS, 3 * MEAN_ROWS + 5, 2]
    batch = BlockTables(counts, rng).batch([(r, 0, count) for r, count in enumerate(counts)])
    x = normal(rng, sum(counts), 133)
    found = cuda.mean_rows(on_device(x), batch)
    assert relative_error(found, reference.mean_rows(x, batch)) < 1e-6
    start = batch.query_start
    for r in range(len(counts)):
        alone = replace(batch, query_start=np.array([0, counts[r]]))
        assert torch.equal(cuda.mean_rows(on_device(x[start[r] : start[r + 1]]), alone)[0], found[r])


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window"), [(2, 1, 24, 0), (1, 1, 32, 6), (1, 1, 16, 70)])
def test_attention_in_both_directions(
    heads: int, kv_heads: int, dim: int, window: int, rng: np.random.Generator
) -> None:
    """Sequences of one token, of less and of more than a tile of keys."""
    counts = [1, 17, 66]
    pages, table = BlockTables(counts, rng), RopeTable(np.zeros(dim // 2, np.float32), 1.0)
    params, batch = (
        AttentionParams(dim**-0.5, window, causal=False),
        pages.batch([(r, 0, n) for r, n in enumerate(counts)]),
    )
    q, k, v = (normal(rng, sum(counts), n, dim) for n in (heads, kv_heads, kv_heads))
    results = []
    for ops, bring in ((ReferenceBackend(), np.asarray), (cuda, on_device), (invariant, on_device)):
        kv = ops.empty_kv(pages.n_blocks, pages.block_size, kv_heads, dim, kind="float32")
        turned = ops.rope_store(bring(q), bring(k), bring(v), batch.positions, table, kv, batch.slot_mapping)
        results.append(ops.attention(turned, kv, batch, params))
    assert relative_error(results[1], results[0]) < 2e-5
    assert relative_error(results[2], results[0]) < 2e-5
    alone = pages.batch([(1, 0, 17)])
    span = slice(1, 18)
    kv = invariant.empty_kv(pages.n_blocks, pages.block_size, kv_heads, dim, kind="float32")
    turned = invariant.rope_store(
        *(on_device(x[span]) for x in (q, k, v)), alone.positions, table, kv, alone.slot_mapping
    )
    assert torch.equal(invariant.attention(turned, kv, alone, params), results[2][span])
