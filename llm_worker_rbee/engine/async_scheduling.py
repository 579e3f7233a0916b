"""Steps that begin before the tokens of the step before are known: the device goes on while the host writes its books.

It is done where nothing can come between: everybody answers, nobody can come in, and a backend can feed what it has
chosen to its own next step (`sample_later`). What was begun for a request that has ended meanwhile is forgotten when it
lands: the place that it wrote to was its own, and whoever gets it next writes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..backends.ops import PendingTokens
from ..models import Transformer
from .model_runner import ModelRunner, forward
from .request import Request, SamplerOutput, ScheduledTokens
from .sampler import sample_rows
from .scheduler import Scheduler


class InFlightStep(NamedTuple):
    """A step under way."""

    requests: list[Request]
    later: PendingTokens


class AsyncScheduler:
    """Begins steps of a model, if its backend can."""

    def __init__(self, model: Transformer, runner: ModelRunner) -> None:
        self._model, self._runner = model, runner
        can_sample = model.ops.has_async_sampling and model.fused is not None
        self._sample_async = model.ops.sample_async if can_sample else None

    def first(self, spans: Sequence[ScheduledTokens], scheduler: Scheduler) -> InFlightStep | None:
        """Begin a step whose tokens are known."""
        if self._sample_async is None or len(spans) != len(scheduler.running) or not all(map(_is_plain, spans)):
            return None
        requests = [span.request for span in spans]
        rows = [sample_rows(request)[0] for request in requests]
        logits = forward(self._model, self._runner.batch(spans), self._runner.cache)
        return InFlightStep(requests, self._sample_async(logits, rows))

    def next(self, begun: InFlightStep, scheduler: Scheduler) -> InFlightStep | None:
        """Begin the one after it, if everybody goes on and has room."""
        if (
            len(scheduler.running) != len(begun.requests)
            or not scheduler.next_batch_is_unchanged
            or self._sample_async is None
        ):
            return None
        for request in begun.requests:
            known = len(request.ids) + 1  # with the token that is on its way
            if request.is_finished or known >= request.max_total_tokens or scheduler.reserve(request, known) < known:
                return None
        rows = [replace(sample_rows(request)[0], position=len(request.ids) + 1) for request in begun.requests]
        batch = self._runner.next_batch(begun.requests, begun.later.tokens)
        return InFlightStep(begun.requests, self._sample_async(forward(self._model, batch, self._runner.cache), rows))


def landed(
    begun: InFlightStep, spans: list[ScheduledTokens], tokens: Sequence[int]
) -> tuple[list[ScheduledTokens], SamplerOutput]:
    """What comes of a step for those who are still there."""
    there = {span.request for span in spans}
    kept = [token for request, token in zip(begun.requests, tokens, strict=True) if request in there]
    return spans, SamplerOutput(kept)


def spans_of(begun: InFlightStep) -> list[ScheduledTokens]:
    """A step that was begun, as the scheduler would have it; without those who have ended."""
    alive = [request for request in begun.requests if not request.is_finished]
    return [ScheduledTokens(r, r.num_computed_tokens, len(r.ids), r.num_computed_tokens) for r in alive]


def _is_plain(span: ScheduledTokens) -> bool:
    """One token that ends what is known, and a choice that looks at nothing but its logits."""
    request, p = span.request, span.request.params
    looks_back = (p.repetition_penalty != 1.0 and p.repeat_last_n) or p.presence_penalty or p.frequency_penalty
    return (
        span.stop - span.start == 1
        and span.stop == len(request.ids)
        and not (looks_back or request.drafts or request.num_unscored_tokens)
        and p.logprobs is None
    )
