"""Drafting is paused where plain steps are faster: decided from seconds that are made up here."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import groupby

import pytest

from llm_worker_rbee.engine.draft_control import MAX_INTERVAL, MIN_INTERVAL, SETTLING_STEPS, WINDOW_STEPS, DraftControl

FIRST = WINDOW_STEPS + SETTLING_STEPS  # steps of a window, with those after a switch that do not count


def simulate(
    control: DraftControl, steps: int, gain: float, requests: int = 1, slow: Callable[[int], float] = lambda step: 1.0
) -> list[bool]:
    """Return whether each step had drafts: these take twice as long and give `2 * gain` tokens of each request; `slow`
    is by how much a step is slowed down."""
    modes, tokens = [], 0.0
    for step in range(steps):
        modes.append(control.is_drafting)
        tokens += requests * (2 * gain if control.is_drafting else 1)
        control.observe(requests, int(tokens), (0.002 if control.is_drafting else 0.001) * slow(step))
        tokens -= int(tokens)
    return modes


def runs(modes: list[bool]) -> list[tuple[bool, int]]:
    return [(mode, len(list(group))) for mode, group in groupby(modes)]


def test_drafting_is_on_first_and_paused_where_it_loses() -> None:
    control = DraftControl()
    modes = simulate(control, 20_000, 0.8)
    paused = [length for mode, length in runs(modes) if not mode][:-1]
    probes = [length for mode, length in runs(modes) if mode]
    assert probes == [FIRST] * len(probes)
    # the first window of plain steps goes over into the pause; probes become rarer, but never cease
    settled = MIN_INTERVAL + SETTLING_STEPS
    assert paused[0] == FIRST + settled
    expected = [min(2**i * MIN_INTERVAL, MAX_INTERVAL) + SETTLING_STEPS for i in range(1, len(paused))]
    assert paused[1:] == expected
    assert expected[-1] == MAX_INTERVAL + SETTLING_STEPS


def test_drafting_stays_on_where_it_pays() -> None:
    modes = simulate(DraftControl(), 20_000, 1.5)
    plain = [length for mode, length in runs(modes) if not mode]
    assert plain == [FIRST] * len(plain)
    assert 4 < len(plain) < 10
    assert modes.count(True) > 0.95 * len(modes)


@pytest.mark.parametrize(("gain", "is_drafting"), [(0.99, True), (1.01, True), (0.95, False)])
def test_small_differences_change_nothing(gain: float, is_drafting: bool) -> None:
    control = DraftControl()
    simulate(control, 2 * FIRST + 1, gain)
    assert control.is_drafting == is_drafting


@pytest.mark.parametrize(("gain", "is_drafting"), [(0.85, False), (1.15, True)])
@pytest.mark.parametrize("drafted", [False, True])
def test_slow_steps_do_not_decide(gain: float, is_drafting: bool, drafted: bool) -> None:
    """Two steps of either window take 1,000 times as long; all vary by a tenth."""
    draw, first = random.Random(1), 0 if drafted else FIRST
    control = DraftControl()
    slow = {first + 20, first + 50}
    simulate(control, 2 * FIRST + 1, gain, slow=lambda step: 1_000 if step in slow else draw.uniform(0.9, 1.1))
    assert control.is_drafting == is_drafting


def test_paused_drafting_is_resumed_when_it_pays() -> None:
    control = DraftControl()
    simulate(control, 2_000, 0.5)
    assert not control.is_drafting
    modes = simulate(control, MAX_INTERVAL, 1.5)
    assert control.is_drafting
    resumed = modes.index(True)
    # the next doubt comes soon: the answer is new
    assert runs(modes[resumed:])[0] == (True, FIRST + MIN_INTERVAL + SETTLING_STEPS)


@pytest.mark.parametrize("change", [2.0, 0.5])
def test_batch_that_doubles_or_halves_is_measured_anew(change: float) -> None:
    control = DraftControl()
    simulate(control, 5_000, 0.5, requests=8)
    assert not control.is_drafting
    modes = simulate(control, 2 * FIRST + 1, 1.5, requests=int(8 * change))
    assert runs(modes) == [(False, FIRST), (True, FIRST + 1)]
    # and a change by less is not
    unchanged = simulate(control, MIN_INTERVAL, 0.5, requests=int(8 * change) + 1)
    assert runs(unchanged) == [(True, MIN_INTERVAL)]


def test_batch_that_changes_during_a_probe_ends_it() -> None:
    control = DraftControl()
    simulate(control, FIRST + 10, 1.0, requests=4)
    assert not control.is_drafting
    modes = simulate(control, FIRST, 1.0, requests=8)
    assert modes == [False] + [True] * (FIRST - 1)


def test_more_requests_in_a_window_do_not_decide() -> None:
    """Tokens count for each request: of a device on which steps take the same time, a larger batch is not faster."""
    control = DraftControl()
    simulate(control, FIRST, 1.2, requests=10)
    assert not control.is_drafting
    simulate(control, FIRST + 1, 1.2, requests=19)
    assert control.is_drafting


def test_drafting_can_be_kept_on() -> None:
    control = DraftControl()
    control.can_pause = False
    assert all(simulate(control, 5_000, 0.1))


def test_steps_of_no_duration_are_no_error() -> None:
    control = DraftControl()
    for _ in range(1_000):
        control.observe(1, 1, 0.0)
