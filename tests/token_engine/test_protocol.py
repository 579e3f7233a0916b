"""What several engines did and have together."""

from __future__ import annotations

import msgspec
import pytest

from llm_worker_rbee.engine.step_time import StepTimeCoefficients, StepTimes
from llm_worker_rbee.token_engine.protocol import EngineStats, add_stats


def stats(num_steps: int, seconds_per_token: float, model: StepTimeCoefficients | None = None) -> EngineStats:
    return EngineStats(
        num_free_blocks=3, num_blocks=4, num_steps=num_steps, seconds_per_prefill_token=seconds_per_token,
        step_times={"decode": StepTimes(num_steps, 1.0, 2.0, 0.5)}, step_time_model=model, num_paused_drafters=1,
        num_state_slots=8, num_used_state_slots=2, num_snapshots=3, num_snapshot_hits=5,
    )  # fmt: skip


def test_add_stats_sums_counters_and_averages_the_model() -> None:
    one = stats(3, 0.01, StepTimeCoefficients(0.1, 0.2, 0.3, 0.4))
    other = stats(4, 0.01, StepTimeCoefficients(0.3, 0.2, 0.1, 0.0))
    new, ended = stats(0, 0.0), stats(5, 0.01, StepTimeCoefficients(9.0))
    ended = msgspec.structs.replace(ended, step_times={"decode": StepTimes(5, 1.0, 1.0), "mixed": StepTimes(1, 7.0)})
    both = add_stats([one, other, new], [ended])
    assert (both.num_steps, both.num_free_blocks, both.num_blocks) == (12, 9, 12)
    assert both.num_paused_drafters == 3, "an engine that has ended pauses nothing"
    assert (both.num_state_slots, both.num_used_state_slots, both.num_snapshots) == (24, 6, 9)
    assert both.num_snapshot_hits == 20
    assert both.seconds_per_prefill_token == pytest.approx(0.005), "two engines prefill twice as fast"
    assert both.step_times == {"decode": StepTimes(12, 4.0, 7.0, 1.5), "mixed": StepTimes(1, 7.0, 0.0, 0.0)}
    assert both.step_time_model == pytest.approx((0.2, 0.2, 0.2, 0.2))


def test_add_stats_of_engines_without_steps_has_no_model() -> None:
    plain = EngineStats(num_free_blocks=1, num_blocks=1)
    assert (add_stats([plain]).step_times, add_stats([plain]).step_time_model) == ({}, None)


def test_stats_survive_the_wire() -> None:
    sent = stats(3, 0.01, StepTimeCoefficients(0.1, 0.2, 0.3, 0.4))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EngineStats) == sent
