"""Profiles: the timeline of the device, and which of its kernels belong to which component.

A tracer (CUPTI, through PyTorch) notes when each kernel starts and ends, in CUDA graphs too. To know the components a
step is launched kernel by kernel with a tiny kernel after each of them, which stands between theirs in the timeline.
Under the interpreter a launch returns when it has been computed, so the time between two marks is one component's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from ..ops import KernelSpan, Profiler, TaskLabel
from .device import is_interpreted

MARK = "spin_kernel"  # of `torch.cuda._sleep`
COPIES = ("Memcpy", "Memset")


class Marked(Protocol):
    """A forward that calls `mark` with each component it has launched."""

    mark: Callable[[str], None]


class CudaTrace:
    """Traces the kernels and copies of all streams."""

    def __init__(self) -> None:
        self._profiler: Any = None

    def start(self) -> None:
        kinds = [torch.profiler.ProfilerActivity.CUDA]
        self._profiler = torch.profiler.profile(activities=kinds, acc_events=True)  # otherwise it warns
        torch.cuda.synchronize()
        self._profiler.start()

    def mark(self) -> None:
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]

    def stop(self) -> list[KernelSpan]:
        torch.cuda.synchronize()
        self._profiler.stop()
        events = [
            event
            for event in self._profiler.profiler.kineto_results.events()
            if event.device_type() == torch._C._autograd.DeviceType.CUDA
        ]
        spans = [
            KernelSpan(event.name(), event.start_ns() / 1e9, (event.start_ns() + event.duration_ns()) / 1e9)
            for event in events
        ]
        return sorted(spans, key=lambda span: span.start)

    def stop_after_mark(self) -> list[KernelSpan]:
        spans = self.stop()
        last = max((i for i, span in enumerate(spans) if MARK in span.name), default=-1)
        return spans[last + 1 :]


def run(forward: Marked, launch: Callable[[], torch.Tensor], profiler: Profiler) -> torch.Tensor:
    """Launch a step and tell the profiler the time of each of its kernels; under the interpreter, of each component."""
    before = forward.mark
    try:
        return (_run_interpreted if is_interpreted() else _run_traced)(forward, launch, profiler)
    finally:
        forward.mark = before


def _run_interpreted(forward: Marked, launch: Callable[[], torch.Tensor], profiler: Profiler) -> torch.Tensor:
    labels, times = list[TaskLabel](), [time.perf_counter()]

    def mark(component: str) -> None:
        labels.append(TaskLabel(component, component))
        times.append(time.perf_counter())

    forward.mark = mark
    result = launch()
    profiler(tuple(labels), np.diff(np.array(times)))
    return result


def _run_traced(forward: Marked, launch: Callable[[], torch.Tensor], profiler: Profiler) -> torch.Tensor:
    components = list[str]()

    def mark(component: str) -> None:
        components.append(component)
        trace.mark()

    forward.mark = mark
    trace = CudaTrace()
    trace.start()
    result = launch()
    spans = [span for span in trace.stop() if not span.name.startswith(COPIES)]
    labels, seconds, at = list[TaskLabel](), list[float](), 0
    for span in spans:
        if MARK in span.name:
            at += 1
        elif 0 < at < len(components):  # before the first mark are copies of the inputs
            labels.append(TaskLabel(components[at], span.name))
            seconds.append(span.end - span.start)
    profiler(tuple(labels), np.array(seconds))
    return result
