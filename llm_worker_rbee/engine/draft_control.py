"""Whether drafting pays, as measured: a step that verifies drafts takes longer, and none is launched ahead of it.

Decoding with drafts and plain decoding are compared by their tokens per second and request, over windows of steps
without prefill. Drafting comes first, then a window of plain steps; the faster of the two is kept. The other one is
probed now and then, after twice as many steps each time that it loses. The answer depends on the number of requests:
a batch that doubles or halves is measured anew.

A window counts with the mean of the middle half of its groups of steps, so a slow step (a page fault, a compilation)
decides nothing. No arrays and no clock here.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean

GROUP_STEPS, WINDOW_GROUPS = 8, 8
WINDOW_STEPS = GROUP_STEPS * WINDOW_GROUPS
SETTLING_STEPS = 4  # not measured after a switch: the step in flight ends, a draft model catches up
MIN_INTERVAL, MAX_INTERVAL = 256, 8192  # steps from one probe to the next
MIN_GAIN = 1.03  # of the probed mode: less may be noise
MIN_GROUP_S = 1e-9  # a clock may show less


class DraftControl:
    """Decides from the seconds of steps whether the next ones have drafts."""

    def __init__(self) -> None:
        self.is_drafting = True
        self.can_pause = True  # False: drafting is kept on
        self._num_requests = 0  # of the steps that were measured
        self._interval = MIN_INTERVAL  # before the next probe
        self._kept_rate: float | None = None  # of the other mode, while this one is probed
        self._rates: deque[float] = deque(maxlen=WINDOW_GROUPS)  # tokens per second and request of the last groups
        self._tokens = self._seconds = 0.0  # of the present group, tokens per request
        self._restart(WINDOW_STEPS)

    def observe(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """Record a step without prefill: its decoding requests, their new tokens, and its seconds."""
        if not self.can_pause:
            return
        if num_requests >= 2 * self._num_requests or 2 * num_requests <= self._num_requests:
            self._forget(num_requests)
        self._num_steps += 1
        if self._num_steps <= 0:
            return
        self._tokens += num_tokens / num_requests
        self._seconds += seconds
        if self._num_steps % GROUP_STEPS == 0:
            self._rates.append(self._tokens / max(self._seconds, MIN_GROUP_S))
            self._tokens = self._seconds = 0.0
            if self._num_steps >= self._max_steps:
                self._compare()

    def _compare(self) -> None:
        """Begin a probe of the other mode, or end it and keep the faster one."""
        rate, kept_rate = middle_mean(self._rates), self._kept_rate
        if kept_rate is None:
            self._kept_rate = rate
            self._switch(WINDOW_STEPS)
            return
        self._kept_rate = None
        if rate > MIN_GAIN * kept_rate:
            self._interval = MIN_INTERVAL
            self._restart(self._interval)
        else:
            self._switch(self._interval)
        self._interval = min(2 * self._interval, MAX_INTERVAL)

    def _forget(self, num_requests: int) -> None:
        """Measure both modes anew, the kept mode first."""
        self._num_requests, self._interval = num_requests, MIN_INTERVAL
        if self._kept_rate is None:
            self._restart(WINDOW_STEPS)
        else:
            self._kept_rate = None
            self._switch(WINDOW_STEPS)

    def _switch(self, max_steps: int) -> None:
        self.is_drafting = not self.is_drafting
        self._restart(max_steps)

    def _restart(self, max_steps: int) -> None:
        """Measure the present mode for `max_steps` steps before the next comparison."""
        self._max_steps, self._num_steps = max_steps, -SETTLING_STEPS
        self._tokens = self._seconds = 0.0
        self._rates.clear()


def middle_mean(values: deque[float]) -> float:
    """Return the mean of the middle half."""
    left_out = len(values) // 4  # at each end
    return fmean(sorted(values)[left_out : len(values) - left_out])
