"""Claim 9: the parts that were said to be beyond optimising, the reference against the kernels.

QKV and RoPE with its cache write are ops of every backend. The kernels compute scores, softmax and values in one pass,
so those are judged together, on both sides as the op `attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from llm_worker_bench import statistics
from llm_worker_bench.micro import Function, consecutive_batch, rope_table
from llm_worker_bench.roofline import library_threads
from llm_worker_bench.statistics import Change
from llm_worker_bench.synthetic import random_tensor
from llm_worker_rbee.backends import resolve_kv_type
from llm_worker_rbee.weights.quants import BLOCK_TYPES

from . import harness
from .caches import BLOCK_SIZE, make_attention, make_inputs
from .harness import Finding, Harness, Shape, Step, Table, VerdictName
from .targets import Target

QKV_TYPES = ("F32", "Q4_1")  # as in the old suite, and as in the default model


def run_optimised_ops(runner: Harness) -> Finding:
    """Compare the ops at each step, with NumPy's number of threads and with all."""
    head = ["part", "backend", "threads", "step", "reference", "kernel", "times as fast", "99% interval", "claim"]
    table, votes = [head], dict[str, dict[str, list[VerdictName]]]()
    base = runner.reference
    if base is None:
        return Finding("not judged", "the reference is left out", [Table(table)])
    for part, make in PARTS.items():
        for target in runner.kernels:
            numbers = dict.fromkeys((min(library_threads(), target.ops.threads or 1), target.ops.threads))
            limited = {n: target if n is None else target.with_threads(n) for n in numbers}
            if target.ops.threads is None:
                limited = {None: target}
            sides: dict[str, Callable[[Step], Function]] = {
                "reference": make(base, runner.shape),
                **{_label(target, n): make(one, runner.shape) for n, one in limited.items()},
            }
            for step in runner.steps((128,), (32, 128), (512,)):
                timed = {name: base.timed(side(step)) for name, side in sides.items() if name == "reference"}
                timed |= {name: target.timed(side(step)) for name, side in sides.items() if name != "reference"}
                taken = runner.time_sides(f"{part}/{step.name}", timed)
                for n in limited:
                    change = statistics.compare(taken["reference"], taken[_label(target, n)])
                    vote = vote_optimised(change)
                    votes.setdefault(target.name, {}).setdefault(part, []).append(vote)
                    times = [harness.format_time(taken[name]) for name in ("reference", _label(target, n))]
                    cells = [part, target.name, str(n or "-"), str(step), *times, *harness.speedup_cells(change), vote]
                    table.append(cells)
    backends = {name: _backend_verdict(parts) for name, parts in votes.items()}
    return Finding(harness.agreed([one["verdict"] for one in backends.values()]), "", [Table(table)], backends)


def _backend_verdict(parts: Mapping[str, Sequence[VerdictName]]) -> dict[str, Any]:
    """Return the verdict of a backend, and the verdict of each part."""
    found = {part: harness.majority(votes) for part, votes in parts.items()}
    summary = ", ".join(f"{part} {verdict}" for part, verdict in found.items())
    return {"verdict": harness.agreed(list(found.values())), "phases": found, "summary": summary}


def _label(target: Target, threads: int | None) -> str:
    """Return the name of a side: `cpu`, or `cpu:1` with fewer threads than it has."""
    return target.name if threads == target.ops.threads else f"{target.name}:{threads}"


def vote_optimised(change: Change) -> VerdictName:
    """Judge "cannot be optimised": refuted if the kernel saves over 10% outside the noise."""
    votes: dict[str, VerdictName] = {"confirmed": "refuted", "refuted": "confirmed", "within noise": "within noise"}
    return votes[harness.vote_saves(change)]


def _qkv(kind: str, target: Target, shape: Shape) -> Callable[[Step], Function]:
    """The reference multiplies by float32 weights in any case: quantized ones it would dequantize each time."""
    width, rows = shape.d_model, shape.n_heads * shape.head_dim
    used = BLOCK_TYPES["F32" if target.is_reference else kind]
    weight = target.ops.prepare([random_tensor(used, (rows, width), seed) for seed in range(3)])

    def side(step: Step) -> Function:
        x = target.array(harness.random_array(np.random.default_rng(step.length), step.tokens, width))
        return partial(target.ops.linear, x, weight)

    return side


def _rope(target: Target, shape: Shape) -> Callable[[Step], Function]:
    def side(step: Step) -> Function:
        batch = consecutive_batch(step.tokens, step.context, BLOCK_SIZE)
        table, inputs = rope_table(shape.head_dim), make_inputs(target, shape, step)
        return partial(
            target.ops.rope_store, *inputs, batch.positions, table, _kv(target, shape, step), batch.slot_mapping
        )

    return side


def _attention(target: Target, shape: Shape) -> Callable[[Step], Function]:
    return partial(make_attention, target, shape)


def _kv(target: Target, shape: Shape, step: Step) -> Any:
    ops, blocks = target.ops, -(-step.context // BLOCK_SIZE)
    return ops.empty_kv(blocks, BLOCK_SIZE, shape.n_heads, shape.head_dim, resolve_kv_type(ops))


PARTS: dict[str, Callable[[Target, Shape], Callable[[Step], Function]]] = {
    **{f"QKV, {kind} weights": partial(_qkv, kind) for kind in QKV_TYPES},
    "RoPE and cache write": _rope,
    "scores, softmax and values": _attention,
}
