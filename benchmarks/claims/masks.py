"""Claims 3a, 6, 7, 8 and 13: causal masks made each time, kept by length, or not needed at all.

Scores are (heads, T, S), as in the old suite's `causal_mask`. On the reference the pass is what that suite measured:
the mask added to the scores, made or looked up; also a softmax with a kept mask, and one that ends each row where
causality ends it. The kernels are causal by the bound of a loop: there the pass is the attention kernel, plus the work
that a mask would add: the addition to the scores by the backend's array library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from llm_worker_bench import statistics
from llm_worker_bench.micro.suite import ORIGINAL_S
from llm_worker_bench.results import quantity
from llm_worker_bench.statistics import Change
from llm_worker_rbee.backends import reference
from llm_worker_rbee.config import ModelConfig
from llm_worker_rbee.engine.model_runner import SingleSequence
from llm_worker_rbee.models import Transformer, load_model, read_model_config
from llm_worker_rbee.weights import open_checkpoint

from . import harness
from .caches import make_attention
from .harness import Finding, Floats, Harness, Row, Samples, Step, Table, VerdictName
from .numpy_model import CACHED_MASKS, GROWING, additive_mask
from .targets import Target

ROW_TILE = 32  # rows that share one bound: a bound for each row alone would be 512 calls of the library
MIN_WHOLE_GAIN = 0.06
EXPECTED = (0.50, 0.80)  # of causal_mask, by which its time was to be reduced
QUICK_LAYERS = 6  # of the whole pass: layers are alike
# What the Rust worker's suite measured: masks made each time and cached, by length.
OLD_MASK_S = {
    n: (ORIGINAL_S[f"causal_mask/{n}"], ORIGINAL_S[f"causal_mask_cached/{n}"]) for n in (8, 32, 128, 512)
}  # fmt: skip
Masks = dict[tuple[str, Step], dict[str, Samples]]  # by backend and step: seconds of each side


def measure_masks(runner: Harness) -> Masks:
    """Time all that a mask may cost; several claims are judged by it."""
    found: Masks = {}
    for target in runner.targets:
        for step in runner.steps((128,), (8, 32, 128, 512), (1024,)):
            sides = numpy_sides(target, runner, step) if target.is_reference else kernel_sides(target, runner, step)
            if target.is_reference:
                harness.require_equal(sides["masked"](), sides["none"](), 1e-6, f"softmax at {step}")
            fields = {}
            if target.is_reference and step.phase == "prefill" and step.length in OLD_MASK_S:
                made, kept = OLD_MASK_S[step.length]
                fields = {"reference/made": {"theirs_s": made}, "reference/kept": {"theirs_s": kept}}
            timed = {f"{target.name}/{name}": target.timed(side) for name, side in sides.items()}
            taken = runner.time_sides(step.name, timed, **fields)
            found[target.name, step] = {name.split("/")[1]: samples for name, samples in taken.items()}
    return found


def numpy_sides(target: Target, runner: Harness, step: Step) -> dict[str, Callable[[], Floats]]:
    """Return the mask made, kept and not needed, with the parts of each alone, in NumPy."""
    scores = harness.random_array(np.random.default_rng(step.length), runner.shape.n_heads, step.tokens, step.context)
    length, queries, out = step.context, np.arange(step.start, step.context), np.empty_like(scores)
    cache = {length: additive_mask(length, queries)}
    return {
        "made": lambda: np.add(scores, additive_mask(length, queries), out=out),
        "kept": lambda: np.add(scores, cache[length], out=out),
        "making": lambda: additive_mask(length, queries),
        "lookup": lambda: cache[length],
        "adding": lambda mask=cache[length]: np.add(scores, mask, out=out),  # type: ignore[misc]
        "masked": lambda: reference.softmax(np.add(scores, cache[length], out=out)),
        "none": lambda: bounded_softmax(scores, step.start),
    }


def bounded_softmax(scores: Floats, start: int = 0) -> Floats:
    """End each tile of rows at its last visible key: later keys are neither read nor computed."""
    rows = scores.shape[-2]
    out = np.zeros_like(scores)
    seen = np.tri(min(ROW_TILE, rows), dtype=np.bool_)
    for first in range(0, rows, ROW_TILE):
        last = min(first + ROW_TILE, rows)
        part = scores[:, first:last, : start + last]
        e = np.exp(part - part.max(axis=-1, keepdims=True))
        e[..., start + first :] *= seen[: last - first, : last - first]
        np.divide(e, e.sum(axis=-1, keepdims=True), out=out[:, first:last, : start + last])
    return out


def kernel_sides(target: Target, runner: Harness, step: Step) -> dict[str, Callable[[], Any]]:
    """Return the attention kernel alone, the kernel and a mask that is kept or made, and the mask alone."""
    shape, rng = runner.shape, np.random.default_rng(step.length)
    scores = target.array(harness.random_array(rng, shape.n_heads, step.tokens, step.context))
    attend = make_attention(target, shape, step)
    make = mask_maker(target, step)
    kept = make()

    def add(mask: Any, attended: Any = None) -> None:
        nonlocal scores
        scores += mask

    return {
        "made": lambda: add(make(), attend()),
        "kept": lambda: add(kept, attend()),
        "none": attend,
        "making": make,
        "adding": partial(add, kept),
    }


def mask_maker(target: Target, step: Step) -> Callable[[], Any]:
    """Return a function that makes the mask of a step by the array library of the backend."""
    keys, queries = np.arange(step.context), np.arange(step.start, step.context)
    if not target.ops.has_device_memory:
        return partial(additive_mask, step.context, queries)
    columns, rows = target.array(keys)[None, :], target.array(queries)[:, None]

    def make() -> Any:
        later = columns > rows
        return later.float().masked_fill(later, float("-inf"))

    return make


def masks_of(runner: Harness) -> Masks:
    """Return the measured masks, from an earlier claim if there was one."""
    found: Masks = runner.once("masks", lambda: measure_masks(runner))
    return found


def run_causal_mask(runner: Harness) -> Finding:
    """Claim 3a: compare a new and a kept mask, and a kept one with none."""
    head = ["backend", "step", "made each time", "kept", "change", "99% interval", "making alone", "lookup alone",
            "adding alone", "bytes kept"]  # fmt: skip
    table, rows = [head], list[Row]()
    without = [["backend", "step", "with a kept mask", "without a mask", "change", "99% interval"]]
    for (backend, step), taken in masks_of(runner).items():
        change = statistics.compare(taken["made"], taken["kept"])
        nbytes = 4 * step.tokens * step.context
        runner.record_exact(f"{backend}/bytes", step.name, nbytes)
        parts = [harness.format_time(taken[name]) if name in taken else "-" for name in ("making", "lookup", "adding")]
        times = [harness.format_time(taken[name]) for name in ("made", "kept")]
        table.append([backend, str(step), *times, *harness.change_cells(change), *parts, f"{nbytes:,}"])
        with_mask = taken.get("masked", taken["kept"])
        bound = statistics.compare(with_mask, taken["none"])
        times = [harness.format_time(samples) for samples in (with_mask, taken["none"])]
        without.append([backend, str(step), *times, *harness.change_cells(bound)])
        vote = harness.vote_saves(change) if backend == "reference" else vote_not_needed(bound)
        rows.append(Row(backend, step, change if backend == "reference" else bound, vote))
    caption = (
        "A kept mask against none: on the reference the softmax of the scores, on the kernels attention as a whole, "
        "with the mask that they do not need added beside it"
    )
    summary = "figures: on the reference kept against made, on the kernels no mask against a kept one"
    return harness.judge(rows, [Table(table), Table(without, caption)], harness.format_change, summary)


def vote_not_needed(change: Change) -> VerdictName:
    """Judge "keeping a mask pays" where none is needed: refuted if it is faster without one."""
    return "refuted" if change.verdict == "improved" else "within noise"


def run_mask_speedup(runner: Harness) -> Finding:
    """Claim 6: the gain of the mask cache in `causal_mask` and in a whole forward pass."""
    head = ["backend", "tokens", "causal_mask", "99% interval", "then", "whole pass, made", "kept", "change",
            "99% interval"]  # fmt: skip
    table, rows = [head], list[Row]()
    whole, layers = time_whole_pass(runner)
    for (backend, step), taken in masks_of(runner).items():
        if step.phase == "decode":
            continue
        change = statistics.compare(taken["made"], taken["kept"])
        old = OLD_MASK_S.get(step.length) if backend == "reference" else None
        cells = [*harness.change_cells(change), f"{old[1] / old[0] - 1:+.1%}" if old else "-"]
        if backend == "reference" and step in whole:
            gain = statistics.compare(*whole[step].values())
            rows.append(Row(backend, step, gain, harness.vote_saves(gain, MIN_WHOLE_GAIN)))
            cells += [*map(harness.format_time, whole[step].values()), *harness.change_cells(gain)]
        else:
            cells += ["needs no mask" if backend != "reference" else "-", "-", "-", "-"]
        table.append([backend, str(step.length), *cells])
    summary = (
        f"the whole pass is a prefill through {layers} layers of the model on the reference, with a growing cache and "
        "a mask in each layer; the product's step needs none"
    )
    return harness.judge(rows, [Table(table)], harness.format_change, summary)


def time_whole_pass(runner: Harness) -> tuple[dict[Step, dict[str, Samples]], int]:
    """Time prefill with masks made in each layer and with kept ones; return also the number of layers."""
    checkpoint = open_checkpoint(runner.model)
    config = read_model_config(checkpoint)
    layers = config.n_layers if runner.thorough else min(QUICK_LAYERS, config.n_layers)
    model = _first_layers(load_model(checkpoint, GROWING, config), config, layers)
    found = {}
    for length in runner.lengths((8, 32, 128, 512)):
        step = Step("prefill", min(length, config.context_length))
        ids = np.random.default_rng(6).integers(0, config.vocab_size, step.length).tolist()
        sides = {
            f"whole/{name}": partial(_prefill, SingleSequence(replace(model, ops=ops), step.length), ids)
            for name, ops in (("made", GROWING), ("kept", CACHED_MASKS))
        }
        made, kept = (side() for side in sides.values())
        harness.require_equal(made, kept, 0.0, f"logits of {step}")
        found[step] = runner.time_sides(step.name, sides)
    return found, layers


def _first_layers(model: Transformer, config: ModelConfig, count: int) -> Transformer:
    return replace(model, blocks=model.blocks[:count], config=replace(config, n_layers=count))


def _prefill(sequence: SingleSequence, ids: list[int]) -> Floats:
    """Compute a prompt with a growing cache, which is emptied first."""
    for layer in sequence.cache.layers:
        layer.k, layer.v = layer.k[:0], layer.v[:0]
    batch = sequence.batch(ids, 0, all_logits=False)
    return np.asarray(sequence.model.forward(batch, sequence.cache), np.float32)


def _mask_changes(runner: Harness) -> dict[Step, Change]:
    """Return kept against made over the length, as the suite's `causal_mask`: on the reference, else where measured."""
    masks = masks_of(runner)
    backend = next(iter(masks))[0]
    return {
        step: statistics.compare(taken["made"], taken["kept"])
        for (name, step), taken in masks.items()
        if name == backend and step.phase == "prefill"
    }


def run_expected_reduction(runner: Harness) -> Finding:
    """Claim 7: whether the time of causal_mask fell by 50 to 80%."""
    table, votes, places = [["tokens", "reduction", "99% interval", "50 to 80%"]], list[VerdictName](), []
    for step, change in _mask_changes(runner).items():
        place, vote = place_in_range(change)
        votes.append(vote)
        places.append(f"{count_tokens(step)} {place} ({-change.change:.1%}, 99% interval {_reduction(change)})")
        table.append([str(step.length), f"{-change.change:.1%}", _reduction(change), place])
    return Finding(harness.majority(votes), ", ".join(places), [Table(table)])


def count_tokens(step: Step) -> str:
    """`1 token`, `8 tokens`."""
    return f"{step.length} token{'s' * (step.length != 1)}"


def _reduction(change: Change) -> str:
    return f"{-change.high:.1%} to {-change.low:.1%}"


def place_in_range(change: Change) -> tuple[str, VerdictName]:
    """Return where a reduction lies by its whole interval; below the range the expectation is refuted."""
    low, high = -change.high, -change.low
    if high < EXPECTED[0]:
        return "below", "refuted"
    if low > EXPECTED[1]:
        return "above", "confirmed"
    inside = EXPECTED[0] <= low and high <= EXPECTED[1]
    return ("inside", "confirmed") if inside else ("at an end of it", "within noise")


def run_gain_over_length(runner: Harness) -> Finding:
    """Claim 8: whether the relative gain grows with the length."""
    changes, masks = _mask_changes(runner), masks_of(runner)
    backend = next(iter(masks))[0]
    table, votes, previous = [["tokens", "gain", "99% interval", "saved", "against the length before"]], [], None
    said = list[str]()
    for step, change in changes.items():
        made, kept = (statistics.estimate(masks[backend, step][name]).value for name in ("made", "kept"))
        text = "-"
        if previous is not None:
            vote: VerdictName = "within noise"
            if change.high < previous.low or change.low > previous.high:
                vote = "confirmed" if change.change < previous.change else "refuted"
            votes.append(vote)
            text = {"confirmed": "grows", "refuted": "shrinks", "within noise": "within noise"}[str(vote)]
        saved = quantity(made - kept, "s")
        table.append([str(step.length), f"{-change.change:.1%}", _reduction(change), saved, text])
        said.append(f"{count_tokens(step)} {-change.change:.1%} (99% interval {_reduction(change)}; {saved})")
        previous = change
    verdict = harness.majority(votes) if votes else "not judged"
    return Finding(verdict, f"relative and absolute gain: {', '.join(said)}", [Table(table)])


def run_mask_memory(runner: Harness) -> Finding:
    """Claim 13: bytes of the masks of all lengths against bytes of the KV cache."""
    config = read_model_config(open_checkpoint(runner.model))
    context, kv_type = config.context_length, "float16"
    table = [["context", "mask of this length", "masks of all lengths", "KV cache, float16", "times the KV cache"]]
    for length in sorted({min(n, context) for n in (128, 512, 2048, context)}):
        masks, kv = mask_bytes(length), config.kv_bytes(length, kv_type)
        runner.record_exact("masks", str(length), masks)
        runner.record_exact("kv", str(length), kv)
        cells = [quantity(n, "B") for n in (4 * length**2, masks, kv)]
        table.append([str(length), *cells, f"{masks / kv:,.2f}"])
    summary = (
        f"masks of all lengths up to the context of {context} tokens take {quantity(masks, 'B')}, the KV cache of one "
        f"request of that length {quantity(kv, 'B')}: {masks / kv:,.2f} times as much"
    )
    return Finding("refuted" if masks > kv else "confirmed", summary, [Table(table)])


def mask_bytes(context: int) -> int:
    """Return the bytes of the float32 masks of each length from 1 to the context."""
    return 4 * context * (context + 1) * (2 * context + 1) // 6
