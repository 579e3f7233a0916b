"""How many tokens a step may have: from made-up times, never from this machine's."""

from __future__ import annotations

import pytest

from llm_worker_rbee.engine.token_budget import TokenBudget


def settle(pace: TokenBudget, seconds_per_token: float, fixed: float = 0.0, steps: int = 30) -> int:
    """Steps on a machine of this speed, each as large as the budget says; the budget then."""
    for _ in range(steps):
        tokens = pace.next_budget(has_decodes=True)
        pace.observe(tokens, fixed + tokens * seconds_per_token)
    return pace.next_budget(has_decodes=True)


def near(target: float) -> object:
    """At the target or somewhat below."""
    return pytest.approx(0.87 * target, rel=0.13)


@pytest.mark.parametrize("speed", [1e-4, 1e-3, 2.5e-3, 2e-2])
def test_token_budget_converges_to_target(speed: float) -> None:
    assert settle(TokenBudget(0.1, 2_000), speed) * speed == near(0.1)


@pytest.mark.parametrize(("speed", "budget"), [(1e-6, 512), (5.0, 1)])
def test_token_budget_stays_within_bounds(speed: float, budget: int) -> None:
    assert settle(TokenBudget(0.1, 512), speed) == budget


def test_token_budget_follows_changing_speed() -> None:
    pace = TokenBudget(0.1, 512)
    for speed in (1e-3, 4e-3, 1e-3):
        assert settle(pace, speed) * speed == near(0.1)


def test_token_budget_step_takes_about_target() -> None:
    """Also where a part of a step does not depend on its size."""
    tokens = settle(TokenBudget(0.1, 512), 1e-3, fixed=0.03, steps=60)
    assert 0.03 + tokens * 1e-3 == near(0.1)


def test_token_budget_limits_effect_of_one_slow_step() -> None:
    pace = TokenBudget(0.1, 512)
    known = settle(pace, 1e-3)
    pace.observe(known, 60.0)
    assert pace.next_budget(has_decodes=True) >= known // 2
    pace.observe(100, 0.0)  # a clock that stood still
    assert 1 <= pace.next_budget(has_decodes=True) <= 512


def test_token_budget_without_decodes_is_maximum() -> None:
    pace = TokenBudget(0.1, 300)
    assert pace.next_budget(has_decodes=False) == 300
    assert 1 <= pace.next_budget(has_decodes=True) < 100, "a large first estimate would be felt"
    settle(pace, 1.0)
    assert pace.next_budget(has_decodes=False) == 300
