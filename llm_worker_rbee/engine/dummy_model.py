"""Stands where the model would compute: tokens of a given text, one a step, at a given pace. Requests, blocks, steps
and deadlines are the real ones, so that what a server costs beside the model can be measured; answers mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..errors import InvalidRequestError
from .request import SamplerOutput, ScheduledTokens, TokenLogprob


class DummyModel:
    """An engine's `compute`: a step takes `step_s` from the beginning of the one before, or is late by itself."""

    def __init__(self, tokens: Sequence[int], step_s: float = 0.0) -> None:
        if not tokens:
            raise InvalidRequestError("there is no text to answer with", "tokens")
        self._tokens = list(tokens)
        self._step_s = step_s
        self._due = 0.0

    def __call__(self, spans: Sequence[ScheduledTokens]) -> SamplerOutput:
        """The next token of everybody who has read his prompt."""
        self._wait()
        sampled = SamplerOutput([])
        for request, _, stop, wanted_from in spans:
            if request.num_unscored_tokens:
                assert request.prompt_logprobs is not None
                request.prompt_logprobs += map(_certain, request.prompt[wanted_from + 1 : stop + 1])
            if stop >= len(request.ids):
                made = len(request.ids) - request.num_prompt_tokens
                chosen = [self._tokens[(made + i) % len(self._tokens)] for i in range(1 + len(request.drafts))]
                sampled.tokens += chosen
                if request.params.logprobs is not None:
                    sampled.logprobs[request] = list(map(_certain, chosen))
        return sampled

    def _wait(self) -> None:
        now = time.perf_counter()
        self._due = max(now, self._due + self._step_s)
        if self._due > now:
            time.sleep(self._due - now)


def _certain(token: int) -> TokenLogprob:
    return TokenLogprob(token, 0.0, ((token, 0.0),))
