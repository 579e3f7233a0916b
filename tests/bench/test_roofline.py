"""Limits of the machine: which of two times bounds a call, rates that are measured; a model's matrix products alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from llm_worker_bench import roofline
from llm_worker_bench.roofline import Limits, Work
from llm_worker_bench.synthetic import Shape, Spec, checkpoint
from llm_worker_rbee.backends.cpu import CpuBackend, program
from llm_worker_rbee.backends.cpu.kernels import quantize_activations
from llm_worker_rbee.backends.cpu.kernels.program import Step
from llm_worker_rbee.backends.cpu.linear import linear_tasks
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.models import Transformer, load_model, read_model_config

cpu = CpuBackend()
SHAPE = Shape(2, 64, 4, 2, 96, 300, 320)
LIMITS = Limits(1, ((1 << 20, 4e9), (1 << 22, 2e9)), 1e9)


def test_limits_min_seconds_is_the_larger_time() -> None:
    assert LIMITS.min_seconds(Work(bytes=1 << 20)) == pytest.approx((1 << 20) / 4e9)
    assert LIMITS.min_seconds(Work(bytes=1 << 21)) == pytest.approx((1 << 21) / 3e9)  # half way between the sizes
    assert LIMITS.min_seconds(Work(bytes=1 << 30)) == pytest.approx((1 << 30) / 2e9)
    assert LIMITS.min_seconds(Work(bytes=1 << 20, resident=1 << 22)) == pytest.approx((1 << 20) / 2e9)
    assert LIMITS.min_seconds(Work(bytes=8, operations=1e9)) == pytest.approx(1.0)
    assert LIMITS.bound_by(Work(bytes=8, operations=1e9)) == "arithmetic"
    assert LIMITS.bound_by(Work(bytes=1e9, operations=8)) == "memory"
    assert LIMITS.memory_bandwidth == 2e9


def test_limits_rate_is_that_of_the_arithmetic() -> None:
    limits = Limits(1, ((1 << 20, 4e9),), 1e9, (("int8", 8e9),))
    assert limits.min_seconds(Work(operations=8e9, arithmetic="int8")) == pytest.approx(1.0)
    assert limits.min_seconds(Work(operations=8e9)) == pytest.approx(8.0)
    best = limits.best_of(Limits(1, ((1 << 20, 3e9),), 2e9, (("int8", 9e9),)))
    assert (best.bandwidth, best.operations, best.rate("int8")) == (((1 << 20, 4e9),), 2e9, 9e9)


def test_measure_limits_returns_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "SIZES", roofline.SIZES[:4])  # 16 MiB: memory itself is slow to fill
    found = roofline.measure_limits.__wrapped__(1)
    sizes = [size for size, _ in found.bandwidth]
    assert sizes == sorted(sizes)
    rates = [rate for _, rate in found.bandwidth]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] > 1e6
    assert 0 < found.operations < found.rate("int8")  # a dot product has four multiply-adds for one of FMA
    assert found.operations > 1e6
    assert roofline.measure_limits.__wrapped__(2).threads == 2


def model(ops: Any, mix: str = "Q8_0") -> Transformer:
    made = checkpoint(Spec("small", SHAPE, mix, 2))
    return load_model(made, ops, read_model_config(made))


def test_matmul_ceiling_one_by_one_use_each_matrix_once() -> None:
    used = list[tuple[tuple[int, ...], Any]]()

    class Recording(ReferenceBackend):
        def linear(self, x: Any, w: Any, bias: Any = None) -> Any:
            used.append((x.shape, w))
            return super().linear(x, w, bias)

    plain = model(Recording())
    out: Any = roofline.matmul_ceiling(plain, 3)()
    layers = [(b.attention.qkv, b.attention.output, b.mlp.gate_up, b.mlp.down) for b in plain.blocks]
    assert [w for _, w in used] == [linear.weight for one in layers for linear in one]
    assert {shape for shape, _ in used} == {(3, 64), (3, 96)}
    np.testing.assert_array_equal(out, ReferenceBackend().logits(roofline._random(3, 64), plain.head))


@pytest.mark.parametrize("mix", ["Q8_0", "Q4_K_M", "F16"])
@pytest.mark.parametrize("rows", [1, 16])
def test_matmul_ceiling_program_ends_with_the_head(mix: str, rows: int) -> None:
    made = model(cpu, mix)
    head, widest = made.head.two_term(), max(96, 64)
    out: Any = roofline.matmul_ceiling(made, rows)()
    x = roofline._random(rows, widest).reshape(-1)[: rows * 64].reshape(rows, 64)
    wanted = head.matmul(x, cpu.threads)
    np.testing.assert_array_equal(out.reshape(-1)[: wanted.size], wanted.reshape(-1))


def test_matmul_ceiling_program_has_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made of the tasks of the single products, in the order of the layers."""
    made, run = model(cpu), list[Any]()
    original = program.Program
    monkeypatch.setattr(program, "Program", lambda some: run.extend(some) or original(some))
    roofline.matmul_ceiling(made, 2)()
    weights = [*made.matrices()[:-1], made.head.two_term()]
    x, out, activations = range(Step.END, Step.END + 3)
    single = [linear_tasks(w, Step.TOKENS, x, activations, out, cpu.threads) for w in weights]
    wanted = [task.args.tolist() for some in single for task in some]
    found = [task.args.tolist() for task in run]
    assert [args for args in found if args in wanted] == wanted


def test_quantize_program_writes_the_int8_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = quantize_activations.allocate(3, 64)
    monkeypatch.setattr(quantize_activations, "allocate", lambda rows, columns: buffers)
    roofline.quantize_program(64, 3, 1)()
    codes, scales = buffers[0][: 3 * 64].reshape(-1, 32), buffers[1][: 3 * 2]
    np.testing.assert_allclose(codes * scales[:, None], roofline._random(3, 64).reshape(-1, 32), atol=0.02)


def test_bandwidth_of_large_data_is_the_faster_of_a_read_and_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def copy_rate(pool: object, data: np.ndarray, threads: int) -> float:
        copied.append(data.nbytes)
        return 1e15

    monkeypatch.setattr(roofline, "_copy_rate", copy_rate)
    monkeypatch.setattr(roofline, "SIZES", (1 << 18, roofline.MIN_COPY_BYTES))
    (_, small), (_, large) = roofline._measure_limits(1).bandwidth
    assert small == large == 1e15  # what fits into a cache is never slower
    assert copied == [roofline.MIN_COPY_BYTES]


def test_copy_rate_counts_bytes_read_and_written() -> None:
    data = np.random.default_rng(2).integers(0, 256, 1 << 20, np.uint8)
    with ThreadPoolExecutor(2) as pool:
        assert roofline._copy_rate(pool, data, 2) > 0
    np.testing.assert_array_equal(data[: 1 << 19], data[1 << 19 :])
