"""How many tokens a step may have, so that it ends in time for those who wait for their next token.

The time of a step is measured, not known: a budget that took twice the target is halved, one that took half of it is
doubled. Where nobody answers there is nobody to wait, and a step is as large as it may be.
"""

from __future__ import annotations

AIM = 0.8  # of the target: steps vary, and a token costs more the longer its context
SMOOTHING = 0.5  # weight of the newest step
SHORTEST_STEP_S = 1e-6  # a clock may not see less
LARGEST_CHANGE = 2.0  # from one step to the next: a hiccup of the machine is not its speed


class Pace:
    """Seconds for a token, as steps with prompts in them have lately shown."""

    def __init__(self, target_s: float, most: int) -> None:
        self.target_s = target_s
        self.most = most
        self.seconds_per_token: float | None = None

    def budget(self, anybody_waits: bool) -> int:
        """Tokens for the next step; a first guess that is small is soon corrected, one that is large is felt."""
        if not anybody_waits:
            return self.most
        if self.seconds_per_token is None:
            return min(self.most, 64)
        return max(1, min(self.most, int(AIM * self.target_s / self.seconds_per_token)))

    def took(self, tokens: int, seconds: float) -> None:
        """A step with prompts in it is done."""
        new = max(seconds, SHORTEST_STEP_S) / tokens
        if self.seconds_per_token is None:
            self.seconds_per_token = new
            return
        known = self.seconds_per_token
        bounded = min(max(new, known / LARGEST_CHANGE), known * LARGEST_CHANGE)
        self.seconds_per_token = known + SMOOTHING * (bounded - known)
