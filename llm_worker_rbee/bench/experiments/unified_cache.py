"""Claim 3: one object that holds keys and values, rotation tables and masks, against one object for each.

An attention pass without projections, over a prompt of each length. The arithmetic is one function for both sides: what
differs is who holds the arrays and how many objects are asked for them.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ...backends import reference
from ...backends.ops import AttentionParams, RopeTable
from ...layers.rope import inverse_frequencies
from .. import statistics
from ..format import quantity
from ..results import Result
from . import fused_block
from .harness import Finding, Floats, Lab, Shape, Verdict, by_length, figure, most, normal, same, vote_faster

RULE = (
    "confirmed if the one object is faster outside the noise at most lengths, refuted if separate ones are; the memory "
    "held stands beside it"
)
ROPE_BASE = 10000.0


def run(lab: Lab) -> Finding:
    """Time and memory, per length."""
    table = [["tokens", "separate", "unified", "change", "99% interval", "memory, separate", "memory, unified"]]
    changes, held = {}, {}
    for length in lab.lengths((1, 8, 32, 128), (512,)):
        inputs = prompt(lab.shape, length)
        caches = {name: make(lab.shape, length) for name, make in SIDES.items()}
        same(caches["separate"].attend(*inputs), caches["unified"].attend(*inputs), 0.0, f"caches of {length} tokens")
        taken = lab.race(length, {name: partial(cache.attend, *inputs) for name, cache in caches.items()})
        change = changes[length] = statistics.compare(taken["separate"], taken["unified"])
        held = {name: memory(partial(make, lab.shape, length), inputs) for name, make in SIDES.items()}
        for name, count in held.items():
            lab.recorder.put(Result.exact(f"claim3/{name}/{length}/memory", "B", count))
        table.append([str(length), figure(taken["separate"]), figure(taken["unified"]), f"{change.change:+.1%}",
                      f"{change.low:+.1%} to {change.high:+.1%}",
                      *(f"{held[name]:,} B" for name in ("separate", "unified"))])  # fmt: skip
    verdict = most([vote_faster(change) for change in changes.values()])
    gap = held["unified"] - held["separate"]
    told = (
        f"one cache object against separate ones: {by_length(changes)}; at {max(changes)} tokens it holds "
        f"{quantity(held['unified'], 'B')}, {abs(gap):,} bytes {'more' if gap > 0 else 'less'}"
    )
    return Finding(Verdict.of(lab.claim, verdict, told), table)


def prompt(shape: Shape, length: int) -> tuple[Floats, Floats, Floats]:
    """q, k and v of a prompt: (T, heads, head_dim) each."""
    rng = np.random.default_rng(length)
    q, k, v = (normal(rng, length, shape.n_heads, shape.head_dim) for _ in range(3))
    return q, k, v


def rotated(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Pairs (i, i + half) turned by their angles."""
    half = cos.shape[-1]
    low, high = x[..., :half], x[..., half:]
    return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def mixed(q: Floats, keys: Floats, values: Floats, mask: Floats) -> Floats:
    """Masked attention: q (T, heads, dim) over (S, heads, dim)."""
    params = AttentionParams(q.shape[-1] ** -0.5)
    scores = reference.attention_scores(q.transpose(1, 0, 2), keys.transpose(1, 0, 2), params)
    scores += mask
    return (reference.softmax(scores) @ values.transpose(1, 0, 2)).transpose(1, 0, 2)


def additive_mask(length: int) -> Floats:
    """0 where a query may look, minus infinity where it may not: (S, S)."""
    positions = np.arange(length)
    return np.where(reference.causal_mask(positions, positions), np.float32(0), np.float32(-np.inf))


def _tables(shape: Shape, length: int) -> tuple[Floats, Floats]:
    return fused_block.angles(RopeTable(inverse_frequencies(ROPE_BASE, shape.head_dim), 1.0), 0, length)


@dataclass(slots=True)
class Unified:
    """All that attention remembers, in one place."""

    k: Floats
    v: Floats
    cos: Floats
    sin: Floats
    masks: dict[int, Floats] = field(default_factory=dict)

    @staticmethod
    def of(shape: Shape, capacity: int) -> Unified:
        """Room for so many tokens."""
        return Unified(*fused_block.Room.of(capacity, shape.n_heads, shape.head_dim), *_tables(shape, capacity))

    def attend(self, q: Floats, k: Floats, v: Floats) -> Floats:
        """One pass over a prompt."""
        n = len(q)
        cos, sin = self.cos[:n], self.sin[:n]
        self.k[:n], self.v[:n] = rotated(k, cos, sin), v
        mask = self.masks.get(n)
        if mask is None:
            mask = self.masks[n] = additive_mask(n)
        return mixed(rotated(q, cos, sin), self.k[:n], self.v[:n], mask)


@dataclass(slots=True)
class Keys:
    """Keys and values alone."""

    k: Floats
    v: Floats

    def put(self, k: Floats, v: Floats) -> tuple[Floats, Floats]:
        """Write a prompt; views of all that is there."""
        n = len(k)
        self.k[:n], self.v[:n] = k, v
        return self.k[:n], self.v[:n]


@dataclass(slots=True)
class Rotation:
    """Tables alone."""

    cos: Floats
    sin: Floats

    def turn(self, x: Floats) -> Floats:
        """From position 0 on."""
        n = len(x)
        return rotated(x, self.cos[:n], self.sin[:n])


@dataclass(slots=True)
class Masks:
    """Masks alone, by length."""

    known: dict[int, Floats] = field(default_factory=dict)

    def of(self, length: int) -> Floats:
        """The kept one, or a new one."""
        mask = self.known.get(length)
        if mask is None:
            mask = self.known[length] = additive_mask(length)
        return mask


@dataclass(slots=True)
class Separate:
    """The three together, each its own object."""

    keys: Keys
    rotation: Rotation
    masks: Masks

    @staticmethod
    def of(shape: Shape, capacity: int) -> Separate:
        """Room for so many tokens."""
        keys = Keys(*fused_block.Room.of(capacity, shape.n_heads, shape.head_dim))
        return Separate(keys, Rotation(*_tables(shape, capacity)), Masks())

    def attend(self, q: Floats, k: Floats, v: Floats) -> Floats:
        """One pass over a prompt."""
        keys, values = self.keys.put(self.rotation.turn(k), v)
        return mixed(self.rotation.turn(q), keys, values, self.masks.of(len(q)))


SIDES: dict[str, Callable[[Shape, int], Separate | Unified]] = {"separate": Separate.of, "unified": Unified.of}


def memory(make: Callable[[], Separate | Unified], inputs: tuple[Floats, Floats, Floats]) -> int:
    """Bytes that a cache holds once it has seen its prompt, as Python's allocators count them."""
    make().attend(*inputs)  # what is made once and kept elsewhere is not the cache's
    gc.collect()
    tracemalloc.start()
    try:
        cache = make()
        cache.attend(*inputs)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
