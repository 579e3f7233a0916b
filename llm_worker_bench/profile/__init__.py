"""The time of prefill and decode by component, and the possible gain of each component.

A prefill step is the whole prompt up to its first token, a decode step one token more of each request. Both go through
the engine: plain, to know how long they really take, and timed, in turn. On the CPU each task of the fused program is
timed inside its parallel region; the reference is timed op by op; on a GPU the timeline of the device is recorded. The
report, as Markdown and as an HTML page, is made from the results alone, so it can be made again from run.json.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from llm_worker_rbee.backends.ops import Batch, KernelTrace, TaskLabel
from llm_worker_rbee.progress import StepProgress

from .. import statistics
from ..backends import kernel_trace
from ..flame_graph import Flame, kernel_flame, leave_out, record_flame, split_regions
from ..results import Recorder, Result
from ..roofline import Limits, Work, backend_limits
from . import timeline
from .counting import WorkCounter, limit_of
from .report import LABELS as LABELS
from .report import classify
from .timing import Spent, Timer, attach, collect_batches
from .workload import PHASES as PHASES
from .workload import Settings, Subject, Workload, make_workload

PER_STEP = ("bytes", "operations", "limit_s")
REGION = "Program.run_timed"  # the function in which the tasks of a program run
Tasks = dict[TaskLabel, Spent]


def run(
    recorder: Recorder, progress: StepProgress, subject: Subject, settings: Settings, flames: dict[str, Flame]
) -> None:
    """Profile a loaded model; flame graphs are added to `flames` as they are recorded."""
    profiler = _Profiler(recorder, progress, subject, settings)
    profiler.report_progress("measuring what the machine can do", 0)
    profiler.limits = backend_limits(subject.model.ops)
    recorder.details["limits"] = profiler.limits.as_json()
    profiler.workload = make_workload(subject, settings)
    profiler.warm_up()
    for number in range(1, settings.repetitions + 1):
        for phase in settings.phases:
            profiler.report_progress(f"repetition {number} of {settings.repetitions}: {phase}", 0)
            profiler.measure(phase)
            profiler.report_progress(f"repetition {number} of {settings.repetitions}: {phase}", 1)
    profiler.measure_limits_again()
    if settings.flame_seconds:
        profiler.record_flames(flames)


@dataclass(slots=True)
class _Profiler:
    recorder: Recorder
    progress: StepProgress
    subject: Subject
    settings: Settings
    limits: Limits = field(init=False)
    workload: Workload = field(init=False)
    timer: Timer = field(default_factory=Timer)
    work: dict[str, dict[str, Counter[Work]]] = field(default_factory=dict)  # phase -> component -> calls by work
    steps: dict[str, int] = field(default_factory=dict)  # phase -> steps of that work
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # phase -> component -> samples
    tasks: dict[str, Tasks] = field(default_factory=dict)  # phase -> the last repetition
    calls: dict[str, dict[str, float]] = field(default_factory=dict)  # phase -> component -> calls of a step
    programs: dict[str, list[list[TaskLabel]]] = field(default_factory=dict)  # on a device: phase -> kernels in order
    durations: dict[str, dict[str, float]] = field(default_factory=dict)  # phase -> component -> of overlapping kernels
    trace: KernelTrace | None = None
    done: float = 0.0

    def report_progress(self, what: str, more: float = 1.0) -> None:
        """Count one unit of progress: a phase of a repetition, or a pass of another kind."""
        self.done += more
        units = self.settings.repetitions + 1 + bool(self.settings.flame_seconds)
        self.progress(what, self.done, units * len(self.settings.phases))

    def measure_limits_again(self) -> None:
        """Take the higher rates: something may have disturbed the first measurement."""
        self.limits = self.limits.best_of(backend_limits(self.subject.model.ops))
        self.recorder.details["limits"] = self.limits.as_json()
        for phase in self.seconds:
            self.add_results(phase)

    def warm_up(self) -> None:
        """Run everything once, and count the work of each step."""
        ops, engine = self.subject.model.ops, self.workload.engine
        counter = WorkCounter(self.subject.model, self.subject.checkpoint, engine.cache)
        self.trace = kernel_trace(ops) if self.subject.model.fused is not None else None
        for phase in self.settings.phases:
            self.report_progress(f"warming up {phase}", 0)
            self.workload.run(phase, lambda: None)
            with (
                attach(engine, self.timer) if self.trace is None else nullcontext(),
                collect_batches(engine, self.timer),
            ):
                ran = self.workload.run(phase, self.timer.reset)
            batches = self.timer.batches[:]
            self.steps[phase] = ran.steps
            self.work[phase] = {}
            for batch in batches:
                for name, works in counter.count(batch).items():
                    self.work[phase].setdefault(name, Counter()).update(works)
            if self.trace is not None:
                self.programs[phase] = [self.kernels_of(batch) for batch in _distinct(batches)]
            self.report_progress(f"warming up {phase}")

    def kernels_of(self, batch: Batch) -> list[TaskLabel]:
        """Return the kernels of a step on a device, in order."""
        fused, tasks = self.subject.model.fused, list[TaskLabel]()
        assert fused is not None
        fused.run_profiled(batch, self.workload.engine.cache.layers, lambda labels, _: tasks.extend(labels))
        return tasks

    def measure(self, phase: str) -> None:
        """Add one repetition: a plain run, and a timed one."""
        plain = self.workload.run(phase, lambda: None)
        tasks, steps, seconds = self.run_timed(phase) if self.trace is None else self.run_traced(phase)
        self.tasks[phase] = tasks
        parts = Counter[str]()
        for label, spent in tasks.items():
            parts[label.component] += spent.seconds / steps  # type: ignore[assignment]
        common = self.common(phase)
        add = self.recorder.add_sample
        add(f"{phase}/step", "s", plain.seconds / plain.steps, **common)
        add(f"{phase}/timed_step", "s", seconds / steps, **common)
        of_step = sum(parts.values()) / (plain.seconds / plain.steps)
        add(f"{phase}/components_of_step", "", of_step, "higher", **common)
        samples = self.seconds.setdefault(phase, {})
        for name, taken in parts.items():
            samples.setdefault(name, []).append(taken)
        self.calls[phase] = _calls(tasks, steps)
        self.durations[phase] = {name: total / steps for name, total in self.durations.get(phase, {}).items()}
        self.add_results(phase)

    def common(self, phase: str) -> dict[str, Any]:
        """Return the fields that all results of a phase have."""
        sizes = {"tokens": self.workload.tokens[phase], "batch": self.settings.batch}
        return {"backend": self.subject.model.ops.name, **sizes}

    def run_timed(self, phase: str) -> tuple[Tasks, int, float]:
        """Return the time of each task, the steps, and their seconds."""
        with attach(self.workload.engine, self.timer):
            ran = self.workload.run(phase, self.timer.reset)
        tasks = self.timer.tasks()
        rest = ran.seconds - sum(spent.seconds for spent in tasks.values())
        tasks.setdefault(TaskLabel(self.workload.rest, "outside of a step"), Spent()).add(max(0.0, rest), ran.steps)
        return tasks, ran.steps, ran.seconds

    def run_traced(self, phase: str) -> tuple[Tasks, int, float]:
        """Return the same from the timeline of a device: of one step after the other, or of one run of a prompt."""
        assert self.trace is not None
        self.trace.start()
        self.workload.run(phase, lambda: None)  # the first launches that a tracer sees are slow
        ran = self.workload.run(phase, self.trace.mark)
        labelled = timeline.label_spans(self.trace.stop_after_mark(), self.programs[phase])
        tasks, steps, seconds = timeline.step_times(labelled)
        self.durations[phase] = timeline.durations(labelled, whole_steps=phase == "decode" and steps > 0)
        rest = tasks.pop(timeline.IDLE, Spent()).seconds
        if phase == "prefill" or not steps:
            tasks = timeline.busy_times(item for item in labelled if item is not None)
            tasks.pop(timeline.IDLE, None)
            steps, seconds = ran.steps, ran.seconds
            rest = max(0.0, seconds - sum(spent.seconds for spent in tasks.values()))
        tasks[TaskLabel("host", "no kernel runs")] = Spent(rest, steps)
        return tasks, steps, seconds

    def add_results(self, phase: str) -> None:
        """Remake the results of all components."""
        spent, calls, common = self.seconds[phase], self.calls[phase], self.common(phase)
        estimates = {name: statistics.estimate(samples).value for name, samples in spent.items()}
        n_steps, total = self.steps[phase], sum(estimates.values())
        for name, samples in spent.items():
            share = estimates[name] / total
            fields: dict[str, Any] = {"share": share, "class": classify(share), "calls": calls.get(name, 0.0)}
            limit = {} if _is_padding(name, spent) else limit_of(name, self.work[phase], self.limits)
            fields |= {key: value / n_steps if key in PER_STEP else value for key, value in limit.items()}
            result = Result.from_samples(f"{phase}/{name}", "s", samples, **common, **fields)
            if limit_s := fields.get("limit_s"):
                busy = max(result.estimate, self.durations[phase].get(name, 0.0))
                fields["percent_of_limit"] = 100 * limit_s / busy if busy else math.nan
            self.recorder.add_result(replace(result, fields={**common, **fields}))
        kernels = {
            f"{LABELS.get(label.component, label.component)}: {label.kernel}": entry.seconds
            for label, entry in self.tasks[phase].items()
        }
        self.recorder.details.setdefault("tasks", {})[phase] = kernels

    def run_into(self, phase: str, tasks: Tasks) -> None:
        """Run a phase, and add the tasks of its programs."""
        self.workload.run(phase, self.timer.reset)
        for label, spent in self.timer.program_tasks().items():
            tasks.setdefault(label, Spent()).add(spent.seconds, spent.calls)

    def record_flames(self, flames: dict[str, Flame]) -> None:
        """Sample the stack in passes of their own; the time of a program is divided among its tasks."""
        for phase in self.settings.phases:
            self.report_progress(f"flame graph of {phase}", 0)
            if self.trace is not None:
                flames[phase] = kernel_flame(_named(self.tasks.get(phase, {})))
                self.report_progress(f"flame graph of {phase}")
                continue
            tasks: Tasks = {}
            with attach(self.workload.engine, self.timer):
                run_phase = partial(self.run_into, phase, tasks)
                flame = record_flame(run_phase, self.settings.flame_seconds, self.settings.py_spy)
            flame = leave_out(flame, self.workload.setup.get(phase, ()))
            flames[phase] = split_regions(flame, REGION, _named(tasks))
            self.report_progress(f"flame graph of {phase}")


def _is_padding(component: str, present: Iterable[str]) -> bool:
    """Return whether a component is decode attention in a step that prefills: it ran for padding and is not counted."""
    return component == "rope_kv_attention" and "attention" in present


def _named(tasks: Tasks) -> dict[tuple[str, str], float]:
    """Return the seconds of tasks by the label of their component and their kernel."""
    return {
        (LABELS.get(label.component, label.component), label.kernel): spent.seconds for label, spent in tasks.items()
    }


def _calls(tasks: Tasks, steps: int) -> dict[str, float]:
    """Return the calls of each component in a step."""
    counts = Counter[str]()
    for label, spent in tasks.items():
        counts[label.component] += spent.calls
    return {name: count / steps for name, count in counts.items()}


def _distinct(batches: list[Batch]) -> list[Batch]:
    """Return one batch of each composition, which decides the kernels."""
    return list({(len(b.ids), len(b.logits_index), len(b.context_len)): b for b in batches}.values())
