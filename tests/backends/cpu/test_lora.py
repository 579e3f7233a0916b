"""`shrink` and `expand` of the CPU backend against the reference, over odd sizes, parts without a pair, and experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.cpu.kernels.lora import UNIT_TOKENS, group_by_adapter
from llm_worker_rbee.backends.ops import Backend, Batch, LoraSite
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.weights.lora import LowRank

EMPTY = np.empty(0, np.int64)


def batch_of(slots: Any) -> Batch:
    random = np.random.default_rng(len(slots))
    scales = random.standard_normal(len(slots)).astype(np.float32)
    return Batch(EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, adapters=np.array(slots), adapter_scales=scales)


def site_of(
    backend: Backend, op: str, columns: int, rows: tuple[int, ...], experts: int = 0, *, exact: bool
) -> LoraSite:
    """Return a site with two adapters, of ranks 1 to 6; the second one leaves the last part alone."""
    site, random = LoraSite(op, columns, rows, experts, 8 * len(rows), exact), np.random.default_rng(columns)
    for slot in (0, 2):
        pairs: list[list[LowRank | None]] = []
        for expert in range(max(1, experts)):
            ranks = random.integers(1, 7, len(rows))
            pairs.append(
                [
                    LowRank(
                        random.standard_normal((r, columns), np.float32), random.standard_normal((n, r), np.float32)
                    )
                    for r, n in zip(ranks, rows, strict=True)
                ]
            )
            if slot == 2:
                pairs[expert][-1] = None
        if len(rows) > 1 or slot == 0:
            backend.place_adapter(site, slot, backend.pack_adapter(site, pairs), 3)
    return site


def compute(backend: Backend, args: tuple[Any, ...], out: Any, **options: Any) -> Any:
    low = backend.shrink(*args, **options)
    options.pop("scale", None)
    return backend.expand(out, low, *args[1:], **options)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("columns", "rows"), [(64, (32,)), (50, (37, 16, 5)), (16, (1,)), (7, (3, 40)), (129, (96, 33))]
)
def test_dense_product_equals_the_reference(columns: int, rows: tuple[int, ...], exact: bool) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((9, columns), np.float32)
    out = random.standard_normal((9, sum(rows)), np.float32)
    batch = batch_of([0, 2, -1, 0, 0, 2, -1, 0, 2])
    results = [
        compute(backend, (x, site_of(backend, "linear", columns, rows, exact=exact), batch), out)
        for backend in (ReferenceBackend(), CpuBackend(2))
    ]
    np.testing.assert_allclose(
        results[1], results[0], rtol=0, atol=(2e-5 if exact else 5e-3) * np.abs(results[0]).max()
    )
    np.testing.assert_array_equal(results[1][2], out[2])
    cpu = CpuBackend(1)
    site = site_of(cpu, "linear", columns, rows, exact=exact)
    for i, slot in enumerate(batch.adapters):  # each row alone, on another number of threads
        own = batch_of([slot])
        own.adapter_scales[:] = batch.adapter_scales[i]
        np.testing.assert_array_equal(compute(cpu, (x[i : i + 1], site, own), out[i : i + 1])[0], results[1][i])


def test_rows_of_an_embedding_and_of_some_tokens_equal_the_reference() -> None:
    random, batch = np.random.default_rng(0), batch_of([2, -1, 0, 0])
    ids, out = np.array([5, 1, 39, 0]), random.standard_normal((4, 20), np.float32)
    index, some = np.array([0, 3]), random.standard_normal((2, 40), np.float32)
    tables, heads = (
        [
            compute(backend, (values, site_of(backend, op, 40, (20,), exact=True), batch), result, **options)
            for backend in (ReferenceBackend(), CpuBackend(2))
        ]
        for op, values, result, options in (
            ("embed", ids, out, {"scale": 1.5}),
            ("logits", some, out[:2], {"index": index}),
        )
    )
    for theirs, ours in (tables, heads):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("by_rows", [False, True])
def test_products_of_experts_equal_the_reference(by_rows: bool) -> None:
    random, batch = np.random.default_rng(0), batch_of([0, -1, 2, 0, 2])
    experts = random.integers(0, 4, (5, 3))
    x = random.standard_normal((5, 3, 48) if by_rows else (5, 48), np.float32)
    out = random.standard_normal((5, 3, 40), np.float32)
    theirs, ours = (
        compute(
            backend, (x, site_of(backend, "grouped_linear", 48, (24, 16), 4, exact=True), batch), out, experts=experts
        )
        for backend in (ReferenceBackend(), CpuBackend(2))
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(ours[1], out[1])


def test_units_have_one_adapter_each() -> None:
    slots = np.array([3, -1, 0] * 70)
    order, _, units = group_by_adapter(slots, np.ones(len(slots), np.float32))
    assert list(order[:70]) == list(np.flatnonzero(slots == 0))
    assert [list(unit) for unit in units] == [[0, 0, UNIT_TOKENS], [0, 64, 6], [3, 70, UNIT_TOKENS], [3, 134, 6]]
    assert len(group_by_adapter(np.array([-1, -1]), np.ones(2, np.float32))[2]) == 0


def test_small_values_keep_their_precision_in_16_bits() -> None:
    backend, batch = CpuBackend(1), batch_of([0])
    batch.adapter_scales[:] = 1
    site = LoraSite("linear", 32, (16,), 0, 4, False)
    pair = LowRank(np.full((2, 32), 3e-9, np.float32), np.full((16, 2), 7e5, np.float32))
    backend.place_adapter(site, 0, backend.pack_adapter(site, [[pair]]), 1)
    x = np.ones((1, 32), np.float32)
    result = compute(backend, (x, site, batch), np.zeros((1, 16), np.float32))
    np.testing.assert_allclose(result, (x @ pair.a.T) @ pair.b.T, rtol=2e-3)
