"""Claim 3: one object that holds keys and values, RoPE tables and masks, against one object for each.

An attention pass without projections, over a prompt of each length. Both sides share the arithmetic: they differ in
which objects hold the arrays, and in how many objects are called.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ...backends.ops import AttentionParams
from .. import statistics
from ..results import Result, quantity
from . import harness
from .harness import Finding, Floats, Harness, KVBuffers, Shape, additive_mask

RULE = (
    "confirmed if the one object is faster outside the noise at most lengths, refuted if separate ones are; the memory "
    "held stands beside it"
)


def run(runner: Harness) -> Finding:
    """Compare time and memory at each length."""
    table = [["tokens", "separate", "unified", "change", "99% interval", "memory, separate", "memory, unified"]]
    changes, held = {}, {}
    for length in runner.lengths((1, 8, 32, 128), (512,)):
        inputs = make_prompt(runner.shape, length)
        caches = {name: make(runner.shape, length) for name, make in SIDES.items()}
        separate, unified = (cache.attend(*inputs) for cache in caches.values())
        harness.require_equal(separate, unified, 0.0, f"caches of {length} tokens")
        taken = runner.time_sides(length, {name: partial(cache.attend, *inputs) for name, cache in caches.items()})
        change = changes[length] = statistics.compare(taken["separate"], taken["unified"])
        held = {name: measure_memory(partial(make, runner.shape, length), inputs) for name, make in SIDES.items()}
        for name, nbytes in held.items():
            runner.recorder.add_result(Result.exact(f"claim3/{name}/{length}/memory", "B", nbytes))
        times = map(harness.format_time, taken.values())
        table.append([str(length), *times, *harness.change_cells(change), *(f"{n:,} B" for n in held.values())])
    gap = held["unified"] - held["separate"]
    summary = (
        f"one cache object against separate ones: {harness.format_by_length(changes)}; at {max(changes)} tokens it "
        f"holds {quantity(held['unified'], 'B')}, {abs(gap):,} bytes {'more' if gap > 0 else 'less'}"
    )
    return runner.finding(harness.majority([harness.vote_faster(c) for c in changes.values()]), summary, table)


def make_prompt(shape: Shape, length: int) -> tuple[Floats, Floats, Floats]:
    """Return q, k and v of a prompt: (T, heads, head_dim) each."""
    rng = np.random.default_rng(length)
    q, k, v = (harness.random_array(rng, length, shape.n_heads, shape.head_dim) for _ in range(3))
    return q, k, v


def rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotate the pairs (i, i + half)."""
    half = cos.shape[-1]
    low, high = x[..., :half], x[..., half:]
    return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def _attend(q: Floats, keys: Floats, values: Floats, mask: Floats) -> Floats:
    return harness.masked_attention(q, keys, values, mask, AttentionParams(q.shape[-1] ** -0.5))


@dataclass(slots=True)
class UnifiedCache:
    """All that attention keeps, in one object."""

    k: Floats
    v: Floats
    cos: Floats
    sin: Floats
    masks: dict[int, Floats] = field(default_factory=dict)

    def attend(self, q: Floats, k: Floats, v: Floats) -> Floats:
        n = len(q)
        cos, sin = self.cos[:n], self.sin[:n]
        self.k[:n], self.v[:n] = rotate(k, cos, sin), v
        mask = self.masks.get(n)
        if mask is None:
            mask = self.masks[n] = additive_mask(n)
        return _attend(rotate(q, cos, sin), self.k[:n], self.v[:n], mask)


@dataclass(slots=True)
class KVStore:
    """Keys and values alone."""

    k: Floats
    v: Floats

    def write(self, k: Floats, v: Floats) -> tuple[Floats, Floats]:
        n = len(k)
        self.k[:n], self.v[:n] = k, v
        return self.k[:n], self.v[:n]


@dataclass(slots=True)
class RopeStore:
    """RoPE tables alone."""

    cos: Floats
    sin: Floats

    def rotate(self, x: Floats) -> Floats:
        n = len(x)
        return rotate(x, self.cos[:n], self.sin[:n])


@dataclass(slots=True)
class MaskStore:
    """Masks alone, by length."""

    masks: dict[int, Floats] = field(default_factory=dict)

    def for_length(self, length: int) -> Floats:
        mask = self.masks.get(length)
        if mask is None:
            mask = self.masks[length] = additive_mask(length)
        return mask


@dataclass(slots=True)
class SeparateCaches:
    """The three together, each its own object."""

    kv: KVStore
    rope: RopeStore
    masks: MaskStore

    def attend(self, q: Floats, k: Floats, v: Floats) -> Floats:
        keys, values = self.kv.write(self.rope.rotate(k), v)
        return _attend(self.rope.rotate(q), keys, values, self.masks.for_length(len(q)))


def _arrays(shape: Shape, capacity: int) -> tuple[KVBuffers, tuple[Floats, Floats]]:
    tables = harness.rope_tables(harness.plain_rope(shape.head_dim), 0, capacity)
    return KVBuffers.zeros(capacity, shape.n_heads, shape.head_dim), tables


def _make_unified(shape: Shape, capacity: int) -> UnifiedCache:
    buffers, tables = _arrays(shape, capacity)
    return UnifiedCache(*buffers, *tables)


def _make_separate(shape: Shape, capacity: int) -> SeparateCaches:
    buffers, tables = _arrays(shape, capacity)
    return SeparateCaches(KVStore(*buffers), RopeStore(*tables), MaskStore())


Cache = SeparateCaches | UnifiedCache
SIDES: dict[str, Callable[[Shape, int], Cache]] = {"separate": _make_separate, "unified": _make_unified}


def measure_memory(make: Callable[[], Cache], inputs: tuple[Floats, Floats, Floats]) -> int:
    """Return the bytes that a cache holds after its prompt, as Python's allocators count them."""
    make().attend(*inputs)  # what is allocated once and kept elsewhere is not the cache's
    gc.collect()
    tracemalloc.start()
    try:
        cache = make()
        cache.attend(*inputs)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
