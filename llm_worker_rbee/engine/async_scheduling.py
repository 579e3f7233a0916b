"""Async scheduling: the next step is launched before the tokens of the last one have reached the host.

Only where nothing can change the batch in between (every request decodes, none can be admitted) and the backend can
feed sampled tokens to its own next step. What was launched for a request that has finished meanwhile is discarded: it
wrote to a block of its own, and the block's next owner writes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..backends.ops import PendingTokens, pending_id
from ..models import Transformer
from .model_runner import ModelRunner, forward
from .request import Request, SamplerOutput, ScheduledTokens
from .sampler import collect_sampled, next_row
from .scheduler import Scheduler


class InFlightStep(NamedTuple):
    """A step that was launched and not collected."""

    requests: list[Request]
    pending: PendingTokens

    def scheduled(self) -> list[ScheduledTokens]:
        """Return the step as the scheduler would have made it, without requests that have finished."""
        running = [request for request in self.requests if not request.is_finished]
        return [ScheduledTokens(r, r.num_computed_tokens, len(r.ids), r.num_computed_tokens) for r in running]

    def collect(self, tokens: Sequence[int], scheduled: Sequence[ScheduledTokens]) -> SamplerOutput:
        """Return the tokens of the requests that are still running."""
        return collect_sampled(self.pending, tokens, self.requests, {one.request for one in scheduled})


class AsyncScheduler:
    """Launches steps of a model whose backend samples asynchronously."""

    def __init__(self, model: Transformer, runner: ModelRunner) -> None:
        self._model, self._runner = model, runner
        self._sample_async = model.ops.sample_async

    @staticmethod
    def is_supported(model: Transformer) -> bool:
        return model.ops.has_async_sampling and model.fused is not None

    def launch(self, scheduled: Sequence[ScheduledTokens], scheduler: Scheduler) -> InFlightStep | None:
        """Launch a step whose input tokens are known; None unless the next one could follow it."""
        if len(scheduled) != len(scheduler.running) or not all(map(_is_plain_decode, scheduled)):
            return None
        requests = [one.request for one in scheduled]
        rows = [next_row(request) for request in requests]
        logits = forward(self._model, self._runner.batch(scheduled), self._runner.cache)
        return InFlightStep(requests, self._sample_async(logits, rows))

    def launch_next(self, step: InFlightStep, scheduler: Scheduler) -> InFlightStep | None:
        """Launch the step after one in flight; None unless every request goes on and has a block for its token."""
        if len(scheduler.running) != len(step.requests) or not scheduler.next_batch_is_unchanged:
            return None
        for request in step.requests:
            known = len(request.ids) + 1  # with the token in flight
            if request.is_finished or known >= request.max_total_tokens or scheduler.reserve(request, known) < known:
                return None
        rows = [next_row(request, pending_id(i)) for i, request in enumerate(step.requests)]
        tokens = step.pending.tokens
        logits = forward(self._model, self._runner.next_batch(step.requests, tokens), self._runner.cache)
        return InFlightStep(step.requests, self._sample_async(logits, rows, tokens))


def _is_plain_decode(scheduled: ScheduledTokens) -> bool:
    """Return whether one token is computed, without drafts."""
    request = scheduled.request
    is_one = scheduled.stop - scheduled.start == 1 and scheduled.stop == len(request.ids)
    return is_one and not (request.drafts or request.num_unscored_tokens)
