"""How many tokens a step may have, so that it ends in time for those who wait for their next token.

The time of a step is measured, not known: a budget that took twice the target is halved, one that took half of it is
doubled. Where nobody answers there is nobody to wait, and a step is as large as it may be.
"""

from __future__ import annotations

TARGET_FRACTION = 0.8  # of the target: steps vary, and a token costs more the longer its context
EMA_WEIGHT = 0.5  # weight of the newest step
MIN_STEP_S = 1e-6  # a clock may not see less
MAX_CHANGE = 2.0  # from one step to the next: a hiccup of the machine is not its speed


class TokenBudget:
    """Seconds for a token, as steps with prompts in them have lately shown."""

    def __init__(self, target_s: float, most: int) -> None:
        self.target_s = target_s
        self.most = most
        self.seconds_per_token: float | None = None

    def next_budget(self, has_decodes: bool) -> int:
        """Tokens for the next step; a first guess that is small is soon corrected, one that is large is felt."""
        if not has_decodes:
            return self.most
        if self.seconds_per_token is None:
            return min(self.most, 64)
        return max(1, min(self.most, int(TARGET_FRACTION * self.target_s / self.seconds_per_token)))

    def observe(self, tokens: int, seconds: float) -> None:
        """A step with prompts in it is done."""
        new = max(seconds, MIN_STEP_S) / tokens
        if self.seconds_per_token is None:
            self.seconds_per_token = new
            return
        known = self.seconds_per_token
        bounded = min(max(new, known / MAX_CHANGE), known * MAX_CHANGE)
        self.seconds_per_token = known + EMA_WEIGHT * (bounded - known)
