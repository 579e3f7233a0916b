"""Claims 3, 3a and 5: the KV cache, masks and RoPE tables in one object or in three; kept masks; RoPE from tables.

Claim 3 is an attention pass without projections over a prompt of each length. Both sides share the arithmetic: they
differ in which objects hold the arrays, and in how many objects are called. Claim 3a: scores are (32, S, S), as in the
old suite's `causal_mask`, and the verdict is on what that suite measured: the mask added to the scores, made or looked
up. Beside it stand the parts alone, and the softmax with a mask against one that ends each row where causality ends it.
Claim 5: RoPE as the formula is written, from tables applied in place, and as each backend implements it.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ...backends import BACKENDS, reference, select_backend
from ...backends.ops import AttentionParams
from ...layers.rope import inverse_frequencies
from .. import statistics
from ..micro import ROPE_BASE, rope_table
from ..results import Result, quantity
from . import harness
from .harness import Finding, Floats, Harness, KVBuffers, Shape, additive_mask

MASK_ROW_TILE = 32  # rows that share one bound: a bound for each row alone would be 512 calls of the library
MASK_TABLE_HEAD = ["tokens", "made each time", "kept", "change", "99% interval", "made then", "kept then",
                   "making alone", "lookup alone", "adding alone", "softmax, mask kept", "softmax, no mask",
                   "bytes kept"]  # fmt: skip
MASK_PARTS = ("creation", "lookup", "add", "masked_softmax", "no_mask")
ROPE_MIN_SPEEDUP, ROPE_TOLERANCE = 3.0, 1e-5
# What the old suite measured on an unnamed CPU, in seconds: masks made each time and cached, `rope_forward`.
OLD_MASK_S = {8: (9.93e-6, 9.1e-6), 32: (119e-6, 117.4e-6), 128: (2.12e-3, 1.9e-3), 512: (58.8e-3, 55.0e-3)}
OLD_ROPE_S = {1: 62.6e-6, 8: 206e-6, 32: 468e-6, 128: 9.23e-3}


def run_unified_cache(runner: Harness) -> Finding:
    """Compare time and memory at each length."""
    table = [["tokens", "separate", "unified", "change", "99% interval", "memory, separate", "memory, unified"]]
    changes, held = {}, {}
    for length in runner.lengths((1, 8, 32, 128), (512,)):
        inputs = make_prompt(runner.shape, length)
        caches = {name: make(runner.shape, length) for name, make in CACHES.items()}
        separate, unified = (cache.attend(*inputs) for cache in caches.values())
        harness.require_equal(separate, unified, 0.0, f"caches of {length} tokens")
        taken = runner.time_sides(length, {name: partial(cache.attend, *inputs) for name, cache in caches.items()})
        change = changes[length] = statistics.compare(taken["separate"], taken["unified"])
        held = {name: measure_memory(partial(make, runner.shape, length), inputs) for name, make in CACHES.items()}
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


AttentionCache = SeparateCaches | UnifiedCache


def _make_cache(is_unified: bool, shape: Shape, capacity: int) -> AttentionCache:
    buffers = KVBuffers.zeros(capacity, shape.n_heads, shape.head_dim)
    tables = harness.rope_tables(rope_table(shape.head_dim), 0, capacity)
    if is_unified:
        return UnifiedCache(*buffers, *tables)
    return SeparateCaches(KVStore(*buffers), RopeStore(*tables), MaskStore())


CACHES = {"separate": partial(_make_cache, False), "unified": partial(_make_cache, True)}


def measure_memory(make: Callable[[], AttentionCache], inputs: tuple[Floats, Floats, Floats]) -> int:
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


def run_causal_mask(runner: Harness) -> Finding:
    """Compare a new and a cached mask at each length."""
    table, changes, without = [MASK_TABLE_HEAD], {}, {}
    for length in runner.lengths((8, 32, 128, 512), (1024,)):
        scores = harness.random_array(np.random.default_rng(length), runner.shape.n_heads, length, length)
        mask, sides = additive_mask(length), mask_sides(scores)
        harness.require_equal(sides["masked_softmax"](), sides["no_mask"](), 1e-6, f"softmax of {length} tokens")
        old = OLD_MASK_S.get(length)
        theirs = {} if old is None else {"create": {"theirs_s": old[0]}, "cached": {"theirs_s": old[1]}}
        taken: dict[str, Sequence[float]] = {}
        for group in (("create", "cached", "creation", "lookup", "add"), ("masked_softmax", "no_mask")):
            taken |= runner.time_sides(length, {name: sides[name] for name in group}, **theirs)
        runner.recorder.add_result(Result.exact(f"claim3a/bytes/{length}", "B", mask.nbytes))
        change = changes[length] = statistics.compare(taken["create"], taken["cached"])
        without[length] = statistics.compare(taken["masked_softmax"], taken["no_mask"])
        new = [str(length), *(harness.format_time(taken[name]) for name in ("create", "cached"))]
        then = ["-", "-"] if old is None else [quantity(value, "s") for value in old]
        parts = [harness.format_time(taken[name]) for name in MASK_PARTS]
        table.append([*new, *harness.change_cells(change), *then, *parts, f"{mask.nbytes:,}"])
    longest = max(changes)
    making, masking = (statistics.estimate(taken[name]).value for name in ("creation", "masked_softmax"))
    summary = (
        f"cached masks against new ones: {harness.format_by_length(changes)}; at {longest} tokens making one takes "
        f"{making / masking:.1%} of the masked softmax, a softmax that needs no mask changes that by "
        f"{without[longest].change:+.1%}, and a kept mask holds {quantity(4 * longest**2, 'B')}"
    )
    return runner.finding(harness.majority([harness.vote_saves(c) for c in changes.values()]), summary, table)


def mask_sides(scores: Floats) -> dict[str, Callable[[], Floats]]:
    """Return the mask made, cached and not needed, with the parts of each alone."""
    length = scores.shape[-1]
    cache = {length: additive_mask(length)}
    out = np.empty_like(scores)
    return {
        "create": lambda: np.add(scores, additive_mask(length), out=out),
        "cached": lambda: np.add(scores, cache[length], out=out),
        "creation": lambda: additive_mask(length),
        "lookup": lambda: cache[length],
        "add": lambda mask=cache[length]: np.add(scores, mask, out=out),  # type: ignore[misc]
        "masked_softmax": lambda: reference.softmax(np.add(scores, cache[length], out=out)),
        "no_mask": lambda: bounded_softmax(scores),
    }


def bounded_softmax(scores: Floats) -> Floats:
    """End each tile of rows at its last visible key: later keys are neither read nor computed."""
    length = scores.shape[-1]
    out = np.zeros_like(scores)
    seen = np.tri(min(MASK_ROW_TILE, length), dtype=np.bool_)
    for first in range(0, length, MASK_ROW_TILE):
        last = min(first + MASK_ROW_TILE, length)
        part = scores[:, first:last, :last]
        e = np.exp(part - part.max(axis=-1, keepdims=True))
        e[..., first:] *= seen[: last - first, : last - first]
        np.divide(e, e.sum(axis=-1, keepdims=True), out=out[:, first:last, :last])
    return out


def run_rope(runner: Harness) -> Finding:
    """Compare the formula and the tables at each length."""
    backends = [name for name in BACKENDS if name not in ("auto", "cuda")]  # the claim is about a CPU
    head = ["tokens", "formula", "tables in place", "times as fast", "99% interval", "rope_forward then"]
    table, changes = [head + [f"backend {name}" for name in backends]], {}
    for length in runner.lengths((1, 8, 32, 128), (512,)):
        x = harness.random_array(np.random.default_rng(length), length, runner.shape.n_heads, runner.shape.head_dim)
        tables, halves = RopeTables(x), split_pairs(x)
        harness.require_equal(
            split_pairs(rope_formula(x, 0, ROPE_BASE)), tables.rotate(halves.copy()), ROPE_TOLERANCE, f"{length} tokens"
        )
        sides: dict[str, Callable[[], object]] = {
            "formula": partial(rope_formula, x, 0, ROPE_BASE),
            "tables": partial(tables.rotate, halves),
            **{f"backend/{name}": backend_rope(name, split_pairs(x)) for name in backends},
        }
        taken = runner.time_sides(length, sides, formula={"theirs_s": OLD_ROPE_S.get(length)})
        change = changes[length] = statistics.compare(taken["formula"], taken["tables"])
        then = quantity(OLD_ROPE_S[length], "s") if length in OLD_ROPE_S else "-"
        times = {name: harness.format_time(samples) for name, samples in taken.items()}
        ours = [times.pop("formula"), times.pop("tables")]
        table.append([str(length), *ours, *harness.speedup_cells(change), then, *times.values()])
    verdict = harness.majority([harness.vote_speedup(change, ROPE_MIN_SPEEDUP) for change in changes.values()])
    speedups = harness.format_by_length(changes, harness.format_speedup)
    return runner.finding(verdict, f"tables in place against the formula: {speedups}", table)


def rope_formula(x: Floats, start: int, base: float) -> Floats:
    """Rotate as the paper writes it: pairs (2i, 2i + 1), cos and sin made anew in each call. x: (T, heads, dim)."""
    tokens, _, dim = x.shape
    angle = np.arange(start, start + tokens, dtype=np.float32)[:, None, None] * inverse_frequencies(base, dim)
    cos, sin = np.cos(angle), np.sin(angle)
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


def split_pairs(x: Floats) -> Floats:
    """Move values so that the pairs (2i, 2i + 1) become (i, i + half), as files are loaded."""
    return np.concatenate((x[..., 0::2], x[..., 1::2]), axis=-1)


class RopeTables:
    """cos and sin of each position, made once for tensors shaped like `x`, and scratch of the size of a half."""

    def __init__(self, x: Floats) -> None:
        self.cos, self.sin = harness.rope_tables(rope_table(x.shape[-1]), 0, len(x))
        self.scratch = np.empty((2, *x.shape[:2], self.cos.shape[-1]), np.float32)

    def rotate(self, x: Floats) -> Floats:
        """Rotate in place, without an allocation."""
        half = self.cos.shape[-1]
        low, high = x[..., :half], x[..., half:]
        a, b = self.scratch
        np.multiply(low, self.sin, out=a)
        np.multiply(high, self.sin, out=b)
        low *= self.cos
        low -= b
        high *= self.cos
        high += a
        return x


def backend_rope(backend: str, x: Floats) -> Callable[[], object]:
    """Return a backend's RoPE; where it is fused with the write into the cache, both."""
    ops = select_backend(backend=backend)
    table, positions = rope_table(x.shape[-1]), np.arange(len(x))
    if hasattr(ops, "rope"):
        return partial(ops.rope, x, positions, table)
    kv = ops.empty_kv(-(-len(x) // 16), 16, x.shape[1], x.shape[2])
    return partial(ops.rope_store, x, x, x, positions, table, kv, positions)
