"""Attention over the paged cache on the CPU: each kind of keys and values against the reference, and the same bits in
any company.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llm_worker_rbee.backends import cpu_info, reference
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.cpu.kernels.attention_key_blocks import KEY_BLOCK
from llm_worker_rbee.backends.ops import KV_TYPES, AttentionParams, Batch, KVLayer, RopeTable

cpu = CpuBackend()

ROOT = Path(__file__).parents[3]
Floats = NDArray[np.float32]
STILL = RopeTable(np.empty(0, np.float32), 1.0)  # turns nothing: both sides store the same numbers
PLAIN = AttentionParams(0.2)
SHAPES = [  # heads, kv heads, head size, settings
    (7, 1, 16, AttentionParams(0.25)),  # heads that decode tiles of four do not divide
    (18, 2, 16, AttentionParams(0.25)),  # nor tiles of eight
    (3, 3, 20, AttentionParams(0.3, window=5)),
    (6, 2, 40, AttentionParams(0.2, window=19, soft_cap=3.0)),
    (4, 1, 64, AttentionParams(0.125)),
    (8, 1, 80, AttentionParams(0.1, soft_cap=20.0)),
    (6, 2, 128, AttentionParams(0.1, window=1)),
]


def normal(*shape: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def sinks_of(heads: int) -> Floats | None:
    """Sinks, for an even number of heads."""
    return None if heads % 2 else 3 * normal(heads, seed=9)


def step(lengths: list[int], contexts: list[int], block: int = 16) -> tuple[Batch, int]:
    """The last `lengths` tokens of requests of these contexts, whose blocks lie mixed up in the cache."""
    counts = [-(-context // block) for context in contexts]
    order = np.random.default_rng(4).permutation(sum(counts))
    table = np.zeros((len(lengths), max(counts)), np.int64)
    table_rows = np.split(order, np.cumsum(counts)[:-1])
    positions, slots = [], []
    for r, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        table[r, : counts[r]] = table_rows[r]
        place = np.arange(context - length, context)
        positions.append(place)
        slots.append(table[r, place // block] * block + place % block)
    flat, starts = np.concatenate(positions), np.concatenate([[0], np.cumsum(lengths)])
    return Batch(flat, flat, np.concatenate(slots), starts, np.array(contexts), table, starts[1:] - 1), sum(counts)


def part(batch: Batch, r: int, first: int, last: int) -> Batch:
    """Tokens first .. last - 1 of request r alone."""
    start = int(batch.query_start[r])
    span = slice(start + first, start + last)
    context = np.array([batch.positions[span][-1] + 1])
    arrays = (batch.ids[span], batch.positions[span], batch.slot_mapping[span], np.array([0, last - first]), context)
    return Batch(*arrays, batch.block_table[r : r + 1], np.array([last - first - 1]))


def filled(
    ops: Any, batch: Batch, blocks: int, kind: str, kv_heads: int, dim: int, table: RopeTable = STILL, block: int = 16
) -> KVLayer:
    """A cache that holds the tokens of the batch; free blocks are NaN."""
    tokens = batch.ids.size
    kv: KVLayer = ops.empty_kv(blocks, block, kv_heads, dim, kind)
    for array in kv:
        array.fill({np.dtype(np.uint16): 0x7E00, np.dtype(np.int8): 77}.get(array.dtype, np.nan))
    k, v = normal(2, tokens, kv_heads, dim, seed=5)
    ops.rope_store(k, k, v, batch.positions, table, kv, batch.slot_mapping)
    return kv


@pytest.mark.parametrize("kind", KV_TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "params"), SHAPES)
def test_attention_of_each_kv_type_agrees_with_reference(
    kind: str, heads: int, kv_heads: int, dim: int, params: AttentionParams
) -> None:
    batch, blocks = step([37, 70, 1, 6], [37, 70, 1, 6])
    q = normal(batch.ids.size, heads, dim)
    found, wanted = (
        ops.attention(q, filled(ops, batch, blocks, kind, kv_heads, dim), batch, params, sinks_of(heads))
        for ops in (cpu, reference)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("kind", KV_TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "params"), SHAPES)
def test_attention_has_the_same_bits_alone_batched_and_chunked(
    kind: str, heads: int, kv_heads: int, dim: int, params: AttentionParams
) -> None:
    table = RopeTable((1 / 100 ** (np.arange(0, dim, 4, dtype=np.float32) / dim)).astype(np.float32), 1.2)
    batch, blocks = step([37, 70, 1], [37, 70, 1])
    q, k = normal(batch.ids.size, heads, dim), normal(batch.ids.size, kv_heads, dim, seed=2)
    kv = filled(cpu, batch, blocks, kind, kv_heads, dim, table)
    turned = cpu.rope_store(q, k, k, batch.positions, table, kv, batch.slot_mapping)
    sinks = sinks_of(heads)
    whole, stored = cpu.attention(turned, kv, batch, params, sinks), [array.copy() for array in kv]
    for chunk in (1, 5, 7, 37):
        for array in kv:
            array.fill(0)
        for r, length in ((1, 70), (0, 37), (2, 1)):
            at = int(batch.query_start[r])
            for first in range(0, length, chunk):
                last = min(length, first + chunk)
                own, span = part(batch, r, first, last), slice(at + first, at + last)
                some = cpu.rope_store(q[span], k[span], k[span], own.positions, table, kv, own.slot_mapping)
                np.testing.assert_array_equal(cpu.attention(some, kv, own, params, sinks), whole[span])
    for now, before in zip(kv, stored, strict=True):
        written = now != 0
        assert written.any()
        np.testing.assert_array_equal(now[written], before[written])


LONG = [  # KV type, settings: contexts of several blocks of keys, windows that begin inside one
    ("float16", AttentionParams(0.125)),
    ("int8", AttentionParams(0.125, window=KEY_BLOCK + 77, soft_cap=9.0)),
]


@pytest.mark.parametrize(("kind", "params"), LONG)
def test_attention_over_several_key_blocks_agrees_with_reference(kind: str, params: AttentionParams) -> None:
    contexts, lengths = [2 * KEY_BLOCK + 3, KEY_BLOCK, KEY_BLOCK + 40], [1, 2, 50]
    (whole, blocks), (batch, _) = step(contexts, contexts), step(lengths, contexts)
    q = normal(batch.ids.size, 6, 64)
    found, wanted = (
        ops.attention(q, filled(ops, whole, blocks, kind, 2, 64), batch, params, sinks_of(6))
        for ops in (cpu, reference)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize(("kind", "params"), LONG)
def test_attention_over_several_key_blocks_has_the_same_bits_in_any_pieces(kind: str, params: AttentionParams) -> None:
    """In chunks of any length, as decode, and decode in several pieces, whose last one merges the blocks."""
    length, context = 60, 2 * KEY_BLOCK + 30
    (whole, blocks), (batch, _) = step([context], [context]), step([length], [context])
    kv, q = filled(cpu, whole, blocks, kind, 2, 64), normal(length, 6, 64)
    wanted = cpu.attention(q, kv, batch, params, sinks_of(6))
    for threads, chunk in ((1, 1), (cpu.threads, 1), (1, 7), (cpu.threads, 31)):
        ops = CpuBackend(threads)
        for first in range(0, length, chunk):
            last = min(length, first + chunk)
            found = ops.attention(q[first:last], kv, part(batch, 0, first, last), params, sinks_of(6))
            np.testing.assert_array_equal(found, wanted[first:last])


@pytest.mark.parametrize("block", [32, 48])
def test_attention_bits_do_not_depend_on_block_size(block: int) -> None:
    found = []
    for size in (16, block):
        batch, blocks = step([37, 70, 1], [37, 70, 1], size)
        kv = filled(cpu, batch, blocks, "int8", 2, 40, block=size)
        found.append(cpu.attention(normal(batch.ids.size, 6, 40), kv, batch, AttentionParams(0.2, window=33)))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("kind", KV_TYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_attention_nan_reaches_exactly_the_queries_that_see_it(kind: str, bad: float) -> None:
    """A query sees it from its own position on, and none before, whichever tile they share."""
    batch, blocks = step([30], [30])
    for which in range(2):
        kv = filled(cpu, batch, blocks, kind, 2, 40)
        k, v = normal(2, 30, 2, 40, seed=6)
        (k, v)[which][20, 1, 39] = bad
        cpu.rope_store(k, k, v, batch.positions, STILL, kv, batch.slot_mapping)
        found = cpu.attention(np.abs(normal(30, 4, 40)), kv, batch, PLAIN).reshape(30, 2, 2, 40)
        assert np.isfinite(found[:20]).all()
        assert np.isfinite(found[:, 0]).all()
        assert not np.isfinite(found[20:, 1, :, 39]).any()


def test_kv_types_round_within_their_bounds() -> None:
    """Half a step of rounding each, zeros exact, tiny and huge heads included; the reference rounds alike."""
    batch, blocks = step([40], [40])
    x = normal(40, 2, 24) * np.float32(10.0) ** np.arange(-20, 20, dtype=np.float32)[:, None, None]
    x[7] = 0
    x[8] = np.float32(1e-44)
    for kind, bound in (("float32", 0.0), ("int8", 0.51 / 127)):
        kv = reference.empty_kv(blocks, 16, 2, 24, kind)
        reference.store(x, x, kv, batch.slot_mapping)
        kept = reference.gather(kv.k, batch.block_table[0], 40, kv.k_scales).transpose(1, 0, 2)
        top = np.abs(x).max(-1, keepdims=True)
        assert (np.abs(kept - x) <= bound * top + 1e-44).all()
        assert not kept[7].any()
    kv = reference.empty_kv(blocks, 16, 2, 24, "float16")
    reference.store(x, x, kv, batch.slot_mapping)
    kept = reference.gather(kv.v, batch.block_table[0], 40).transpose(1, 0, 2)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(kept, x.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("kind", KV_TYPES)
def test_rope_store_writes_the_values_of_the_reference(kind: str) -> None:
    batch, blocks = step([20], [20])
    x = normal(20, 3, 20)
    x[3, 1] = 0
    ours, theirs = cpu.empty_kv(blocks, 16, 3, 20, kind), reference.empty_kv(blocks, 16, 3, 20, kind)
    for ops, kv in ((cpu, ours), (reference, theirs)):
        ops.rope_store(x, x, x, batch.positions, STILL, kv, batch.slot_mapping)
    keys = ours.k.transpose(0, 2, 4, 1, 3).reshape(blocks, 16, 3, 32)[..., :20]
    values = ours.v.transpose(0, 2, 1, 3)[..., :20]
    for own, meant in ((keys, theirs.k), (values, theirs.v)):
        np.testing.assert_array_equal(own.view(np.float16) if kind == "float16" else own, meant)
    if kind == "int8":
        np.testing.assert_array_equal(ours.k_scales.transpose(0, 2, 1), theirs.k_scales)
        np.testing.assert_array_equal(ours.v_scales.transpose(0, 2, 1), theirs.v_scales)


FORCED = """
import numpy as np
from llm_worker_rbee.backends.cpu import CpuBackend
cpu = CpuBackend()
from llm_worker_rbee.backends.ops import AttentionParams
from tests.backends.cpu.test_attention import filled, normal, step
batch, blocks = step([19, 1], [33, 40])
whole, _ = step([33, 40], [33, 40])
kv = filled(cpu, whole, blocks, "int8", 2, 40)
print(cpu.attention(normal(20, 6, 40), kv, batch, AttentionParams(0.2, window=9)).tobytes().hex())
"""


def test_attention_has_the_same_bits_on_every_instruction_set() -> None:
    found = set()
    for name in {cpu_info.available_isas()[0], "avx2"} & set(cpu_info.available_isas()):  # two sizes of tiles
        env = {**os.environ, cpu_info.ISA_VARIABLE: name, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", FORCED], env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
