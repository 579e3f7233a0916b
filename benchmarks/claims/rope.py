"""Claim 5: RoPE of q and k as the formula is written, from tables, in place, and as each backend's kernel comes.

The formula takes neighbouring pairs and makes the angles of each call anew; it is written for NumPy and, on a device,
for PyTorch. The kernels rotate pairs (i, i + half) and write keys and values into the paged cache in the same pass: the
CPU's makes the angles once in a step for all layers, the GPU's reads a table that was made when the model was loaded.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from llm_worker_bench import statistics
from llm_worker_bench.micro import ROPE_BASE, consecutive_batch, rope_table
from llm_worker_bench.micro.suite import ORIGINAL_S
from llm_worker_bench.results import quantity
from llm_worker_rbee.backends.select import import_cpu_backend
from llm_worker_rbee.layers.rope import inverse_frequencies

from . import harness
from .caches import BLOCK_SIZE
from .harness import Finding, Floats, Harness, Row, Step, Table
from .numpy_model import rope_tables, rotate
from .targets import Target, to_numpy

Rotation = Callable[[], list[Any]]
MIN_SPEEDUP, TOLERANCE, DEVICE_TOLERANCE = 3.0, 1e-5, 1e-3
# The side that a backend is judged by: what it does in a step.
JUDGED = {"reference": "in_place", "cpu": "angles", "cuda": "table"}


def run_rope(runner: Harness) -> Finding:
    """Compare the formula with tables and kernels at each step."""
    head = ["backend", "step", "formula", "optimised", "times as fast", "99% interval", "rope_forward then"]
    table, rows = [head], list[Row]()
    tables = [["backend", "step", "angles in each step", "table", "times as fast", "99% interval"]]
    for target in runner.targets:
        for step in runner.steps((128,), (8, 32, 128), (512,)):
            sides = make_sides(target, runner, step)
            timed = {f"{target.name}/{name}": target.timed(side) for name, side in sides.items()}
            old = ORIGINAL_S.get(f"rope_forward/{step.tokens}")
            taken = runner.time_sides(step.name, timed, **{f"{target.name}/formula": {"theirs_s": old}})
            best, angles = (
                statistics.compare(taken[f"{target.name}/{a}"], taken[f"{target.name}/{b}"])
                for a, b in (("formula", JUDGED[target.name]), ("angles", "table"))
            )
            rows.append(Row(target.name, step, best, harness.vote_speedup(best, MIN_SPEEDUP)))
            times = {name.split("/")[1]: harness.format_time(samples) for name, samples in taken.items()}
            then = quantity(old, "s") if old and target.is_reference else "-"
            cells = [times["formula"], times[JUDGED[target.name]], *harness.speedup_cells(best), then]
            table.append([target.name, str(step), *cells])
            cells = [times["angles"], times["table"], *harness.speedup_cells(angles)]
            tables.append([target.name, str(step), *cells])
    caption = "A precomputed table against angles made in each step, by the same code of each backend"
    summary = "optimised: tables applied in place on the reference, the rope kernels of the others as a step has them"
    return harness.judge(rows, [Table(table), Table(tables, caption)], harness.format_speedup, summary)


def make_sides(target: Target, runner: Harness, step: Step) -> dict[str, Rotation]:
    """Return the sides of a backend on q and k of (T, heads, head_dim); raise if they differ."""
    rng, shape = np.random.default_rng(step.length), runner.shape
    q, k = (harness.random_array(rng, step.tokens, shape.n_heads, shape.head_dim) for _ in range(2))
    make = {"reference": numpy_sides, "cpu": cpu_sides, "cuda": device_sides}[target.name]
    expected, tolerance = split_pairs(rope_formula(q, step.start)), TOLERANCE
    sides: dict[str, Rotation] = {"formula": lambda: [rope_formula(x, step.start) for x in (q, k)]}
    sides |= make(target, q, k, step)
    if target.ops.has_device_memory:
        tolerance = DEVICE_TOLERANCE
    for name, side in sides.items():
        found = to_numpy(side()[0])
        found = split_pairs(found) if name == "formula" else found[..., : q.shape[-1]]
        harness.require_equal(expected, found, tolerance, f"{name} on {target.name} at {step}")
    return sides


def rope_formula(x: Floats, start: int, base: float = ROPE_BASE) -> Floats:
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


def numpy_sides(target: Target, q: Floats, k: Floats, step: Step) -> dict[str, Rotation]:
    """Return NumPy with pairs (i, i + half): angles in the call, from tables, and in place."""
    table, heads, in_place = rope_table(q.shape[-1]), [split_pairs(x) for x in (q, k)], InPlaceRope(q, k, step)
    cos_sin = rope_tables(table, step.start, step.context)

    def with_angles() -> list[Floats]:
        made = rope_tables(table, step.start, step.context)
        return [rotate(x, *made) for x in heads]

    return {
        "angles": with_angles,
        "table": lambda: [rotate(x, *cos_sin) for x in heads],
        "in_place": in_place.rotate,
    }


class InPlaceRope:
    """cos and sin of each position, made once, scratch of the size of a half, and the heads that are rotated."""

    def __init__(self, q: Floats, k: Floats, step: Step) -> None:
        self.heads = [split_pairs(x) for x in (q, k)]
        self.cos, self.sin = rope_tables(rope_table(q.shape[-1]), step.start, step.context)
        self.scratch = np.empty((2, *q.shape[:2], self.cos.shape[-1]), np.float32)

    def rotate(self) -> list[Floats]:
        """Rotate q and k in place, without an allocation; each call rotates further."""
        half = self.cos.shape[-1]
        a, b = self.scratch
        for x in self.heads:
            low, high = x[..., :half], x[..., half:]
            np.multiply(low, self.sin, out=a)
            np.multiply(high, self.sin, out=b)
            low *= self.cos
            low -= b
            high *= self.cos
            high += a
        return self.heads


def cpu_sides(target: Target, q: Floats, k: Floats, step: Step) -> dict[str, Rotation]:
    """Return the CPU's kernel as a program, with the task that makes the angles and with angles from a table."""
    cpu: Any = import_cpu_backend()
    ops, (tokens, heads, dim), table = target.ops, q.shape, rope_table(q.shape[-1])
    batch, pairs = consecutive_batch(tokens, step.context, BLOCK_SIZE), len(table.inv_freq)
    kv = ops.empty_kv(-(-step.context // BLOCK_SIZE), BLOCK_SIZE, heads, dim)
    out = np.empty((tokens, heads, cpu.padded_dim(dim)), np.float32)
    cos_sin = [np.ascontiguousarray(x) for x in rope_tables(table, step.start, step.context)]
    qkv = np.concatenate([*(split_pairs(x) for x in (q, k)), k], axis=1)
    first, arrays = cpu.Step.END, [*cos_sin, qkv, out]
    entries = np.zeros(first + len(arrays), np.int64)
    held = {
        cpu.Step.POSITIONS: batch.positions, cpu.Step.SLOT_MAPPING: batch.slot_mapping,
        cpu.Step.KV: cpu.layer_addresses([kv]), **dict(enumerate(arrays, first)),
    }  # fmt: skip
    for entry, array in held.items():
        entries[entry] = array.ctypes.data
    entries[cpu.Step.TOKENS], entries[cpu.Step.BLOCK_SIZE] = tokens, BLOCK_SIZE
    store = cpu.rope_store_task(0, first, pairs, heads, heads, dim, "float32", first + 2, first + 3)
    address, alive = entries.ctypes.data, (held, kv, table)  # tasks hold the addresses of these arrays

    def run(program: Any) -> list[Floats]:
        program.run(entries, ops.threads, address)
        return [alive[0][first + 3]]

    programs = {"angles": [cpu.angles_task(table, first), store], "table": [store]}
    return {name: partial(run, cpu.Program(tasks)) for name, tasks in programs.items()}


def device_sides(target: Target, q: Floats, k: Floats, step: Step) -> dict[str, Rotation]:
    """Return the formula in PyTorch, and the Triton kernel with angles made in each call or taken from a table."""
    package = type(target.ops).__module__
    rope, device = (importlib.import_module(f"{package}.{name}") for name in ("kernels.rope", "device"))
    ops: Any = target.ops
    (tokens, heads, dim), table, where = q.shape, rope_table(q.shape[-1]), ops.torch_device
    batch = consecutive_batch(tokens, step.context, BLOCK_SIZE)
    kv = ops.empty_kv(-(-step.context // BLOCK_SIZE), BLOCK_SIZE, heads, dim, "float32")
    positions, slots = (device.upload(array, where) for array in (batch.positions, batch.slot_mapping))
    rows = device.upload(np.arange(tokens), where)
    all_angles = rope.rope_tables(table, device.upload(np.arange(step.context), where))
    qkv = target.array(np.concatenate([*(split_pairs(x) for x in (q, k)), k], axis=1)).view(1, tokens, -1)
    pairs, out = [target.array(x) for x in (q, k)], target.array(np.empty_like(q))
    exponent = target.array(np.arange(0, dim, 2, dtype=np.float32) / dim)

    def with_angles() -> list[Any]:
        rope.launch_rope_store(qkv, kv, rope.rope_tables(table, positions), rows, slots, out)
        return [out]

    def with_table() -> list[Any]:
        rope.launch_rope_store(qkv, kv, all_angles, positions, slots, out)
        return [out]

    return {
        "formula": lambda: [device_formula(x, positions, exponent) for x in pairs],
        "angles": with_angles,
        "table": with_table,
    }


def device_formula(x: Any, positions: Any, exponent: Any) -> Any:
    """Rotate a tensor as `rope_formula` does; the exponents are constants."""
    angle = positions[:, None, None] * (exponent * -math.log(ROPE_BASE)).exp()
    cos, sin = angle.cos(), angle.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    out = x.new_empty(x.shape)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out
