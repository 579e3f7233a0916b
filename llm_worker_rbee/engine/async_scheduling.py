"""Async scheduling: the next step is launched before the tokens of the last one have reached the host.

The step after one in flight is scheduled as if that one had been collected: prefills continue, requests are admitted,
and each decode takes the token that the device has sampled for it (`pending_id`). A request that ends with a stop token
is discovered one step late; what was launched for it is discarded: it wrote to a block of its own, and the block's next
owner writes later. Scheduler state changes only when a step is collected, so an in-flight step can be dropped.

A request whose last token is in flight is left out of the step ahead, and the others of its batch go on. So could one
be that needs its token on the host first, as guided decoding would, which does not exist yet.

Steps are not launched ahead where they would preempt a request, or score a prompt; nor while there are drafts, which
follow tokens that the host must know: steps with drafts pay for the host's work between them, which is 0.4 ms for one
request and about 1 ms for 64. draft_control.py pauses drafting where plain steps are faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ..backends.ops import PendingTokens
from ..models import Transformer
from .model_runner import ModelRunner, forward
from .request import Request, SamplerOutput, ScheduledTokens
from .sampler import collect_logprobs, next_row


class InFlightStep(NamedTuple):
    """A step that was launched and not collected."""

    scheduled: list[ScheduledTokens]
    sampled: list[Request]  # the requests that get a token, in the order of the rows of `pending`
    pending: PendingTokens

    def running(self) -> list[ScheduledTokens]:
        """Return what was scheduled, without requests that have finished."""
        return [one for one in self.scheduled if not one.request.is_finished]

    def collect(self, tokens: Sequence[int]) -> SamplerOutput:
        """Return the tokens of the requests that have not finished, with their log-probabilities."""
        kept = [token for request, token in zip(self.sampled, tokens, strict=True) if not request.is_finished]
        logprobs = {
            self.sampled[row]: collect_logprobs([tokens[row]], found)
            for row, found in self.pending.logprobs().items()
            if not self.sampled[row].is_finished
        }
        return SamplerOutput(kept, logprobs)

    @contextmanager
    def assume_collected(self) -> Iterator[None]:
        """Let the scheduler, the runner and the sampler see requests as they are after this step."""
        try:
            for request, start, stop, _ in self.scheduled:
                request.num_in_flight_tokens = stop - start
            for row, request in enumerate(self.sampled):
                request.pending_row = row
            yield
        finally:
            for one in self.scheduled:
                one.request.num_in_flight_tokens, one.request.pending_row = 0, -1


class AsyncScheduler:
    """Launches steps of a model whose backend samples asynchronously."""

    def __init__(self, model: Transformer, runner: ModelRunner) -> None:
        self._model, self._runner = model, runner

    @staticmethod
    def is_supported(model: Transformer) -> bool:
        return model.ops.has_async_sampling and model.fused is not None

    @staticmethod
    def can_launch(scheduled: Sequence[ScheduledTokens]) -> bool:
        """Return whether a step has only prefills and decodes: a prompt that is scored is sampled synchronously."""
        return not any(one.request.num_unscored_tokens for one in scheduled)

    def launch(self, scheduled: list[ScheduledTokens], previous: InFlightStep | None = None) -> InFlightStep:
        """Launch a step; `previous` is in flight, and assumed to be collected."""
        tokens = previous.pending.tokens if previous is not None and previous.sampled else None
        sampled = [one.request for one in scheduled if one.logits_from < one.stop]
        rows = [next_row(request) for request in sampled]
        logits = forward(self._model, self._runner.batch(scheduled, tokens), self._runner.cache)
        return InFlightStep(scheduled, sampled, self._model.ops.sample_async(logits, rows, tokens))
