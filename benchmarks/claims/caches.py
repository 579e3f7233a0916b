"""Claims 3 and 11: the KV cache, RoPE tables and masks in one object or in three; each of the first two alone.

Claim 3 is an attention pass without projections. Both sides share the arithmetic: they differ in which objects hold the
arrays, and in how many objects are called. On the kernels, which need no mask, the third thing that is kept by length
are the index arrays of the step. Claim 11 has the RoPE tables alone, and three kinds of KV cache.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from llm_worker_bench import statistics
from llm_worker_bench.micro import consecutive_batch, rope_table
from llm_worker_bench.results import quantity
from llm_worker_rbee.backends import reference, resolve_kv_type
from llm_worker_rbee.backends.ops import AttentionParams, Backend, Batch, KVLayer, RopeTable

from . import harness
from .harness import Finding, Floats, Harness, Row, Shape, Step, Table, VerdictName
from .numpy_model import KVBuffers, additive_mask, masked_attention, rope_tables, rotate
from .targets import Target

BLOCK_SIZE = 16
MaskKey = tuple[int, int]  # queries, keys
Inputs = tuple[Any, Any, Any]  # q, k and v of a step


def run_unified_cache(runner: Harness) -> Finding:
    """Compare time and memory at each step."""
    head = ["backend", "step", "separate", "unified", "change", "99% interval", "memory, separate", "memory, unified"]
    table, rows = [head], list[Row]()
    for target in runner.targets:
        for step in runner.steps((128,), (8, 32, 128), (512,)):
            inputs = make_inputs(target, runner.shape, step)
            caches = {name: make(target, runner.shape, step) for name, make in CACHES.items()}
            separate, unified = (cache.attend(*inputs, step.start) for cache in caches.values())
            harness.require_equal(separate, unified, 0.0, f"caches at {step}")
            sides = {
                f"{target.name}/{name}": target.timed(partial(cache.attend, *inputs, step.start))
                for name, cache in caches.items()
            }
            taken = runner.time_sides(step.name, sides)
            change = statistics.compare(*taken.values())
            rows.append(Row(target.name, step, change, harness.vote_faster(change)))
            held = [_record_memory(runner, target, step, name, inputs) for name in CACHES]
            cells = [*map(harness.format_time, taken.values()), *harness.change_cells(change)]
            table.append([target.name, str(step), *cells, *(f"{nbytes:,} B" for nbytes in held)])
    gap = held[1] - held[0]
    summary = (
        f"{rows[-1].step} holds {quantity(held[1], 'B')} in one object, {abs(gap):,} bytes "
        f"{'more' if gap > 0 else 'less'} than in three"
    )
    return harness.judge(rows, [Table(table)], harness.format_change, summary)


def _record_memory(runner: Harness, target: Target, step: Step, side: str, inputs: Inputs) -> int:
    nbytes = measure_memory(target.ops, partial(CACHES[side], target, runner.shape, step), inputs, step.start)
    runner.record_exact(f"{target.name}/{side}/memory", step.name, nbytes)
    return nbytes


def make_inputs(target: Target, shape: Shape, step: Step) -> Inputs:
    """Return q, k and v of a step: (T, heads, head_dim) each."""
    rng = np.random.default_rng(step.length)
    q, k, v = (
        target.array(harness.random_array(rng, step.tokens, shape.n_heads, shape.head_dim)) for _ in range(3)
    )  # fmt: skip
    return q, k, v


def make_attention(target: Target, shape: Shape, step: Step) -> Callable[[], Any]:
    """Return the attention op of a step over a paged cache that holds all its tokens; q is as RoPE leaves it."""
    ops, whole = target.ops, Step("prefill", step.context)
    kv = ops.empty_kv(-(-step.context // BLOCK_SIZE), BLOCK_SIZE, shape.n_heads, shape.head_dim, resolve_kv_type(ops))
    filled = consecutive_batch(step.context, step.context, BLOCK_SIZE)
    inputs, table = make_inputs(target, shape, whole), rope_table(shape.head_dim)
    q = ops.rope_store(*inputs, filled.positions, table, kv, filled.slot_mapping)[step.start :]
    batch = consecutive_batch(step.tokens, step.context, BLOCK_SIZE)
    return partial(ops.attention, q, kv, batch, AttentionParams(shape.head_dim**-0.5))


def _attend(q: Floats, keys: Floats, values: Floats, mask: Floats) -> Floats:
    return masked_attention(q, keys, values, mask, AttentionParams(q.shape[-1] ** -0.5))


@dataclass(slots=True)
class UnifiedCache:
    """All that attention keeps, in one object."""

    k: Floats
    v: Floats
    cos: Floats
    sin: Floats
    masks: dict[MaskKey, Floats] = field(default_factory=dict)

    def attend(self, q: Floats, k: Floats, v: Floats, start: int = 0) -> Floats:
        end = start + len(q)
        cos, sin = self.cos[start:end], self.sin[start:end]
        self.k[start:end], self.v[start:end] = rotate(k, cos, sin), v
        mask = self.masks.get((len(q), end))
        if mask is None:
            mask = self.masks[len(q), end] = additive_mask(end, np.arange(start, end))
        return _attend(rotate(q, cos, sin), self.k[:end], self.v[:end], mask)


@dataclass(slots=True)
class KVStore:
    """Keys and values alone."""

    k: Floats
    v: Floats

    def write(self, k: Floats, v: Floats, start: int) -> tuple[Floats, Floats]:
        end = start + len(k)
        self.k[start:end], self.v[start:end] = k, v
        return self.k[:end], self.v[:end]


@dataclass(slots=True)
class RopeStore:
    """RoPE tables alone."""

    cos: Floats
    sin: Floats

    def rotate(self, x: Floats, start: int) -> Floats:
        end = start + len(x)
        return rotate(x, self.cos[start:end], self.sin[start:end])


@dataclass(slots=True)
class MaskStore:
    """Masks alone, by length."""

    masks: dict[MaskKey, Floats] = field(default_factory=dict)

    def for_queries(self, count: int, start: int) -> Floats:
        key = count, start + count
        mask = self.masks.get(key)
        if mask is None:
            mask = self.masks[key] = additive_mask(start + count, np.arange(start, start + count))
        return mask


@dataclass(slots=True)
class SeparateCaches:
    """The three together, each its own object."""

    kv: KVStore
    rope: RopeStore
    masks: MaskStore

    def attend(self, q: Floats, k: Floats, v: Floats, start: int = 0) -> Floats:
        keys, values = self.kv.write(self.rope.rotate(k, start), v, start)
        return _attend(self.rope.rotate(q, start), keys, values, self.masks.for_queries(len(q), start))


@dataclass(slots=True)
class UnifiedKernelCache:
    """Paged keys and values, RoPE frequencies and the index arrays of steps in one object, for the kernels."""

    ops: Backend
    kv: KVLayer
    rope: RopeTable
    batches: dict[MaskKey, Batch] = field(default_factory=dict)

    def attend(self, q: Any, k: Any, v: Any, start: int = 0) -> Any:
        key = len(q), start + len(q)
        batch = self.batches.get(key)
        if batch is None:
            batch = self.batches[key] = consecutive_batch(*key, BLOCK_SIZE)
        rotated = self.ops.rope_store(q, k, v, batch.positions, self.rope, self.kv, batch.slot_mapping)
        return self.ops.attention(rotated, self.kv, batch, AttentionParams(q.shape[-1] ** -0.5))


@dataclass(slots=True)
class BatchStore:
    """Index arrays alone, by length."""

    batches: dict[MaskKey, Batch] = field(default_factory=dict)

    def for_queries(self, count: int, start: int) -> Batch:
        key = count, start + count
        batch = self.batches.get(key)
        if batch is None:
            batch = self.batches[key] = consecutive_batch(*key, BLOCK_SIZE)
        return batch


@dataclass(slots=True)
class PagedStore:
    """Paged keys and values alone."""

    ops: Backend
    kv: KVLayer

    def rotate_and_write(self, q: Any, k: Any, v: Any, batch: Batch, rope: RopeTable) -> Any:
        return self.ops.rope_store(q, k, v, batch.positions, rope, self.kv, batch.slot_mapping)

    def attend(self, q: Any, batch: Batch) -> Any:
        return self.ops.attention(q, self.kv, batch, AttentionParams(q.shape[-1] ** -0.5))


@dataclass(slots=True)
class FrequencyStore:
    """RoPE frequencies alone: the kernels make the angles of a step from them."""

    table: RopeTable

    def frequencies(self) -> RopeTable:
        return self.table


@dataclass(slots=True)
class SeparateKernelCaches:
    """The three together, each its own object."""

    kv: PagedStore
    rope: FrequencyStore
    batches: BatchStore

    def attend(self, q: Any, k: Any, v: Any, start: int = 0) -> Any:
        batch = self.batches.for_queries(len(q), start)
        return self.kv.attend(self.kv.rotate_and_write(q, k, v, batch, self.rope.frequencies()), batch)


AttentionCache = SeparateCaches | UnifiedCache | SeparateKernelCaches | UnifiedKernelCache


def _make_cache(is_unified: bool, target: Target, shape: Shape, step: Step) -> AttentionCache:
    """Make a cache for all tokens of a step, zero before its start."""
    table, ops, capacity = rope_table(shape.head_dim), target.ops, step.context
    if target.is_reference:
        buffers = KVBuffers.zeros(capacity, shape.n_heads, shape.head_dim)
        tables = rope_tables(table, 0, capacity)
        if is_unified:
            return UnifiedCache(*buffers, *tables)
        return SeparateCaches(KVStore(*buffers), RopeStore(*tables), MaskStore())
    kv = ops.empty_kv(-(-capacity // BLOCK_SIZE), BLOCK_SIZE, shape.n_heads, shape.head_dim, resolve_kv_type(ops))
    if is_unified:
        return UnifiedKernelCache(ops, kv, table)
    return SeparateKernelCaches(PagedStore(ops, kv), FrequencyStore(table), BatchStore())


CACHES = {"separate": partial(_make_cache, False), "unified": partial(_make_cache, True)}


def measure_memory(ops: Backend, make: Callable[[], AttentionCache], inputs: Inputs, start: int = 0) -> int:
    """Return the bytes that a cache holds after a step, as the allocators of Python and of the device count them."""
    make().attend(*inputs, start)  # what is allocated once and kept elsewhere is not the cache's
    before = ops.allocated_memory()
    tracemalloc.start()
    try:
        cache = make()
        cache.attend(*inputs, start)
        return tracemalloc.get_traced_memory()[0] + ops.allocated_memory() - before
    finally:
        tracemalloc.stop()


def run_caches_alone(runner: Harness) -> Finding:
    """Claim 11: RoPE tables in the one object or alone; keys and values grown by copy, preallocated, paged."""
    table = [["part", "step", "sides", "first", "second", "change", "99% interval"]]
    votes: dict[str, list[VerdictName]] = {"RoPE cache unification: no benefit": [], "KV cache already optimal": []}
    rope_votes, kv_votes = votes.values()
    for step in runner.steps((128,), (32, 128), (512,)):
        sides = {**rope_sides(runner.shape, step), **kv_sides(runner.shape, step)}
        taken = runner.time_sides(step.name, sides)
        for part, first, second in (
            ("RoPE tables", "rope/alone", "rope/unified"), ("KV cache", "kv/grown", "kv/preallocated"),
            ("KV cache", "kv/grown", "kv/paged"),
        ):  # fmt: skip
            change = statistics.compare(taken[first], taken[second])
            names = f"{first.split('/')[1]}, {second.split('/')[1]}"
            times = [harness.format_time(taken[name]) for name in (first, second)]
            table.append([part, str(step), names, *times, *harness.change_cells(change)])
            (rope_votes if part == "RoPE tables" else kv_votes).append(vote_no_benefit(change))
        kv_votes[-2:] = ["refuted" if "refuted" in kv_votes[-2:] else "confirmed"]  # one better way is enough
    found = {name: harness.majority(one) for name, one in votes.items()}
    summary = ", ".join(f'"{name}" {verdict}' for name, verdict in found.items())
    return Finding(harness.agreed(list(found.values())), summary, [Table(table)])


def vote_no_benefit(change: statistics.Change) -> VerdictName:
    """Judge "B brings nothing": refuted if it is faster outside the noise."""
    return "refuted" if change.verdict == "improved" else "confirmed"


def rope_sides(shape: Shape, step: Step) -> dict[str, Callable[[], Floats]]:
    """Return the rotation of q through an object of its own, and through the object that holds all caches."""
    x = harness.random_array(np.random.default_rng(step.length), step.tokens, shape.n_heads, shape.head_dim)
    tables = rope_tables(rope_table(shape.head_dim), 0, step.context)
    empty = np.empty((0, 1, 1), np.float32)
    alone, unified, end = RopeStore(*tables), UnifiedCache(empty, empty, *tables), step.context
    return {
        "rope/alone": lambda: alone.rotate(x, step.start),
        "rope/unified": lambda: rotate(x, unified.cos[step.start : end], unified.sin[step.start : end]),
    }


def kv_sides(shape: Shape, step: Step) -> dict[str, Callable[[], Sequence[Floats]]]:
    """Return three caches that take a step's keys and values and return the keys and values of all tokens."""
    rng, start, end = np.random.default_rng(step.length), step.start, step.context
    before, new = (
        [harness.random_array(rng, n, shape.n_heads, shape.head_dim) for _ in range(2)] for n in (start, step.tokens)
    )
    store = KVStore(*KVBuffers.zeros(end, shape.n_heads, shape.head_dim))
    batch = consecutive_batch(step.tokens, end, BLOCK_SIZE)
    kv = reference.empty_kv(-(-end // BLOCK_SIZE), BLOCK_SIZE, shape.n_heads, shape.head_dim)
    if start:
        store.write(before[0], before[1], 0)
        reference.store(before[0], before[1], kv, np.arange(start))

    def paged() -> list[Floats]:
        reference.store(new[0], new[1], kv, batch.slot_mapping)
        return [reference.gather(half, batch.block_table[0], end).transpose(1, 0, 2) for half in (kv.k, kv.v)]

    return {
        "kv/grown": lambda: [np.concatenate(pair) for pair in zip(before, new, strict=True)],
        "kv/preallocated": lambda: store.write(new[0], new[1], start),
        "kv/paged": paged,
    }
