"""Limits of the machine: which of two times bounds a call, and rates that are measured."""

from __future__ import annotations

import pytest

from llm_worker_rbee.bench import roofline
from llm_worker_rbee.bench.roofline import Limits, Work

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


def test_measure_limits_returns_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "SIZES", roofline.SIZES[:4])  # 16 MiB: memory itself is slow to fill
    found = roofline.measure_limits.__wrapped__(1)
    sizes = [size for size, _ in found.bandwidth]
    assert sizes == sorted(sizes)
    assert all(rate > 1e6 for _, rate in found.bandwidth)
    assert found.operations > 1e6
    assert roofline.measure_limits.__wrapped__(2).threads == 2
