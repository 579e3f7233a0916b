"""A stand-in for the model: the tokens of a fixed text, one per step, at a fixed rate.

Requests, blocks, steps and deadlines are the real ones, so that the cost of a server without its model can be measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..errors import InvalidRequestError
from ..sampling_params import TokenLogprob
from .request import SamplerOutput, ScheduledTokens


class DummyModel:
    """For `Engine.replace_model`. A step takes `step_s` seconds from the start of the one before."""

    def __init__(self, tokens: Sequence[int], step_s: float = 0.0) -> None:
        if not tokens:
            raise InvalidRequestError("the text of the dummy model is empty", "tokens")
        self._tokens = list(tokens)
        self._step_s = step_s
        self._due = 0.0

    def __call__(self, scheduled: Sequence[ScheduledTokens]) -> SamplerOutput:
        self._wait()
        sampled = SamplerOutput([])
        for request, _, stop, logits_from in scheduled:
            if request.num_unscored_tokens:
                assert request.prompt_logprobs is not None
                request.prompt_logprobs += map(_certain, request.prompt[logits_from + 1 : stop + 1])
            if stop >= len(request.ids):
                count = len(request.ids) - request.num_prompt_tokens
                tokens = [self._tokens[(count + i) % len(self._tokens)] for i in range(1 + len(request.drafts))]
                sampled.tokens += tokens
                if request.params.logprobs is not None:
                    sampled.logprobs[request] = list(map(_certain, tokens))
        return sampled

    def _wait(self) -> None:
        now = time.perf_counter()
        self._due = max(now, self._due + self._step_s)
        if self._due > now:
            time.sleep(self._due - now)


def _certain(token: int) -> TokenLogprob:
    return TokenLogprob(token, 0.0, ((token, 0.0),))
