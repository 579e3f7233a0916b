"""Timing: functions are sampled in turn, and a fast one is called many times a sample."""

from __future__ import annotations

from llm_worker_rbee.bench.timing import Plan, calibrate, measure


def test_measure_samples_functions_in_turn() -> None:
    calls: list[str] = []
    functions = [lambda: calls.append("a"), lambda: calls.append("b")]
    plan = Plan(seconds=0.0, min_samples=4, max_samples=4, warm_up_s=0.0)
    taken = measure(functions, plan)
    once = [one.iterations for one in taken]
    rounds = "".join(calls)[-4 * sum(once) :]
    a, b = "a" * once[0], "b" * once[1]
    assert rounds == (a + b) + (b + a) + (a + b) + (b + a)
    assert [len(one.samples) for one in taken] == [4, 4]


def test_calibrate_fast_function_gets_many_iterations() -> None:
    assert calibrate(lambda: None, Plan(seconds=0.1, warm_up_s=0.0)) > 100
