"""Async scheduling: the next step is launched before the tokens of the last one have reached the host.

The step after one in flight is scheduled as if that one had been collected: prefills continue, requests are admitted,
and each decode takes the token that the device has sampled for it (`pending_id`). A request that ends with a stop token
is discovered one step late; what was launched for it is discarded: it wrote to a block of its own, and the block's next
owner writes later. Scheduler state changes only when a step is collected, so an in-flight step can be dropped.

Guided requests stay in this pipeline. Their forward pass needs the token in flight only on the device; the mask of the
token after it needs it on the host. So the forward pass is launched ahead as usual, and the step is sampled once the
step before is collected and its tokens are consumed: masks are filled and copied while the forward pass runs. All rows
of such a step are sampled together then. A request whose last token is in flight is left out of the step ahead.

Steps are not launched ahead where they would preempt a request, or score a prompt; nor while there are drafts, which
follow tokens that the host must know: steps with drafts pay for the host's work between them, on an H200 0.26 ms for
one request and 0.53 ms for 64. draft_control.py pauses drafting where plain steps are faster. Tokens that a grammar
forces are drafts only where they save more than that (`forced_drafts_pay`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

from ..backends.ops import Array, PendingTokens, SampleRow
from .model_runner import forward, has_image_tokens
from .request import Request, SamplerOutput, ScheduledTokens, StepOutput
from .sampler import collect_logprobs, next_row
from .step_time import StepSize

DISCARDED_ROW = SampleRow(temperature=0.0)  # of a request that has finished
# Seconds between two steps in which the device waits for the host, if the second is not launched ahead. A step with
# drafts has two of these gaps: before it and after it. Measured on an H200 by benchmarks/guided_steps.py.
GAP_S, GAP_S_PER_REQUEST = 0.26e-3, 0.0042e-3
GAPS_PER_DRAFT_STEP = 2


def forced_drafts_pay(num_drafts: int, num_requests: int, step_s: float | None) -> bool:
    """Return whether a step with `num_drafts` certain drafts saves more time than its gaps take.

    It gives each of `num_requests` requests its next token as any step does, and also the drafts, which saves the time
    of num_drafts / num_requests steps of `step_s` seconds; None: not known yet.
    """
    gaps_s = GAPS_PER_DRAFT_STEP * (GAP_S + GAP_S_PER_REQUEST * num_requests)
    return step_s is not None and num_drafts * step_s > num_requests * gaps_s


def still_running(scheduled: Sequence[ScheduledTokens]) -> list[ScheduledTokens]:
    """Return the scheduled tokens of requests that have not finished."""
    return [item for item in scheduled if not item.request.is_finished]


class LaunchedForward(NamedTuple):
    """A step whose forward pass was launched, not sampled yet."""

    scheduled: list[ScheduledTokens]
    sampled: list[Request]  # the requests that get a token, in the order of the rows of `logits`
    logits: Array

    @property
    def is_guided(self) -> bool:
        """Whether sampling needs masks, and so the tokens of the step before."""
        return any(request.constraint is not None for request in self.sampled)


class InFlightStep(NamedTuple):
    """A launched step that is not collected yet."""

    scheduled: list[ScheduledTokens]
    sampled: list[Request]  # the requests that get a token, in the order of the rows of `pending`
    pending: PendingTokens

    def collect(self, tokens: Sequence[int]) -> SamplerOutput:
        """Return the tokens of the requests that have not finished, with their log-probabilities."""
        kept = [token for request, token in zip(self.sampled, tokens, strict=True) if not request.is_finished]
        logprobs = {
            self.sampled[row]: collect_logprobs([tokens[row]], values)
            for row, values in self.pending.logprobs().items()
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
            for item in self.scheduled:
                item.request.num_in_flight_tokens, item.request.pending_row = 0, -1


class StepEngine(Protocol):
    """The engine's interface for its pipeline."""

    model: Any
    runner: Any
    scheduler: Any
    encoder: Any
    mask_filler: Any
    step_time: Any
    on_schedule: Callable[[], None]

    @property
    def is_drafting(self) -> bool: ...
    def computing(self) -> AbstractContextManager[None]: ...
    def begin_timing(self) -> None: ...
    def observe_launched(self, scheduled: list[ScheduledTokens], num_running: int) -> None: ...
    def run_step(self, scheduled: list[ScheduledTokens]) -> list[StepOutput]: ...
    def update(self, scheduled: list[ScheduledTokens], sampled: SamplerOutput) -> list[StepOutput]: ...
    def fail_step(self, scheduled: list[ScheduledTokens], error: Exception) -> list[StepOutput]: ...
    def max_prefill_tokens(self, decodes: Sequence[ScheduledTokens], start: int) -> int: ...
    def grammar_drafts(self) -> list[tuple[Request, list[int]]]: ...
    def draft(self) -> None: ...


class StepPipeline:
    """The step in flight of an engine, and the launching of the step after it, where the backend samples
    asynchronously."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self.is_enabled = engine.model.ops.has_async_sampling and engine.model.fused is not None
        self.in_flight: InFlightStep | None = None
        self._waits_for_drafts = False  # the step after the one in flight is to have drafts that grammars force

    def can_launch(self, scheduled: Sequence[ScheduledTokens]) -> bool:
        """Return whether a step has only prefills and decodes: prompts are scored and drafts verified synchronously.

        A step with both images and adapters is synchronous too: it runs op by op, where ids cannot be pending.
        """
        is_plain = not any(item.request.num_unscored_tokens or item.request.drafts for item in scheduled)
        if not is_plain or self._engine.is_drafting:
            return False
        has_adapters = any(item.request.adapter_slot >= 0 for item in scheduled)
        return not (has_adapters and has_image_tokens(scheduled))

    def waits_for(self, num_drafts: int) -> bool:
        """Return whether a step with these certain drafts saves more time than launching ahead."""
        self._waits_for_drafts = False
        return self._drafts_pay(num_drafts)

    def launch(self, scheduled: list[ScheduledTokens]) -> list[StepOutput]:
        """Launch a step, and collect it."""
        self._engine.begin_timing()
        try:
            with self._engine.computing():
                self.in_flight = self._sample(self._launch_forward(scheduled))
        except Exception as error:
            return self._engine.fail_step(scheduled, error)
        return self.collect()

    def collect(self) -> list[StepOutput]:
        """Return the outputs of the step in flight; the next one is launched before waiting for its tokens."""
        engine, step, self.in_flight = self._engine, self.in_flight, None
        assert step is not None
        outputs, launched = self._launch_next(step)
        try:
            with engine.computing():
                tokens = step.pending.result()
        except Exception as error:
            self.in_flight = None
            return outputs + engine.fail_step(still_running(step.scheduled), error)
        except BaseException:  # Ctrl-C: the tokens are lost, so the step that follows them is computed again
            self.in_flight = None
            raise
        running = still_running(step.scheduled)
        if tokens is None:  # undecided on the device (near tie): rerun through the reference sampler
            self.in_flight = None
            return outputs + (engine.run_step(running) if running else [])
        engine.observe_launched(step.scheduled, len(running))
        outputs += engine.update(running, step.collect(tokens))
        if launched is not None:
            outputs += self._sample_next(launched)
        if self.in_flight is None:
            engine.draft()
        elif launched is not None:  # the step in flight samples the first of the tokens that a grammar forces
            forced = [len(drafts) - 1 for _, drafts in engine.grammar_drafts() if drafts]
            self._waits_for_drafts = self._drafts_pay(sum(forced))
        return outputs

    def _launch_next(self, step: InFlightStep) -> tuple[list[StepOutput], LaunchedForward | None]:
        """Launch the step after one in flight, if it can be scheduled now, and sample it unless it is guided; return
        the requests that fail by it, and the rows to sample once the step before is collected."""
        engine = self._engine
        with step.assume_collected():
            if engine.is_drafting or self._waits_for_drafts or not engine.scheduler.can_schedule_ahead():
                return [], None
            scheduled = engine.scheduler.schedule(engine.max_prefill_tokens)
            if not (scheduled and self.can_launch(scheduled)):
                return [], None
            engine.on_schedule()
            try:
                with engine.computing():
                    launched = self._launch_forward(scheduled, step)
                    if not launched.is_guided:
                        self.in_flight = self._sample(launched, step)
            except Exception as error:
                return engine.fail_step(scheduled, error), None
        return [], launched if launched.is_guided else None

    def _sample_next(self, launched: LaunchedForward) -> list[StepOutput]:
        """Sample a step whose forward pass runs; return the requests that fail by it."""
        running = still_running(launched.scheduled)
        if not running:
            return []
        try:
            with self._engine.computing():
                self.in_flight = self._sample(launched)
        except Exception as error:
            return self._engine.fail_step(running, error)
        return []

    def _drafts_pay(self, num_drafts: int) -> bool:
        running, predict = self._engine.scheduler.running, self._engine.step_time.predict
        if num_drafts <= 0:
            return False
        size = StepSize("decode", True, len(running), sum(len(request.ids) for request in running))
        return forced_drafts_pay(num_drafts, len(running), predict(size))

    def _launch_forward(
        self, scheduled: list[ScheduledTokens], previous: InFlightStep | None = None
    ) -> LaunchedForward:
        """Launch the forward pass of a step; `previous` is in flight, and assumed to be collected."""
        engine = self._engine
        if engine.encoder is not None:
            engine.encoder.prepare(scheduled)
        sampled = [item.request for item in scheduled if item.logits_from < item.stop]
        batch = engine.runner.batch(scheduled, _tokens_of(previous))
        return LaunchedForward(scheduled, sampled, forward(engine.model, batch, engine.runner.cache))

    def _sample(self, step: LaunchedForward, previous: InFlightStep | None = None) -> InFlightStep:
        """Launch the sampling of a step. A guided one has no `previous`: the step before is collected."""
        rows = self._masked_rows(step.sampled) if step.is_guided else [next_row(request) for request in step.sampled]
        pending = self._engine.model.ops.sample_async(step.logits, rows, _tokens_of(previous))
        return InFlightStep(step.scheduled, step.sampled, pending)

    def _masked_rows(self, requests: Sequence[Request]) -> list[SampleRow]:
        """Return the rows of requests with the masks of their grammars; some may have finished by now."""
        self._engine.mask_filler.start([request for request in requests if not request.is_finished])
        rows = [DISCARDED_ROW if request.is_finished else next_row(request) for request in requests]
        self._engine.mask_filler.wait()
        for row, request in zip(rows, requests, strict=True):
            if request.constraint is not None and not request.is_finished:
                row.mask = request.constraint.masks[0]
        return rows


def _tokens_of(step: InFlightStep | None) -> Array | None:
    """Return the tokens of a step in flight on the device."""
    return step.pending.tokens if step is not None and step.sampled else None
