"""How many tokens a step may schedule, so that decodes beside a prefill get their token in time.

The time of a step is measured, not known: a budget that took twice the target is halved, one that took half of it is
doubled. Without decodes no request waits for a token, and a step is as large as it may be.
"""

from __future__ import annotations

TARGET_FRACTION = 0.8  # of the target: steps vary, and a token costs more the longer its context
EMA_WEIGHT = 0.5  # of the newest step
MIN_STEP_S = 1e-6  # a clock may show less
MAX_CHANGE = 2.0  # from one step to the next: one slow step is not the speed of the machine
FIRST_BUDGET = 64  # a small first estimate is soon corrected, a large one is felt


class TokenBudget:
    """Tokens of the next step, from the seconds per token of recent steps with prefills."""

    def __init__(self, target_s: float, max_tokens: int) -> None:
        self.target_s = target_s
        self.max_tokens = max_tokens
        self.seconds_per_token: float | None = None

    def next_budget(self, has_decodes: bool) -> int:
        if not has_decodes:
            return self.max_tokens
        if self.seconds_per_token is None:
            return min(self.max_tokens, FIRST_BUDGET)
        return max(1, min(self.max_tokens, int(TARGET_FRACTION * self.target_s / self.seconds_per_token)))

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in the time of a step with prefills."""
        new = max(seconds, MIN_STEP_S) / tokens
        if self.seconds_per_token is None:
            self.seconds_per_token = new
            return
        known = self.seconds_per_token
        bounded = min(max(new, known / MAX_CHANGE), known * MAX_CHANGE)
        self.seconds_per_token = known + EMA_WEIGHT * (bounded - known)
