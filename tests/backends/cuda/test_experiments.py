"""The sides of `bench experiments` on the CUDA backend: what is timed against each other computes the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.claims import caches, masks, numpy_model, rope, targets
from benchmarks.claims.harness import Harness, Shape, Step, require_equal
from benchmarks.claims.targets import Target, to_numpy
from llm_worker_bench.results import Recorder
from llm_worker_rbee.backends.cuda import CudaBackend

SHAPE = Shape(d_model=64, n_heads=2, head_dim=32, d_ff=64)
STEPS = [Step("prefill", 5), Step("decode", 4)]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(CudaBackend())


@pytest.fixture(scope="module")
def runner(target: Target) -> Harness:
    return Harness(Recorder("experiments"), lambda *_: None, Path("none"), (target,), shape=SHAPE)


@pytest.mark.parametrize("step", STEPS)
def test_rope_kernel_equals_the_formula(target: Target, runner: Harness, step: Step) -> None:
    """`make_sides` raises if a side differs from the formula."""
    assert set(rope.make_sides(target, runner, step)) == {"formula", "angles", "table"}


@pytest.mark.parametrize("step", STEPS)
def test_caches_are_equal(target: Target, step: Step) -> None:
    inputs = caches.make_inputs(target, SHAPE, step)
    one, other = (make(target, SHAPE, step).attend(*inputs, step.start) for make in caches.CACHES.values())
    require_equal(one, other, 0.0, "caches")


def test_mask_of_the_device_is_that_of_the_reference(target: Target, runner: Harness) -> None:
    for step in STEPS:
        expected = numpy_model.additive_mask(step.context, np.arange(step.start, step.context))
        assert (to_numpy(masks.mask_maker(target, step)()) == expected).all()
    for side in masks.kernel_sides(target, runner, STEPS[0]).values():
        side()


def test_timed_calls_end_with_a_synchronisation(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(type(target.ops), "synchronize", lambda self: calls.append("wait"))
    function, count = target.timed(lambda: calls.append("call"))
    function()
    assert calls == ["call"] * count + ["wait"]
    assert count == targets.DEVICE_CALLS
