"""The timeline of a device, divided by component.

The steps of a profile run as they always do, from CUDA graphs and with kernels that overlap, under a tracer that notes
when each kernel starts and ends. Which component a kernel belongs to is known from one more run of the same step,
launch by launch, with a mark after each component: the names of its kernels, in order, are found again in the time
line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llm_worker_rbee.backends.ops import KernelSpan, TaskLabel

from .timing import Spent

SAMPLING_KERNELS = ("sample", "draw", "argmax", "penal", "logprob", "softmax", "topk", "top_k", "sort", "candidate")
COPIES = ("Memcpy", "Memset")
IDLE = TaskLabel("idle", "no kernel runs")


class Labelled(NamedTuple):
    """A span with its component."""

    label: TaskLabel
    start: float
    end: float


def is_copy(name: str) -> bool:
    """Return whether a span is a copy, not a kernel."""
    return name.startswith(COPIES)


def label_spans(spans: Sequence[KernelSpan], programs: Iterable[Sequence[TaskLabel]]) -> list[Labelled | None]:
    """Return the spans with their labels, and None before each whole forward pass; `programs` are their kernels.

    What lies outside of them are copies, and kernels that sample.
    """
    orders = sorted((tuple(item) for item in programs), key=len, reverse=True)
    kernels = [span for span in spans if not is_copy(span.name)]
    names = [span.name for span in kernels]
    labelled: list[Labelled | None] = [
        Labelled(TaskLabel("copies", span.name.partition(" (")[0]), span.start, span.end)
        for span in spans
        if is_copy(span.name)
    ]
    starts: list[tuple[float, Labelled | None]] = [(item.start, item) for item in labelled if item is not None]
    at = 0
    while at < len(kernels):
        order = next((o for o in orders if [label.kernel for label in o] == names[at : at + len(o)]), None)
        if order is None:
            label = TaskLabel("sampling" if _is_sampling(names[at]) else "copies", names[at])
            starts.append((kernels[at].start, Labelled(label, kernels[at].start, kernels[at].end)))
            at += 1
            continue
        starts.append((kernels[at].start, None))
        starts += [
            (span.start, Labelled(label, span.start, span.end))
            for label, span in zip(order, kernels[at : at + len(order)], strict=True)
        ]
        at += len(order)
    return [item for _, item in sorted(starts, key=lambda pair: (pair[0], pair[1] is not None))]


def _is_sampling(name: str) -> bool:
    return any(word in name.lower() for word in SAMPLING_KERNELS)


def busy_times(spans: Iterable[Labelled]) -> dict[TaskLabel, Spent]:
    """Return the time from the end of the kernel before to the end of each: where two overlap, the first one has it.

    Time in which nothing runs counts as `IDLE`, so the sum is the length of the timeline.
    """
    times: dict[TaskLabel, Spent] = {}
    now: float | None = None
    for label, start, end in spans:
        if now is not None and start > now:
            times.setdefault(IDLE, Spent()).add(start - now, 1)
        begin = start if now is None else max(start, now)
        times.setdefault(label, Spent()).add(max(0.0, end - begin), 1)
        now = end if now is None else max(now, end)
    return times


def durations(labelled: Sequence[Labelled | None], *, whole_steps: bool) -> dict[str, float]:
    """Return the time of each component's kernels from start to end; they overlap the kernels before them."""
    marks = [i for i, item in enumerate(labelled) if item is None]
    inside = labelled[marks[0] : marks[-1]] if whole_steps else labelled
    seconds: dict[str, float] = {}
    for item in inside:
        if item is not None:
            seconds[item.label.component] = seconds.get(item.label.component, 0.0) + item.end - item.start
    return seconds


def step_times(labelled: Sequence[Labelled | None]) -> tuple[dict[TaskLabel, Spent], int, float]:
    """Return the times of all whole steps, how many there are, and their seconds: each ends where the next starts."""
    marks = [i for i, item in enumerate(labelled) if item is None]
    if len(marks) < 2:
        return {}, 0, 0.0
    inside = [item for item in labelled[marks[0] : marks[-1]] if item is not None]
    first, last = (item for item in (labelled[marks[0] + 1], labelled[marks[-1] + 1]) if item is not None)
    times, spans = busy_times(inside), [item.end for item in inside]
    if last.start > max(spans):
        times.setdefault(IDLE, Spent()).add(last.start - max(spans), 1)
    return times, len(marks) - 1, last.start - first.start
