"""The time line of a device: kernels found again by the order of their names, and shares that add up."""

from __future__ import annotations

import pytest

from llm_worker_bench.profile.timeline import IDLE, Labelled, busy_times, durations, label_spans, step_times
from llm_worker_rbee.backends.ops import KernelSpan, TaskLabel

PROGRAM = [TaskLabel("qkv", "gemv"), TaskLabel("attention", "decode"), TaskLabel("head", "gemv")]
COPY = "Memcpy HtoD (Pinned -> Device)"


def spans(start: float) -> list[KernelSpan]:
    """A step of 100: a copy, three kernels of which two overlap, sampling, and 12 of nothing."""
    named = [(COPY, 0, 2), ("gemv", 4, 34), ("decode", 30, 50), ("gemv", 52, 80), ("argmax_rows", 80, 90)]
    return [KernelSpan(name, start + begin, start + end) for name, begin, end in named]


def test_label_spans_finds_the_program_by_its_names() -> None:
    line = label_spans([KernelSpan("gemv", -9, -5), *spans(0)], [PROGRAM])
    found = [None if one is None else one.label.component for one in line]
    assert found == ["copies", "copies", None, "qkv", "attention", "head", "sampling"]  # a lone gemv is no program


def test_label_spans_copy_between_kernels_does_not_hide_the_program() -> None:
    between = sorted([*spans(0), KernelSpan(COPY, 40, 41)], key=lambda span: span.start)
    found = [one.label.component for one in label_spans(between, [PROGRAM]) if one is not None]
    assert found == ["copies", "qkv", "attention", "copies", "head", "sampling"]


def test_label_spans_longest_program_wins() -> None:
    line = label_spans(spans(0), [PROGRAM[:1], PROGRAM])
    assert [one.label.component for one in line if one is not None][1:4] == ["qkv", "attention", "head"]


def test_busy_times_gives_overlap_to_the_first_kernel() -> None:
    first, second = TaskLabel("a", ""), TaskLabel("b", "")
    found = busy_times([Labelled(first, 0, 10), Labelled(second, 6, 12), Labelled(first, 15, 16)])
    assert {label: (spent.seconds, spent.calls) for label, spent in found.items()} == {
        first: (11, 2), second: (2, 1), IDLE: (3, 1),
    }  # fmt: skip


def test_step_times_sum_to_the_steps() -> None:
    line = label_spans([span for start in (0, 100, 200) for span in spans(start)], [PROGRAM])
    found, steps, seconds = step_times(line)
    assert (steps, seconds) == (2, 200)
    assert sum(spent.seconds for spent in found.values()) == pytest.approx(seconds)
    assert found[TaskLabel("attention", "decode")].seconds == 2 * 16  # 20 less the 4 that overlap
    assert found[TaskLabel("qkv", "gemv")].calls == 2
    assert found[IDLE].seconds == 2 * (2 + 10 + 2)


def test_durations_hold_what_overlaps() -> None:
    line = label_spans([span for start in (0, 100, 200) for span in spans(start)], [PROGRAM])
    assert durations(line, whole_steps=True)["attention"] == 2 * 20
    assert durations(line, whole_steps=False)["attention"] == 3 * 20


def test_step_times_one_step_has_no_end() -> None:
    assert step_times(label_spans(spans(0), [PROGRAM])) == ({}, 0, 0.0)
