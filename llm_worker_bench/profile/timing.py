"""Timing the parts of a step while an engine runs it.

A `Timer` has the time of wrapped functions, without the wrapped functions that they call, and of the tasks that a fused
forward pass reports. `attach` puts it into an engine: the scheduler, the batch, the forward pass and the sampler are
parts, and the rest of `Engine.step` is the host's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from llm_worker_rbee.backends import reference
from llm_worker_rbee.backends.ops import Array, Backend, Batch, FusedForward, LayerCache, SampleRow, TaskLabel
from llm_worker_rbee.engine.engine import Engine
from llm_worker_rbee.models import Transformer

from .counting import linear_components

Call = Callable[..., Any]
# ops of a model that runs op by op -> component; an op that is not here gets a line of its own, by its name
OP_COMPONENTS = {
    "embed": "embedding",
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "rope_store": "rope_kv_write",
    "attention": "attention",
    "gated": "activation",
    "take": "head",
    "logits": "head",
}
SAMPLING = ("sample", "logprobs")
# functions of the reference that its ops call; what remains of its attention are the values
REFERENCE_PARTS = {
    "rope": "rope",
    "store": "kv_write",
    "gather": "kv_read",
    "attention_scores": "scores",
    "causal_mask": "mask",
    "softmax": "softmax",
}
REFERENCE_OPS = {"attention": "values", "rope_store": "rope"}
HOST, SCHEDULING = TaskLabel("host", "Engine.step"), "scheduling"


@dataclass(slots=True)
class Spent:
    """Time and calls of one task."""

    seconds: float = 0.0
    calls: int = 0

    def add(self, seconds: float, calls: int) -> None:
        self.seconds += seconds
        self.calls += calls


@dataclass(slots=True)
class Timer:
    """Time by task; `batches` holds the batch of each step."""

    batches: list[Batch] = field(default_factory=list)
    _tasks: dict[TaskLabel, Spent] = field(default_factory=dict)
    # by the identity of a program's labels: the labels, seconds and calls of each
    _programs: dict[int, tuple[Sequence[TaskLabel], NDArray[np.float64], NDArray[np.int64]]] = field(
        default_factory=dict
    )
    _inside: list[float] = field(default_factory=list)  # of each open call: the time of calls inside it

    def wrap(self, label: TaskLabel, function: Call, finish: Call | None = None) -> Call:
        """Return the same function, with its own time added to the label; `finish` waits for its result."""
        spent, clock, inside = self._tasks.setdefault(label, Spent()), time.perf_counter, self._inside

        def call(*args: Any, **kwargs: Any) -> Any:
            inside.append(0.0)
            start = clock()
            try:
                result = function(*args, **kwargs)
                if finish is not None:
                    finish()
                return result
            finally:
                taken = clock() - start
                spent.seconds += taken - inside.pop()
                spent.calls += 1
                if inside:
                    inside[-1] += taken

        return call

    def add_tasks(self, labels: Sequence[TaskLabel], seconds: NDArray[np.float64]) -> None:
        """Add the tasks of a program that has run; the same labels come with every run of it."""
        if id(labels) not in self._programs:
            self._programs[id(labels)] = labels, np.zeros(len(labels)), np.zeros(len(labels), np.int64)
        _, sums, calls = self._programs[id(labels)]
        sums += seconds
        calls += seconds > 0
        if self._inside:
            self._inside[-1] += float(seconds.sum())

    def reset(self) -> None:
        """Forget all times."""
        self.batches.clear()
        self._programs.clear()
        for spent in self._tasks.values():
            spent.seconds, spent.calls = 0.0, 0

    def tasks(self) -> dict[TaskLabel, Spent]:
        """Return the time and calls of each task since the last reset."""
        return {label: replace(spent) for label, spent in self._tasks.items() if spent.calls} | self.program_tasks()

    def program_tasks(self) -> dict[TaskLabel, Spent]:
        """Return the tasks of programs alone."""
        tasks: dict[TaskLabel, Spent] = {}
        for labels, seconds, calls in self._programs.values():
            for label, taken, count in zip(labels, seconds.tolist(), calls.tolist(), strict=True):
                if count:
                    tasks.setdefault(label, Spent()).add(taken, count)
        return tasks


class TimedOps:
    """An op table that passes calls on to a backend and times them."""

    def __init__(self, model: Transformer, timer: Timer) -> None:
        self._ops, self._timer, self._is_fused = model.ops, timer, model.fused is not None
        self._linear = {} if self._is_fused else self._linear_calls(model)

    def _linear_calls(self, model: Transformer) -> dict[int, Call]:
        """Return the timed product of each weight."""
        graph = model.graph()
        return {id(node["w"]): self._timed(name, "linear") for node, name in linear_components(graph).items()}

    def _timed(self, component: str, op: str) -> Call:
        finish = self._ops.synchronize if self._ops.has_device_memory else None
        return self._timer.wrap(TaskLabel(component, f"{self._ops.name}.{op}"), getattr(self._ops, op), finish)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        if name in SAMPLING:
            value = self._timed("sampling", name)
        elif not self._is_fused and name == "linear":
            calls = self._linear
            value = lambda x, w, bias=None: calls[id(w)](x, w, bias)  # noqa: E731
        elif not self._is_fused and name in OP_COMPONENTS:
            names = {**OP_COMPONENTS, **(REFERENCE_OPS if self._ops.name == "reference" else {})}
            value = self._timed(names[name], name)
        setattr(self, name, value)
        return value


class TimedForward:
    """A fused forward pass that reports its tasks to a timer."""

    def __init__(self, fused: FusedForward, timer: Timer) -> None:
        self._fused, self._timer = fused, timer
        self.samples = fused.samples

    def sample(self, batch: Batch, kv: Sequence[LayerCache], rows: Sequence[SampleRow]) -> tuple[Array, list[int]]:
        return self._fused.sample(batch, kv, rows, self._timer.add_tasks)

    def __call__(self, batch: Batch, kv: Sequence[LayerCache]) -> Array:
        return self._fused.run_profiled(batch, kv, self._timer.add_tasks)


def timed_model(model: Transformer, timer: Timer) -> Transformer:
    """Return the model with its ops and its forward pass timed."""
    fused = None if model.fused is None else cast(FusedForward, TimedForward(model.fused, timer))
    return replace(model, ops=cast(Backend, TimedOps(model, timer)), fused=fused)


@contextmanager
def collect_batches(engine: Engine, timer: Timer) -> Iterator[None]:
    """Note the batches of an engine's steps, as they are: the engine changes the arrays of one for the next step."""
    build = engine.runner.batch

    def batch(*args: Any, **kwargs: Any) -> Batch:
        inputs: Batch = build(*args, **kwargs)
        timer.batches.append(deepcopy(inputs))
        return inputs

    with _replaced(engine.runner, "batch", batch):
        yield


@contextmanager
def attach(engine: Engine, timer: Timer) -> Iterator[None]:
    """Time the steps of an engine."""
    model, wrap = timed_model(engine.model, timer), timer.wrap
    scheduler, runner = engine.scheduler, engine.runner
    with ExitStack() as stack:
        for owner, name, value in (
            (engine, "model", model),
            (engine, "step", wrap(HOST, engine.step)),
            (engine.pipeline, "is_enabled", False),  # the times of overlapping steps cannot be separated
            (runner, "model", model),
            (runner, "batch", wrap(TaskLabel(SCHEDULING, "ModelRunner.batch"), runner.batch)),
            (scheduler, "schedule", wrap(TaskLabel(SCHEDULING, "Scheduler.schedule"), scheduler.schedule)),
            (scheduler, "update", wrap(TaskLabel(SCHEDULING, "Scheduler.update"), scheduler.update)),
        ):
            stack.enter_context(_replaced(owner, name, value))
        if model.ops.name == "reference":
            for name, component in REFERENCE_PARTS.items():
                label = TaskLabel(component, f"reference.{name}")
                stack.enter_context(_replaced(reference, name, wrap(label, getattr(reference, name))))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for a while; a method of the class is only hidden."""
    before = vars(owner).get(name, owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        restore = partial(delattr, owner, name) if before is owner else partial(setattr, owner, name, before)
        restore()
