"""Step times on simulated devices, from made-up times, never from this machine's: prediction, robustness, budgets."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from llm_worker_rbee.engine.request import Request, ScheduledTokens
from llm_worker_rbee.engine.step_time import (
    FIRST_BUDGET,
    MAX_SIZES,
    SAMPLES_PER_SIZE,
    StepSize,
    StepTimeModel,
    chunk_context,
    solve_nonnegative,
    step_size,
)
from llm_worker_rbee.sampling_params import SamplingParams

TARGET_S = 0.1
GPU: dict[str, Any] = {"constant": 5e-3, "per_token": 30e-6, "query_tile": 64}
LAUNCH_BOUND: dict[str, Any] = {**GPU, "constant": 2e-3, "prefill_constant": 18e-3, "per_context": 1e-7}
CPU: dict[str, Any] = {"per_token": 2e-3, "per_context": 1e-7}


class Device:
    """A machine whose steps take a known time, with noise, and outliers that take `outlier` times as long."""

    def __init__(
        self, constant: float = 0.0, prefill_constant: float = 0.0, per_token: float = 0.0, per_context: float = 0.0,
        query_tile: int = 1, noise: float = 0.03, outliers: float = 0.0, outlier: float = 100.0,
    ) -> None:  # fmt: skip
        self.costs = constant, prefill_constant, per_token, per_context
        self.query_tile, self.noise, self.outliers, self.outlier = query_tile, noise, outliers, outlier
        self.slowdown = 1.0
        self._random = random.Random(11)

    def exact(self, size: StepSize) -> float:
        constant, prefill_constant, per_token, per_context = self.costs
        fixed = constant + (0.0 if size.is_uniform else prefill_constant)
        return self.slowdown * (fixed + per_token * size.tokens + per_context * size.context)

    def seconds(self, size: StepSize) -> float:
        factor = self.outlier if self._random.random() < self.outliers else 1.0
        return self.exact(size) * self._random.lognormvariate(0.0, self.noise) * factor


def decode(requests: int, context: int = 300) -> StepSize:
    return StepSize("decode", True, requests, requests * context)


def beside(decodes: StepSize, tokens: int, query_tile: int, start: int = 0) -> StepSize:
    context = decodes.context + chunk_context(start, tokens, query_tile)
    return StepSize("mixed" if decodes.tokens else "prefill", False, decodes.tokens + tokens, context)


def run_decodes(model: StepTimeModel, device: Device, steps: int, *sizes: int) -> None:
    for i in range(steps):
        size = decode(sizes[i % len(sizes)], 300 + i)
        model.observe(size, device.seconds(size))


def run_prefills(
    model: StepTimeModel,
    device: Device,
    steps: int,
    requests: int = 16,
    max_tokens: int = 8192,
    target: float = TARGET_S,
) -> list[StepSize]:
    """Steps of as many prompt tokens as the model allows beside decodes, as an engine makes them."""
    made = []
    for i in range(steps):
        decodes = decode(requests, 300 + i)
        count = max(16, model.max_prefill_tokens(target, decodes, 0, max_tokens - requests))
        made.append(beside(decodes, count, device.query_tile))
        model.observe(made[-1], device.seconds(made[-1]))
    return made


def in_time(device: Device, size: StepSize, target: float = TARGET_S) -> bool:
    return 0.6 * target < device.exact(size) < target


# ---- the size of a step


def scheduled(start: int, stop: int, prompt: int = 1000, drafts: int = 0) -> ScheduledTokens:
    request = Request([1] * prompt, SamplingParams().resolve(), 10, 0, frozenset())
    request.drafts = [1] * drafts
    return ScheduledTokens(request, start, stop, start)


@pytest.mark.parametrize("tile", [1, 64])
def test_step_size_counts_tokens_and_keys(tile: int) -> None:
    decodes = [scheduled(99, 100), scheduled(299, 300)]
    assert step_size(decodes, tile) == ("decode", True, 2, 400)
    prompt = scheduled(0, 128)
    keys = sum(range(1, 129)) if tile == 1 else 2 * 64.5
    assert step_size([prompt], tile) == ("prefill", False, 128, keys)
    assert step_size([*decodes, prompt], tile) == ("mixed", False, 130, 400 + keys)


def test_step_size_with_drafts_is_decode_of_several_tokens() -> None:
    size = step_size([scheduled(99, 104, drafts=4), scheduled(299, 300)], 64)
    assert size == ("decode", False, 6, 99 + 3 + 300)


# ---- prediction


@pytest.mark.parametrize("costs", [GPU, LAUNCH_BOUND, CPU], ids=["gpu", "launch-bound gpu", "cpu"])
@pytest.mark.parametrize("outliers", [0.0, 0.01])
def test_model_predicts_steps_of_all_kinds(costs: dict[str, Any], outliers: float) -> None:
    device = Device(**costs, outliers=outliers)
    model = StepTimeModel(device.query_tile)
    run_decodes(model, device, 100, 1, 8, 16, 60)
    run_prefills(model, device, 100)
    run_decodes(model, device, 200, 16, 60)
    prompt = StepSize("prefill", False, 500, chunk_context(0, 500, device.query_tile))
    for size in (decode(16), decode(60, 400), prompt, beside(decode(16), 300, device.query_tile)):
        assert model.predict(size) == pytest.approx(device.exact(size), rel=0.2)


def test_model_separates_cost_of_context() -> None:
    """Long contexts of few requests, and short ones of many: a token costs little, its context much."""
    device = Device(constant=1e-3, per_token=1e-5, per_context=1e-6)
    model = StepTimeModel()
    draw = random.Random(3)
    for _ in range(300):
        size = decode(draw.choice([1, 4, 16, 64]), draw.randrange(10, 8000))
        model.observe(size, device.seconds(size))
    assert model.coefficients is not None
    assert model.coefficients.per_context == pytest.approx(1e-6, rel=0.1)
    assert model.predict(decode(32, 4000)) == pytest.approx(device.exact(decode(32, 4000)), rel=0.1)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("factor", [10, 1000])
def test_slow_steps_change_nothing(count: int, factor: float) -> None:
    device = Device(**GPU, noise=0.0)
    model = StepTimeModel(64)
    run_decodes(model, device, 50, 1, 16, 64)
    run_prefills(model, device, 50)
    sizes = decode(64, 350), beside(decode(16, 350), 1000, 64)
    before = [model.predict(size) for size in sizes]
    for _ in range(8):
        model.observe(sizes[1], device.exact(sizes[1]))
    for size in sizes * count:
        model.observe(size, factor * device.exact(size))
    run_decodes(model, device, 40, 64)
    assert [model.predict(size) for size in sizes] == pytest.approx(before, rel=0.02)


def test_steps_too_fast_to_be_true_change_nothing() -> None:
    device = Device(**GPU, noise=0.0)
    model = StepTimeModel(64)
    run_decodes(model, device, 50, 1, 16, 64)
    for size in (decode(64), decode(128), decode(128)):  # a size that is known, and one that is not
        model.observe(size, 0.0)  # a clock that stood still
    run_decodes(model, device, 40, 1, 16, 64)
    assert model.predict(decode(64)) == pytest.approx(device.exact(decode(64)), rel=0.1)


def test_first_step_of_each_size_is_not_learnt() -> None:
    model = StepTimeModel()
    for tokens in (1, 2, 3, 5, 9, 17, 33, 65, 100, 129):
        model.observe(decode(tokens), 20.0)  # a compilation
    assert model.coefficients is None
    model.observe(StepSize("prefill", False, 100, 5050), 20.0)  # the same number of tokens, by other kernels
    assert model.coefficients is None
    model.observe(decode(100), 0.1)
    assert model.predict(decode(100)) == pytest.approx(0.1, rel=0.01)


def test_first_step_of_a_size_counts_once_warmed_up() -> None:
    model, device = StepTimeModel(), Device(**GPU)
    model.ignores_first_runs = False
    model.observe(decode(8), device.exact(decode(8)))
    assert model.predict(decode(8)) == pytest.approx(device.exact(decode(8)), rel=0.1)


@pytest.mark.parametrize("slowdown", [0.25, 2.0, 8.0])
def test_lasting_change_of_speed_is_followed(slowdown: float) -> None:
    device = Device(**GPU)
    model = StepTimeModel(64)
    run_decodes(model, device, 200, 16, 64)
    run_prefills(model, device, 200)
    device.slowdown = slowdown
    run_decodes(model, device, 40, 16)
    assert model.predict(decode(16, 330)) == pytest.approx(device.exact(decode(16, 330)), rel=0.15)
    target = TARGET_S * slowdown  # else a slow device could not meet it at all
    last = run_prefills(model, device, 40, target=target)[-1]
    assert model.predict(last) == pytest.approx(device.exact(last), rel=0.15)
    assert in_time(device, last, target)


def test_prefill_is_remembered_over_many_decodes() -> None:
    device = Device(**GPU)
    model = StepTimeModel(64)
    run_prefills(model, device, 40)
    run_decodes(model, device, 5000, 16)
    size = run_prefills(model, device, 1)[0]
    assert in_time(device, size)
    assert size.tokens > 1000


def test_memory_is_bounded() -> None:
    model, draw = StepTimeModel(64), random.Random(5)
    for _ in range(5000):
        size = beside(decode(draw.randrange(1, 1024), draw.randrange(1, 9000)), draw.randrange(2, 8192), 64)
        model.observe(size, draw.random())
    assert len(model._sizes) == MAX_SIZES
    assert all(len(samples.samples) <= SAMPLES_PER_SIZE for samples in model._sizes.values())
    assert len(model._seen) <= 2 * 4 * 14
    assert model.coefficients is not None
    assert all(cost >= 0 for cost in model.coefficients)


def test_totals_compare_predicted_with_measured() -> None:
    device = Device(**GPU)
    model = StepTimeModel(64)
    run_decodes(model, device, 2, 16)  # the first is not learnt, the second not predicted
    assert model.totals["decode"].num_steps == 0
    run_decodes(model, device, 100, 16)
    run_prefills(model, device, 50)
    decodes, mixed = model.totals["decode"], model.totals["mixed"]
    assert (decodes.num_steps, mixed.num_steps, model.totals["prefill"].num_steps) == (100, 50, 0)
    assert decodes.predicted_s == pytest.approx(decodes.measured_s, rel=0.05)
    assert decodes.error_s < 0.05 * decodes.measured_s
    assert abs(mixed.predicted_s - mixed.measured_s) <= mixed.error_s < mixed.measured_s


# ---- budgets


@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize("costs", [GPU, LAUNCH_BOUND, CPU], ids=["gpu", "launch-bound gpu", "cpu"])
def test_prefill_fills_the_target(costs: dict[str, Any], requests: int) -> None:
    device = Device(**costs, outliers=0.01)
    model = StepTimeModel(device.query_tile)
    run_decodes(model, device, 30, requests)
    sizes = run_prefills(model, device, 200, requests)
    assert all(in_time(device, size) for size in sizes[30:])
    assert all(device.exact(size) < 1.3 * TARGET_S for size in sizes), "a large first guess would be felt"


def test_prefill_from_nothing_starts_small() -> None:
    device = Device(**GPU)
    model = StepTimeModel(64)
    assert model.max_prefill_tokens(TARGET_S, decode(16), 0, 8192) == FIRST_BUDGET
    assert model.max_prefill_tokens(TARGET_S, decode(16), 0, 30) == 30
    sizes = run_prefills(model, device, 20)
    assert in_time(device, sizes[-1])
    assert all(device.exact(size) < TARGET_S for size in sizes)


def test_step_grows_by_a_limited_factor() -> None:
    """Steps of one token tell little of those of thousands."""
    device = Device(constant=1e-3, per_token=1e-7)
    model = StepTimeModel(64)
    run_decodes(model, device, 50, 1, 2)
    assert model.max_prefill_tokens(TARGET_S, decode(1), 0, 8192) == FIRST_BUDGET
    sizes = run_prefills(model, device, 30, 1)
    growth = [after.tokens / before.tokens for before, after in pairwise(sizes)]
    assert max(growth) <= 4
    assert sizes[-1].tokens == 8192


def test_gpu_beyond_target_still_prefills_many_tokens() -> None:
    """A step that is mostly constant: a few tokens would take as long as many, and the target cannot be met."""
    device = Device(**GPU)
    model = StepTimeModel(64)
    run_decodes(model, device, 50, 1, 16, 64)
    size = run_prefills(model, device, 100, target=0.004)[-1]
    assert size.tokens > 16 + 30
    assert device.exact(size) < 1.5 * device.exact(decode(16))


def test_budget_shrinks_with_context_of_prompt_and_decodes() -> None:
    device = Device(constant=1e-3, per_token=1e-5, per_context=1e-7, noise=0.0)
    model = StepTimeModel()
    draw = random.Random(3)
    for _ in range(300):
        size = beside(decode(16, draw.randrange(10, 4000)), draw.randrange(2, 2000), 1, start=draw.randrange(6000))
        model.observe(size, device.seconds(size))
    few, many = decode(16, 100), decode(16, 20_000)
    found = [
        (decodes, start, model.max_prefill_tokens(TARGET_S, decodes, start, 8192))
        for decodes in (few, many) for start in (0, 6000)
    ]  # fmt: skip
    counts = [count for _, _, count in found]
    assert counts[0] > counts[1] > counts[3]
    assert counts[0] > counts[2] > counts[3]
    for decodes, start, count in found:
        assert device.exact(beside(decodes, count, 1, start)) == pytest.approx(0.8 * TARGET_S, rel=0.05)


# ---- equations


def test_solve_nonnegative_drops_negative_unknowns() -> None:
    assert solve_nonnegative([[2.0, 0.0, 4.0], [0.0, 4.0, 2.0]]) == [2.0, 0.5]
    # least squares of y = a + b x through (1, 3), (2, 1): a = 5, b = -2; without b the mean is left
    assert solve_nonnegative([[2.0, 3.0, 4.0], [3.0, 5.0, 5.0]]) == [2.0, 0.0]
    assert solve_nonnegative([[0.0, 0.0, 0.0], [0.0, 4.0, 2.0]]) == [0.0, 0.5]


def test_solve_nonnegative_leaves_undetermined_unknown_at_zero() -> None:
    """Twice the same column: one of the two explains all."""
    first, second = solve_nonnegative([[1.0, 1.0, 3.0], [1.0, 1.0, 3.0]])
    assert (first + second, min(first, second)) == (3.0, 0.0)
