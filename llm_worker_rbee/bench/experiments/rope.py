"""Claim 5: the rotation as the formula is written, from tables applied in place, and as each backend has it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ...backends import BACKENDS, select_backend
from ...backends.ops import RopeTable
from ...layers.rope import inverse_frequencies
from .. import statistics
from ..format import quantity
from . import fused_block
from .harness import Finding, Floats, Lab, Verdict, by_length, figure, in_times, most, normal, same, times, vote_times

RULE = (
    "confirmed if tables applied in place are at least 3 times as fast as the formula at most lengths, refuted if the "
    "interval lies below 3 at most lengths; the backends' kernels stand beside them"
)
WANTED, BASE, TOLERANCE = 3.0, 10000.0, 1e-5
# What the old suite measured for `rope_forward` on an unnamed CPU, in seconds.
THEIRS = {1: 62.6e-6, 8: 206e-6, 32: 468e-6, 128: 9.23e-3}


def run(lab: Lab) -> Finding:
    """Each length on its own."""
    names = [name for name in BACKENDS if name not in ("auto", "cuda")]  # the claim is about a CPU
    heads = ["tokens", "formula", "tables in place", "times as fast", "99% interval", "rope_forward then"]
    table = [heads + [f"backend {name}" for name in names]]
    changes = {}
    for length in lab.lengths((1, 8, 32, 128), (512,)):
        x = normal(np.random.default_rng(length), length, lab.shape.n_heads, lab.shape.head_dim)
        same(interleaved(formula(x, 0, BASE)), Tables.of(x).turned(interleaved(x)), TOLERANCE, f"{length} tokens")
        tables, turning = Tables.of(x), interleaved(x)
        sides: dict[str, Callable[[], object]] = {
            "formula": partial(formula, x, 0, BASE),
            "tables": partial(tables.turn, turning),
            **{f"backend/{name}": kernel(name, interleaved(x)) for name in names},
        }
        taken = lab.race(length, sides, formula={"theirs_s": THEIRS.get(length)})
        change = changes[length] = statistics.compare(taken["formula"], taken["tables"])
        low, middle, high = times(change)
        then = quantity(THEIRS[length], "s") if length in THEIRS else "-"
        table.append([str(length), figure(taken["formula"]), figure(taken["tables"]), f"{middle:.2f}",
                      f"{low:.2f} to {high:.2f}", then, *(figure(taken[f"backend/{n}"]) for n in names)])  # fmt: skip
    verdict = most([vote_times(change, WANTED) for change in changes.values()])
    told = f"tables in place against the formula: {by_length(changes, in_times)}"
    return Finding(Verdict.of(lab.claim, verdict, told), table)


def formula(x: Floats, start: int, base: float) -> Floats:
    """As the paper writes it: pairs (2i, 2i + 1), angles, cos and sin made anew in each call. x: (T, heads, dim)."""
    tokens, _, dim = x.shape
    theta = inverse_frequencies(base, dim)
    angle = np.arange(start, start + tokens, dtype=np.float32)[:, None, None] * theta
    cos, sin = np.cos(angle), np.sin(angle)
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


def interleaved(x: Floats) -> Floats:
    """Values moved so that the pairs (2i, 2i + 1) become (i, i + half), as files are read."""
    return np.concatenate((x[..., 0::2], x[..., 1::2]), axis=-1)


class Tables:
    """cos and sin for each position, made once, and scratch of the size of a half."""

    def __init__(self, cos: Floats, sin: Floats, heads: int) -> None:
        self.cos, self.sin = cos, sin
        self.scratch = np.empty((2, cos.shape[0], heads, cos.shape[-1]), np.float32)

    @staticmethod
    def of(x: Floats) -> Tables:
        """For tensors of this shape, from position 0 on."""
        inv_freq = inverse_frequencies(BASE, x.shape[-1])
        return Tables(*fused_block.angles(RopeTable(inv_freq, 1.0), 0, len(x)), x.shape[1])

    def turn(self, x: Floats) -> Floats:
        """In place: nothing is allocated."""
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

    def turned(self, x: Floats) -> Floats:
        """The same on a copy."""
        return self.turn(x.copy())


def kernel(backend: str, x: Floats) -> Callable[[], object]:
    """A backend's rotation as it comes; where it is one with the write into the cache, both."""
    ops = select_backend(backend=backend)
    table, positions = RopeTable(inverse_frequencies(BASE, x.shape[-1]), 1.0), np.arange(len(x))
    if hasattr(ops, "rope"):
        rope = ops.rope
        return lambda: rope(x, positions, table)
    kv = ops.empty_kv(-(-len(x) // 16), 16, x.shape[1], x.shape[2])
    return lambda: ops.rope_store(x, x, x, positions, table, kv, positions)
