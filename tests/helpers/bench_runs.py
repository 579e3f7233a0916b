"""Runs for tests, made with the real recorder from seeded numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from llm_worker_bench import statistics
from llm_worker_bench.results import Recorder, Result, Run
from llm_worker_bench.roofline import Limits, Work

LIMITS = Limits(1, tuple((1 << shift, 2e10 - 3e8 * shift) for shift in (18, 20, 22, 24, 26, 28)), 6e10)
FAMILIES = ("rope_forward", "qkv_projection")


def times(middle: float, count: int, seed: int) -> list[float]:
    """Noise of 3%, and every twentieth sample an outlier."""
    rng = np.random.default_rng(seed)
    samples = middle * rng.normal(1.0, 0.03, count)
    samples[::20] *= rng.uniform(1.3, 2.0, len(samples[::20]))
    return [float(sample) for sample in samples]


def micro_result(name: str, tokens: int, seed: int, count: int = 30, factor: float = 1.0) -> Result:
    work = Work(4e5 * tokens + 1e6, 2e5 * tokens**1.5)
    least = LIMITS.min_seconds(work)
    reached = 0.2 + 0.06 * (len(name) % 10)  # of the limit
    samples = times(factor * least / reached, count, seed)
    middle = statistics.estimate(samples).value
    return Result.from_samples(
        name, "s", samples, backend="reference", iterations=10, bytes=work.bytes, operations=work.operations,
        outliers=statistics.outliers(samples)._asdict(), limit_s=least, bound_by=LIMITS.bound_by(work),
        percent_of_limit=100 * least / middle,
    )  # fmt: skip


def micro(seed: int = 1, *, count: int = 30, factor: float = 1.0, commit: str = "a" * 40, day: int = 1) -> Run:
    """Two families at three lengths, one by type, and a loose one: 15 results."""
    recorder = Recorder("micro", {"filter": None, "backend": "reference"}, details={"limits": LIMITS.as_json()})
    for i, family in enumerate(FAMILIES):
        for tokens in (1, 8, 128):
            recorder.add_result(micro_result(f"{family}/{tokens}", tokens, seed + i, count, factor))
    for i, kind in enumerate(("F16", "Q4_0", "Q4_K", "IQ4_XS")):
        for tokens in (1, 128):
            recorder.add_result(micro_result(f"linear/{kind}/{tokens}", tokens, seed + i, count, factor))
    recorder.add_result(micro_result("gguf_open", 4, seed, count, factor))
    return dated(recorder.to_run(), commit, day)


def dated(run: Run, commit: str = "a" * 40, day: int = 1) -> Run:
    moment = f"2026-03-{day:02}T12:00:00+00:00"
    return replace(run, created=moment, commit={"id": commit, "date": moment, "dirty": False})


def run_of(kind: str, results: list[Result], model: dict[str, Any] | None = None, **details: Any) -> Run:
    recorder = Recorder(kind, {"threads": 1}, model, details)
    for result in results:
        recorder.add_result(result)
    return dated(recorder.to_run())


def on_another_machine(run: Run, **changes: Any) -> Run:
    return replace(run, machine={**run.machine, "fingerprint": "0" * 12, **changes})
