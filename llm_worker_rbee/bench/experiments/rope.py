"""Claim 5: RoPE as the formula is written, from tables applied in place, and as each backend implements it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ...backends import BACKENDS, select_backend
from ...layers.rope import inverse_frequencies
from .. import statistics
from ..results import quantity
from . import harness
from .harness import ROPE_BASE, Finding, Floats, Harness

RULE = (
    "confirmed if tables applied in place are at least 3 times as fast as the formula at most lengths, refuted if the "
    "interval lies below 3 at most lengths; the backends' kernels stand beside them"
)
MIN_SPEEDUP, TOLERANCE = 3.0, 1e-5
# What the old suite measured for `rope_forward` on an unnamed CPU, in seconds.
OLD_SUITE_S = {1: 62.6e-6, 8: 206e-6, 32: 468e-6, 128: 9.23e-3}


def run(runner: Harness) -> Finding:
    """Compare the formula and the tables at each length."""
    backends = [name for name in BACKENDS if name not in ("auto", "cuda")]  # the claim is about a CPU
    head = ["tokens", "formula", "tables in place", "times as fast", "99% interval", "rope_forward then"]
    table, changes = [head + [f"backend {name}" for name in backends]], {}
    for length in runner.lengths((1, 8, 32, 128), (512,)):
        x = harness.random_array(np.random.default_rng(length), length, runner.shape.n_heads, runner.shape.head_dim)
        tables, halves = RopeTables(x), split_pairs(x)
        harness.require_equal(
            split_pairs(formula(x, 0, ROPE_BASE)), tables.rotate(halves.copy()), TOLERANCE, f"{length} tokens"
        )
        sides: dict[str, Callable[[], object]] = {
            "formula": partial(formula, x, 0, ROPE_BASE),
            "tables": partial(tables.rotate, halves),
            **{f"backend/{name}": backend_rope(name, split_pairs(x)) for name in backends},
        }
        taken = runner.time_sides(length, sides, formula={"theirs_s": OLD_SUITE_S.get(length)})
        change = changes[length] = statistics.compare(taken["formula"], taken["tables"])
        then = quantity(OLD_SUITE_S[length], "s") if length in OLD_SUITE_S else "-"
        times = {name: harness.format_time(samples) for name, samples in taken.items()}
        ours = [times.pop("formula"), times.pop("tables")]
        table.append([str(length), *ours, *harness.speedup_cells(change), then, *times.values()])
    verdict = harness.majority([harness.vote_speedup(change, MIN_SPEEDUP) for change in changes.values()])
    speedups = harness.format_by_length(changes, harness.format_speedup)
    return runner.finding(verdict, f"tables in place against the formula: {speedups}", table)


def formula(x: Floats, start: int, base: float) -> Floats:
    """Rotate as the paper writes it: pairs (2i, 2i + 1), cos and sin made anew in each call. x: (T, heads, dim)."""
    tokens, _, dim = x.shape
    theta = inverse_frequencies(base, dim)
    angle = np.arange(start, start + tokens, dtype=np.float32)[:, None, None] * theta
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
        self.cos, self.sin = harness.rope_tables(harness.plain_rope(x.shape[-1]), 0, len(x))
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
    table, positions = harness.plain_rope(x.shape[-1]), np.arange(len(x))
    if hasattr(ops, "rope"):
        rope = ops.rope
        return lambda: rope(x, positions, table)
    kv = ops.empty_kv(-(-len(x) // 16), 16, x.shape[1], x.shape[2])
    return lambda: ops.rope_store(x, x, x, positions, table, kv, positions)
