"""Many requests, one model: `add` and `abort` at any time between steps, `step` until nothing is left to do.

The engine speaks ids only: text, templates and files are other rooms' business. It belongs to one thread at a time
(async_engine.py is how others reach it).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

from ..cache import KVCache
from ..config import EngineConfig
from ..errors import InferenceError, InsufficientMemoryError, InvalidRequestError, WorkerError
from ..models import Transformer
from .async_scheduling import AsyncScheduler, InFlightStep, landed, spans_of
from .model_runner import ModelRunner
from .request import Request, SamplerOutput, ScheduledTokens, StepOutput
from .sampler import sample
from .scheduler import Scheduler
from .speculative import Drafter, NgramDrafter
from .token_budget import TokenBudget


class Engine:
    """A model that serves."""

    def __init__(
        self, model: Transformer, config: EngineConfig, kv_type: str = "float32", drafter: Drafter | None = None
    ) -> None:
        self.model = model
        self.config = config
        self.cache = KVCache(model.ops, model.config, config.n_blocks, config.block_size, kv_type)
        self.scheduler = Scheduler(config)
        self.runner = ModelRunner(model, self.cache, config.max_batch, config.max_context)
        self.drafter = drafter or (NgramDrafter(config.draft_tokens) if config.speculative == "ngram" else None)
        self.token_budget = TokenBudget(config.target_itl_ms / 1000, config.max_step_tokens)
        self.compute: Callable[[list[ScheduledTokens]], SamplerOutput] = self._forward  # null.py has another one
        self._ahead = AsyncScheduler(model, self.runner)
        self._begun: InFlightStep | None = None  # a step whose tokens nobody has seen
        self.num_steps = 0
        self.is_computing = False  # then the books are at rest
        self.is_lost = False  # the device computes no more: every step would fail until the process is started again
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request; `resolve_max_tokens` has checked that it fits."""
        assert self.has_room_for(request), "the request is longer than the context or the KV cache"
        if request.arrival >= 0:
            raise InvalidRequestError("a request can be added once: make another one of it", "request")
        request.arrival = self._arrivals
        self._arrivals += 1
        self.scheduler.add(request)

    def has_room_for(self, request: Request) -> bool:
        """Whether an otherwise idle engine can compute the whole request."""
        cache = self.config.n_blocks * self.config.block_size  # keys and values of the last token are never needed
        return (
            request.max_total_tokens <= min(self.config.max_context, cache + 1) and request.num_prompt_tokens <= cache
        )

    def abort(self, request: Request) -> bool:
        """Forget a request, wherever it is: nothing more comes of it, and what it held is free. Was it here?"""
        return self.scheduler.remove(request)

    def step(self) -> list[StepOutput]:
        """Compute the next tokens of everybody who runs; what came out for whom."""
        self.is_computing = False  # where the last step was interrupted it says otherwise
        outputs = self.scheduler.expire(time.monotonic())
        if self._begun is not None:
            outputs += self._landed(self._begun)
        elif spans := self.scheduler.schedule(self.token_budget.next_budget(has_decodes=self._anybody_answers())):
            outputs += self._computed(spans)
        if self.config.debug:
            self.scheduler.check()
        return outputs

    def _landed(self, begun: InFlightStep) -> list[StepOutput]:
        """The tokens of a step that was begun; the next one is begun before they are waited for."""
        spans, self._begun = spans_of(begun), None
        try:
            self._begun = self._ahead.next(begun, self.scheduler)
            self.is_computing = True
            tokens = begun.later.result()
            self.is_computing = False
        except Exception as error:
            self._begun = None
            return self._failed(spans, error)
        except BaseException:  # Ctrl-C: the tokens were not seen, so what follows them is made again
            self._begun = None
            raise
        if tokens is None:  # too close for the device: the meaning is asked
            self._begun = None
            return self._computed(spans, is_first=False)
        self.num_steps += 1
        return self.scheduler.update(*landed(begun, spans, tokens))

    def _computed(self, spans: list[ScheduledTokens], *, is_first: bool = True) -> list[StepOutput]:
        start = time.perf_counter()
        is_reading = any(span.stop - span.start > 1 + len(span.request.drafts) for span in spans)
        may_begin = is_first and self.drafter is None and self.compute == self._forward
        try:
            self.is_computing = True
            begun = self._ahead.first(spans, self.scheduler) if may_begin else None
            sampled = self.compute(spans) if begun is None else None
            self.is_computing = False
        except Exception as error:
            return self._failed(spans, error)
        if begun is not None:
            return self._landed(begun)
        assert sampled is not None
        outputs = self.scheduler.update(spans, sampled)
        self._draft()
        self._note(spans, is_reading, time.perf_counter() - start)
        return outputs

    def _failed(self, spans: list[ScheduledTokens], error: Exception) -> list[StepOutput]:
        """A step came to nothing, whatever it was: its requests end, the others go on."""
        self.is_computing = False
        self.is_lost = self.is_lost or (not isinstance(error, WorkerError) and self.model.ops.has_failed())
        return self.scheduler.fail(spans, _shown(error))

    def _forward(self, spans: list[ScheduledTokens]) -> SamplerOutput:
        return sample(self.model.ops, spans, self.runner.run(spans))

    def _draft(self) -> None:
        """Guesses for the next step. One that comes to nothing is left out; who breaks is not asked again."""
        if self.drafter is None:
            return
        try:
            self.drafter.draft(self.scheduler.running, self.scheduler.reserve, self.runner.batch)
        except Exception as error:
            for request in self.scheduler.running:
                request.drafts = []
            if isinstance(error, InferenceError):
                return
            self.drafter = None
            warnings.warn(f"no more guesses: the drafter failed: {error}", RuntimeWarning, stacklevel=2)

    def reset(self) -> None:
        """Forget all requests and all that is cached: for who was interrupted while the books were being written."""
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            request.is_finished, request.batch_slot, request.blocks = True, -1, []
        self.scheduler = Scheduler(self.config, self.scheduler.stats)
        self._begun, self.is_computing = None, False

    def _anybody_answers(self) -> bool:
        return any(len(request.ids) > request.num_prompt_tokens for request in self.scheduler.running)

    def _note(self, spans: list[ScheduledTokens], is_reading: bool, seconds: float) -> None:
        self.num_steps += 1
        if is_reading:
            self.token_budget.observe(sum(span.stop - span.start for span in spans), seconds)


def _shown(error: Exception) -> WorkerError:
    if isinstance(error, WorkerError):
        return error
    made: WorkerError = InferenceError(f"the step failed ({type(error).__name__})")  # its text is nobody's business
    if isinstance(error, MemoryError):
        made = InsufficientMemoryError("a step did not fit into memory: use a smaller kv_memory, max_batch or prompt")
    made.__cause__ = error
    return made
