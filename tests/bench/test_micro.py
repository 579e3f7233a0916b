"""The micro-benchmarks: their names, shapes and work, that every case runs, and two backends in turn."""

from __future__ import annotations

import math
import re
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from llm_worker_bench import micro, roofline
from llm_worker_bench.micro import (
    Case,
    Measurement,
    TimingPlan,
    calibrate,
    cases,
    components,
    kernels,
    measure,
    ops,
    seconds_per_call,
)
from llm_worker_bench.micro.timing import MAX_GRAPH_CALLS, repeated_calls
from llm_worker_bench.results import Recorder
from llm_worker_bench.synthetic import random_tensor
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.weights.quants import BLOCK_TYPES

QUICK = TimingPlan(seconds=0.0, min_samples=2, max_samples=2, warm_up_s=0.0)


def by_name() -> dict[str, Case]:
    return {case.name: case for case in micro.op_cases()}


def test_op_cases_cover_every_weight_type() -> None:
    names = by_name()
    for kind in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "IQ1_S", "IQ4_NL", "TQ1_0", "MXFP4"):
        assert {f"linear/{kind}/1", f"linear/{kind}/128", f"dequantize/{kind}"} <= set(names)
    assert len(names) == len(list(micro.op_cases()))
    assert not [name for name in names if re.search(r"/(I8|I16|I32|I64|F64)(/|$)", name)]


@pytest.mark.parametrize("case", [c for c in micro.op_cases() if "linear" not in c.name], ids=lambda c: c.name)
def test_op_case_runs_on_the_reference(case: Case) -> None:
    function = case.make(case.select_ops(ReferenceBackend()))
    function()
    assert case.work.bytes > 0
    assert math.isfinite(case.work.operations)


@pytest.mark.parametrize("family", ["linear/Q4_0", "linear/Q6_K", "linear/BF16", "linear/IQ2_XS", "linear/F32"])
def test_linear_case_equals_dequantized_product(family: str) -> None:
    kind = BLOCK_TYPES[family.split("/")[1]]
    product: Any = by_name()[f"{family}/1"].make(ReferenceBackend())()
    weight = random_tensor(kind, (ops.LINEAR_ROWS, ops.LINEAR_COLUMNS)).dequantize()
    x = np.random.default_rng(7).standard_normal(cases.RANDOM_PERIOD, np.float32)[None, : ops.LINEAR_COLUMNS]
    assert np.isfinite(product).all()
    np.testing.assert_allclose(product, x @ weight.T, rtol=1e-3, atol=1e-3)


class OnlyTheOpTable:
    """A backend that has the ops and nothing beside them."""

    name = "fast"

    def __getattr__(self, name: str) -> Any:
        if name in ("store", "gather", "dequantize", "tokenizer", "scheduler"):
            raise AttributeError(name)
        return getattr(ReferenceBackend(), name)


def test_select_ops_missing_function_falls_back_to_reference() -> None:
    fast = OnlyTheOpTable()
    ran_on = {
        case.name: case.select_ops(fast).name
        for case in [*micro.suite_cases(), *micro.op_cases(), *micro.scheduler_cases(), *micro.model_file_cases()]
    }
    homes = {family: {ran_on[n] for n in names} for family, names in groupby(ran_on, lambda n: n.split("/")[0])}
    assert homes["dequantize"] == homes["gguf_open"] == homes["kv_cache_read"] == {"reference"}
    assert homes["scheduler"] == homes["tokenizer"] == {"reference"}
    assert homes["products"] == homes["rope_forward"] == homes["causal_mask"] == {"fast"}
    assert homes["qkv_projection"] == homes["full_attention"] == homes["linear"] == homes["sampling"] == {"fast"}


def test_kernel_cases_count_multiply_adds_and_bytes_of_the_file() -> None:
    cases = {case.name: case for case in micro.kernel_cases()}
    assert len(cases) == len(list(micro.kernel_cases()))
    assert {case.backend for case in cases.values()} == {"cpu"}
    rows, columns = kernels.KERNEL_SHAPE
    q4_0 = cases["kernel/matmul/Q4_0/16"].work
    assert q4_0 == (rows * columns // 32 * 18 + 4 * 16 * (rows + columns), 2 * 16 * rows * columns, None, "int8")
    assert cases["kernel/matmul_two_term/Q6_K/1"].work.operations == 2 * cases["kernel/matmul/Q6_K/1"].work.operations
    decode, prefill = (cases[f"kernel/attention/9x64/{n}"].work for n in ("1@4096", "512@512"))
    assert decode.operations == 2 * 2 * 4096 * 9 * 64  # a product with each key and with each value
    assert prefill.operations == 2 * 2 * (512 * 513 // 2) * 9 * 64
    assert decode.bytes == 2 * 2 * 4096 * 3 * 64 + 2 * 4 * 9 * 64


@pytest.mark.parametrize("name", ["Q4_0/1", "Q8_0/3", "F16/1"])
def test_kernel_matmul_equals_dequantized_product(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "KERNEL_SHAPE", (48, 256))
    monkeypatch.setattr(kernels, "KERNEL_TOKENS", (1, 3))
    kernels._kernel_weight.cache_clear()
    (case,) = [case for case in micro.kernel_cases() if case.name == f"kernel/matmul/{name}"]
    kind, tokens = name.split("/")
    product: Any = case.make(CpuBackend())()
    weight = random_tensor(BLOCK_TYPES[kind], (48, 256)).dequantize()
    np.testing.assert_allclose(product, roofline._random(int(tokens), 256) @ weight.T, atol=0.05)
    kernels._kernel_weight.cache_clear()  # of the wrong shape for others


def test_kernel_attention_equals_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "KERNEL_CONTEXTS", {(4, 2, 32): ((3, 40),)})
    (case,) = [case for case in micro.kernel_cases() if "attention" in case.name]
    assert case.name == "kernel/attention/4x32/3@40"
    results: list[Any] = [case.make(backend)() for backend in (CpuBackend(), ReferenceBackend())]
    np.testing.assert_allclose(*results, atol=2e-3)  # the CPU's keys and values are float16


def test_run_names_the_instruction_set_and_leaves_kernels_of_the_cpu_out() -> None:
    selected = micro.select("^(rms_norm/1|kernel/quantize/1)$")
    forced, reference = Recorder("micro"), Recorder("micro")
    micro.run(forced, lambda *_: None, selected, ["cpu"], QUICK, rounds=2, isa="portable")
    assert [r.key for r in forced.results()] == [("rms_norm/1", "cpu:portable"), ("kernel/quantize/1", "cpu:portable")]
    assert [len(r.fields["rounds"]) for r in forced.results()] == [1, 1]  # the quieter of two
    micro.run(reference, lambda *_: None, selected, ["reference"], QUICK, rounds=1)
    assert [r.key for r in reference.results()] == [("rms_norm/1", "reference")]
    assert reference.details["left_out"] == {"kernel/quantize/1": "only the backend cpu has it"}


@pytest.mark.parametrize("arrays", [False, True])
def test_decoding_scheduler_step_adds_a_token_to_each_request(arrays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "RESTART_CONTEXT", components.MAX_PROMPT + 40)
    made = micro.DecodingScheduler(5)
    step = partial(made.step, arrays=arrays)
    first = made.scheduler
    prompts = [request.num_prompt_tokens for request in first.running]
    assert len(prompts) == 5
    assert components.MIN_PROMPT <= min(prompts) < max(prompts) <= components.MAX_PROMPT
    for n in range(2, 40):
        step()
        assert [len(request.tokens) for request in made.scheduler.running] == [n] * 5
        made.scheduler.check()
    assert made.scheduler is first
    step()  # the answers are complete: all begin anew
    assert made.scheduler is not first
    assert [len(request.tokens) for request in made.scheduler.running] == [1] * 5


def test_select_without_match_raises() -> None:
    assert [case.name for case in micro.select("^rope_forward/(1|8)$")] == ["rope_forward/1", "rope_forward/8"]
    assert {case.name for case in micro.select("tokenizer|gguf")} == {
        "tokenizer/encode",
        "tokenizer/decode",
        "gguf_open",
    }
    assert [case.name for case in micro.select("scheduler")] == [
        *(f"scheduler/{n}" for n in (1, 16, 64, 256)),
        "scheduler_batch/64",
    ]
    assert [case.name for case in micro.select("products")] == ["products/1", "products/16", "products/128"]
    with pytest.raises(InvalidRequestError, match=r"'ropes' matches no benchmark.*rope_forward"):
        micro.select("ropes")
    with pytest.raises(InvalidRequestError, match="not a regular expression"):
        micro.select("[")


def test_run_results_hold_limit_and_rounds() -> None:
    recorder = Recorder("micro")
    reported: list[tuple[str, float, float]] = []
    selected = micro.select("^(rms_norm/1|sampling/greedy)$")
    micro.run(recorder, lambda *step: reported.append(step), selected, ["reference"], QUICK)
    results = recorder.results()
    assert [r.name for r in results] == ["rms_norm/1", "sampling/greedy"]
    for result, case in zip(results, selected, strict=True):
        f = result.fields
        assert (result.unit, f["backend"], f["rounds"]) == ("s", "reference", [2] * (micro.ROUNDS // 2))
        assert len(result.samples) == len(f["set_aside"]) == micro.ROUNDS
        rounds = np.reshape([*result.samples, *f["set_aside"]], (-1, 2)).mean(axis=1)
        assert rounds[: micro.ROUNDS // 2].max() <= rounds[micro.ROUNDS // 2 :].min()  # the quieter half is kept
        assert f["limit_s"] == roofline.measure_limits(roofline.library_threads()).min_seconds(case.work)
        assert f["percent_of_limit"] == pytest.approx(100 * f["limit_s"] / result.estimate)
        assert sum(f["outliers"].values()) <= micro.ROUNDS
        assert f["bound_by"] in ("memory", "arithmetic")
    assert reported[0][1:] == (0, 2 * micro.ROUNDS)
    assert all(0 <= done <= total for _, done, total in reported)
    assert recorder.details["limits"]["bandwidth"]


def test_rename_one_family() -> None:
    renamed = micro.rename(micro.select("^causal_mask_cached/"), "causal_mask")
    assert [case.name for case in renamed] == [f"causal_mask/{n}" for n in (8, 32, 128, 512)]
    with pytest.raises(InvalidRequestError, match="renames one family, and --filter selects rms_norm, swiglu"):
        micro.rename(micro.select("rms_norm|swiglu"), "causal_mask")


def test_run_same_backend_twice_numbers_the_sides() -> None:
    recorder = Recorder("micro")
    micro.run(recorder, lambda *_: None, micro.select("^rms_norm/1$"), ["reference", "reference"], QUICK)
    assert [r.key for r in recorder.results()] == [("rms_norm/1", "reference#1"), ("rms_norm/1", "reference#2")]
    (pair,) = micro.compare_backends(recorder.results())
    assert pair.before.fields["backend"] == "reference#1"
    assert pair.after.fields["backend"] == "reference#2"


def test_quietest_rounds_are_chosen_over_both_sides() -> None:
    rounds = [[Measurement(1, [a] * 3), Measurement(1, [b] * 3)] for a, b in ((1, 9), (5, 1), (2, 2), (9, 9), (3, 3))]
    assert micro.quietest_rounds(rounds) == [1, 2, 4]


def test_measure_samples_functions_in_turn() -> None:
    calls: list[str] = []
    functions = [lambda: calls.append("a"), lambda: calls.append("b")]
    plan = TimingPlan(seconds=0.0, min_samples=4, max_samples=4, warm_up_s=0.0)
    taken = measure(functions, plan)
    once = [one.iterations for one in taken]
    rounds = "".join(calls)[-4 * sum(once) :]
    a, b = "a" * once[0], "b" * once[1]
    assert rounds == (a + b) + (b + a) + (a + b) + (b + a)
    assert [len(one.samples) for one in taken] == [4, 4]


def test_repeated_calls_are_timed_by_call() -> None:
    calls: list[int] = []

    def prepare(function: micro.Function, count: int) -> micro.Function:
        return lambda: [function() for _ in range(count)]

    made = repeated_calls(lambda: calls.append(1), prepare)
    assert made.count == MAX_GRAPH_CALLS  # an empty function fits more often into the time
    taken = measure([made], TimingPlan(seconds=0.0, min_samples=2, max_samples=2, warm_up_s=0.0))[0]
    assert taken.calls_each == made.count
    before = len(calls)
    assert seconds_per_call(made, 2) < 1e-3
    assert len(calls) - before == 2 * made.count


def test_calibrate_fast_function_gets_many_iterations() -> None:
    assert calibrate(lambda: None, TimingPlan(seconds=0.1, warm_up_s=0.0)) > 100
