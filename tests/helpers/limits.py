"""The limits of this machine, measured in half a second: no test asserts a speed."""

from __future__ import annotations

from llm_worker_bench import roofline


def measure_briefly() -> None:
    """Measure with 64 MiB at most, and each rate for a moment."""
    roofline.SIZES, roofline.SECONDS_PER_RATE = roofline.SIZES[:8], 0.01
