"""Claims 1, 4 and 10: modules against the integrated forward, on plain NumPy and on the kernels of each backend.

Claim 1 is one block of the suite's width, claim 4 the whole model. On the reference, modules are layers/ on NumPy ops
(in claim 4 with the old worker's growing cache and mask) and integrated is one NumPy function; both have float32
weights. On the kernels, modules are layers/ op by op on the backend's op table and integrated is the product's fused
step; both have the file's own types. Backends are compared with as many threads as NumPy has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from llm_worker_bench import statistics, synthetic, synthetic_shapes
from llm_worker_bench.micro import consecutive_batch
from llm_worker_bench.roofline import library_threads
from llm_worker_rbee.backends import resolve_kv_type
from llm_worker_rbee.backends.ops import OPS, Array, KVLayer
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.engine.model_runner import SingleSequence
from llm_worker_rbee.layers.attention import Attention
from llm_worker_rbee.models import Transformer, load_model, read_model_config
from llm_worker_rbee.weights import Checkpoint, open_checkpoint

from . import harness
from .harness import Finding, Harness, Row, Samples, Shape, Step, Table
from .numpy_model import (
    DENSE,
    GROWING,
    DenseBackend,
    GrowingCacheBackend,
    KVBuffers,
    fused_forward,
    require_plain_llama,
    rope_tables,
)
from .targets import Target, Timed

SIDES = ("modules", "integrated")
TYPES = "Q4_1"  # of the block's weights on the kernels, as in the default model
BLOCK_VOCABULARY, NO_WORK_WIDTH = 512, 32
DECODE_STEPS = 2  # tokens of one timed call
LOGITS_TOLERANCE, DEVICE_TOLERANCE = 1e-3, 0.05  # absolute; of the largest logit, where keys and values are bfloat16
MIN_SPEEDUP, MAX_CALL_SHARE = 2.0, 0.05
Measured = Mapping[Step, Mapping[str, Samples]]  # seconds by `backend/side`


class NumpySides:
    """Modules on NumPy ops and one NumPy function, each with a cache of its own."""

    def __init__(self, model: Transformer, capacity: int, modules: DenseBackend) -> None:
        require_plain_llama(model.config)
        c = model.config
        self.model, self.modules = model, SingleSequence(replace(model, ops=modules), capacity)
        first = model.blocks[0].attention
        assert isinstance(first, Attention)
        self.tables = rope_tables(first.rope, 0, capacity)
        self.buffers = [KVBuffers.zeros(capacity, c.n_kv_heads, c.head_dim) for _ in model.blocks]

    def compute(self, side: str, ids: list[int], start: int) -> Array:
        """Return the logits after these tokens; a growing cache is cut back to `start` first."""
        if side == "integrated":
            return fused_forward(self.model, np.array(ids), *self.tables, self.buffers, start)
        if isinstance(self.modules.model.ops, GrowingCacheBackend):
            for layer in self.modules.cache.layers:
                layer.k, layer.v = layer.k[:start], layer.v[:start]
        batch = self.modules.batch(ids, start, all_logits=False)
        return self.modules.model.forward(batch, self.modules.cache)


class KernelSides:
    """A model on a backend with kernels, op by op and as its fused step; both write the same cache."""

    def __init__(self, model: Transformer, capacity: int) -> None:
        self.model, self.sequence = model, SingleSequence(model, capacity, resolve_kv_type(model.ops))

    def compute(self, side: str, ids: list[int], start: int) -> Array:
        """Return the logits after these tokens, computed: sampling would wait for them too."""
        forward = self.model.forward_unfused if side == "modules" else self.model.forward
        logits = forward(self.sequence.batch(ids, start, all_logits=False), self.sequence.cache)
        self.model.ops.synchronize()
        return logits


@dataclass(frozen=True, slots=True)
class ForwardSides:
    """Both sides of one model on one backend, on the same seeded tokens."""

    sides: NumpySides | KernelSides
    ids: list[int]

    def run(self, side: str, step: Step) -> Array:
        """Compute the prompt, or some tokens after it one by one."""
        if step.phase == "prefill":
            return self.sides.compute(side, self.ids[: step.length], 0)
        for at in range(step.length, step.length + DECODE_STEPS):
            logits = self.sides.compute(side, self.ids[at : at + 1], at)
        return logits

    def check(self, step: Step) -> None:
        """Fill the caches before decode; raise if the sides differ."""
        for side in SIDES if step.phase == "decode" else ():
            self.sides.compute(side, self.ids[: step.length], 0)
        one, other = (self.run(side, step) for side in SIDES)
        is_device = self.sides.model.ops.has_device_memory
        tolerance = DEVICE_TOLERANCE * float(abs(one).max()) if is_device else LOGITS_TOLERANCE
        harness.require_equal(one, other, tolerance, f"logits of {step} on {self.sides.model.ops.name}")

    def timed(self, step: Step) -> dict[str, Timed]:
        tokens = DECODE_STEPS if step.phase == "decode" else 1
        return {side: Timed(partial(self.run, side, step), tokens) for side in SIDES}


def make_sides(target: Target, checkpoint: Checkpoint, capacity: int, modules: DenseBackend) -> ForwardSides:
    """Load a model for one backend; `modules` are the ops of the modules on the reference."""
    config = read_model_config(checkpoint)
    model = load_model(checkpoint, DENSE if target.is_reference else target.ops, config)
    sides = NumpySides(model, capacity, modules) if target.is_reference else KernelSides(model, capacity)
    return ForwardSides(sides, np.random.default_rng(4).integers(0, config.vocab_size, capacity).tolist())


def time_forward(
    runner: Harness, checkpoint: Checkpoint, steps: Sequence[Step], modules: DenseBackend
) -> dict[Step, dict[str, Samples]]:
    """Time both sides on each backend; kernels also with NumPy's number of threads, as `cpu:1`."""
    found: dict[Step, dict[str, Samples]] = {step: {} for step in steps}
    for target in _with_numpy_threads(runner.targets):
        made = make_sides(target, checkpoint, max(step.length for step in steps) + DECODE_STEPS, modules)
        name = target.name if target in runner.targets else f"{target.name}:{target.ops.threads}"
        for step in steps:
            made.check(step)
            timed = {f"{name}/{side}": one for side, one in made.timed(step).items()}
            found[step] |= runner.time_sides(step.name, timed)
    return found


def _with_numpy_threads(targets: Sequence[Target]) -> list[Target]:
    """Return the targets, and targets of several threads also with NumPy's number of threads: like with like."""
    if not any(target.is_reference for target in targets):
        return list(targets)
    limited = [target.with_threads(library_threads()) for target in targets if (target.ops.threads or 0) > 1]
    return [*targets, *(target for target in limited if target not in targets)]


def run_decoder_block(runner: Harness) -> Finding:
    """Claim 1: one block, as a model of one layer with a small vocabulary."""
    steps = runner.steps((32,), (8, 32), (128,))
    checkpoint = synthetic.checkpoint(block_spec(runner.shape))
    taken = time_forward(runner, checkpoint, steps, DENSE)
    calls = time_empty_calls(runner, read_model_config(checkpoint).n_layers)
    rows = [
        Row(target.name, step, change, harness.vote_faster(change))
        for target in runner.targets
        for step in steps
        for change in [_architecture(taken[step], target.name)]
    ]
    cost = statistics.estimate(calls).value
    summary = f"the Python calls of a block cost {harness.format_time(calls)}"
    if runner.reference is not None:
        decode = taken[steps[0]]["reference/modules"]
        summary += f", {cost / statistics.estimate(decode).value:.2%} of its decode on the reference"
    return harness.judge(rows, _tables(runner, taken, calls), harness.format_change, summary)


def run_whole_model(runner: Harness) -> Finding:
    """Claim 4: prefill and decode of the whole model."""
    taken = measure_model(runner)
    rows = [
        Row(target.name, step, change, harness.vote_speedup(change, MIN_SPEEDUP))
        for target in runner.targets
        for step in taken
        for change in [_architecture(taken[step], target.name)]
    ]
    both = [
        f"{step} {harness.format_speedup(change)} on {target.name}"
        for target in (runner.kernels if runner.reference is not None else ())
        for step in taken
        for change in [statistics.compare(taken[step]["reference/modules"], taken[step][f"{target.name}/integrated"])]
    ]
    summary = f"from the old way on NumPy to the product: {', '.join(both)}" if both else ""
    return harness.judge(rows, _tables(runner, taken), harness.format_speedup, summary, harness.unanimous)


def run_call_cost(runner: Harness) -> Finding:
    """Claim 10: the calls of a whole step alone, without work or with next to none."""
    taken = measure_model(runner)
    layers = read_model_config(open_checkpoint(runner.model)).n_layers
    empty = time_empty_calls(runner, layers)
    head = ["backend", "step", "forward", "time", "empty functions", "calls, next to no work", "share", "99% interval"]
    table, rows = [head], list[Row]()
    for target in runner.targets:
        no_work = {} if target.is_reference else time_no_work(runner, target, layers)
        for step in taken:
            for side in SIDES:
                calls = no_work.get(side, empty if side == "modules" else None)
                if calls is None:  # the one function of the reference calls nothing but NumPy
                    continue
                whole = taken[step][f"{target.name}/{side}"]
                change = statistics.compare(whole, calls)
                cells = [harness.format_time(empty) if side == "modules" else "-"]
                cells += [harness.format_time(no_work[side]) if no_work else "-", *harness.share_cells(change)]
                table.append([target.name, str(step), side, harness.format_time(whole), *cells])
                if side == "modules":
                    rows.append(Row(target.name, step, change, harness.vote_share(change, MAX_CALL_SHARE)))
    summary = f"the Python calls of a step through {layers} layers cost {harness.format_time(empty)}"
    return harness.judge(rows, [Table(table)], harness.format_share, summary)


def measure_model(runner: Harness) -> Measured:
    """Return the times of claim 4, which claim 10 needs too."""

    def measure() -> Measured:
        checkpoint = open_checkpoint(runner.model)
        longest = read_model_config(checkpoint).context_length - DECODE_STEPS
        steps = [step._replace(length=min(step.length, longest)) for step in runner.steps((128,), (128,), (512,))]
        return time_forward(runner, checkpoint, steps, GROWING)

    found: Measured = runner.once("model", measure)
    return found


def block_spec(shape: Shape) -> synthetic.Spec:
    """Return a model of one block with random weights."""
    width, heads, head_dim, d_ff = shape
    made = synthetic_shapes.Shape(
        1, width, heads, heads, d_ff, BLOCK_VOCABULARY, context=4096, tied=True, head_dim=head_dim
    )  # fmt: skip
    return synthetic.Spec("block", made, TYPES, 1)


def time_empty_calls(runner: Harness, layers: int) -> Samples:
    """Time the calls of a step whose ops are empty functions: the Python calls that modules cost."""
    x = np.zeros((1, 3 * NO_WORK_WIDTH), np.float32)
    ops, batch = ReferenceBackend(), consecutive_batch(1, 1)
    model, kv = load_no_work_model(DENSE, layers), [KVLayer(x, x)] * layers
    for name in set(OPS) - {"split_heads"}:
        setattr(ops, name, (lambda *_: (x, x)) if name == "add_rms_norm" else lambda *_: x)
    return runner.time_sides("1", {"calls/empty": lambda: model.compute(ops, batch, kv)})["calls/empty"]


def time_no_work(runner: Harness, target: Target, layers: int) -> dict[str, Samples]:
    """Time both sides on a model of the same number of layers that is next to nothing: calls and launches are left."""
    sides = KernelSides(load_no_work_model(target.ops, layers), 1 + DECODE_STEPS)
    timed = {f"calls/{target.name}/{side}": partial(sides.compute, side, [0], 0) for side in SIDES}
    taken = runner.time_sides("1", timed)
    return dict(zip(SIDES, taken.values(), strict=True))


def load_no_work_model(ops: Any, layers: int) -> Transformer:
    """Return a model of tiny matrices with one head."""
    width = NO_WORK_WIDTH
    shape = synthetic_shapes.Shape(layers, width, 1, 1, width, width, context=64, tied=True)
    checkpoint = synthetic.checkpoint(synthetic.Spec("no work", shape, TYPES, layers))
    return load_model(checkpoint, ops, read_model_config(checkpoint))


def _architecture(taken: Mapping[str, Samples], backend: str) -> statistics.Change:
    """Return the change from modules to integrated on a backend."""
    return statistics.compare(*(taken[f"{backend}/{side}"] for side in SIDES))


def _tables(runner: Harness, taken: Measured, calls: Samples | None = None) -> list[Table]:
    head = ["backend", "step", "modules", "integrated", "times as fast", "99% interval"]
    rows = [head + ["calls alone"] * (calls is not None)]
    for target in runner.targets:
        for step, sides in taken.items():
            times = [harness.format_time(sides[f"{target.name}/{side}"]) for side in SIDES]
            cells = [target.name, str(step), *times, *harness.speedup_cells(_architecture(sides, target.name))]
            if calls is not None:
                cells.append(harness.share_cells(statistics.compare(sides[f"{target.name}/modules"], calls))[0])
            rows.append(cells)
    made = [Table(rows)]
    if runner.reference is not None and runner.kernels:
        made.append(_apart(runner, taken))
    return made


def _apart(runner: Harness, taken: Measured) -> Table:
    """Return ops and architecture apart: {reference, kernels} x {modules, integrated}, times as fast."""
    rows = [["backend", "step", "ops, in modules", "ops, integrated", "architecture, on the reference",
             "architecture, on the kernels", "both"]]  # fmt: skip
    for target in runner.kernels:
        for step, sides in taken.items():
            like = f"{target.name}:{library_threads()}"
            like = like if f"{like}/modules" in sides else target.name
            pairs = (
                ("reference/modules", f"{like}/modules"), ("reference/integrated", f"{like}/integrated"),
                ("reference/modules", "reference/integrated"), (f"{target.name}/modules", f"{target.name}/integrated"),
                ("reference/modules", f"{target.name}/integrated"),
            )  # fmt: skip
            cells = [harness.speedup_cells(statistics.compare(sides[a], sides[b])) for a, b in pairs]
            rows.append([target.name, str(step), *("{} ({})".format(*pair) for pair in cells)])
    threads = library_threads()
    used = ", ".join(target.label for target in runner.kernels)
    caption = (
        f"Times as fast with the 99% interval: ops at equal architecture (on a CPU both with {threads} "
        f"thread{'s' * (threads != 1)}, as NumPy has), architecture at equal ops ({used}), and both together"
    )
    return Table(rows, caption)
