"""Claim 3a: a causal mask made each time, cached by its length, and not needed at all.

Scores are (32, S, S), as in the old suite's `causal_mask`. The verdict is on what that suite measured: the mask added
to the scores, made or looked up. Beside it stand the parts alone, and the softmax with a mask against one that ends
each row where causality ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...backends import reference
from .. import statistics
from ..results import Result, quantity
from . import harness
from .harness import Finding, Floats, Harness, additive_mask

RULE = (
    "confirmed if at most lengths the kept mask saves over 10% of making one and adding it to the scores, refuted if "
    "the interval shows that it saves less; where no side has most lengths, the longest decides"
)
ROW_TILE = 32  # rows that share one bound: a bound for each row alone would be 512 calls of the library
# What the old suite measured on an unnamed CPU, in seconds: made each time, and cached.
OLD_SUITE_S = {8: (9.93e-6, 9.1e-6), 32: (119e-6, 117.4e-6), 128: (2.12e-3, 1.9e-3), 512: (58.8e-3, 55.0e-3)}
HEAD = ["tokens", "made each time", "kept", "change", "99% interval", "made then", "kept then", "making alone",
        "lookup alone", "adding alone", "softmax, mask kept", "softmax, no mask", "bytes kept"]  # fmt: skip
PARTS = ("creation", "lookup", "add", "masked_softmax", "no_mask")


def run(runner: Harness) -> Finding:
    """Compare a new and a cached mask at each length."""
    table, changes, without = [HEAD], {}, {}
    for length in runner.lengths((8, 32, 128, 512), (1024,)):
        scores = harness.random_array(np.random.default_rng(length), runner.shape.n_heads, length, length)
        mask, sides = additive_mask(length), make_sides(scores)
        harness.require_equal(sides["masked_softmax"](), sides["no_mask"](), 1e-6, f"softmax of {length} tokens")
        old = OLD_SUITE_S.get(length)
        theirs = {} if old is None else {"create": {"theirs_s": old[0]}, "cached": {"theirs_s": old[1]}}
        taken: dict[str, Sequence[float]] = {}
        for group in (("create", "cached", "creation", "lookup", "add"), ("masked_softmax", "no_mask")):
            taken |= runner.time_sides(length, {name: sides[name] for name in group}, **theirs)
        runner.recorder.add_result(Result.exact(f"claim3a/bytes/{length}", "B", mask.nbytes))
        change = changes[length] = statistics.compare(taken["create"], taken["cached"])
        without[length] = statistics.compare(taken["masked_softmax"], taken["no_mask"])
        new = [str(length), *(harness.format_time(taken[name]) for name in ("create", "cached"))]
        then = ["-", "-"] if old is None else [quantity(value, "s") for value in old]
        parts = [harness.format_time(taken[name]) for name in PARTS]
        table.append([*new, *harness.change_cells(change), *then, *parts, f"{mask.nbytes:,}"])
    longest = max(changes)
    making, masking = (statistics.estimate(taken[name]).value for name in ("creation", "masked_softmax"))
    summary = (
        f"cached masks against new ones: {harness.format_by_length(changes)}; at {longest} tokens making one takes "
        f"{making / masking:.1%} of the masked softmax, a softmax that needs no mask changes that by "
        f"{without[longest].change:+.1%}, and a kept mask holds {quantity(4 * longest**2, 'B')}"
    )
    return runner.finding(harness.majority([harness.vote_saves(c) for c in changes.values()]), summary, table)


def make_sides(scores: Floats) -> dict[str, Callable[[], Floats]]:
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
    seen = np.tri(min(ROW_TILE, length), dtype=np.bool_)
    for first in range(0, length, ROW_TILE):
        last = min(first + ROW_TILE, length)
        part = scores[:, first:last, :last]
        e = np.exp(part - part.max(axis=-1, keepdims=True))
        e[..., first:] *= seen[: last - first, : last - first]
        np.divide(e, e.sum(axis=-1, keepdims=True), out=out[:, first:last, :last])
    return out
